"""Ranks that take and protect snapshots, and ranks of a later world that recover from what is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.memory import MemoryCheckpoint, fetch, local_inventory, packed_bytes_of
from moe_lightning.checkpoint.protection import ProtectionLayout
from moe_lightning.checkpoint.recovery_plan import RankInventory, RecoveryPlan, plan_recovery
from moe_lightning.checkpoint.snapshot_protection import Protector
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.state.pieces import is_expert_key, parse_expert_key
from tests.distributed.harness import connect
from tests.unit.checkpoint_state import EXPERTS, LAYERS, expert_keys, state_of, whole_state

RUN = "run"
ALL = {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}


def node_arenas(base: Path, node: int | str) -> Path:
    arenas = base / f"node{node}"
    arenas.mkdir(exist_ok=True)
    return arenas


def snapshotter_of(
    arenas: Path, rank: int, world_size: int, session: str = "1", object_bytes: int = 4096
) -> Snapshotter:
    return Snapshotter(
        arena_path(arenas, rank),
        run=RUN,
        session=session,
        rank=rank,
        world_size=world_size,
        state=state_of(rank, world_size, 0),
        object_bytes=object_bytes,
        objects=2,
    )


def snapshot(
    snapshotter: Snapshotter,
    rank: int,
    world_size: int,
    step: int,
    fresh: set[int] | None = None,
    objects: dict[str, Any] | None = None,
) -> None:
    """Publish the state after a step; `fresh` are the experts that are copied (None: all)."""
    snapshotter.start(
        step,
        state_of(rank, world_size, step),
        fresh=None if fresh is None else expert_keys(fresh),
        objects=objects or {f"rng/{rank}": {"state": torch.tensor([rank, step])}},
    )
    snapshotter.wait_before_update()
    snapshotter.finish()


def protect(
    rank: int, world_size: int, base: str, layout: ProtectionLayout, steps: Sequence[int], session: str = "1"
) -> dict[str, Any]:
    """Snapshots of some steps, each of them protected; the arenas then go on to steps that are not. The last report,
    with the bytes of the snapshot."""
    world = connect() if world_size > 1 else World.single()
    snapshotter = snapshotter_of(node_arenas(Path(base), layout.node_of[rank]), rank, world_size, session)
    protector = Protector(snapshotter.arena, layout, world)
    snapshotter.on_published = protector.prepare
    result: dict[str, Any] = {}
    for step in steps:
        snapshot(snapshotter, rank, world_size, step)
        assert protector.start(step)
        report = protector.finish()
        assert report is not None
        placed = snapshotter.arena.tables()[0].placed
        result = vars(report) | {"snapshot_bytes": packed_bytes_of(placed)}
    for step in range(steps[-1] + 1, steps[-1] + 4):  # arenas hold three versions: none of them is protected
        snapshot(snapshotter, rank, world_size, step)
    protector.close()
    snapshotter.close()
    return result


def recover(rank: int, world_size: int, base: str, nodes: Sequence[int]) -> RecoveryPlan:
    """Rank r lives on nodes[r]; it plans, fetches the experts that fall to it, and compares every byte."""
    world = connect() if world_size > 1 else World.single()
    arenas = node_arenas(Path(base), nodes[rank])
    own = RankInventory(rank=rank, node=f"node{nodes[rank]}")
    if nodes.index(nodes[rank]) == rank:  # one rank of each node reports
        own = own.with_snapshots(local_inventory(arenas, RUN))
    inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
    plan = plan_recovery(inventories, None, num_layers=LAYERS, num_experts=EXPERTS)
    if plan.level == "memory":
        experts = {pair for pair in ALL if sum(pair) % world_size == rank}
        source = fetch(plan, world, arenas, experts)
        assert_holds(source, dict.fromkeys(range(EXPERTS), plan.version), experts)
    return plan


def assert_holds(source: MemoryCheckpoint, versions: dict[int, int], experts: set[tuple[int, int]]) -> None:
    """Everything that was asked for, with the bytes of its version."""
    randoms = source.keys("rng/")
    assert source.keys() == sorted([*whole_state(0), *randoms])
    for key, then in whole_state(source.step).items():
        if not is_expert_key(key):
            expected = then
        elif parse_expert_key(key)[:2] in experts:
            expected = whole_state(versions[parse_expert_key(key)[1]])[key]
        else:
            continue
        actual = source.read(key)
        assert actual.dtype == expected.dtype, key
        assert torch.equal(actual, expected), key
    for writer, key in enumerate(randoms):
        assert torch.equal(source.read_object(key)["state"], torch.tensor([writer, source.step]))
