"""Checkpoint directories: staging, parts, pruning, and the fence between worlds.

    ROOT/run.json                       the run that the directory belongs to
    ROOT/.staging-wWORLD-SESSION-STEP/  parts being written: data files and part-RANK.json
    ROOT/step-00000120/                 a checkpoint: data files, .metadata (for stock dcp.load), MANIFEST.json
    ROOT/.damaged-SESSION-after-STEP    memory was damaged since: later checkpoints of the session are not restored

On a file system a directory gets its name by a rename after everything in it, MANIFEST.json last, has been forced to
disk, so a checkpoint that has a name is whole. Data files are immutable. Experts that were not saved this time are hard
links to the files of the checkpoint before; where links cannot be made, the manifest refers to `../step-.../file`, and
pruning counts such references. Object stores do all of this otherwise (`storage/objects.py`).

Worlds are numbered, and only the newest may commit. An empty file `.world-NUMBER` marks the newest. A lock would stay
with a process that was stopped in the middle of a commit, so the fence relies on two calls on one directory of which
exactly one succeeds (renames of the staging directory, or conditional puts of its manifest):

    a newer world:   1. write its mark durably      2. close the staging directories of older worlds
    an older world:  1. make a staging directory    2. look for newer marks    3. write    4. commit it

If the older world's second step found no newer mark, its directory existed before the newer world's second step, which
closes it. After `enter_world` returns, no older world can commit.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache

import xxhash

from moe_lightning.checkpoint.manifest import Manifest
from moe_lightning.checkpoint.names import MANIFEST, order_of
from moe_lightning.checkpoint.storage import absolute, storage_of
from moe_lightning.checkpoint.storage.interface import Place, Stat, exists
from moe_lightning.errors import CheckpointError, UnreadableCheckpointError

RECORD = "run.json"


def part_name(rank: int) -> str:
    """Return the name of the file that lists what a rank wrote."""
    return f"part-{rank:05d}.json"


def checkpoints(root: Place) -> list[tuple[Place, Manifest]]:
    """Named checkpoints whose manifest is undamaged, newest first; the data behind it are not looked at."""
    found = []
    for path, _ in headings(root):
        with contextlib.suppress(CheckpointError, OSError):
            found.append((path, _read_once(path, _version_of(path))))
    return found


def headings(root: Place) -> list[tuple[Place, Manifest]]:
    """The same without their pieces, which take many times the memory; one that cannot be read is passed over."""
    found, known = [], _headings.get(root, {})
    remembered: dict[Place, tuple[Stat, Manifest | None]] = {}
    for path in directories(root):
        with contextlib.suppress(OSError):
            version = _version_of(path)
            entry = known.get(path)
            if entry is None or entry[0] != version:
                entry = version, _heading_of(path, version)
            remembered[path] = entry
            if entry[1] is not None:
                found.append((path, entry[1]))
    _headings[root] = remembered
    return sorted(found, key=lambda pair: (-pair[1].sequence, -pair[1].created_s))


def directories(root: Place) -> list[Place]:
    """List everything in a directory with the name of a checkpoint, whether it is one or not, sorted by name."""
    return [root / name for name in sorted(storage_of(root).names(root)) if order_of(name) is not None]


def has_manifest(path: Place) -> bool:
    """Return True if a directory is a checkpoint, perhaps a damaged one."""
    return exists(storage_of(path), path / MANIFEST)


def unreadable(root: Place) -> list[Place]:
    """Return the checkpoints whose manifest is damaged or cannot be read, those of later steps first."""
    readable = {path for path, _ in headings(root)}
    return [path for path in reversed(directories(root)) if path not in readable and has_manifest(path)]


def unread_manifests(root: Place, places: Sequence[Place]) -> list[Place]:
    """Return those of the `directories` here whose manifest `headings` could not read when it was asked last."""
    known = _headings.get(root, {})
    return [path for path in places if path not in known and has_manifest(path)]


_headings: dict[Place, dict[Place, tuple[Stat, Manifest | None]]] = {}
"""By root and checkpoint, of those that were there last."""


def _version_of(path: Place) -> Stat:
    """A manifest is not read again while this is the same, as agents ask for all of them several times a checkpoint."""
    return storage_of(path).stat(path / MANIFEST)


@lru_cache(maxsize=8)
def _read_once(path: Place, version: Stat) -> Manifest:
    return read_manifest(path)


def _heading_of(path: Place, version: Stat) -> Manifest | None:
    """None where the manifest is damaged.

    Raises:
        OSError: it could not be read this time.
    """
    try:
        manifest = _read_once(path, version)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return None
    return replace(manifest, stored=())


def read_manifest(path: Place) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: it is damaged or belongs to another directory or run.
        FileNotFoundError: there is none: the directory is not a checkpoint.
    """
    try:
        data = storage_of(path).read(path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableCheckpointError(f"{path / MANIFEST} cannot be read ({error.strerror})") from error
    manifest = Manifest.parse(data, str(path / MANIFEST))
    order = order_of(path.name)
    if order is not None and order[0] != manifest.step:
        raise UnreadableCheckpointError(f"{path / MANIFEST} belongs to step {manifest.step}, not to {path.name}")
    owner, _ = _recorded_run(path.parent)
    if order is not None and owner is not None and owner != manifest.run:
        raise UnreadableCheckpointError(
            f"{path / MANIFEST} belongs to run {manifest.run}, but {path.parent} holds run {owner}"
        )
    return manifest


def run_of(root: Place) -> str | None:
    """The run that a directory of checkpoints belongs to: the recorded one, or that of its checkpoints where there is
    no valid record, as with copies; None where nothing tells.

    Raises:
        CheckpointError: the checkpoints are of several runs, or neither a record nor a checkpoint can be read.
    """
    run, problem = _recorded_run(root)
    if run is not None:
        return run
    runs = {heading.run for _, heading in headings(root)}
    if len(runs) > 1:
        raise CheckpointError(
            f"{root} has checkpoints of {len(runs)} runs and {problem or f'no {RECORD}'}: move those of all runs but "
            "one elsewhere"
        )
    if problem is not None and not runs:  # of a run that another must not replace, and a resume not begin anew
        raise CheckpointError(f"{problem}, and no checkpoint tells its run: restore or delete it")
    return runs.pop() if runs else None


def run_record_problem(root: Place) -> str | None:
    """Return the problem of the record of a directory's run; None if it is valid or absent."""
    return _recorded_run(root)[1]


def _recorded_run(root: Place) -> tuple[str | None, str | None]:
    """(the run, what is wrong with its record)."""
    path = root / RECORD
    try:
        data = storage_of(root).read(path)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror})"
    try:
        run = json.loads(data)["run"]
    except (ValueError, KeyError, TypeError, RecursionError):
        run = None
    if not isinstance(run, str) or data != _run_record(run):
        return None, f"{path} is damaged (it does not match its checksum)"
    return run, None


