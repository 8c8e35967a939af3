"""The byte format of torch.distributed.checkpoint files, written without serialising tensors through Python.

Stock `dcp.load` reads every tensor with `torch.load` from a slice of a file. Such a slice is a fixed prefix, the raw
bytes and a fixed suffix, which depend on dtype and shape only; they are produced once by torch itself (saving a tensor
whose data are left out) and cached. So raw memory goes to the file as it is, and our own reader finds the raw bytes
again at a known offset, without unpickling.
"""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_lightning.state.pieces import DTYPES, OBJECT, Piece


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What stands before and after a tensor's raw bytes."""

    prefix: bytes
    suffix: bytes


@lru_cache(maxsize=4096)
def frame_of(dtype: str, shape: tuple[int, ...]) -> Frame:
    """The frame of tensors of a dtype and shape; empty for objects, which are stored as they are."""
    if dtype == OBJECT:
        return Frame(prefix=b"", suffix=b"")
    # Memory that nobody touches is not taken, and data that are skipped are a hole of the file. A fake tensor would do
    # as well, but importing torch's compiler for it takes an agent longer than its first checkpoint.
    outline = torch.empty(shape, dtype=DTYPES[dtype])
    with tempfile.TemporaryFile() as file:
        with torch.serialization.skip_data():
            torch.save(outline, file)
        with zipfile.ZipFile(file) as archive:
            (record,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        file.seek(record.header_offset)
        local_header = file.read(30)
        name_length, extra_length = struct.unpack("<HH", local_header[26:30])
        start = record.header_offset + 30 + name_length + extra_length
        file.seek(0)
        prefix = file.read(start)
        file.seek(start + record.file_size)
        return Frame(prefix=prefix, suffix=file.read())


def dump_metadata(stored: Iterable[Piece], paths: dict[str, str]) -> bytes:
    """The `.metadata` file of a checkpoint directory.

    Args:
        stored: every piece of every key once.
        paths: file name -> path relative to the directory.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for piece in stored:
        info = _StorageInfo(paths[piece.at.file], piece.at.offset, piece.at.length)
        if piece.dtype == OBJECT:
            entries[piece.key] = BytesStorageMetadata()
            storage[MetadataIndex(piece.key)] = info
            continue
        if piece.key not in entries:
            properties = TensorProperties(dtype=DTYPES[piece.dtype])
            entries[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.block.whole), [])
        entry = entries[piece.key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.block.offsets), torch.Size(piece.block.sizes)))
        storage[MetadataIndex(piece.key, piece.block.offsets, len(entry.chunks) - 1)] = info
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data={key: (key,) for key in entries},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def dump_object(value: object) -> bytes:
    """An object as stock DCP stores it; our reader loads it with `load_plain`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
