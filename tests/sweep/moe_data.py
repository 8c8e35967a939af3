"""Every option of moe-data, damaged sources of every format, and damaged folders of tokens."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from moe_lightning import user_errors
from moe_lightning.cli import data
from moe_lightning.data.documents import source_files
from moe_lightning.data.token_folder import Recipe, open_token_folder, write_token_folder
from tests.sweep.cases import Case
from tests.sweep.files import common, unwritable
from tests.sweep.values import TEXTS

_TEXTS = [f"{i} words of text" for i in range(400)]
_GOOD = ["--tokenizer=bytes", "--workers=1"]


def tokenizing(folder: Path) -> Iterator[Case]:
    """Damaged sources, places to write, options, and folders of tokens."""
    whole = _contents(folder)
    for suffix, content in whole.items():
        for path in common(folder, suffix, content):
            # Arrow and zstd have no checksums: of what decodes to other text nobody knows.
            sensible = path.name in ("flipped.arrow", "flipped.jsonl.zst", "flipped.parquet", "folder.jsonl")
            yield _case(["tokenize", str(path), *_GOOD], (path.name[:50],), sensible=sensible)
    good = folder / "good.jsonl"
    good.write_bytes(whole[".jsonl"])
    for target in unwritable(folder):
        yield Case(
            label=f"moe-data to {str(target)[-50:]}",
            run=partial(data.main, ["tokenize", str(good), *_GOOD, f"--out={target}"]),
            subjects=(str(target)[:40],),
            sensible=target.parent.name == "no_such_folder",
        )
    for option in ("--tokenizer", "--workers", "--text-field", "--end-of-document", "--val-fraction"):
        for name, text in TEXTS.items():
            subjects = (option, option[2:].replace("-", "_"), text[:9])
            sensible = (option, name) == ("--end-of-document", "0")
            yield _case(["tokenize", str(good), *_GOOD, f"{option}={text}"], subjects, sensible=sensible)
    for path in _damaged_folders(folder, good):
        yield Case(label=f"tokens {path.name}", run=partial(_open, path), subjects=(path.name[:50],))
    for arguments in (
        [],
        ["tokenize"],
        ["tokenize", str(good), "--no-such-option"],
    ):
        yield _case(arguments, (*arguments, "COMMAND", "SOURCE", "DIR"), out=False)


def _open(path: Path) -> int:
    """Read a folder of tokens as training does."""
    try:
        open_token_folder(path).check()
    except Exception as error:
        return user_errors.report("moe-data", error)
    return 0


def _case(arguments: list[str], subjects: tuple[str, ...], *, out: bool = True, sensible: bool = False) -> Case:
    label = " ".join(word if len(word) < 90 else f"{word[:80]}..." for word in arguments)
    more = [f"--out=out/{abs(hash(label))}"] if out else []
    return Case(
        label=f"moe-data {label}", run=partial(data.main, [*arguments, *more]), subjects=subjects, sensible=sensible
    )


def _contents(folder: Path) -> dict[str, bytes]:
    """By suffix, a good file."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in _TEXTS).encode()
    table = pa.table({"text": _TEXTS})
    pq.write_table(table, folder / "good.parquet")
    with pa.OSFile(str(folder / "good.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    with pa.CompressedOutputStream(str(folder / "good.zst"), "zstd") as packed:
        packed.write(lines)
    found = {suffix: (folder / f"good{suffix}").read_bytes() for suffix in (".parquet", ".arrow", ".zst")}
    return {
        ".jsonl": lines,
        ".jsonl.gz": gzip.compress(lines),
        ".jsonl.zst": found[".zst"],
        ".parquet": found[".parquet"],
        ".arrow": found[".arrow"],
    }


def _damaged_folders(folder: Path, source: Path) -> Iterator[Path]:
    """Folders of tokens with one thing wrong."""
    recipe = Recipe(tokenizer=None, text_field="text", end_of_document=None)
    good = write_token_folder(folder / "good_tokens", source_files([str(source)]), recipe).path
    header = json.loads((good / "tokens.json").read_text())
    texts = {
        "empty_header": "",
        "list_header": "[]",
        "deep_header": "[" * 100_000,
        **{f"without_{key}": json.dumps({k: v for k, v in header.items() if k != key}) for key in header},
        **{f"wrong_{key}": json.dumps({**header, key: [1]}) for key in header},
    }
    for name, text in texts.items():
        shutil.copytree(good, folder / name)
        (folder / name / "tokens.json").write_text(text)
        yield folder / name
    for file in ("tokens.bin", "documents.npy"):
        for damage in ("gone", "half", "flipped"):
            path = folder / f"{damage}_{file.partition('.')[0]}"
            shutil.copytree(good, path)
            content = (path / file).read_bytes()
            (path / file).unlink()
            if damage != "gone":
                (path / file).write_bytes(
                    content[: len(content) // 2] + bytes(len(content) // 2 if damage == "flipped" else 0)
                )
            yield path
