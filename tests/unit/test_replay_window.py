"""Windows of sparse snapshots: a toy training that is replayed from them ends exactly where it was."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning.checkpoint.recovery_plan import (
    HeldExpert,
    RankInventory,
    SnapshotInventory,
    SnapshotKind,
    StorageInventory,
    plan_recovery,
)
from moe_lightning.checkpoint.schedule import most_frozen, plan_window, window_bytes, window_length
from moe_lightning.errors import ConfigurationError


class Toy:
    """Experts with a weight and a moment each, and a dense number; every update depends on all weights."""

    def __init__(self, layers: int, experts: int) -> None:
        self.weight = np.linspace(0.1, 1.0, layers * experts).reshape(layers, experts)
        self.moment = np.zeros((layers, experts))
        self.dense = np.array(0.5)

    def step(self, sample: float) -> None:
        gradient = np.sin(self.weight * sample + self.dense)
        gradient /= np.sqrt((gradient**2).sum() + self.dense**2)  # clipped by the norm of everything
        self.dense = self.dense - 0.01 * gradient.sum()
        self.moment = 0.9 * self.moment + gradient
        self.weight = self.weight - 0.1 * self.moment


@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 8), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_replay_ends_where_the_window_ended(layers: int, experts: int, k: int, first: int, random: object) -> None:
    tokens = np.array([[random.randrange(4) for _ in range(experts)] for _ in range(layers)])  # type: ignore[attr-defined]
    window = plan_window(first, tokens, k)
    assert window.last - window.first + 1 == window_length(experts, k)
    samples = [random.random() for _ in range(window.last)]  # type: ignore[attr-defined]
    toy, snapshots = Toy(layers, experts), {}
    for step in range(window.last + 1):
        if step:
            toy.step(samples[step - 1])
        if step >= first:
            whole, frozen = window.whole_at(step), window.frozen_at(step)
            held = whole | frozen
            snapshots[step] = np.where(held, toy.weight, np.nan), np.where(whole, toy.moment, np.nan), toy.dense
    replayed = Toy(layers, experts)
    replayed.dense = snapshots[first][2]
    for step in range(first, window.last + 1):
        if step > first:
            replayed.step(samples[step - 1])
        weight, moment, _ = snapshots[step]
        replayed.weight = np.where(np.isnan(weight), replayed.weight, weight)
        replayed.moment = np.where(np.isnan(moment), replayed.moment, moment)
    for name in ("weight", "moment", "dense"):
        np.testing.assert_array_equal(getattr(replayed, name), getattr(toy, name))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_every_expert_has_one_turn_and_popular_ones_come_last(experts: int, k: int, first: int) -> None:
    tokens = np.arange(experts)[None] * 7 % 11
    window = plan_window(first, tokens, k)
    steps = range(window.first, window.last + 1)
    assert (sum(window.whole_at(step).astype(int) for step in steps) == 1).all()
    assert all(window.whole_at(step).sum() <= k for step in steps)
    assert (np.diff(tokens[0][np.argsort(window.turns[0], kind="stable")][::k]) >= 0).all()
    for number in range(1, experts + 1):
        best = max(sum(chosen) for chosen in itertools.combinations(window.turns[0].tolist(), number))
        assert most_frozen(experts, k, number) == best
    sizes = window_bytes(
        num_layers=1, num_experts=experts, k=min(k, experts), dense_bytes=100, expert_bytes=12, weight_bytes=2
    )
    assert sizes == tuple(
        100 * (step == first) + 12 * window.whole_at(step).sum() + 2 * window.frozen_at(step).sum() for step in steps
    )


def test_no_experts_a_turn_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="k=0"):
        plan_window(0, np.zeros((1, 4), dtype=np.int64), 0)


def inventories(*steps: tuple[int, int], live: int = -1) -> list[RankInventory]:
    """One rank whose node holds windows, (first, last) step each, of two experts."""
    snapshots = [
        SnapshotInventory(
            kind=SnapshotKind.ARENA,
            writer=0,
            session="1",
            step=last,
            first=first,
            world_size=1,
            experts=(HeldExpert(0, 0, first, first), HeldExpert(0, 1, last, last)),
        )
        for first, last in steps
    ]
    return [RankInventory(rank=0, node="", live_version=live, experts=((0, 0),), snapshots=tuple(snapshots))]


def test_the_newest_window_is_chosen_whole() -> None:
    plan = plan_recovery(inventories((2, 4), (5, 7)), None, num_layers=1, num_experts=2)
    assert (plan.level, plan.version, plan.resumes_at, plan.stale) == ("memory", 7, 5, {})
    assert {(read.expert, read.step) for read in plan.reads} == {(None, 7), ((0, 0), 7), ((0, 1), 7)}


def test_a_window_goes_before_live_state_that_lost_an_expert() -> None:
    plan = plan_recovery(inventories((5, 7), live=9), None, num_layers=1, num_experts=2)
    assert (plan.level, plan.resumes_at, plan.stale) == ("memory", 5, {})


def test_a_shard_that_is_lost_does_not_come_from_the_first_step_of_a_window() -> None:
    """What is no expert is older in a window than the step that it is called."""
    (mine,) = inventories((5, 7), live=7)
    shards = {"sharded_dense": ("head",), "experts": ((0, 0), (0, 1))}
    plan = plan_recovery([replace(mine, **shards)], None, num_layers=1, num_experts=2)
    assert (plan.level, plan.resumes_at, plan.stale) == ("memory", 5, {})
    kept = plan_recovery([replace(mine, **shards, owned_dense=("head",))], None, num_layers=1, num_experts=2)
    assert (kept.level, kept.resumes_at) == ("live", 7)


def test_a_window_on_storage_loses_nothing() -> None:
    stored = StorageInventory(session="1", step=7, first=5, versions=((5, 7),))
    plan = plan_recovery(inventories((2, 4)), stored, num_layers=1, num_experts=2)
    assert (plan.level, plan.version, plan.resumes_at, plan.stale) == ("storage", 7, 5, {})
