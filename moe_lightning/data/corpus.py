"""Text corpora: sources, tokenizers, memory-mapped tokens and their split.

Sources are the standard library's files, the user's text files, or one file of tokens. Tokens are plain bytes, or
byte-level BPE through the optional package `tokenizers`; they are made once and split into a training and a held-out
part.

The cache is keyed by the files' names and content, the tokenizer and the split. A content is read for that once: while
the files' inodes, sizes and times stay, looking an entry up costs a walk over the folder, so that the ranks of a large
run do not all read the text.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import sysconfig
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local, check_regular, check_written, open_regular, read_bytes, read_text
from moe_lightning.hub import tokenizer_file

TOKEN_DTYPES = ("uint8", "uint16", "uint32")
_TOKEN_SUFFIXES = (".bin", ".npy")
_RECORD_KEYS = ("text", "content", "messages", "conversations", "prompt", "instruction")
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
                try:
                    chunk.decode()
                except UnicodeDecodeError as error:
                    error.start += file.tell() - len(chunk)
                    raise
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
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start:,}); convert it, leave it out with a "
            "glob such as 'folder/**/*.txt', or give tokens as one .bin or .npy file."
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
    version: tuple[str | int, ...]


def _version(path: Path, status: os.stat_result) -> tuple[str | int, ...]:
    """What changes with a file's content, whoever sets its modification time."""
    return str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """`count` tokens of a file, starting at a byte offset; cheap to send to another process.

    Attributes:
        digest: of the tokens, as they were when the cache read or wrote them; None: unknown.
    """

    path: Path
    dtype: str
    offset_bytes: int
    count: int
    digest: str | None = None

    def open(self) -> npt.NDArray[np.integer]:
        """The tokens as a read-only memory map, [count]."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset_bytes, shape=(self.count,))

    def split(self, index: int) -> tuple[TokenSpan, TokenSpan]:
        """The tokens before `index` and from it on."""
        behind = self.offset_bytes + index * np.dtype(self.dtype).itemsize
        first, second = (None if self.digest is None else fingerprint((self.digest, index, part)) for part in range(2))
        return (
            replace(self, count=index, digest=first),
            replace(self, offset_bytes=behind, count=self.count - index, digest=second),
        )


def is_token_file(source: str) -> bool:
    """True if the source names one file of tokens rather than text."""
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
            version = _version(path, status)
            files.append(TextFile(name=name, path=path, size_bytes=status.st_size, version=version))
    if not files:
        raise ConfigurationError(f"The {len(paths)} files of source={source!r} are all empty; give files with text.")
    return tuple(sorted(files, key=lambda file: file.name))


def is_text(file: TextFile) -> bool:
    """True if a file decodes as UTF-8: some of the standard library's tests hold other encodings on purpose."""
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
        paths, root = list(_visible_files(path)), path
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
        if found.suffix == ".jsonl" and (key := _text_key(found)) is not None:
            raise ConfigurationError(
                f"{found} holds JSON objects with {key!r}, not text; write their texts into .txt files, or use "
                "data=instructions for conversations."
            )
    return root, paths


