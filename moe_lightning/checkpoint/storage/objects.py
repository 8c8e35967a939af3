"""Checkpoints in object stores, through fsspec (S3, GCS, Azure and others).

    ROOT/step-00000120-w5-SESSION/    a checkpoint, from its first part on; one session's step has one name
        .begun.*                      makes the attempt visible to newer worlds in the store's listing; one for each
                                      rank, since a store may take one write a second to a name
        part-RANK.json, *.distcp      parts being written; an attempt's data files have names that no other attempt uses
        MANIFEST.json                 the commit: put only if there is none

Stores have no rename, links or locks. To close what is being written, a process puts a *void* manifest there first, so
that of commit and close exactly one succeeds. A manifest that is pruned becomes void, too: a process that was stopped
in the middle of its commit then finds the name used. Void manifests are deleted after ten minutes. Files that are
carried over are referred to.

Without locks, agents of one world may assemble the same checkpoint twice, and the first one counts. There are no
leases: keep checkpoints for as long as a reader needs them. A store must list what was put, as S3, GCS and Azure do; if
it lists late, an older world may still commit, and what it commits is whole.

Endpoints, credentials and time-outs are given in fsspec's own ways: the environment of the provider
(`AWS_ACCESS_KEY_ID`, ...), `~/.config/fsspec/*.json`, or `FSSPEC_S3_ENDPOINT_URL` and the like.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import inspect
import os
import random
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
import xxhash
from typing_extensions import override

from moe_lightning.checkpoint.manifest import PRUNED, is_written_by_saves
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage.interface import Place, Stat, exists
from moe_lightning.config import validated
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import MOST_BYTES, too_large

_STAGING = re.compile(r"step-(\d{8,})-w(\d+)-(.+)")
_BEGUN = ".begun"
_VOID = b"void since "
_VOID_BYTES = 40
"""No manifest is as short."""
_VOID_S = 600.0
_CHUNK_BYTES = 16 << 20
_BLOCK_BYTES = 8 << 20
_BLOCKS = 16


class ObjectStorage(ABC):
    """Base class of object stores; `Storage` documents each call. A store overrides the six abstract calls.

    Args:
        scheme: of its URLs.
    """

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._block = lru_cache(maxsize=_BLOCKS)(self._read_block)
        self._void: set[Place] = set()  # what is void stays so: its name is not used again

    # --- what a store can do ------------------------------------------------------------------------------------------

    @abstractmethod
    def size(self, path: Place) -> int:
        """Bytes of an object; FileNotFoundError where there is none."""

    @abstractmethod
    def names(self, path: Place) -> list[str]:
        """List the next component of the names of objects below a prefix, each once."""

    @abstractmethod
    def read_range(self, path: Place, start: int, stop: int | None) -> bytes:
        """Bytes of an object, as many as there are; FileNotFoundError where there is none."""

    @abstractmethod
    def write(self, path: Place, data: Iterable[Any]) -> None:
        """Put an object, visible as a whole or not at all, in the place of what was there."""

    @abstractmethod
    def put_if_absent(self, path: Place, data: bytes) -> bool:
        """Put a small object if there is none of its name; False where there is. At once, if the store can do that."""

    @abstractmethod
    def delete(self, path: Place) -> None:
        """Delete an object, if it is there."""

    # --- files --------------------------------------------------------------------------------------------------------

    def stat(self, path: Place) -> Stat:
        nbytes = 0 if path in self._void else self.size(path)
        if path.name == MANIFEST and nbytes <= _VOID_BYTES:
            self._void.add(path)
            raise FileNotFoundError(f"{path} is void")
        return Stat(nbytes=nbytes, version=nbytes)

    def is_dir(self, path: Place) -> bool:
        """Closed directories are none."""
        names = self.names(path)
        return bool(names) and (MANIFEST not in names or exists(self, path / MANIFEST))

    def read(self, path: Place) -> bytes:
        data = self.read_range(path, 0, MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise too_large(path, self.size(path), MOST_BYTES)
        if path.name == MANIFEST and data.startswith(_VOID):
            raise FileNotFoundError(f"{path} is void")
        return data

    def chunks(
        self, path: Place, *, offset: int = 0, nbytes: int | None = None, fresh: bool = False
    ) -> Iterator[bytes]:
        end = offset + nbytes if nbytes is not None else self.size(path)
        for start in range(offset, end, _CHUNK_BYTES):
            yield self.read_range(path, start, min(end, start + _CHUNK_BYTES))

    def tensor(self, path: Place, *, offset: int, nbytes: int) -> torch.Tensor:
        """Small ranges come out of larger blocks, as what is read together lies together."""
        if nbytes >= _BLOCK_BYTES:
            data = bytearray(self.read_range(path, offset, offset + nbytes))
        else:
            first, last = offset // _BLOCK_BYTES, (offset + nbytes - 1) // _BLOCK_BYTES
            blocks = b"".join(self._block(path, index) for index in range(first, last + 1))
            data = bytearray(blocks[offset - first * _BLOCK_BYTES :][:nbytes])
        if len(data) != nbytes:
            raise ValueError(f"{path} ends before byte {offset + nbytes}")
        return torch.frombuffer(data, dtype=torch.uint8)

    def _read_block(self, path: Place, index: int) -> bytes:
        return self.read_range(path, index * _BLOCK_BYTES, (index + 1) * _BLOCK_BYTES)

    def put(self, path: Place, data: bytes) -> None:
        self.write(path, [data])

    def put_once(self, path: Place, data: bytes) -> bytes:
        return data if self.put_if_absent(path, data) else self.read(path)

    def attempt(self) -> str:
        return f".{secrets.token_hex(4)}"

    def link(self, source: Place, target: Place) -> bool:
        self.size(source)
        return False

    # --- directories of checkpoints -----------------------------------------------------------------------------------

    def make(self, root: Place) -> None:
        return  # names of objects need no directories

    def identity(self, root: Place) -> str:
        return xxhash.xxh3_64_hexdigest(str(root).encode())

    def lock(self, root: Place, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def staging(self, root: Place, session: str, step: int, world: int) -> Place:
        return root / f"step-{step:08d}-w{world}-{session}"

    def owner(self, path: Place) -> tuple[int, str, int] | None:
        match = _STAGING.fullmatch(path.name)
        return (int(match[2]), match[3], int(match[1])) if match else None

    def begin(self, staging: Place) -> None:
        self.put(staging / f"{_BEGUN}{self.attempt()}", b"")

    @contextlib.contextmanager
    def held(self, staging: Place) -> Generator[Place, None, None]:
        """Names of objects do not change."""
        yield staging

    def unfinished(self, held: Place) -> bytes | None:
        return None

    def commit(
        self, staging: Place, held: Place, manifest: bytes, files: Collection[str], check: Callable[[], None]
    ) -> Place:
        check()
        if not self.put_if_absent(staging / MANIFEST, manifest):
            check()
            if not exists(self, staging / MANIFEST):
                raise CheckpointError(f"{staging} was closed while it was written: the snapshot is written again")
            return staging  # another agent's, from the same parts
        with contextlib.suppress(OSError):  # it is a checkpoint, whatever lies beside it until it is pruned
            self._clear(staging, but=files)
        return staging

    def close(self, staging: Place) -> None:
        self.put_if_absent(staging / MANIFEST, _void())

    def sweep(self, root: Place) -> None:
        return  # `discard` deletes what is closed

    def discard(self, staging: Place) -> None:
        names = self.names(staging)
        if PRUNED in names or exists(self, staging / MANIFEST):
            return
        if MANIFEST not in names:
            self.close(staging)
            if exists(self, staging / MANIFEST):
                return  # committed this instant
        self._clear(staging)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if time.time() - float(self.read_range(staging / MANIFEST, len(_VOID), None)) > _VOID_S:
                self.delete(staging / MANIFEST)

    def is_own(self, path: Place) -> bool:
        return True

    def retire(self, path: Place) -> None:
        self.put(path / PRUNED, self.read(path / MANIFEST))
        self.put(path / MANIFEST, _void())

    def unmark(self, path: Place) -> None:
        self._clear(path)
        self.delete(path / PRUNED)

    def lease(self, path: Place) -> AbstractContextManager[None]:
        self.stat(path / MANIFEST)
        return nullcontext()

    def unread(self, path: Place) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def _clear(self, directory: Place, *, but: Collection[str] = ()) -> None:
        """Delete what saves write, but no manifest."""
        for name in self.names(directory):
            if (name.startswith(_BEGUN) or is_written_by_saves(name)) and name != MANIFEST and name not in but:
                self.delete(directory / name)


def _void() -> bytes:
    return _VOID + f"{time.time():.0f}".encode()


T = TypeVar("T")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""Package that fsspec needs for a scheme, and the extra of this package that installs it."""

