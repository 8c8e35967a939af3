"""Where text and tokens come from: the standard library's sources, the user's text files, or one file of tokens."""

from __future__ import annotations

import errno
import glob
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_regular, check_written, open_regular

TOKEN_DTYPES = ("uint8", "uint16", "uint32")
_TOKEN_SUFFIXES = (".bin", ".npy")
_CHUNK_BYTES = 1 << 24
_STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_STDLIB_SKIPPED_TREE = ("lib2to3", "tests", "data")  # deliberately broken and foreign sources


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """Bytes [start, stop) of one UTF-8 file."""

    path: Path
    start: int
    stop: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces of 16 to 32 MiB that end at line ends, or where a line is longer, between characters.

        Raises:
            ConfigurationError: the file is not UTF-8, or has become shorter.
        """
        with reading(self.path), open_regular(self.path) as file:
            file.seek(self.start)
            while (left := self.stop - file.tell()) > 0:
                chunk = file.read(min(_CHUNK_BYTES, left))
                chunk += file.readline(min(_CHUNK_BYTES, left - len(chunk)))
                if not chunk:
                    raise OSError(errno.EIO, "it has become shorter", str(self.path))
                if not chunk.endswith(b"\n"):
                    chunk += file.read(min(left - len(chunk), bytes_to_character(file)))
                chunk.decode()
                yield chunk


def bytes_to_character(file: BinaryIO) -> int:
    """Return the number of bytes from the position of a UTF-8 file to the next character, or to its end."""
    following = file.read(3)
    file.seek(-len(following), os.SEEK_CUR)
    return next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of errors inside which text file they concern.

    Raises:
        ConfigurationError: it cannot be read, or is not UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 text ({error.reason}); convert it, leave it out with a glob such as "
            "'folder/**/*.txt', or give tokens as one .bin or .npy file."
        ) from error
    except OSError as error:
        cure = "change its permissions" if isinstance(error, PermissionError) else "replace it, or leave it out"
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}); {cure}.") from error


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One file of a text source; `name` is its path relative to the source's root, with forward slashes."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """`count` tokens of a file, starting at a byte offset; cheap to send to another process."""

    path: Path
    dtype: str
    offset_bytes: int
    count: int

    def open(self) -> npt.NDArray[np.integer]:
        """The tokens as a read-only memory map, [count]."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset_bytes, shape=(self.count,))

    def split(self, index: int) -> tuple[TokenSpan, TokenSpan]:
        """The tokens before `index` and from it on."""
        offset_bytes = self.offset_bytes + index * np.dtype(self.dtype).itemsize
        return (
            TokenSpan(path=self.path, dtype=self.dtype, offset_bytes=self.offset_bytes, count=index),
            TokenSpan(path=self.path, dtype=self.dtype, offset_bytes=offset_bytes, count=self.count - index),
        )


def is_token_file(source: str) -> bool:
    """Whether the source names one file of tokens rather than text."""
    return Path(source).suffix in _TOKEN_SUFFIXES


# ---------------------------------------------------------------------- text


def text_files(source: str) -> tuple[TextFile, ...]:
    """The non-empty text files of a source, sorted by name.

    Args:
        source: "stdlib" (the running Python's own .py files), a file, a folder (every file below it that is not
            hidden), or a glob pattern (`**` goes into folders).

    Raises:
        ConfigurationError: nothing is there, nothing matches, only empty files, or token files among several.
    """
    if source == "stdlib":
        root, paths = _stdlib_files()
    else:
        root, paths = _users_files(source)
    files = []
    for path in paths:
        with reading(path):
            status = path.stat()
            if source != "stdlib":
                check_written(path)
        if status.st_size:
            name = path.relative_to(root).as_posix()
            files.append(TextFile(name=name, path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns))
    if not files:
        raise ConfigurationError(f"The {len(paths)} files of source={source!r} are all empty; give files with text.")
    return tuple(sorted(files, key=lambda file: file.name))


