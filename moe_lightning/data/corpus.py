"""Corpora: tokens on disk, with a training and a held-out part.

A source is text, a folder of tokens (see `token_folder`), or one file of tokens. Tokens of text are made once and kept
in a cache, as a folder of tokens too, so training on text and on the folder that `moe-data tokenize` makes of it is the
same. The end of the tokens is held out; files are in the order of a hash of their names, so that is a sample of them.

The cache is keyed by the files' names and content, the tokenizer and what else decides the tokens. A content is read
for that once: while the files' inodes, sizes and times stay, looking an entry up costs a walk over the folder, so that
the ranks of a large run do not all read the text.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import xxhash
from annotated_types import Interval

from moe_lightning.data.documents import (
    STDLIB,
    TOKEN_SUFFIXES,
    SourceFile,
    documents,
    has_records,
    parts_of,
    reading,
    source_files,
    suffix_of,
    version_of,
)
from moe_lightning.data.token_folder import (
    TOKENS,
    Recipe,
    TokenFolder,
    check_end_of_document,
    fingerprint,
    is_token_folder,
    open_token_folder,
    write_token_folder,
)
from moe_lightning.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    check_tokenizer,
    is_trained,
    load_tokenizer,
    tokenizer_content,
    train_tokenizer,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local, check_written, open_regular, read_text
from moe_lightning.hub import TOKENIZER, tokenizer_identity

TOKEN_DTYPES = ("uint8", "uint16", "uint32")
_CHUNK_BYTES = 1 << 24
_LAYOUT = 8  # raised when an entry's files change their meaning


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One source of samples.

    Args:
        path: "stdlib" (the running Python's own .py files), a file, a folder or a glob of text or records, a folder of
            tokens, or one .bin or .npy file of tokens.
        weight: share of the samples of training, relative to the other sources; None: in proportion to its size.
        text_field: of the text in records: key of JSONL, column of Parquet and saved data sets.
    """

    path: str
    weight: Annotated[float, Interval(gt=0, le=1e9)] | None = None
    text_field: str = "text"

    @property
    def is_token_file(self) -> bool:
        """True if the source is one file of tokens."""
        return suffix_of(self.path) in TOKEN_SUFFIXES

    @property
    def is_text(self) -> bool:
        """True if the source is text rather than tokens."""
        return not self.is_token_file and not is_token_folder(self.path)


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


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens on disk, ready to be mapped.

    Attributes:
        name: the source, as the user gave it.
        tokenizer: see `tokenizer_identity`; None: of a file of tokens, which does not say.
        end_of_document: token that ends a document; None: nobody knows one.
        num_files, size_bytes: of the source.
    """

    name: str
    train: TokenSpan
    val: TokenSpan
    vocab_size: int
    tokenizer: str | None
    end_of_document: int | None
    num_files: int
    size_bytes: int

    def summary(self) -> str:
        """One line: files, size, tokens of both parts, vocabulary."""
        return (
            f"{self.name}: {self.num_files:,} files, {self.size_bytes / 1e6:.1f} MB, {self.train.count:,} training and "
            f"{self.val.count:,} held-out tokens, vocabulary {self.vocab_size:,}"
        )


def document_starts(span: TokenSpan, end_of_document: int | None) -> npt.NDArray[np.int64]:
    """The first token of each document of a part, ascending: as a folder of tokens says, and behind every token that
    ends one.

    Raises:
        ConfigurationError: a token file, where nothing but such a token tells documents apart, and none is named.
    """
    is_folder = span.path.name == TOKENS and is_token_folder(span.path.parent)
    if end_of_document is None and not is_folder:
        raise ConfigurationError(
            f"packing needs to know where the documents of {span.path} end: set end_of_document to the token that ends "
            "one, or packing=false"
        )
    starts = np.zeros(1, dtype=np.int64)
    if is_folder:
        first = span.offset_bytes // np.dtype(span.dtype).itemsize
        inside = open_token_folder(span.path.parent).documents() - first
        starts = np.union1d(starts, inside[inside > 0])
    if end_of_document is not None:
        starts = np.union1d(starts, np.flatnonzero(span.open() == end_of_document) + 1)
    return starts[starts < span.count]


def default_cache_dir() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/moe_lightning, or ~/.cache/moe_lightning."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_lightning"


def prepare_corpus(source: str | Path = STDLIB, *, text_field: str = "text", **options: Any) -> Corpus:
    """Find or build the tokens of one source, see `prepare_corpora`."""
    return prepare_corpora([DataSource(path=str(source), text_field=text_field)], **options)[0]


def prepare_corpora(
    sources: Sequence[DataSource],
    *,
    cache_dir: str | Path | None = None,
    tokenizer: str | None = None,
    val_fraction: float = 0.05,
    dtype: str | None = None,
    end_of_document: int | None = None,
    trained: str | None = None,
) -> tuple[Corpus, ...]:
    """Find or build the memory-mapped tokens of sources; any number of processes may do so at once.

    Args:
        cache_dir: where entries are built; `default_cache_dir()` if None. Tokens are mapped where they lie.
        tokenizer: "bytes", "bpe:SIZE" (trained on the training parts of all sources), a tokenizer.json, or ORG/NAME on
            the Hub. None: bytes of text, and that of a folder of tokens. For a token file it states the vocabulary;
            without one that is the largest token plus one (256 for uint8).
        val_fraction: fraction of the tokens of each source that is held out, inside (0, 1).
        dtype: of .bin files: uint8, uint16 or uint32.
        end_of_document: token that ends documents; it is appended to documents of text that do not end with it.
        trained: content of the tokenizer.json that was trained for "bpe:SIZE" before, to be used again; None: it is
            trained here.

    Raises:
        ConfigurationError: whatever is wrong with these, in one sentence.
    """
    if not isinstance(val_fraction, int | float) or not 0 < val_fraction < 1:
        raise ConfigurationError(f"val_fraction={val_fraction!r} is outside (0, 1); hold out for example 0.05.")
    _check_sources(sources, tokenizer, dtype)
    cache = _cache_folder(cache_dir)
    spec = tokenizer_of(sources, tokenizer) or BYTES
    content: str | None
    if is_trained(spec):
        check_tokenizer(spec)
        content = trained or trained_tokenizer(sources, spec, val_fraction=val_fraction, cache_dir=cache)
    else:
        content = tokenizer_content(spec)
    corpora = []
    for source in sources:
        if source.is_token_file:
            found = _token_file_corpus(source, cache, spec, val_fraction, dtype, end_of_document)
            if spec == BYTES and found.vocab_size > ByteTokenizer.vocab_size and any(one.is_text for one in sources):
                raise ConfigurationError(
                    f"source={source.path!r} holds token {found.vocab_size - 1}, and the tokens of the text beside it "
                    "are bytes; set tokenizer to the tokenizer.json that made the tokens."
                )
        elif source.is_text:
            folder = _tokenized(source, cache, content, end_of_document)
            found = _folder_corpus(source, folder, val_fraction, end_of_document)
        else:
            folder = open_token_folder(source.path)
            _check_tokenizer_of(folder, spec, content)
            _verify(folder, cache)
            found = _folder_corpus(source, folder, val_fraction, end_of_document)
        check_end_of_document(end_of_document, found.vocab_size)
        corpora.append(found)
    _check_ends(corpora)
    return tuple(corpora)


def _check_sources(sources: Sequence[DataSource], tokenizer: str | None, dtype: str | None) -> None:
    for source in sources:
        check_local("source", source.path)
    if tokenizer is not None:
        check_local("tokenizer", tokenizer)
    if dtype is not None and dtype not in TOKEN_DTYPES:
        raise ConfigurationError(
            f"dtype={dtype!r} is not one of {TOKEN_DTYPES}; set the one the .bin was written with."
        )
    if dtype is not None and not any(source.is_token_file for source in sources):
        raise ConfigurationError(
            f"dtype={dtype!r} is for .bin files, but source={sources[0].path!r} is none; leave dtype out."
        )
    tokens = next((source for source in sources if not source.is_text), None)
    if tokens is not None and tokenizer is not None and is_trained(tokenizer):
        raise ConfigurationError(
            f"tokenizer={tokenizer!r} cannot be trained on {tokens.path!r}, which holds tokens already; leave it out, "
            "or give the tokenizer.json the tokens were made with."
        )


def tokenizer_of(sources: Sequence[DataSource], tokenizer: str | None) -> str | None:
    """Return the spec of the tokenizer of sources: the one that is given, that of a folder of tokens, or bytes of text;
    None: files of tokens do not say.
    """
    folder = next((source for source in sources if is_token_folder(source.path)), None)
    if tokenizer is None and folder is not None and not any(source.is_text for source in sources):
        return open_token_folder(folder.path).tokenizer
    is_open = tokenizer in (None, BYTES) and all(source.is_token_file for source in sources)
    return None if is_open else tokenizer or BYTES


def end_of_documents(sources: Sequence[DataSource], given: int | None) -> int | None:
    """Return the token that ends documents: the one that is given, or that of the folders of tokens; None: there is
    none.
    """
    if given is not None:
        return given
    headers = (open_token_folder(source.path).header for source in sources if is_token_folder(source.path))
    return next((header.end_of_document for header in headers if header.end_of_document is not None), None)


def _check_ends(corpora: Sequence[Corpus]) -> None:
    names = {corpus.end_of_document: corpus.name for corpus in corpora if corpus.end_of_document is not None}
    if len(names) > 1:
        (end, name), (other, second), *_ = names.items()
        raise ConfigurationError(
            f"documents of {name!r} end with token {end}, and those of {second!r} with token {other}; tokenize one of "
            "them again with the --end-of-document of the other."
        )


def _cache_folder(cache_dir: str | Path | None) -> Path:
    return default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()


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
    span = _npy_tokens(path, dtype) if suffix_of(path) == ".npy" else _bin_tokens(path, dtype)
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


# ---------------------------------------------------------------------- tokens


def _token_file_corpus(
    source: DataSource, cache: Path, tokenizer: str, val_fraction: float, dtype: str | None, end_of_document: int | None
) -> Corpus:
    span = token_file(source.path, dtype)
    train, val = _split(source, span, val_fraction)
    known = _read_once(span, cache)
    train, val = replace(span, digest=known["digest"]).split(train.count)
    return Corpus(
        name=source.path,
        train=train,
        val=val,
        vocab_size=_checked_vocab_size(source.path, span, tokenizer, known["low"], known["high"]),
        tokenizer=None if tokenizer == BYTES else tokenizer_identity(tokenizer_content(tokenizer)),
        end_of_document=end_of_document,
        num_files=1,
        size_bytes=span.path.stat().st_size,
    )


def _split(source: DataSource, span: TokenSpan, val_fraction: float) -> tuple[TokenSpan, TokenSpan]:
    held_out = round(span.count * val_fraction)
    if not 0 < held_out < span.count:
        raise ConfigurationError(
            f"val_fraction={val_fraction} of the {span.count} tokens of {source.path!r} leaves a part empty; give more."
        )
    return span.split(span.count - held_out)


def _read_once(span: TokenSpan, cache: Path) -> dict[str, Any]:
    """See `read_tokens`."""
    key = fingerprint((_LAYOUT, version_of(span.path), span.dtype))
    return _cached(cache / key, lambda folder: read_tokens(span))[1]


def _checked_vocab_size(source: str, span: TokenSpan, tokenizer: str, low: int, high: int) -> int:
    if tokenizer == BYTES:
        vocab_size = 256 if np.dtype(span.dtype).itemsize == 1 else high + 1
    else:
        vocab_size = load_tokenizer(tokenizer).vocab_size
    if low < 0 or high >= vocab_size:
        raise ConfigurationError(
            f"{source!r} holds token {low if low < 0 else high}, outside the vocabulary of {vocab_size}; give the "
            "tokenizer and dtype the tokens were made with."
        )
    return vocab_size


def _folder_corpus(source: DataSource, folder: TokenFolder, val_fraction: float, end_of_document: int | None) -> Corpus:
    header = folder.header
    dtype = np.dtype(header.dtype).newbyteorder("<").str
    span = TokenSpan(path=folder.tokens, dtype=dtype, offset_bytes=0, count=header.num_tokens, digest=header.digest)
    train, val = _split(source, span, val_fraction)
    if None not in (header.end_of_document, end_of_document) and header.end_of_document != end_of_document:
        raise ConfigurationError(
            f"end_of_document={end_of_document} is not the token {header.end_of_document} that ends the documents of "
            f"{folder.path}; leave it out, or tokenize again."
        )
    return Corpus(
        name=source.path,
        train=train,
        val=val,
        vocab_size=header.vocab_size,
        tokenizer=header.tokenizer,
        end_of_document=end_of_document if header.end_of_document is None else header.end_of_document,
        num_files=header.num_files,
        size_bytes=header.size_bytes,
    )


def _check_tokenizer_of(folder: TokenFolder, spec: str, content: str | None) -> None:
    if folder.header.tokenizer != tokenizer_identity(content):
        raise ConfigurationError(
            f"{folder.path} holds tokens of another tokenizer than tokenizer={spec!r}; give {folder.tokenizer}, or "
            "tokenize the text again with the one of the model."
        )


def _verify(folder: TokenFolder, cache: Path) -> None:
    """Compare the tokens with their digest and vocabulary; they are read once.

    Raises:
        ConfigurationError: they are damaged.
    """
    header = folder.header
    span = TokenSpan(path=folder.tokens, dtype=header.dtype, offset_bytes=0, count=header.num_tokens)
    known = _read_once(span, cache)
    if known["digest"] != header.digest or known["high"] >= header.vocab_size:
        folder.check()
        raise ConfigurationError(
            f"{folder.path} holds token {known['high']}, outside its vocabulary of {header.vocab_size}; tokenize again."
        )


# ---------------------------------------------------------------------- text


def _tokenized(source: DataSource, cache: Path, tokenizer: str | None, end_of_document: int | None) -> TokenFolder:
    """The tokens of a text, from the cache."""
    files, content = _read_content([source.path], cache)
    text_field = _field_of(source, files)
    key = fingerprint((_LAYOUT, content, tokenizer_identity(tokenizer), text_field, end_of_document))
    recipe = Recipe(tokenizer=tokenizer, text_field=text_field, end_of_document=end_of_document)

    def build(folder: Path) -> dict[str, Any]:
        write_token_folder(folder, files, recipe)
        return {}

    return open_token_folder(_cached(cache / key, build)[0])


def _field_of(source: DataSource, files: Sequence[SourceFile]) -> str:
    """The field of the records that hold a source's text; "" for files of text."""
    return source.text_field if has_records(files) else ""


