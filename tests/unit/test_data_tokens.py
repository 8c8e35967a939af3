"""Documents of every format, folders of tokens and moe-data: the same tokens however they are made, never half."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from moe_lightning.cli import data as moe_data
from moe_lightning.data import documents, token_folder
from moe_lightning.data.corpus import prepare_corpus
from moe_lightning.data.documents import parts_of, source_files
from moe_lightning.data.text import TextData
from moe_lightning.data.token_folder import Recipe, TokenFolder, open_token_folder, write_token_folder
from moe_lightning.errors import ConfigurationError
from tests.forks import wait_until
from tests.no_locks import refuse_locks
from tests.programs import users_environment

pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"{i}: für Elise — " + "word " * (i % 7) + "\n" * (i % 3) for i in range(400)]
BYTES = Recipe(tokenizer=None, text_field="text", end_of_document=None)


def jsonl(texts: list[str] = TEXTS, field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def table(texts: list[str | None] = TEXTS) -> Any:  # type: ignore[assignment]
    return pa.table({"id": list(range(len(texts))), "text": texts})


def saved_dataset(folder: Path, texts: list[str] = TEXTS, **options: Any) -> Path:
    datasets = pytest.importorskip("datasets", reason="the extra `streams` is not installed")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder), **options)
    return folder


def write_zstd(path: Path, content: bytes) -> Path:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(content)
    return path


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def ipc_file(path: Path) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=50)
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda f: write(f / "a.jsonl", jsonl().replace(b"\n", b"\n\n", 3)),
    "jsonl.gz": lambda f: write(f / "a.jsonl.gz", gzip.compress(jsonl()[:999]) + gzip.compress(jsonl()[999:])),
    "jsonl.zst": lambda f: write_zstd(f / "a.jsonl.zst", jsonl()),
    "parquet": lambda f: pq.write_table(table(), f / "a.parquet", row_group_size=30) or f / "a.parquet",
    "dictionary": lambda f: (
        pq.write_table(table().set_column(1, "text", table()["text"].dictionary_encode()), f / "a.parquet")
        or f / "a.parquet"
    ),
    "arrow": lambda f: ipc_file(f / "a.arrow"),
    "dataset": lambda f: saved_dataset(f / "saved"),
}


def all_tokens(source: Path, **options: Any) -> bytes:
    corpus = prepare_corpus(source, cache_dir=source.parent / "cache", **options)
    return bytes(np.concatenate([corpus.train.open(), corpus.val.open()]))


def starts_of(source: Path) -> list[int]:
    corpus = prepare_corpus(source, cache_dir=source.parent / "cache")
    return open_token_folder(corpus.train.path.parent).documents().tolist()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PART_BYTES", 1000)
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 128)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    source = FORMATS[kind](tmp_path)
    texts = [text.encode() for text in TEXTS]
    assert all_tokens(source) == b"".join(texts)
    assert starts_of(source) == np.cumsum([0, *map(len, texts[:-1])]).tolist()
    ended = all_tokens(source, end_of_document=10)
    assert ended == b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts)
    parts = [part for file in source_files([str(source)]) for part in parts_of(file)]
    assert (len(parts) > 5) == (kind in ("jsonl", "parquet"))
    advanced = list[int]()
    for part in parts:
        for document in documents.documents(part, "text", advanced.append):
            list(document)
    assert sum(advanced) == sum(part.size_bytes for part in parts)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".py.zst"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    text = "".join(TEXTS).encode()
    path = tmp_path / f"a{suffix}"
    packed = {".gz": gzip.compress(text), ".zst": write_zstd(tmp_path / "b", text).read_bytes()}
    write(path, packed.get(path.suffix, text))
    assert all_tokens(path) == text
    assert starts_of(path) == [0]


@pytest.mark.usefixtures("small_parts")
def test_lines_of_any_length_are_read_once(tmp_path: Path) -> None:
    """Parts end inside of lines, at their ends and behind them."""
    draw = random.Random(0)
    for trial in range(30):
        texts = ["x" * draw.choice([0, 1, 90, 985, 986, 987, 988, 989, 3000]) + str(i) for i in range(12)]
        path = write(tmp_path / f"{trial}.jsonl", "".join(f'{{"text":"{text}"}}\n' for text in texts).rstrip("\n"))
        (file,) = source_files([str(path)])
        found = [
            b"".join(document).decode() for part in parts_of(file) for document in documents.documents(part, "text")
        ]
        assert found == texts


# ---------------------------------------------------------------------- mistakes


def _damaged_gzip(folder: Path) -> Path:
    content = bytearray(gzip.compress(jsonl()))
    content[len(content) // 2] ^= 255
    return write(folder / "a.jsonl.gz", bytes(content))


def _rows(folder: Path, texts: list[str | None], name: str = "a.parquet") -> Path:
    pq.write_table(table(texts), folder / name, row_group_size=2)
    return folder / name


def _arrow_beyond_its_text(folder: Path) -> Path:
    path = folder / "a.arrow"
    texts = pa.table({"text": ["abcd"] * 3})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, texts.schema) as writer:
        writer.write_table(texts)
    data, offsets = path.read_bytes(), struct.pack("<4i", 0, 4, 8, 12)
    assert data.count(offsets) == 1
    return write(path, data.replace(offsets, struct.pack("<4i", 0, 4, 8, 20)))  # inside the file


MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "null": (lambda f: write(f / "a.jsonl", '{"text": "a"}\n\n{"text": null}\n'), r"line 3: its 'text' is null; "),
    "number": (lambda f: write(f / "a.jsonl", '{"text": 3}\n'), r"a.jsonl, line 1: its 'text' is a int, not text; set"),
    "field": (lambda f: write(f / "a.jsonl", jsonl(field="body")), r"line 1: it has no 'text', but 'id', 'body'; set"),
    "surrogate": (lambda f: write(f / "a.jsonl", '{"text": "a\\ud800"}\n'), r"line 1: .*surrogate pair at character"),
    "json": (lambda f: write(f / "a.jsonl", b'{"text": "a"}\n{"text": \n'), r"line 2: it is not JSON \(.* at column"),
    "list": (lambda f: write(f / "a.jsonl", "[1, 2]\n"), r'line 1: it is not an object such as {"text": "..."}'),
    "latin": (lambda f: write(f / "a.jsonl", b'{"text": "\xe9"}\n'), r"a.jsonl, line 1: it is not UTF-8 text"),
    "deep": (lambda f: write(f / "a.jsonl", b"[" * 200_000), r"a.jsonl, line 1: "),
    "blank": (lambda f: write(f / "a.jsonl", "\n\n"), r"no document of the source has any text"),
    "cut gzip": (lambda f: write(f / "a.jsonl.gz", gzip.compress(jsonl())[:-900]), r"a.jsonl.gz is damaged or was cut"),
    "no gzip": (lambda f: write(f / "a.txt.gz", b"plain"), r"a.txt.gz is damaged or was cut off"),
    "flipped gzip": (_damaged_gzip, r"a.jsonl.gz(, line \d+: it is not| is damaged or was cut off)"),
    "cut zstd": (
        lambda f: write(f / "a.txt.zst", write_zstd(f / "b", os.urandom(9999)).read_bytes()[:-500]),
        r"a.txt.zst (is damaged or was cut off|is not UTF-8)",
    ),
    "cut zstd of text": (
        lambda f: write(f / "a.jsonl.zst", write_zstd(f / "b", jsonl()).read_bytes()[:-100]),
        r"a.jsonl.zst(, line \d+: it is not JSON| is damaged or was cut off)",
    ),
    "no zstd": (lambda f: write(f / "a.txt.zst", b"plain text"), r"a.txt.zst is damaged or was cut off"),
    "no parquet": (lambda f: write(f / "a.parquet", b"plain text"), r"a.parquet is damaged or was cut off"),
    "cut parquet": (
        lambda f: write(f / "a.parquet", FORMATS["parquet"](f).read_bytes()[:-100]), r"a.parquet is damaged"),
    "no arrow": (lambda f: write(f / "a.arrow", b"plain text"), r"a.arrow is damaged or was cut off"),
    "offsets of arrow": (_arrow_beyond_its_text, r"a.arrow is damaged or was cut off"),
    "null row": (lambda f: _rows(f, ["a", "b", "c", None]), r"a.parquet, row 3: its 'text' is null"),
    "column": (
        lambda f: pq.write_table(pa.table({"body": ["a"]}), f / "a.parquet") or f / "a.parquet",
        r"a.parquet: it has no 'text', but 'body'; set text_field",
    ),
    "kind of column": (
        lambda f: pq.write_table(pa.table({"text": [[1, 2]]}), f / "a.parquet") or f / "a.parquet",
        r"a.parquet: its 'text' is list<.*, not text; set text_field to the column",
    ),
    "mixed": (
        lambda f: write(f / "a.jsonl", jsonl()) and write(f / "README.md", "read me") and f,
        r"holds records \(a.jsonl\) and text \(README.md\); give a glob .* such as 'folder/\*\*/\*.jsonl'",
    ),
    "splits": (
        lambda f: write(saved_dataset(f / "train").parent / "dataset_dict.json", '{"splits": ["train"]}') and f,
        r"is a saved DatasetDict, whose splits are not all for training; give one of \S+/source/train\.$",
    ),
    "state": (
        lambda f: write(saved_dataset(f / "d") / "state.json", '{"_data_files": [{"filename": "../x.arrow"}]}').parent,
        r"state.json does not name files in its folder",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_files_are_one_sentence(tmp_path: Path, name: str) -> None:
    make, sentence = MISTAKES[name]
    folder = tmp_path / "source"
    folder.mkdir()
    with pytest.raises(ConfigurationError) as raised:
        prepare_corpus(make(folder), cache_dir=tmp_path / "cache")
    assert re.search(sentence, str(raised.value)), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("small_parts")
def test_a_line_is_counted_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    lines = jsonl().splitlines(keepends=True)
    for number in (1, 100, 137, len(lines)):
        path = write(tmp_path / "a.jsonl", b"".join([*lines[: number - 1], b"{}\n", *lines[number:]]))
        with pytest.raises(ConfigurationError, match=rf"a.jsonl, line {number}: it has no 'text', but nothing"):
            prepare_corpus(path, cache_dir=tmp_path / "cache")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FORMATS["parquet"](tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.lib", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigurationError, match=r"a.parquet needs the package 'pyarrow'; run: pip install 'moe-l.*\[data"
    ):
        prepare_corpus(path, cache_dir=tmp_path / "cache")


# ---------------------------------------------------------------------- folders of tokens


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        write(folder / f"{number}.jsonl", jsonl(TEXTS[number * 50 : number * 50 + 50]))
    return folder


def made(out: Path, source: Path, recipe: Recipe = BYTES, **options: Any) -> TokenFolder:
    return write_token_folder(out, source_files([str(source)]), recipe, **options)


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.usefixtures("small_parts")
def test_the_number_of_workers_changes_no_byte(tmp_path: Path, texts: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    corpus = prepare_corpus(texts, cache_dir=tmp_path / "cache", tokenizer="bpe:300")
    recipe = Recipe(
        tokenizer=corpus.train.path.with_name("tokenizer.json").read_text(), text_field="text", end_of_document=3
    )
    advanced = []
    alone = made(tmp_path / "one", texts, recipe, advance=lambda *counts: advanced.append(counts))
    assert sum(nbytes for nbytes, _ in advanced) == sum(path.stat().st_size for path in texts.iterdir())
    assert sum(tokens for _, tokens in advanced) == alone.header.num_tokens
    assert content(made(tmp_path / "three", texts, recipe, workers=3).path) == content(alone.path)
    assert sorted(content(alone.path)) == ["documents.npy", "tokenizer.json", "tokens.bin", "tokens.json"]


class Killed(BaseException):
    """In the place of SIGKILL: nothing of ours catches it."""


@pytest.mark.usefixtures("small_parts")
def test_what_is_killed_at_any_write_goes_on_where_it_stopped(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in sorted(texts.iterdir())[2:]:
        path.unlink()
    whole, out = content(made(tmp_path / "whole", texts).path), tmp_path / "out"
    done, left = list[str](), [0]
    real = {"rename": os.rename, "unlink": Path.unlink, "save": np.save, "part": token_folder._write_portion}

    def dies(kind: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return real[kind](*args, **options)

        return call

    monkeypatch.setattr(os, "rename", dies("rename"))
    monkeypatch.setattr(Path, "unlink", dies("unlink"))
    monkeypatch.setattr(np, "save", dies("save"))
    monkeypatch.setattr(
        token_folder, "_write_portion", lambda place, *args: done.append(place.name) or real["part"](place, *args)
    )
    for moment in range(1, 1000):
        shutil.rmtree(out, ignore_errors=True)
        done.clear()
        left[0] = moment
        try:
            made(out, texts)
        except Killed:
            left[0] = 0
            begun = [path.stem for path in (out / "portions").glob("??????.json")]
            if not (out / "tokens.json").exists():
                with pytest.raises(ConfigurationError, match=r"is incomplete; run moe-data tokenize|cannot be read"):
                    open_token_folder(out)
            done.clear()
            assert content(made(out, texts).path) == whole
            assert not set(done) & set(begun), "a finished part is not made again"
            continue
        assert content(out) == whole
        break
    assert moment > 20


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("suffix", ["bin", "npy", "json"])
def test_a_damaged_part_is_made_again(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    whole, out = content(made(tmp_path / "whole", texts).path), tmp_path / "out"
    real, done = token_folder._write_portion, list[str]()

    def stops(place: Path, *args: Any) -> Any:
        if len(done) == 4:
            raise Killed
        done.append(place.name)
        return real(place, *args)

    monkeypatch.setattr(token_folder, "_write_portion", stops)
    with pytest.raises(Killed):
        made(out, texts)
    path = out / "portions" / f"{done[1]}.{suffix}"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    before, done[:] = done[1], []
    monkeypatch.setattr(
        token_folder, "_write_portion", lambda place, *args: done.append(place.name) or real(place, *args)
    )
    assert content(made(out, texts).path) == whole
    assert before in done
    assert "000000" not in done


_TOKENIZE = """
import os, signal, sys
from moe_lightning.cli import data
from moe_lightning.data import documents, token_folder
real = token_folder._write_portion
def write_portion(place, *args):
    if "STOP" in os.environ and place.name > "000002":
        signal.pause()
    return real(place, *args)
