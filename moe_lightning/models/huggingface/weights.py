"""Weights in a folder of safetensors files as Hugging Face writes them: read by the tensor, written by the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import read_text
from moe_lightning.models.huggingface.quantised import FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES, from_fp8, from_mxfp4

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NEW = ".new"


class WeightsFolder:
    """The tensors of a checkpoint by name; nothing is read but what is asked for.

    Args:
        path: folder with model.safetensors, or with model.safetensors.index.json and the files that it lists.

    Attributes:
        optional_prefix: names are also looked up without it: the head's checkpoints have it, the bare model's do not.

    Raises:
        ConfigurationError: no such folder, or no safetensors in it.
        CheckpointError: an index that cannot be read or that lists a missing file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ConfigurationError(f"{path} is not a folder: give one with config.json and safetensors files")
        if not (path / INDEX).is_file() and not (path / SINGLE).is_file():
            raise ConfigurationError(
                f"{path} holds neither {SINGLE} nor {INDEX}: save the model with save_pretrained, which writes them"
            )
        self.optional_prefix = ""
        self._open: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without open files, which can be neither copied nor sent."""
        return {**self.__dict__, "_open": {}}

    @cached_property
    def files(self) -> dict[str, str]:
        """The file of each tensor."""
        if not (self.path / INDEX).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        try:
            listed = json.loads(read_text(self.path / INDEX))["weight_map"]
            files = {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
            raise CheckpointError(f"{self.path / INDEX} is damaged: it has no readable weight_map") from error
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (self.path / file).is_file():
                raise CheckpointError(f"{self.path / INDEX} lists {file!r}, which is not in the folder")
        return files

    def parts(self, name: str) -> tuple[str, ...]:
        """The tensors on disk that make up a tensor: itself, or its values and scales where it is quantised; none where
        it is not there.
        """
        for known in dict.fromkeys((name, name.removeprefix(self.optional_prefix))):
            for ends in (("", FP8_SCALE), ("",), (MXFP4_BLOCKS, MXFP4_SCALES)):
                if all(f"{known}{end}" in self.files for end in ends):
                    return tuple(f"{known}{end}" for end in ends)
        return ()

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of a stack, in the dtype on disk or dequantised; only these bytes are read.

        Raises:
            CheckpointError: there is no such tensor or row, or the file is damaged.
        """
        parts = self.parts(name)
        if not parts:
            raise CheckpointError(f"{self.path} has no tensor {name!r}: it is incomplete, or of another architecture")
        values = [self._read(part, row) for part in parts]
        if len(parts) == 1:
            return values[0]
        return from_mxfp4(*values) if parts[0].endswith(MXFP4_BLOCKS) else from_fp8(*values)

    def _read(self, name: str, row: int | None) -> Tensor:
        file = self._file(self.files[name])
        try:
            tensor: Tensor = file.get_tensor(name) if row is None else file.get_slice(name)[row]
        except (SafetensorError, IndexError) as error:
            raise CheckpointError(f"{name!r} cannot be read from {self.path}: {error}") from error
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / name} is damaged or unreadable: {error}") from error
        return self._open[name]


def write_weights(path: Path, files: Iterable[Mapping[str, Tensor]]) -> int:
    """Write a folder that Hugging Face loads, one safetensors file for each mapping; returns the bytes of the tensors.

    Only one mapping is held at a time. Files get their names when all are written, the index last.

    Args:
        path: an existing folder without weights.
    """
    staged, where, total = [], dict[str, int](), 0
    for number, tensors in enumerate(files):
        staged.append(path / f"{number}{_NEW}")
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, staged[-1], {"format": "pt"})
        where |= dict.fromkeys(tensors, number)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    names = [f"model-{number + 1:05d}-of-{len(staged):05d}.safetensors" for number in range(len(staged))]
    for source, name in zip(staged, names, strict=True):
        os.replace(source, path / name)
    weight_map = {name: names[number] for name, number in sorted(where.items())}
    index = path / f"{INDEX}{_NEW}"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    os.replace(index, path / INDEX)
    return total


def dtype_named(name: str) -> torch.dtype:
    """A floating dtype by the name that config.json gives it.

    Raises:
        ConfigurationError: no such dtype, or one that parameters cannot have.
    """
    dtype = getattr(torch, re.sub(r"^torch\.", "", name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ConfigurationError(f"dtype={name!r} is not known: use float32, bfloat16, float16 or float64")
    assert isinstance(dtype, torch.dtype)
    return dtype
