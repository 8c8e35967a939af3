"""Records of torch's checkpoint planners: they travel whole, and a stranger's are refused."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.distributed.checkpoint import api, filesystem, metadata, planner, storage

from moe_lightning.errors import ConfigurationError, ForeignMessageError
from moe_lightning.parallel.collectives import decode, encode

INDEX = metadata.MetadataIndex("layer.weight", torch.Size([0, 4]), 1)
PROPERTIES = metadata.TensorProperties(dtype=torch.bfloat16, requires_grad=True)
CHUNK = metadata.ChunkStorageMetadata(offsets=torch.Size([0, 4]), sizes=torch.Size([2, 2]))
WRITTEN = planner.WriteItem(
    index=INDEX,
    type=planner.WriteItemType.SHARD,
    tensor_data=planner.TensorWriteData(chunk=CHUNK, properties=PROPERTIES, size=torch.Size([2, 8])),
)
BYTES = planner.WriteItem(metadata.MetadataIndex("step"), planner.WriteItemType.BYTE_IO, planner.BytesIOWriteData(7))
READ = planner.ReadItem(planner.LoadItemType.TENSOR, INDEX, torch.Size([0]), INDEX, torch.Size([1]), torch.Size([2]))
INFO = filesystem._StorageInfo("__0_0.distcp", 0, 96)
RECORDS = {
    "a plan to save": planner.SavePlan(
        [WRITTEN, BYTES], filesystem._StoragePrefix("__0_"), {"layer.weight": ("layer", 0)}, False
    ),
    "a plan to load": planner.LoadPlan([READ]),
    "what was written": [storage.WriteResult(INDEX, 96, INFO)],
    "metadata": metadata.Metadata(
        {
            "layer.weight": metadata.TensorStorageMetadata(PROPERTIES, torch.Size([2, 8]), [CHUNK]),
            "step": metadata.BytesStorageMetadata(),
        },
        storage_data={INDEX: INFO},
        storage_meta=metadata.StorageMeta("folder", "one"),
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back_as_it_was(name: str) -> None:
    assert repr(decode(encode(RECORDS[name]))) == repr(RECORDS[name])


def test_a_ranks_failure_arrives_in_words() -> None:
    try:
        Path("/nowhere/at/all").read_text()
    except OSError as error:
        failure = api._wrap_exception(error)
    told = decode(encode(api.CheckpointException("write", {1: failure})))
    assert isinstance(told, api.CheckpointException)
    assert "(RANK 1)" in str(told)
    assert "RuntimeError: FileNotFoundError: [Errno 2]" in str(told)
    assert "read_text()" in str(told)
    assert api._is_wrapped_exception(decode(encode(failure)))


class Plan(planner.SavePlan):
    pass


@pytest.mark.parametrize(
    "value", [Plan([]), OSError("alone"), (OSError("x"), []), filesystem.SerializationFormat.TORCH_SAVE]
)
def test_nothing_else_of_the_kind_travels(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be sent to other ranks"):
        encode(value)


def forged(content: Any, tag: str = "record") -> bytes:
    header = json.dumps({tag: content}).encode()
    return len(header).to_bytes(8, "little") + header + save({})


FORGED: dict[str, list[Any]] = {
    "another class": ["DefaultSavePlanner"],
    "a function": ["_wrap_exception", "x"],
    "a builtin": ["eval", "1"],
    "no name": [["SavePlan"]],
    "nothing at all": [],
    "too few fields": ["SavePlan", []],
    "too many fields": ["BytesStorageMetadata", 1],
    "items of another type": ["LoadPlan", ["x"], None, None],
    "text for a number": ["BytesIOWriteData", "7"],
    "true for a number": ["BytesIOWriteData", True],
    "a list for a size": ["ChunkStorageMetadata", [0], [1]],
    "an unknown member": ["WriteItemType", "EVAL"],
    "a private member": ["WriteItemType", "__class__"],
    "a path that leads up": ["_StorageInfo", "../../.profile", 0, 1, None],
    "an absolute path": ["_StoragePrefix", "/etc/cron.d/x"],
    "failures of nobody": ["CheckpointException", "write", {"dict": [0, 1]}],
    "no failures": ["CheckpointException", "write", 1],
}


@pytest.mark.parametrize("name", FORGED)
def test_a_strangers_record_is_refused(name: str) -> None:
    with pytest.raises(ForeignMessageError, match="is not one of moe-lightning's"):
        decode(forged(FORGED[name]))


@pytest.mark.parametrize("frame", [["file", 1, "f"], ["/dev/zero", 1, "f", None]])
def test_a_strangers_stack_is_refused(frame: list[Any]) -> None:
    with pytest.raises(ForeignMessageError, match="a stack in it is none"):
        decode(forged(["words", [frame]], "failure"))


def test_a_stack_is_read_without_its_files() -> None:
    _, stack = decode(forged(["words", [["/nowhere", 1, "f", "raise"]]], "failure"))
    assert isinstance(stack, traceback.StackSummary)
    assert stack[0].line == "raise"
