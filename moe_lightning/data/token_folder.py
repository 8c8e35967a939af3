"""Folder of tokens: one memory map, the first token of each document, a JSON header, and the tokenizer.

    tokens.bin       little-endian unsigned integers
    documents.npy    int64, ascending
    tokenizer.json   of the tokens; missing where they are bytes
    tokens.json      the header, written last: what has one is complete

Such a folder is made in portions of the text (see `documents.portions`). One that is finished lies in `portions/` with
its checksums, so a process that is killed at any time loses only the portions it was writing. Portions do not depend on
the number of processes, and neither do the bytes of the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import StringConstraints, TypeAdapter, ValidationError

from moe_lightning.config import NonNegativeInt, PositiveInt
from moe_lightning.data.documents import Document, FilePart, SourceFile, documents, portions, reading
from moe_lightning.data.tokenizer import (
    BYTES,
    Tokenizer,
    token_dtype,
    tokenizer_content,
    tokenizer_from,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import NO_LOCKS, read_text, replace_text
from moe_lightning.hub import TOKENIZER, tokenizer_identity

HEADER, TOKENS, DOCUMENTS = "tokens.json", "tokens.bin", "documents.npy"
_PORTIONS, _PLAN = "portions", "plan.json"
_COPIED_BYTES = 1 << 24
_REPORT_S = 0.2

_Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]


def fingerprint(parts: object) -> str:
    """32 hexadecimal digits that name a value built of numbers, strings and tuples."""
    return str(xxhash.xxh3_128_hexdigest(repr(parts).encode()))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything but the text that decides the tokens.

    Attributes:
        tokenizer: content of its tokenizer.json; None: bytes.
        text_field: of records, see `documents.documents`.
        end_of_document: token that is appended to each document which does not end with it; None: nothing is.
    """

    tokenizer: str | None
    text_field: str
    end_of_document: int | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """Header of a folder of tokens.

    Attributes:
        tokenizer: see `tokenizer_identity`.
        digest, documents_digest: of the bytes of both files.
        plan: names the files and settings that the folder was made from.
        size_bytes, num_files: of the source.
    """

    format: Literal[1]
    dtype: Literal["uint8", "uint16", "uint32"]
    num_tokens: PositiveInt
    num_documents: PositiveInt
    vocab_size: PositiveInt
    tokenizer: str
    end_of_document: NonNegativeInt | None
    digest: _Digest
    documents_digest: _Digest
    plan: _Digest
    size_bytes: NonNegativeInt
    num_files: PositiveInt


@dataclass(frozen=True, kw_only=True)
class TokenFolder:
    """A complete folder of tokens, whose header and sizes have been checked."""

    path: Path
    header: Header

    @property
    def tokens(self) -> Path:
        """The file of the tokens."""
        return self.path / TOKENS

    @property
    def tokenizer(self) -> str:
        """The spec of the tokenizer, see `check_tokenizer`."""
        return BYTES if self.header.tokenizer == BYTES else str(self.path / TOKENIZER)

    def documents(self) -> npt.NDArray[np.int64]:
        """The first token of each document.

        Raises:
            ConfigurationError: the file is damaged.
        """
        path = self.path / DOCUMENTS
        if _digest(path) != self.header.documents_digest:
            raise _damaged(path)
        starts: npt.NDArray[np.int64] = np.load(path, allow_pickle=False)
        return starts

    def check(self) -> None:
        """Read all of it.

        Raises:
            ConfigurationError: a checksum is wrong, or the tokenizer is another one.
        """
        if _digest(self.tokens) != self.header.digest:
            raise _damaged(self.tokens)
        self.documents()
        if self.tokenizer != BYTES and tokenizer_identity(tokenizer_content(self.tokenizer)) != self.header.tokenizer:
            raise _damaged(self.path / TOKENIZER)


def _damaged(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is damaged: it is not what {HEADER} beside it says; remove the folder, and run moe-data again."
    )


def is_token_folder(path: str | Path) -> bool:
    """True if a path is a folder of tokens, complete or begun."""
    folder = Path(path).expanduser()
    with reading(folder):
        return (folder / HEADER).is_file() or (folder / _PORTIONS / _PLAN).is_file()


def open_token_folder(path: str | Path) -> TokenFolder:
    """Return the folder of tokens at a path.

    Raises:
        ConfigurationError: there is none, it is incomplete, or its files do not have the sizes of its header.
    """
    folder = Path(path).expanduser()
    header = folder / HEADER
    if not header.is_file() and is_token_folder(folder):
        raise ConfigurationError(f"{folder} is incomplete; run moe-data tokenize again with the same arguments.")
    try:
        found = TokenFolder(path=folder, header=_adapter(Header).validate_json(read_text(header), strict=True))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no header of moe-data"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise ConfigurationError(
            f"{header} cannot be read ({reason}); make the folder with moe-data tokenize."
        ) from error
    size = found.header.num_tokens * np.dtype(found.header.dtype).itemsize
    if not found.tokens.is_file() or found.tokens.stat().st_size != size:
        raise _damaged(found.tokens)
    if not (folder / DOCUMENTS).is_file():
        raise _damaged(folder / DOCUMENTS)
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# ---------------------------------------------------------------------- making one