def _read_content(paths: Sequence[str], cache: Path) -> tuple[Sequence[SourceFile], str]:
    """The files of a source, and a digest of their names and bytes."""
    files = source_files(paths)
    seen = fingerprint((_LAYOUT, tuple((file.name, file.version) for file in files)))
    _, content = _cached(cache / seen, lambda folder: {"digest": _content_digest(files)})
    return files, f"{content['digest']}{' of Python' if STDLIB in paths else ''}"


def _content_digest(files: Iterable[SourceFile]) -> str:
    """Return a digest of the names and bytes of files."""
    parts = []
    for file in files:
        digest = xxhash.xxh3_128()
        with reading(file.path), open_regular(file.path) as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
        parts.append((file.name, digest.hexdigest()))
    return fingerprint(tuple(parts))


def trained_tokenizer(
    sources: Sequence[DataSource],
    spec: str,
    *,
    val_fraction: float,
    cache_dir: str | Path | None = None,
    are_joined: bool = False,
) -> str:
    """Return the tokenizer.json of "bpe:SIZE": trained on the text of all sources but the end of each, and then kept.

    Args:
        val_fraction: of the bytes of each source that it does not see.
        are_joined: the sources, of one text field, are one whose files are in a common order.

    Raises:
        ConfigurationError: see `prepare_corpora`, or the cache entry is damaged.
    """
    cache = _cache_folder(cache_dir)
    joined = [[source.path for source in sources]] if are_joined else [[source.path] for source in sources]
    found = [_read_content(paths, cache) for paths in joined]
    fields = [_field_of(source, files) for source, (files, _) in zip(sources, found, strict=not are_joined)]
    key = fingerprint((_LAYOUT, spec, val_fraction, [content for _, content in found], fields))

    def build(folder: Path) -> dict[str, Any]:
        texts = (
            text
            for source, (files, _) in zip(sources, found, strict=not are_joined)
            for text in training_text(files, source.text_field, val_fraction)
        )
        (folder / TOKENIZER).write_text(train_tokenizer(spec, texts))
        return {}

    path = _cached(cache / key, build)[0] / TOKENIZER
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The cached {path} is damaged ({error}); delete its folder.") from error


def training_text(files: Sequence[SourceFile], text_field: str, val_fraction: float) -> Iterator[bytes]:
    """The text of files but its end, of which `val_fraction` of the bytes are left out."""

    def texts() -> Iterator[bytes]:
        parts = (part for file in files for part in parts_of(file))
        return (chunk for part in parts for document in documents(part, text_field) for chunk in document)

    total = sum(map(len, texts()))
    left = total - round(total * val_fraction)
    for chunk in texts():
        if left < len(chunk):
            yield chunk[:left].decode(errors="ignore").encode()
            return
        yield chunk
        left -= len(chunk)


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
            f"The cache folder {parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME or cache_dir to a "
            "folder of yours."
        ) from error
    try:
        yield folder
    except OSError as error:
        raise ConfigurationError(
            f"Writing tokens to the cache folder {parent} failed ({error.strerror}); free space there, or set "
            "XDG_CACHE_HOME or cache_dir."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
