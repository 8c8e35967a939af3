"""How the matrices of experts lie in safetensors, and how they become rows of our stacked parameters.

Ours are `w_up` [D, F] or, gated, gate | up [D, 2F], `w_down` [F, D], `b_up`, `b_down`. Every conversion moves values
without computing on them, so a round trip is bit-equal.

Shapes: E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_lightning.models.huggingface.weights import WeightsFolder


class ExpertLayout(Protocol):
    """The tensors of one block's experts on disk; `prefix` is the block's name there with a dot at its end."""

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        """The rows of one expert by the names of our parameters."""
        ...

    def write(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on disk of all experts, from our stacks [E, ...]."""
        ...

    def names(self, prefix: str, num_experts: int) -> set[str]:
        """What these tensors are called."""
        ...

    def columns(self, up_EXH: Tensor) -> Tensor:
        """What has a column for each of ours of `w_up`, in the order of the model's own stack."""
        ...


@dataclass(frozen=True, kw_only=True)
class SeparateExperts:
    """A matrix a tensor, [out, in], as nn.Linear has it: Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V3.

    Attributes:
        gate, up, down: names of the three matrices.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        gate_FD, up_FD, down_DF = (weights.read(name) for name in self._of_expert(prefix, expert))
        return {"w_up": torch.cat([gate_FD, up_FD]).T, "w_down": down_DF.T}

    def write(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
        return {name for expert in range(num_experts) for name in self._of_expert(prefix, expert)}

    def columns(self, up_EXH: Tensor) -> Tensor:
        return up_EXH

    def _of_expert(self, prefix: str, expert: int) -> tuple[str, str, str]:
        stem = f"{prefix}experts.{expert}."
        return f"{stem}{self.gate}.weight", f"{stem}{self.up}.weight", f"{stem}{self.down}.weight"


@dataclass(frozen=True, kw_only=True)
class InterleavedStacks:
    """All experts of a block in one tensor, [E, in, out], with biases, gate and up in alternate columns: GPT-OSS."""

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        rows = {ours: weights.read(f"{prefix}experts.{theirs}", expert) for ours, theirs in _STACKED.items()}
        return rows | {name: _apart(rows[name]) for name in ("w_up", "b_up")}

    def write(self, prefix: str, stacks_EX: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stacks = dict(stacks_EX) | {name: _alternate(stacks_EX[name]) for name in ("w_up", "b_up")}
        return {f"{prefix}experts.{theirs}": stacks[ours] for ours, theirs in _STACKED.items()}

    def names(self, prefix: str, num_experts: int) -> set[str]:
        return {f"{prefix}experts.{theirs}" for theirs in _STACKED.values()}

    def columns(self, up_EXH: Tensor) -> Tensor:
        return _alternate(up_EXH)


_STACKED = {"w_up": "gate_up_proj", "b_up": "gate_up_proj_bias", "w_down": "down_proj", "b_down": "down_proj_bias"}


def _apart(columns: Tensor) -> Tensor:
    """gate, up, gate, up, ... in the last dimension -> gate | up."""
    return torch.cat([columns[..., 0::2], columns[..., 1::2]], dim=-1)


def _alternate(halves: Tensor) -> Tensor:
    """gate | up -> gate, up, gate, up, ..."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class GatedFeedForward:
    """One dense gated feed-forward layer, which every expert copies: LLaMA."""

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        gate_FD, up_FD, down_DF = (weights.read(name) for name in self._of_layer(prefix))
        return {"w_up": torch.cat([gate_FD, up_FD]).T, "w_down": down_DF.T}

    def names(self, prefix: str, num_experts: int) -> set[str]:
        return set(self._of_layer(prefix))

    def _of_layer(self, prefix: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{matrix}.weight" for matrix in ("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True, kw_only=True)
class PlainFeedForward:
    """One dense feed-forward layer of two matrices with biases, which every expert copies: GPT-2, SwinV2.

    Attributes:
        up, down: names of the two layers.
        is_transposed: matrices are [out, in], as nn.Linear has them, not [in, out].
    """

    up: str
    down: str
    is_transposed: bool

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        up, b_up, down, b_down = (weights.read(name) for name in self._of_layer(prefix))
        if self.is_transposed:
            up, down = up.T, down.T
        return {"w_up": up, "b_up": b_up, "w_down": down, "b_down": b_down}

    def names(self, prefix: str, num_experts: int) -> set[str]:
        return set(self._of_layer(prefix))

    def _of_layer(self, prefix: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{layer}.{kind}" for layer in (self.up, self.down) for kind in ("weight", "bias"))
