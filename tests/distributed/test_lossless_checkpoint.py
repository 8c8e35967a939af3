"""Lossless windows of sparse snapshots in real trainings: whatever is killed and wherever, the run ends bit for bit as
one that nobody disturbed, with all moments, and no token is lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.agent_handle import agent_alive, request_stop
from moe_lightning.checkpoint.arena import digest_of
from moe_lightning.checkpoint.directory import run_of
from moe_lightning.checkpoint.loader import Checkpoint, find_usable
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError
from tests.agents import agent_ahead
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.test_partial_checkpoint import arenas_of, session_of
from tests.distributed.training import DrawNoise, train
from tests.forks import kill, wait_until
from tests.parameters import slow

EXPERTS = 8
NOISY = {
    "num_experts": EXPERTS,
    "dropout": 0.1,
    "router": {"top_k": 2, "noisy_top_k": True, "jitter": 0.01, "bias_update_rate": 0.01},
}
TRAINER = {"enable_checkpointing": True, "accumulate_grad_batches": 2, "val_check_interval": 6}
OPTIONS: dict[str, Any] = {"model": NOISY, "validate": True, "dataset_size": 200, "optimizer": {"decay": "linear"}}


class Diary(pl.Callback):
    """What rank 0 sees: a line for each step with its loss, and at the end all state of all ranks by digests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 0:
            line = json.dumps([trainer.global_step, float(trainer.callback_metrics["train/loss"])])
            with (self.folder / "losses").open("a") as file:
                file.write(line + "\n")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        pieces = strategy.state.training_state().pieces()
        digests = {
            f"{p.key}@{p.first_row}": digest_of(p.tensor.contiguous().flatten().view(torch.uint8)) for p in pieces
        }
        (self.folder / f"state-{trainer.global_rank}").write_text(json.dumps(digests, sort_keys=True))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PartialExpertsCheckpoint):
                (self.folder / f"plt-{trainer.global_rank}").write_text(str(callback.plt))


class KillLater(pl.Callback):
    """kill -9 of every rank some time after the end of a micro-batch of this life."""

    def __init__(self, batches: int, delay_s: float) -> None:
        self.batches, self.delay_s = batches, delay_s

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


class WaitForWriter(pl.Callback):
    """Goes on only when what was saved after these steps is on storage: a writer that is slow passes over some."""

    def __init__(self, root: Path, *steps: int) -> None:
        self.root, self.steps = root, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        saved, deadline = trainer.global_step - 1, time.monotonic() + 60
        while saved in self.steps and not ((found := newest(self.root)) and found.step >= saved):
            assert time.monotonic() < deadline, f"step {saved} is not on storage"
            time.sleep(0.02)


def saver(root: Path, **options: Any) -> PartialExpertsCheckpoint:
    return PartialExpertsCheckpoint(str(root), **{"every_n_steps": 1, "k_snapshot": 1, "lossless": True, **options})


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "checkpoints"
    yield root
    if root.exists() and run_of(root):
        shutil.rmtree(arenas_of(root), ignore_errors=True)


