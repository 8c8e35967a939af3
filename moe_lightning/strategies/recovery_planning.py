"""Chooses what a new world goes on from: the live state where nothing of it is lost, else with what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.recovery_plan import RankInventory, RecoveryPlan, StorageInventory, plan_recovery
from moe_lightning.checkpoint.repair import RecoverySources, storage_inventory
from moe_lightning.checkpoint.storage.registry import place_of
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.strategies.recovery_report import RecoveryListener


class RecoveryPlanner:
    """Looks at saved state only when live state is not enough: that reads files, and a plan is waited for.

    Args:
        listeners: publish their snapshots before they are looked for.

    Attributes:
        sources: where saved state lies; None where nothing is saved.
        storage: the checkpoint that the last plan counted on; None where it counted on none.
    """

    def __init__(self, listeners: Sequence[RecoveryListener]) -> None:
        self._listeners = listeners
        self.sources: RecoverySources | None = None
        self.storage: Checkpoint | None = None

    def plan(
        self,
        inventories: list[RankInventory],
        world: World,
        *,
        num_layers: int,
        num_experts: int,
        last_step: int,
        has_trained: bool,
    ) -> tuple[RecoveryPlan, list[RankInventory]]:
        """The plan, the same on every rank, and the inventories it was made from; collective.

        Args:
            inventories: of all ranks, with snapshots or without.
            num_layers, num_experts: L and E.
            last_step: that this rank committed.
            has_trained: this rank's values are not, or may not be, those that were built.

        Raises:
            ConfigurationError: no source is left.
            PeerFailed: nor was there one yet: fresh processes have what was built.
        """
        shape = {"num_layers": num_layers, "num_experts": num_experts}
        plan = plan_recovery(inventories, None, **shape)
        if plan.level == "live" and not plan.reads and not plan.stale:
            return plan, inventories
        if self.sources is not None:
            if not any(inventory.snapshots for inventory in inventories):
                inventories = self._with_snapshots(inventories, self.sources, world)
            plan = plan_recovery(inventories, self._newest_on_storage(self.sources, world), **shape)
        if plan.level == "nothing" and not any(all_gather_json(has_trained, world)):
            fresh = [replace(inventory, live_version=0) for inventory in inventories]
            plan = plan_recovery(fresh, None, **shape)  # nobody has trained yet: what was built is the state
            if plan.level == "nothing":
                raise PeerFailed(
                    "no rank that has trained is left, and parameters that only lost ranks had are saved nowhere, so "
                    "all ranks start anew",
                    "death",
                )
        if plan.level == "nothing":
            saves = "save more often or with protection=arc" if self.sources else "add a PartialExpertsCheckpoint"
            raise ConfigurationError(
                f"no rank, snapshot or checkpoint holds every expert and every part of dense parameters any more, the "
                f"last committed step was {last_step}: raise min_replicas, use dense=hsdp instead of fsdp, or {saves}"
            )
        return plan, inventories

    def _with_snapshots(
        self, inventories: list[RankInventory], sources: RecoverySources, world: World
    ) -> list[RankInventory]:
        """The first rank of every node reports what lies in its memory."""
        for listener in self._listeners:
            listener.publish_snapshots()
        mine = inventories[world.rank]
        first = next(inventory.rank for inventory in inventories if inventory.node == mine.node)
        found = sources.snapshots() if world.rank == first else []
        return [RankInventory.from_json(e) for e in all_gather_json(mine.with_snapshots(found).to_json(), world)]

    def _newest_on_storage(self, sources: RecoverySources, world: World) -> StorageInventory | None:
        """The newest checkpoint that is whole or can be mended, as rank 0 finds it."""
        checkpoint = sources.newest_checkpoint() if world.rank == 0 else None
        own = None
        if checkpoint is not None:
            own = [str(checkpoint.path), checkpoint.substitutes, storage_inventory(checkpoint).to_json()]
        found = all_gather_json(own, world)[0]
        self.storage = None
        if found is None:
            return None
        self.storage = checkpoint or Checkpoint(place_of(found[0]), substitutes=found[1])
        return StorageInventory.from_json(found[2])
