"""Documents of a corpus: text files, JSONL, Parquet and saved Hugging Face data sets, compressed or not.

A text file is one document; a line of JSONL and a row of a table are one each. Suffixes decide: `.jsonl`, `.ndjson`,
`.parquet` and `.arrow` hold records, any other file is text, and `.gz` or `.zst` behind either is unpacked (`.json`
before them is JSONL). Files are cut into parts, which depend on nothing but the file, so that several processes can
read one file and a corpus is the same for any number of them.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_regular, check_written, decoded, open_regular, read_text

STDLIB = "stdlib"
TOKEN_SUFFIXES = (".bin", ".npy")
CONVERSATIONS = frozenset({"messages", "conversations", "prompt", "instruction"})
"""Fields of which conversations have one."""

_PACKED = (".gz", ".zst")
_KINDS: dict[str, Literal["jsonl", "parquet", "arrow"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_CHUNK_BYTES = 1 << 24
_PART_BYTES = 1 << 26
_LONGEST_LINE = 1 << 26
_ROWS = 1024  # of a table that are read at once
_STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_STDLIB_SKIPPED_TREE = ("lib2to3", "tests", "data")  # deliberately broken and foreign sources
_ORDER = "1:"
"""Decides the order of files, see `source_files`: other letters hold other files out."""

Document = Iterator[bytes]
"""UTF-8 text of a document, in chunks of whole characters."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """File of a source.

    Attributes:
        name: path relative to the source's root, with forward slashes.
        size_bytes: as it lies on disk.
        version: see `version_of`.
    """

    name: str
    path: Path
    size_bytes: int
    version: tuple[str | int, ...]


def version_of(path: Path) -> tuple[str | int, ...]:
    """Return a value that changes with a file's content, whoever sets its modification time."""
    status = path.stat()
    return str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Documents of a file that are read in one go.

    Attributes:
        start, stop: bytes of JSONL in which its lines begin, row groups of Parquet; of other files 0 and 1.
        size_bytes: for progress; those of all parts sum to about the bytes of the files.
    """

    path: Path
    start: int
    stop: int
    size_bytes: int


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of errors inside which file they concern.

    Raises:
        ConfigurationError: it cannot be read or unpacked, or is not UTF-8.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start:,}); convert it, leave it out with a "
            "glob such as 'folder/**/*.txt', or give tokens as one .bin or .npy file."
        ) from error
    except zlib.error as error:
        raise _damaged(path, "it does not decompress") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.strerror is None:  # of pyarrow
            raise _damaged(path, error) from error
        cure = "change its permissions" if isinstance(error, PermissionError) else "replace it, or leave it out"
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}); {cure}.") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        raise _damaged(path, error) from error


def _damaged(path: Path, problem: object) -> ConfigurationError:
    reason = " ".join(str(problem).split()).rstrip(".")
    return ConfigurationError(f"{path} is damaged or was cut off ({reason}); get it again, or leave it out.")


# ---------------------------------------------------------------------- files


def source_files(sources: Sequence[str]) -> tuple[SourceFile, ...]:
    """The non-empty files of a source in the order of their documents: by a hash of their names, so that the end of a
    corpus, which is held out, is a sample of its files.

    Args:
        sources: each "stdlib" (the running Python's own .py files), a file, a folder (every file below it that is not
            hidden), or a glob pattern (`**` goes into folders); together they are one source.

    Raises:
        ConfigurationError: nothing is there, nothing matches, only empty files, token files among several, text
            beside records, JSON that is not JSONL, or a file or folder that cannot be read.
    """
    found = [_stdlib_files() if source == STDLIB else _users_files(source) for source in sources]
    if len(found) > 1:
        found = [(root.resolve(), [root.resolve() / path.relative_to(root) for path in some]) for root, some in found]
    root = found[0][0] if len(found) == 1 else Path(os.path.commonpath([root for root, _ in found]))
    paths = [path for _, some in found for path in some]
    shown = " ".join(sources)
    files = []
    for path in dict.fromkeys(paths):
        with reading(path):
            size, version = path.stat().st_size, version_of(path)
            if STDLIB not in sources:
                check_written(path)
        if size:
            name = path.relative_to(root).as_posix()
            files.append(SourceFile(name=name, path=path, size_bytes=size, version=version))
    if not files:
        empty = "its file is" if len(paths) == 1 else f"all its {len(paths)} files are"
        raise ConfigurationError(f"source={shown!r} has no text, {empty} empty; give files with text.")
    _check_kinds(shown, files)
    return tuple(sorted(files, key=lambda file: (-_hash(file.name), file.name)))


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(_ORDER + name))


def _check_kinds(source: str, files: Sequence[SourceFile]) -> None:
    for file in files:
        path = file.path.with_suffix("") if suffix_of(file.path) in _PACKED else file.path
        if suffix_of(path) == ".tar":
            raise ConfigurationError(
                f"source={source!r} holds the archive {file.name}, whose headers would be learned as text; unpack it, "
                "and give the folder of its files."
            )
    records = next((file for file in files if _kind(file.path) is not None), None)
    text = next((file for file in files if _kind(file.path) is None), None)
    if records is not None and text is not None:
        raise ConfigurationError(
            f"source={source!r} holds records ({records.name}) and text ({text.name}); give a glob that matches one "
            f"kind, such as 'folder/**/*{''.join(records.path.suffixes[-2:])}'."
        )
    if all(suffix_of(file.path) == ".json" for file in files):
        raise ConfigurationError(
            f"source={source!r} is JSON ({files[0].name}), whose keys and quotes would be learned as text; write one "
            "object a line and name the file .jsonl."
        )


def suffix_of(path: str | Path) -> str:
    """The suffix of a file in small letters: some systems write capitals."""
    return Path(path).suffix.lower()


def has_records(files: Sequence[SourceFile]) -> bool:
    """True if the files of a source hold records with a field of text."""
    return _kind(files[0].path) is not None


def _kind(path: Path) -> Literal["jsonl", "parquet", "arrow"] | None:
    """The kind of a file's records; None for text."""
    if suffix_of(path) not in _PACKED:
        return _KINDS.get(suffix_of(path))
    inner = suffix_of(path.with_suffix(""))
    return "jsonl" if inner == ".json" else _KINDS.get(inner)  # C4 and Dolma name their JSONL .json.gz


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
    return root, [path for path in paths if path.is_file() and _is_text(path)]


