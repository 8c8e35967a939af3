"""The ledger against a recount of every token, the closed forms of the papers, and a recorded routing trace."""

from __future__ import annotations

import pickle
from copy import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_moc import expected_plt, expected_plt_two_level, staleness_sum
from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.policy import CheckpointLedger, Order, unseen_tokens
from moe_lightning.checkpoint.selection import parse_scopes
from tests.traces import recorded


def load_trace() -> np.ndarray:
    """Assignments [samples, L, E] of the recorded trace, summed over source ranks; skips the test where it is
    absent."""
    with np.load(recorded()) as trace:
        return trace["counts"].sum(axis=2, dtype=np.int64)


def new_ledger(layers: int, experts: int, planned: int = 10**9, ranks: int = 1) -> CheckpointLedger:
    return CheckpointLedger(
        num_layers=layers,
        num_experts=experts,
        planned_assignments=planned,
        owners=np.zeros((layers, experts), dtype=np.int64),
        num_ranks=ranks,
        scopes=parse_scopes("full"),
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(2, 6), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_ledger_equals_a_recount_of_every_token(layers: int, experts: int, k_s: int, k_p: int, seed: int) -> None:
    """The slow reference: every version of every expert is the set of token numbers that it has been trained on."""
    rng, shape = np.random.default_rng(seed), (layers, experts)
    kept = new_ledger(*shape, planned=10_000)
    live: dict[tuple[int, ...], set[int]] = {pair: set() for pair in np.ndindex(shape)}
    at_step = {0: {pair: set(tokens) for pair, tokens in live.items()}}
    memory, storage = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    token, lost = 0, np.zeros(layers, dtype=np.int64)
    for step in range(1, 13):
        for _ in range(3):
            counts = rng.integers(0, 4, shape)
            kept.record(counts)
            for pair in live:
                live[pair].update(range(token, token + int(counts[pair])))
                token += int(counts[pair])
        plan = kept.plan(k_s, min(k_s, k_p), full=step == 1)
        kept.begin(step, plan)
        at_step[step] = {pair: set(tokens) for pair, tokens in live.items()}
        memory[plan.snapshot.mask()] = step
        storage[plan.persist.mask()] = step
        if rng.random() < 0.4:
            saved = kept.state_dict()
            kept.record(rng.integers(0, 4, shape))  # trained again after the fault: not lost
            memory = np.where(rng.integers(0, 2, shape), memory, storage)  # of some, the copy in memory is gone
            versions = np.where(rng.integers(0, 2, shape), step, memory)
            found, live = kept.restore(saved, step, versions), {p: set(at_step[int(versions[p])][p]) for p in live}
            expected = [len(at_step[step][pair] - live[pair]) for pair in live]
            np.testing.assert_array_equal(found, np.reshape(expected, shape))
            lost += found.sum(axis=1)
    np.testing.assert_array_equal(kept.lost, lost)
    assert kept.plt == pytest.approx(float((lost / 10_000).mean()))


def uniform_loss(
    k_s: int, k_p: int, experts: int, layers: int, interval: int, checkpoints: int, dead_share: float
) -> float:
    """PLT of one fault under uniform routing of one token per expert and iteration, by simulation; planned: 1000
    iterations."""
    kept = new_ledger(layers, experts, planned=1000 * experts)
    versions, storage = np.zeros((layers, experts), dtype=np.int64), np.zeros((layers, experts), dtype=np.int64)
    for step in range(1, checkpoints + 1):
        kept.record(np.full((layers, experts), interval))
        plan = kept.plan(k_s, k_p)
        kept.begin(step, plan)
        versions[plan.snapshot.mask()] = step
        storage[plan.persist.mask()] = step
    dead = round(dead_share * versions.size)
    versions.reshape(-1)[:dead] = storage.reshape(-1)[:dead]
    lost = unseen_tokens(kept.state_dict(), checkpoints, versions)
    return kept.plt_of(lost.sum(axis=1))


@pytest.mark.parametrize(
    ("experts", "k", "interval", "checkpoints"), [(8, 2, 32, 20), (8, 3, 4, 30), (16, 1, 2, 5), (6, 6, 3, 4)]
)
def test_closed_form_of_one_fault(experts: int, k: int, interval: int, checkpoints: int) -> None:
    simulated = uniform_loss(k, k, experts, 3, interval, checkpoints, dead_share=1.0)
    arguments = {"num_experts": experts, "k": k, "interval": interval, "total_steps": 1000}
    assert simulated == pytest.approx(expected_plt(**arguments, num_checkpoints=checkpoints))


def test_printed_plt_of_both_papers() -> None:
    assert expected_plt(num_experts=8, k=2, interval=32, total_steps=1280) == pytest.approx(0.0375)
    assert expected_plt(num_experts=8, k=2, interval=32, total_steps=640) == pytest.approx(0.075)
    assert staleness_sum(8, 2) == 12
    assert staleness_sum(8, 2, 1) == 6


def test_closed_form_of_two_levels() -> None:
    # E=16, K_s=4, K_p=1, half of the experts on dead nodes: (7.5 + 1.5) / 2 intervals
    form = expected_plt_two_level(
        num_experts=16, k_snapshot=4, k_persist=1, interval=5, total_steps=1000, dead_share=0.5
    )
    assert form == pytest.approx(4.5 * 5 / 1000)
    simulated = [uniform_loss(4, 1, 16, 16, 5, checkpoints, dead_share=0.5) for checkpoints in range(48, 64)]
    assert np.mean(simulated) == pytest.approx(form, rel=0.02)


def mean_plt(trace: np.ndarray, order: Order) -> float:
    """PLT of one fault, averaged over the times at which it may strike, one checkpoint per sample."""
    _, layers, experts = trace.shape
    ranks = 16
    kept = CheckpointLedger(
        num_layers=layers,
        num_experts=experts,
        planned_assignments=trace.sum(axis=(0, 2)),
        owners=np.broadcast_to(np.arange(experts) // (experts // ranks), (layers, experts)),
        num_ranks=ranks,
        scopes=parse_scopes("full"),
        order=order,
    )
    plts = []
    for step, counts in enumerate(trace):
        kept.record(counts)
        plan = kept.plan(2, 2)
        plts.append(kept.cost(plan))
        kept.begin(step, plan)
    return float(np.mean(plts[16:]))


def test_plt_on_the_recorded_trace() -> None:
    trace = load_trace()
    assert mean_plt(trace, "sequential") == pytest.approx(0.0150, rel=0.02)
    assert mean_plt(trace, "load_aware") == pytest.approx(0.0413, rel=0.04)
    assert mean_plt(trace, "load_aware_global") == pytest.approx(0.0090, rel=0.02)


# ----------------------------------------------------------------------
# What a run has counted fits the room that is reserved for it, however long it is.


@pytest.mark.parametrize("how", ["storage", "live", "joined"])
def test_losses_are_exact_where_a_round_takes_more_checkpoints_than_are_kept(how: str) -> None:
    """100 experts, one of which is saved at a time."""
    rng, shape = np.random.default_rng(0), (2, 100)
    kept, versions, at_version = new_ledger(*shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    processed = np.zeros(shape, np.int64)
    for step in range(1, 151):
        counts = rng.integers(0, 1000, shape)
        processed += counts
        kept.record(counts)
        plan = kept.plan(1, 1, full=step == 1)
        kept.begin(step, plan)
        versions[plan.persist.mask()] = step
        at_version[plan.persist.mask()] = processed[plan.persist.mask()]
    assert 150 - versions.min() > 64
    if how == "storage":
        lost = new_ledger(*shape).restore(kept.state_dict(), 150, versions)
    else:
        if how == "joined":
            kept, state = new_ledger(*shape), kept.state_dict()
            kept.load_state_dict(state)
        lost = kept.lose({(la, e): int(versions[la, e]) for la in range(shape[0]) for e in range(shape[1])})
    np.testing.assert_array_equal(lost, processed - at_version)


@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (3, 5), (16, 64)])
def test_its_state_never_outgrows_its_room(layers: int, experts: int) -> None:
    kept = new_ledger(layers, experts)
    for step in range(70):
        kept.record(np.full((layers, experts), 10**6))
        kept.begin(step, kept.plan(1, 1))
        if step in (0, 69):
            assert len(dump_object(kept.state_dict())) <= kept.largest_state_bytes
    assert len(dump_object(kept.state_dict())) > 0.5 * kept.largest_state_bytes - (16 << 10)


def test_losses_are_never_told_too_low_where_storage_stood_still_for_long() -> None:
    """Nothing was committed for more checkpoints than are remembered, and then all of them are needed."""
    rng, shape = np.random.default_rng(0), (2, 4)
    kept, tokens = new_ledger(*shape), {}
    for step in range(1, 101):
        kept.record(rng.integers(1, 1000, shape))
        tokens[step] = kept.processed.copy()
        kept.begin(step, kept.plan(2, 1, full=step == 1))
    for version in (1, 20, 36, 37, 90):
        lost = new_ledger(*shape).restore(kept.state_dict(), 100, np.full(shape, version))
        exact = tokens[100] - tokens[version]
        assert (lost >= exact).all()
        assert version < 37 or (lost == exact).all()


def test_ranks_of_a_world_choose_the_same_experts_whatever_world_each_began_in() -> None:
    """One has been there since four ranks, and the other one has joined three that are left."""
    stayed, joined = new_ledger(2, 8, ranks=4), new_ledger(2, 8, ranks=3)
    joined.load_state_dict(stayed.state_dict())
    owners = np.broadcast_to(np.arange(8) % 3, (2, 8))
    for kept in (stayed, joined):
        kept.reassign(owners, 3)
    np.testing.assert_array_equal(stayed.plan(2, 2).snapshot.mask(), joined.plan(2, 2).snapshot.mask())
    np.testing.assert_array_equal(stayed.plan(2, 2).slots, joined.plan(2, 2).slots)


def test_a_shallow_copy_stays_as_it_is() -> None:
    kept, counts = new_ledger(2, 4), np.full((2, 4), 10)
    kept.record(counts)
    kept.begin(1, kept.plan(2, 1))
    saved, copied = kept.state_dict(), copy(kept)
    kept.record(counts)
    kept.begin(2, kept.plan(2, 1))
    kept.lose({(0, 1): 1})
    kept.restore(saved, 1, np.zeros((2, 4), dtype=np.int64))
    kept.record(counts)
    kept.begin(3, kept.plan(2, 1))
    assert dump_object(copied.state_dict()) == dump_object(saved)


def test_books_stay_small_however_many_checkpoints_are_begun() -> None:
    def size(checkpoints: int) -> int:
        kept = new_ledger(1, 64)
        for step in range(1, checkpoints + 1):
            kept.record(np.ones((1, 64), dtype=np.int64))
            kept.begin(step, kept.plan(1, 1))
        return len(pickle.dumps(kept))

    assert size(150) < 1.1 * size(75)
