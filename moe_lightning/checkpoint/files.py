"""Single-file checkpoints (`.ckpt`) of Lightning, and archives of torch: plain values, durable writes, safe reads.

torch writes a checkpoint as a zip archive, whose last record may have a comment that all readers skip. With the
checksum there, torch and stock Lightning read the file as before:

    archive as torch wrote it (its last two bytes are the length of the comment) | marker | xxh3 of the archive

torch's own CRC-32 covers tensors only, and loading does not compare it. No record that is read takes more memory than
the archive itself, except tensors that repeat their elements, within a limit.
"""

from __future__ import annotations

import glob
import io
import os
import pickle
import re
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from functools import lru_cache
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import IO, Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from moe_lightning.checkpoint.storage.interface import sync_directory
from moe_lightning.compat.containers import Rebuilt
from moe_lightning.errors import (
    CheckpointError,
    ConfigurationError,
    MissingCheckpointError,
    UnreadableCheckpointError,
)
from moe_lightning.files import check_written, open_regular, replacing

SUFFIX = ".ckpt"

CURE_OF_DAMAGE = "restore it from a copy, name another checkpoint, or start over"

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
        check_written(path)
        _check_once(path, about.st_ino, about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise _unreadable(path, error) from error


def check_end(path: Path) -> None:
    """Verify the last bytes of a checkpoint file, which says at once what is none.

    Raises:
        CheckpointError: it is missing, or no checkpoint.
    """
    try:
        check_written(path)
        with open_regular(path, buffering=0) as file:
            _read_end(path, file, path.stat().st_size)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        cure = "give the path of a .ckpt file or of a directory of checkpoints"
        return MissingCheckpointError(f"the checkpoint {path} does not exist: {cure}")
    return UnreadableCheckpointError(f"the checkpoint {path} cannot be read ({error.strerror})")


def _read_end(path: Path, file: IO[bytes], size: int) -> tuple[int, bytes]:
    """Return the size of the part that the checksum covers, and the checksum; it is empty where there is none."""
    file.seek(max(0, size - _COMMENT_BYTES - len(_LENGTH)))
    tail = file.read()
    file.seek(0)
    if (tail[:2], tail[2 : 2 + len(_MARKER)]) == (_LENGTH, _MARKER):
        return size - len(tail), tail[2 + len(_MARKER) :]
    if tail[-_END_BYTES:].startswith(_END_OF_ARCHIVE) and tail.endswith(_NO_LENGTH):
        return size, b""
    if path.suffix == ".safetensors":
        raise weights_alone(path)
    raise UnreadableCheckpointError(
        f"{path} is damaged or no checkpoint: it ends with neither an archive of torch nor a checksum"
    )


def weights_alone(path: object) -> CheckpointError:
    """Return the error for a file that is given as a checkpoint and holds a model only."""
    return CheckpointError(
        f"{path} holds the weights of a model, and not the state of its training: load them into the module with "
        "load_state_dict and give no checkpoint, or give one that was saved with its optimizers"
    )


@lru_cache(maxsize=64)
def _check_once(path: Path, inode: int, changed_ns: int, size: int) -> None:
    with open_regular(path, buffering=0) as file:
        covered, expected = _read_end(path, file, size)
        if not expected:
            _check_contents(path, file, size)
            return
        found = _digest_of(file, covered)
        found.update(_NO_LENGTH)
        if found.hexdigest().encode() != expected:
            raise UnreadableCheckpointError(f"{path} is damaged: its checksum does not match")


def _digest_of(file: IO[bytes], length: int) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64()
    while length > 0 and (chunk := file.read(min(length, _CHUNK_BYTES))):
        digest.update(chunk)
        length -= len(chunk)
    return digest


def _no_archive(origin: object) -> UnreadableCheckpointError:
    return UnreadableCheckpointError(f"{origin} is damaged or no checkpoint: it is not a whole archive of torch")


def _check_contents(path: Path, file: IO[bytes], size: int) -> None:
    check_archive(file, size, str(path))
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except _BAD_ARCHIVE as error:
        raise _no_archive(path) from error
    if damaged is not None:
        raise UnreadableCheckpointError(f"{path} is damaged: the checksum of {damaged} in it does not match")


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
        raise _no_archive(origin) from error
    packed = next((r.filename for r in records if r.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise UnreadableCheckpointError(
            f"{origin} is not a checkpoint of torch: its record {packed} is compressed, and is not read"
        )
    total = sum(record.file_size for record in records)
    if total > size:
        raise UnreadableCheckpointError(
            f"{origin} is not a checkpoint of torch: its {size} bytes hold records of {total} bytes"
        )


TRUST_ADVICE = (
    ": leave these out when you save it, or, if you trust who wrote it, resume with fit(..., weights_only=False)"
)

_EXPANDED_BYTES = 1 << 30
"""Limit for all expanded tensors of an archive that is smaller itself."""


def load_plain(source: Path | bytes, origin: str, advice: str = "") -> Any:
    """Load an archive that torch wrote. Tensors of a file are mapped, so a rank reads only what it keeps.

    Args:
        origin: name for messages.
        advice: end of the message about objects.

    Raises:
        CheckpointError: it is damaged, holds objects that only unsafe unpickling could read, or tensors that need far
            more memory than it has bytes.
        OSError: a file that is missing, or no regular one.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        size = file.seek(0, io.SEEK_END)
        check_archive(file, size, origin)
    is_file = isinstance(source, Path)
    try:
        value = torch.load(
            source if isinstance(source, Path) else io.BytesIO(source),
            map_location="cpu",  # devices that tensors were saved from may not be here
            weights_only=True,
            mmap=is_file,
        )
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))  # torch's own words are a page of advice
        reason = kind[1] if kind else str(error).splitlines()[0]
        raise CheckpointError(
            f"{origin} holds more than tensors and plain values ({reason}), which are not loaded{advice}"
        ) from error
    except Exception as error:  # a pickle that somebody wrote by hand raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableCheckpointError(f"{origin} is damaged or no checkpoint: {reason}") from error
    _check_memory(value, size, origin)
    return value


def load_trusted(source: Path | bytes, origin: str) -> Any:
    """Load an archive with any objects in it, which may run code of whoever wrote it.

    Args:
        origin: name for messages.

    Raises:
        CheckpointError: it is damaged, or the classes of its objects are not known here.
        OSError: a file that is missing.
    """
    try:
        if isinstance(source, bytes):
            return torch.load(io.BytesIO(source), map_location="cpu", weights_only=False)
        return torch.load(source, map_location="cpu", weights_only=False, mmap=True)
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"{origin} holds an object of a class that cannot be imported here ({error}): import what defines it, or "
            "load the file where it was written"
        ) from error
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableCheckpointError(f"{origin} is damaged or no checkpoint: {reason}") from error


def _check_memory(value: Any, size: int, origin: str) -> None:
    """Refuse tensors that repeat a few numbers more often than anybody needs."""
    dense = (tensor for tensor in tensors_in(value) if tensor.layout == torch.strided)
    sizes = ((tensor.nbytes, 0 if tensor.is_meta else tensor.untyped_storage().nbytes()) for tensor in dense)
    expanded, most = sum(nbytes for nbytes, held in sizes if nbytes > held), max(size, _EXPANDED_BYTES)
    if expanded > most:
        raise UnreadableCheckpointError(
            f"{origin} has {size} bytes, and expanded tensors in it stand for {expanded}: at most {most} are read"
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dictionaries, lists and tuples; each container is looked into once."""
    seen: set[int] = set()
    left = [value]
    while left:
        entry = left.pop()
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, dict | list | tuple) and id(entry) not in seen:
            seen.add(id(entry))
            left += reversed(list(entry.values() if isinstance(entry, dict) else entry))


def read_checkpoint(path: Path, *, is_trusted: bool = False) -> dict[str, Any]:
    """A checkpoint file; tensors are mapped, so a rank reads only what it keeps.

    Args:
        is_trusted: unpickle any object, which may run code of whoever wrote the file; else only tensors and plain
            values are read.

    Raises:
        CheckpointError: the file is missing, damaged, or holds objects that are not read.
    """
    try:
        origin = f"the checkpoint {path}"
        checkpoint = load_trusted(path, origin) if is_trusted else load_plain(path, origin, TRUST_ADVICE)
    except OSError as error:
        raise _unreadable(path, error) from error
    if isinstance(checkpoint, dict) and checkpoint and all(isinstance(entry, Tensor) for entry in checkpoint.values()):
        raise weights_alone(path)
    for key in ("state_dict", "pytorch-lightning_version"):
        if not isinstance(checkpoint, dict) or key not in checkpoint:
            raise _foreign(f"{path} has no {key!r}")
    if not isinstance(checkpoint["state_dict"], Mapping):
        raise _foreign(f"{path} has a 'state_dict' that holds no tensors by name")
    loaded: dict[str, Any] = checkpoint
    return loaded


def _foreign(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}: Lightning did not write it, give the path of a .ckpt file")


_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.layout, torch.Size),
)
_INT_BITS = 8 * 255 - 1
"""Bits of the largest integer that torch.load reads without unpickling code."""


