"""moe-eval: the loss of windows and texts, as the model's own forward pass has it; mistakes."""

from __future__ import annotations

import codecs
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_lightning.cli.evaluate import main
from tests.huggingface_models import make_checkpoint
from tests.unit.test_generate import gpt, save, trained_run, write_tokenizer

TEXT = "".join(f"{n} {n * n}\n" for n in range(40))
BYTES = {"tokenizer": "bytes"}


def measured(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@torch.no_grad()
def total(logits_of: Any, ids: list[int]) -> float:
    tokens = torch.tensor(ids)
    return float(F.cross_entropy(logits_of(tokens[None, :-1])[0], tokens[1:], reduction="sum"))


def test_windows_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in training: the end that fills no window is left out, unless there is nothing else."""
    folder, file = trained_run(tmp_path / "run", BYTES), tmp_path / "text"
    ids, model = list(TEXT.encode()), gpt().model
    for length, count in ((24, len(ids)), (7, len(ids)), (24, 20)):
        file.write_bytes(bytes(ids[:count]))
        starts = range(0, max(1, (count - 1) // length * length), length)
        expected = [total(model, ids[start : min(count, start + length + 1)]) for start in starts]
        tokens = min(count - 1, len(expected) * length)
        found = measured(capsys, folder, file, "--context-length", length)
        assert found["tokens"] == tokens
        assert found["loss"] == pytest.approx(sum(expected) / tokens, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2)), "a token is a byte"
    assert main([str(folder), str(file)]) == 0
    out = capsys.readouterr().out
    assert "tokens  loss (nats)  perplexity  bits per byte" in out
    assert f"{found['loss']:.4f}" in out


def test_windows_have_the_length_of_the_samples_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not that of the model, which may be longer."""
    (tmp_path / "text").write_text(TEXT)
    folder = trained_run(tmp_path / "run", {**BYTES, "context_length": 7})
    found = measured(capsys, folder, tmp_path / "text")
    assert found == measured(capsys, folder, tmp_path / "text", "--context-length", 7)
    assert found != measured(capsys, folder, tmp_path / "text", "--context-length", 24)


def test_lines_of_ndjson_are_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained_run(tmp_path / "run", BYTES)
    for name in ("texts.ndjson", "TEXTS.JSONL"):
        (tmp_path / name).write_text('{"text": "1234"}\n')
        assert measured(capsys, folder, tmp_path / name)["tokens"] == 3


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_texts_of_a_file_do_not_see_each_other(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor the padding of a batch."""
    theirs = make_checkpoint(name, tmp_path / "model")
    texts = ["1", "12 34 56", "7 + 8 = 15", "0" * 100]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    pieces = [text.encode()[start : start + 33] for text in texts for start in range(0, len(text), 32)]
    expected = sum(total(lambda ids: theirs(ids).logits, list(p)) for p in pieces if len(p) > 1)
    arguments = (tmp_path / "model", file, "--tokenizer", "bytes", "--context-length", 32)
    for batch_size in (1, 3):
        found = measured(capsys, *arguments, "--batch-size", batch_size)
        assert found["tokens"] == sum(map(len, texts)) - len(texts)
        assert found["loss"] == pytest.approx(expected / found["tokens"], rel=1e-5)


def test_the_field_is_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained_run(tmp_path / "run", {**BYTES, "text_field": "content"})
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "1", "content": "1234"}\n{"content": "56"}\n')
    assert measured(capsys, folder, file)["tokens"] == 4
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert measured(capsys, folder, file)["tokens"] == 4
    file.write_text('{"text": "1234567", "content": "1234"}\n')
    assert measured(capsys, folder, file, "--text-field", "text")["tokens"] == 6


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("olmoe", tmp_path / "model", vocab_size=300)
    write_tokenizer(tmp_path / "model")
    (tmp_path / "text").write_text("\N{EURO SIGN}" * 30)
    found = measured(capsys, tmp_path / "model", tmp_path / "text", "--context-length", 60)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.parametrize(
    ("name", "content", "arguments", "words"),
    [
        ("missing", None, [], ["'missing' is not a file"]),
        ("empty", b"", [], ["empty has no token to predict", "give more text"]),
        ("one", b"1", [], ["one has no token to predict"]),
        ("latin", b"12\xff", [], ["latin is not UTF-8 text (invalid start byte): convert it\n"]),
        ("texts.json", b'[{"text": "1"}]', [], ["texts.json is named .json, and moe-eval reads UTF-8 text and .jsonl"]),
        ("texts.JSONL.gz", b"\x1f\x8b", [], ["texts.JSONL.gz is named .gz, and moe-eval reads", "unpack it"]),
        ("texts.parquet", b"PAR1", [], ["texts.parquet is named .parquet, and moe-eval reads"]),
        ("tokens.bin", b"11", [], ["tokens.bin is named .bin, and moe-eval reads"]),
        ("letters", b"abc", [], ["letters has the token 99", "--tokenizer"]),
        ("a.jsonl", b'{"text": "1"}\n{"x": 1}', [], ["a.jsonl, line 2, has no text in 'text'", "--text-field"]),
        ("b.jsonl", b"no json", [], ["b.jsonl, line 1, is not JSON"]),
        ("d.jsonl", b"", [], ["d.jsonl is empty"]),
        ("digits", b"123", ["--context-length", "25"], ["--context-length 25", "24 positions"]),
        ("digits", b"123", ["--text-field", "x"], ["--text-field is for JSONL", "digits is read as text"]),
        ("digits", b"123", ["--batch-size", "0"], ["0 must be an integer"]),
    ],
)
def test_mistakes_are_one_sentence(
    name: str, content: bytes | None, arguments: list[str], words: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save(gpt(), tmp_path / "run.ckpt")
    if content is not None:
        Path(name).write_bytes(content)
    assert main(["run.ckpt", name, "--tokenizer", "bytes", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert [word for word in words if word not in captured.err] == [], captured.err


def test_a_file_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json"]) == 2
    assert "give either a FILE or --tasks (moe-eval --help shows the options)" in capsys.readouterr().err
