"""Placements for a changed world, checked against what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.algorithms.placement import uniform_placement
from moe_lightning.algorithms.repair import repair_placements
from moe_lightning.errors import ConfigurationError


def _held(experts: int, ranks: int, copies: int, layers: int = 2) -> np.ndarray:
    return np.stack([uniform_placement(experts, ranks, copies).replicas > 0] * layers)


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[np.ndarray, list[str], int]:
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    copies = draw(st.integers(1, ranks))
    held = _held(experts, ranks, copies)
    dead = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    held = np.delete(held, sorted(dead), axis=2)
    new = draw(st.integers(0, 2))
    held = np.concatenate([held, np.zeros((*held.shape[:2], new), dtype=bool)], axis=2)
    nodes = [str(draw(st.integers(0, 3))) for _ in range(held.shape[2])]
    return held, nodes, draw(st.integers(1, 3))


@settings(deadline=None, max_examples=200)
@given(_worlds(), st.integers(0, 3))
def test_every_expert_has_its_replicas_within_the_slots(
    world: tuple[np.ndarray, list[str], int], spare_slots: int
) -> None:
    held, nodes, wanted = world
    _, experts, ranks = held.shape
    max_slots = -(-experts // ranks) + spare_slots
    repair = repair_placements(held, nodes=nodes, min_replicas=wanted, max_slots=max_slots)
    assert 1 <= repair.min_replicas <= wanted
    for placement in repair.placements:
        for expert in range(experts):
            assert len({nodes[rank] for rank in placement.holders(expert)}) >= repair.min_replicas
        assert max(len(placement.experts_on(rank)) for rank in range(ranks)) <= max_slots


@settings(deadline=None, max_examples=100)
@given(_worlds())
def test_without_a_limit_all_replicas_asked_for_are_there(world: tuple[np.ndarray, list[str], int]) -> None:
    held, nodes, wanted = world
    repair = repair_placements(held, nodes=nodes, min_replicas=wanted)
    assert repair.min_replicas == min(wanted, len(set(nodes)))


@pytest.mark.parametrize(("ranks", "experts"), [(4, 8), (4, 7), (3, 8), (6, 16)])
def test_a_lost_rank_costs_only_its_own_replicas(ranks: int, experts: int) -> None:
    held = np.delete(_held(experts, ranks, 2), 1, axis=2)
    nodes = [str(rank) for rank in range(ranks - 1)]
    repair = repair_placements(held, nodes=nodes, min_replicas=2)
    for layer, placement in zip(held, repair.placements, strict=True):
        lost = 2 * experts - int(layer.sum())
        copied = int(((placement.replicas > 0) & ~layer).sum())
        assert copied <= lost + 1  # at most one more, to level


def test_a_new_rank_gets_its_share() -> None:
    held = np.concatenate([_held(8, 3, 2), np.zeros((2, 8, 1), dtype=bool)], axis=2)
    repair = repair_placements(held, nodes=list("abcd"), min_replicas=2)
    for placement in repair.placements:
        assert [len(placement.experts_on(rank)) for rank in range(4)] == [4, 4, 4, 4]


def test_same_input_same_placement() -> None:
    held = np.delete(_held(9, 5, 2), 2, axis=2)
    first, second = (repair_placements(held, nodes=list("abcd"), min_replicas=2) for _ in range(2))
    assert first.placements == second.placements


def test_too_few_slots_are_refused_with_the_cure() -> None:
    with pytest.raises(ConfigurationError, match=r"2 ranks of 3 slots cannot hold 8 experts.*slots to 4"):
        repair_placements(_held(8, 2, 1), nodes=["a", "b"], max_slots=3)
