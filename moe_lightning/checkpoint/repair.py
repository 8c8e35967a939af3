"""Repair of damaged checkpoints, and the sources of a restore that a node sees.

Every piece has a checksum of its own, so damage is located to the tensor. A damaged expert tensor is read in the newest
version, not younger than its own, that is undamaged in any stored checkpoint: a second copy of the same version costs
nothing, an older one the tokens in between (`CheckpointSource.expert_versions`, counted by the ledger). If there is
none, no checkpoint with that expert can be used. Everything else is new in each checkpoint: if it is damaged, the
checkpoint before is tried. The same holds for windows whose steps are run again, because those promise that nothing is
lost.

Sources for falling back by expert: PEC 3.1 (experts tolerate older state); the papers do not treat damage on storage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_lightning.checkpoint.arena import existing_arenas
from moe_lightning.checkpoint.directory import checkpoints, run_of, run_record_problem
from moe_lightning.checkpoint.loader import Checkpoint, Damage, Found, unreadable
from moe_lightning.checkpoint.memory import local_inventory
from moe_lightning.checkpoint.policy import unseen_tokens
from moe_lightning.checkpoint.recovery_plan import SnapshotInventory, StorageInventory
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import is_expert_key, parse_expert_key

_MOST_LISTED = 3


def find_usable(root: Place, *, run: str | None = None, report: Callable[[str], None] | None = None) -> Found:
    """The newest checkpoint that is whole or can be repaired.

    Args:
        root: a directory of checkpoints; it may be empty or missing.
        run: the run that they must belong to, if that matters.
        report: called with each problem and its repair.
    """
    problems: list[str] = []

    def note(*sentences: str, then: str = "") -> None:
        problems.extend(sentences)
        if report is not None:
            for sentence in sentences:
                report(f"{sentence}{then}")

    record_problem = run_record_problem(root)
    if record_problem is not None:
        note(f"{record_problem}; the checkpoints beside it tell the run")
    note(*unreadable(root))
    readable = [path for path, _ in checkpoints(root)]
    for path in readable:
        try:
            checkpoint, sentences = _mend(Checkpoint(path, run=run), readable)
        except CheckpointError as error:
            note(str(error), then="; the checkpoint before it is tried")
        else:
            note(*sentences)
            return Found(checkpoint=checkpoint, problems=tuple(problems))
    return Found(checkpoint=None, problems=tuple(problems))


def repaired(path: Place, *, report: Callable[[str], None]) -> Checkpoint:
    """One checkpoint, repaired from those beside it where it is damaged.

    Raises:
        CheckpointError: it is none, something else than experts is damaged, or an expert has no undamaged version.
    """
    damaged, others = Checkpoint(path), [other for other, _ in checkpoints(path.parent)]
    try:
        checkpoint, sentences = _mend(damaged, others)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; restore it from a copy, name another checkpoint, or start anew") from error
    for sentence in sentences:
        report(sentence)
    return checkpoint


def _mend(checkpoint: Checkpoint, paths: Sequence[Place]) -> tuple[Checkpoint, list[str]]:
    """A checkpoint of which everything can be read, and what was wrong with it and what that costs."""
    damages = checkpoint.damages()
    for damage in damages:
        if not all(is_expert_key(key) for key in damage.keys) or (
            damage.keys and checkpoint.first_step < checkpoint.step
        ):
            raise CheckpointError(damage.problem)
    lost = sorted({key for damage in damages for key in damage.keys})
    if not lost:
        return checkpoint, [_harmless(damage) for damage in damages]
    others = list(_others(checkpoint, paths))
    substitutes = {}
    for key in lost:
        name = _newest_intact(key, checkpoint, others)
        if name is None:
            problem = next(damage.problem for damage in damages if key in damage.keys)
            layer, expert = parse_expert_key(key)[:2]
            raise CheckpointError(
                f"{problem}, and no kept checkpoint has another version of expert {expert} of layer {layer}"
            )
        substitutes[key] = name
    whole = Checkpoint(checkpoint.path, substitutes=substitutes)
    costs = _costs(checkpoint, whole)
    return whole, [_sentence(d, checkpoint, whole, costs) if d.keys else _harmless(d) for d in damages]


def _others(checkpoint: Checkpoint, paths: Sequence[Place]) -> Iterator[Checkpoint]:
    for path in paths:
        if path != checkpoint.path:
            try:
                other = Checkpoint(path, run=checkpoint.manifest.run)
            except CheckpointError:
                continue  # pruned meanwhile, or another run's
            yield other


def _newest_intact(key: str, checkpoint: Checkpoint, others: Sequence[Checkpoint]) -> str | None:
    """The checkpoint with the newest undamaged version of a tensor that is no younger than the checkpoint's own."""
    wanted, newest = checkpoint.outline(key), checkpoint.version(key)
    fitting = [other for other in others if other.outline(key) == wanted and other.version(key) <= newest]
    for other in sorted(fitting, key=lambda other: -other.version(key)):
        if all(other.is_intact(piece) for piece in other.stored(key)):
            return other.path.name
    return None


