"""Files that are no files, that never end, or that unpack to more than the memory holds: refused in one sentence before
they are read, by every reader."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_lightning import files
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.files import load_plain, write_file
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.cli.ckpt import main
from moe_lightning.cli.resume import config_of
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.data.chat_formats import hugging_face_tokenizer
from moe_lightning.data.documents import text_chunks
from moe_lightning.data.images import ImageFiles
from moe_lightning.data.instructions import InstructionData
from moe_lightning.data.text import TextData
from moe_lightning.data.tokenizer import tokenizer_from, train_tokenizer
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.models.huggingface.loading import read_config
from moe_lightning.moe import forced_routing
from moe_lightning.moe.forced_routing import read_loads, read_routing_trace
from moe_lightning.simulate.failures import read_trace
from moe_lightning.simulate.hardware import load_hardware
from moe_lightning.strategies.placed_experts import _read_table
from tests.unit.checkpoint_state import two_checkpoints

TIB = 1 << 40


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A reader that blocks or never ends is interrupted."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError("the reader did not end within 60 s")

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, TIB)


HOSTILE = pytest.mark.parametrize("make", [pipe, endless, sparse])


# ---------------------------------------------------------------------- tokenizers


CUT = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
OF_NOTHING = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
OF_MORE = {"decoder": {"type": "Strip", "content": "h", "start": 1, "stop": 1}}


@pytest.mark.parametrize(
    ("written", "use", "message"),
    [
        (CUT, id, "it is not a tokenizer.json"),
        (OF_NOTHING, lambda tokenizer: tokenizer.encode("h"), "the tokenizer refuses it"),
        (OF_NOTHING, lambda tokenizer: [*tokenizer.encode_chunks([b"h"])], "the tokenizer fails"),
        (OF_MORE, lambda tokenizer: tokenizer.decode(tokenizer.encode("h")[0]), "the tokenizer fails"),
    ],
)
def test_a_tokenizer_whose_code_panics(written: dict[str, Any], use: Callable[[Any], object], message: str) -> None:
    """A panic of Rust is no Exception."""
    pytest.importorskip("tokenizers")
    content = json.loads(train_tokenizer("bpe:300", [b"hello"])) | written
    with pytest.raises(ValueError, match=message):
        use(tokenizer_from(json.dumps(content), "it"))


def test_a_folder_of_such_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    content = json.loads(train_tokenizer("bpe:300", [b"hello"])) | CUT
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"the tokenizer in .* cannot be read: Precompiled"):
        hugging_face_tokenizer(tmp_path, for_text=True)


# ---------------------------------------------------------------------- checkpoint directories


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with two_checkpoints(tmp_path) as root:
        yield root


@HOSTILE
@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_manifests(
    root: Path, make: Callable[[Path], None], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = root / "step-00000002" / MANIFEST
    manifest.unlink()
    make(manifest)
    target = [str(tmp_path / "model.safetensors")] if command == "export" else []
    assert main([command, str(manifest.parent), *target]) == 1
    output = capsys.readouterr()
    found, *ending = (output.out + output.err).splitlines()
    assert f"{manifest} cannot be read (" in found
    assert len(ending) == (command == "verify")
    assert (ending or [found])[0].endswith("name another checkpoint")
    assert [found.name for found, _ in checkpoints(root)] == ["step-00000001"]


@HOSTILE
def test_a_resume_goes_on_from_the_checkpoint_before(root: Path, make: Callable[[Path], None]) -> None:
    manifest = root / "step-00000002" / MANIFEST
    manifest.unlink()
    make(manifest)
    found = find_newest(root)
    assert found.checkpoint.step == 1
    assert len(found.problems) == 1
    assert str(manifest) in found.problems[0]
    newest = RunDirectory(root.parent).newest_checkpoint()
    assert newest.step == 2, "its file is named, it is not passed over as if it were none"


@HOSTILE
def test_data_files_of_a_checkpoint(
    root: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = next((root / "step-00000002").glob("dense*"))
    victim.unlink()
    make(victim)
    assert main(["verify", str(root / "step-00000002")]) == 1
    assert str(victim) in capsys.readouterr().out


@HOSTILE
def test_records_beside_a_checkpoint(root: Path, make: Callable[[Path], None]) -> None:
    record = root / "run.json"
    record.unlink()
    make(record)
    config = root.parent / "config.yaml"
    make(config)
    assert find_newest(root).checkpoint is not None
    if config.is_file():
        with pytest.raises(ConfigurationError, match=r"config.yaml cannot be read"):
            config_of(root / "step-00000002")


# ---------------------------------------------------------------------- checkpoint files


def compressed(data: bytes) -> bytes:
    """An archive with its records compressed, as torch writes none."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    return packed.getvalue()


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def checkpoint_of(weight: torch.Tensor) -> dict[str, Any]:
    return {"state_dict": {"w": weight}, "pytorch-lightning_version": "2", "global_step": 1, "optimizer_states": []}


