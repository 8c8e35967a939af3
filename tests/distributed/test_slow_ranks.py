"""A rank that is slower than the others is named, with the phase and the reason; ranks alike never are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from torch import Tensor
from torch.distributed import FileStore, HashStore, PrefixStore
from torch.utils.data import DataLoader

from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.context import World
from moe_lightning.strategies import slow_ranks
from moe_lightning.strategies.hangs import HangWatch
from moe_lightning.strategies.process_stacks import is_blocked
from moe_lightning.strategies.slow_ranks import (
    Begun,
    RankTimeline,
    SlowRank,
    SlowRankWatch,
    clock_offsets_us,
    own_times,
    slowest,
    steps_to_come,
    timeline,
)
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer
from tests.parameters import slow

PHASES = ("forward", "backward", "update", "callbacks and data")
STEPS = 16
FORWARD, BETWEEN = 0, 3
Marks = list[tuple[int, int, str]]


def simulated(own_us: np.ndarray, offsets: list[int]) -> list[RankTimeline]:
    """The records of ranks that need so many microseconds before each collective, int64 [ranks, steps, calls]; every
    phase begins with the end of a collective, and clocks are ahead by the offsets.
    """
    ranks, steps, calls = own_us.shape
    now = np.zeros(ranks, dtype=np.int64)
    marks: list[list[tuple[int, str]]] = [[] for _ in range(ranks)]
    begun: list[list[Begun]] = [[] for _ in range(ranks)]
    begins: list[list[int]] = [[] for _ in range(ranks)]
    for step in range(steps + 1):
        for rank in range(ranks):
            begins[rank].append(len(marks[rank]))
        for call in range(calls if step < steps else 1):
            for rank in range(ranks):
                marks[rank].append((int(now[rank]) + offsets[rank], PHASES[call]))
            if step < steps:
                now += own_us[:, step, call]
                for rank in range(ranks):
                    begun[rank].append(Begun("all", step * calls + call, int(now[rank]) + offsets[rank]))
                now[:] = now.max()
    return [
        RankTimeline(first=0, marks=marks[r], begun=begins[r][1:-1], calls=begun[r], waiting=0.0, places={})
        for r in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_own_times_are_those_that_ranks_have_needed_whatever_their_clocks_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 4))  # each is the last one at some collective
    own_us = rng.integers(20, 30_000, size=(ranks, STEPS, len(PHASES)))
    own_us[:, :, 1] = rng.integers(1, 30, size=(ranks, STEPS))  # a collective that follows another one at once
    offsets = [0, *rng.integers(-3_600_000_000, 3_600_000_000, size=ranks - 1).tolist()]
    steps = simulated(own_us, offsets)
    assert np.abs(np.array(clock_offsets_us(steps)) - offsets).max() <= 30
    found = own_times([RankTimeline.decode(each.encode()) for each in steps])
    for index, phase in enumerate(PHASES):
        assert np.abs(found[phase] * 1e6 - own_us[:, :, index]).max() <= 120, phase


def calm(seed: int, ranks: int = 4) -> np.ndarray:
    """Ranks alike with noise, and a pause each."""
    rng = np.random.default_rng(seed)
    own_us = (20_000 * rng.uniform(0.9, 1.1, size=(ranks, STEPS, len(PHASES)))).astype(np.int64)
    for rank in range(ranks):
        own_us[rank, rng.integers(STEPS), rng.integers(len(PHASES))] += 1_000_000
    return own_us


@pytest.mark.parametrize("seed", range(20))
def test_ranks_alike_with_single_pauses_are_not_slow(seed: int) -> None:
    assert not slowest(simulated(calm(seed), [0] * 4)).is_slow


def test_a_rank_that_pauses_now_and_then_is_slow() -> None:
    own_us = calm(0)
    own_us[1, ::8, BETWEEN] += 1_000_000
    found = slowest(simulated(own_us, [0] * 4))
    assert found.is_slow
    assert found.rank == 1


def test_a_small_part_of_a_step_is_not_slow() -> None:
    own_us = np.full((3, STEPS, len(PHASES)), 100)
    own_us[1] += 100
    found = slowest(simulated(own_us, [0] * 3))
    assert found.is_slow
    assert not replace(found, step_s=0.1).is_slow


IN_F, IN_UPDATE = "it is mostly at x.py:3, in f: g()", "most of it is in the phase update"


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"waiting": 0.4}, "other processes take its CPU, for which it waits 40 % of the time"),
        ({"places": {"update": [("at x.py:1, in h: i()", 0.6), ("at x.py:3, in f: g()", 0.4)]}}, IN_F),
        ({"places": {"update": [("at x.py:1, in h: i()", 0.6), ("at x.py:3, in f: g()", 0.3)]}}, IN_UPDATE),
        ({}, IN_UPDATE),
    ],
)
def test_the_reason_is_in_the_line(facts: dict[str, Any], cause: str) -> None:
    own_us = calm(0)
    own_us[2, :, 2] += 30_000
    usual = {"update": [("at x.py:1, in h: i()", 0.9), ("at x.py:3, in f: g()", 0.1)]}
    steps = [replace(each, places=usual) for each in simulated(own_us, [0] * 4)]
    steps[2] = replace(steps[2], **{"places": {}, **facts})
    found = slowest(steps)
    assert found.is_slow
    assert found.rank == 2
    assert str(found).startswith("rank 2 needs 1.4 times the median of the others for its part of a step, 3")
    assert str(found).endswith(f" ms more (update 30): {cause}")


@pytest.mark.parametrize(("share", "cause"), [(0.2, "callbacks=load_balancer gives it fewer"), (0.7, IN_F)])
def test_a_rank_that_is_slow_everywhere_in_a_pass_is_at_no_place_of_its_own(share: float, cause: str) -> None:
    own_us = calm(0)
    own_us[2, :, FORWARD] *= 3
    places = {"forward": [("at x.py:1, in h: i()", 0.8), ("at x.py:3, in f: g()", 0.2)]}
    steps = [replace(each, places=places) for each in simulated(own_us, [0] * 4)]
    of_slow = {"forward": [("at x.py:1, in h: i()", 1 - share), ("at x.py:3, in f: g()", share)]}
    steps[2] = replace(steps[2], places=of_slow)
    assert str(slowest(steps)).endswith(cause)


@pytest.mark.parametrize(
    ("calls_per_step", "ranks", "steps"),
    [(4, 4, 64), (20, 4, 64), (20, 64, 15), slow(100, 4, 12), slow(200, 4, 2), slow(100, 1024, 1), slow(700, 4, 0)],
)
def test_all_ranks_have_the_steps_that_the_first_one_asks_for(calls_per_step: int, ranks: int, steps: int) -> None:
    """torch's record has room for 2,000 collectives, and other ranks may be a step ahead or behind."""
    step_ns, room = 10**8, 2000

    marks = [(step * step_ns + i * step_ns // 4, step, p) for step in range(700) for i, p in enumerate(PHASES)]
    calls = [Begun("all", n, n * step_ns // calls_per_step) for n in range(700 * calls_per_step)]

    def record(until_ns: int) -> tuple[list[tuple[int, int, str]], list[Begun]]:
        begun = calls[: bisect(calls, until_ns, key=attrgetter("at"))]
        return marks[: bisect(marks, until_ns, key=itemgetter(0))], begun[-room:]

    for now in range(400 * step_ns, 401 * step_ns, step_ns // 7):
        chosen = steps_to_come(*record(now), ranks)
        assert steps <= (chosen[1] if chosen else 0) <= steps + 1  # as far as the running step has come
        if chosen is None:
            continue
        first, number, seconds = chosen
        assert seconds == pytest.approx((first + number) * step_ns / 1e9 - 400 * step_ns / 1e9)
        end = (first + number + 1) * step_ns
        for published in range(end, end + step_ns + int(0.4e9), step_ns // 5):
            found = timeline(first, number, *record(published), waiting=0.0, places={})
            assert found is not None
            assert found.steps == (first, number)


def test_between_the_micro_batches_of_a_step_data_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    monkeypatch.setattr(HangWatch, "begin_phase", lambda _, phase, step, **__: phases.append(phase) if step == 1 else 0)
    trainer = make_trainer(0, 1, {}, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=4))
    micro_batch = ["forward", "backward", "callbacks and data"]
    assert phases == [*micro_batch, "forward", "backward", "update", "callbacks and data"]


def test_a_validation_is_not_compared() -> None:
    ranks = []
    for each in simulated(np.full((3, STEPS, len(PHASES)), 20_000), [0] * 3):
        began = each.marks[10][0]
        marks = [*each.marks[:10], (began, "evaluation"), *((at + 500_000, phase) for at, phase in each.marks[10:])]
        calls = [call._replace(at=call.at + 500_000 * (call.at > began)) for call in each.calls]
        begun = [index + (index >= 10) for index in each.begun]
        ranks.append(replace(each, marks=marks, calls=calls, begun=begun))
    assert own_times(ranks)["evaluation"].sum() == pytest.approx(1.5)
    assert "evaluation" not in slowest(ranks).phases


class Clock:
    """Time of all ranks; comparisons take a while of it."""

    def __init__(self, compared_s: float) -> None:
        self.now, self.compared_s, self.looked = 1000.0, compared_s, 0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.looked += 1
        return self.looked * self.compared_s


def minutes_of_lines(
    monkeypatch: pytest.MonkeyPatch,
    slow: Callable[[int], int],
    *,
    compared_s: float = 0.01,
    late_s: float = 0.0,
    steps: int = 800,
) -> list[float]:
    """The minutes in which three ranks print lines in ten, with the slow rank of each step of a second. The clock of
    rank 1 is ahead.
    """
    clock, lines, store, began_ns = Clock(compared_s), list[float](), HashStore(), 900 * 10**9
    monkeypatch.setattr(slow_ranks, "time", clock)
    monkeypatch.setattr(slow_ranks, "write_to_terminal", lambda _: lines.append((clock.now - 1000) / 60))
    watches = [SlowRankWatch(rank, 3, store) for rank in range(3)]
    records = list[tuple[Marks, list[Begun]]]()
    for rank in range(3):
        marks, calls = Marks(), list[Begun]()
        for step in range(steps):
            at = began_ns + step * 10**9 + int(late_s * 1e9) * (rank == 1)
            marks += [(at + i * 10**8, step, phase) for i, phase in enumerate(PHASES)]
            calls.append(Begun("all", step, at + (8 if slow(step) == rank else 4) * 10**8))
        records.append((marks, calls))
    while clock.now < 1600:
        clock.now += 0.2
        for rank, (watch, (marks, calls)) in enumerate(zip(watches, records, strict=True)):
            now_ns = int((clock.now + late_s * (rank == 1)) * 1e9)
            until = bisect(calls, now_ns, key=attrgetter("at"))
            watch.look(marks[: bisect(marks, now_ns, key=itemgetter(0))], partial(calls.__getitem__, slice(until)))
    return lines


@pytest.mark.parametrize("late_s", [-9.0, 0.0, 9.0])
def test_a_slow_rank_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Also if the clock of another rank is seconds ahead or behind."""
    lines = minutes_of_lines(monkeypatch, lambda step: 2, late_s=late_s)
    assert len(lines) in {9, 10}
    assert lines[0] <= 1.4
    assert np.abs(np.diff(lines) - 1).max() < 0.05


def test_ranks_that_are_slow_in_turn_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not minutes_of_lines(monkeypatch, lambda step: step % 3)
    assert not minutes_of_lines(monkeypatch, lambda step: step // 30 % 3)


def test_steps_that_never_come_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(minutes_of_lines(monkeypatch, lambda step: 2, steps=120)) == 0


def test_comparisons_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = minutes_of_lines(monkeypatch, lambda step: 2, compared_s=0.5)
    assert np.abs(np.diff(lines) - 3.25).max() < 0.25


def test_comparisons_do_not_fill_the_file_of_a_store(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    watches = [SlowRankWatch(rank, 2, PrefixStore("default", PrefixStore("run", store))) for rank in range(2)]
    sizes = []
    for last in range(40, 240):
        marks = [(10**8 * step + i * 10**7, step, phase) for step in range(last) for i, phase in enumerate(PHASES)]
        calls = [Begun("all", 40 * step + i, 10**8 * step + i * 10**6) for step in range(last) for i in range(40)]
        for watch in watches:
            watch._look_at = 0.0
            watch.look(marks, partial(calls.__getitem__, slice(-2000, None)))
        if watches[0].last is not None:
            watches[0].last = None
            sizes.append((tmp_path / "store").stat().st_size)
    assert len(sizes) > 1
    assert max(np.diff(sizes)) < 200


def test_a_place_where_a_rank_waits_for_a_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the kernel holds: what it starts opens a pipe that nobody writes to before it runs."""
    os.mkfifo(pipe := tmp_path / "pipe")
    opened = f"(os.POSIX_SPAWN_OPEN, 0, {str(pipe)!r}, os.O_RDONLY, 0)"
    code = f"import os; os.write(1, b'.'); os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{opened}])"
    held = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert held.stdout is not None
    try:
        assert held.stdout.read(1)  # until then it may wait for the disk that it is loaded from
        deadline = time.monotonic() + 30
        while not is_blocked(held.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        watch = SlowRankWatch(0, 2, store := HashStore(), "1")
        for pid, samples in ((os.getpid(), 1), (held.pid, 3)):
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            for _ in range(samples):
                watch.sample("update", sys._getframe())
        monkeypatch.undo()
    finally:
        pipe.open("w").close()
        assert held.wait(30) == 0
        held.stdout.close()
    assert not is_blocked(os.getpid())
    marks = [(10 * step + i, step, phase) for step in range(9) for i, phase in enumerate(PHASES)]
    watch._publish((2, 4), marks, [Begun("all", step, 10 * step) for step in range(9)])
    place, share = RankTimeline.decode(store.get("slow/1/0")).places["update"][0]
    assert place.startswith(f"waiting for a disk or a device, at {Path(__file__).relative_to(Path.cwd())}:")
    assert share == 0.75


def test_samples_of_places_are_bounded_where_nothing_is_asked() -> None:
    watch = SlowRankWatch(1, 2, HashStore())
    for n in range(1200):
        watch.sample(f"phase {n}", sys._getframe())
    assert len(watch._samples) <= 1000
    assert {f"phase {n}" for n in range(200, 1200)} == {sample.phase for sample in watch._samples}


# ---------------------------------------------------------------------- real ranks


class SlowSamples(RandomTokens):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(size)
        self.rank = rank

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.rank == 1:
            time.sleep(0.008)
        return super().__getitem__(index)


class SlowDisk(pl.Callback):
    """Every second step rank 1 writes for long."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step % 2 == 0:
            self.write_slowly()

    def write_slowly(self) -> None:
        time.sleep(0.2)


class SlowExperts(pl.Callback):
    """The last rank's experts pause in every forward pass."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            moe_layers(module)[0].experts.register_forward_hook(self.pause)

    def pause(self, *_: Any) -> None:
        time.sleep(0.02)


class BusyNeighbour(pl.Callback):
    """Other processes share the core of rank 1."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[trainer.global_rank % len(cores)]})
        code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # no longer than this rank
        self.others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(8 * trainer.global_rank)]

    def on_train_end(self, *_: Any) -> None:
        for other in self.others:
            other.kill()
            other.wait()


class Ended(pl.Callback):
    """Ends the run when rank 0 has said something, or after many steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.strategy.broadcast(Path("slow").exists())


def fit(rank: int, world_size: int, case: str, steps: int) -> tuple[list[str], SlowRank | None]:
    lines: list[str] = []

    def heard(text: str) -> None:
        lines.append(text)
        if case != "cpu" or ("rank 1" in text and "its CPU" in text):  # on a busy machine others wait for theirs, too
            Path("slow").touch()

    slow_ranks.PERIOD_S = 1.5  # type: ignore[misc]
    slow_ranks.write_to_terminal = heard  # type: ignore[assignment]
    found: dict[str, list[pl.Callback]] = {"disk": [SlowDisk()], "cpu": [BusyNeighbour()], "experts": [SlowExperts()]}
    trainer = make_trainer(rank, world_size, {}, callbacks=[*found.get(case, []), Ended()], max_steps=steps)
    size = 12 * steps
    data = SlowSamples(rank, size) if case == "data" else RandomTokens(size)
    trainer.fit(OwnModule(), DataLoader(data, batch_size=12))
    return lines, trainer.strategy.slowest_rank  # type: ignore[attr-defined]


def lines_of(case: str, ranks: int = 2) -> list[str]:
    results = run_ranks(ranks, fit, case, 2000)
    assert results[1:] == [([], None)] * (ranks - 1), "one rank reports"
    return results[0][0]


@pytest.mark.slow
def test_a_slow_loader_is_named_with_its_line() -> None:
    line = lines_of("data")[0]
    assert "slow: rank 1 needs" in line
    assert "in its data loader: " in line
    assert "in __getitem__: time.sleep(0.008)" in line


@pytest.mark.slow
def test_a_slow_disk_is_named_with_its_line() -> None:
    line = lines_of("disk")[0]
    assert "slow: rank 1 needs" in line
    assert "(callbacks and data " in line
    assert "in write_slowly: time.sleep(0.2)" in line


@pytest.mark.slow
def test_slow_experts_are_named_with_their_line() -> None:
    line = lines_of("experts")[0]
    assert "slow: rank 1 needs" in line
    assert "(forward " in line
    assert "in pause: time.sleep(0.02)" in line


@pytest.mark.slow  # which other tests on these cores would disturb
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_neighbour_on_the_core_is_named() -> None:
    line = lines_of("cpu")[-1]
    assert "slow: rank 1 needs" in line
    assert "other processes take its CPU, for which it waits" in line


def keys_of_two_fits(rank: int, world_size: int) -> list[str]:
    found = []
    for _ in range(2):
        trainer = make_trainer(rank, world_size, {}, max_steps=1)
        trainer.fit(OwnModule(), DataLoader(RandomTokens(12), batch_size=12))
        found.append(trainer.strategy._hangs._slow._key("asked"))  # type: ignore[attr-defined]
    return found


def test_a_second_fit_reads_nothing_of_the_first_one() -> None:
    first, second = run_ranks(2, keys_of_two_fits)
    assert first == second, "ranks share keys"
    assert len(set(first)) == 2


def test_a_rank_that_is_left_alone_has_no_slowest_one(tmp_path: Path) -> None:
    watch: Any = HangWatch(60.0)
    watch._slow = SlowRankWatch(0, 2, HashStore())
    watch._slow.last = SlowRank(rank=1, ratio=2.0, excess_s=1.0, step_s=1.0, phases={})
    watch.begin(World.single(), str(tmp_path))
    watch.end()
    assert watch.slowest is None