def write_token_folder(
    folder: Path,
    files: Sequence[SourceFile],
    recipe: Recipe,
    *,
    workers: int = 1,
    advance: Callable[[int, int], None] = lambda nbytes, tokens: None,
) -> TokenFolder:
    """Make a folder of tokens, or finish one that was begun with the same arguments; one that is complete stays.

    Args:
        files: in the order of their documents.
        workers: processes; 1: this one does the work.
        advance: called with bytes of the source and tokens as they are done, those of finished portions at once.

    Raises:
        ConfigurationError: something else is in the folder, another process writes it, its lock service failed, the
            text is none, or a worker was killed.
    """
    encoder = tokenizer_from(recipe.tokenizer)
    check_end_of_document(recipe.end_of_document, encoder.vocab_size)
    todo = portions(files)
    cuts = tuple((part.start, part.stop) for portion in todo for part in portion)
    settings = tokenizer_identity(recipe.tokenizer), recipe.text_field, recipe.end_of_document
    plan = fingerprint((tuple(_of_plan(file) for file in files), cuts, settings))
    with _locked(folder):
        _check_begun(folder, plan)
        if not (folder / HEADER).is_file():
            if recipe.tokenizer is not None:
                replace_text(folder / TOKENIZER, recipe.tokenizer)
            written = _write_portions(folder, todo, recipe, encoder, workers, advance)
            header = _joined(folder, written, token_dtype(encoder.vocab_size)) | {
                "format": 1,
                "vocab_size": encoder.vocab_size,
                "tokenizer": tokenizer_identity(recipe.tokenizer),
                "end_of_document": recipe.end_of_document,
                "plan": plan,
                "size_bytes": sum(file.size_bytes for file in files),
                "num_files": len(files),
            }
            replace_text(folder / HEADER, json.dumps(header, indent=2) + "\n")
        shutil.rmtree(folder / _PORTIONS, ignore_errors=True)
    return open_token_folder(folder)


def check_end_of_document(token: int | None, vocab_size: int) -> None:
    """
    Raises:
        ConfigurationError: there is no such token.
    """
    if token is not None and token >= vocab_size:
        raise ConfigurationError(
            f"end_of_document={token} is outside the vocabulary of {vocab_size}; give a token of the tokenizer."
        )


def _of_plan(file: SourceFile) -> tuple[str | int, ...]:
    return file.name, file.size_bytes, file.path.stat().st_mtime_ns


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; nothing is held on a file system without locks."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another process writes {folder}; wait for it, or give another folder.") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ConfigurationError(
                    f"{folder} cannot be locked ({error.strerror}); start the service of locks of its file system, or "
                    "give another folder."
                ) from error
        yield
    finally:
        os.close(descriptor)


