"""A rank that is slower than the others is named, with the phase and the reason; ranks alike never are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning.strategies import slow_ranks
from moe_lightning.strategies.slow_ranks import (
    Begun,
    RankTimeline,
    SlowRank,
    chosen_steps,
    clock_offsets_us,
    own_times,
    slowest,
)
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer

PHASES = ("forward", "backward", "update", "callbacks and data")
STEPS = 16


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
    """Ranks alike with noise, and pauses of two steps."""
    rng = np.random.default_rng(seed)
    own_us = (20_000 * rng.uniform(0.9, 1.1, size=(ranks, STEPS, len(PHASES)))).astype(np.int64)
    for rank in range(ranks):
        own_us[rank, rng.integers(STEPS, size=2), rng.integers(len(PHASES))] += 1_000_000
    return own_us


@pytest.mark.parametrize("seed", range(20))
def test_ranks_alike_with_single_pauses_are_not_slow(seed: int) -> None:
    assert not slowest(simulated(calm(seed), [0] * 4)).is_slow


def test_a_small_part_of_a_step_is_not_slow() -> None:
    own_us = np.full((3, STEPS, len(PHASES)), 100)
    own_us[1] += 100
    found = slowest(simulated(own_us, [0] * 3))
    assert found.is_slow
    assert not replace(found, step_s=0.1).is_slow


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"waiting": 0.4}, "other processes take its CPU, for which its threads wait 40 % of the time"),
        ({"places": {"update": ("at train.py:3, in f: g()", 0.9)}}, "it is mostly at train.py:3, in f: g()"),
        ({"places": {"update": ("at train.py:3, in f: g()", 0.3)}}, "most of it is in the phase update"),
        ({}, "most of it is in the phase update"),
    ],
)
def test_the_reason_is_in_the_line(facts: dict[str, Any], cause: str) -> None:
    own_us = calm(0)
    own_us[2, :, 2] += 30_000
    steps = simulated(own_us, [0] * 4)
    steps[2] = replace(steps[2], **facts)
    found = slowest(steps)
    assert found.is_slow
    assert found.rank == 2
    assert str(found).startswith("rank 2 needs 1.4 times the median of the others for its part of a step, 3")
    assert str(found).endswith(f" ms more (update 29): {cause}")


def test_ranks_choose_the_same_steps_at_different_moments() -> None:
    def record(last: int, step_ns: int) -> RankTimeline | None:
        marks = [(step * step_ns + i * step_ns // 4, step, p) for step in range(last) for i, p in enumerate(PHASES)]
        calls = [Begun("all", step, step * step_ns + 1) for step in range(last)]
        return chosen_steps(marks, [Begun("all", -1, -1), *calls], waiting=0.0, places={})

    for step_ns in (10**7, 10**9):
        assert record(10, step_ns) is None
        firsts = [steps.first if (steps := record(last, step_ns)) else None for last in range(130, 190)]
        assert set(firsts) == ({112} if step_ns < 10**8 else {112, 128, 144, 160})
    found = record(150, 10**9)
    assert found is not None
    assert (found.first, len(found.begun), len(found.calls)) == (128, STEPS - 1, STEPS)


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
    """Every fourth step rank 1 writes for long."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step % 4 == 0:
            self.write_slowly()

    def write_slowly(self) -> None:
        time.sleep(0.4)


class BusyNeighbour(pl.Callback):
    """Other processes share the core of rank 1."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[trainer.global_rank % len(cores)]})
        code = "while True: pass"
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
        if case != "cpu" or "its CPU" in text:  # on a busy machine the others wait for theirs, too, now and then
            Path("slow").touch()

    slow_ranks.PERIOD_S = 1.5  # type: ignore[misc]
    slow_ranks.write_to_terminal = heard  # type: ignore[assignment]
    found: dict[str, list[pl.Callback]] = {"disk": [SlowDisk()], "cpu": [BusyNeighbour()]}
    trainer = make_trainer(rank, world_size, {}, callbacks=[*found.get(case, []), Ended()], max_steps=steps)
    size = 12 * steps
    data = SlowSamples(rank, size) if case == "data" else RandomTokens(size)
    trainer.fit(OwnModule(), DataLoader(data, batch_size=12))
    return lines, trainer.strategy.slowest_rank  # type: ignore[attr-defined]


def lines_of(case: str) -> list[str]:
    results = run_ranks(2, fit, case, 2000)
    assert results[1] == ([], None), "one rank reports"
    return results[0][0]


def test_a_slow_loader_is_named_with_its_line() -> None:
    line = lines_of("data")[0]
    assert "slow: rank 1 needs" in line
    assert "in its data loader: " in line
    assert "in __getitem__: time.sleep(0.008)" in line


def test_a_slow_disk_is_named_with_its_line() -> None:
    line = lines_of("disk")[0]
    assert "slow: rank 1 needs" in line
    assert "(callbacks and data " in line
    assert "in write_slowly: time.sleep(0.4)" in line


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_neighbour_on_the_core_is_named() -> None:
    lines = lines_of("cpu")
    assert all("slow: rank 1 needs" in line for line in lines)
    assert "other processes take its CPU, for which its threads wait" in lines[-1]
