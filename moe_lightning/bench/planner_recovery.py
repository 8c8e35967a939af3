"""How long a recovery's plans take on large clusters: repaired placements, sources of state, odds of survival."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from moe_lightning.algorithms.inventory import HeldExpert, RankInventory, SnapshotInventory, SnapshotKind
from moe_lightning.algorithms.migration import BoolArray
from moe_lightning.algorithms.recovery_planner import plan_recovery
from moe_lightning.algorithms.recovery_probability import sampled_recovery
from moe_lightning.algorithms.repair import repair_placements
from moe_lightning.bench.planner_row import PlannerRow, measured

_SLOTS = 2
_RANKS_PER_NODE = 8
_STEPS = (18, 19)
_LIVE_VERSION = 20


def recovery_rows(num_ranks: int, num_experts: int, num_layers: int) -> Iterator[PlannerRow]:
    """The plans of a recovery on nodes of 8 ranks with 2 slots each, one of which is lost."""
    held = _held(num_ranks, num_experts, num_layers)
    left = held[..., _RANKS_PER_NODE:]
    nodes = [str(rank // _RANKS_PER_NODE) for rank in range(num_ranks)]
    survivors = nodes[_RANKS_PER_NODE:]
    live = _inventories(left, survivors, live_version=_LIVE_VERSION)
    fresh = _inventories(held, nodes, live_version=-1)
    shape = {"num_layers": num_layers, "num_experts": num_experts}
    tables = [layer.astype(np.int64) for layer in held[:4]]
    layered = [tables[index % len(tables)] for index in range(num_layers)]
    calls: dict[str, Callable[[], object]] = {
        "repair, nothing live": lambda: repair_placements(np.zeros_like(held), nodes=nodes, min_replicas=2),
        "repair, a node lost": lambda: repair_placements(left, nodes=survivors, min_replicas=2, max_slots=_SLOTS),
        "plan_recovery, live": lambda: plan_recovery(live, None, **shape),
        "plan_recovery, snapshots": lambda: plan_recovery(fresh, None, **shape),
        "sampled_recovery, 8 of N": lambda: sampled_recovery(layered, 8),
        "sampled_recovery, N/2 of N": lambda: sampled_recovery(layered, num_ranks // 2),
    }
    for name, call in calls.items():
        yield measured(name, call, num_ranks, num_experts, num_layers, goal_s=1.0)


def _held(num_ranks: int, num_experts: int, num_layers: int) -> BoolArray:
    """bool [L, E, N]: every rank's slots under a placement that differs from layer to layer."""
    held = np.zeros((num_layers, num_experts, num_ranks), dtype=np.bool_)
    ranks = np.arange(num_ranks)
    for layer in range(num_layers):
        for slot in range(_SLOTS):
            held[layer, (ranks * (2 * slot + 1) + 7 * slot + layer) % num_experts, ranks] = True
    return held


def _inventories(held: BoolArray, nodes: list[str], live_version: int) -> list[RankInventory]:
    """What the ranks report: live experts or none, and two whole snapshots of every rank in its node's memory."""
    num_layers, num_experts, num_ranks = held.shape
    written: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for number in range(num_layers * num_experts):
        written[number % num_ranks].append(divmod(number, num_experts))
    experts: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for layer, expert, rank in np.argwhere(held).tolist() if live_version >= 0 else ():
        experts[rank].append((layer, expert))
    return [
        RankInventory(
            rank=rank,
            node=nodes[rank],
            live_version=live_version,
            experts=tuple(experts[rank]),
            snapshots=tuple(
                SnapshotInventory(
                    kind=SnapshotKind.ARENA,
                    writer=rank,
                    session="1",
                    step=step,
                    world_size=num_ranks,
                    experts=tuple(HeldExpert(layer, expert, step, step) for layer, expert in written[rank]),
                )
                for step in _STEPS
            ),
        )
        for rank in range(num_ranks)
    ]