def outcome(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    target = [str(path.with_name("model.safetensors"))] if command == "export" else []
    code = main([command, str(path), *target])
    output = capsys.readouterr()
    return code, (output.out + output.err).strip()


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_compressed_record(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-0000001.ckpt"
    path.write_bytes(compressed(saved(checkpoint_of(torch.zeros(1 << 22)))))
    assert path.stat().st_size < 1 << 20
    code, sentence = outcome(command, path, capsys)
    assert code == 1
    assert "is compressed, and is not read" in sentence
    with pytest.raises(CheckpointError, match="trainer in X is not a checkpoint of torch: its record"):
        load_plain(path.read_bytes(), "trainer in X")


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_an_expanded_tensor(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-0000001.ckpt"
    write_file(checkpoint_of(torch.zeros(1).expand(1 << 40)), path)
    code, sentence = outcome(command, path, capsys)
    assert code == 1
    assert f"expanded tensors in it stand for {1 << 42}" in sentence


def test_a_small_expanded_tensor_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-0000001.ckpt"
    write_file(checkpoint_of(torch.zeros(1).expand(1000)), path)
    assert outcome("export", path, capsys)[0] == 0


@pytest.mark.parametrize("weight", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_tensors_that_no_file_of_safetensors_holds(
    tmp_path: Path, weight: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step-0000001.ckpt"
    write_file(checkpoint_of(weight), path)
    assert outcome("inspect", path, capsys)[0] == 0
    assert "w is sparse or has no values" in outcome("export", path, capsys)[1]


def test_values_that_refer_to_themselves_many_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten references each, forty levels deep: a walk that follows all of them never ends."""
    nested: list[Any] = [torch.zeros(1)]
    for _ in range(40):
        nested = [nested] * 10
    path = tmp_path / "step-0000001.ckpt"
    write_file({**checkpoint_of(torch.zeros(1)), "optimizer_states": nested}, path)
    assert outcome("inspect", path, capsys)[0] == 0


def test_records_that_overlap() -> None:
    data = bytearray(saved(torch.zeros(1000)))
    with zipfile.ZipFile(io.BytesIO(data)) as plain:
        first = plain.infolist()[0]
    size = first.file_size.to_bytes(4, "little")
    at = data.index(b"PK\x01\x02") + 20
    assert bytes(data[at + 4 : at + 8]) == size
    data[at : at + 8] = (1 << 30).to_bytes(4, "little") * 2
    with pytest.raises(CheckpointError, match="hold records of 10737"):
        load_plain(bytes(data), "it")


# ---------------------------------------------------------------------- traces and tables


def test_a_trace_that_unpacks_to_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, counts=np.ones((1000, 2, 2, 100), dtype=np.int64), iteration=np.arange(1000))
    read_routing_trace(path)
    monkeypatch.setattr(forced_routing, "MOST_BYTES", 1 << 20)
    with pytest.raises(ConfigurationError, match=r"it unpacks to 3,208,\d+ bytes, and at most 1,048,576 are read"):
        read_routing_trace(path)


READERS: dict[str, Callable[[Path], object]] = {
    "trace.npz": read_routing_trace,
    "expert_load.csv": read_loads,
    "failures.csv": read_trace,
    "hardware.json": lambda path: load_hardware(path, 1),
    "placement.json": lambda path: _read_table(path),
    "placement.npy": lambda path: _read_table(path),
    "config.json": lambda path: read_config(path.parent, ("gpt2",)),
    "tokens.npy": lambda path: TextData(source=str(path), cache_dir=path.parent / "cache").prepare_data(),
    "tokens.bin": lambda path: TextData(
        source=str(path), dtype="uint16", cache_dir=path.parent / "cache"
    ).prepare_data(),
    "text.txt": lambda path: TextData(source=str(path), cache_dir=path.parent / "cache").prepare_data(),
    "chat.jsonl": lambda path: InstructionData(path=path).prepare_data(),
    "tokenizer.json": lambda path: TextData(tokenizer=str(path), cache_dir=path.parent / "cache").prepare_data(),
    "image.png": lambda path: ImageFiles(
        root=path.parent, paths=np.array([b"image.png"]), classes=np.zeros(1, dtype=np.int64)
    ).open(0),
}


@HOSTILE
@pytest.mark.parametrize("name", READERS)
def test_traces_tables_and_data(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(ConfigurationError) as raised:
        READERS[name](path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_table_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "placement.npy"
    np.save(path, np.zeros((2, 2, 2), dtype=np.int64))
    path.write_bytes(path.read_bytes().replace(b"(2, 2, 2)", b"(9999999999999, 2, 2)"))
    with pytest.raises(ConfigurationError, match=r"placement.npy is not a \.json or \.npy table"):
        _read_table(path)
    assert _read_table(uniform_placement(2, 2, 1).replicas)[1] == "placement"


def test_a_large_file_that_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * (3 << 20))
    files.check_written(path)
    os.truncate(path, 7 << 20)
    with pytest.raises(OSError, match="only 3,145,728 of its 7,340,032 bytes were ever written"):
        files.check_written(path)


def test_a_line_of_any_length_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lightning.data.documents._CHUNK_BYTES", 10)
    path = tmp_path / "line.txt"
    path.write_text("ü€😀" * 100)
    with path.open("rb") as file:
        pieces = list(text_chunks(file, path))
    assert b"".join(pieces) == path.read_bytes()
    assert max(map(len, pieces)) < 30