def is_text(file: TextFile) -> bool:
    """Whether a file decodes as UTF-8: some of the standard library's tests hold other encodings on purpose."""
    try:
        file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _stdlib_files() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _STDLIB_SKIPPED_FOLDERS]
        if Path(folder).relative_to(root).parts[:3] == _STDLIB_SKIPPED_TREE:
            below.clear()
            continue
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise ConfigurationError(
            f"This Python has no .py files in {root} for source='stdlib'; set source to a text file or folder of yours."
        )
    return root, [path for path in paths if path.is_file()]


def _users_files(source: str) -> tuple[Path, list[Path]]:
    path = Path(source).expanduser()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        paths = [p for p in visible if p.is_file()]
        root = path
    elif glob.has_magic(source):
        paths = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
        root = Path(os.path.commonpath([found.parent for found in paths])) if paths else path
    else:
        if path.exists():  # a pipe or a device
            with reading(path):
                check_regular(path)
        raise ConfigurationError(
            f"source={source!r} does not exist; give 'stdlib', a text file, a folder, a glob, or a .bin or .npy file."
        )
    if not paths:
        raise ConfigurationError(f"source={source!r} matches no files; check the folder or the pattern.")
    for found in paths:
        if found.suffix in _TOKEN_SUFFIXES:
            raise ConfigurationError(
                f"source={source!r} holds the token file {found.name} among {len(paths)} files; name one token file, "
                "or a glob that matches text only."
            )
    return root, paths


# ---------------------------------------------------------------------- tokens


def token_file(source: str, dtype: str | None) -> TokenSpan:
    """All tokens of a .bin file (raw little-endian integers of `dtype`) or of a one-dimensional integer .npy file.

    Raises:
        ConfigurationError: no such file, no or a wrong dtype, a size that is no whole number of tokens, another shape
            or kind of array, or no tokens at all.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigurationError(f"The token file {source!r} does not exist; check the path.")
    with reading(path):
        check_written(path)
    span = _npy_tokens(path, dtype) if path.suffix == ".npy" else _bin_tokens(path, dtype)
    if not span.count:
        raise ConfigurationError(f"The token file {source!r} is empty; write at least one window of tokens to it.")
    return span


def _bin_tokens(path: Path, dtype: str | None) -> TokenSpan:
    if dtype is None:
        raise ConfigurationError(f"{path} does not say how wide its tokens are; set dtype to one of {TOKEN_DTYPES}.")
    size_bytes, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size_bytes % width:
        raise ConfigurationError(
            f"{path} has {size_bytes} bytes, not a multiple of the {width} bytes of a {dtype} token; set the dtype it "
            "was written with, or write it again."
        )
    little_endian = np.dtype(dtype).newbyteorder("<").str
    return TokenSpan(path=path, dtype=little_endian, offset_bytes=0, count=size_bytes // width)


def _npy_tokens(path: Path, dtype: str | None) -> TokenSpan:
    if dtype is not None:
        raise ConfigurationError(f"dtype={dtype!r} is given, but {path} names its own; leave dtype out.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigurationError(f"{path} is not a whole .npy file ({error}); write it with numpy.save.") from error
    if not isinstance(array, np.ndarray):
        raise ConfigurationError(f"{path} is an .npz archive by its content; save one array with numpy.save.")
    if not isinstance(array, np.memmap) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigurationError(
            f"{path} holds {array.dtype} values of shape {array.shape}; save tokens as one-dimensional integers."
        )
    return TokenSpan(path=path, dtype=array.dtype.str, offset_bytes=int(array.offset), count=len(array))


def token_range(span: TokenSpan) -> tuple[int, int]:
    """The smallest and largest token, read in pieces."""
    tokens, low, high = span.open(), 0, 0
    for start in range(0, span.count, _CHUNK_BYTES):
        piece = tokens[start : start + _CHUNK_BYTES]
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
    return low, high


def fingerprint(parts: object) -> str:
    """32 hexadecimal digits that name a value built of numbers, strings and tuples."""
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())
