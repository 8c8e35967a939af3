"""Weights in safetensors as Hugging Face writes them: reading, writing, dequantization, layouts of experts.

Reads are by tensor or expert, writes by file. Weights in few bits, MXFP4 experts (GPT-OSS) and FP8 matrices
(DeepSeek-V3), are dequantized as they are read. Our layout is `w_up` [D, F] or, gated, gate | up [D, 2F], `w_down`
[F, D], `b_up`, `b_down`. Every conversion moves values without computing on them, so a round trip is bit-equal.

Shapes: E experts, D model width, F expert width.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import read_text, replace_text, save_safetensors
from moe_lightning.hub import INDEX, SINGLE, is_indexed

FP8_SCALE = "_scale_inv"
"""What the name of an FP8 matrix's scales ends with, after its own name."""

MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""What the two parts of an MXFP4 tensor are called after its own name."""

_FP8_BLOCK = 128
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def from_fp8(weight_RC: Tensor, scale: Tensor) -> Tensor:
    """Each block of 128 x 128 values times its scale, in float32 (DeepSeek-V3, section 3.3).

    Args:
        weight_RC: float8 [R, C].
        scale: [ceil(R / 128), ceil(C / 128)].

    Raises:
        CheckpointError: scales of another shape.
    """
    rows, columns = weight_RC.shape
    if scale.shape != (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK)):
        raise CheckpointError(
            f"FP8 scales of shape {list(scale.shape)} do not fit {rows} x {columns} values in blocks of {_FP8_BLOCK}"
        )
    scale = scale.float().repeat_interleave(_FP8_BLOCK, 0)[:rows].repeat_interleave(_FP8_BLOCK, 1)[:, :columns]
    return weight_RC.float() * scale


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Two 4-bit floats a byte, low nibble first, times a power of two for each 32 of them (OCP microscaling, 5.3), in
    bfloat16, which holds every such product.

    Args:
        blocks: uint8 [..., F, G, 16]: F outputs of G * 32 inputs each.
        scales: uint8 [..., F, G], exponents biased by 127.

    Returns:
        [..., G * 32, F]: inputs first, as the unpacked checkpoints have it.

    Raises:
        CheckpointError: parts that do not fit each other.
    """
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise CheckpointError(
            f"MXFP4 blocks of shape {list(blocks.shape)} do not fit scales of shape {list(scales.shape)}"
        )
    values = torch.tensor([*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)], dtype=torch.bfloat16)
    nibbles = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _EXPONENT_BIAS
    return torch.ldexp(values[nibbles.long()], exponents).to(torch.bfloat16).flatten(-2).transpose(-1, -2)