def _is_text(path: Path) -> bool:
    """True if a file decodes as UTF-8: some of the standard library's tests hold other encodings on purpose."""
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _users_files(source: str) -> tuple[Path, list[Path]]:
    path = Path(source).expanduser()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        paths, root = _saved_dataset(path) or list(visible_files(path)), path
    elif glob.has_magic(source):
        paths = _matching_files(path)
        root = Path(os.path.commonpath([found.parent for found in paths])) if paths else path
    else:
        if path.exists():  # a pipe or a device
            with reading(path):
                check_regular(path)
        raise ConfigurationError(
            f"source={source!r} does not exist; give 'stdlib', a file, a folder, a glob, or tokens: a folder of "
            "moe-data, a .bin or a .npy file."
        )
    if not paths:
        raise ConfigurationError(f"source={source!r} matches no files; give another folder or pattern.")
    for found in paths:
        if suffix_of(found) in TOKEN_SUFFIXES:
            raise ConfigurationError(
                f"source={source!r} holds the token file {found.name} among {len(paths)} files; name one token file, "
                "or a glob that matches text only."
            )
    return root, paths


def _matching_files(pattern: Path) -> list[Path]:
    """The files that match a glob, and links to none. `glob` leaves out what is in folders that it cannot list."""
    parts = pattern.parts
    for depth in (depth + (part == "**") for depth, part in enumerate(parts) if glob.has_magic(part)):
        for name in glob.iglob(str(Path(*parts[:depth])), recursive=True):
            if os.path.isdir(name):
                with reading(Path(name)):
                    os.scandir(name).close()
    return [Path(name) for name in glob.iglob(str(pattern), recursive=True) if not os.path.isdir(name)]


