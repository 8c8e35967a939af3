"""Partial selection: the papers' example, balance over ranks, coverage, and the load-aware variants."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint import agent as agents
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.agreement import next_job
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.policy import CheckpointLedger, Order
from moe_lightning.checkpoint.selection import (
    full_selection,
    load_aware_global_selection,
    load_aware_selection,
    parse_scopes,
    persist_selection,
    sequential_selection,
    window_slots,
)
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.errors import ConfigurationError
from tests.unit.flows import max_flow


def test_sequential_reproduces_the_papers_example() -> None:
    first, second = (sequential_selection(ordinal=t, k=1, num_layers=4, num_experts=3, ep_size=3) for t in (0, 1))
    assert first.experts == ((0,), (1,), (2,), (0,))
    assert second.experts == ((1,), (2,), (0,), (1,))
    assert first.mask().sum(axis=0).tolist() == [2, 1, 1]
    assert second.mask().sum(axis=0).tolist() == [1, 2, 1]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(num_experts, ep_size, num_layers, k)."""
    ep_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_experts = ep_size * draw(st.integers(1, 4))
    return num_experts, ep_size, draw(st.integers(1, 13)), draw(st.integers(1, num_experts))


@settings(deadline=None, max_examples=150)
@given(layouts(), st.integers(0, 50))
def test_sequential_balances_the_ranks_and_covers_every_expert(layout: tuple[int, int, int, int], ordinal: int) -> None:
    num_experts, ep_size, num_layers, k = layout
    period = -(-num_experts // k)
    masks = [
        sequential_selection(
            ordinal=ordinal + t, k=k, num_layers=num_layers, num_experts=num_experts, ep_size=ep_size
        ).mask()
        for t in range(period)
    ]
    for mask in masks:
        assert (mask.sum(axis=1) == k).all()
        load = mask.reshape(num_layers, ep_size, -1).sum(axis=(0, 2))
        assert load.max() <= -(-k * num_layers // ep_size)
    assert np.logical_or.reduce(masks).all(), "some expert was not saved within ceil(E / K) checkpoints"


def test_k_above_the_number_of_experts_is_a_full_checkpoint() -> None:
    assert sequential_selection(ordinal=5, k=9, num_layers=2, num_experts=4).mask().all()
    assert full_selection(2, 4).mask().all()


def test_printed_load_aware_selection_starves_the_first_layer() -> None:
    unsaved = np.ones((4, 4), dtype=np.int64)
    owners = np.broadcast_to(np.arange(4), (4, 4))
    chosen = load_aware_selection(unsaved, k=3, owners=owners, num_ranks=4)
    assert [len(layer) for layer in chosen.experts] == [1, 3, 3, 3]
    assert [len(layer) for layer in load_aware_global_selection(unsaved, k=3, owners=owners, num_ranks=4).experts] == [
        3
    ] * 4


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_load_aware_selections_keep_their_limits(layers: int, ranks: int, per_rank: int, seed: int, k: int) -> None:
    num_experts = ranks * per_rank
    rng = np.random.default_rng(seed)
    unsaved = rng.integers(0, 20, (layers, num_experts))
    owners = np.broadcast_to(np.arange(num_experts) // per_rank, (layers, num_experts))
    k = min(k, num_experts)
    printed = load_aware_selection(unsaved, k=k, owners=owners, num_ranks=ranks).mask()
    assert (printed.sum(axis=1) <= k).all()
    assert printed.reshape(layers, ranks, per_rank).sum(axis=(0, 2)).max() <= -(-layers * k // ranks)
    chosen = load_aware_global_selection(unsaved, k=k, owners=owners, num_ranks=ranks)
    assert (chosen.mask().sum(axis=1) == k).all()
    if ranks == 1:  # nothing but K limits the choice: every layer's most unsaved experts
        for layer, experts in enumerate(chosen.experts):
            assert sorted(unsaved[layer, list(experts)]) == sorted(np.sort(unsaved[layer])[-k:])


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_no_other_choice_of_k_experts_leaves_the_busiest_rank_less_to_save(
    layers: int, experts: int, ranks: int, seed: int, k: int
) -> None:
    """Owners by chance, as after moves of experts; the least there can be by maximum flow."""
    rng = np.random.default_rng(seed)
    unsaved, owners = rng.integers(0, 20, (layers, experts)), rng.integers(0, ranks, (layers, experts))
    k = min(k, experts)
    chosen = load_aware_global_selection(unsaved, k=k, owners=owners, num_ranks=ranks)
    mask = chosen.mask()
    assert (mask.sum(axis=1) == k).all()
    for layer, row in enumerate(chosen.experts):
        assert (np.diff(unsaved[layer, list(row)]) <= 0).all(), "most unsaved first"
    busiest = int(np.bincount(owners[mask], minlength=ranks).max())
    assert busiest <= -(-layers * k // ranks) or not _can_save(owners, k, ranks, busiest - 1)


def _can_save(owners: np.ndarray, k: int, ranks: int, share: int) -> bool:
    """Whether every layer can save K experts while no rank saves more than its share."""
    edges: dict = {("source", ("layer", layer)): k for layer in range(len(owners))}
    for (layer, expert), rank in np.ndenumerate(owners):
        edges[("layer", layer), ("expert", layer, expert)] = 1
        edges[("expert", layer, expert), ("rank", int(rank))] = 1
    edges |= {(("rank", rank), "sink"): share for rank in range(ranks)}
    return max_flow(edges, "source", "sink") == len(owners) * k


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([(16, 4, 1), (8, 4, 2), (12, 6, 3), (8, 8, 1)]), st.integers(1, 4))
def test_persist_takes_the_oldest_first(shape: tuple[int, int, int], layers: int) -> None:
    num_experts, k_snapshot, k_persist = shape
    version = np.zeros((layers, num_experts), dtype=np.int64)
    period = num_experts // k_persist
    for step in range(1, 3 * period + 1):
        snapshot = sequential_selection(ordinal=step, k=k_snapshot, num_layers=layers, num_experts=num_experts)
        persist = persist_selection(snapshot, k=k_persist, persisted_version=version).mask()
        assert (persist.sum(axis=1) == k_persist).all()
        assert (persist <= snapshot.mask()).all()
        version[persist] = step
    assert (version > 2 * period).all(), "every expert is persisted once per E / K_persist checkpoints"


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_slots_are_the_windows_that_are_saved_together(layout: tuple[int, int, int, int]) -> None:
    num_experts, ep_size, num_layers, k = layout
    shape = {"k": k, "num_layers": num_layers, "num_experts": num_experts, "ep_size": ep_size}
    slots = window_slots(**shape)
    assert (slots >= 0).all()
    if num_experts % k == 0:
        for ordinal in range(2 * num_experts // k):
            mask = sequential_selection(ordinal=ordinal, **shape).mask()
            assert (mask == (slots == ordinal % (num_experts // k))).all()


def test_scopes() -> None:
    assert parse_scopes("moc") == {"weight", "exp_avg", "exp_avg_sq"}
    assert parse_scopes(["weight"]) == {"weight"}
    for wrong in ("everything", ["momentum"]):
        with pytest.raises(ConfigurationError, match="use"):
            parse_scopes(wrong)


def test_wrong_input_is_named() -> None:
    with pytest.raises(ConfigurationError, match="ep_size=3"):
        sequential_selection(ordinal=0, k=1, num_layers=1, num_experts=4, ep_size=3)


# ----------------------------------------------------------------------
# An expert's turn to be written counts once it is committed: dropped and failed persists cost no expert its place.


LAYERS = 2


def keys(layers: int, experts: int) -> dict[str, torch.Tensor]:
    return {f"expert/{layer}/{e}/weight/w": torch.zeros(4) for layer in range(layers) for e in range(experts)}


def oldest_versions(
    base: Path,
    *,
    experts: int,
    k: tuple[int, int],
    steps: int,
    serves: Callable[[int], bool],
    order: Order = "sequential",
) -> dict[int, int]:
    """step -> version of the oldest expert in the checkpoint committed then; the agent looks when `serves` says so."""
    arenas, root = base / "arenas", base / "checkpoints"
    arenas.mkdir(mode=0o700)
    state = keys(LAYERS, experts)
    writer = Snapshotter(arena_path(arenas, 0), run="r", session="1", rank=0, world_size=1, state=state, objects=0)
    agent = Agent(arenas, root, retry_s=0.0)
    kept = CheckpointLedger(
        num_layers=LAYERS,
        num_experts=experts,
        planned_assignments=10**9,
        owners=np.zeros((LAYERS, experts), dtype=np.int64),
        num_ranks=1,
        scopes=parse_scopes("full"),
        order=order,
    )
    counts = np.random.default_rng(0)
    found: dict[int, int] = {}
    for step in range(1, steps + 1):
        kept.record(counts.integers(0, 100, (LAYERS, experts)))
        plan = kept.plan(*k, full=step == 1)
        kept.begin(step, plan)
        writer.start(
            step, state, fresh=plan.fresh(state), persist=plan.persisted(state), extra={"num_experts": experts}
        )
        writer.finish()
        while serves(step) and agent.serve_once():
            pass
        checkpoint = find_newest(root).checkpoint if root.is_dir() else None
        if checkpoint is not None:
            found[checkpoint.step] = int(checkpoint.expert_versions().min())
    writer.close()
    return found


def test_a_persist_that_takes_two_intervals_starves_nobody(tmp_path: Path) -> None:
    found = oldest_versions(tmp_path, experts=8, k=(2, 2), steps=40, serves=lambda step: step % 2 == 1)
    assert len(found) == 20
    assert max(step - oldest for step, oldest in found.items()) == 3


@pytest.mark.parametrize(("experts", "k", "limit"), [(6, (1, 1), 5), (8, (4, 1), 7), (6, (3, 2), 3)])
def test_dropped_persists_make_no_expert_older_than_its_turn(
    experts: int, k: tuple[int, int], limit: int, tmp_path: Path
) -> None:
    chance = random.Random(experts)
    found = oldest_versions(tmp_path, experts=experts, k=k, steps=60, serves=lambda _: chance.random() < 0.3)
    assert len(found) > 8
    assert max(step - oldest for step, oldest in found.items()) <= limit


def test_a_failed_persist_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, write = random.Random(1), agents.write_part

    def write_or_fail(*arguments: object, **options: object) -> object:
        if chance.random() < 0.5:
            raise OSError(28, "No space left on device")
        return write(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(agents, "write_part", write_or_fail)
    looks = iter(range(10**6))
    found = oldest_versions(tmp_path, experts=6, k=(2, 2), steps=60, serves=lambda _: next(looks) % 2 == 0)
    assert 5 < len(found) < 60, "some failed"
    assert max(step - oldest for step, oldest in found.items()) <= 2


def test_a_snapshot_that_gives_way_while_an_agent_looks_leaves_it_without_a_job(tmp_path: Path) -> None:
    """A rank may drop what waited, for a newer snapshot, between two looks of the agent."""

    class Fleeting:
        writer_alive = True

        def __init__(self) -> None:
            self.waiting = [SimpleNamespace(session="1", step=3, world=1, world_size=1)]

        def waiting_tables(self) -> list[SimpleNamespace]:
            seen, self.waiting = self.waiting, []
            return seen

        def tables(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(session="1")]

    arenas = tmp_path / "arenas"
    arenas.mkdir(mode=0o700)
    agent = Agent(arenas, tmp_path / "checkpoints")
    agent._arenas = {arenas / "rank0": Fleeting()}  # type: ignore[dict-item]
    assert next_job(agent.root, *agent._current()) is None
