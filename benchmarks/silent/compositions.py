"""Trainings drawn by number: what a user may combine, beside the loop of plain PyTorch.

A composition that is refused in one sentence is explained; one that trains must be the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.silent.case import Case, Training
from benchmarks.silent.model import Adapted, Language, PackedTokens, PaddedTokens, Tokens, UnequalTokens
from moe_lightning.callbacks.dense_blocks import RecomputeDense
from moe_lightning.callbacks.load_balancer import LoadBalancer

PREFIX = "composition-"
_MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {}, {"tp": 2}, {"cp": 2}, {"pp": 2}],
    3: [{}],
    4: [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}],
}


def composition(number: int) -> Case:
    """Draw a training and a training that resumes from it."""
    draw = random.Random(number)
    experts = draw.choice([4, 5, 6])
    ranks, strategy = _world(draw, experts)
    resumed_ranks, resumed_strategy = _world(draw, experts) if draw.random() < 0.5 else (ranks, strategy)
    in_stages = any("pp" in options.get("mesh", {}) for options in (strategy, resumed_strategy))
    balanced = 0.0 if in_stages else draw.choice([0.0, 0.01, 0.1])
    router = {
        "top_k": draw.choice([1, 2, 2, 3]),
        "score": draw.choice(["softmax", "sigmoid"]),
        "normalize_top_k": draw.random() < 0.7,
        "scale": draw.choice([1.0, 1.0, 2.5]),
        "aux_loss_coef": balanced,
        "z_loss_coef": 0.0 if in_stages else draw.choice([0.0, 0.01]),
        "bias_update_rate": draw.choice([0.0, 0.0, 0.01]),
    }
    model = {
        "router": router,
        "num_experts": experts,
        "num_shared_experts": draw.choice([0, 0, 1]),
        "activation": draw.choice(["gelu", "swiglu"]),
        "norm": draw.choice(["layernorm", "rmsnorm"]),
        "position": draw.choice(["learned", "rope"]),
        "bias": draw.random() < 0.5,
        "qk_norm": draw.random() < 0.3,
        "tie_embeddings": not in_stages and draw.random() < 0.3,
        "moe_every": draw.choice([1, 1, 2]),
        "num_layers": 4 if in_stages else 2,
        "optimizer": draw.choice(["adamw", "adamw", "sgd"]),
        "alpha": 32.0,
    }
    trainer: dict[str, Any] = {"accumulate_grad_batches": draw.choice([1, 1, 2, 3])}
    trainer |= draw.choice(
        [{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}]
    )
    callbacks: Callable[[], list[Any]] = draw.choice([list, list, _recomputing, _moving])
    worlds = (strategy, resumed_strategy)
    if callbacks is _moving:
        strategy, resumed_strategy = ({**options, "slots": experts} for options in worlds)
    adapts = all(o["dense"] in ("ddp", "zero1") and "tp" not in o.get("mesh", {}) for o in worlds)
    return Case(
        id=f"{PREFIX}{number}",
        kind="compositions",
        report="",
        symptom="",
        subject=Training(
            ranks=ranks,
            strategy=strategy,
            resumed_ranks=resumed_ranks,
            resumed_strategy=resumed_strategy,
            model=model,
            trainer=trainer,
            batch_size=draw.choice([8, 8, 7, 9]),
            module=Adapted if adapts and draw.random() < 0.5 else Language,
            data=draw.choice([Tokens, UnequalTokens, PaddedTokens, PackedTokens]),
            callbacks=callbacks,
        ),
    )


def _world(draw: random.Random, experts: int) -> tuple[int, Mapping[str, Any]]:
    ranks = draw.choice([1, 2, 2, 3, 4, 4])
    mesh = draw.choice(_MESHES[ranks])
    strategy: dict[str, Any] = {"quota": draw.choice(["balanced", "equal"])}
    if mesh:
        strategy["mesh"] = mesh
    strategy["dense"] = draw.choice(["ddp", "ddp", "zero1", "fsdp", *(["hsdp"] if ranks == 4 and not mesh else [])])
    stage = ranks // mesh.get("pp", 1)
    kind = draw.choice(["uniform", "replicas", "table", "groups"])
    if kind == "replicas":
        strategy["replicas"] = draw.randint(1, stage)
    elif kind == "table":
        strategy["placement"] = [_holders(draw, stage) for _ in range(experts)]
    elif kind == "groups" and stage == 4:
        strategy["ep_size"] = 2
    return ranks, strategy


def _holders(draw: random.Random, ranks: int) -> list[int]:
    held = [int(draw.random() < 0.4) for _ in range(ranks)]
    held[draw.randrange(ranks)] = 1
    return held


def _recomputing() -> list[Any]:
    return [RecomputeDense()]


def _moving() -> list[Any]:
    return [LoadBalancer(rebalance_every=2, calibrate=False)]