def _saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a folder that `save_to_disk` of a Hugging Face data set has written; None for any other folder.

    Raises:
        ConfigurationError: it holds several such data sets, which are not all for training, or a damaged one.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(state.parent) for state in folder.glob("*/state.json"))
        raise ConfigurationError(
            f"{folder} is a saved DatasetDict, whose splits are not all for training; give one of "
            f"{', '.join(splits) or folder / 'train'}."
        )
    state = folder / "state.json"
    if not state.is_file() or not any(folder.glob("*.arrow")):
        return None
    with reading(state):
        try:
            names = [file["filename"] for file in json.loads(read_text(state))["_data_files"]]
            is_plain = all(isinstance(name, str) and name == Path(name).name for name in names)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"{state} does not name the files of a data set ({error}); save it again."
            ) from error
    if not is_plain or not names:
        raise ConfigurationError(f"{state} does not name files in its folder; save the data set again.")
    return [folder / name for name in names]


def visible_files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below a folder that are not hidden, behind links to folders too; a link to a folder above is left."""
    real = folder.resolve()
    if real in above:
        return
    for name, is_folder in visible_entries(folder):
        if is_folder:
            yield from visible_files(folder / name, above | {real})
        else:
            yield folder / name


def visible_entries(folder: Path) -> list[tuple[str, bool]]:
    """(name, True for a folder) of what a folder holds that is not hidden, sorted.

    Raises:
        ConfigurationError: it cannot be read.
    """
    with reading(folder), os.scandir(folder) as entries:
        return sorted(
            (entry.name, os.path.isdir(entry) if entry.is_symlink() else entry.is_dir())
            for entry in entries
            if not entry.name.startswith(".")
        )


# ---------------------------------------------------------------------- parts and documents


def parts_of(file: SourceFile) -> list[FilePart]:
    """The parts of a file, in order.

    Raises:
        ConfigurationError: it is damaged, or of a format whose package is missing.
    """
    path, size = file.path, file.size_bytes
    kind = _kind(path)
    if kind == "jsonl" and suffix_of(path) not in _PACKED:
        starts = range(0, size, _PART_BYTES)
        return [
            FilePart(
                path=path, start=start, stop=min(start + _PART_BYTES, size), size_bytes=min(_PART_BYTES, size - start)
            )
            for start in starts
        ]
    if kind != "parquet":
        return [FilePart(path=path, start=0, stop=1, size_bytes=size)]
    with reading(path), open_regular(path) as opened:
        about = _pyarrow("parquet", path).ParquetFile(opened).metadata
        sizes = [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
    parts, start, total = [], 0, max(1, sum(sizes))
    for stop in range(1, len(sizes) + 1):
        nbytes = sum(sizes[start:stop])
        if nbytes >= _PART_BYTES or stop == len(sizes):
            parts.append(FilePart(path=path, start=start, stop=stop, size_bytes=nbytes * size // total))
            start = stop
    return parts


def portions(files: Iterable[SourceFile]) -> list[tuple[FilePart, ...]]:
    """The parts of all files in portions of about 64 MiB: one part of a large file, or many small files.

    Raises:
        ConfigurationError: see `parts_of`.
    """
    found, portion, nbytes = [], list[FilePart](), 0
    for file in files:
        for part in parts_of(file):
            portion.append(part)
            nbytes += part.size_bytes
            if nbytes >= _PART_BYTES:
                found.append(tuple(portion))
                portion, nbytes = [], 0
    return [*found, tuple(portion)] if portion else found


def documents(
    part: FilePart, text_field: str, advance: Callable[[int], None] = lambda nbytes: None
) -> Iterator[Document]:
    """The documents of a part that have any text. Each is read to its end before the next one.

    Args:
        text_field: of the text in records: key of JSONL, column of tables.
        advance: called with bytes of the part as they are read.

    Raises:
        ConfigurationError: it cannot be read, or a record has no text; names the file and the line or row.
    """
    kind = _kind(part.path)
    with reading(part.path):
        if kind is None:
            with _opened(part.path, advance) as stream:
                yield text_chunks(stream, part.path)
        elif kind == "jsonl":
            yield from _json_texts(part, text_field, advance)
        else:
            tables = _parquet_tables if kind == "parquet" else _arrow_tables
            yield from _table_texts(tables(part, text_field), part, text_field, advance)


def text_chunks(stream: BinaryIO, path: Path) -> Document:
    """A UTF-8 text in chunks of 16 to 32 MiB that end at line ends, or where a line is longer, between characters; a
    byte order mark at its start is left out.

    Raises:
        ConfigurationError: it is not UTF-8, or cannot be read.
    """
    with reading(path):
        rest, at = b"", 0
        while data := stream.read(_CHUNK_BYTES):
            data = rest + data
            start = len(codecs.BOM_UTF8) if at == 0 and data.startswith(codecs.BOM_UTF8) else 0
            lines = data[start : data.rfind(b"\n") + 1 or len(data)]
            whole = lines[: _whole_characters(lines, at + start)]
            if whole:
                yield whole
            end = start + len(whole)
            rest, at = data[end:], at + end
        if rest:
            _whole_characters(rest, at, is_end=True)
            yield rest


def _whole_characters(data: bytes, at: int, *, is_end: bool = False) -> int:
    """Return the number of bytes of UTF-8 before a character that goes on behind them; at the end there is none."""
    try:
        return codecs.utf_8_decode(data, "strict", is_end)[1]
    except UnicodeDecodeError as error:
        error.start += at
        raise


class _Stream(io.RawIOBase):
    """A file whose bytes are counted as they are read, unpacked or not."""

    def __init__(self, inner: Any, advance: Callable[[int], None] | None = None) -> None:
        self._inner, self._advance = inner, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        if self._advance is not None:
            self._advance(len(data))
        return len(data)


@contextmanager
def _opened(path: Path, advance: Callable[[int], None]) -> Iterator[BinaryIO]:
    """The content of a file, unpacked where its suffix says so."""
    with open_regular(path) as file:
        counted = io.BufferedReader(_Stream(file, advance), _CHUNK_BYTES)
        if suffix_of(path) == ".gz":
            yield io.BufferedReader(gzip.GzipFile(fileobj=counted))
        elif suffix_of(path) == ".zst":
            yield io.BufferedReader(_Stream(_pyarrow("lib", path).CompressedInputStream(counted, "zstd")))
        else:
            yield counted


def _pyarrow(module: str, path: Path) -> Any:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"{path} needs the package 'pyarrow'; run: pip install 'moe-lightning[data]', or give .jsonl or .txt files."
        ) from error
    return getattr(pyarrow, module)


def _json_texts(part: FilePart, text_field: str, advance: Callable[[int], None]) -> Iterator[Document]:
    is_packed = suffix_of(part.path) in _PACKED
    with _opened(part.path, advance) if is_packed else open_regular(part.path) as file:
        if part.start:
            file.seek(part.start - 1)
            _line(file, part, 0)  # begins before the part
        offset, number = (0, 0) if is_packed else (file.tell(), 0)
        while (is_packed or offset < part.stop) and (line := _line(file, part, number)):
            number += 1
            if line.strip():
                try:
                    text = _text_of(line, text_field)
                except (ValueError, RecursionError) as error:
                    line_number = number + _lines_before(part)
                    raise ConfigurationError(f"{part.path}, line {line_number:,}: {error}") from error
                if text:
                    yield iter((text,))
            offset += len(line)
            if not is_packed:
                advance(len(line))


def _line(file: BinaryIO, part: FilePart, number: int) -> bytes:
    line = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise ConfigurationError(
            f"{part.path}, line {number + 1 + _lines_before(part):,}: it is longer than {_LONGEST_LINE:,} bytes; "
            "split it."
        )
    return line


def _lines_before(part: FilePart) -> int:
    """The number of lines that begin before a part."""
    if not part.start:
        return 0
    count, left, last = 0, part.start, b"\n"
    with open_regular(part.path) as file:
        while left and (data := file.read(min(left, _CHUNK_BYTES))):
            count, left, last = count + data.count(b"\n"), left - len(data), data[-1:]
    return count + (last != b"\n")


def _text_of(line: bytes, text_field: str) -> bytes:
    """The text of a line of JSONL as UTF-8.

    Raises:
        ValueError: there is none.
    """
    try:
        record = json.loads(decoded(line.removeprefix(codecs.BOM_UTF8)))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON ({error.msg} at column {error.colno}); fix it, or leave the line out."
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f'it is not an object such as {{"{text_field}": "..."}}; write one, or leave the line out.')
    if text_field not in record:
        raise ValueError(_no_field(text_field, record))
    return _as_utf8(record[text_field], text_field)


def _no_field(text_field: str, names: Iterable[str]) -> str:
    names = list(names)
    listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    chat = ", or use data=instructions for conversations" if CONVERSATIONS & {*names} else ""
    return f"it has no {text_field!r}, but {listed or 'nothing'}; set text_field to the name of the text{chat}."


def _as_utf8(text: Any, text_field: str) -> bytes:
    if text is None:
        raise ValueError(f"its {text_field!r} is null; give it a text, or leave the record out.")
    if not isinstance(text, str):
        raise ValueError(
            f"its {text_field!r} is a {type(text).__name__}, not text; set text_field to that of the text."
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"its {text_field!r} holds half of a surrogate pair at character {error.start:,}, which no UTF-8 text can; "
            "replace it."
        ) from None


def _parquet_tables(part: FilePart, text_field: str) -> Iterator[tuple[int, Any]]:
    """First row and the column of each batch."""
    with open_regular(part.path) as file:
        opened = _pyarrow("parquet", part.path).ParquetFile(file)
        _check_column(opened.schema_arrow, part, text_field)
        first = sum(opened.metadata.row_group(group).num_rows for group in range(part.start))
        for batch in opened.iter_batches(_ROWS, range(part.start, part.stop), [text_field], use_threads=False):
            yield first, batch.column(0)
            first += len(batch)


def _arrow_tables(part: FilePart, text_field: str) -> Iterator[tuple[int, Any]]:
    library = _pyarrow("lib", part.path)
    ipc = _pyarrow("ipc", part.path)
    check_regular(part.path)
    with library.memory_map(str(part.path)) as file:
        try:
            batches: Iterable[Any] = ipc.open_stream(file)
            schema = batches.schema  # type: ignore[attr-defined]
        except library.ArrowInvalid:
            opened = ipc.open_file(file)
            schema, batches = opened.schema, map(opened.get_batch, range(opened.num_record_batches))
        _check_column(schema, part, text_field)
        first = 0
        for batch in batches:
            column = batch.column(text_field)
            column.validate(full=True)  # reading alone trusts the offsets of the file
            yield first, column
            first += len(batch)


def _check_column(schema: Any, part: FilePart, text_field: str) -> None:
    if text_field not in schema.names:
        raise ConfigurationError(f"{part.path}: {_no_field(text_field, schema.names)}")
    kind = schema.field(text_field).type
    if str(kind.value_type if hasattr(kind, "index_type") else kind) not in ("string", "large_string", "string_view"):
        raise ConfigurationError(
            f"{part.path}: its {text_field!r} is {kind}, not text; set text_field to the column of the text."
        )


def _table_texts(
    tables: Iterator[tuple[int, Any]], part: FilePart, text_field: str, advance: Callable[[int], None]
) -> Iterator[Document]:
    done = 0
    for first, column in tables:
        for row, value in enumerate(column, first):
            try:
                text = _as_utf8(value.as_py(), text_field)
            except ValueError as error:  # UnicodeDecodeError too
                reason = f"its {text_field!r} is not UTF-8 text" if isinstance(error, UnicodeError) else error
                raise ConfigurationError(f"{part.path}, row {row:,}: {reason}") from error
            if text:
                yield iter((text,))
        read = min(column.nbytes, part.size_bytes - done)
        done += read
        advance(read)
    advance(part.size_bytes - done)
