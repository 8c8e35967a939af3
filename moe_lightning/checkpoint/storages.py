"""Finds the storage of a place."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from moe_lightning.checkpoint.posix_storage import PosixStorage
from moe_lightning.checkpoint.storage import URL, Place, Storage
from moe_lightning.registry import Registry

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*)://(.*)", re.DOTALL)


class StorageFactory(Protocol):
    """Makes the storage of all URLs of a scheme, once a process."""

    def __call__(self, scheme: str, /) -> Storage: ...


STORAGES: Registry[StorageFactory] = Registry("storage", StorageFactory, {}, makes=Storage)
"""By the schemes of URLs."""

_POSIX = PosixStorage()


def place_of(text: str | os.PathLike[str]) -> Place:
    """The place that a path or a URL means; `file://` is a path.

    Raises:
        ConfigurationError: nobody brings a storage for the URL, or it names none.
    """
    if isinstance(text, Path | URL):
        return text
    return Path(text)


def storage_of(place: Place) -> Storage:
    """What reads and writes at a place."""
    return _POSIX


def absolute(place: Place) -> Place:
    """A place that does not depend on the working directory."""
    return place.absolute() if isinstance(place, Path) else place
