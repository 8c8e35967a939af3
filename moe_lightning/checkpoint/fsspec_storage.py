"""Object stores by fsspec: S3, GCS, Azure and what else has a file system of its own there.

Endpoints, credentials and time-outs are given in fsspec's own ways: the environment of the provider
(`AWS_ACCESS_KEY_ID`, ...), `~/.config/fsspec/*.json`, or `FSSPEC_S3_ENDPOINT_URL` and the like.
"""

from __future__ import annotations

import errno
import importlib.util
import inspect
import os
import random
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from typing_extensions import override

from moe_lightning.checkpoint.object_storage import ObjectStorage
from moe_lightning.checkpoint.storage import Place
from moe_lightning.config import validated
from moe_lightning.errors import CheckpointError, ConfigurationError

T = TypeVar("T")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""What fsspec needs for a scheme, and an extra of this package's name for it."""

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
                    nbytes += file.write(memoryview(buffer).cast("B"))
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
            except OSError as error:  # stores have many ways to say that something is there
                if store.exists(str(path)):
                    raise FileExistsError from error
                if error.errno != errno.ENOSYS:
                    raise
                store.pipe_file(str(path), data)

        try:
            self._try(path, create, is_put=True)
            self._try(path, lambda store: _check_arrived(store, path, len(data)))
        except FileExistsError:
            return self.read_range(path, 0, None) == data  # perhaps by an attempt whose answer was lost
        except OSError:
            self.write(path, [data])  # the name is taken, by what was cut short
        return True

    @override
    def delete(self, path: Place) -> None:
        try:
            self._try(path, lambda store: store.rm_file(str(path)))
        except FileNotFoundError:
            return

    def _try(self, path: Place, action: Callable[[Any], T], *, is_put: bool = False) -> T:
        """What an action on the store returns.

        Raises:
            OSError: it failed for good, or again and again; in words, and with the place.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action(_store(self.scheme, os.getpid()))
            except (CheckpointError, ConfigurationError):
                raise  # of the data, not of the store
            except Exception as error:  # stores raise what their libraries do
                failure = _in_words(error, path, self.scheme, is_put=is_put)
                if isinstance(failure, _FINAL) or attempt == _ATTEMPTS:
                    raise failure from error
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all ranks at once
        raise AssertionError


@lru_cache(maxsize=8)
def _store(scheme: str, process: int) -> Any:
    """A process has its own, and none remembers listings: other processes write there."""
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False)


def _create_option(store: Any) -> dict[str, Any] | None:
    """What makes `pipe_file` put only what is not there; None where nothing does."""
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
    except Exception:  # what is left of it is no object, and the first error is the one to report
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
        example = ", such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if scheme == "s3" else ""
        return PermissionError(errno.EACCES, sentence + example, str(path))
    return OSError(getattr(error, "errno", None) or errno.EIO, reason, str(path))
