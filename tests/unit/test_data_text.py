"""Corpora, tokenizers and the data module: right tokens, built once, and every mistake one sentence."""

from __future__ import annotations

import builtins
import codecs
import gzip
import itertools
import json
import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from moe_lightning.data import corpus as corpus_module
from moe_lightning.data import documents, token_folder
from moe_lightning.data.corpus import Corpus, DataSource, default_cache_dir, prepare_corpus
from moe_lightning.data.documents import source_files
from moe_lightning.data.text import TextData, TokenWindows
from moe_lightning.data.tokenizer import BpeTokenizer
from moe_lightning.errors import ConfigurationError
from tests.distributed.training import quiet_trainer

PANGRAM = "The quick brown fox jumps over the lazy dog; für Elise — ÄÖÜ.\n"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small text files in two folders."""
    root = tmp_path / "texts"
    for i in range(40):
        path = root / ("a" if i % 2 else "b") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{i}: {PANGRAM}" * 5)
    return root


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(PANGRAM * 200)
    return path


def text_of(corpus: Corpus, part: str) -> bytes:
    return bytes(getattr(corpus, part).open())


# ---------------------------------------------------------------------- corpora


def test_a_folder_is_split_by_bytes_in_whole_files_but_one(folder: Path, cache: Path) -> None:
    corpus = prepare_corpus(folder, cache_dir=cache, val_fraction=0.26)
    parts = {part: text_of(corpus, part) for part in ("train", "val")}
    homes = [[part for part, text in parts.items() if path.read_bytes() in text] for path in folder.rglob("*.txt")]
    assert sorted(map(len, homes)) == [0] + [1] * 39
    assert sum(map(len, parts.values())) == corpus.size_bytes == sum(p.stat().st_size for p in folder.rglob("*.txt"))
    assert abs(len(parts["val"]) / corpus.size_bytes - 0.26) < 0.001
    assert (corpus.vocab_size, corpus.num_files) == (256, 40)


@pytest.mark.parametrize("names", [("book.txt", "wikipedia.txt"), ("wikipedia.txt", "book.txt")])
def test_one_large_file_among_small_ones_is_cut_at_the_border(tmp_path: Path, cache: Path, names: Any) -> None:
    """By names alone all but 1 kB of a book of 10 MB was held out, or nothing of it."""
    large, small = (tmp_path / "texts" / name for name in names)
    large.parent.mkdir()
    large.write_text(PANGRAM * 20_000)
    small.write_text("x" * 999 + "\n")
    corpus = prepare_corpus(large.parent, cache_dir=cache, val_fraction=0.05)
    assert abs(corpus.val.count / corpus.size_bytes - 0.05) < 1e-5
    train, val = text_of(corpus, "train"), text_of(corpus, "val")
    assert (train + val).count(b"x" * 999) == 1
    assert len(train) + len(val) == corpus.size_bytes


def test_the_split_does_not_depend_on_the_order_of_the_files(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_corpus(folder, cache_dir=cache)
    real = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(real(self, pattern))))
    second = prepare_corpus(folder, cache_dir=tmp_path / "other")
    for part in ("train", "val"):
        assert text_of(first, part) == text_of(second, part)


def test_adding_a_file_moves_only_what_lies_at_the_border(folder: Path, cache: Path) -> None:
    before = text_of(prepare_corpus(folder, cache_dir=cache, val_fraction=0.25), "val")
    (folder / "zz.txt").write_text("one more\n")
    after = text_of(prepare_corpus(folder, cache_dir=cache, val_fraction=0.25), "val")
    assert abs(len(after) - len(before)) < 10
    assert sum(line in before for line in after.splitlines()) > 0.95 * len(after.splitlines())


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])
def test_a_part_without_a_byte_is_refused(folder: Path, cache: Path, val_fraction: float) -> None:
    with pytest.raises(ConfigurationError, match="leaves a part empty"):
        prepare_corpus(folder, cache_dir=cache, val_fraction=val_fraction)


def test_names_of_files_need_not_be_utf8(folder: Path, cache: Path) -> None:
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("x" * 100)
    corpus = prepare_corpus(folder, cache_dir=cache, val_fraction=0.25)
    assert corpus.num_files == 41
    (folder / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigurationError, match=r"caf.*\.txt is not UTF-8 text \(invalid start byte at byte \d+\)"):
        prepare_corpus(folder, cache_dir=cache, val_fraction=0.25)


def test_the_share_decides_where_the_same_tokens_are_cut(folder: Path, cache: Path) -> None:
    corpora = [prepare_corpus(folder, cache_dir=cache, val_fraction=share) for share in (0.1, 0.3)]
    assert len({corpus.train.path for corpus in corpora}) == 1
    assert len({text_of(corpus, "train") + text_of(corpus, "val") for corpus in corpora}) == 1
    assert len({corpus.train.digest for corpus in corpora}) == 2


@pytest.mark.parametrize("val_fraction", [0.1, 0.10003, 0.5, 0.0501])
def test_the_end_of_one_file_is_held_out(book: Path, cache: Path, val_fraction: float) -> None:
    corpus = prepare_corpus(book, cache_dir=cache, val_fraction=val_fraction)
    assert text_of(corpus, "train") + text_of(corpus, "val") == book.read_bytes()
    assert corpus.val.count == round(book.stat().st_size * val_fraction)


def test_globs_and_hidden_files(folder: Path) -> None:
    (folder / ".hidden").write_text("x")
    (folder / "empty.txt").touch()
    assert len(source_files([str(folder)])) == 40
    assert {file.name for file in source_files([str(folder / "**" / "3?.txt")])} == {
        f"{'a' if i % 2 else 'b'}/{i}.txt" for i in range(30, 40)
    }


def test_linked_folders_are_entered_but_not_in_circles(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.txt").write_text(PANGRAM)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "a" / "circle").symlink_to(folder)
    names = [file.name for file in source_files([str(folder)])]
    assert len(names) == 41
    assert "linked/more.txt" in names


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_conversations_are_not_taken_for_text(tmp_path: Path, cache: Path, key: str) -> None:
    (tmp_path / "records.jsonl").write_text(f"{json.dumps({'id': 1, key: 'a'})}\n")
    with pytest.raises(
        ConfigurationError, match=rf"records.jsonl, line 1: it has no 'text', but 'id', '{key}'; .*or use"
    ):
        prepare_corpus(tmp_path / "records.jsonl", cache_dir=cache)


@pytest.mark.parametrize("name", ["a.ndjson", "a.json.gz", "a.ndjson.gz", "b.JSONL", "b.Json.GZ"])
def test_json_lines_have_other_names(name: str, tmp_path: Path, cache: Path) -> None:
    lines = "".join(json.dumps({"content": f"text {number}\n", "url": "x"}) + "\n" for number in range(9)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.lower().endswith(".gz") else lines)
    named, plain = (prepare_corpus(tmp_path / one, cache_dir=cache, text_field="content") for one in (name, "a.jsonl"))
    assert text_of(named, "train") == text_of(plain, "train")


def test_token_files_may_have_suffixes_in_capitals(tmp_path: Path, cache: Path) -> None:
    tokens = np.arange(65, 91, dtype=np.uint8)  # also a text
    (tmp_path / "T.BIN").write_bytes(tokens.tobytes())
    with (tmp_path / "T.NPY").open("wb") as file:
        np.save(file, tokens.astype(np.uint16))
    options = {"cache_dir": cache, "val_fraction": 0.5}
    for name, dtype in (("T.BIN", "uint8"), ("T.NPY", None)):
        found = prepare_corpus(tmp_path / name, dtype=dtype, **options)
        assert found.train.open().tolist() == tokens[:13].tolist()


@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_json_in_one_piece_is_not_taken_for_text(name: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / name).write_text(json.dumps([{"text": "a"}] * 99))
    with pytest.raises(ConfigurationError, match=rf"is JSON \({name}\), whose keys .* write one object a line"):
        prepare_corpus(tmp_path / name, cache_dir=cache)
    (tmp_path / "x.py").write_text("x = 1\n")
    assert prepare_corpus(tmp_path, cache_dir=cache).num_files == 2


def test_the_standard_library_is_real_python(cache: Path) -> None:
    corpus = prepare_corpus("stdlib", cache_dir=cache)
    assert corpus.num_files > 300
    assert corpus.train.count > 5_000_000
    assert abs(corpus.val.count / corpus.size_bytes - 0.05) < 1e-5
    assert b"def __init__(self" in text_of(corpus, "val")
    names = [file.name for file in source_files(["stdlib"])]
    assert len(set(names)) == len(names)
    assert "argparse.py" in names
    assert not any("site-packages" in name or name.startswith("lib2to3/tests/data") for name in names)
    assert "stdlib: " in corpus.summary()


def test_undecodable_files_of_the_standard_library_are_left_out(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "good.py").write_text("x = 1\n")
    (folder / "other.py").write_text("y = 2\n")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(folder)})
    corpus = prepare_corpus("stdlib", cache_dir=cache)
    assert corpus.num_files == 2
    assert sorted(text_of(corpus, "train") + text_of(corpus, "val")) == sorted(b"x = 1\ny = 2\n")


def test_text_is_read_in_pieces_that_end_at_line_ends(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_corpus(folder, cache_dir=cache)
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 100)
    pieces = prepare_corpus(folder, cache_dir=tmp_path / "other")
    for part in ("train", "val"):
        assert text_of(pieces, part) == text_of(whole, part)
    path = folder / "a" / "1.txt"
    with path.open("rb") as file:
        chunks = list(documents.text_chunks(file, path))
    assert len(chunks) > 1
    assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])
    assert b"".join(chunks) == path.read_bytes()


@pytest.mark.parametrize("text", [b"", b"first\nsecond \xef\xbb\xbf\n", b"one line"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(codecs.BOM_UTF8 + text)
    with path.open("rb") as file:
        assert list(documents.text_chunks(file, path)) == ([text] if text else [])
    path.write_bytes(codecs.BOM_UTF8 + text + b"\xff")
    with path.open("rb") as file, pytest.raises(ConfigurationError, match=f"at byte {len(text) + 3}"):
        list(documents.text_chunks(file, path))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    part = documents.FilePart(path=tmp_path / "gone.txt", start=0, stop=1, size_bytes=5)
    with pytest.raises(ConfigurationError, match=r"gone.txt cannot be read"):
        list(documents.documents(part, "text"))


def test_a_python_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigurationError, match=r"no \.py files"):
        source_files(["stdlib"])


# ---------------------------------------------------------------------- the cache


def test_a_corpus_is_built_once_and_again_when_a_file_changes(
    book: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    write = token_folder.write_token_folder
    monkeypatch.setattr(corpus_module, "write_token_folder", lambda *args: built.append(args[0]) or write(*args))
    first, second = (prepare_corpus(book, cache_dir=cache) for _ in range(2))
    assert first == second
    assert len(built) == 1
    book.write_text(PANGRAM * 201)
    assert prepare_corpus(book, cache_dir=cache).train.count > first.train.count
    assert len(built) == 2


def written_at(path: Path, text: str, time_s: int = 1) -> Path:
    """A file with this text and time, in place if there is one."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (time_s, time_s))
    return path


