"""Layers and sequences that are cut over ranks."""

from __future__ import annotations

import re
from typing import Any

import torch

from benchmarks.silent.case import Case, Fault, Training
from benchmarks.silent.faults import replace
from benchmarks.silent.model import Adapted, PackedTokens, UnequalTokens

KIND = "tensor parallelism"
TP, CP = {"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}


def of_first_rank(pattern: str) -> Fault:
    """Gradients of parameters with such names lack what other ranks add."""

    def run(trainer: Any, module: Any) -> None:
        for name, parameter in module.named_parameters():
            if re.search(pattern, name) and trainer.global_rank:
                parameter.register_hook(torch.zeros_like)

    return Fault(run=run)


def _unlike_from_the_start(trainer: Any, module: Any) -> None:
    if trainer.global_rank and not trainer.global_step:
        with torch.no_grad():
            module.model.norm.weight.mul_(1.01)


def weighs_ranks_alike(trainer: Any, module: Any) -> None:
    """Take means of ranks and micro-batches as means of the same number of targets."""
    replace(trainer.strategy, "weigh", lambda own, loss, weight: own(loss, 1.0))


def documents_meet(trainer: Any, module: Any) -> None:
    """Let the documents of a pack see each other."""
    replace(module.model, "forward", lambda own, ids, is_token=None, begins=None: own(ids, is_token, None))


CASES = (
    Case(
        id="router-of-own-positions",
        kind=KIND,
        report="NVIDIA/Megatron-LM#619",
        symptom="with sequence parallelism each rank's router learns from its own positions, and routers drift apart",
        subject=Training(strategy=TP),
        fault=of_first_rank("router"),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="norms-of-own-positions",
        kind=KIND,
        report="NVIDIA/TransformerEngine#435",
        symptom="gradients of layer norms need a sum over the ranks that split a sequence, and nobody makes it",
        subject=Training(strategy=TP),
        fault=of_first_rank(r"norm\.(weight|bias)$"),
        doctor=("the gradient of", "norm"),
    ),
    Case(
        id="head-norm-of-own-heads",
        kind=KIND,
        report="NVIDIA/Megatron-LM#7452",
        symptom="a norm over heads is held by every tensor-parallel rank, each with the gradient of its own heads",
        subject=Training(strategy=TP, model={"qk_norm": True}),
        fault=of_first_rank(r"(query|key|q|k)_norm"),
        doctor=("the gradient of", "norm"),
    ),
    Case(
        id="copies-unlike-from-the-start",
        kind=KIND,
        report="NVIDIA-NeMo/Automodel#3822",
        symptom="weights that tensor-parallel ranks share begin with other values, and a saved copy is another model",
        subject=Training(strategy=TP),
        fault=Fault(run=_unlike_from_the_start),
        doctor=("weights", "model.norm.weight", "differ between ranks"),
    ),
    Case(
        id="adapters-of-own-positions",
        kind=KIND,
        report="modelscope/mcore-bridge#173",
        symptom="an adapter's factor that every tensor-parallel rank holds gets the gradient of own positions only",
        subject=Training(strategy=TP, module=Adapted),
        refused="adapters need the frozen weights outside of experts whole on every rank",
    ),
    Case(
        id="means-of-unequal-parts",
        kind=KIND,
        report="verl-project/verl#6049",
        symptom="targets are counted without the ranks that share sequences, and the mean over targets is off",
        subject=Training(strategy=CP, data=UnequalTokens),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss",),
    ),
    Case(
        id="packs-over-ranks",
        kind=KIND,
        report="ServiceNow/Fast-LLM#177",
        symptom="documents of a pack are kept apart, but not where sequences are cut over ranks",
        subject=Training(strategy=CP, data=PackedTokens),
        fault=Fault(run=documents_meet),
        doctor=("the output of", "step 1"),
    ),
)