def _run_record(run: str) -> bytes:
    digest = xxhash.xxh3_64_hexdigest(run.encode(errors="surrogatepass"))
    return json.dumps({"run": run, "xxh3": digest}).encode()


def claim(root: Place, run: str) -> None:
    """Make the directory and record that it belongs to a run; a damaged record is written again.

    Raises:
        CheckpointError: it belongs to another run.
    """
    storage_of(root).make(root)
    if _recorded_run(root) == (run, None):
        return
    with world_lock(root):  # of two runs that begin at one moment, one gets the directory
        owner = run_of(root)
        if owner is not None and owner != run:
            raise CheckpointError(
                f"{root} holds the checkpoints of run {owner}, not of {run}: choose another directory"
            )
        if run_record_problem(root) is not None:
            storage_of(root).put(root / RECORD, _run_record(run))
        elif owner is None and storage_of(root).put_once(root / RECORD, _run_record(run)) != _run_record(run):
            raise CheckpointError(f"another run has begun to save to {root}: choose another directory")


def newest_of(root: Place, session: str | None = None, *, before: float = math.inf) -> tuple[Place, Manifest] | None:
    """Return the newest checkpoint before a step, of a session if one is given: experts are carried over from it."""
    for path, heading in headings(root):
        if session in (None, heading.session) and heading.step < before:
            with contextlib.suppress(CheckpointError, OSError):
                return path, _read_once(path, _version_of(path))
    return None


