"""Places of checkpoints, the operations of a storage, and durable writes on file systems.

A place is a path of this machine or a `URL`; both are pure paths, so that names are joined alike. Everything is read
and written through the place's `Storage` (`storage.storage_of`): a file system, where a commit is a rename and carried
files are hard links, or an object store, where a commit is a conditional put and carried files are referred to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from moe_lightning.errors import CheckpointError
from moe_lightning.files import replacing

Place = PurePath
"""A `pathlib.Path`, or a `URL`."""


class URL(PurePosixPath):
    """A place in a store that is no file system: `scheme://bucket/name`. A `..` that is joined goes up at once, as
    stores know none."""

    @override
    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":")
        return f"{scheme}://{rest.lstrip('/')}"

    @override
    def __truediv__(self, name: Any) -> URL:
        place = self
        for part in PurePosixPath(name).parts:
            place = place.parent if part == ".." else super(URL, place).__truediv__(part)
        return place

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")


@dataclass(frozen=True, kw_only=True)
class Stat:
    """Size and version of a file, known without reading it.

    Attributes:
        version: changes when the file at this place is replaced.
    """

    nbytes: int
    version: Hashable


class Storage(Protocol):
    """Reads and writes files at places, and gives checkpoints their names. Every call raises OSError where the storage
    fails, and FileNotFoundError where there is nothing at the place."""

    # --- files --------------------------------------------------------------------------------------------------------

    def stat(self, path: Place) -> Stat:
        """Size and version of a file."""

    def names(self, path: Place) -> list[str]:
        """List the names in a directory; none if there is not a directory."""

    def is_dir(self, path: Place) -> bool:
        """Return True if there is a directory."""

    def read(self, path: Place) -> bytes:
        """A file of at most `files.MOST_BYTES`; OSError where it is larger, or no regular file."""

    def chunks(
        self, path: Place, *, offset: int = 0, nbytes: int | None = None, fresh: bool = False
    ) -> Iterator[bytes]:
        """A file, or as much of it as there is of a range, in pieces of some MiB.

        Args:
            fresh: what the storage holds now, not what memory remembers of it.
        """

    def tensor(self, path: Place, *, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes]: a range of a file; ValueError where it is shorter."""

    def write(self, path: Place, data: Iterable[Any]) -> None:
        """Write a new file, durable when this returns; what was there is not touched otherwise.

        Args:
            data: its bytes, buffer by buffer; iterated over once more for each further attempt.
        """

    def put(self, path: Place, data: bytes) -> None:
        """Write or replace a small file whole or not at all; durable when this returns."""

    def put_once(self, path: Place, data: bytes) -> bytes:
        """Write a small file that others may write at the same time; without a lock, the first one counts.

        Returns what is there now.
        """

    def attempt(self) -> str:
        """Return a suffix that is unique to one attempt to write a part, as another one's files may be being committed;
        empty where a lock prevents that."""

    def delete(self, path: Place) -> None:
        """Delete a file, if it is there."""

    def link(self, source: Place, target: Place) -> bool:
        """Link a file into a second directory; False if it must be referred to."""

    # --- directories of checkpoints -----------------------------------------------------------------------------------

    def make(self, root: Place) -> None:
        """Make a directory for checkpoints, if it is not there."""

    def identity(self, root: Place) -> str:
        """Return an identifier of a directory: equal for all paths to it, another one for a copy."""

    def lock(self, root: Place, name: str) -> AbstractContextManager[None]:
        """Hold the lock of this name, where the storage has locks; CheckpointError if it is not free for long.

        Without locks nothing breaks, but work may be done twice.
        """

    def staging(self, root: Place, session: str, step: int, world: int) -> Place:
        """Return the directory in which the parts of a checkpoint are written."""

    def owner(self, path: Place) -> tuple[int, str, int] | None:
        """(world, session, step) of what `staging` has returned; None of any other place."""

    def begin(self, staging: Place) -> None:
        """Make a staging directory, so that `names` of its root lists it, unless it exists."""

    def held(self, staging: Place) -> AbstractContextManager[Place]:
        """Open this very staging directory, also if it is renamed; FileNotFoundError if it is gone."""

    def unfinished(self, held: Place) -> bytes | None:
        """The manifest of a commit that was interrupted, to go on with; None where there is none."""

    def commit(
        self, staging: Place, held: Place, manifest: bytes, files: Collection[str], check: Callable[[], None]
    ) -> Place:
        """Make a staging directory a checkpoint, at once and as a whole; exactly one of `commit` and `close` succeeds.

        Args:
            held: the directory that was filled.
            files: that the manifest lists; whatever else is there goes.
            check: called at the last moment, and where the commit fails; raises what keeps it from being made.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: it was closed.
        """

    def close(self, staging: Place) -> None:
        """See that a staging directory never becomes a checkpoint, unless it is one already."""

    def sweep(self, root: Place) -> None:
        """Delete what was closed."""

    def discard(self, staging: Place) -> None:
        """Close a staging directory and delete what a save has written there, unless it is a checkpoint already."""

    def is_own(self, path: Place) -> bool:
        """Return True if a checkpoint lies at this place itself and is not linked from another."""

    def retire(self, path: Place) -> None:
        """Make a checkpoint's manifest a mark, `PRUNED.json`, of what is to be deleted."""

    def unmark(self, path: Place) -> None:
        """All files that the mark names are deleted: it goes, and the directory if nothing else lies there."""

    def lease(self, path: Place) -> AbstractContextManager[None]:
        """Keep a checkpoint from being retired, where the storage can; FileNotFoundError where it is gone."""

    def unread(self, path: Place) -> AbstractContextManager[bool]:
        """Yield True if no reader holds a lease on a checkpoint; none can be taken while the context is open."""


def exists(storage: Storage, path: Place) -> bool:
    """Return True if there is a file."""
    try:
        storage.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextlib.contextmanager
def collecting(failures: list[OSError]) -> Iterator[None]:
    """Add the failure of a deletion to a list and go on; what somebody else has deleted is none."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            failures.append(error)


def lock_exclusively(fd: int, *, timeout_s: float, message: str) -> None:
    """Take the exclusive lock of an open file, but wait no longer than the timeout.

    Raises:
        CheckpointError: `message`, after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise CheckpointError(message) from error
            time.sleep(0.0005)
        else:
            return


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, on disk when this returns."""
    with replacing(path) as staged, open(staged, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force a directory's entries to disk, where its file system knows of that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # CIFS and file systems in user space may sync files alone
            raise
    finally:
        os.close(fd)
