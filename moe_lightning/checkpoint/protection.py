"""Protection of snapshots on other nodes: copies (ARC) or parities (AEC).

ARC with shifts 1..p: the snapshot of node i is copied to nodes i-1, ..., i-p of a ring; any p failures are survived.
AEC: the snapshot of a member of a sharding group is cut into m-1 sub-shards; member i keeps the XOR of sub-shard
phi(i, j) of every other member j. One failure in each group is survived, for 1/(m-1) of the memory of a copy. Both
together survive no more than ARC alone, so two failures need ARC with two shifts. Members of a group and the holders of
copies are ranks on different nodes: a node with several ranks belongs to as many groups.

Sources: REFT 4.1-4.3. Ours: uneven nodes, groups of bounded size, memory of all buffers.

Shapes: N ranks; node_of[N]; W bytes of each rank's snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Protocol

from moe_lightning.arrays import cut
from moe_lightning.errors import ConfigurationError
from moe_lightning.registry import Registry

BUFFERS = 3
"""Versions that a protecting file has room for: one whole everywhere, one perhaps not, one being written."""


@dataclass(frozen=True, kw_only=True)
class ProtectionLayout:
    """Holders of the copies and parities of every rank's snapshot.

    Attributes:
        method: name of the protection that laid it out.
        node_of: failure domain of each rank, [N].
        holders: the ranks that keep a copy of each rank's snapshot, [N][p]; with AEC only where a rank has no group.
        groups: sharding groups of AEC, ranks on distinct nodes.
    """

    method: str
    node_of: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def protects(self) -> bool:
        """True if any snapshot is protected."""
        return bool(self.groups) or any(self.holders)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The sharding group of a rank; empty where it has none."""
        return next((group for group in self.groups if rank in group), ())

    def copied_writers(self, rank: int) -> tuple[int, ...]:
        """The other ranks whose snapshots this rank copies."""
        return tuple(writer for writer, holders in enumerate(self.holders) if rank in holders)


@dataclass(frozen=True, kw_only=True)
class ProtectionCost:
    """Predicted cost of a layout for the busiest rank.

    Attributes:
        memory_bytes: host memory of protecting files.
        sent_bytes: sent for each protected snapshot.
    """

    memory_bytes: int
    sent_bytes: int


def sub_shard(holder: int, member: int) -> int:
    """phi: the sub-shard of a member that goes into a holder's parity, by their positions in the group; for a fixed
    member it takes every value of 0..m-2 once."""
    assert holder != member
    return holder if holder < member else holder - 1


