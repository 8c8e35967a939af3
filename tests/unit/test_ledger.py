"""The ledger against a recount of every token, the closed forms of the papers, and a recorded routing trace."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_moc import expected_plt, expected_plt_two_level, staleness_sum
from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.policy import CheckpointLedger
from moe_lightning.checkpoint.selection import (
    Selection,
    full_selection,
    load_aware_global_selection,
    load_aware_selection,
    parse_scopes,
    persist_selection,
    sequential_selection,
    worst_case_plt,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.token_ledger import SimulatedLedger, Source
from tests.traces import recorded


def load_trace() -> np.ndarray:
    """Assignments [samples, L, E] of the recorded trace, summed over source ranks; skips the test where it is
    absent."""
    with np.load(recorded()) as trace:
        return trace["counts"].sum(axis=2, dtype=np.int64)


class TokenSets:
    """The slow reference: every copy of every expert is the set of token numbers that it has been trained on."""

    def __init__(self, layers: int, experts: int) -> None:
        self.pairs = [(layer, expert) for layer in range(layers) for expert in range(experts)]
        self.live: dict[tuple[int, int], set[int]] = {pair: set() for pair in self.pairs}
        self.memory = {pair: [(0, set())] for pair in self.pairs}
        self.storage = {pair: [(0, set())] for pair in self.pairs}
        self.commits = [(0, {pair: set() for pair in self.pairs})]

    def snapshot(self, step: int, mask: np.ndarray, persist: np.ndarray) -> None:
        for pair in self.pairs:
            if mask[pair]:
                self.memory[pair].append((step, set(self.live[pair])))
        self.commits.append((step, {pair: set(self.live[pair]) for pair in self.pairs}))
        for pair in self.pairs:
            if persist[pair]:
                self.storage[pair].append((step, set(self.live[pair])))

    def recover(self, sources: np.ndarray) -> np.ndarray:
        step, state = self.commits[-1]
        loss = np.zeros(sources.shape, dtype=np.int64)
        for pair in self.pairs:
            if sources[pair] == Source.LIVE:
                held = state[pair]
            else:
                copies = self.memory[pair] if sources[pair] == Source.MEMORY else self.storage[pair]
                held = [tokens for version, tokens in copies if version <= step][-1]
            loss[pair] = len(state[pair] - held)
            self.live[pair] = set(held)
            if sources[pair] == Source.STORAGE:
                self.memory[pair] = list(self.storage[pair])
        self.commits[-1] = (step, {pair: set(tokens) for pair, tokens in self.live.items()})
        return loss


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(2, 6), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_ledger_equals_a_recount_of_every_token(layers: int, experts: int, k_s: int, k_p: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ledger = SimulatedLedger(num_layers=layers, num_experts=experts, planned_assignments=10_000)
    reference = TokenSets(layers, experts)
    version = np.zeros((layers, experts), dtype=np.int64)
    step, token, lost = 0, 0, np.zeros(layers, dtype=np.int64)
    for ordinal in range(12):
        for _ in range(3):
            step += 1
            counts = rng.integers(0, 4, (layers, experts))
            ledger.record(counts)
            for pair in reference.pairs:
                reference.live[pair].update(range(token, token + int(counts[pair])))
                token += int(counts[pair])
        snapshot = (
            full_selection(layers, experts)
            if ordinal == 0
            else sequential_selection(ordinal=ordinal, k=k_s, num_layers=layers, num_experts=experts)
        )
        persist = snapshot if ordinal == 0 else persist_selection(snapshot, k=k_p, persisted_version=version)
        ledger.begin_checkpoint(step, snapshot=snapshot.mask(), persist=persist.mask())
        ledger.complete_checkpoint(step)
        reference.snapshot(step, snapshot.mask(), persist.mask())
        version[persist.mask()] = step
        if rng.random() < 0.4:
            ledger.record(rng.integers(0, 4, (layers, experts)))  # trained again after the fault: not lost
            sources = rng.integers(0, 3, (layers, experts))
            loss = ledger.recover(sources)
            np.testing.assert_array_equal(loss, reference.recover(sources))
            lost += loss.sum(axis=1)
    np.testing.assert_array_equal(ledger.lost, lost)
    assert ledger.plt == pytest.approx(float((lost / 10_000).mean()))


def uniform_loss(
    k_s: int, k_p: int, experts: int, layers: int, interval: int, checkpoints: int, dead_share: float
) -> float:
    """PLT of one fault under uniform routing of one token per expert and iteration, by simulation; planned: 1000
    iterations."""
    ledger = SimulatedLedger(num_layers=layers, num_experts=experts, planned_assignments=1000 * experts)
    version = np.zeros((layers, experts), dtype=np.int64)
    for ordinal in range(checkpoints):
        for _ in range(interval):
            ledger.record(np.ones((layers, experts), dtype=np.int64))
        snapshot = sequential_selection(ordinal=ordinal, k=k_s, num_layers=layers, num_experts=experts)
        persist = persist_selection(snapshot, k=k_p, persisted_version=version)
        ledger.begin_checkpoint(ordinal + 1, snapshot=snapshot.mask(), persist=persist.mask())
        ledger.complete_checkpoint(ordinal + 1)
        version[persist.mask()] = ordinal + 1
    sources = np.full((layers, experts), Source.MEMORY)
    sources.reshape(-1)[: round(dead_share * sources.size)] = Source.STORAGE
    return ledger.plt_of(ledger.loss_if_recovered(sources).sum(axis=1))


@pytest.mark.parametrize(
    ("experts", "k", "interval", "checkpoints"), [(8, 2, 32, 20), (8, 3, 4, 30), (16, 1, 2, 5), (6, 6, 3, 4)]
)
def test_closed_form_of_one_fault(experts: int, k: int, interval: int, checkpoints: int) -> None:
    simulated = uniform_loss(k, k, experts, 3, interval, checkpoints, dead_share=1.0)
    arguments = {"num_experts": experts, "k": k, "interval": interval, "total_steps": 1000}
    assert simulated == pytest.approx(expected_plt(**arguments, num_checkpoints=checkpoints))
    assert simulated <= worst_case_plt(**arguments)


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


def test_a_commit_that_comes_late_or_never() -> None:
    """The persist of step 2 is committed after the snapshot of step 4; that of step 4 never is."""
    everything = full_selection(1, 2).mask()
    first = Selection(experts=((0,),), num_experts=2).mask()
    ledger = SimulatedLedger(num_layers=1, num_experts=2, planned_assignments=100)
    ledger.record(np.array([[5, 7]]))
    ledger.begin_checkpoint(2, snapshot=everything, persist=everything)
    ledger.record(np.array([[1, 2]]))
    ledger.begin_checkpoint(4, snapshot=first, persist=first)
    ledger.complete_checkpoint(2)
    assert ledger.unsaved().tolist() == [[0, 2]]
    assert ledger.recover(Source.STORAGE).sum() == 0, "step 2 is whole on storage"
    with pytest.raises(KeyError):
        ledger.complete_checkpoint(4)


def test_plt_needs_a_plan() -> None:
    with pytest.raises(ConfigurationError, match="planned_assignments=0"):
        SimulatedLedger(num_layers=1, num_experts=1, planned_assignments=0)


def mean_plt(trace: np.ndarray, select: Callable[[int, np.ndarray], Selection]) -> float:
    """PLT of one fault, averaged over the times at which it may strike, one checkpoint per sample."""
    _, layers, experts = trace.shape
    ledger = SimulatedLedger(num_layers=layers, num_experts=experts, planned_assignments=trace.sum(axis=(0, 2)))
    plts = []
    for step, counts in enumerate(trace):
        ledger.record(counts)
        mask = select(step, ledger.unsaved()).mask()
        ledger.begin_checkpoint(step, snapshot=mask, persist=mask)
        ledger.complete_checkpoint(step)
        plts.append(ledger.plt_of(ledger.loss_if_recovered(Source.STORAGE).sum(axis=1)))
    return float(np.mean(plts[16:]))


def test_plt_on_the_recorded_trace() -> None:
    trace = load_trace()
    layers, experts, ranks = 24, 32, 16
    owners = np.broadcast_to(np.arange(experts) // (experts // ranks), (layers, experts))
    limits = {"k": 2, "owners": owners, "num_ranks": ranks}
    sequential = mean_plt(
        trace, lambda t, _: sequential_selection(ordinal=t, k=2, num_layers=layers, num_experts=experts, ep_size=ranks)
    )
    printed = mean_plt(trace, lambda _, unsaved: load_aware_selection(unsaved, **limits))
    best = mean_plt(trace, lambda _, unsaved: load_aware_global_selection(unsaved, **limits))
    assert sequential == pytest.approx(0.0150, rel=0.02)
    assert printed == pytest.approx(0.0413, rel=0.04)
    assert best == pytest.approx(0.0090, rel=0.02)


# ----------------------------------------------------------------------
# What a run has counted fits the room that is reserved for it, however long it is.


def new_ledger(layers: int, experts: int) -> CheckpointLedger:
    return CheckpointLedger(
        num_layers=layers,
        num_experts=experts,
        planned_assignments=10**9,
        owners=np.zeros((layers, experts), dtype=np.int64),
        num_ranks=1,
        scopes=parse_scopes("full"),
    )


@pytest.mark.parametrize("how", ["storage", "live", "joined"])
def test_losses_are_exact_where_a_round_takes_more_checkpoints_than_are_kept(how: str) -> None:
    """100 experts, one of which is saved at a time."""
    rng, shape = np.random.default_rng(0), (2, 100)
    kept, versions, at_version = new_ledger(*shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    processed = np.zeros(shape, np.int64)
    for step in range(1, 151):
        counts = rng.integers(0, 1000, shape)
        processed += counts
        kept.ledger.record(counts)
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
        kept.ledger.record(np.full((layers, experts), 10**6))
        kept.begin(step, kept.plan(1, 1))
        if step in (0, 69):
            assert len(dump_object(kept.state_dict())) <= kept.largest_state_bytes
    assert len(dump_object(kept.state_dict())) > 0.5 * kept.largest_state_bytes - (16 << 10)


def test_losses_are_never_told_too_low_where_storage_stood_still_for_long() -> None:
    """Nothing was committed for more checkpoints than are remembered, and then all of them are needed."""
    rng, shape = np.random.default_rng(0), (2, 4)
    kept, tokens = new_ledger(*shape), {}
    for step in range(1, 101):
        kept.ledger.record(rng.integers(1, 1000, shape))
        tokens[step] = kept.ledger.processed.copy()
        kept.begin(step, kept.plan(2, 1, full=step == 1))
    for version in (1, 20, 36, 37, 90):
        lost = new_ledger(*shape).restore(kept.state_dict(), 100, np.full(shape, version))
        exact = tokens[100] - tokens[version]
        assert (lost >= exact).all()
        assert version < 37 or (lost == exact).all()


def test_books_stay_small_however_many_checkpoints_are_begun() -> None:
    def size(checkpoints: int) -> int:
        kept = new_ledger(1, 64)
        for step in range(1, checkpoints + 1):
            kept.ledger.record(np.ones((1, 64), dtype=np.int64))
            kept.begin(step, kept.plan(1, 1))
        return len(pickle.dumps(kept))

    assert size(150) < 1.1 * size(75)
