"""GPT-2 with experts, tensor by tensor, and what PEC and MoC-System count of it in their printed sizes."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from moe_lightning.checkpoint.selection import parse_scopes
from moe_lightning.checkpoint.sharding import MIXED_PRECISION_BYTES, Accounting, TensorSpec
from moe_lightning.errors import ConfigurationError

FULL_PRECISION_BYTES = MappingProxyType({"weight": 4, "exp_avg": 4, "exp_avg_sq": 4})

MOC_ACCOUNTING = Accounting(scope_bytes=MIXED_PRECISION_BYTES, partial=parse_scopes("moc"))
"""MoC-System's figures: fp16 weights and moments are partial, fp32 master weights always saved."""

PEC_ACCOUNTING = Accounting(scope_bytes=FULL_PRECISION_BYTES, partial=parse_scopes("full"))
"""PEC's figures: fp32 training, everything of an expert is partial."""

FULL_SCOPE_ACCOUNTING = Accounting(scope_bytes=MIXED_PRECISION_BYTES, partial=parse_scopes("full"))
"""Mixed precision, everything of an expert partial: this library's default."""


def parameter_count(tensors: Iterable[TensorSpec], *, experts: bool | None = None) -> int:
    """Trained parameters: all, only the experts' (True) or only the others (False)."""
    return sum(t.numel for t in tensors if not t.buffer and (experts is None or bool(t.experts) == experts))


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