def sub_shard_bytes(shard_bytes: Sequence[int]) -> int:
    """Bytes of a sub-shard, and of a parity, of a group whose shards have these sizes: the largest cut into m-1 parts
    of whole 64 bytes."""
    parts = max(1, len(shard_bytes) - 1)
    return -(-max(shard_bytes) // (64 * parts)) * 64


def arc_layout(node_of: Sequence[int], failures: int = 1, /) -> ProtectionLayout:
    """As many copies as nodes may fail, on the nodes before each node (ARC).

    Raises:
        ConfigurationError: no copies, or more than other nodes.
    """
    nodes = sorted(set(node_of))
    if not 1 <= failures < len(nodes):
        raise ConfigurationError(
            f"{failures} copies of every snapshot need {failures + 1} nodes, not {len(nodes)}: "
            "survive fewer failures or use more nodes"
        )
    holders = tuple(_ring_holders(node_of, rank, failures) for rank in range(len(node_of)))
    return ProtectionLayout(method="arc", node_of=tuple(node_of), holders=holders)


def aec_layout(node_of: Sequence[int], failures: int = 1, /, *, group_nodes: int = 8) -> ProtectionLayout:
    """Parities in sharding groups, each of which survives one failed node (AEC). The i-th ranks of a block of about
    `group_nodes` nodes are a group; a rank that is alone (uneven nodes) is copied.

    Raises:
        ConfigurationError: fewer than two nodes, or groups of fewer.
    """
    nodes = sorted(set(node_of))
    if len(nodes) < 2 or group_nodes < 2:
        raise ConfigurationError(
            f"parities need at least 2 nodes in a group, not {min(len(nodes), group_nodes)}: "
            "use more nodes, or no protection"
        )
    ranks = _ranks_by_node(node_of)
    bounds = cut(len(nodes), max(1, len(nodes) // group_nodes))
    groups, alone = [], set()
    for first, last in pairwise(bounds):
        block = [ranks[node] for node in nodes[first:last]]
        for index in range(max(map(len, block))):
            group = tuple(members[index] for members in block if index < len(members))
            if len(group) > 1:
                groups.append(group)
            else:
                alone |= set(group)
    holders = tuple(_ring_holders(node_of, rank, 1) if rank in alone else () for rank in range(len(node_of)))
    return ProtectionLayout(method="aec", node_of=tuple(node_of), holders=holders, groups=tuple(groups))


def no_protection(node_of: Sequence[int], failures: int = 0, /) -> ProtectionLayout:
    """Nothing is kept twice."""
    return ProtectionLayout(method="none", node_of=tuple(node_of), holders=((),) * len(node_of))


class Protection(Protocol):
    """Lays out who keeps whose snapshots: copies, or parities of groups. Every rank calls it for itself, so it must
    return the same on all of them."""

    def __call__(self, node_of: Sequence[int], failures: int, /) -> ProtectionLayout:
        """For ranks on at least two nodes.

        Args:
            node_of: node of each rank.
            failures: nodes that may fail at once; at least 1 and fewer than there are.
        """


PROTECTIONS: Registry[Protection] = Registry(
    "protection", Protection, {"none": no_protection, "arc": arc_layout, "aec": aec_layout}
)


def protected_by(protection: Protection, node_of: Sequence[int], failures: int) -> ProtectionLayout:
    """The layout of a world's ranks; with one node there is nowhere to keep anything.

    Raises:
        ConfigurationError: the protection returns something else, or keeps a snapshot on its own node or outside the
            world.
    """
    num_nodes = len(set(node_of))
    if num_nodes < 2:
        return no_protection(node_of)
    layout = protection(node_of, min(failures, num_nodes - 1))
    if not isinstance(layout, ProtectionLayout) or layout.node_of != tuple(node_of):
        raise ConfigurationError(f"a protection must return a ProtectionLayout of its {len(node_of)} ranks")
    kept = [(writer, holder) for writer, holders in enumerate(layout.holders) for holder in holders]
    kept += [pair for group in layout.groups for pair in combinations(group, 2)]
    for writer, holder in kept:
        if not {writer, holder} <= set(range(len(node_of))) or node_of[writer] == node_of[holder]:
            raise ConfigurationError(
                f"the protection {layout.method!r} keeps the snapshot of rank {writer} on rank {holder}, which fails "
                "with it: choose ranks of other nodes"
            )
    return layout


def choose_protection(node_of: Sequence[int], *, replicated: bool, failures: int = 1) -> ProtectionLayout:
    """The cheapest layout that survives so many simultaneous node failures.

    None where all state lives on enough nodes already, or where there is one node only; parities for one failure in
    groups of at least three; else copies.

    Args:
        replicated: every unit of live state is on more than `failures` distinct nodes.
        failures: nodes that may fail at once, 0 for no protection.

    Raises:
        ConfigurationError: negative, or more failures than copies could survive.
    """
    num_nodes = len(set(node_of))
    if failures < 0:
        raise ConfigurationError(f"failures={failures} must be 0 or more")
    if replicated or failures == 0 or num_nodes == 1:
        return no_protection(node_of)
    if failures == 1 and num_nodes >= 3:
        return aec_layout(node_of)
    return arc_layout(node_of, failures)


def protection_cost(layout: ProtectionLayout, snapshot_bytes: Sequence[int]) -> ProtectionCost:
    """Return the cost of a layout if rank r's snapshot has snapshot_bytes[r] bytes.

    Every protected rank also keeps its own snapshot of the protected version: recovery needs the same version of all
    ranks, and the arena holds newer ones.
    """
    memory, sent = ([0] * len(layout.node_of) for _ in range(2))
    for rank, holders in enumerate(layout.holders):
        group = layout.group_of(rank)
        if holders or group:
            memory[rank] += snapshot_bytes[rank]
        sent[rank] += len(holders) * snapshot_bytes[rank]
        for holder in holders:
            memory[holder] += snapshot_bytes[rank]
        if group:
            parity = sub_shard_bytes([snapshot_bytes[member] for member in group])
            memory[rank] += parity
            sent[rank] += (len(group) - 1) * parity
    return ProtectionCost(memory_bytes=BUFFERS * max(memory), sent_bytes=max(sent))


def _ranks_by_node(node_of: Sequence[int]) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(node_of):
        ranks[node].append(rank)
    return ranks


def _ring_holders(node_of: Sequence[int], rank: int, shifts: int) -> tuple[int, ...]:
    """A rank on each of the nodes before this rank's node; the ranks of a node share its neighbour's load."""
    ranks, nodes = _ranks_by_node(node_of), sorted(set(node_of))
    position, index = nodes.index(node_of[rank]), ranks[node_of[rank]].index(rank)
    before = [ranks[nodes[(position - shift) % len(nodes)]] for shift in range(1, shifts + 1)]
    return tuple(holders[index % len(holders)] for holders in before)
