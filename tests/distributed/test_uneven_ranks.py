"""Ranks of unlike speed: slices and quotas follow, and the training is the same (L1, L3).

Speeds are given, or measured on a clock that the test turns: what is expected of them does not depend on how busy the
machine is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from benchmarks.uneven_worker import Burner
from moe_lightning.callbacks import speeds as speed_follower
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.rank_clock import RankClock
from moe_lightning.errors import ConfigurationError
from tests.distributed import training
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import SKEWED, TOLERANCE
from tests.parameters import slow

PLAIN = {"calibrate": False, "flops_per_s": 1e9, "bytes_per_s": 1e9}
STEPS = 60


class Slices(pl.Callback):
    """Keeps the samples and the rows of every step, and what was logged of speeds."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.rows: list[int] = []
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.samples.append(trainer.strategy.steps.stream.num_samples)  # type: ignore[attr-defined]
        loads = trainer.strategy.experts.layers[0].dispatcher.last_rank_loads  # type: ignore[attr-defined]
        self.rows.append(int(loads[trainer.global_rank]) if loads is not None else 0)
        self.metrics |= {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if "speed_ratio" in name or "straggler" in name
        }


class TestClock(RankClock):
    """Times of a rank that is slow in some steps, with a jitter of 5 percent."""

    __test__ = False
    rank = steps = 0
    slow: Mapping[int, tuple[float, int, int]] = MappingProxyType({})  # of a rank: factor, first and last step

    def rates(self) -> Iterator[tuple[float, float]]:
        assert len(list(super().rates())) == 1, "every step has its times"
        factor, first, last = self.slow.get(self.rank, (1.0, 0, 0))
        jitter = np.random.default_rng([self.rank, self.steps]).lognormal(0.0, 0.05, 2)
        slow = factor if first <= self.steps < last else 1.0
        self.steps += 1
        yield float(1e-6 * slow * jitter[0]), float(1e-3 * slow * jitter[1])