Converters = Mapping[str, Callable[[Any], Any]]


class PlainValues:
    """Conversion of a run's saved values, which remembers the objects that it has found.

    NumPy scalars become numbers, arrays tensors (of text: lists), paths text, members of enumerations their values,
    other libraries' containers what their converters return. The values of the run itself are not changed; a container
    that is saved at two places becomes two.

    Args:
        converters: by the library of a class, returns the plain value of a container or what rebuilds it, and other
            values as they are; raises ValueError where a container has none.
    """

    def __init__(self, converters: Converters = MappingProxyType({})) -> None:
        self._converters = converters
        self._known: set[str] = set()

    def convert(self, value: Any, name: str = "", *, remember: bool = True) -> tuple[Any, dict[str, str]]:
        """Return the value as it is saved, and the objects in it that were not found before.

        Args:
            name: where it stands, for messages.
            remember: leave out the objects found here from now on.

        Returns:
            The converted value, and by name the class of each object that only unsafe unpickling reads.

        Raises:
            ConfigurationError: an object in it cannot be saved at all, values that become the same would be lost, or it
                holds itself.
        """
        conversion = _Conversion(self._converters, self._known)
        converted = conversion.plain(value, name)
        if remember:
            self._known |= conversion.found.keys()
        return converted, conversion.found


