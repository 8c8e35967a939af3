"""PEC: sizes of checkpoints and of the slowest rank's share (PEC 4)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from benchmarks.gpt_tensors import PEC_ACCOUNTING, gpt_moe_tensors, parameter_count
from benchmarks.paper_table import PaperTable, Row, Sources
from moe_lightning.checkpoint.selection import sequential_selection
from moe_lightning.checkpoint.sharding import (
    Module,
    TensorSpec,
    checkpoint_size,
    equal_expert_writers,
    shard_checkpoint,
)
from moe_lightning.plots import bar_chart

_WIDTH, _LAYERS, _EXPERTS = 768, 12, 8
_RANKS = 8
_BYTES = 12  # fp32 weight and Adam moments


def layer_modules(tensors: Sequence[TensorSpec], num_bytes: int) -> list[Module]:
    """Non-expert state in units of layer-level modules: attention, feed-forward, norms, embeddings (MoC 4)."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if not tensor.experts:
            parts = tensor.name.split(".")
            unit = ".".join(parts[:2]) if parts[0].startswith("layer") else parts[0]
            sizes[unit] += tensor.numel * (4 if tensor.buffer else num_bytes)
    return [Module(name=name, nbytes=nbytes) for name, nbytes in sizes.items()]


def sizes(_: Sources) -> PaperTable:
    """GPT-MoE with 8 experts: size of a K = 1 checkpoint, and of the busiest rank's part."""
    tied = gpt_moe_tensors(width=_WIDTH, num_layers=_LAYERS, num_experts=_EXPERTS)
    saved = gpt_moe_tensors(
        width=_WIDTH, num_layers=_LAYERS, num_experts=_EXPERTS, tied=False, causal_mask_buffers=True
    )
    full = checkpoint_size(saved, accounting=PEC_ACCOUNTING).total_bytes
    by_k = {k: checkpoint_size(saved, accounting=PEC_ACCOUNTING, k=k).total_bytes for k in (1, 2, 4, 8)}
    # The dense GPT-2 of the same width has one feed-forward layer where this one has eight experts.
    dense = [TensorSpec(name=t.name, shape=t.shape, buffer=t.buffer) for t in saved]
    dense_bytes = checkpoint_size(dense, accounting=PEC_ACCOUNTING).total_bytes
    expert_bytes = sum(math.prod(t.shape) for t in saved if t.experts and t.name.startswith("layer1.")) * _BYTES
    modules = layer_modules(saved, _BYTES)
    ordinals = range(_EXPERTS)
    selections = [sequential_selection(ordinal=t, k=1, num_layers=6, num_experts=8, ep_size=8) for t in ordinals]
    writers = [equal_expert_writers(selection, dp_size=_RANKS, ep_size=8) for selection in selections]
    dense_part = sum(module.nbytes for module in modules)
    whole_rank = dense_part + (full - dense_part) / _RANKS
    pec_rank = dense_part + 6 * expert_bytes / _RANKS
    plans = {
        adaptive: [
            shard_checkpoint(w, expert_bytes=expert_bytes, modules=modules, num_ranks=_RANKS, adaptive=adaptive)
            for w in writers
        ]
        for adaptive in (True, False)
    }
    adps, edps = (max(plan.bottleneck_bytes for plan in plans[adaptive]) for adaptive in (True, False))
    rows = (
        Row(what="parameters, tied", printed=323, ours=parameter_count(tied) / 1e6, unit="M"),
        Row(what="size saved at K = 1", printed=54.2, ours=100 * (1 - by_k[1] / full), unit="%"),
        Row(what="full over dense", printed=2.18, ours=full / dense_bytes, unit="x"),
        Row(what="baseline's rank saved at K = 1", printed=15, ours=100 * (1 - pec_rank / whole_rank), unit="%"),
        Row(what="busiest rank saved by ADPS", printed=76.9, ours=100 * (1 - adps / whole_rank), unit="%"),
        Row(
            what="ADPS below EDPS",
            printed=11.7,
            ours=100 * (1 - adps / edps),
            unit="%",
            why="printed for time; ours are bytes of the expert on the embedding's rank",
        ),
    )
    bars = {f"K={k}": {"experts": (size - dense_part) / 1e9, "dense": dense_part / 1e9} for k, size in by_k.items()}
    return PaperTable(
        title="PEC 4: checkpoint of a GPT-MoE with 8 experts",
        rows=rows,
        assumptions=(
            "untied output matrix, fp32 weights and Adam (12 B a parameter), causal masks saved as fp32 buffers",
            "8 ranks, one expert of every layer on each; modules are not cut",
        ),
        chart=partial(bar_chart, bars, "PEC: bytes of a checkpoint", "GB"),
    )


PAPERS = {"pec-sizes": sizes}