_ATTEMPTS = 8
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)


@validated
class FsspecStorage(ObjectStorage):
    """The store of a scheme of URLs. What fails is tried again, with pauses that double.

    Raises:
        ConfigurationError: the package for it is not installed.
    """

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        package = PACKAGES.get(scheme)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"{scheme}:// needs {package}, which is not installed: pip install {package}")

    @override
    def size(self, path: Place) -> int:
        found = self._try(path, lambda store: store.info(str(path)))
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path))
        return int(found["size"])

    @override
    def names(self, path: Place) -> list[str]:
        try:
            found = self._try(path, lambda store: store.ls(str(path), detail=False))
        except FileNotFoundError:
            return []
        own = str(path).partition("://")[2].strip("/")
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found if name.strip("/") != own})

    @override
    def read_range(self, path: Place, start: int, stop: int | None) -> bytes:
        return bytes(self._try(path, lambda store: store.cat_file(str(path), start=start, end=stop)))

    @override
    def write(self, path: Place, data: Iterable[Any]) -> None:
        def upload(store: Any) -> None:
            nbytes = 0
            file = store.open(str(path), "wb")
            try:
                for buffer in data:
                    whole = memoryview(buffer).cast("B")
                    for start in range(0, len(whole), _CHUNK_BYTES):  # it copies what it gets at once
                        nbytes += file.write(whole[start : start + _CHUNK_BYTES])
                file.close()
            except BaseException:
                _forget(file)
                raise
            _check_arrived(store, path, nbytes)

        self._try(path, upload, is_put=True)

    @override
    def put_if_absent(self, path: Place, data: bytes) -> bool:
        def create(store: Any) -> None:
            option = _create_option(store)
            try:
                if option is None:
                    raise OSError(errno.ENOSYS, "nothing is put on conditions")
                store.pipe_file(str(path), data, **option)
            except Exception as error:  # stores have many ways to say that something is there
                if store.exists(str(path)):
                    raise FileExistsError from error
                if not isinstance(error, OSError) or error.errno != errno.ENOSYS:
                    raise
                store.pipe_file(str(path), data)

        try:
            self._try(path, create, is_put=True)
        except FileExistsError:
            # perhaps by an attempt whose answer was lost; what has another size need not be read
            return self.size(path) == len(data) and self.read_range(path, 0, None) == data
        if self.size(path) != len(data):
            self.write(path, [data])  # the name is taken, by what was cut short
        return True

    @override
    def delete(self, path: Place) -> None:
        try:
            self._try(path, lambda store: store.rm_file(str(path)))
        except FileNotFoundError:
            return

    def _try(self, path: Place, action: Callable[[Any], T], *, is_put: bool = False) -> T:
        """Run an action on the store, with retries, and return its result.

        Raises:
            OSError: it failed for good, or again and again; in words, and with the place.
        """
        is_renewed = False
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action(_store(self.scheme, os.getpid()))
            except (CheckpointError, ConfigurationError):
                raise  # of the data, not of the store
            except Exception as error:  # stores raise what their libraries do
                failure = _in_words(error, path, self.scheme, is_put=is_put)
                if isinstance(failure, PermissionError) and not is_renewed and attempt < _ATTEMPTS:
                    is_renewed = True
                    _store.cache_clear()  # its credentials may have expired, and been renewed where they came from
                    continue
                if isinstance(failure, _FINAL) or attempt == _ATTEMPTS:
                    raise failure from error
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all ranks at once
        raise AssertionError