def test_text_of_the_same_name_size_and_time_is_told_apart(tmp_path: Path, cache: Path) -> None:
    """As Docker layers, archives and `cp -p` make them."""
    files = [written_at(tmp_path / version / "train.txt", f"{letter}\n" * 99) for version, letter in ("1a", "2b")]
    corpora = [prepare_corpus(source, cache_dir=cache) for file in files for source in (file, file.parent)]
    assert [bytes(corpus.train.open()[:2]) for corpus in corpora] == [b"a\n", b"a\n", b"b\n", b"b\n"]
    written_at(files[0], "c\n" * 99)
    assert bytes(prepare_corpus(files[0], cache_dir=cache).train.open()[:2]) == b"c\n"


def test_tokens_in_place_of_others_are_read_again(tmp_path: Path, cache: Path) -> None:
    found = []
    for token in (1, 2):
        np.full(100, token, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
        os.utime(tmp_path / "tokens.bin", (1, 1))
        corpus = prepare_corpus(tmp_path / "tokens.bin", cache_dir=cache, dtype="uint16")
        found.append((corpus.vocab_size, corpus.train.digest))
    assert [vocab_size for vocab_size, _ in found] == [2, 3]
    assert found[0][1] != found[1][1]


def test_text_that_stays_is_not_encoded_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it was only touched, nor where it was moved; and it is read for that only then."""
    file, read = written_at(tmp_path / "old" / "train.txt", "words\n" * 99), list[str]()
    digest = corpus_module._content_digest
    monkeypatch.setattr(corpus_module, "_content_digest", lambda files: read.append("all") or digest(files))
    first = prepare_corpus(file, cache_dir=cache)
    assert prepare_corpus(file, cache_dir=cache) == first
    assert len(read) == 1
    monkeypatch.setattr(corpus_module, "write_token_folder", None)
    os.utime(file, (2, 2))
    file.chmod(0o600)
    assert prepare_corpus(file, cache_dir=cache).train == first.train
    file.parent.rename(tmp_path / "new")
    assert prepare_corpus(tmp_path / "new" / "train.txt", cache_dir=cache).train == first.train
    assert len(read) == 3


def test_cache_folders_are_private(book: Path, cache: Path) -> None:
    corpus = prepare_corpus(book, cache_dir=cache)
    for path in (cache, corpus.train.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_racing_builders_agree(book: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        corpora = list(pool.map(lambda _: prepare_corpus(book, cache_dir=cache), range(4)))
    assert len(set(corpora)) == 1
    assert list(cache.glob("*/tokens.bin")) == [corpora[0].train.path]
    assert not list(cache.glob(".*"))


def test_a_builder_that_comes_second_uses_what_is_there(
    book: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, others = corpus_module.write_token_folder, []

    def overtaken(*args: Any) -> token_folder.TokenFolder:
        if not others:
            others.append(None)
            others[0] = prepare_corpus(book, cache_dir=cache)  # another process, from its first look to its rename
        return write(*args)

    monkeypatch.setattr(corpus_module, "write_token_folder", overtaken)
    corpus = prepare_corpus(book, cache_dir=cache)
    assert others == [corpus]
    assert list(cache.glob("*/tokens.bin")) == [corpus.train.path]
    assert not list(cache.glob(".*"))


def test_a_failed_build_leaves_nothing(folder: Path, cache: Path) -> None:
    (folder / "noise.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"noise.txt is not UTF-8"):
        prepare_corpus(folder, cache_dir=cache)
    assert not [*cache.glob("*/*.bin"), *cache.glob(".*")]


def test_the_default_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "moe_lightning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "moe_lightning"


@pytest.mark.parametrize("damage", ["short", "gone", "meta"])
def test_a_damaged_entry_is_named(book: Path, cache: Path, damage: str) -> None:
    entry = prepare_corpus(book, cache_dir=cache).train.path.parent
    if damage == "short":
        (entry / "tokens.bin").write_bytes(b"x")
    elif damage == "gone":
        (entry / "documents.npy").unlink()
    else:
        (entry / "meta.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"delete|remove the folder"):
        prepare_corpus(book, cache_dir=cache)


# ---------------------------------------------------------------------- tokens and tokenizers


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_bin_file_is_mapped_where_it_lies(tmp_path: Path, cache: Path, dtype: str) -> None:
    tokens = np.arange(200).astype(dtype)
    path = tmp_path / "tokens.bin"
    tokens.tofile(path)
    corpus = prepare_corpus(path, cache_dir=cache, dtype=dtype, val_fraction=0.1)
    assert corpus.train.path == corpus.val.path == path
    np.testing.assert_array_equal(corpus.train.open(), tokens[:180])
    np.testing.assert_array_equal(corpus.val.open(), tokens[180:])
    assert corpus.vocab_size == (256 if dtype == "uint8" else 200)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.dtype(">i4")])
def test_an_npy_file_names_its_own_dtype(tmp_path: Path, cache: Path, dtype: Any) -> None:
    tokens = np.arange(1000, 1200).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    corpus = prepare_corpus(tmp_path / "tokens.npy", cache_dir=cache, val_fraction=0.1)
    np.testing.assert_array_equal(np.concatenate([corpus.train.open(), corpus.val.open()]), tokens)
    assert corpus.vocab_size == 1200
    x, y = TokenWindows(corpus.val, 4)[1]
    assert x.dtype == y.dtype == torch.int64
    assert (x.tolist(), y.tolist()) == ([1184, 1185, 1186, 1187], [1185, 1186, 1187, 1188])


def test_bpe_is_trained_on_the_training_part_and_decodes(folder: Path, cache: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    corpus = prepare_corpus(folder, cache_dir=cache, tokenizer="bpe:300")
    assert 256 < corpus.vocab_size <= 300
    assert np.dtype(corpus.train.dtype) == np.uint16
    plain = prepare_corpus(folder, cache_dir=cache)
    saved = corpus.train.path.with_name("tokenizer.json")
    tokens = np.concatenate([corpus.train.open(), corpus.val.open()])
    text = text_of(plain, "train") + text_of(plain, "val")
    assert tokenizers.Tokenizer.from_file(str(saved)).decode(tokens.tolist()).encode() == text
    again = prepare_corpus(folder, cache_dir=cache, tokenizer=str(saved))
    np.testing.assert_array_equal(again.train.open(), corpus.train.open())

    again.train.open().astype(np.uint16).tofile(folder / "tokens.bin")
    given = prepare_corpus(folder / "tokens.bin", cache_dir=cache, tokenizer=str(saved), dtype="uint16")
    assert given.vocab_size == corpus.vocab_size


@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("kind", ["bytes", "prepend", "first", "digits"])
def test_the_tokens_of_a_file_are_those_of_its_whole_text(kind: str, chunk_bytes: int) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    pre, package = tokenizers.pre_tokenizers, tokenizers.Tokenizer(tokenizers.models.BPE())
    source = Path(corpus_module.__file__).with_name("loader.py").read_text() * 2
    byte_level = pre.ByteLevel(add_prefix_space=False)
    package.pre_tokenizer = byte_level if kind in ("bytes", "digits") else pre.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=[*pre.ByteLevel.alphabet(), "▁", "\n"], show_progress=False
    )
    package.train_from_iterator([source, "=" * 50], trainer)
    if kind == "digits":  # in groups of three from the left, as Llama 3 has them
        package.pre_tokenizer = pre.Sequence([pre.Split(tokenizers.Regex(r"\d{1,3}"), "isolated"), byte_level])
    elif kind == "first":
        package.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    elif kind == "prepend":
        package.pre_tokenizer = None
        package.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
    runs = ["=" * 20_001, "1234567890" * 2000, "é" * 9000, " \n" * 5000, "".join(source.split())[:12_000]]
    text = source[:20_000] + source[:9_000].join(runs)
    package.enable_truncation(10)  # of other uses of the file
    encoder = BpeTokenizer(package)
    whole = package.encode(text, add_special_tokens=False).ids
    raw = text.encode()
    ends = [next(at for at in range(end, -1, -1) if at == len(raw) or raw[at] & 0xC0 != 0x80) for end in
            [*range(chunk_bytes, len(raw), chunk_bytes), len(raw)]]  # fmt: skip
    chunks = [raw[start:end] for start, end in itertools.pairwise([0, *ends])]
    assert np.concatenate(list(encoder.encode_chunks(chunks))).tolist() == whole
    assert encoder.encode(text)[0].tolist() == whole


def test_bpe_without_the_package_says_how_to_get_it(book: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'moe-lightning\[bpe\]'"):
        prepare_corpus(book, cache_dir=cache, tokenizer="bpe:300")


# ---------------------------------------------------------------------- mistakes


def write_case(folder: Path, name: str) -> Path:
    """A file with one mistake in it."""
    path = folder / name
    contents: dict[str, Any] = {
        "empty.txt": b"",
        "tiny.txt": b"a",
        "latin.txt": b"\xe9\xe9\xe9\xe9" * 50,
        "odd.bin": b"12345",
        "empty.bin": b"",
        "two.bin": b"12",
        "float.npy": np.ones(50),
        "matrix.npy": np.ones((5, 5), np.int64),
        "negative.npy": np.arange(-5, 50),
        "object.npy": np.array([{}, {}], dtype=object),
        "torn.npy": b"\x93NUMPY\x01\x00v\x00",
        "broken.json": b"{}",
        "text.bin": bytes(range(250)) * 4,
    }
    content = contents[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("empty.txt", {}, "has no text, its file is empty; give files with text"),
        ("tiny.txt", {}, "leaves a part empty"),
        ("latin.txt", {}, "not UTF-8 text"),
        ("odd.bin", {"dtype": "uint16"}, "5 bytes, not a multiple of the 2 bytes of a uint16"),
        ("odd.bin", {}, "set dtype to one of"),
        ("odd.bin", {"dtype": "int8"}, "dtype='int8' is not one of"),
        ("empty.bin", {"dtype": "uint8"}, "is empty"),
        ("two.bin", {"dtype": "uint8"}, "leaves a part empty"),
        ("two.bin", {"dtype": "uint8", "tokenizer": "bpe:300"}, "holds tokens already"),
        ("two.bin", {"dtype": "uint8", "tokenizer": "nonsense", "val_fraction": 0.5}, "neither 'bytes'"),
        ("float.npy", {}, "one-dimensional integers"),
        ("matrix.npy", {}, "one-dimensional integers"),
        ("object.npy", {}, "not a whole .npy file"),
        ("torn.npy", {}, "not a whole .npy file"),
        ("negative.npy", {}, "holds token -5"),
        ("negative.npy", {"dtype": "uint8"}, "leave dtype out"),
        ("latin.txt", {"dtype": "uint8"}, "dtype='uint8' is for .bin files"),
        ("text.bin", {"dtype": "uint8", "val_fraction": 0}, "val_fraction=0 is outside"),
        ("text.bin", {"dtype": "uint8", "val_fraction": 1.0}, "val_fraction=1.0 is outside"),
        ("text.bin", {"dtype": "uint8", "val_fraction": "a"}, "val_fraction='a' is outside"),
        ("tiny.txt", {"tokenizer": "bpe:256"}, "larger than the 256 bytes"),
        ("tiny.txt", {"tokenizer": "bpe:many"}, "larger than the 256 bytes"),
        ("tiny.txt", {"tokenizer": "words"}, "neither 'bytes'"),
    ],
)
def test_mistakes_in_files_are_one_sentence(
    tmp_path: Path, cache: Path, name: str, options: dict[str, Any], sentence: str
) -> None:
    path = write_case(tmp_path, name)
    with pytest.raises(ConfigurationError) as raised:
        prepare_corpus(path, cache_dir=cache, **options)
    assert sentence in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("missing.txt", "does not exist"),
        ("missing.bin", "does not exist"),
        ("nothing*.txt", "matches no files"),
        ("void", "matches no files"),
        ("mixed", "holds the token file x.npy among 2 files"),
    ],
)
def test_sources_that_are_not_there_are_one_sentence(tmp_path: Path, cache: Path, source: str, sentence: str) -> None:
    (tmp_path / "void").mkdir()
    (tmp_path / "mixed").mkdir()
    for name in ("x.npy", "y.txt"):
        (tmp_path / "mixed" / name).write_text("text")
    with pytest.raises(ConfigurationError, match=sentence):
        prepare_corpus(tmp_path / source, cache_dir=cache)


@pytest.mark.parametrize("number", [256, 300, 70_000])
def test_a_vocabulary_with_holes_counts_up_to_its_largest_number(tmp_path: Path, cache: Path, number: int) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)} | {"<end>": number}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("hello<end>\n" * 100)
    corpus = prepare_corpus(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"), cache_dir=cache)
    assert corpus.vocab_size == number + 1
    assert corpus.train.open().max() == number


def test_a_token_beyond_the_tokenizer_is_named(tmp_path: Path, cache: Path, book: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    trained = prepare_corpus(book, cache_dir=cache, tokenizer="bpe:260")
    np.save(tmp_path / "tokens.npy", np.arange(270))
    with pytest.raises(ConfigurationError, match="holds token 269, outside the vocabulary of 260"):
        prepare_corpus(
            tmp_path / "tokens.npy", cache_dir=cache, tokenizer=str(trained.train.path.with_name("tokenizer.json"))
        )
    with pytest.raises(ConfigurationError, match=r"not a tokenizer.json"):
        prepare_corpus(book, cache_dir=cache, tokenizer=str(write_case(tmp_path, "broken.json")))


def test_a_cache_that_cannot_be_written_is_named(book: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="set XDG_CACHE_HOME or cache_dir to a folder of yours"):
        prepare_corpus(book, cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize(("owner", "name"), [(token_folder, "_write_portion"), (Path, "rename")])
def test_a_full_disk_is_named(book: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(ConfigurationError, match=r"No space left on device\); free space"):
        prepare_corpus(book, cache_dir=cache)
    assert not [*cache.glob("*/*.bin"), *cache.glob(".*")]


# ---------------------------------------------------------------------- windows and the data module


def test_windows_predict_every_token_but_the_first_once(book: Path, cache: Path) -> None:
    span = prepare_corpus(book, cache_dir=cache).val
    windows = TokenWindows(span, 7)
    targets = torch.cat([windows[i][1] for i in range(len(windows))])
    assert targets.tolist() == list(text_of(prepare_corpus(book, cache_dir=cache), "val"))[1 : 1 + 7 * len(windows)]
    assert span.count - 1 - len(targets) < 7
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_fewer_windows_are_spread_evenly(book: Path, cache: Path) -> None:
    options = {"source": str(book), "cache_dir": cache, "context_length": 16}
    made = []
    for most in (None, 5, 10**9):
        data = TextData(val_samples=most, **options)
        data.setup()
        made.append(data.val_dataloader().dataset)
    windows, some, all_of_them = made
    assert len(some) == 5
    for i in range(5):
        assert torch.equal(some[i][0], windows[i * len(windows) // 5][0])
    assert len(all_of_them) == len(windows)


def test_windows_travel_without_their_tokens(book: Path, cache: Path) -> None:
    windows = TokenWindows(prepare_corpus(book, cache_dir=cache).train, 16)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[3][1], windows[3][1])  # noqa: S301 - what was just written
    loader = DataLoader(windows, batch_size=4, num_workers=1)
    assert torch.equal(next(iter(loader))[0][1], windows[1][0])


def test_text_shorter_than_a_window_is_one_sentence(book: Path, cache: Path) -> None:
    data = TextData(source=str(book), cache_dir=cache, context_length=5000)
    with pytest.raises(
        ConfigurationError, match=r"context_length=5000 needs 5,001 tokens, and one part of source='.*book.txt' has 68"
    ):
        data.setup()
    data = TextData(source=str(book), cache_dir=cache, context_length=16)
    with pytest.raises(ConfigurationError, match="context_length=0"):
        TokenWindows(data.corpora[0].val, 0)


class Counter(LightningModule):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[int] = []
        self.held_out: list[int] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.batches.append(int(batch[0].sum()))
        return self.weight * 1.0

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.held_out.append(len(batch[0]))

    def test_step(self, batch: list[torch.Tensor]) -> None:
        self.held_out.append(len(batch[0]))

    def predict_step(self, batch: list[torch.Tensor]) -> int:
        return len(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small_trainer(tmp_path: Path, **options: Any) -> Trainer:
    return quiet_trainer(**{"default_root_dir": tmp_path, "num_sanity_val_steps": 2} | options)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_data_module_under_a_trainer(book: Path, cache: Path, tmp_path: Path) -> None:
    data = TextData(source=str(book), cache_dir=cache, context_length=16, global_batch_size=12, val_samples=30)
    assert data.vocab_size == 256
    assert "1 files" in data.summary()
    module = Counter()
    trainer = small_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=3, limit_train_batches=6)
    trainer.fit(module, data)
    assert trainer.global_step == 4
    assert data.train_dataloader().step_sampler.cut.num_micros == 3
    every = [4] * 7 + [2]  # in batches as large as a micro-batch, which fits the memory
    assert module.held_out == [4, 4] + every * 2  # the sanity check sees two batches, each validation all
    module.held_out.clear()
    trainer.test(module, data)
    assert module.held_out == every
    assert trainer.predict(module, data) == every


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_limit_may_end_an_epoch_inside_a_step(book: Path, cache: Path, tmp_path: Path) -> None:
    data = TextData(source=str(book), cache_dir=cache, context_length=16, global_batch_size=12)
    trainer = small_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=3, limit_train_batches=8)
    trainer.fit(Counter(), data)
    assert trainer.global_step == 2 * 3
    sampler = trainer.train_dataloader.step_sampler
    assert sampler.epoch_size == 2 * 12 + 8
    assert [sampler.slice_at(at).step_total for at in (0, 12, 24)] == [12, 12, 8]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_overfitting_repeats_the_same_batches(book: Path, cache: Path, tmp_path: Path) -> None:
    data = TextData(source=str(book), cache_dir=cache, context_length=16, global_batch_size=4)
    module = Counter()
    small_trainer(tmp_path, max_epochs=3, overfit_batches=2, limit_val_batches=0).fit(module, data)
    assert module.batches == module.batches[:2] * 3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fast_dev_run_needs_no_whole_step(book: Path, cache: Path, tmp_path: Path) -> None:
    data = TextData(source=str(book), cache_dir=cache, context_length=16, global_batch_size=4)
    module = Counter()
    small_trainer(tmp_path, fast_dev_run=True, accumulate_grad_batches=2).fit(module, data)
    assert len(module.batches) == 1


# ---------------------------------------------------------------------- the tokenizer that a run trains


@pytest.fixture
def trained(book: Path, cache: Path) -> TextData:
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    data = TextData(source=str(book), cache_dir=cache, tokenizer="bpe:280", context_length=16, global_batch_size=4)
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("is_set_up", [False, True])
def test_a_checkpoint_brings_its_tokenizer(trained: TextData, book: Path, tmp_path: Path, is_set_up: bool) -> None:
    """On other text another tokenizer would be trained; tokens must mean what they meant."""
    state = trained.state_dict()
    assert json.loads(state["trained_tokenizer"])["model"]["type"] == "BPE"
    book.write_text("quite another text, with other words in it\n" * 300)
    other = TextData(
        source=str(book), cache_dir=tmp_path / "other", tokenizer="bpe:280", context_length=16, global_batch_size=4
    )
    if is_set_up:
        other.prepare_data()
        other.setup()
        assert other.state_dict() != state
    other.load_state_dict(state)
    other.prepare_data()
    other.setup()
    assert other.state_dict() == state
    assert other.vocab_size == trained.vocab_size
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_str(state["trained_tokenizer"])
    x, _ = other.train_dataloader().dataset[0]  # type: ignore[index]
    assert tokenizer.decode(x.tolist()) in book.read_text()


def test_a_tokenizer_of_plain_text_is_not_that_of_the_same_files_as_records(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tokens are cached, so that all machines have the same vocabulary."""
    pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"word {n}", "url": f"https://site/{n}"}) + "\n" for n in range(200))
    sources = [DataSource(path=str(tmp_path / "a.json.gz"))]

    def trained() -> str:
        return corpus_module.trained_tokenizer(sources, "bpe:280", val_fraction=0.1, cache_dir=cache)

    with monkeypatch.context() as patched:
        patched.setattr(documents, "_kind", lambda path: None)
        of_text = trained()
    assert trained() != of_text


