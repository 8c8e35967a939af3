"""The present world of a rank: its number, its nodes, and who hears of another one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import MeshShape
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS, dense_sharding_name
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import ExpertParallelCallback, FixedWorld, Worlds, call_hook


class Recorder(ExpertParallelCallback):
    def __init__(self, name: str, calls: list[tuple[str, ...]]) -> None:
        self.name, self.calls = name, calls

    def on_before_experts_move(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append((self.name, "moves", trainer, pl_module))

    def on_stale_experts(self, trainer: Any, pl_module: Any, versions: Any) -> None:
        self.calls.append((self.name, "stale", versions))


def world_of(rank: int, size: int) -> World:
    return World.offline(rank, size, torch.device("cpu"))


def test_hooks_are_called_in_the_order_of_the_callbacks() -> None:
    calls: list[Any] = []
    callbacks = [Recorder("a", calls), Callback(), ExpertParallelCallback(), Recorder("b", calls)]
    trainer, module = SimpleNamespace(callbacks=callbacks), pl.LightningModule()
    module._trainer = trainer  # type: ignore[assignment]
    arguments: dict[str, list[Any]] = {"on_stale_experts": [{(0, 1): 2}], "on_recovered": ["report"]}
    for name, hook in vars(ExpertParallelCallback).items():
        if name.startswith("on_"):
            call_hook(module, hook, *arguments.get(name, []))
    assert calls == [
        ("a", "moves", trainer, module), ("b", "moves", trainer, module),
        ("a", "stale", {(0, 1): 2}), ("b", "stale", {(0, 1): 2}),
    ]  # fmt: skip


def test_a_module_without_a_trainer_has_no_hooks() -> None:
    call_hook(pl.LightningModule(), ExpertParallelCallback.on_world_changed)


def test_a_fixed_world_has_what_steps_and_callbacks_use_of_an_elastic_one() -> None:
    for name, own in vars(FixedWorld).items():
        if inspect.isfunction(own):
            assert inspect.signature(own) == inspect.signature(getattr(ElasticWorlds, name)), name
    fixed = FixedWorld()
    assert [fixed.is_newcomer, fixed.change_is_due, fixed.has_rolled_back, fixed.is_broken] == [False] * 4
    assert not fixed.request_departure(0, "it is slow")
    assert fixed.protection() is None


def test_a_world_that_nobody_joined_has_no_place() -> None:
    worlds = Worlds()
    assert not worlds.is_joined
    worlds.set_present(world_of(2, 4))
    assert worlds.is_joined
    assert (worlds.present.nodes, worlds.present.node_peers, worlds.present.generation) == ((0, 1, 2, 3), (2,), 0)


def test_the_questions_about_peers_are_answered_as_their_table_says() -> None:
    alone, apart = World.single(), world_of(1, 4)
    together = replace(apart, dense=MagicMock())
    for name, world, is_elastic in (
        ("alone", alone, False),
        ("one of a fixed number", together, False),
        ("one of a changing number", together, True),
        ("the last one left", alone, True),
        ("a newcomer, without state", apart, True),
    ):
        worlds = Worlds()
        worlds.set_present(world)
        if is_elastic:
            worlds.allow_changes()
        answers = (worlds.present.size > 1, worlds.present.is_connected, worlds.may_have_peers, worlds.is_elastic)
        row = next(line for line in inspect.getdoc(Worlds).splitlines() if line.strip().startswith(name + "  "))  # type: ignore[union-attr]
        assert row.split()[-4:] == ["yes" if answer else "no" for answer in answers]


def test_nodes_are_numbered_by_their_names() -> None:
    layout = Worlds().layout("xyx")
    assert layout.nodes == (0, 1, 0)
    assert World.offline(2, 3, torch.device("cpu"), layout).node_peers == (0, 2)


def test_ranks_that_shall_share_a_copy_must_be_there() -> None:
    worlds = Worlds(MeshShape(pp=2), shard_size=3)
    with pytest.raises(ConfigurationError, match="shard_size=3 is more than the 2 ranks of a stage: use at most 2, or"):
        worlds.layout("abcd")
    worlds.layout("abcdef")
    worlds.allow_changes()
    worlds.layout("abcd")


@pytest.mark.parametrize("like", ["zero1", "fsdp"])
def test_a_size_of_copies_is_refused_by_a_sharding_of_a_plugin_that_has_none(
    like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DENSE_SHARDINGS._members, "mine", DENSE_SHARDINGS[like])
    with pytest.raises(ConfigurationError, match="shard_size=2 is for dense=hsdp, not dense=mine: drop one of them"):
        dense_sharding_name("mine", 2)


def test_axes_of_the_mesh_stay_from_world_to_world() -> None:
    worlds = Worlds(MeshShape(cp=2), "hsdp")
    assert worlds.layout("abcd").shape == MeshShape(dp=2, cp=2)
    with pytest.raises(ConfigurationError, match="needs a multiple of 2 ranks, not 3"):
        worlds.layout("abc")
    worlds.allow_changes()
    passing = worlds.layout("abc")
    assert (passing.shape, passing.shards) == (MeshShape(dp=3), ()), "every rank has all, so that one may leave"
    for size, spares in ((1, 0), (2, 0), (3, 1), (4, 0)):
        worlds.set_present(world_of(0, size))
        assert worlds.spares == spares


@pytest.mark.parametrize(
    ("willing", "staying"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),  # rank 4 had no place
        ([0, 2, 3], [0, 2]),
        ([2], [2]),  # it waits for others
        ([], []),
    ],
)
def test_the_first_ranks_that_the_axes_divide_stay(willing: list[int], staying: list[int]) -> None:
    assert Worlds(MeshShape(tp=2)).staying(willing) == staying


# ----------------------------------------------------------------------
# What pipelines refuse in elastic runs.


def test_what_worlds_cannot_bring_across_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = Worlds(MeshShape(pp=2))
    worlds.allow_changes()
    worlds.set_present(world_of(0, 2))
    monkeypatch.setitem(DENSE_SHARDINGS._members, "mine", DENSE_SHARDINGS["ddp"])
    for dense in ("ddp", "zero1", "fsdp", "hsdp"):
        TrainState(worlds, dense=dense).set_module(*[MagicMock()] * 3)
    with pytest.raises(ConfigurationError, match=r"mesh\.pp=2 and dense=mine do not go together: use dense=ddp, zero1"):
        TrainState(worlds, dense="mine").set_module(*[MagicMock()] * 3)


def test_an_optimizer_of_another_fit_is_named() -> None:
    state = TrainState(Worlds(MeshShape()), dense="ddp")
    with pytest.raises(ConfigurationError, match="optimizers were replaced during a fit"):
        state.number_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


# ----------------------------------------------------------------------
# End of a worker: registered functions run, and nothing that could report or abort is taken down first.


_ENDING = """
import atexit, sys, threading
from moe_lightning.elastic.worker import leave

class Leak:
    def __del__(self):
        print("leaked", flush=True)  # as bindings do of what the interpreter takes down

leak = Leak()
atexit.register(lambda: print("registered", hasattr(sys, "last_value")))
if sys.argv[1] == "0":  # else it would not be waited for
    threading.Thread(target=lambda: print("a thread")).start()
print("last words", end=" ")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_nothing_is_taken_down(code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDING, str(code)], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stderr == ""
    assert "last words" in ended.stdout
    assert code or "a thread" in ended.stdout
    assert f"registered {code != 0}" in ended.stdout
    assert "leaked" not in ended.stdout