@lru_cache(maxsize=8)
def _store(scheme: str, process: int) -> Any:
    """A process has its own, and none remembers listings: other processes write there."""
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


def _create_option(store: Any) -> dict[str, Any] | None:
    """Return the arguments that make `pipe_file` fail if the object exists; None if there are none."""
    parameters = inspect.signature(getattr(store, "_pipe_file", store.pipe_file)).parameters
    if "mode" in parameters:
        return {"mode": "create"}
    return {"overwrite": False} if "overwrite" in parameters else None


def _check_arrived(store: Any, path: Place, nbytes: int) -> None:
    there = int(store.info(str(path))["size"]) if nbytes else 0
    if there != nbytes:
        raise OSError(errno.EIO, f"{there} of {nbytes} bytes have arrived", str(path))


def _forget(file: Any) -> None:
    """Closing it, as its finalizer would, would make an object of what was uploaded by now."""
    try:
        file.discard()
    except Exception:  # what is left of it is not an object, and the first error is the one to report
        file.closed = True
    file.closed = True


def _in_words(error: Exception, path: Place, scheme: str, *, is_put: bool) -> OSError:
    reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "there is one already", str(path))
    if isinstance(error, FileNotFoundError):
        sentence = "there is no such bucket: make it first, or correct the URL" if is_put else "there is no such object"
        return FileNotFoundError(errno.ENOENT, sentence, str(path))
    if isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {reason}".lower():
        sentence = f"access was refused ({reason}): give credentials in the ways of {PACKAGES.get(scheme, 'fsspec')}"
        return PermissionError(errno.EACCES, sentence, str(path))
    return OSError(getattr(error, "errno", None) or errno.EIO, reason, str(path))