class _Conversion:
    """Walk over a value, whose containers become copies."""

    def __init__(self, converters: Converters, known: Set[str]) -> None:
        self._converters, self._known = converters, known
        self.found: dict[str, str] = {}
        self._open: set[int] = set()  # ids of the values that the walk is in

    def plain(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _LEAVES and not (kind is int and value.bit_length() > _INT_BITS):
            return value
        if id(value) in self._open:
            raise ConfigurationError(f"{name} is a part of itself, which is not saved: keep a copy there")
        self._open.add(id(value))
        converted = self._converted(value, name)
        self._open.remove(id(value))
        return converted

    def _converted(self, value: Any, name: str) -> Any:
        kind = type(value)
        simpler = _simplified(value)
        libraries = {base.__module__.partition(".")[0] for base in kind.__mro__} & self._converters.keys()
        try:
            simpler = next((self._converters[library](value) for library in libraries), simpler)
        except ValueError as error:
            raise ConfigurationError(f"{name} cannot be saved ({error}): resolve it before training") from None
        if simpler is not value:
            return self.plain(simpler, name)
        if kind is Rebuilt:
            return Rebuilt(value.kind, self.plain(value.content, name))
        if kind in (Tensor, nn.Parameter) and not vars(value):
            return value
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, name)
        if kind in (list, tuple, set):
            return self._sequence(value, name)
        if name not in self._known and not _is_readable(value, name):
            self.found[name] = _class_of(value)
        return value

    def _mapping(self, value: Any, name: str) -> Any:
        pairs = [
            (self.plain(key, name), self.plain(item, f"{name}[{key!r}]" if name else str(key)))
            for key, item in value.items()
        ]
        _require_distinct([key for key, _ in pairs], name, "keys")
        copy = type(value)(dict(pairs))
        for key, item in getattr(value, "__dict__", {}).items():  # such as the versions in a module's state_dict
            setattr(copy, key, self.plain(item, f"{name}.{key}"))
        return copy

    def _sequence(self, value: Any, name: str) -> Any:
        items = [self.plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, set):
            _require_distinct(items, name, "members")
        return type(value)(items)