def test_the_tokenizer_of_the_same_cache_makes_no_second_entry(trained: TextData, book: Path, cache: Path) -> None:
    again = TextData(source=str(book), cache_dir=cache, tokenizer="bpe:280")
    again.load_state_dict(trained.state_dict())
    assert again.corpora == trained.corpora
    assert len(list(cache.glob("*/tokens.bin"))) == 1


def test_checkpoints_name_a_tokenizer_of_the_users_own(trained: TextData, book: Path, cache: Path) -> None:
    path = trained.corpora[0].train.path.with_name("tokenizer.json")
    own = TextData(source=str(book), cache_dir=cache, tokenizer=str(path))
    assert own.state_dict() == {"tokenizer_origin": str(path)}
    ended = TextData(source=str(book), cache_dir=cache, tokenizer="bytes", end_of_document=0)
    assert ended.state_dict() == {"end_of_text": 0}
    own.load_state_dict({"trained_tokenizer": "ignored"})
    assert own.vocab_size == trained.vocab_size
    next(entry for entry in cache.glob("*/tokenizer.json") if not entry.with_name("tokens.bin").exists()).unlink()
    with pytest.raises(ConfigurationError, match=r"tokenizer.json is damaged .*; delete its folder"):
        TextData(source=str(book), cache_dir=cache, tokenizer="bpe:280").state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stock_lightning_resumes_with_the_tokenizer(trained: TextData, book: Path, tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(Counter(), trained)
    trainer = small_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(Counter(), trained)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    book.write_text("quite another text, with other words in it\n" * 300)
    options = {"tokenizer": "bpe:280", "context_length": 16, "global_batch_size": 4}
    other = TextData(source=str(book), cache_dir=tmp_path / "other", **options)
    trainer = small_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.strategy.resume_overrides = True  # type: ignore[attr-defined]
    trainer.fit(Counter(), other, ckpt_path=tmp_path / "one.ckpt")
    assert other.state_dict() == trained.state_dict()


def test_text_for_less_than_a_step_is_told_with_the_keys_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 700)
    data = TextData(
        source=str(tmp_path / "a.txt"), context_length=16, val_samples=4, global_batch_size=64, cache_dir=tmp_path
    )
    data.prepare_data()
    data.setup()
    with pytest.raises(
        ConfigurationError, match=r"^global_batch_size=64 is more than the \d+ samples for training: lower it"
    ):
        data.train_dataloader()
