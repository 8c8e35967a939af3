"""The run's secret: a file of its owner alone, made by the host that the ranks meet at and copied to their machines."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from moe_lightning.errors import ConfigurationError

_SHORTEST = 32
_LONGEST = 4096


def create_secret(path: Path) -> bytes:
    """The secret in a file, which is made where it is not there: complete from the first moment, mode 0600.

    Raises:
        ConfigurationError: the file cannot be written, or is there and unfit.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")  # mode 0600
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            with suppress(FileExistsError):  # another one was quicker: its secret counts
                os.link(name, path)
            os.unlink(name)
    except OSError as error:
        raise ConfigurationError(
            f"secret_file={path} cannot be written ({error.strerror}): name another place"
        ) from None
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        ConfigurationError: it is not there, somebody else's, open to others, or too short.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(
            f"secret_file={path} cannot be read ({error.strerror}): copy it from the rendezvous host, which makes it"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(f"secret_file={path} is not a file: name one")
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigurationError(f"secret_file={path} belongs to another user: copy it and make the copy yours")
        if found.st_mode & 0o077:
            raise ConfigurationError(
                f"secret_file={path} has mode {stat.S_IMODE(found.st_mode):o}, so others may read it: chmod 600 it"
            )
        secret = os.read(descriptor, _LONGEST + 1).strip()
    finally:
        os.close(descriptor)
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise ConfigurationError(
            f"secret_file={path} holds {len(secret)} bytes, not {_SHORTEST} to {_LONGEST}: "
            "delete it and let the rendezvous host make it anew"
        )
    return secret
