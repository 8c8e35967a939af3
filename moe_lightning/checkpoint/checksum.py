"""Checksum of single-file checkpoints, in the comment at the end of their zip archive.

torch writes a checkpoint as a zip archive, whose last record may have a comment that all readers skip. With the
checksum there, torch and stock Lightning read the file as before:

    archive as torch wrote it (its last two bytes are the length of the comment) | marker | xxh3 of the archive

torch's own CRC-32 covers tensors only, and loading does not compare it.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import xxhash

from moe_lightning.errors import CheckpointError, MissingCheckpointError
from moe_lightning.files import open_regular

_MARKER = b"moe-lightning xxh3 "
_COMMENT_BYTES = len(_MARKER) + 16
_LENGTH = _COMMENT_BYTES.to_bytes(2, "little")
_NO_LENGTH = b"\0\0"
_END_OF_ARCHIVE, _END_BYTES = b"PK\5\6", 22
_CHUNK_BYTES = 16 << 20
_BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)


class ChecksummedFile:
    """File for `torch.save` that appends a checksum of what was written.

    Args:
        file: opened for writing, empty.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_64()
        self.error: OSError | None = None
        """The first one of the storage: torch's writer raises others on top of it."""

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._digest.update(data)
        return written

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Append the checksum to the finished archive, and force the file to disk."""
        self._file.seek(-len(_NO_LENGTH), os.SEEK_END)
        self._file.write(_LENGTH + _MARKER + self._digest.hexdigest().encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def check_file(path: Path) -> None:
    """Verify a checkpoint file by its checksum, or, if it has none, its contents by the archive's CRC-32.

    A file is read once as long as it does not change.


    Raises:
        CheckpointError: it is missing, damaged or no checkpoint.
    """
    try:
        about = path.stat()
        _check_once(path, about.st_ino, about.st_mtime_ns, about.st_size)
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"the checkpoint {path} does not exist: give the path of a .ckpt file") from error
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read ({error.strerror})") from error


@lru_cache(maxsize=64)
def _check_once(path: Path, inode: int, changed_ns: int, size: int) -> None:
    with open_regular(path, buffering=0) as file:
        file.seek(max(0, size - _COMMENT_BYTES - len(_LENGTH)))
        tail = file.read()
        file.seek(0)
        length, marker, expected = tail[:2], tail[2 : 2 + len(_MARKER)], tail[2 + len(_MARKER) :]
        if (length, marker) == (_LENGTH, _MARKER):
            found = _digest_of(file, size - len(tail))
            found.update(_NO_LENGTH)
            if found.hexdigest().encode() != expected:
                raise CheckpointError(f"{path} is damaged: its checksum does not match")
        elif tail[-_END_BYTES:].startswith(_END_OF_ARCHIVE) and tail.endswith(_NO_LENGTH):
            _check_contents(path, file, size)
        else:
            raise CheckpointError(
                f"{path} is damaged or no checkpoint: it ends with neither an archive of torch nor a checksum"
            )


def _digest_of(file: IO[bytes], length: int) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64()
    while length > 0 and (chunk := file.read(min(length, _CHUNK_BYTES))):
        digest.update(chunk)
        length -= len(chunk)
    return digest


def _check_contents(path: Path, file: IO[bytes], size: int) -> None:
    check_archive(file, size, str(path))
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except _BAD_ARCHIVE as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} in it does not match")


def check_archive(file: IO[bytes], size: int, origin: str) -> None:
    """Check that the records of an archive take no more memory than the archive itself: torch compresses none.

    Args:
        size: bytes of the archive.
        origin: name for messages.

    Raises:
        CheckpointError: a record is compressed, they overlap, or it is no archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except _BAD_ARCHIVE as error:
        raise CheckpointError(f"{origin} is damaged or no checkpoint: {error}") from error
    packed = next((r.filename for r in records if r.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise CheckpointError(f"{origin} is no checkpoint of torch: its record {packed} is compressed, and is not read")
    total = sum(record.file_size for record in records)
    if total > size:
        raise CheckpointError(f"{origin} is no checkpoint of torch: its {size} bytes hold records of {total} bytes")
