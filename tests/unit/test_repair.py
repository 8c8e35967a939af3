"""Placements for a changed world, checked against what they promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.packing import packed_placement
from moe_lightning.balancing.repair import repair_placements, repair_stages
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.errors import ConfigurationError
from tests.unit.flows import max_flow


def _held(experts: int, ranks: int, copies: int, layers: int = 2) -> np.ndarray:
    return np.stack([uniform_placement(experts, ranks, copies).replicas > 0] * layers)


def _most_replicas(experts: int, nodes: list[str], slots: int, wanted: int) -> int:
    """The most distinct nodes that can hold every expert, by maximum flow."""
    for floor in range(wanted, 1, -1):
        edges: dict[Any, int] = {("source", e): floor for e in range(experts)}
        edges |= {(e, node): 1 for e in range(experts) for node in nodes}
        edges |= {(node, "sink"): slots * nodes.count(node) for node in nodes}
        if max_flow(edges, "source", "sink") == experts * floor:
            return floor
    return 1


def _fewest_copies(held: np.ndarray, nodes: list[str], slots: int, floor: int) -> int:
    """A bound of the copies that bring every expert of a layer to `floor` nodes: what the held ones cannot give."""
    experts, ranks = held.shape
    edges: dict[Any, int] = {("source", ("expert", e)): floor for e in range(experts)}
    for e, n in np.argwhere(held).tolist():
        edges |= {(("expert", e), (e, nodes[n])): 1, ((e, nodes[n]), ("rank", n)): 1}
    edges |= {(("rank", n), "sink"): slots for n in range(ranks)}
    return experts * floor - max_flow(edges, "source", "sink")


def _copies(held: np.ndarray, repaired: np.ndarray) -> int:
    return int(((repaired > 0) & ~held).sum())


@st.composite
def _any_worlds(draw: st.DrawFn) -> tuple[np.ndarray, list[str], int, int]:
    ranks, experts = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    cells = st.lists(st.booleans(), min_size=2 * experts * ranks, max_size=2 * experts * ranks)
    nodes = [str(draw(st.integers(0, 3))) for _ in range(ranks)]
    slots = -(-experts // ranks) + draw(st.integers(0, 2))
    return np.array(draw(cells)).reshape(2, experts, ranks), nodes, slots, draw(st.integers(1, 3))


@settings(deadline=None, max_examples=120)
@example(
    (
        np.array([[[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0]]], dtype=bool),
        list("aabbcc"),
        1,
        2,
    )
)
@given(_any_worlds())
def test_as_many_nodes_hold_every_expert_as_can(world: tuple[np.ndarray, list[str], int, int]) -> None:
    """Whatever is held, wherever; nodes of any sizes. Where nodes do not suffice, as many ranks hold it as can."""
    held, nodes, slots, wanted = world
    _, experts, ranks = held.shape
    repair = repair_placements(held, nodes=nodes, min_replicas=wanted, max_slots=slots)
    on_nodes = on_ranks = _most_replicas(experts, nodes, slots, wanted)
    if len(set(nodes)) < wanted:
        on_ranks = _most_replicas(experts, list(map(str, range(ranks))), slots, wanted)
    assert repair.min_replicas == on_ranks
    for placement in repair.placements:
        assert placement.replicas.max() == 1
        assert placement.replicas.sum(axis=0).max() <= slots
        for expert in range(experts):
            assert len({nodes[rank] for rank in placement.holders(expert)}) >= on_nodes
            assert len(placement.holders(expert)) >= on_ranks


def test_replicas_come_back_after_a_kill_on_one_machine() -> None:
    """8 experts twice on 4 ranks of one node: a rank dies, and a new one comes."""
    held = _held(8, 4, 2)
    for change in ("killed", "joined", "killed", "joined"):
        if change == "killed":
            held = np.delete(held, 1, axis=2)
        else:
            held = np.concatenate([held, np.zeros((*held.shape[:2], 1), dtype=bool)], axis=2)
        repair = repair_placements(held, nodes=["here"] * held.shape[2], min_replicas=2)
        held = np.stack([placement.replicas > 0 for placement in repair.placements])
        assert repair.min_replicas == 2
        assert (held.sum(axis=2) == 2).all()
        assert np.ptp(held.sum(axis=1)) <= 1


def test_a_lost_node_of_five_costs_no_redundancy_and_little_more_than_must_be_copied() -> None:
    """8 ranks a node, 2 slots, 32 experts: the slots that are left are exactly those that 2 replicas need."""
    nodes = [str(rank // 8) for rank in range(32)]
    copied, needed = 0, 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        load = generator.zipf(1.5, 32).clip(max=100)
        before = packed_placement(load, Cluster.of(40, 2, ranks_per_node=8), 2).replicas > 0
        lost = 8 * int(generator.integers(0, 5))
        held = np.delete(before, np.arange(lost, lost + 8), axis=1)[None]
        repair = repair_placements(held, nodes=nodes, min_replicas=2, max_slots=2)
        assert repair.min_replicas == 2
        copied += _copies(held[0], repair.placements[0].replicas)
        needed += _fewest_copies(held[0], nodes, 2, 2)
    assert needed <= copied <= 1.03 * needed


def test_a_crowded_layer_does_not_lower_the_others() -> None:
    """The first layer holds one expert everywhere; what fits the second fits it, too."""
    held = np.zeros((2, 4, 4), dtype=bool)
    held[0, 0] = True
    held[1] = uniform_placement(4, 4, 2).replicas > 0
    repair = repair_placements(held, nodes=list("abcd"), min_replicas=2, max_slots=2)
    assert repair.min_replicas == 2
    assert (repair.placements[1].replicas > 0).tolist() == held[1].tolist()


@pytest.mark.parametrize(("ranks", "experts"), [(4, 8), (4, 7), (3, 8), (6, 16)])
def test_a_lost_rank_costs_only_its_own_replicas(ranks: int, experts: int) -> None:
    held = np.delete(_held(experts, ranks, 2), 1, axis=2)
    nodes = [str(rank) for rank in range(ranks - 1)]
    repair = repair_placements(held, nodes=nodes, min_replicas=2)
    for layer, placement in zip(held, repair.placements, strict=True):
        lost = 2 * experts - int(layer.sum())
        copied = int(((placement.replicas > 0) & ~layer).sum())
        assert copied <= lost + 1  # at most one more, to level


def test_same_input_same_placement() -> None:
    held = np.delete(_held(9, 5, 2), 2, axis=2)
    first, second = (repair_placements(held, nodes=list("abcd"), min_replicas=2) for _ in range(2))
    assert first.placements == second.placements


def test_too_few_slots_are_refused_with_the_cure() -> None:
    with pytest.raises(ConfigurationError, match=r"2 ranks of 3 slots cannot hold 8 experts.*slots to 4"):
        repair_placements(_held(8, 2, 1), nodes=["a", "b"], max_slots=3)


def test_layers_are_placed_on_the_ranks_that_compute_them() -> None:
    """Of two stages of two ranks, rank 1 computed the first before and the second from now on."""
    held = np.zeros((2, 4, 5), dtype=bool)
    held[0, :, [0, 1]] = held[1, :, 4] = True  # rank 4 has no stage any more
    repair = repair_stages(held, [(0, 3), (1, 2)], nodes=list("abcde"), min_replicas=1)
    assert [placement.num_ranks for placement in repair.placements] == [5, 5]
    for placement, ranks in zip(repair.placements, [(0, 3), (1, 2)], strict=True):
        assert {rank for expert in range(4) for rank in placement.holders(expert)} == set(ranks)
        assert placement.among(ranks).over(ranks, 5) == placement
        assert [len(placement.experts_on(rank)) for rank in ranks] == [2, 2]
    assert repair_stages(np.zeros((0, 0, 2), dtype=bool), [], nodes=["a", "b"]).placements == ()
