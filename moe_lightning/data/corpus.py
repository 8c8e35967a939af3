"""Text turned into memory-mapped tokens once, split into a training and a held-out part.

The cache is keyed by the files' names, sizes and modification times, the tokenizer and the split: looking an entry up
costs a walk over the folder, never a second reading of the text, which every rank of a large run would have to pay.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moe_lightning.data.sources import (
    TOKEN_DTYPES,
    TextFile,
    TextSpan,
    TokenSpan,
    bytes_to_character,
    fingerprint,
    is_text,
    is_token_file,
    reading,
    text_files,
    token_file,
    token_range,
)
from moe_lightning.data.tokenization import TOKENIZER_FILE, Tokenizer, load_tokenizer, token_dtype, tokenizer_key
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text

_LAYOUT = 3  # raised when an entry's files change their meaning


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
    key = fingerprint((_LAYOUT, str(span.path.resolve()), status.st_size, status.st_mtime_ns, span.dtype))

    def build(folder: Path) -> dict[str, Any]:
        return dict(zip(("low", "high"), token_range(span), strict=True))

    _, extremes = _cached(cache / key, build)
    train, val = span.split(span.count - held_out)
    return Corpus(
        name=source,
        train=train,
        val=val,
        vocab_size=_checked_vocab_size(source, span, tokenizer, extremes["low"], extremes["high"]),
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
    described = tuple((file.name, file.size_bytes, file.mtime_ns) for file in files)

    def key_of(tokenizer_name: str) -> str:
        return fingerprint((_LAYOUT, source == "stdlib", described, tokenizer_name, val_fraction, seed))

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
            "train_tokens": _write_tokens(folder / "train.bin", train, encoder),
            "val_tokens": _write_tokens(folder / "val.bin", val, encoder),
            "num_files": len(kept),
            "size_bytes": sum(file.size_bytes for file in kept),
        }

    folder, meta = _cached(cache / key, build)
    dtype = token_dtype(meta["vocab_size"])
    train, val = (
        TokenSpan(path=folder / f"{part}.bin", dtype=dtype, offset_bytes=0, count=meta[f"{part}_tokens"])
        for part in ("train", "val")
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


def _write_tokens(path: Path, spans: Iterable[TextSpan], tokenizer: Tokenizer) -> int:
    """Write the tokens of all spans, one after the other, and where each begins; returns how many."""
    count, starts = 0, list[int]()
    with path.open("xb") as file:
        for span in spans:
            starts.append(count)
            for chunk in span.chunks():
                tokens = tokenizer.encode(chunk)
                file.write(tokens.tobytes())
                count += len(tokens)
    np.save(_documents_path(path), np.unique(np.array(starts, dtype=np.int64)))
    return count


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
