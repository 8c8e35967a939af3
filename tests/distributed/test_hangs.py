"""A hang is reported once, by one rank: who waits for whom and where; ranks that are slow together are not reported."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning.compat import private_torch
from moe_lightning.parallel.context import World
from moe_lightning.strategies import hangs
from moe_lightning.strategies.hangs import Call, Hang, Standstill, _Watched, awaited, first_difference, place_of
from moe_lightning.strategies.process_stacks import Seen
from moe_lightning.user_errors import ALARMS
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer
from tests.forks import PATIENCE_S

LIMIT_S = 1.0
AT = 3  # the step after which a rank hangs
REPORTED = "reported"
WAITING = re.compile(r", in reported: (while not Path\(REPORTED\)\.exists\(\)|time\.sleep\(0\.01\))")
"""A line of the loop below, which a report shows as it is at that moment."""


def reported(patience_s: float = PATIENCE_S) -> bool:
    """Wait until a rank has reported; all ranks run in one folder."""
    deadline = time.monotonic() + patience_s
    while not Path(REPORTED).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return Path(REPORTED).exists()


def break_connections() -> None:
    """Let collectives that never meet fail now, not after their timeout."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():  # else it listens
                connection.shutdown(socket.SHUT_RD)


class Case(pl.Callback):
    """Hangs on rank 1 until the hang is reported."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == AT:
            Path(f"since-{trainer.global_rank}").write_text(str(time.time()))
            if trainer.global_rank == 1:
                self.hang(trainer)

    def hang(self, trainer: pl.Trainer) -> None:
        reported()


class BusyInterpreter(Case):
    def hang(self, trainer: pl.Trainer) -> None:
        """Hold the interpreter's lock, as a native loop does."""
        ctypes.PyDLL(None).system(b"for i in $(seq 1000); do test -e reported && break; sleep 0.05; done")


class Stopped(Case):
    def hang(self, trainer: pl.Trainer) -> None:
        child = os.fork()
        if child == 0:  # continues its parent when the others have reported
            reported()
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)


class SomeRanksOnly(Case):
    def hang(self, trainer: pl.Trainer) -> None:
        dist.all_reduce(torch.zeros(5))


