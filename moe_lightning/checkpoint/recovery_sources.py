"""Where the saved state of a run lies, as one node sees it: snapshots in its memory, checkpoints on storage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_lightning.algorithms.inventory import SnapshotInventory, StorageInventory
from moe_lightning.checkpoint.arena_location import existing_arenas
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.mending import find_usable
from moe_lightning.checkpoint.node_inventory import local_inventory
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of
from moe_lightning.checkpoint.store import run_of


@dataclass(frozen=True, kw_only=True)
class RecoverySources:
    """What a recovery may read.

    Attributes:
        root: directory of the checkpoints.
        name: of the run's arenas on this node, without the run's number.
        node: of this process.
        fallback: room for arenas beside shared memory.
        report: told what is wrong with damaged checkpoints, and what is done about it.
        enter: called before the storage is looked at; no older world commits anything after that.
    """

    root: Place
    name: str
    node: str
    fallback: Path
    report: Callable[[str], None]
    enter: Callable[[], None] = lambda: None

    @property
    def arenas(self) -> Path | None:
        """This node's arenas; None where there are none."""
        run = run_of(self.root)
        if run is None:
            return None
        return existing_arenas(arenas_name(self.name, run, self.node, self.root), self.fallback)

    def snapshots(self) -> list[SnapshotInventory]:
        """Whole snapshots on this node."""
        run, arenas = run_of(self.root), self.arenas
        return local_inventory(arenas, run) if run is not None and arenas is not None else []

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint on storage that is whole or can be mended; one rank of the world asks."""
        run = run_of(self.root)
        if run is None:
            return None
        self.enter()
        return find_usable(self.root, run=run, report=self.report).checkpoint


def arenas_name(name: str, run: str, node: str, root: Place) -> str:
    """Names a run's arenas on a node; nodes have names where several may share a machine. A copy of the run's
    directory has arenas of its own, wherever it lies."""
    return "-".join(part for part in (name, run[:8], storage_of(root).identity(root), node) if part)


def fallback_room(chosen: str | None, root: Place) -> Path:
    """Where snapshots lie if not in shared memory: in the directory that was chosen, else beside the checkpoints, else,
    where these are in no file system, among temporary files."""
    beside = root if isinstance(root, Path) else Path(tempfile.gettempdir())
    return Path(chosen) if chosen else beside


def storage_inventory(checkpoint: Checkpoint) -> StorageInventory:
    """What a checkpoint can contribute to a recovery."""
    versions = tuple(tuple(int(v) for v in layer) for layer in checkpoint.expert_versions())
    session, first = checkpoint.manifest.session, checkpoint.first_step
    return StorageInventory(session=session, step=checkpoint.step, first=first, versions=versions)