token_folder._write_portion = write_portion
if __name__ == "__main__":
    documents._PART_BYTES = 20_000
    sys.exit(data.main(sys.argv[1:]))
"""


def test_a_command_that_is_killed_leaves_no_worker_and_goes_on(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", jsonl(TEXTS * 20))
    script, out = write(tmp_path / "script.py", _TOKENIZE), tmp_path / "out"
    command = [sys.executable, str(script), "tokenize", str(source), "--tokenizer=bytes", f"--out={out}", "--workers=2"]
    options: dict[str, Any] = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    for killed in ("worker", "command"):
        with subprocess.Popen(command, env={**users_environment(), "STOP": "1"}, **options) as process:
            wait_until(lambda: len(list(out.glob("portions/00000[012].json"))) == 3 and len(workers(process.pid)) == 2)
            all_of_them = workers(process.pid)
            os.kill(all_of_them[0] if killed == "worker" else process.pid, signal.SIGKILL)
            _, err = process.communicate(timeout=120)
        assert process.returncode == (2 if killed == "worker" else -signal.SIGKILL)
        assert ("one of the 2 workers was killed, perhaps for want of memory" in err) == (killed == "worker")
        wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in all_of_them))  # noqa: B023
    done = subprocess.run(command, env=users_environment(), timeout=120, **options)
    assert done.returncode == 0, done.stderr
    assert "was begun before: what is finished is kept" in done.stderr
    assert (out / "tokens.bin").read_bytes() == "".join(TEXTS * 20).encode()
    assert sorted(path.name for path in out.iterdir()) == ["documents.npy", "tokens.bin", "tokens.json"]


def workers(pid: int) -> list[int]:
    """The worker processes of a command."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def test_a_folder_trains_as_its_text_does(tmp_path: Path, texts: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    spec = prepare_corpus(texts, cache_dir=tmp_path / "cache", tokenizer="bpe:300").train.path.with_name(
        "tokenizer.json"
    )
    folder = made(tmp_path / "out", texts, Recipe(tokenizer=spec.read_text(), text_field="text", end_of_document=None))
    for packing in (False, True):
        options = {"context_length": 16, "global_batch_size": 4, "cache_dir": tmp_path / "cache", "packing": packing}
        loaders = []
        for source, tokenizer in ((texts, str(spec)), (folder.path, None)):
            data = TextData(source=str(source), tokenizer=tokenizer, **options)
            data.prepare_data()
            data.setup()
            loaders.append(data.train_dataloader())
        first, second = loaders
        position = first.state_dict()
        for one, other in zip(first, second, strict=True):
            assert all(map(torch.equal, one, other))
        second.load_state_dict(position)  # the same data
    assert data.tokenizer == str(folder.path / "tokenizer.json")
    assert data.vocab_size == folder.header.vocab_size


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tokenizer": "other.json"}, "holds tokens of another tokenizer than tokenizer='other.json'; give "),
        ({"tokenizer": "bpe:300"}, "cannot be trained on 'out', which holds tokens already"),
        ({"end_of_document": 4}, "end_of_document=4 is not the token 3 that ends the documents of out"),
        ({"dtype": "uint16"}, "dtype='uint16' is for .bin files"),
        ({"source": ["out", "texts"]}, "holds tokens of another tokenizer than tokenizer='bytes'"),
    ],
)
def test_a_folder_is_used_as_it_was_made(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    monkeypatch.chdir(tmp_path)
    for size, name in ((300, "tokenizer.json"), (290, "other.json")):
        entry = prepare_corpus(texts, cache_dir=tmp_path / "cache", tokenizer=f"bpe:{size}").train.path.parent
        write(Path(name), (entry / "tokenizer.json").read_text())
    recipe = Recipe(tokenizer=Path("tokenizer.json").read_text(), text_field="text", end_of_document=3)
    made(Path("out"), texts, recipe)
    same = json.dumps({**json.loads(Path("tokenizer.json").read_text()), "truncation": None}, indent=None)
    write(Path("same.json"), same)
    given = {"source": "out", "cache_dir": tmp_path / "cache", **options}
    assert TextData(**{**given, **dict.fromkeys(options, None), "source": "out", "tokenizer": "same.json"}).vocab_size
    with pytest.raises(ConfigurationError) as raised:
        assert TextData(**given).corpora
    assert sentence in str(raised.value)


@pytest.mark.parametrize("source", ["out", "out.npy"])
def test_a_token_that_ends_documents_is_of_the_vocabulary(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("out.npy", np.fromfile(made(Path("out"), texts).tokens, dtype=np.uint8))
    with pytest.raises(ConfigurationError, match="end_of_document=256 is outside the vocabulary of 256; give a token"):
        assert TextData(source=source, cache_dir=tmp_path / "cache", end_of_document=256).corpora


def test_folders_end_their_documents_alike(tmp_path: Path, texts: Path) -> None:
    sources = []
    for end in (None, 3, 4):
        recipe = Recipe(tokenizer=None, text_field="text", end_of_document=end)
        sources.append(str(made(tmp_path / f"end {end}", texts, recipe).path))
    with_some = TextData(source=sources[:2], cache_dir=tmp_path / "cache")
    assert [corpus.end_of_document for corpus in with_some.corpora] == [None, 3]
    assert with_some.end_of_text == 3, "what generation ends with"
    with pytest.raises(ConfigurationError, match=r"'.*end 3' end with token 3, and those of '.*end 4' with token 4"):
        assert TextData(source=sources, cache_dir=tmp_path / "cache").corpora


def test_damaged_tokens_are_named(tmp_path: Path, texts: Path) -> None:
    folder = made(tmp_path / "out", texts)
    path = folder.tokens
    for damage, file, sentence in (
        (b"!", path, "tokens.bin is damaged"),
        (b"", path, "tokens.bin is damaged"),
        (b"!", tmp_path / "out" / "documents.npy", "documents.npy is damaged"),
        (b"", tmp_path / "out" / "tokens.json", "tokens.json cannot be read"),  # its last brace
    ):
        whole = file.read_bytes()
        file.write_bytes(whole.rstrip()[:-1] + damage)
        with pytest.raises(ConfigurationError, match=sentence):
            TextData(source=str(folder.path), cache_dir=tmp_path / "cache", packing=True, context_length=16).setup()
        file.write_bytes(whole)
    folder.check()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, texts: Path) -> None:
    write(tmp_path / "mine.txt", "mine")
    with pytest.raises(ConfigurationError, match="is not empty, and holds no tokens; give another folder"):
        made(tmp_path, texts)
    made(tmp_path / "out", texts)
    with pytest.raises(ConfigurationError, match="was made from other files or with other settings"):
        made(tmp_path / "out", texts / "1.jsonl")
    with pytest.raises(ConfigurationError, match="end_of_document=256 is outside the vocabulary of 256"):
        made(tmp_path / "other", texts, Recipe(tokenizer=None, text_field="text", end_of_document=256))
    with token_folder._locked(tmp_path / "out"), pytest.raises(ConfigurationError, match="another process writes"):
        made(tmp_path / "out", texts)


def test_a_folder_on_a_file_system_without_locks(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_locks(monkeypatch, tmp_path / "out", errno.ENOSYS)
    made(tmp_path / "out", texts).check()
    refuse_locks(monkeypatch, tmp_path / "other", errno.ENOLCK)
    with pytest.raises(
        ConfigurationError, match=r"cannot be locked \(No locks available\); start the service of locks"
    ):
        made(tmp_path / "other", texts)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_own_cache")
def test_tokenize(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    command = ["tokenize", "texts", "--tokenizer=bpe:300", "--out=out", "--workers=1", "--end-of-document=0"]
    assert moe_data.main(command) == 0
    assert re.search(r"^out: [\d,]+ tokens \(uint16\) in 300 documents of 6 files; train", capsys.readouterr().out)
    assert moe_data.main(command) == 0, "a complete folder stays"
    raw = prepare_corpus("texts", tokenizer="bpe:300", end_of_document=0)
    assert open_token_folder("out").header.digest == open_token_folder(raw.train.path.parent).header.digest


@pytest.mark.usefixtures("_own_cache")
def test_sources_of_a_command_are_one(tmp_path: Path) -> None:
    """Also what a tokenizer is not trained on is the end of all of them."""
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    for number in range(8):
        (tmp_path / "both" / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        write(tmp_path / "both" / f"{number % 2}" / f"{number}.txt", f"{number} {'abcdefgh'[number] * 3} " * 99)
    options = ["--tokenizer=bpe:300", "--workers=1", "--val-fraction=0.5"]
    digests = []
    for out, sources in (
        ("one", ["both"]),
        ("two", ["both/0", "both/1"]),
        ("three", ["both/0", "both/1/../1", "both"]),
    ):
        assert moe_data.main(["tokenize", *sources, *options, f"--out={out}"]) == 0
        digests.append(open_token_folder(out).header.digest)
    assert digests == digests[:1] * 3


@pytest.mark.usefixtures("_own_cache")
def test_folders_that_cannot_be_read_are_named(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, scan = tmp_path / "closed", os.scandir

    def scanned(path: Any) -> Any:
        if os.path.realpath(path) == str(texts / "below"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    (texts / "below").mkdir()
    monkeypatch.setattr(os, "scandir", scanned)
    for source in ("texts", "texts/*/*.jsonl", "texts/**/*.jsonl", "texts/**"):
        with pytest.raises(
            ConfigurationError, match=r"^texts/below/? cannot be read \(Permission denied\); change its"
        ):
            documents.source_files([source])
    assert documents.source_files(["texts/*.jsonl"])
    monkeypatch.setattr(Path, "is_file", lambda path: scanned(texts / "below"))
    with pytest.raises(ConfigurationError, match=f"^{closed} cannot be read"):
        token_folder.is_token_folder(closed)


@pytest.mark.parametrize("source", ["texts", "texts/*.jsonl", "texts/**"])
def test_links_to_nothing_are_named(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    for target, reason in (("gone", "No such file"), ("z.jsonl", "Too many levels")):
        (texts / "z.jsonl").unlink(missing_ok=True)
        (texts / "z.jsonl").symlink_to(target)
        with pytest.raises(ConfigurationError, match=rf"^texts/z.jsonl cannot be read \({reason}.*\); replace it, or"):
            documents.source_files([source])


@pytest.mark.parametrize("name", ["a.tar", "a.TAR.gz", "a.tar.zst"])
def test_archives_are_refused(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, "a")
    for source in (str(file), str(tmp_path), str(tmp_path / "*")):
        with pytest.raises(ConfigurationError, match=f"holds the archive {name}, whose .*; unpack it"):
            documents.source_files([source])


@pytest.mark.usefixtures("_own_cache", "texts")
def test_tokens_go_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert moe_data.main(["tokenize", "texts", "--tokenizer=bytes", "--out=~/out", "--workers=1"]) == 0
    assert (tmp_path / "home/out/tokens.json").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.usefixtures("_own_cache", "texts")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tokenize", "texts", "--out=out"], "are required: --tokenizer"),
        (["tokenize", "none.txt", "--tokenizer=bytes", "--out=out"], "source='none.txt' does not exist"),
        (["tokenize", "texts", "--tokenizer=bpe:9", "--out=out"], "larger than the 256 bytes"),
        (["tokenize", "texts", "--tokenizer=none.json", "--out=out"], "tokenizer='none.json' does not exist"),
        (["tokenize", "texts", "--tokenizer=bytes", "--out=texts/0.jsonl"], "is not a folder"),
        (["tokenize", "texts/0.jsonl", "--tokenizer=bytes", "--out=texts"], "is not empty, and holds no tokens"),
        (["tokenize", "texts", "--tokenizer=bytes", "--out=texts"], "--out texts lies in texts, whose files"),
        (["tokenize", "texts", "--tokenizer=bytes", "--out=texts/a/b"], "--out texts/a/b lies in texts, .*; give"),
        (["tokenize", "texts", "--tokenizer=bytes", "--out=out", "--workers=0"], "'0' must be|0 must be an integer"),
        (
            ["tokenize", "texts", "--tokenizer=bytes", "--out=out", "--workers=1", "--text-field=body"],
            "it has no 'body', but 'id', 'text'",
        ),
        (["tokenize", "s3://a/b", "--tokenizer=bytes", "--out=out"], "SOURCE=s3://a/b is an address"),
        (["tokenize", "", "--tokenizer=bytes", "--out=out"], "argument SOURCE: '' is empty"),
        (["tokenize", "texts/**", "--tokenizer=bytes", "--out=texts/out"], r"--out texts/out lies in texts/\*\*"),
        (["tokenize", "*/*/*", "--tokenizer=bytes", "--out=texts/out"], r"--out texts/out lies in \*/\*/\*, whose"),
        (["count", "texts"], "invalid choice: 'count'"),
    ],
)
def test_mistakes_of_commands_are_one_line(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moe_data.main(arguments) == 2
    err = capsys.readouterr().err
    assert re.search(sentence, err), err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("_own_cache", "texts")
def test_a_wrong_record_stops_all_workers(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(texts / "3.jsonl", jsonl()[:-1] + b'\n{"text": 1}\n')
    assert moe_data.main(["tokenize", "texts", "--tokenizer=bytes", "--out=out", "--workers=2"]) == 2
    assert re.search(r"^moe-data: error: \S*3.jsonl, line 401: its 'text' is a int, not text", capsys.readouterr().err)


@pytest.mark.usefixtures("_own_cache", "texts")
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("3 requested, 0 written")])
@pytest.mark.parametrize(("place", "name"), [(token_folder, "replace_text"), (np, "save")])
def test_a_full_disk_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, place: Any, name: str
) -> None:
    command = ["tokenize", "texts", "--tokenizer=bytes", "--out=out", "--workers=1"]
    with monkeypatch.context() as patched:
        patched.setattr(place, name, Mock(side_effect=error))
        assert moe_data.main(command) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        f"moe-data: error: out cannot be written ({error.strerror or error}); free space, and run the same command "
        "again; what is finished is kept."
    )
    assert moe_data.main(command) == 0


@pytest.mark.usefixtures("_own_cache", "texts")
def test_ctrl_c_says_that_the_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(token_folder, "_write_portion", interrupted)
    assert moe_data.main(["tokenize", "texts", "--tokenizer=bytes", "--out=out", "--workers=1"]) == 130
    assert capsys.readouterr().err == "moe-data: ended by SIGINT; the same command goes on where it stopped\n"


def test_progress_in_files_is_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(moe_data, "_PLAIN_S", 0.0)
    with moe_data._progress(5_000_000) as advance:
        advance(1_000_000, 250_000)
        advance(1_000_000, 250_000)
    assert capsys.readouterr().err == "1.0/5.0 MB  0.2M tokens\n2.0/5.0 MB  0.5M tokens\n"


def test_short_work_has_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with moe_data._progress(5_000_000) as advance:
        advance(5_000_000, 1_000_000)
    assert capsys.readouterr().err == ""