def _class_of(value: object) -> str:
    kind = type(value)
    size = f" of {value.bit_length()} bits" if isinstance(value, int) and kind is int else ""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.") + size


def _require_distinct(plain: list[Any], name: str, what: str) -> None:
    """
    Raises:
        ConfigurationError: two keys of a mapping, or members of a set, become the same, or one becomes a container.
    """
    try:
        are_distinct = len(set(plain)) == len(plain)
    except TypeError:
        are_distinct = False
    if not are_distinct:
        raise ConfigurationError(
            f"{name} has {what} that would be saved as {plain}, which could not be its {what}: keep one kind of plain "
            "values there"
        )


def _simplified(value: Any) -> Any:
    """Return what replaces a value of a known kind; the value itself if it is of none."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic) and value.dtype.kind not in "MmV":  # times and records would lose their meaning
        return _number(value)
    if type(value) is np.ndarray:
        return _array(value)
    if isinstance(value, PurePath):
        return str(value)
    return value


def _number(value: np.generic) -> Any:
    plain = value.item()
    return float(plain) if isinstance(plain, np.floating) else value if isinstance(plain, np.generic) else plain


def _array(value: np.ndarray[Any, Any]) -> Any:
    if value.dtype.kind in "OSU":
        return value.tolist()
    try:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    except TypeError:  # a dtype that torch does not have
        return value


def _is_readable(value: object, name: str) -> bool:
    """True if torch.load reads an object without unpickling code, as it does of classes that are declared safe.

    Raises:
        ConfigurationError: it cannot be saved.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # its own methods raise what they like
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"{name} is of class {type(value).__qualname__}, which cannot be saved ({reason}): keep plain values there"
        ) from error
    try:
        load_plain(buffer.getvalue(), name)
    except CheckpointError:
        return False
    return True


def advice_for(found: Mapping[str, str], *, is_elastic: bool = False) -> str:
    """Return the sentence that names objects in a checkpoint, and how to read or avoid them.

    Args:
        found: class of each object, by name.
        is_elastic: whether ranks may join the run, which read its checkpoints.
    """
    what = "the values " + ", ".join(f"{name} ({kind})" for name, kind in found.items())
    cure = "keep plain values and tensors there, or leave hyper-parameters out with save_hyperparameters(ignore=...)"
    if is_elastic:
        return f"{what} hold objects, which a rank that joins an elastic run does not read: {cure}"
    return f"{what} hold objects, so the checkpoint is loaded with fit(..., weights_only=False) only: {cure}"


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint file with its checksum, whole or not at all; it is on disk when this returns.

    torch and stock Lightning read it.

    Raises:
        OSError: the storage failed; what was written is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{glob.escape(path.name)}.*.new"):  # by a process that died while it wrote
        left_over.unlink(missing_ok=True)
    with replacing(path) as staged, open(staged, "wb") as file:
        target = ChecksummedFile(file)
        try:
            torch.save(checkpoint, cast(IO[bytes], target))  # it needs write and flush only
        except RuntimeError as error:
            raise target.error or error from error
        target.finish()
    sync_directory(path.parent)


def read_file(path: Path) -> dict[str, Any]:
    """A checkpoint file, compared with its checksums and read without unpickling code.

    Raises:
        CheckpointError: it is missing or damaged, or Lightning did not write it.
    """
    check_file(path)
    return read_checkpoint(path)