def live(
    folder: Path,
    world_size: int,
    callbacks: Sequence[pl.Callback],
    *,
    draws: bool = True,
    pooled: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """One start of a run.

    Args:
        draws: it depends on torch's global generator, which ranks that the checkpoint does not know cannot continue.
    """
    noise = [DrawNoise()] if draws else []
    function = partial(train, callbacks=[Diary(folder), *noise, *callbacks], **{**OPTIONS, **options})
    results: list[dict[str, Any]] = run_ranks(world_size, function, pooled=pooled)
    return results


def lose_everything(
    root: Path, world_size: int, callbacks: Sequence[pl.Callback], *, is_written: bool = False, **options: Any
) -> None:
    """One start of a run whose ranks are killed, and with them their agent and all that was in memory.

    Args:
        is_written: the agent first writes what it has.
    """
    agent = agent_ahead(root)
    with pytest.raises(RankFailure, match=r"died without a word|onnection"):
        live(root.parent, world_size, callbacks, **options)
    if is_written:
        request_stop(arenas_of(root))
        wait_until(lambda: not agent_alive(arenas_of(root)))  # another one serves once experts have moved
    kill([agent])
    shutil.rmtree(arenas_of(root), ignore_errors=True)


def finish(root: Path, world_size: int, callbacks: Sequence[pl.Callback], **options: Any) -> list[dict[str, Any]]:
    """The last start of a run."""
    agent = agent_ahead(root)
    results = live(root.parent, world_size, callbacks, **options)
    agent.join(60.0)
    assert agent.exitcode == 0
    return results


def newest(root: Path) -> Checkpoint | None:
    return find_usable(root).checkpoint


def losses(folder: Path) -> dict[tuple[int, int], float]:
    """(step, micro-batch of it) -> loss; those of a step that was run again must be the same to the bit."""
    found: dict[int, list[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        found.setdefault(step, []).append(loss)
    distinct = {step: sorted(set(values)) for step, values in found.items()}
    return {(step, index): value for step, values in distinct.items() for index, value in enumerate(values)}


def state(folder: Path, world_size: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"state-{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture
def calm(tmp_path: Path) -> Callable[..., Path]:
    """What a run without faults leaves."""

    def run(world_size: int, **options: Any) -> Path:
        folder = tmp_path / f"calm-{world_size}"
        folder.mkdir()
        live(folder, world_size, [], pooled=True, **{"trainer": TRAINER, **options})
        return folder

    return run


def assert_equal(folder: Path, calm: Path, world_size: int) -> None:
    assert losses(folder) == losses(calm)
    assert state(folder, world_size) == state(calm, world_size)
    assert float((folder / "plt-0").read_text()) == 0.0


@pytest.mark.parametrize("kills", [slow(5), pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_everything_is_killed_at_random_moments_and_nothing_is_lost(
    root: Path, calm: Callable[..., Path], kills: int
) -> None:
    steps = min(12 * kills, 600)
    reference = calm(2, steps=steps)
    schedule, done, replayed, at, last = random.Random(kills), 0, 0, None, 0
    while done < kills and (room := 2 * (steps - last) - 2) > 0:
        done += 1
        deadline = min(room, schedule.randrange(6, 70)), schedule.random() * 0.02
        lose_everything(root, 2, [saver(root), KillLater(*deadline)], trainer=TRAINER, ckpt_path=at, steps=steps)
        checkpoint = newest(root)
        if checkpoint is not None:
            at, last = str(root), checkpoint.step
            replayed += checkpoint.first_step < checkpoint.step
    finish(root, 2, [saver(root)], trainer=TRAINER, ckpt_path=at, steps=steps)
    assert replayed > done // 3
    assert_equal(root.parent, reference, 2)


SMALL = {"enable_checkpointing": True}
WINDOW = {"k_snapshot": 3}
"""Windows of three steps after the first step: 2 to 4, 5 to 7, ..."""


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        slow(1, {}, id="one"),
        slow(2, {"strategy": {"dense": "zero1"}}, id="zero1"),
        slow(2, {"strategy": {"dense": "fsdp"}}, id="fsdp"),
        slow(4, {"strategy": {"dense": "hsdp", "replicas": 2}}, id="hsdp"),
        slow(2, {"trainer": SMALL | {"precision": "bf16-mixed"}}, id="bf16"),
        pytest.param(2, {"saver": {"windows": "scheduled", "k_snapshot": 5}}, id="scheduled"),
    ],
)
def test_a_window_is_exact_however_state_is_shared(
    root: Path, calm: Callable[..., Path], world_size: int, options: dict[str, Any]
) -> None:
    options = {"trainer": SMALL, "steps": 12, **options}
    saving = WINDOW | options.pop("saver", {})
    reference = calm(world_size, **options)
    first_window = 4 if saving["k_snapshot"] == 3 else 3
    callbacks = [saver(root, **saving), WaitForWriter(root, 1, first_window), KillLater(9, 0.0)]
    lose_everything(root, world_size, callbacks, is_written=True, **options)
    checkpoint = newest(root)
    assert checkpoint.first_step < checkpoint.step
    finish(root, world_size, [saver(root, **saving)], ckpt_path=str(root), **options)
    assert_equal(root.parent, reference, world_size)


@pytest.mark.slow
def test_a_window_resumes_on_other_ranks(root: Path, calm: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"trainer": SMALL, "steps": 12, "draws": False}
    callbacks = [saver(root, **WINDOW), WaitForWriter(root, 1, 4, 7), KillLater(9, 0.0)]
    lose_everything(root, 2, callbacks, is_written=True, **options)
    (root.parent / "losses").unlink()
    reference = losses(calm(1, **options))
    for ranks in (1, 4):
        live(root.parent, ranks, [], ckpt_path=str(root), **options)
        found = losses(root.parent)
        (root.parent / "losses").unlink()
        assert set(found) == {key for key in reference if key[0] > 5}
        np.testing.assert_allclose([found[k] for k in found], [reference[k] for k in found], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_what_may_not_end_or_be_saved_while_steps_are_run_again(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer": SMALL, "draws": False}
    callbacks = [saver(root, **WINDOW), WaitForWriter(root, 1, 4, 7), KillLater(9, 0.0)]
    lose_everything(root, 2, callbacks, is_written=True, steps=12, **options)
    with pytest.raises(RankFailure, match="max_steps=6 ends before the state of step-00000007 is whole"):
        live(root.parent, 2, [], ckpt_path=str(root), steps=6, **options)
    files = tmp_path / "files"
    keeper = ModelCheckpoint(files, every_n_train_steps=1, save_top_k=-1)
    agent = agent_ahead(root)
    live(root.parent, 2, [saver(root, **WINDOW), keeper, StopAt(6)], ckpt_path=str(root), steps=12, **options)
    assert not list(files.glob("*"))
    checkpoint = newest(root)
    assert (checkpoint.first_step, checkpoint.step) == (5, 7)  # nothing took its place
    live(root.parent, 2, [saver(root, **WINDOW), keeper], ckpt_path=str(root), steps=9, **options)
    assert sorted(path.name for path in files.glob("*")) == [f"epoch=0-step={step}.ckpt" for step in (7, 8, 9)]
    checkpoint = newest(root)
    assert (checkpoint.first_step, checkpoint.step) == (9, 9)
    kill([agent])


class StopAt(pl.Callback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.step


class MoveAt(pl.Callback):
    """Moves experts between ranks after some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step in self.steps:
            moved = [
                Placement(replicas=np.roll(placement.replicas, 1, axis=1)) for placement in strategy.experts.placements
            ]
            strategy.replace_experts(moved)


@pytest.mark.slow
def test_experts_that_move_cut_a_window_short(root: Path, calm: Callable[..., Path]) -> None:
    """A checkpoint of everything takes its place; another move comes while steps are run again."""
    options: dict[str, Any] = {"trainer": SMALL, "steps": 16}
    reference = calm(2, **options)
    moves = MoveAt(6, 12)
    callbacks = [saver(root, **WINDOW), moves, WaitForWriter(root, 1, 4, 7, 10), KillLater(12, 0.0)]
    lose_everything(root, 2, callbacks, is_written=True, **options)
    checkpoint = newest(root)
    assert (checkpoint.first_step, checkpoint.step) == (8, 10)  # 5 and 6 were cut short, 7 is whole
    finish(root, 2, [saver(root, **WINDOW), MoveAt(9)], ckpt_path=str(root), **options)
    assert losses(root.parent) == losses(reference)
    assert float((root.parent / "plt-0").read_text()) == 0.0


@pytest.mark.slow
def test_the_length_of_a_window_comes_from_measured_times(root: Path) -> None:
    finish(root, 2, [saver(root, k_snapshot=None, every_n_steps="auto"), Lengths(root)], trainer=SMALL, steps=20)
    assert set(json.loads((root / "lengths").read_text())) <= set(range(1, EXPERTS + 1))


class Lengths(pl.Callback):
    """Writes the K in force at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: set[int] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session = session_of(trainer)
        self.found |= {session.contents.k_snapshot} if session is not None else set()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            (self.root / "lengths").write_text(json.dumps(sorted(self.found)))


class PublishLate(pl.Callback):
    """At the end of training rank 0 has published the window that ends with it, others do so once it is waited for."""

    def __init__(self, step: int) -> None:
        self.step, self.has_ended = step, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step or trainer.global_rank == 0:
            return
        session = session_of(trainer)
        session.finish_copy()
        snapshotter, awaited = session._snapshotter, threading.Event()
        publish, finish = snapshotter._publish, snapshotter.finish

        def publish_late(*arguments: Any, **options: Any) -> None:
            assert awaited.wait(60)
            publish(*arguments, **options)

        def finish_now() -> Any:
            if self.has_ended:
                awaited.set()
            return finish()

        snapshotter._publish, snapshotter.finish = publish_late, finish_now  # type: ignore[method-assign]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.has_ended = True
        if trainer.global_rank == 0:
            session_of(trainer).finish_copy()


@pytest.mark.slow
def test_a_window_that_ends_with_the_run_is_followed_by_the_same_checkpoint_on_all_ranks(root: Path) -> None:
    finish(root, 2, [PublishLate(7), saver(root, **WINDOW)], trainer=SMALL, steps=7, draws=False)
    checkpoint = newest(root)
    assert (checkpoint.first_step, checkpoint.step) == (7, 7)


@pytest.mark.parametrize(
    "options", [{"k_persist": 1}, {"order": "load_aware"}, {"scopes": "moc"}], ids=["k_persist", "order", "scopes"]
)
def test_what_lossless_windows_cannot_leave_out(root: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="lossless=True saves all state"):
        saver(root, **options)
