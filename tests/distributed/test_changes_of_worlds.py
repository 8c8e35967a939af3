"""State that ranks transfer from world to world: all values of all ranks after a change are those before it.

Ranks meet in a file, without a launcher: it is planned which process trains in which world.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from moe_lightning import FaultRecovery, GPTModule, OptimizerConfig
from moe_lightning.elastic.membership import MEMBERSHIPS, ElasticSettings, ElasticTask, Members, new_member_id
from moe_lightning.elastic.worker import Preempted, RunFinished
from moe_lightning.parallel.abort import store_barrier
from moe_lightning.parallel.context import World
from moe_lightning.state.tensors import cut_of, local
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS
from moe_lightning.strategies.worlds import ExpertParallelCallback
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, RandomTokens, make_trainer
from tests.forks import PATIENCE_S
from tests.parameters import slow

MODEL: dict[str, Any] = {**TINY, "tie_embeddings": False, "router": {"bias_update_rate": 0.01}}
Values = dict[str, np.ndarray]
Kept = tuple[dict[int, Values], dict[int, Values]]
"""Values of a rank before and after changes of the world, by its number."""

STEPS = 3
CHANGES = (1, 2)
"""Steps after which the worlds change."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of several worlds, by default three: to the processes of the first one others come, then some leave.

    Attributes:
        worlds: processes of each, in the order of ranks.
        changes: steps after which they change.
        is_lost: those that leave are lost, instead of leaving on notice.
        strategy: its options.
    """

    worlds: tuple[tuple[int, ...], ...] = ((0, 1), (0, 1, 2), (1, 2))
    changes: tuple[int, ...] = CHANGES
    is_lost: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    recovery: dict[str, Any] = field(default_factory=dict)


EVEN = ((0, 1), (0, 1, 2, 3), (2, 3))
RUNS = {
    "ddp": Run(is_lost=True),
    "zero1": Run(strategy={"dense": "zero1"}),
    "ddp of a plugin": Run(strategy={"dense": "copies"}),
    "fsdp": Run(strategy={"dense": "fsdp"}),
    "pp zero1": Run(strategy={"mesh": {"pp": 2}, "dense": "zero1", "micro_batches": 2}, worlds=EVEN),
    "zero1, replay": Run(strategy={"dense": "zero1"}, recovery={"optimizer_replay": True}, is_lost=True),
    "hsdp": Run(strategy={"dense": "hsdp", "shard_size": 2}, worlds=((0, 1, 2), (0, 1, 2, 3), (1, 2, 3)), is_lost=True),
    "tp zero1": Run(strategy={"mesh": {"tp": 2}, "dense": "zero1"}, worlds=EVEN),
    "pp": Run(strategy={"mesh": {"pp": 2}, "micro_batches": 2}, worlds=EVEN),
}
QUICK, SLOW = tuple(RUNS)[:5], tuple(RUNS)[5:]


class Copies:
    """Sharding of a plugin, with nothing but what the protocol asks for: all ranks have all states."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self.owners: dict[nn.Parameter, int] = {}

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None: ...


class PlannedMembership:
    """Membership of a process in planned worlds.

    Attributes:
        is_due: the next world is due.
    """

    def __init__(self, worlds: tuple[tuple[int, ...], ...], store: Any, task: ElasticTask, multiple: int, /) -> None:
        self._worlds, self.task, self.store = worlds, task, store
        self.number = next(number for number, world in enumerate(worlds) if task.slot in world) - 1
        self.reason: str | None = None
        self.notice: str | None = None
        self.is_due = False
        self._abort: Callable[[], None] | None = None

    def world_exists(self) -> bool:
        return self.number >= 0

    def has_newcomers(self) -> bool:
        return self.is_due

    def join(self, *, is_ready: bool = False, is_spare: bool = False) -> Members:
        self.number += 1
        self.reason, self.is_due = None, False
        world = self._worlds[self.number]
        ids = tuple(new_member_id(f"node{slot}", f"worker{slot}", slot) for slot in world)
        return Members(number=self.number + 1, ids=ids, rank=world.index(self.task.slot))

    def guard(self, members: Members, abort: Callable[[], None]) -> None:
        self._abort = abort

    def abort(self, reason: str) -> None:
        if self._abort is not None:
            self._abort()

    def withdraw_if_early(self) -> bool:
        return False

    def is_finished(self) -> bool:
        return False

    is_late = is_finished

    def wait_for_cause(self) -> str | None:
        return None

    def record_progress(self) -> None: ...

    def finish(self) -> None: ...

    def record_call(self, *, is_running: bool) -> None: ...

    def listen(self) -> None: ...

    def close(self, failure: str | None = None) -> None: ...


