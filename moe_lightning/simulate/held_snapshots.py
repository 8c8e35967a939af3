"""What the survivors of a fault hold, as the inventories from which the library plans every recovery.

A node stands for its ranks: it holds their experts, and one snapshot with the experts that it wrote. Protection lays
copies and parities on other nodes as `algorithms.protection` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_lightning.algorithms.inventory import HeldExpert, RankInventory, SnapshotInventory, SnapshotKind
from moe_lightning.algorithms.placement import IntArray
from moe_lightning.simulate.accounts import Mark
from moe_lightning.simulate.policy import Policy

SESSION = "simulated"


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSnapshot:
    """A state in the host memory of the nodes of a world.

    Attributes:
        mark: when it was taken.
        nodes: writers, in the order of the world.
        versions_LE: step of the newest copy of each expert in it.
        writer_LE: which of the nodes wrote each expert.
        lost: nodes that have failed since.
    """

    mark: Mark
    nodes: tuple[int, ...]
    versions_LE: IntArray
    writer_LE: IntArray
    lost: set[int] = field(default_factory=set)

    def experts_by_writer(self) -> dict[int, tuple[HeldExpert, ...]]:
        """What each writer's part holds."""
        found: dict[int, list[HeldExpert]] = defaultdict(list)
        for (layer, expert), version in np.ndenumerate(self.versions_LE):
            writer = int(self.writer_LE[layer, expert])
            found[writer].append(HeldExpert(int(layer), int(expert), int(version), int(version)))
        return {writer: tuple(experts) for writer, experts in found.items()}

    def on_nodes(self, policy: Policy, *, protected: bool) -> dict[int, list[SnapshotInventory]]:
        """By live node: its own part, and with protection the copies or parities of others."""
        experts = self.experts_by_writer()
        found: dict[int, list[SnapshotInventory]] = defaultdict(list)

        def keep(kind: SnapshotKind, on: int, writer: int, members: tuple[int, ...] = ()) -> None:
            if self.nodes[on] not in self.lost:
                part = SnapshotInventory(
                    kind=kind,
                    writer=writer,
                    session=SESSION,
                    step=self.mark.step,
                    world_size=len(self.nodes),
                    experts=experts.get(writer, ()),
                    holder=on if kind is SnapshotKind.PARITY else -1,
                    members=members,
                )
                found[self.nodes[on]].append(part)

        for writer in range(len(self.nodes)):
            keep(SnapshotKind.ARENA, writer, writer)
        if protected:
            layout = policy.layout_of(len(self.nodes))
            for writer, holders in enumerate(layout.holders):
                for holder in holders:
                    keep(SnapshotKind.COPY, holder, writer)
            for group in layout.groups:
                for holder in group:
                    for writer in group:
                        if writer != holder:
                            keep(SnapshotKind.PARITY, holder, writer, group)
        return found


def inventories(
    live: Sequence[int],
    experts: Mapping[int, tuple[tuple[int, int], ...]],
    step: int,
    policy: Policy,
    *,
    newest: HeldSnapshot | None,
    written: HeldSnapshot | None,
) -> list[RankInventory]:
    """One inventory of every live node.

    Args:
        live: nodes, ascending.
        experts: of every node with live state at `step`, (layer, expert) pairs that it holds; one holder of each is
            enough.
        step: of the live state.
        policy: whether live state and memory may be used, and how memory is protected.
        newest: snapshot, the protected one.
        written: what was in memory when the newest checkpoint on storage was taken (MoC's recovery buffer).
    """
    parts: dict[int, list[SnapshotInventory]] = defaultdict(list)
    kept = [newest, written] if policy.memory_recovery or policy.protection != "none" else []
    for index, snapshot in enumerate(kept):
        if snapshot is None or (index and newest is not None and snapshot.mark.step == newest.mark.step):
            continue
        for node, held in snapshot.on_nodes(policy, protected=index == 0).items():
            parts[node] += held
    usable = experts if policy.live_recovery else {}
    return [
        RankInventory(
            rank=rank,
            node=str(node),
            live_version=step if node in usable else -1,
            experts=usable.get(node, ()),
            snapshots=tuple(parts.get(node, ())),
        )
        for rank, node in enumerate(live)
    ]