def _check_begun(folder: Path, plan: str) -> None:
    """Refuse a folder with anything but what the same plan has left, and begin one that is empty."""
    stored = folder / _PORTIONS / _PLAN
    begun = None
    if (folder / HEADER).is_file():
        begun = open_token_folder(folder).header.plan
    elif stored.is_file():
        begun = read_text(stored)
    elif any(path.name != _PORTIONS for path in folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty, and holds no tokens; give another folder.")
    if begun not in (None, plan):
        raise ConfigurationError(
            f"{folder} was made from other files or with other settings (or the files have changed since); remove it, "
            "or give another folder."
        )
    if begun is None:
        stored.parent.mkdir(exist_ok=True)
        replace_text(stored, plan)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A finished portion."""

    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    digest: _Digest
    documents_digest: _Digest


Portion = tuple[FilePart, ...]


def _write_portions(
    folder: Path,
    todo: Sequence[Portion],
    recipe: Recipe,
    encoder: Tokenizer,
    workers: int,
    advance: Callable[[int, int], None],
) -> list[_Written]:
    places = [folder / _PORTIONS / f"{number:06d}" for number in range(len(todo))]
    written = {number: done for number, place in enumerate(places) if (done := _finished(place)) is not None}
    for number, done in written.items():
        advance(sum(part.size_bytes for part in todo[number]), done.num_tokens)
    missing = [number for number in range(len(todo)) if number not in written]
    if min(workers, len(missing)) < 2:
        for number in missing:
            written[number] = _write_portion(places[number], todo[number], recipe, encoder, advance)
    else:
        jobs = [(places[number], todo[number]) for number in missing]
        found = _in_processes(jobs, recipe, min(workers, len(jobs)), advance)
        written |= zip(missing, found, strict=True)
    return [written[number] for number in range(len(todo))]


def _finished(place: Path) -> _Written | None:
    """The record of a portion, if its files are what it says."""
    try:
        done: _Written = _adapter(_Written).validate_json(read_text(place.with_suffix(".json")), strict=True)
        found = _digest(place.with_suffix(".bin")), _digest(place.with_suffix(".npy"))
    except (OSError, ValueError):
        return None
    return done if found == (done.digest, done.documents_digest) else None


def _write_portion(
    place: Path, portion: Portion, recipe: Recipe, encoder: Tokenizer, advance: Callable[[int, int], None]
) -> _Written:
    """Write the tokens of a portion, and where each document begins among them; the record is written last."""
    count, starts, digest = 0, list[int](), xxhash.xxh3_128()
    end = np.array([] if recipe.end_of_document is None else [recipe.end_of_document], token_dtype(encoder.vocab_size))
    place.with_suffix(".json").unlink(missing_ok=True)
    with place.with_suffix(".bin").open("wb") as file:
        for document in _documents(portion, recipe.text_field, advance):
            start = count
            for tokens in _ended(encoder.encode_chunks(document), end):
                file.write(tokens.data)
                digest.update(tokens.data)
                count += len(tokens)
                advance(0, len(tokens))
            if count > start:
                starts.append(start)
    np.save(place.with_suffix(".npy"), np.array(starts, dtype=np.int64))
    done = _Written(
        num_tokens=count,
        num_documents=len(starts),
        digest=digest.hexdigest(),
        documents_digest=_digest(place.with_suffix(".npy")),
    )
    replace_text(place.with_suffix(".json"), json.dumps(asdict(done)))
    return done


def _documents(portion: Portion, text_field: str, advance: Callable[[int, int], None]) -> Iterator[Document]:
    for part in portion:
        yield from documents(part, text_field, lambda nbytes: advance(nbytes, 0))


def _ended(chunks: Iterable[npt.NDArray[np.integer]], end: npt.NDArray[np.integer]) -> Iterator[npt.NDArray[Any]]:
    """The tokens of a document, and behind them the token that ends it, where one is wanted and it is not the last."""
    last: int | None = None
    for tokens in chunks:
        if len(tokens):
            last = int(tokens[-1])
            yield tokens
    if last is not None and len(end) and last != end[0]:
        yield end


def _joined(folder: Path, written: Sequence[_Written], dtype: str) -> dict[str, Any]:
    """Join the portions to the files of the folder; returns what the header says of them."""
    count, digest, starts = 0, xxhash.xxh3_128(), [np.zeros(0, np.int64)]
    tokens = folder / f"{TOKENS}.tmp"
    with tokens.open("wb") as file:
        for number, done in enumerate(written):
            place = folder / _PORTIONS / f"{number:06d}"
            with place.with_suffix(".bin").open("rb") as portion:
                while data := portion.read(_COPIED_BYTES):
                    file.write(data)
                    digest.update(data)
            starts.append(np.load(place.with_suffix(".npy"), allow_pickle=False) + count)
            count += done.num_tokens
    if not count:
        raise ConfigurationError("no document of the source has any text; give files with text.")
    documents = np.concatenate(starts)
    np.save(folder / DOCUMENTS, documents)
    tokens.replace(folder / TOKENS)
    return {
        "dtype": dtype,
        "num_tokens": count,
        "num_documents": len(documents),
        "digest": digest.hexdigest(),
        "documents_digest": _digest(folder / DOCUMENTS),
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


# ---------------------------------------------------------------------- processes


def _in_processes(
    jobs: Sequence[tuple[Path, Portion]],
    recipe: Recipe,
    workers: int,
    advance: Callable[[int, int], None],
) -> list[_Written]:
    context = multiprocessing.get_context("spawn")  # the threads of the package tokenizers survive no fork
    progress = context.Array("q", 3)  # bytes, tokens, and 1 to stop
    reported = 0, 0
    with ProcessPoolExecutor(workers, context, _begin_worker, (recipe, progress)) as pool:
        futures: list[Future[_Written]] = [pool.submit(_work, *job) for job in jobs]
        waiting = set(futures)
        try:
            while waiting:
                finished, waiting = wait(waiting, _REPORT_S, FIRST_COMPLETED)
                nbytes, tokens, _ = progress[:]
                advance(nbytes - reported[0], tokens - reported[1])
                reported = nbytes, tokens
                for future in finished:
                    future.result()
        except BrokenProcessPool:
            raise ConfigurationError(
                f"one of the {workers} workers was killed, perhaps for want of memory; run the same command again with "
                "fewer workers: what is finished is kept."
            ) from None
        except BaseException:
            progress[2] = 1
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


class _StoppedError(Exception):
    """Another worker has failed, or the command was interrupted."""


_worker: tuple[Recipe, Tokenizer, Any]
"""Recipe, tokenizer and progress of this worker process."""


def _begin_worker(recipe: Recipe, progress: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one stops it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    _worker = recipe, tokenizer_from(recipe.tokenizer), progress


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: nobody would read its results."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(place: Path, portion: Portion) -> _Written:
    recipe, encoder, progress = _worker

    def advance(nbytes: int, tokens: int) -> None:
        with progress.get_lock():
            progress[0] += nbytes
            progress[1] += tokens
            if progress[2]:
                raise _StoppedError

    return _write_portion(place, portion, recipe, encoder, advance)