class Changing(ExpertParallelCallback):
    """Changes the world, and keeps the values of this rank before and after.

    Attributes:
        before, after: values by the number of the world.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.before: dict[int, Values] = {}
        self.after: dict[int, Values] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        elastic: Any = trainer.strategy.elastic  # type: ignore[attr-defined]
        engine: PlannedMembership = elastic.engine
        number, world = engine.number, self._run.worlds[engine.number]
        due = [*self._run.changes, STEPS + 1][number] - trainer.global_step
        loses = number == 1 and self._run.is_lost
        if due == 1 and not loses:  # the ranks agree on it in the step that begins
            self._announce(engine)
        elif due == 0:
            self.before[number] = values_of(trainer)
            if loses:
                store_barrier(engine.store, "lose a rank", len(world), PATIENCE_S)
                if self._leaves(engine):
                    raise Preempted("it is lost")
                engine.reason = "a rank was lost"
                raise dist.DistNetworkError(engine.reason)

    def on_recovered(self, trainer: pl.Trainer, *_: Any) -> None:
        elastic: Any = trainer.strategy.elastic  # type: ignore[attr-defined]
        engine: PlannedMembership = elastic.engine
        self.after[engine.number] = values_of(trainer)
        if trainer.global_step in self._run.changes[engine.number :]:  # this world makes no step
            self._announce(engine)

    def _announce(self, engine: PlannedMembership) -> None:
        engine.is_due, engine.notice = True, "it leaves" if self._leaves(engine) else None

    def _leaves(self, engine: PlannedMembership) -> bool:
        return engine.task.slot not in self._run.worlds[engine.number + 1]


@torch.no_grad()
def values_of(trainer: pl.Trainer) -> Values:
    """Return a copy of each parameter, optimizer state and buffer of this rank by its name: rows of experts one by one,
    and the whole of what ranks have rows of. Collective.
    """
    strategy: Any = trainer.strategy
    module, found = strategy.lightning_module, dict[str, Any]()
    for name, parameter in module.named_parameters():
        if parameter.is_meta:  # of another stage
            continue
        stack = strategy.experts.stack_of.get(parameter)
        state = next((o.state[parameter] for o in trainer.optimizers if parameter in o.state), {})
        cut = cut_of(parameter)
        part = "" if cut is None or not cut.sections else f" part {strategy.world.row_cut.part.tensor}"
        for scope, value in {"weight": parameter.detach(), **state}.items():
            if stack is None:
                found[f"{name}{part}/{scope}"] = whole(torch.as_tensor(value), parameter)
            elif torch.as_tensor(value).ndim == 0:
                found[f"{name} of experts/{scope}"] = value
            else:
                found |= {f"{name} of expert {expert}/{scope}": value[slot] for slot, expert in stack.held()}
    found |= {f"{name}/buffer": buffer for name, buffer in module.named_buffers()}
    return {key: np.array(value) for key, value in found.items()}


def whole(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Gather a value of the shape of a parameter, of which torch has put rows on other ranks."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    shape: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local(value), parameter.device_mesh, parameter.placements, **shape).full_tensor()


def take_part(name: str, worlds: tuple[tuple[int, ...], ...], slot: int, file: Path) -> None:
    """Let the next fit of this process train in planned worlds, whose processes meet in a file.

    Args:
        name: of the plan, another one for each.
    """
    MEMBERSHIPS.register(name)(partial(PlannedMembership, worlds, dist.FileStore(str(file), -1)))
    settings = ElasticSettings(build_timeout_s=PATIENCE_S, hang_timeout_s=2 * PATIENCE_S, membership=name)
    place: dict[str, Any] = {"node": f"node{slot}", "slot": slot, "expected": len(worlds[0])}
    task = ElasticTask(address="none", secret_file="none", settings=settings, **place)
    os.environ.update(task.to_environment())


def train_in_worlds(rank: int, world_size: int, runs: dict[str, Run]) -> dict[str, Kept]:
    """Train in the worlds of each run that have this process."""
    folder, found = Path.cwd(), dict[str, Kept]()
    store = dist.FileStore(str(folder / "runs"), -1)
    DENSE_SHARDINGS.register("copies")(Copies)
    for name, run in runs.items():
        store_barrier(store, f"begin {name}", world_size, PATIENCE_S)  # all have left the former groups' collectives
        if dist.is_initialized():
            dist.destroy_process_group()
        if all(rank not in world for world in run.worlds):
            continue
        take_part(name, run.worlds, rank, folder / name)
        changing = Changing(run)
        callbacks = [changing, FaultRecovery(**run.recovery)]
        trainer = make_trainer(rank, world_size, run.strategy, max_steps=STEPS, callbacks=callbacks)
        module = GPTModule(MODEL, OptimizerConfig(lr=3e-3, warmup_steps=2))
        with suppress(Preempted) if rank not in run.worlds[-1] else nullcontext():
            trainer.fit(module, DataLoader(RandomTokens(), batch_size=12, shuffle=True))
            assert trainer.global_step == STEPS
        found[name] = changing.before, changing.after
    return found


def check_values(former: Values, kept: Sequence[Values], run: Run, world: int) -> None:
    """Check that each value from before is on as many ranks of a world as shall have it.

    Args:
        kept: values of each rank of that world.
        world: its number.
    """
    held = Counter[str]()
    for values in kept:
        for key, value in values.items():
            held[key] += 1
            np.testing.assert_array_equal(value, former[key], key)
    mesh = run.strategy.get("mesh", {})
    ranks = len(run.worlds[world]) // mesh.get("pp", 1)  # of a stage
    for key in former:
        is_expert, is_state = " of expert" in key, not key.endswith(("/weight", "/buffer"))
        if run.strategy.get("dense") == "zero1" and is_state and not is_expert:
            assert held[key] == 1, key
        else:
            copies = ranks // mesh.get("tp", 1) if " part " in key else ranks
            assert held[key] >= (min(2, copies) if is_expert else copies), key


@cache
def trained(names: tuple[str, ...]) -> list[dict[str, Kept]]:
    """Train some runs in the same processes, whose first training takes as long as several others."""
    return run_ranks(4, train_in_worlds, {name: RUNS[name] for name in names})


@pytest.mark.parametrize("change", range(len(CHANGES)), ids=["some join", "some leave"])
@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOW)])
def test_every_value_is_there_in_the_next_world(name: str, change: int) -> None:
    kept = [values[name] for values in trained(QUICK if name in QUICK else SLOW) if name in values]
    former = {key: value for before, _ in kept for key, value in before.get(change, {}).items()}
    check_values(former, [after.get(change + 1, {}) for _, after in kept], RUNS[name], change + 1)


@pytest.mark.parametrize("dense", ["ddp", slow("zero1")])
@pytest.mark.parametrize("axis", ["tp", slow("pp")])
def test_a_rank_without_a_place_stays_for_those_that_leave(axis: str, dense: str) -> None:
    """A third rank joins two, which leave then at once."""
    options = {"mesh": {axis: 2}, "dense": dense} | ({"micro_batches": 2} if axis == "pp" else {})
    run = Run(strategy=options, worlds=((0, 1), (0, 1, 2), (2,), (2, 3)), changes=(1, 1, 1))
    kept = [values["left"] for values in run_ranks(4, train_in_worlds, {"left": run})]
    former = {key: value for before, _ in kept for key, value in before.get(0, {}).items()}
    check_values(former, [after.get(3, {}) for _, after in kept], run, 3)


class Named(GPTModule):
    """Logs the number of each batch under a name that alternates, and a value of the first batch only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
        self.log(f"batch/{'even' if batch_idx % 2 == 0 else 'odd'}", float(batch_idx), **options)
        if batch_idx == 0:
            self.log("batch/first", 5.0, **options)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("batch/end", 300.0, sync_dist=True)


