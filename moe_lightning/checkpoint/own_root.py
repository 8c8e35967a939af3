"""The very directory of checkpoints that an agent writes to, whatever its path leads to by now: a run may be moved, and
a copy of it may lie in its place."""

from __future__ import annotations

import errno

from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of


class Elsewhere(OSError):
    """The path does not lead to the run's directory: nothing is written, and nothing there is the run's."""


class OwnRoot:
    """A directory by path and identity.

    Args:
        path: of the checkpoints.
        identity: of the directory (`Storage.identity`); None: of the one that is there when it is first used.
    """

    def __init__(self, path: Place, identity: str | None) -> None:
        self._path, self._storage, self._identity = path, storage_of(path), identity

    def check(self) -> None:
        """See that the path leads to the directory. Where it was deleted, but not what holds it, another will be made.

        Raises:
            Elsewhere: it does not.
        """
        try:
            found = self._storage.identity(self._path)
        except FileNotFoundError:
            if self._identity is not None and not self._storage.is_dir(self._path.parent):
                raise Elsewhere(errno.ENOENT, "the run's directory was moved or deleted", str(self._path)) from None
            self._identity = None
            return
        self._identity = self._identity or found
        if found != self._identity:
            raise Elsewhere(errno.ESTALE, "another directory took the place of the run's", str(self._path))

    def made(self) -> None:
        """The directory is there: it is this one from now on, where it was not known."""
        self._identity = self._identity or self._storage.identity(self._path)
