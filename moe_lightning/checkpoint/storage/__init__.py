"""Storage of checkpoints: POSIX file systems and object stores, by the scheme of a URL."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from moe_lightning.checkpoint.storage.interface import URL, Place, Storage
from moe_lightning.checkpoint.storage.objects import FsspecStorage
from moe_lightning.checkpoint.storage.posix import PosixStorage
from moe_lightning.errors import ConfigurationError
from moe_lightning.registry import Registry

_URL = re.compile(r"([A-Za-z][\w+.-]*)://(.*)", re.DOTALL)


class StorageFactory(Protocol):
    """Makes the storage of all URLs of a scheme, once a process."""

    def __call__(self, scheme: str, /) -> Storage: ...


_BY_FSSPEC = ("s3", "gs", "az", "memory")
STORAGES: Registry[StorageFactory] = Registry(
    "storage", StorageFactory, dict.fromkeys(_BY_FSSPEC, FsspecStorage), makes=Storage
)
"""By the schemes of URLs."""

_POSIX = PosixStorage()


def place_of(text: str | os.PathLike[str]) -> Place:
    """The place that a path or a URL means; `file://` is a path, and a tilde the home folder.

    Raises:
        ConfigurationError: the URL has an unknown scheme, or names no bucket.
    """
    if isinstance(text, Path | URL):
        return text
    match = _URL.fullmatch(os.fspath(text))
    if match is None:
        return Path(os.path.expanduser(text))
    scheme, rest = match[1].lower(), match[2].strip("/")
    if scheme == "file":
        return Path(f"/{rest}")
    STORAGES.find(scheme, "the scheme of a URL")
    if not rest:
        raise ConfigurationError(f"{os.fspath(text)} names no bucket: give {scheme}://BUCKET/NAME")
    place = URL(f"{scheme}://{rest}")
    storage_of(place)
    return place


def shared_place(text: str | os.PathLike[str]) -> Place:
    """The place of a path or a URL that several processes write.

    Raises:
        ConfigurationError: it is visible to one process only.
    """
    place = place_of(text)
    if isinstance(place, URL) and place.scheme == "memory":
        raise ConfigurationError(
            f"{place} is in the memory of one process, and another one writes the checkpoints: give a directory, or "
            "the URL of a store, such as s3://BUCKET/NAME"
        )
    return place


def storage_of(place: Place) -> Storage:
    """Return the storage that reads and writes at a place."""
    return _made(place.scheme) if isinstance(place, URL) else _POSIX


@lru_cache(maxsize=16)
def _made(scheme: str) -> Storage:
    made: Storage = STORAGES.make(scheme, scheme)
    return made


def pause_s(place: Place) -> float:
    """Seconds between two looks at a place: each one at a store costs money."""
    return 0.25 if isinstance(place, URL) else 0.01


def absolute(place: Place) -> Place:
    """A place that does not depend on the working directory."""
    return place.absolute() if isinstance(place, Path) else place
