"""Features of a training in every layout of the model over ranks, each beside one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from benchmarks.silent.case import BFLOAT16, Case, Limits, Training
from benchmarks.silent.model import (
    Adapted,
    Manual,
    PackedTokens,
    PaddedTokens,
    Recomputed,
    UnequalTokens,
    Unfrozen,
)
from moe_lightning.callbacks.dense_blocks import CompileDense, RecomputeDense
from moe_lightning.callbacks.load_balancer import LoadBalancer

PREFIX = "cell-"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A column: ranks, and the options of ExpertParallelStrategy that lay the model over them.

    Attributes:
        model: options of the GPT that the layout needs.
    """

    ranks: int
    strategy: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


_STAGES = {"num_layers": 4, "router": {"aux_loss_coef": 0.0}}

LAYOUTS: dict[str, Layout] = {
    "ddp": Layout(ranks=2),
    "replicas": Layout(ranks=2, strategy={"replicas": 2}),
    "zero1": Layout(ranks=2, strategy={"dense": "zero1"}),
    "fsdp": Layout(ranks=2, strategy={"dense": "fsdp"}),
    "hsdp": Layout(ranks=4, strategy={"dense": "hsdp", "shard_size": 2}),
    "tp": Layout(ranks=2, strategy={"mesh": {"tp": 2}}),
    "cp": Layout(ranks=2, strategy={"mesh": {"cp": 2}}),
    "pp": Layout(ranks=2, strategy={"mesh": {"pp": 2}}, model=_STAGES),
    "tp + fsdp": Layout(ranks=4, strategy={"mesh": {"tp": 2}, "dense": "fsdp"}),
    "pp + fsdp": Layout(ranks=4, strategy={"mesh": {"pp": 2}, "dense": "fsdp"}, model=_STAGES),
}
"""Columns by their names."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row: what a training uses beside the defaults.

    Attributes:
        training: as in `Training`, on any ranks.
        strategy: options of ExpertParallelStrategy, beside those of the layout.
        limits: see `Limits`.
        differs: why numbers are others than those of one process, by layout; where they need not be the same.
    """

    training: Training = field(default_factory=Training)
    differs: Mapping[str, str] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


def _router(**options: Any) -> Feature:
    return Feature(training=Training(model={"router": options}))


def _trainer(**options: Any) -> Feature:
    return Feature(training=Training(trainer=options))


def _precision(name: str) -> Feature:
    every = {"top_k": 4, "normalize_top_k": True}  # of four experts: rounding chooses nothing
    model = {"router": every, "optimizer": "adamw slow"}
    return Feature(training=Training(trainer={"precision": name}, model=model, reference="one rank"), limits=BFLOAT16)


def _callback(*callbacks: Any, **options: Any) -> Feature:
    return Feature(training=Training(callbacks=lambda: [make() for make in callbacks], **options))


_PER_MICRO = "the loss is computed for each micro-batch of the pipeline, as under gradient accumulation"

FEATURES: dict[str, Feature] = {
    "AdamW": Feature(),
    "SGD with momentum": Feature(training=Training(model={"optimizer": "sgd"})),
    "two optimizers, manual optimization": Feature(training=Training(module=Manual, optimizers=2)),
    "states of the optimizer on the host": Feature(strategy={"offload_optimizer": True}),
    "clipping by norm": _trainer(gradient_clip_val=0.5),
    "clipping by value": _trainer(gradient_clip_val=0.002, gradient_clip_algorithm="value"),
    "gradient accumulation": _trainer(accumulate_grad_batches=2),
    "validation": Feature(training=Training(validates=True)),
    "load-balancing loss": replace(_router(aux_loss_coef=0.1), differs=dict.fromkeys(("pp", "pp + fsdp"), _PER_MICRO)),
    "z-loss": _router(z_loss_coef=0.01),
    "selection bias": _router(bias_update_rate=0.01),
    "noise and dropout": Feature(
        training=Training(
            model={"dropout": 0.1, "router": {"noisy_top_k": True, "jitter": 0.1}}, reference="one rank", shuffles=True
        )
    ),
    "shared expert": Feature(training=Training(model={"num_shared_experts": 1})),
    "tied embeddings": Feature(training=Training(model={"tie_embeddings": True})),
    "targets of unequal number": Feature(training=Training(data=UnequalTokens)),
    "padded sequences": Feature(training=Training(data=PaddedTokens)),
    "packed documents": Feature(training=Training(data=PackedTokens)),
    "batches that ranks do not divide": Feature(training=Training(batch_size=7)),
    "low-rank adapters": Feature(training=Training(module=Adapted)),
    "parameters frozen for a time": Feature(training=Training(module=Unfrozen)),
    "`RecomputeDense`": _callback(RecomputeDense),
    "recomputed MoE layers": Feature(
        training=Training(
            module=Recomputed, model={"dropout": 0.1, "router": {"jitter": 0.1}}, reference="one rank", shuffles=True
        )
    ),
    "`CompileDense`": _callback(CompileDense),
    "experts that move": replace(
        _callback(lambda: LoadBalancer(rebalance_every=2, calibrate=False)), strategy={"slots": 4}
    ),
    "`stop_on_nan`": Feature(strategy={"stop_on_nan": "skip"}),
    "bf16-mixed": _precision("bf16-mixed"),
    "bf16-true": _precision("bf16-true"),
    "`EMAWeightAveraging`": _callback(lambda: EMAWeightAveraging(decay=0.5)),
    "`StochasticWeightAveraging`": _callback(lambda: StochasticWeightAveraging(1e-3)),
}
"""Rows by their names."""


def cells() -> list[str]:
    """Return the ids of all cells, by rows."""
    return [cell_id(feature, layout) for feature in FEATURES for layout in LAYOUTS]


def cell_id(feature: str, layout: str) -> str:
    """Return the id of the case of a row and a column."""
    return f"{PREFIX}{feature}/{layout}"


def cell(id: str) -> Case:
    """Return the case of a cell."""
    row, _, column = id.removeprefix(PREFIX).rpartition("/")
    feature, layout = FEATURES[row], LAYOUTS[column]
    own = feature.training
    model = {**layout.model, **own.model}
    if "router" in layout.model or "router" in own.model:
        model["router"] = {**layout.model.get("router", {}), **own.model.get("router", {})}
    training = replace(own, ranks=layout.ranks, strategy={**layout.strategy, **feature.strategy}, model=model)
    return Case(id=id, kind="compatibility", report="", symptom="", subject=training, limits=feature.limits)