BATCHES = (2, 3)
"""Numbers of batches in an epoch."""


def log_by_name(rank: int, world_size: int, run: Run) -> list[dict[str, float]]:
    found = []
    store = dist.FileStore(str(Path.cwd() / "runs"), -1)
    for batches in BATCHES:
        store_barrier(store, f"begin {batches}", world_size, PATIENCE_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        take_part(f"named {batches}", run.worlds, rank, Path.cwd() / f"named {batches}")
        options: dict[str, Any] = {"max_steps": STEPS, "limit_train_batches": batches}
        trainer = make_trainer(rank, world_size, callbacks=[Changing(run), FaultRecovery()], **options)
        trainer.fit(Named(MODEL, OptimizerConfig(lr=3e-3)), DataLoader(RandomTokens(), batch_size=12))
        metrics = trainer.callback_metrics
        found.append({name: float(value) for name, value in metrics.items() if name.startswith("batch/")})
    return found


@cache
def logged() -> list[list[dict[str, float]]]:
    return run_ranks(3, log_by_name, Run(worlds=((0, 1), (0, 1, 2)), changes=(1,)))


@pytest.mark.parametrize("batches", BATCHES)
def test_a_rank_that_joins_within_an_epoch_averages_what_it_has_logged(batches: int) -> None:
    """It begins with another name than the others, and does not log that of the first batch before the next epoch."""
    found = [metrics[BATCHES.index(batches)] for metrics in logged()]
    averages = {"batch/even": (2 + 2 + 2) / (2 + 2 + 1) if batches == 3 else 0.0, "batch/odd": 1.0, "batch/end": 300.0}
    everywhere = pytest.approx({**averages, "batch/first": 5.0})
    assert found[0] == found[1] == everywhere
    assert found[2] == (pytest.approx(averages) if batches == 3 else everywhere)


class Left(PlannedMembership):
    """Membership of a process that the others have left behind: they have finished the run."""

    def is_late(self) -> bool:
        return True


def train_below_min_ranks(rank: int, world_size: int, mesh: dict[str, int]) -> tuple[int, str]:
    """Return how many steps this rank makes alone after the others have finished, and why it makes no more."""
    MEMBERSHIPS.register("left")(partial(Left, ((0,),), dist.FileStore(str(Path.cwd() / "left"), -1)))
    settings = ElasticSettings(min_ranks=2, join_timeout_s=0.1, membership="left")
    task = ElasticTask(address="none", secret_file="none", settings=settings, node="node0", slot=0, expected=1)
    os.environ.update(task.to_environment())
    if dist.is_initialized():
        dist.destroy_process_group()
    strategy = {"mesh": mesh, "micro_batches": 2} if mesh else {}
    trainer = make_trainer(rank, 1, strategy, max_steps=STEPS, callbacks=[FaultRecovery()])
    reason = ""
    try:
        trainer.fit(GPTModule(MODEL, OptimizerConfig(lr=3e-3)), DataLoader(RandomTokens(), batch_size=12))
    except RunFinished as end:
        reason = str(end)
    return trainer.global_step, reason


@pytest.mark.parametrize(
    ("mesh", "end"),
    [
        ({}, (STEPS, "")),
        slow({"pp": 2}, (0, "the others have finished the run, and strategy.mesh needs more ranks than are left")),
    ],
    ids=["ddp", "pp"],
)
def test_who_is_left_by_others_that_have_finished_repeats_the_end_of_the_training(
    mesh: dict[str, int], end: tuple[int, str]
) -> None:
    assert run_ranks(1, train_below_min_ranks, mesh) == [end]