class OtherOrder(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != AT:
            return
        Path(f"since-{trainer.global_rank}").write_text(str(time.time()))
        world = trainer.strategy.world  # type: ignore[attr-defined]
        groups = [world.compute, world.background]
        for group in groups if trainer.global_rank != 1 else groups[::-1]:
            dist.all_reduce(torch.zeros(7), group=group)


class SlowTokens(RandomTokens):
    """One sample hangs on rank 1: in this process, or in that of a worker, on a lock that nobody gives back."""

    def __init__(self, rank: int, *, is_locked: bool) -> None:
        super().__init__()
        self.rank, self.is_locked = rank, is_locked

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.rank == 1 and index // 12 == AT:
            Path("since-1").write_text(str(time.time()))
            self.wait_for_disk()
        return super().__getitem__(index)

    def wait_for_disk(self) -> None:
        if self.is_locked:
            lock = threading.Lock()
            lock.acquire()
            while not lock.acquire(timeout=0.1) and not Path(REPORTED).exists():
                pass
        else:
            reported()


def fit(
    rank: int, world_size: int, case: type[pl.Callback] | None, workers: int, meets: bool, options: dict[str, Any]
) -> tuple[int, list[str], str]:
    lines: list[str] = []

    def heard(text: str) -> None:
        lines.extend(text.splitlines())
        Path(f"reported-{rank}").write_text(str(time.time()))
        Path(REPORTED).touch()
        if not meets:
            break_connections()

    hangs.write_to_terminal = heard  # type: ignore[assignment]
    if world_size > 1:
        private_torch.set_group_timeout(dist.group.WORLD, timedelta(seconds=PATIENCE_S))
    strategy = {"hang_report_s": LIMIT_S, "timeout_s": PATIENCE_S, **options}
    trainer = make_trainer(rank, world_size, strategy, callbacks=[case()] if case else [], max_steps=6)
    data = RandomTokens() if case else SlowTokens(rank, is_locked=workers > 0)
    error = ""
    try:
        context = "fork" if workers else None
        trainer.fit(OwnModule(), DataLoader(data, batch_size=12, num_workers=workers, multiprocessing_context=context))
    except RuntimeError as failed:  # of ranks whose collectives do not meet
        error = str(failed)
    assert "hang-watch" not in [thread.name for thread in threading.enumerate()] or error
    if lines:
        began = max(float(path.read_text()) for path in Path().glob("since-*"))
        assert float(Path(f"reported-{rank}").read_text()) - began < LIMIT_S + 5
        lines.append(min(Path("hangs").iterdir()).read_text())
    return trainer.global_step, lines, error


def report_of(
    ranks: int, case: type[pl.Callback] | None, *, workers: int = 0, meets: bool = True, **options: Any
) -> tuple[str, ...]:
    """Return the three lines and the file of the only report of a training with these options of the strategy."""
    results = run_ranks(ranks, fit, case, workers, meets, options)
    if meets:
        assert [steps for steps, *_ in results] == [6] * ranks
        assert all(not error for *_, error in results)
    (lines,) = (lines for _, lines, _ in results if lines)
    assert len(lines) == 4
    return tuple(lines)


def test_a_loop_in_a_step_is_named_by_one_rank() -> None:
    who, where, order, text = report_of(3, Case)
    assert who.startswith("no step for ")
    assert " s: ranks 0 and 2 wait for rank 1 in all" in who
    assert f", step {AT}, forward" in who
    assert where.startswith("rank 1: ")
    assert WAITING.search(where)
    assert order.startswith("the order of collectives is the same on all ranks; stacks and the last collectives of")
    assert f"hangs/step-000000{AT}.txt" in order
    assert f"rank 1 in step {AT}, forward: " in text
    assert "  waits in all" in text
    assert all(f"rank {rank} in step {AT}" in text for rank in range(3))
    assert " in on_train_batch_start\n" in text, "the stack of the slow rank"


@pytest.mark.slow
def test_a_rank_that_waits_for_the_one_that_hangs_in_a_group_of_two_is_not_named() -> None:
    who, where, *_ = report_of(4, Case, dense="hsdp", shard_size=2)
    assert "ranks 0, 2 and 3 wait for rank 1 in " in who
    assert where.startswith("rank 1: ")


@pytest.mark.slow
def test_a_sample_that_does_not_come_is_named() -> None:
    who, where, *_ = report_of(2, None)
    assert "rank 0 waits for rank 1" in who
    assert WAITING.search(where)


@pytest.mark.slow
def test_the_blocked_worker_of_a_loader_is_named() -> None:
    who, where, *_ = report_of(2, None, workers=2)
    assert "rank 0 waits for rank 1" in who
    assert "; its loader's process " in where
    assert "in wait_for_disk: while not lock.acquire" in where


@pytest.mark.slow
def test_a_stopped_process_is_named() -> None:
    who, where, *_ = report_of(3, Stopped)
    assert "ranks 0 and 2 wait for rank 1 in all" in who
    assert where == "rank 1: gives no sign, its process is stopped (SIGSTOP)"


@pytest.mark.slow
def test_a_busy_interpreter_is_named_with_its_place() -> None:
    who, where, _, text = report_of(3, BusyInterpreter)
    assert "ranks 0 and 2 wait for rank 1 in all" in who
    assert where.startswith("rank 1: gives no sign, its process runs: ")
    assert ", in hang: ctypes.PyDLL(None).system(" in where
    assert " in on_train_batch_start\n" in text


def test_a_collective_that_only_some_ranks_call_is_named() -> None:
    who, where, order, _ = report_of(2, SomeRanksOnly, meets=False)
    assert "ranks 0 and 1 wait for each other" in who
    assert "in hang: dist.all_reduce(torch.zeros(5))" in where
    assert "probably made on some of them only" in order


@pytest.mark.slow
def test_collectives_in_another_order_are_named() -> None:
    who, where, order, _ = report_of(2, OtherOrder, meets=False)
    assert "ranks 0 and 1 wait for each other" in who
    assert "in on_train_batch_start: dist.all_reduce(torch.zeros(7), group=group)" in where
    assert "or in another order" in order


class OnOneRank(Case):
    """Does on rank 1 what every rank must do."""

    def on_train_batch_start(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        Case.on_train_batch_start(self, trainer)


class Stop(OnOneRank):
    def hang(self, trainer: pl.Trainer) -> None:
        trainer.should_stop = True


def test_ranks_that_wait_for_each_other_are_named_with_both_places() -> None:
    who, where, order, _ = report_of(2, Stop, meets=False)
    assert "ranks 0 and 1 wait for each other" in who
    assert "> private_lightning.epoch_end_reached >" in where
    assert "training_epoch_loop.advance" in where
    assert "(save_checkpoint, should_stop, " in order


class Fetches(pl.Callback):
    """All ranks take long, at the same place."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == AT:
            time.sleep(4 * LIMIT_S)


@pytest.mark.slow
def test_ranks_that_are_slow_together_are_not_reported() -> None:
    assert run_ranks(2, fit, Fetches, 0, True, {}) == [(6, [], "")] * 2


def at(place: str = "train.py:3, in fetch", *, in_collective: bool = False, **counts: int) -> Standstill:
    return Standstill(counts=counts, place=place, in_collective=in_collective)


def waiting(group: str, **counts: int) -> Standstill:
    """A rank that waits in its last collective of a group."""
    call = Call(group, counts[group], "all_reduce", [[4]], is_done=False, step=3, phase="forward")
    return replace(at("train.py:9, in sum", in_collective=True, **counts), calls=[call])


def test_nothing_is_read_of_another_watch_with_the_same_store() -> None:
    world, store = World.single(), dist.HashStore()  # type: ignore[attr-defined]
    first = _Watched(world, store)
    store.set(first._key("seen", 0), json.dumps(asdict(Seen(state="is stopped"))))
    assert first._seen_of(0) is not None
    assert _Watched(world, store)._seen_of(0) is None


@pytest.mark.parametrize("is_file", [False, True])
def test_standstills_replace_each_other_in_the_store(tmp_path: Path, is_file: bool) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1) if is_file else dist.HashStore()  # type: ignore[attr-defined]
    watched, kept = _Watched(World.single(), store), set[tuple[int, int]]()
    for n in range(3):
        watched.publish(at(f"train.py:{n}"))
        standstill = watched._standstill(0, watched._number)
        assert standstill.place == f"train.py:{n}"
        watched.resume()
        kept.add((store.num_keys(), len(list(tmp_path.iterdir()))))
    assert len(kept) == 1


def test_a_standstill_that_is_not_shown_yet_is_waited_for(tmp_path: Path) -> None:
    """A file system of the network may show a file later than the store."""
    watched = _Watched(World.single(), dist.FileStore(str(tmp_path / "store"), 1))
    watched.publish(at())
    (file,) = tmp_path.glob("*standstill*")
    hidden = file.rename(tmp_path / "hidden")
    assert watched.read(60, graces=0.0, is_late=False) is None
    hidden.rename(file)
    hang = watched.read(60, graces=0.0, is_late=False)
    assert hang.ranks[0].place == at().place


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        ({0: at(dense=4), 1: at(dense=4)}, []),
        ({0: at(dense=4), 1: at(dense=3), 2: at(dense=4)}, [1]),
        ({0: at(dense=4, compute=7), 1: at(dense=4, compute=6)}, [1]),
        ({0: at(dense=4, compute=6), 1: at(dense=3, compute=7)}, [0, 1]),
        ({0: at(a=4), 1: at(a=4), 2: at(b=1), 3: at(b=0)}, [3]),  # stages of a pipeline
        ({0: at(all=7, a=5), 1: at(all=7, a=5), 2: waiting("b", all=6, b=5), 3: at(all=6, b=4)}, [3]),
        ({0: waiting("a", a=5, b=4), 1: waiting("b", a=4, b=5)}, [0, 1]),
    ],
)
def test_who_is_awaited(ranks: dict[int, Standstill], late: list[int]) -> None:
    assert awaited(ranks) == late
    assert bool(Hang(seconds=60, ranks=ranks).lines()) == bool(late)


def calls(*texts: str) -> list[Call]:
    """Collectives of a group, given as operation and size."""
    return [
        Call("dense 0 of 2", n + 1, name, [[int(size)]], is_done=True, step=n, phase="forward")
        for n, (name, size) in enumerate(text.split() for text in texts)
    ]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (calls("all_reduce 1", "broadcast 2"), calls("all_reduce 1", "broadcast 2"), {}),
        (calls("all_reduce 1", "broadcast 2"), calls("all_reduce 1"), {}),
        (calls("all_to_all 1"), calls("all_to_all 2"), {}),  # each rank has its own sizes
        (
            calls("all_reduce 1"),
            calls("all_reduce 2"),
            {"all_reduce[[1]] 1 of dense": [0], "all_reduce[[2]] 1 of dense": [1]},
        ),
        (
            calls("all_reduce 1", "all_gather 2", "all_reduce 1"),
            calls("all_reduce 1", "broadcast 2", "all_to_all 1"),
            {"all_gather[[2]] 2 of dense": [0], "broadcast[[2]] 2 of dense": [1]},
        ),
    ],
)  # fmt: skip
def test_the_first_difference(one: list[Call], other: list[Call], expected: dict[str, list[int]]) -> None:
    ranks = {rank: Standstill(counts={}, place="", calls=found) for rank, found in enumerate([one, other])}
    assert first_difference(ranks) == expected


def test_ranks_in_different_collectives_of_one_group() -> None:
    ranks = {rank: at(f"train.py:{3 + rank // 2}", in_collective=True, dense=4) for rank in range(3)}
    assert Hang(seconds=300, ranks=ranks).lines() == []
    who, where, _ = Hang(seconds=300, ranks=ranks, is_late=True).lines()
    assert who == "no step for 300 s: ranks 0, 1 and 2 wait for each other"
    assert where == "ranks 0 and 1: train.py:3; rank 2: train.py:4"


def test_ranks_that_all_wait_in_one_collective_wait_for_the_network() -> None:
    call = calls("all_reduce 1")[0]._replace(is_done=False)
    ranks = {rank: Standstill(counts={"dense": 1}, place="train.py:3", calls=[call]) for rank in range(2)}
    assert Hang(seconds=60, ranks=ranks).lines() == [
        "no step for 60 s: all ranks wait in all_reduce[[1]] 1 of dense",
        "ranks 0 and 1: train.py:3",
        "all ranks have come to it, so look at the network between them",
    ]


def test_a_rank_whose_machine_does_not_answer() -> None:
    who, where, _ = Hang(seconds=60, ranks={0: at(dense=4), 2: at(dense=4)}, silent={1: None}).lines()
    assert who == "no step for 60 s: ranks 0 and 2 wait for rank 1"
    assert where == "rank 1: gives no sign, and nobody on its machine answers"


def test_a_report_is_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, alarms = list[str](), list[str]()
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", lambda record: alarms.append(record.getMessage()))
    monkeypatch.setattr(hangs, "write_to_terminal", shown.append)
    ALARMS.addHandler(listener)
    try:
        hangs._report(Hang(seconds=60, ranks={0: at(dense=4)}, silent={1: None}), tmp_path)
    finally:
        ALARMS.removeHandler(listener)
    assert alarms == shown
    assert "rank 0 waits for rank 1" in alarms[0]


def stack(path: str) -> str:
    return f'Thread 0x1 (most recent call first):\n  File "{path}", line 3 in wait\n\nThread 0x2 (most recent call first):\n  File "{path}", line 5 in inner\n  File "train.py", line 9 in outer\n'  # noqa: E501


def test_frames_of_another_process() -> None:
    seen = Seen(state="runs", stacks=stack("/x/y.py"))
    assert [(f.filename, f.lineno, f.name) for f in seen.frames] == [("train.py", 9, "outer"), ("/x/y.py", 5, "inner")]


def test_a_place_is_the_users_line_and_what_it_calls() -> None:
    torchs, lightnings = str(dist.__file__), str(pl.__file__)
    own = traceback.FrameSummary("/home/me/train.py", 7, "training_step", line="self.log(name, x, sync_dist=True)")
    below = [
        traceback.FrameSummary(f"{Path(lightnings).parent}/core/module.py", 5, "log", line="result.log()"),
        traceback.FrameSummary(torchs, 9, "all_reduce", line="work.wait()"),
    ]
    above = traceback.FrameSummary(lightnings, 5, "fit", line="self.run()")
    line = "/home/me/train.py:7, in training_step: self.log(name, x, sync_dist=True)"
    assert place_of([above, own, *below]) == f"{line}, in module.log"
    assert place_of([above, own]) == line
    assert place_of([above, *below]) == "in __init__.fit > module.log"
