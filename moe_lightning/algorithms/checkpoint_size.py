"""How large a checkpoint is, from a description of the model's tensors, without allocating any.

What counts as saved is a parameter: which kinds of state exist and their bytes, which of them partial saving applies
to, and buffers that are saved as they are. PEC's and MoC-System's printed sizes follow from different choices, given
here as constants.
Sources: PEC 4, MoC-System eq. 5-6 and Table 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_lightning.algorithms.selection import parse_scopes
from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        name: its key.
        shape: of one expert where the tensor belongs to experts.
        experts: how many experts of its layer have one; 0 for a non-expert tensor.
        buffer: not trained: saved once in fp32, without optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0
    buffer: bool = False

    @property
    def numel(self) -> int:
        """Elements over all experts."""
        return math.prod(self.shape) * max(1, self.experts)


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Bytes per parameter of each kind of state, and the kinds that are saved for K experts only."""

    scope_bytes: Mapping[str, int]
    partial: frozenset[str]
    buffer_bytes: int = 4


MIXED_PRECISION_BYTES = MappingProxyType({"weight": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4})
FULL_PRECISION_BYTES = MappingProxyType({"weight": 4, "exp_avg": 4, "exp_avg_sq": 4})

MOC_ACCOUNTING = Accounting(scope_bytes=MIXED_PRECISION_BYTES, partial=parse_scopes("moc"))
"""MoC-System's figures: fp16 weights and moments are partial, fp32 master weights always saved."""

PEC_ACCOUNTING = Accounting(scope_bytes=FULL_PRECISION_BYTES, partial=parse_scopes("full"))
"""PEC's figures: fp32 training, everything of an expert is partial."""

FULL_SCOPE_ACCOUNTING = Accounting(scope_bytes=MIXED_PRECISION_BYTES, partial=parse_scopes("full"))
"""Mixed precision, everything of an expert partial: this library's default."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Payload bytes of one checkpoint; framing and metadata excluded."""

    dense_bytes: int
    expert_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes


def parameter_count(tensors: Iterable[TensorSpec], *, experts: bool | None = None) -> int:
    """Trained parameters: all, only the experts' (True) or only the others (False)."""
    return sum(t.numel for t in tensors if not t.buffer and (experts is None or bool(t.experts) == experts))


def checkpoint_size(tensors: Iterable[TensorSpec], *, accounting: Accounting, k: int | None = None) -> CheckpointSize:
    """Bytes that a checkpoint of K experts per layer writes (None: all), over all ranks, every tensor once.

    Raises:
        ConfigurationError: k < 1.
    """
    if k is not None and k < 1:
        raise ConfigurationError(f"k={k} experts cannot be saved: use 1 or more, or None for a full checkpoint")
    dense = expert = 0
    for tensor in tensors:
        if tensor.buffer:
            dense += tensor.numel * accounting.buffer_bytes
        elif not tensor.experts:
            dense += tensor.numel * sum(accounting.scope_bytes.values())
        else:
            one = math.prod(tensor.shape)
            saved = tensor.experts if k is None else min(k, tensor.experts)
            for scope, size in accounting.scope_bytes.items():
                expert += one * size * (saved if scope in accounting.partial else tensor.experts)
    return CheckpointSize(dense_bytes=dense, expert_bytes=expert)


def gpt_moe_tensors(
    *,
    width: int,
    num_layers: int,
    num_experts: int,
    vocabulary: int = 50257,
    positions: int = 1024,
    moe_every: int = 2,
    tied: bool = True,
    causal_mask_buffers: bool = False,
) -> list[TensorSpec]:
    """The tensors of a GPT-2 with biases, feed-forward width 4 * width, and every `moe_every`-th layer an MoE layer.

    Args:
        causal_mask_buffers: count one fp32 [positions, positions] buffer per layer, as older implementations save them.

    Raises:
        ConfigurationError: moe_every does not divide num_layers.
    """
    if num_layers % moe_every:
        raise ConfigurationError(f"moe_every={moe_every} does not divide the {num_layers} layers: use a divisor")
    hidden = 4 * width
    ffn = (
        ("fc.weight", (hidden, width)),
        ("fc.bias", (hidden,)),
        ("proj.weight", (width, hidden)),
        ("proj.bias", (width,)),
    )
    tensors = [
        TensorSpec(name="embedding", shape=(vocabulary, width)),
        TensorSpec(name="positions", shape=(positions, width)),
    ]
    for layer in range(num_layers):
        prefix = f"layer{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            "attention.qkv.weight": (3 * width, width),
            "attention.qkv.bias": (3 * width,),
        }
        shapes |= {"attention.out.weight": (width, width), "attention.out.bias": (width,)}
        shapes |= {f"norm{i}.{kind}": (width,) for i in (1, 2) for kind in ("weight", "bias")}
        is_moe = layer % moe_every == moe_every - 1
        if is_moe:
            shapes["router.weight"] = (num_experts, width)
        tensors += [TensorSpec(name=f"{prefix}.{name}", shape=shape) for name, shape in shapes.items()]
        tensors += [TensorSpec(name=f"{prefix}.ffn.{n}", shape=s, experts=num_experts if is_moe else 0) for n, s in ffn]
        if causal_mask_buffers:
            tensors.append(TensorSpec(name=f"{prefix}.attention.mask", shape=(positions, positions), buffer=True))
    tensors += [TensorSpec(name=f"final_norm.{kind}", shape=(width,)) for kind in ("weight", "bias")]
    if not tied:
        tensors.append(TensorSpec(name="head.weight", shape=(vocabulary, width)))
    return tensors