def _costs(before: Checkpoint, after: Checkpoint) -> Mapping[tuple[int, int], int] | None:
    """(layer, expert) -> tokens lost by reading other versions; None where the checkpoint counts none."""
    if not before.keys("ledger"):
        return None
    saved = before.read_object("ledger")
    lost = unseen_tokens(saved, before.step, after.expert_versions())
    lost -= unseen_tokens(saved, before.step, before.expert_versions())
    return {(layer, expert): int(lost[layer, expert]) for layer, expert in np.argwhere(lost).tolist()}


def _harmless(damage: Damage) -> str:
    return f"{damage.problem}; no state lies there, so nothing is lost"


def _sentence(
    damage: Damage, before: Checkpoint, after: Checkpoint, costs: Mapping[tuple[int, int], int] | None
) -> str:
    """Describe the damage, the version that is read instead of each expert, and the tokens lost."""
    experts = sorted({parse_expert_key(key)[:2] for key in damage.keys})
    fates = [_fate(expert, damage, before, after) for expert in experts[:_MOST_LISTED]]
    rest = f" and {len(experts) - _MOST_LISTED} more" if len(experts) > _MOST_LISTED else ""
    lost = "tokens are not counted" if costs is None else f"{sum(costs.get(e, 0) for e in experts)} tokens are lost"
    return f"{damage.problem}; {', '.join(fates)}{rest}; {lost}"


def _fate(expert: tuple[int, int], damage: Damage, before: Checkpoint, after: Checkpoint) -> str:
    keys = [key for key in damage.keys if parse_expert_key(key)[:2] == expert]
    who = f"expert {expert[1]} of layer {expert[0]}"
    worst = min(keys, key=after.version)
    new, old = after.version(worst), before.version(worst)
    instead = f"in version {new} instead of {old}" if new < old else f"in its version {new}"
    return f"{who} is read {instead} from {after.substitutes[worst]}"


@dataclass(frozen=True, kw_only=True)
class RecoverySources:
    """Sources of state for a recovery.

    Attributes:
        root: directory of the checkpoints.
        name: of the run's arenas on this node, without the run's number.
        node: of this process.
        fallback: room for arenas beside shared memory.
        report: called with each problem of damaged checkpoints and its repair.
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
        """The newest checkpoint on storage that is whole or can be repaired; one rank of the world asks."""
        run = run_of(self.root)
        if run is None:
            return None
        self.enter()
        return find_usable(self.root, run=run, report=self.report).checkpoint


def arenas_name(name: str, run: str, node: str, root: Place) -> str:
    """Names a run's arenas on a node; nodes have names where several may share a machine. A copy of the run's
    directory has arenas of its own, wherever it lies."""
    return "-".join(part for part in (name, run[:8], storage_of(root).identity(root), node) if part)


def fallback_directory(chosen: str | None, root: Place) -> Path:
    """Return the directory of snapshots that do not fit into shared memory.

    The chosen one, else the one of the checkpoints, else, if these are in no file system, that of temporary files.
    """
    beside = root if isinstance(root, Path) else Path(tempfile.gettempdir())
    return Path(chosen) if chosen else beside


def storage_inventory(checkpoint: Checkpoint) -> StorageInventory:
    """Return the session, steps and versions of experts that a checkpoint holds."""
    versions = tuple(tuple(int(v) for v in layer) for layer in checkpoint.expert_versions())
    session, first = checkpoint.manifest.session, checkpoint.first_step
    return StorageInventory(session=session, step=checkpoint.step, first=first, versions=versions)