class WeightsFolder:
    """The tensors of a checkpoint by name; nothing is read but what is asked for.

    Args:
        path: folder with model.safetensors, or else with model.safetensors.index.json and the files that it lists.

    Attributes:
        optional_prefix: names are also looked up without it: the head's checkpoints have it, the bare model's do not.
        on_disk: pairs (part of a tensor's name in the model, its replacement on disk), applied in order: names are of
            the model, and are also looked up as they are, which `save_pretrained(save_original_format=False)` writes.

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
        self.on_disk: tuple[tuple[str, str], ...] = ()
        self._open: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without open files, which can be neither copied nor sent."""
        return {**self.__dict__, "_open": {}}

    @cached_property
    def files(self) -> dict[str, str]:
        """The file of each tensor."""
        if not is_indexed(self.path):
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        try:
            listed = json.loads(read_text(self.path / INDEX))["weight_map"]
            files = {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path / INDEX} is damaged: it has no readable weight_map; get the folder again"
            ) from error
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (self.path / file).is_file():
                raise CheckpointError(f"{self.path / INDEX} lists {file!r}, which is not in the folder: get it again")
        return files

    def parts(self, name: str) -> tuple[str, ...]:
        """The tensors on disk that make up a tensor: itself, or its values and scales where it is quantized; none where
        it is not there.
        """
        full = (self._on_disk(name), name)
        for known in dict.fromkeys((*full, *(each.removeprefix(self.optional_prefix) for each in full))):
            for ends in (("", FP8_SCALE), ("",), (MXFP4_BLOCKS, MXFP4_SCALES)):
                if all(f"{known}{end}" in self.files for end in ends):
                    return tuple(f"{known}{end}" for end in ends)
        return ()

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of a stack, in the dtype on disk or dequantized; only these bytes are read.

        Raises:
            CheckpointError: there is no such tensor or row, its values are quantized and have no scales that are known,
                or the file is damaged.
        """
        parts = self.parts(name)
        if not parts:
            raise CheckpointError(
                f"{self.path} has no tensor {self._on_disk(name)!r}: it is incomplete, or of another architecture"
            )
        values = [self._read(part, row) for part in parts]
        if len(parts) == 1:
            if values[0].element_size() == 1:
                raise CheckpointError(
                    f"{parts[0]!r} of {self.path} has {str(values[0].dtype).removeprefix('torch.')} values without "
                    f"{parts[0] + FP8_SCALE!r}, its scales: give the checkpoint that it was quantized from"
                )
            return values[0]
        return from_mxfp4(*values) if parts[0].endswith(MXFP4_BLOCKS) else from_fp8(*values)

    def _on_disk(self, name: str) -> str:
        for in_model, on_disk in self.on_disk:
            name = name.replace(in_model, on_disk)
        return name

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
                raise CheckpointError(
                    f"{self.path / name} is damaged or unreadable: {error}; get the folder again"
                ) from error
        return self._open[name]


def write_weights(path: Path, files: Iterable[Mapping[str, Tensor]]) -> int:
    """Write a folder that Hugging Face loads, one safetensors file for each mapping; returns the bytes of the tensors.

    Only one mapping is held at a time. Files get their names when all are written, the index last.

    Args:
        path: an existing folder without weights.
    """
    staged, where, total = [], dict[str, int](), 0
    for number, tensors in enumerate(files):
        staged.append(path / f"{number}.new")
        dense = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_safetensors(dense, staged[-1], {"format": "pt"})
        where |= dict.fromkeys(tensors, number)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    names = [f"model-{number + 1:05d}-of-{len(staged):05d}.safetensors" for number in range(len(staged))]
    for source, name in zip(staged, names, strict=True):
        os.replace(source, path / name)
    weight_map = {name: names[number] for name, number in sorted(where.items())}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    replace_text(path / INDEX, json.dumps(index, indent=2) + "\n")
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


@dataclass(frozen=True, kw_only=True)
class PeftTargets:
    """Names by which peft's configuration of adapters knows the experts.

    Attributes:
        modules: linear layers.
        parameters: stacks of matrices.
        in_halves: the stacks whose two halves have a pair of A and B each, which together have twice the rank.
    """

    modules: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    in_halves: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class SeparateExperts:
    """A matrix a tensor, [out, in], as nn.Linear has it. The stacks of these matrices that models of transformers 5
    have are read as well, and never written.

    Attributes:
        gate, up, down: names of the three matrices.
        peft_stacks: peft replaces these names in its configuration by those of the stacks, which else stand there.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    peft_stacks: bool = True

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        """The rows of one expert by the names of our parameters; `prefix` is the name of its block in the model with a
        dot at its end.
        """
        stacks = self._stacks(prefix)
        if all(map(weights.parts, stacks)):
            up_HD, down_DF = (weights.read(name, expert) for name in stacks)
            return {"w_up": up_HD.T, "w_down": down_DF.T}
        gate_FD, up_FD, down_DF = (weights.read(name) for name in self._of_expert(prefix, expert))
        return {"w_up": torch.cat([gate_FD, up_FD]).T, "w_down": down_DF.T}

    def write(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all experts, from our stacks [E, ...]."""
        tensors: dict[str, Tensor] = {}
        for expert, (up_DH, down_FD) in enumerate(zip(stacks_EX["w_up"], stacks_EX["w_down"], strict=True)):
            matrices = (*up_DH.T.chunk(2), down_FD.T)
            # Copies: the halves of one matrix would share memory, which safetensors refuses.
            tensors |= {
                name: matrix.clone(memory_format=torch.contiguous_format)
                for name, matrix in zip(self._of_expert(prefix, expert), matrices, strict=True)
            }
        return tensors

    def names(self, prefix: str, num_experts: int) -> set[str]:
        """Return the names of these tensors."""
        separate = (name for expert in range(num_experts) for name in self._of_expert(prefix, expert))
        return {*separate, *self._stacks(prefix)}

    def adapters(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One pair of matrices for each matrix, which vLLM reads; peft stacks them again. The two that we multiply as
        one share their A.
        """
        a_up, b_up, a_down, b_down = (
            stacks_EX[f"lora_{name}_{part}"].transpose(1, 2) for name in ("w_up", "w_down") for part in "ab"
        )
        tensors: dict[str, Tensor] = {}
        for expert in range(len(a_up)):
            pairs = (*((a_up[expert], b_FR) for b_FR in b_up[expert].chunk(2)), (a_down[expert], b_down[expert]))
            for name, pair in zip(self._of_expert(prefix, expert), pairs, strict=True):
                layer = name.removesuffix(".weight")
                for part, matrix in zip("AB", pair, strict=True):
                    tensors[f"{layer}.lora_{part}.weight"] = matrix.clone(memory_format=torch.contiguous_format)
        return tensors

    @property
    def targets(self) -> PeftTargets:
        """Names of the experts in peft's configuration of adapters."""
        if self.peft_stacks:
            return PeftTargets(modules=frozenset({self.gate, self.up, self.down}))
        return PeftTargets(parameters=_PEFT_STACKS, in_halves=frozenset({_STACKED["w_up"]}))

    def _stacks(self, prefix: str) -> tuple[str, str]:
        return f"{prefix}experts.{_STACKED['w_up']}", f"{prefix}experts.{_STACKED['w_down']}"

    def _of_expert(self, prefix: str, expert: int) -> tuple[str, str, str]:
        stem = f"{prefix}experts.{expert}."
        return f"{stem}{self.gate}.weight", f"{stem}{self.up}.weight", f"{stem}{self.down}.weight"


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """All experts of a block in one tensor, as models of transformers 5 have them.

    Attributes:
        is_transposed: matrices are [out, in], as nn.Linear has them, not [in, out].
        is_interleaved: gate and up are in alternate columns, not in halves.
        has_biases: there are biases.
        peft_swaps: peft takes the inputs of a matrix for its outputs, because the model does not say which come first.
    """

    is_transposed: bool = False
    is_interleaved: bool = False
    has_biases: bool = False
    peft_swaps: bool = False

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        return self._turned({ours: weights.read(name, expert) for ours, name in self._names(prefix).items()}, _apart)

    def write(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names, stacks = self._names(prefix), self._turned(stacks_EX, _alternate)
        return {name: stacks[ours] for ours, name in names.items()}

    def names(self, prefix: str, num_experts: int) -> set[str]:
        return set(self._names(prefix).values())

    def adapters(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The products of all experts in one pair of matrices, which peft reads: A has a row for each (expert, rank),
        B a column for each (rank, expert). The stack that comes second in the model wraps the first one.
        """
        b_up = stacks_EX["lora_w_up_b"]
        stacks = dict(stacks_EX) | {"lora_w_up_b": _alternate(b_up) if self.is_interleaved else b_up}
        tensors: dict[str, Tensor] = {}
        for ours, place in (("w_up", ".base_layer"), ("w_down", "")):
            a_EDR, b_ERF = stacks[f"lora_{ours}_a"], stacks[f"lora_{ours}_b"]
            if self.peft_swaps:
                a_EDR, b_ERF = b_ERF.transpose(1, 2), a_EDR.transpose(1, 2)
            tensors[f"{prefix}experts{place}.lora_A.weight"] = a_EDR.transpose(1, 2).flatten(0, 1)
            tensors[f"{prefix}experts{place}.lora_B.weight"] = b_ERF.permute(2, 1, 0).flatten(1)
        return tensors

    @property
    def targets(self) -> PeftTargets:
        return PeftTargets(parameters=_PEFT_STACKS)

    def _names(self, prefix: str) -> dict[str, str]:
        return {o: f"{prefix}experts.{name}" for o, name in _STACKED.items() if self.has_biases or o.startswith("w_")}

    def _turned(self, tensors: Mapping[str, Tensor], turn: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Tensors in the other layout, ours or that on disk."""
        turned = dict(tensors)
        if self.is_interleaved:
            turned |= {name: turn(turned[name]) for name in turned if name.endswith("_up")}
        if self.is_transposed:
            turned |= {name: turned[name].transpose(-1, -2) for name in turned if name.startswith("w_")}
        return turned


_STACKED = {"w_up": "gate_up_proj", "b_up": "gate_up_proj_bias", "w_down": "down_proj", "b_down": "down_proj_bias"}
_PEFT_STACKS = frozenset(f"experts.{_STACKED[name]}" for name in ("w_up", "w_down"))


def _apart(columns: Tensor) -> Tensor:
    """gate, up, gate, up, ... in the last dimension -> gate | up."""
    return torch.cat([columns[..., 0::2], columns[..., 1::2]], dim=-1)


def _alternate(halves: Tensor) -> Tensor:
    """gate | up -> gate, up, gate, up, ..."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class DenseFeedForward:
    """One dense feed-forward layer, which every expert copies.

    Attributes:
        up: names of its first layer, or of those of gate and up.
        down: name of its last layer.
        has_biases: its layers have biases; not of gated ones.
        is_transposed: matrices are [out, in], as nn.Linear has them, not [in, out].
    """

    up: tuple[str, ...]
    down: str
    has_biases: bool = False
    is_transposed: bool = True

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        *up, down = (weights.read(f"{prefix}{layer}.weight") for layer in (*self.up, self.down))
        if self.is_transposed:
            rows = {"w_up": torch.cat(up).T, "w_down": down.T}
        else:
            rows = {"w_up": torch.cat(up, dim=1), "w_down": down}
        if self.has_biases:
            b_up, b_down = (weights.read(f"{prefix}{layer}.bias") for layer in (*self.up, self.down))
            rows |= {"b_up": b_up, "b_down": b_down}
        return rows

    def names(self, prefix: str, num_experts: int) -> set[str]:
        kinds = ("weight", "bias") if self.has_biases else ("weight",)
        return {f"{prefix}{layer}.{kind}" for layer in (*self.up, self.down) for kind in kinds}


ExpertLayout = SeparateExperts | StackedExperts
"""The tensors of one block's experts on disk."""

ExpertReader = ExpertLayout | DenseFeedForward
"""Reader of the experts' first weights."""