def uneven(
    rank: int,
    world_size: int,
    *,
    balancer: dict[str, Any],
    slow: dict[int, tuple[float, int, int]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    slices = Slices()
    TestClock.rank, TestClock.slow = rank, slow or {}
    speed_follower.RankClock = TestClock  # type: ignore[misc]
    callbacks = [LoadBalancer(**PLAIN | balancer), slices]
    options = {"steps": STEPS, "model": SKEWED, "batch_size": 16} | options
    result = training.train(rank, world_size, callbacks=callbacks, **options)
    return result | {"samples": slices.samples, "rows": slices.rows, "metrics": slices.metrics}


def run(world_size: int, balancer: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(world_size, partial(uneven, balancer=balancer, **options))
    return results


@cache
def reference(batch_size: int = 16, micros: int = 1, steps: int = STEPS) -> dict[str, Any]:
    options = {"steps": steps, "model": SKEWED, "batch_size": batch_size}
    trainer = {"accumulate_grad_batches": micros}
    result: dict[str, Any] = run_ranks(1, partial(training.train, trainer=trainer, **options))[0]
    return result


def assert_same_training(expected: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """The losses, and bit-identical replicas."""
    assert len(expected["losses"]) > 0
    for result in ranks:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
    for name in ranks[0]["replicas"]:
        seen: dict[int, bytes] = {}
        for result in ranks:
            for expert, content in result["replicas"][name].items():
                assert expert < 0 or seen.setdefault(expert, content) == content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speeds", "samples"),
    [([1.0, 0.5], [11, 5]), slow([1, 1, 1, 0.25], [5, 5, 5, 1]), slow([1.0, 1.0, 1.0], [6, 5, 5])],
)
def test_given_speeds_cut_from_the_first_batch_and_the_training_is_the_same(
    speeds: list[float], samples: list[int]
) -> None:
    steps = 30
    ranks = run(len(speeds), {"speeds": speeds, "rebalance_every": 5}, strategy={"slots": 4}, steps=steps)
    assert_same_training(reference(steps=steps), ranks)
    assert [result["samples"] for result in ranks] == [[count] * steps for count in samples]
    rows = np.array([result["rows"] for result in ranks])[:, 10:].sum(axis=1)
    np.testing.assert_allclose(rows / rows.sum(), np.array(speeds) / sum(speeds), atol=0.05)


@pytest.mark.slow
def test_micro_batches_are_cut_alike() -> None:
    options: dict[str, Any] = {"batch_size": 7, "trainer": {"accumulate_grad_batches": 3}, "steps": 12}
    ranks = run(2, {"speeds": [1.0, 0.4]}, strategy={"slots": 4}, **options)
    assert_same_training(reference(7, 3, 12), ranks)
    assert [set(result["samples"]) for result in ranks] == [{5, 4}, {2, 1}]  # the last ones of an epoch are small


@pytest.mark.slow
def test_a_rank_that_becomes_slow_and_recovers_is_followed_and_the_training_is_the_same() -> None:
    ranks = run(2, {}, slow={1: (2.0, 12, 36)}, strategy={"slots": 6})
    assert_same_training(reference(), ranks)
    assert [result["samples"][11] for result in ranks] == [8, 8]
    assert [result["samples"][35] for result in ranks] in ([11, 5], [10, 6])
    assert [result["samples"][-1] for result in ranks] == [8, 8]
    changes = np.count_nonzero(np.diff(ranks[0]["samples"]))
    assert 2 <= changes <= 4
    slow, fast = ranks[1]["rows"][30], ranks[0]["rows"][30]
    assert slow / fast == pytest.approx(0.5, rel=0.15)


@pytest.mark.slow
def test_a_rank_that_stays_behind_is_told_of() -> None:
    ranks = run(4, {}, slow={2: (2.5, 0, STEPS)}, strategy={"slots": 4}, steps=40)
    metrics = ranks[0]["metrics"]
    assert metrics["balance/straggler_rank"] == 2
    assert metrics["balance/rank02/speed_ratio"] == pytest.approx(0.4, rel=0.15)
    assert metrics["balance/rank00/speed_ratio"] == pytest.approx(1, rel=0.1)
    assert [result["metrics"] for result in ranks] == [metrics] * 4


@pytest.mark.slow
def test_even_speeds_change_nothing() -> None:
    """To the last bit, however slow a rank is."""
    even = run(2, {"speeds": "even"}, slow={1: (3.0, 0, STEPS)}, strategy={"slots": 4}, steps=20)
    calm = run(2, {}, strategy={"slots": 4}, steps=20)
    assert [result["losses"] for result in even] == [result["losses"] for result in calm]
    assert [result["samples"] for result in even] == [result["samples"] for result in calm] == [[8] * 20] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [slow(1), 3])
def test_a_resume_on_other_ranks_goes_on_with_the_same_samples(ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "uneven.ckpt")
    behind = {1: (2.0, 0, STEPS)}
    run(2, {}, slow=behind, strategy={"slots": 6}, steps=25, save_to=path)
    expected = reference()["losses"][25:40]
    for result in run(ranks, {}, slow=behind, strategy={"slots": 6}, steps=40, ckpt_path=path):
        np.testing.assert_allclose(result["losses"], expected, rtol=0, atol=TOLERANCE)


def refusals(rank: int, world_size: int, balancer: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        training.train(rank, world_size, callbacks=[LoadBalancer(**PLAIN | balancer)], steps=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("balancer", "said"),
    [
        ({"speeds": [1.0, 1.0, 0.5]}, "lists 3 speeds for 2 ranks: give one for each"),
        ({"speeds": [1.0, 0.0]}, "gives rank 1 the speed 0.0: use positive numbers"),
        ({"speeds": [-1.0, 1.0]}, "gives rank 0 the speed -1.0"),
        ({"max_samples_per_rank": 5}, "max_samples_per_rank=5 on 2 ranks cannot hold a micro-batch of 12 samples"),
        ({"stragglers": "evict"}, "set elastic.enabled=true, or stragglers=adapt"),
    ],
)
def test_what_does_not_fit_the_ranks_is_one_sentence(balancer: dict[str, Any], said: str) -> None:
    assert all(said in told for told in run_pooled(2, refusals, balancer))


def burnt(rank: int, world_size: int) -> dict[str, Any]:
    """Measured for real, while another process takes half of the last rank's core in the middle."""
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})
    slices = Slices()
    callbacks: list[Any] = [LoadBalancer(**PLAIN), slices]
    if rank == world_size - 1:
        callbacks.append(Burner(core, 1.0, 15, 40))
    result = training.train(
        rank,
        world_size,
        callbacks=callbacks,
        steps=STEPS,
        model=SKEWED,
        batch_size=16,
        strategy={"slots": 6},
    )
    return result | {"samples": slices.samples}


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank of known speed needs a core")
def test_a_burner_that_comes_and_goes_does_not_change_the_training() -> None:
    ranks = run_ranks(2, burnt)
    assert_same_training(reference(), ranks)
    assert all(sum(counts) == 16 for counts in zip(*(result["samples"] for result in ranks), strict=True))
