"""Checkpoints on a POSIX file system: a commit is a rename, carried files are hard links.

A reader holds a lease on its checkpoint, a shared lock on the manifest, and pruning skips it. The kernel releases
leases and locks when their holder dies. On a file system without locks nobody sees a lease, and a reader has as long as
`keep_last` checkpoints take.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lightning.checkpoint.manifest import PRUNED, delete_staging
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage.interface import (
    Place,
    Stat,
    collecting,
    lock_exclusively,
    sync_directory,
    write_durably,
)
from moe_lightning.errors import CheckpointError
from moe_lightning.files import NO_LOCKS, check_regular, open_regular, read_bytes

_STAGING = re.compile(r"\.staging-(?:w(\d+)-)?(.+)-(\d{8,})")
_SWEPT = ".swept-"
_CHUNK_BYTES = 16 << 20
_LOCK_S = 60.0
_NO_LEASES = (*NO_LOCKS, errno.ENOLCK)
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSYS)


class PosixStorage:
    """Files of this machine; `storage.Storage` says what each call promises."""

    def stat(self, path: Place) -> Stat:
        about = os.stat(path)
        return Stat(nbytes=about.st_size, version=(about.st_ino, about.st_mtime_ns, about.st_size))

    def names(self, path: Place) -> list[str]:
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_dir(self, path: Place) -> bool:
        return os.path.isdir(path)

    def read(self, path: Place) -> bytes:
        return read_bytes(path)

    def chunks(
        self, path: Place, *, offset: int = 0, nbytes: int | None = None, fresh: bool = False
    ) -> Iterator[bytes]:
        with open_regular(path, buffering=0) as file:
            file.seek(offset)
            while True:
                if fresh:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                chunk = file.read(_CHUNK_BYTES if nbytes is None else min(nbytes, _CHUNK_BYTES))
                if not chunk:
                    return
                if nbytes is not None:
                    nbytes -= len(chunk)
                yield chunk

    def tensor(self, path: Place, *, offset: int, nbytes: int) -> torch.Tensor:
        check_regular(path)
        return torch.from_numpy(np.memmap(os.fspath(path), mode="c", dtype=np.uint8, offset=offset, shape=nbytes))

    def write(self, path: Place, data: Iterable[Any]) -> None:
        # Left by a process that died; never truncated, as the inode could be linked elsewhere.
        self.delete(path)
        with open(path, "xb", buffering=128 << 10) as file:
            for buffer in data:
                file.write(buffer)
            file.flush()
            os.fsync(file.fileno())

    def put(self, path: Place, data: bytes) -> None:
        write_durably(Path(path), data)

    def put_once(self, path: Place, data: bytes) -> bytes:
        self.put(path, data)
        return data

    def attempt(self) -> str:
        return ""

    def delete(self, path: Place) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def link(self, source: Place, target: Place) -> bool:
        try:
            os.link(source, target)
        except FileExistsError:  # from a commit that was interrupted
            return True
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def make(self, root: Place) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)

    def identity(self, root: Place) -> str:
        """Return its device and inode."""
        about = os.stat(root)
        return f"{about.st_dev:x}.{about.st_ino:x}"

    @contextlib.contextmanager
    def lock(self, root: Place, name: str) -> Generator[None, None, None]:
        """Hold a lock file in a directory; the kernel releases it when this process dies. Nothing is held on a file
        system without locks.

        Raises:
            CheckpointError: another process holds it for longer than the timeout.
            OSError: the file system's service of locks failed.
        """
        fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            message = f"the lock of {root} was not free within {_LOCK_S:g} s"
            try:
                lock_exclusively(fd, timeout_s=_LOCK_S, message=message)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise OSError(error.errno, error.strerror, str(root / name)) from error
            yield
        finally:
            os.close(fd)

    def staging(self, root: Place, session: str, step: int, world: int) -> Place:
        return root / f".staging-w{world}-{session}-{step:08d}"

    def owner(self, path: Place) -> tuple[int, str, int] | None:
        match = _STAGING.fullmatch(path.name)
        return (int(match[1] or 0), match[2], int(match[3])) if match else None

    def begin(self, staging: Place) -> None:
        Path(staging).mkdir(exist_ok=True)

    @contextlib.contextmanager
    def held(self, staging: Place) -> Generator[Place, None, None]:
        """By its descriptor (Linux)."""
        fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield Path(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def unfinished(self, held: Place) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self.read(held / MANIFEST)
        return None

    def commit(
        self, staging: Place, held: Place, manifest: bytes, files: Collection[str], check: Callable[[], None]
    ) -> Place:
        try:
            if not os.path.exists(held / MANIFEST):
                write_durably(Path(held / MANIFEST), manifest)
            with os.scandir(held) as entries:  # parts, and what interrupted attempts left
                for entry in entries:
                    if entry.name != MANIFEST and entry.name not in files:
                        os.unlink(entry.path)
            sync_directory(Path(held))
            target = self._free_name(staging)
            check()
            os.rename(staging, target)
        except FileNotFoundError:  # swept by a newer world, which the check says
            check()
            raise
        if not os.path.samefile(target, held):
            # Swept, and made again by one that has not looked for marks yet; it is empty, so no checkpoint.
            self.close(target)
            check()
            raise CheckpointError(f"{staging} was replaced while it was written: the snapshot is written again")
        sync_directory(Path(target.parent))
        return target

    def _free_name(self, staging: Place) -> Place:
        owner = self.owner(staging)
        assert owner is not None
        stem = f"step-{owner[2]:08d}"
        names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
        return next(staging.parent / name for name in names if not os.path.exists(staging.parent / name))

    def close(self, staging: Place) -> None:
        with contextlib.suppress(FileNotFoundError):  # committed, or closed by somebody else
            if not os.path.islink(staging):
                os.rename(staging, staging.with_name(f"{_SWEPT}{secrets.token_hex(8)}"))

    def sweep(self, root: Place) -> None:
        failures: list[OSError] = []
        swept = list(Path(root).glob(f"{_SWEPT}*"))
        if swept:
            sync_directory(Path(root))
        for path in swept:
            with collecting(failures):
                delete_staging(path)
        if failures:
            raise failures[0]

    def discard(self, staging: Place) -> None:
        delete_staging(Path(staging))

    def is_own(self, path: Place) -> bool:
        return not os.path.islink(path)

    def retire(self, path: Place) -> None:
        os.rename(path / MANIFEST, path / PRUNED)
        sync_directory(Path(path))

    def unmark(self, path: Place) -> None:
        os.unlink(path / PRUNED)
        with contextlib.suppress(OSError):  # somebody else's files lie there too
            os.rmdir(path)

    @contextlib.contextmanager
    def lease(self, path: Place) -> Generator[None, None, None]:
        """Keeps a checkpoint directory from being pruned while the context is open.

        Raises:
            FileNotFoundError: it is gone, or being deleted.
        """
        manifest = path / MANIFEST
        fd = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FileNotFoundError(f"{manifest} is being deleted") from error
            except OSError as error:
                if error.errno not in _NO_LEASES:
                    raise
            if not os.path.samestat(os.fstat(fd), os.stat(manifest)):
                raise FileNotFoundError(f"{manifest} was replaced")
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def unread(self, path: Place) -> Generator[bool, None, None]:
        """Yield True if no process reads a checkpoint; none can begin to while the context is open."""
        try:
            fd = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # network file systems lock writable files only
        except FileNotFoundError:
            yield True
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            except OSError as error:  # held, or not known to be free
                free = error.errno in NO_LOCKS
            yield free
        finally:
            os.close(fd)
