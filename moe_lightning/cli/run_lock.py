"""One command at a time in a run directory: two would write the same files, and one could move the other's away."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.errors import ConfigurationError


@contextmanager
def locked(directory: RunDirectory, party: str | None = None) -> Iterator[bool]:
    """Hold the directory's lock; the kernel lets go of it when this process ends, however it ends.

    Args:
        directory: exists.
        party: what the commands of several machines in one run have in common, the address of their lighthouse; None
            for a command that runs alone.

    Yields whether no other command of the party is there yet.

    Raises:
        ConfigurationError: another command is at work in the directory.
    """
    descriptor, is_first = _acquired(directory, party)
    try:
        yield is_first
    finally:
        os.close(descriptor)


def _acquired(directory: RunDirectory, party: str | None) -> tuple[int, bool]:
    while True:
        descriptor = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_first = _lock(descriptor, directory, party)
            if directory.lock.exists() and os.path.samestat(os.fstat(descriptor), directory.lock.stat()):
                return descriptor, is_first
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the directory was moved aside meanwhile
        directory.create()


def _lock(descriptor: int, directory: RunDirectory, party: str | None) -> bool:
    if _try(descriptor, fcntl.LOCK_EX):
        own = {"pid": os.getpid(), "host": socket.gethostname(), "party": party}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(own).encode(), 0)
        if party is not None:
            _try(descriptor, fcntl.LOCK_SH)
        return True
    owner = _owner(descriptor)
    if party is not None and owner.get("party") == party and _try(descriptor, fcntl.LOCK_SH):
        return False
    raise ConfigurationError(
        f"{directory} is in use by process {owner.get('pid', '?')} on {owner.get('host', '?')}: wait for its end, or "
        "give this run another name with run_name=... (and resume=CHECKPOINT to start from one of that run)"
    )


def _try(descriptor: int, kind: int) -> bool:
    """Whether the lock was free; a file system without locks has none that is taken."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _owner(descriptor: int) -> Mapping[str, object]:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:  # it is being written
        return {}
    return owner if isinstance(owner, Mapping) else {}
