"""Layouts of copies and parities: what they survive, what they cost, and which one is chosen."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint.protection import (
    BUFFERS,
    aec_layout,
    arc_layout,
    choose_protection,
    no_protection,
    protection_cost,
    sub_shard,
    sub_shard_bytes,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import xor_parity
from tests.unit.planning_references import survives

node_lists = st.lists(st.integers(1, 3), min_size=2, max_size=5).map(
    lambda sizes: [node for node, size in enumerate(sizes) for _ in range(size)]
)


@pytest.mark.parametrize("members", range(2, 9))
def test_sub_shards_of_a_member_lie_in_different_parities(members: int) -> None:
    for member in range(members):
        numbers = [sub_shard(holder, member) for holder in range(members) if holder != member]
        assert sorted(numbers) == list(range(members - 1))


def test_the_papers_example() -> None:
    """REFT eq. 1: node 0 of four keeps b0 + c0 + d0."""
    assert [sub_shard(0, member) for member in (1, 2, 3)] == [0, 0, 0]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 8), st.integers(0, 2**32 - 1), st.data())
def test_one_lost_member_is_decoded(members: int, seed: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=members, max_size=members))
    sizes[0] = max(1, sizes[0])
    nbytes = sub_shard_bytes(sizes)
    assert nbytes * (members - 1) >= max(sizes)
    assert nbytes % 64 == 0
    rng = np.random.default_rng(seed)
    shards = torch.zeros(members, members - 1, nbytes, dtype=torch.uint8)
    for member, size in enumerate(sizes):
        shards[member].view(-1)[:size] = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    parities = [
        xor_parity([shards[j, sub_shard(i, j)].contiguous() for j in range(members) if j != i]) for i in range(members)
    ]
    lost = data.draw(st.integers(0, members - 1))
    for holder in range(members):
        if holder != lost:
            others = [shards[j, sub_shard(holder, j)].contiguous() for j in range(members) if j not in (holder, lost)]
            assert torch.equal(xor_parity([parities[holder], *others]), shards[lost, sub_shard(holder, lost)])


@settings(deadline=None, max_examples=60)
@given(node_lists)
def test_nobody_protects_what_fails_with_it(node_of: list[int]) -> None:
    for layout in (arc_layout(node_of), aec_layout(node_of), aec_layout(node_of, group_nodes=3)):
        for rank, holders in enumerate(layout.holders):
            nodes = [node_of[holder] for holder in holders]
            assert node_of[rank] not in nodes
            assert len(set(nodes)) == len(nodes)
        for group in layout.groups:
            assert len({node_of[member] for member in group}) == len(group) >= 2
        members = [member for group in layout.groups for member in group]
        assert len(set(members)) == len(members)
        assert all(holders or rank in members for rank, holders in enumerate(layout.holders))
        assert all(survives(layout, (node,)) for node in node_of)


@pytest.mark.parametrize(("nodes", "pairs"), [(3, 0), (4, 2), (5, 5), (6, 9)])
def test_pairs_that_one_copy_survives(nodes: int, pairs: int) -> None:
    """One copy survives the pairs that are no neighbours, parities survive no pair, two copies survive all."""
    failed_pairs = list(combinations(range(nodes), 2))
    assert sum(survives(arc_layout(range(nodes)), failed) for failed in failed_pairs) == pairs
    assert not any(survives(aec_layout(range(nodes)), failed) for failed in failed_pairs)
    assert all(survives(arc_layout(range(nodes), 2), failed) for failed in failed_pairs)


def test_costs_of_equal_shards() -> None:
    """REFT: a copy costs 2W/m a node, parities W/(m(m-1)); here W/m is 6144 bytes, of three versions."""
    size, nodes = 6144, 5
    copy, parity = arc_layout(range(nodes)), aec_layout(range(nodes))
    cost = protection_cost(copy, [size] * nodes)
    assert (cost.memory_bytes, cost.sent_bytes) == (BUFFERS * 2 * size, size)
    cost = protection_cost(parity, [size] * nodes)
    assert (cost.memory_bytes, cost.sent_bytes) == (BUFFERS * size * nodes // (nodes - 1), size)
    nothing = protection_cost(no_protection(range(nodes)), [size] * nodes)
    assert (nothing.memory_bytes, nothing.sent_bytes) == (0, 0)


def test_the_choice() -> None:
    assert choose_protection(range(4), replicated=True).method == "none"
    assert choose_protection([0, 0, 0], replicated=False).method == "none"
    assert choose_protection(range(4), replicated=False, failures=0).method == "none"
    assert choose_protection([0, 0, 1], replicated=False).method == "arc", "two nodes: a parity would be a copy"
    assert choose_protection(range(3), replicated=False).groups == ((0, 1, 2),)
    assert [len(g) for g in choose_protection(range(20), replicated=False).groups] == [10, 10]
    assert [len(g) for g in aec_layout(range(20), group_nodes=6).groups] == [7, 7, 6]
    twice = choose_protection(range(4), replicated=False, failures=2)
    assert (twice.method, twice.holders[0]) == ("arc", (3, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arc_layout(range(2), 2), "need 3 nodes, not 2"),
        (lambda: arc_layout(range(2), 0), "0 copies"),
        (lambda: aec_layout([0, 0]), "not 1"),
        (lambda: aec_layout(range(3), group_nodes=1), "not 1"),
        (lambda: choose_protection(range(3), replicated=False, failures=-1), "failures=-1"),
        (lambda: choose_protection(range(3), replicated=False, failures=3), "need 4 nodes, not 3"),
    ],
)
def test_impossible_layouts_are_refused(call: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()  # type: ignore[operator]