_MARK = re.compile(r"\.world-(\d+)")
_DAMAGE = re.compile(r"\.damaged-([\w-]+)-after-(\d+)")
_LOCK = re.compile(r"\.lock(?:-(\d+))?")


class Superseded(CheckpointError):
    """A newer world saves here or has resumed from here."""


def mark_damaged(root: Place, session: str, step: int) -> None:
    """Record that what a session saves of steps after this one may hold damaged memory."""
    storage_of(root).put(root / f".damaged-{session}-after-{max(0, step)}", b"")


def damaged_after(root: Place) -> dict[str, int]:
    """Return the last step that is good of each session that has saved damaged memory since."""
    found: dict[str, int] = {}
    for name in storage_of(root).names(root):
        if match := _DAMAGE.fullmatch(name):
            found[match[1]] = min(int(match[2]), found.get(match[1], int(match[2])))
    return found


def is_sound(session: str, step: int, damaged: Mapping[str, int]) -> bool:
    """Return True if a session saved a step before its memory was damaged, see `damaged_after`."""
    return step <= damaged.get(session, step)


def newest_world(root: Place) -> int:
    """The number of the newest world that has left its mark; 0 where none has."""
    found = [match[1] for name in storage_of(root).names(root) if (match := _MARK.fullmatch(name))]
    return max(map(int, found), default=0)


def next_world(root: Place) -> int:
    """A number for a world that got none from elsewhere: milliseconds since 1970, above all marks."""
    return max(newest_world(root) + 1, time.time_ns() // 1_000_000)


def check_world(root: Place, world: int) -> None:
    """Refuse to go on for a world that is no longer the newest one.

    Raises:
        Superseded: a newer world has left its mark.
    """
    newest = newest_world(root)
    if newest > world:
        raise Superseded(
            f"world {world} may not write to {root} any more: world {newest} has begun to save there or has resumed "
            "from there; what this one had not committed is void; if there is no such run, a clock was ahead: delete "
            f"{root / f'.world-{newest}'}, and give the same command again"
        )


def enter_world(root: Place, world: int) -> None:
    """Leave the mark of a world that begins to save or to resume; after that no older world commits anything.

    Raises:
        Superseded: a newer world was here first.
        OSError: the storage failed.
    """
    check_world(root, world)
    storage = storage_of(root)
    mark = root / f".world-{world}"
    if not exists(storage, mark):
        storage.put(mark, b"")
    for name in storage.names(root):
        owner = storage.owner(root / name)
        if owner is not None and owner[0] < world:
            storage.close(root / name)
    storage.sweep(root)
    for name in storage.names(root):
        for pattern in (_MARK, _LOCK):
            match = pattern.fullmatch(name)
            if match and int(match[1] or 0) < world:
                storage.delete(root / name)


class WorldMark:
    """Mark under which the worlds of this start of a run save to a directory; rank 0 leaves it for all.

    Args:
        root: directory of the checkpoints.
    """

    def __init__(self, root: Place) -> None:
        self._root, self._number = root, 0

    def leave(self, generation: int) -> int:
        """Leave the mark of a world, see `enter_world`, and return its number.

        Args:
            generation: of the world; 0 where worlds do not change: it gets a number of its own, the same in every call.

        Raises:
            Superseded: a newer world was here first.
            OSError: the storage failed.
        """
        root = absolute(self._root)
        if generation == 0:
            self._number = self._number or next_world(root)
        number = generation or self._number
        enter_world(root, number)
        return number


def make_staging(root: Place, session: str, step: int, world: int) -> Place:
    """Make the staging directory of a checkpoint, or find it made; only then look for newer marks.

    Raises:
        Superseded: a newer world has left its mark.
    """
    storage = storage_of(root)
    staging = storage.staging(root, session, step, world)
    storage.begin(staging)
    try:
        check_world(root, world)
    except Superseded:
        storage.close(staging)
        raise
    return staging


def world_lock(root: Place, world: int | None = None) -> AbstractContextManager[None]:
    """Hold the lock of a world (None: the newest): who is stopped while it holds its own does not hold up later ones.

    Raises:
        CheckpointError: another process of this world holds it for long.
    """
    number = newest_world(root) if world is None else world
    return storage_of(root).lock(root, f".lock-{number}" if number else ".lock")