def _visible_files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below a folder that are not hidden, behind links to folders too; a link to a folder above is left."""
    real = folder.resolve()
    if real in above:
        return
    with reading(folder):
        found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in found:
        if path.is_dir():
            yield from _visible_files(path, above | {real})
        elif path.is_file():
            yield path


def _text_key(path: Path) -> str | None:
    """The key of the text in the first record of a JSONL file; None if it is not one of texts or conversations."""
    with reading(path), open_regular(path) as file:
        line = file.readline(_CHUNK_BYTES)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return next((key for key in _RECORD_KEYS if key in record), None) if isinstance(record, dict) else None


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


def read_tokens(span: TokenSpan) -> dict[str, Any]:
    """The smallest and largest token, and the digest of all, read in pieces."""
    tokens, low, high, digest = span.open(), 0, 0, xxhash.xxh3_128()
    for start in range(0, span.count, _CHUNK_BYTES):
        piece = tokens[start : start + _CHUNK_BYTES]
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
        digest.update(piece.data)
    return {"low": low, "high": high, "digest": digest.hexdigest()}


def fingerprint(parts: object) -> str:
    """32 hexadecimal digits that name a value built of numbers, strings and tuples."""
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


_BYTES = 256
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Interface of tokenizers that corpora and conversations use."""

    vocab_size: int

    def encode(self, text: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        """The tokens of a whole text, [count], and the first character of each and the one behind it, [count, 2].

        Raises:
            ValueError: it cannot be encoded.
        """

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens of one UTF-8 text that comes in chunks of whole characters, in the smallest unsigned type that
        holds the vocabulary: those of the whole text, wherever the chunks end.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; U+FFFD stands for bytes that are not UTF-8, such as those of half a character."""

    def save(self, folder: Path) -> None:
        """Leave what decodes the tokens in `folder`."""


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every token of a vocabulary."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


class ByteTokenizer:
    """Every byte is a token."""

    vocab_size = _BYTES

    def encode(self, text: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8)
        character = np.cumsum((tokens & 0xC0) != 0x80) - 1
        return tokens, np.stack([character, character + 1], axis=1)

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer]]:
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index < _BYTES).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Bytes need nothing to be decoded."""


class BpeTokenizer:
    """A tokenizer of the package `tokenizers`, whatever its file says of special, cut or padding tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._processor = tokenizer.post_processor
        tokenizer.post_processor = None  # all that is left of it without special tokens is that it trims offsets
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # The largest number and not the count of entries: vocabularies may have holes, as before added tokens.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._dtype = np.dtype(token_dtype(self.vocab_size))

    def encode(self, text: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        text.encode()  # the package's error for a lone surrogate names no character
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"the tokenizer refuses it: {error}") from error
        places = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, self._dtype), places

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer]]:
        """Windows of the text are encoded side by side, and joined where two that overlap have the same border between
        tokens: a tokenizer may begin every text in a way of its own, such as with a space, and no merge is cut.
        """
        waiting, first = list[_Window](), 0  # windows not yielded yet, and the first token of theirs that is to be
        for texts in _windows(chunks):
            encodings = self._tokenizer.encode_batch([text for _, text in texts], add_special_tokens=False)
            for (start, text), encoding in zip(texts, encodings, strict=True):
                window = _Window(start, text, encoding)
                if waiting and waiting[-1].border(window) is not None:
                    joined = self._joined(waiting)
                    border = joined.border(window)
                    if border is not None:
                        yield np.asarray(joined.encoding.ids[first : border[0]], self._dtype)
                        waiting, first = [], border[1]
                waiting.append(window)
        if waiting:
            yield np.asarray(self._joined(waiting).encoding.ids[first:], self._dtype)

    def _joined(self, windows: list[_Window]) -> _Window:
        """Neighbours without a common border as one: a run of one character, or of digits in groups."""
        if len(windows) == 1:
            return windows[0]
        text = "".join(window.text[:_WINDOW] for window in windows[:-1]) + windows[-1].text
        return _Window(windows[0].start, text, self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        self._tokenizer.post_processor = self._processor
        self._tokenizer.save(str(folder / TOKENIZER_FILE))
        self._tokenizer.post_processor = None


_WINDOW, _OVERLAP = 1 << 13, 1 << 8  # characters


def _windows(chunks: Iterable[bytes]) -> Iterator[list[tuple[int, str]]]:
    """The windows that a chunk completes, as (first character, text); each overlaps the next one."""
    start, text = 0, ""
    for chunk in chunks:
        text += chunk.decode()
        complete = max(0, len(text) - _OVERLAP) // _WINDOW
        yield [(start + at, text[at : at + _WINDOW + _OVERLAP]) for at in range(0, complete * _WINDOW, _WINDOW)]
        start, text = start + complete * _WINDOW, text[complete * _WINDOW :]
    if text:
        yield [(start, text)]


@dataclass(frozen=True)
class _Window:
    """Part of a text from the character `start` on, and its tokens."""

    start: int
    text: str
    encoding: Any

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def border(self, following: _Window) -> tuple[int, int] | None:
        """The tokens of both windows that begin at the same character in the middle of what they share; None if they do
        not have the same tokens there.
        """
        edge = _OVERLAP // 4  # what lies nearer may depend on where a window ends
        inside = following.start + edge, self.end - edge
        ours, theirs = self._borders(*inside), following._borders(*inside)
        if not ours or [border[:2] for border in ours] != [border[:2] for border in theirs]:
            return None
        return ours[len(ours) // 2][2], theirs[len(ours) // 2][2]

    def _borders(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The characters of [begin, end) at which a token begins and the one before has ended, with the vocabulary's
        number of that token and its place among those of the window.
        """
        places, ids = self.encoding.token_to_chars, self.encoding.ids
        first = bisect_left(range(len(ids)), begin - self.start, key=lambda token: places(token)[0])
        last = bisect_left(range(len(ids)), end - self.start, key=lambda token: places(token)[0])
        return [
            (places(token)[0] + self.start, ids[token], token)
            for token in range(max(1, first), last)
            if places(token - 1)[1] <= places(token)[0]
        ]


def tokenizer_key(spec: str) -> str:
    """Return the identity of a tokenizer in a cache: its spec, or the content of its file.

    Args:
        spec: "bytes", "bpe:SIZE" (trained on the training text), the path of a tokenizer.json, or ORG/NAME on the Hub.

    Raises:
        ConfigurationError: none of these, a BPE vocabulary that is too small, or a missing file.
    """
    if spec == "bytes":
        return spec
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not size.isdecimal() or int(size) <= _BYTES:
            raise ConfigurationError(
                f"tokenizer={spec!r} asks for no vocabulary larger than the {_BYTES} bytes; try 'bpe:4096'."
            )
        return spec
    path = tokenizer_file(spec)
    if not path.is_file() and (path.suffix == ".json" or path.is_dir()):
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigurationError(
            f"tokenizer={spec!r} {what}; give the path of a tokenizer.json, which save_pretrained of a fast "
            "tokenizer writes, or 'bytes' or 'bpe:SIZE'."
        )
    if not path.is_file():
        raise ConfigurationError(
            f"tokenizer={spec!r} is neither 'bytes', 'bpe:SIZE', the path of a tokenizer.json, nor ORG/NAME of a model "
            "on the Hub."
        )
    try:
        return xxhash.xxh3_128_hexdigest(read_bytes(path))
    except OSError as error:
        raise ConfigurationError(f"tokenizer={spec!r} cannot be read ({error.strerror}).") from error


def load_tokenizer(spec: str, training_text: Iterable[bytes], *, trained: str | None = None) -> Tokenizer:
    """The tokenizer of a spec (see `tokenizer_key`); only "bpe:SIZE" reads `training_text`, to be trained on it.

    Args:
        trained: content of the tokenizer.json that was trained for a "bpe:SIZE" before; None: it is trained here.

    Raises:
        ConfigurationError: the package `tokenizers` is missing, or the file is no tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    package = _tokenizers_package()
    if spec.startswith("bpe:"):
        if trained is not None:
            return BpeTokenizer(package.Tokenizer.from_str(trained))
        return BpeTokenizer(_trained(package, int(spec.removeprefix("bpe:")), training_text))
    try:
        return BpeTokenizer(package.Tokenizer.from_file(str(tokenizer_file(spec))))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigurationError(f"{spec} is not a tokenizer.json ({error}); save it with tokenizers.") from error


def _tokenizers_package() -> Any:
    # Unset, the package prints a warning in every process that is forked later, such as the workers of a DataLoader.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigurationError(
            "BPE needs the package 'tokenizers'; run: pip install 'moe-lightning[bpe]', or set tokenizer=bytes."
        ) from error
    return tokenizers


def _trained(package: Any, vocab_size: int, training_text: Iterable[bytes]) -> Any:
    """Byte-level BPE: every byte is in the alphabet, so that no text is unknown."""
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((chunk.decode() for chunk in training_text), trainer)
    return tokenizer


_LAYOUT = 6  # raised when an entry's files change their meaning


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens on disk, ready to be mapped."""

    name: str  # the source, as the user gave it
    train: TokenSpan
    val: TokenSpan
    vocab_size: int
    tokenizer: str  # "bytes", "bpe:SIZE" or a path; for token files what their vocabulary was checked against
    num_files: int
    size_bytes: int  # of the source's files

    def trained_tokenizer(self) -> str | None:
        """Return the tokenizer.json that was trained on the training part; None where another tokenizer was named.

        Raises:
            ConfigurationError: the cache entry has lost it.
        """
        if not self.tokenizer.startswith("bpe:"):
            return None
        path = self.train.path.with_name(TOKENIZER_FILE)
        try:
            return read_text(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"The cached {path} is damaged ({error}); delete its folder.") from error

    def summary(self) -> str:
        """One line: files, size, tokens of both parts, vocabulary."""
        return (
            f"{self.name}: {self.num_files:,} files, {self.size_bytes / 1e6:.1f} MB, {self.train.count:,} training and "
            f"{self.val.count:,} held-out tokens, vocabulary {self.vocab_size:,}"
        )


def document_starts(span: TokenSpan, end_of_document: int | None) -> npt.NDArray[np.int64]:
    """The first token of each document of a part, ascending: of every text file, and behind every token that ends one.

    Raises:
        ConfigurationError: a token file, where nothing but such a token tells documents apart, and none is named.
    """
    known = _documents_path(span.path)
    if end_of_document is None and not known.is_file():
        raise ConfigurationError(
            f"packing needs to know where the documents of {span.path} end: set end_of_document to the token that ends "
            "one, or packing=false"
        )
    starts = np.load(known, allow_pickle=False) if known.is_file() else np.zeros(1, dtype=np.int64)
    if end_of_document is not None:
        starts = np.union1d(starts, np.flatnonzero(span.open() == end_of_document) + 1)
    return starts[starts < span.count]


def _documents_path(tokens: Path) -> Path:
    return tokens.with_suffix(".documents.npy")


def default_cache_dir() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/moe_lightning, or ~/.cache/moe_lightning."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_lightning"


def prepare_corpus(
    source: str | Path = "stdlib",
    *,
    cache_dir: str | Path | None = None,
    tokenizer: str = "bytes",
    val_fraction: float = 0.05,
    seed: int = 0,
    dtype: str | None = None,
    trained: str | None = None,
) -> Corpus:
    """Find or build the memory-mapped tokens of a source; any number of processes may do so at once.

    Args:
        source: "stdlib", a UTF-8 text file, a folder or a glob of such files, or one token file: .bin (raw
            little-endian integers of `dtype`) or .npy (one-dimensional integers).
        cache_dir: where entries are built; `default_cache_dir()` if None. A token file is mapped where it lies.
        tokenizer: "bytes", "bpe:SIZE" (trained on the training part, kept as tokenizer.json), or a tokenizer.json.
            For a token file a tokenizer.json states the vocabulary; without one it is the largest token plus one
            (256 for uint8).
        val_fraction: fraction of the bytes (of a token file: of the tokens) that is held out, inside (0, 1). Whole
            files in the order of a hash of (seed, name), and of the last of them, as of a single file, the end.
        seed: another split of the same files.
        dtype: of a .bin file: uint8, uint16 or uint32.
        trained: content of the tokenizer.json that was trained for "bpe:SIZE" before, to be used again; None: it is
            trained here.

    Raises:
        ConfigurationError: whatever is wrong with these, in one sentence.
    """
    source, tokenizer = str(source), str(tokenizer)
    if not isinstance(val_fraction, int | float) or not 0 < val_fraction < 1:
        raise ConfigurationError(f"val_fraction={val_fraction!r} is outside (0, 1); hold out for example 0.05.")
    if dtype is not None and dtype not in TOKEN_DTYPES:
        raise ConfigurationError(
            f"dtype={dtype!r} is not one of {TOKEN_DTYPES}; set the one the .bin was written with."
        )
    check_local("source", source)
    check_local("tokenizer", tokenizer)
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    if is_token_file(source):
        return _token_corpus(source, cache, tokenizer, val_fraction, dtype)
    if dtype is not None:
        raise ConfigurationError(f"dtype={dtype!r} is for .bin files, but source={source!r} is text; leave dtype out.")
    return _text_corpus(source, cache, tokenizer, val_fraction, seed, trained)


# ---------------------------------------------------------------------- token files


def _token_corpus(source: str, cache: Path, tokenizer: str, val_fraction: float, dtype: str | None) -> Corpus:
    if tokenizer.startswith("bpe:"):
        raise ConfigurationError(
            f"tokenizer={tokenizer!r} cannot be trained on {source!r}, which holds tokens already; leave it out, "
            "or give the tokenizer.json the tokens were made with."
        )
    span = token_file(source, dtype)
    held_out = round(span.count * val_fraction)
    if not 0 < held_out < span.count:
        raise ConfigurationError(
            f"val_fraction={val_fraction} of the {span.count} tokens of {source!r} leaves a part empty; give more."
        )
    status = span.path.stat()
    key = fingerprint((_LAYOUT, _version(span.path, status), span.dtype))

    _, known = _cached(cache / key, lambda folder: read_tokens(span))
    train, val = replace(span, digest=known["digest"]).split(span.count - held_out)
    return Corpus(
        name=source,
        train=train,
        val=val,
        vocab_size=_checked_vocab_size(source, span, tokenizer, known["low"], known["high"]),
        tokenizer=tokenizer,
        num_files=1,
        size_bytes=status.st_size,
    )


def _checked_vocab_size(source: str, span: TokenSpan, tokenizer: str, low: int, high: int) -> int:
    if tokenizer == "bytes":
        vocab_size = 256 if np.dtype(span.dtype).itemsize == 1 else high + 1
    else:
        tokenizer_key(tokenizer)  # a spec that is no file is refused here
        vocab_size = load_tokenizer(tokenizer, ()).vocab_size
    if low < 0 or high >= vocab_size:
        raise ConfigurationError(
            f"{source!r} holds token {low if low < 0 else high}, outside the vocabulary of {vocab_size}; give the "
            "tokenizer and dtype the tokens were made with."
        )
    return vocab_size


# ---------------------------------------------------------------------- text


def _text_corpus(
    source: str, cache: Path, tokenizer: str, val_fraction: float, seed: int, trained: str | None
) -> Corpus:
    files = text_files(source)
    seen = fingerprint((_LAYOUT, tuple((file.name, file.version) for file in files)))
    _, content = _cached(cache / seen, lambda folder: {"digest": _content_digest(files)})

    def key_of(tokenizer_name: str) -> str:
        return fingerprint((_LAYOUT, source == "stdlib", content["digest"], tokenizer_name, val_fraction, seed))

    key = key_of(tokenizer_key(tokenizer))
    if not tokenizer.startswith("bpe:"):
        trained = None
    if trained is not None and not _holds(cache / key / TOKENIZER_FILE, trained):
        key = key_of(fingerprint(trained))

    def build(folder: Path) -> dict[str, Any]:
        kept = [file for file in files if is_text(file)] if source == "stdlib" else files
        train, val = _split(source, kept, val_fraction, seed)
        encoder = load_tokenizer(tokenizer, (chunk for span in train for chunk in span.chunks()), trained=trained)
        encoder.save(folder)
        return {
            "vocab_size": encoder.vocab_size,
            "train": _write_tokens(folder / "train.bin", train, encoder),
            "val": _write_tokens(folder / "val.bin", val, encoder),
            "num_files": len(kept),
            "size_bytes": sum(file.size_bytes for file in kept),
        }

    folder, meta = _cached(cache / key, build)
    dtype = token_dtype(meta["vocab_size"])
    train, val = (
        TokenSpan(path=folder / f"{part}.bin", dtype=dtype, offset_bytes=0, **meta[part]) for part in ("train", "val")
    )
    for span in (train, val):
        if not span.path.is_file() or span.path.stat().st_size != span.count * np.dtype(dtype).itemsize:
            raise ConfigurationError(f"The cached tokens {span.path} are damaged; delete the folder {folder}.")
    return Corpus(
        name=source,
        train=train,
        val=val,
        vocab_size=meta["vocab_size"],
        tokenizer=tokenizer,
        num_files=meta["num_files"],
        size_bytes=meta["size_bytes"],
    )


def _content_digest(files: Iterable[TextFile]) -> str:
    """Of the files' names and bytes."""
    parts = []
    for file in files:
        digest = xxhash.xxh3_128()
        with reading(file.path), open_regular(file.path) as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
        parts.append((file.name, digest.hexdigest()))
    return fingerprint(tuple(parts))


def _holds(path: Path, content: str) -> bool:
    try:
        return read_text(path) == content
    except (OSError, ValueError):
        return False


def _split(
    source: str, files: Sequence[TextFile], val_fraction: float, seed: int
) -> tuple[list[TextSpan], list[TextSpan]]:
    """Training and held-out spans. Files are held out in the order of a hash of (seed, name) until the fraction of all
    bytes is reached; of the last one only the end is.
    """
    total = sum(file.size_bytes for file in files)
    left = round(total * val_fraction)
    ends = dict[TextFile, int]()  # of the training part
    for file in sorted(files, key=lambda file: xxhash.xxh3_64_intdigest(os.fsencode(f"{seed}:{file.name}"))):
        ends[file] = 0 if left >= file.size_bytes else _start_of_character(file, file.size_bytes - left)
        left = max(0, left - file.size_bytes)
    train = [TextSpan(path=file.path, start=0, stop=ends[file]) for file in files if ends[file]]
    spans = [TextSpan(path=file.path, start=ends[file], stop=file.size_bytes) for file in files]
    val = [span for span in spans if span.start < span.stop]
    if not train or not val:
        raise ConfigurationError(
            f"val_fraction={val_fraction} of the {total} bytes of source={source!r} leaves a part empty; give more."
        )
    return train, val


def _start_of_character(file: TextFile, at: int) -> int:
    """The first byte from `at` on that begins a UTF-8 character, or the end of the file."""
    with reading(file.path), file.path.open("rb") as text:
        return text.seek(at) + bytes_to_character(text)


def _write_tokens(path: Path, spans: Iterable[TextSpan], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the tokens of all spans, one after the other, and where each begins; returns {"count", "digest"}."""
    count, starts, digest = 0, list[int](), xxhash.xxh3_128()
    with path.open("xb") as file:
        for span in spans:
            starts.append(count)
            for tokens in tokenizer.encode_chunks(span.chunks()):
                file.write(tokens.data)
                digest.update(tokens.data)
                count += len(tokens)
    np.save(_documents_path(path), np.unique(np.array(starts, dtype=np.int64)))
    return {"count": count, "digest": digest.hexdigest()}


# ---------------------------------------------------------------------- cache


def _cached(entry: Path, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The cache entry and its meta.json; a missing one is built in a private folder and renamed into place."""
    if not entry.is_dir():
        with _private_folder(entry.parent) as folder:
            meta = build(folder)
            (folder / "meta.json").write_text(json.dumps(meta))
            try:
                folder.rename(entry)
            except OSError:
                if not entry.is_dir():  # otherwise another process was first, with the same content
                    raise
    try:
        return entry, dict(json.loads(read_text(entry / "meta.json")))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The cache entry {entry} is damaged ({error}); delete that folder.") from error


@contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".building-", dir=parent))
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {parent} cannot be written ({error.strerror}); set cache_dir to a folder of yours."
        ) from error
    try:
        yield folder
    except OSError as error:
        raise ConfigurationError(
            f"Writing tokens to the cache folder {parent} failed ({error.strerror}); free space there or set cache_dir."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
