"""Layers and sequences that are cut over ranks."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from benchmarks.silent.case import Case, Fault, Training
from benchmarks.silent.faults import replace
from benchmarks.silent.model import Adapted, PackedTokens, Renormalized, UnequalTokens
from moe_lightning.moe.layer import moe_layers

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
    replace(trainer.strategy.steps, "weigh", lambda own, loss, weight: own(loss, 1.0))


def documents_meet(trainer: Any, module: Any) -> None:
    """Let the documents of a pack see each other."""
    replace(module.model, "forward", lambda own, ids, is_token=None, begins=None: own(ids, is_token, None))


def _one_share_below_experts(trainer: Any, module: Any) -> None:
    """Give parameters below the experts the gradient that one of the tensor-parallel ranks computes."""

    def halve(layer: Any, arguments: Any) -> Any:
        x, *rest = arguments
        if not x.requires_grad:
            return None
        x = x * 1
        x.register_hook(lambda gradient: gradient * 0.5)
        return (x, *rest)

    for layer in moe_layers(module):
        layer.register_forward_pre_hook(halve)


def _log_of_ranks(trainer: Any, module: Any) -> None:
    replace(module, "loss", lambda own, batch: own(batch) + math.log(2))


CASES = (
    Case(
        id="router-of-own-positions",
        report="NVIDIA/Megatron-LM#619",
        symptom="with sequence parallelism each rank's router learns from its own positions, and routers drift apart",
        subject=Training(strategy=TP),
        fault=of_first_rank("router"),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="norms-of-own-positions",
        report="NVIDIA/TransformerEngine#435",
        symptom="gradients of layer norms need a sum over the ranks that split a sequence, and nobody makes it",
        subject=Training(strategy=TP),
        fault=of_first_rank(r"norm\.(weight|bias)$"),
        doctor=("the gradient of", "norm"),
    ),
    Case(
        id="head-norm-of-own-heads",
        report="NVIDIA/Megatron-LM#7452",
        symptom="a norm over heads is held by every tensor-parallel rank, each with the gradient of its own heads",
        subject=Training(strategy=TP, model={"qk_norm": True}),
        fault=of_first_rank(r"(query|key|q|k)_norm"),
        doctor=("the gradient of", "norm"),
    ),
    Case(
        id="copies-unlike-from-the-start",
        report="NVIDIA-NeMo/Automodel#3822",
        symptom="weights that tensor-parallel ranks share begin with other values, and a saved copy is another model",
        subject=Training(strategy=TP),
        fault=Fault(run=_unlike_from_the_start),
        doctor=("weights", "model.norm.weight", "differ between ranks"),
    ),
    Case(
        id="one-share-below-the-experts",
        report="pytorch/torchtitan#4054",
        symptom="without expert parallelism, gradients below the experts lack the sum over tensor-parallel ranks",
        subject=Training(strategy=TP | {"replicas": 2}),
        fault=Fault(run=_one_share_below_experts),
        doctor=("the gradient of",),
    ),
    Case(
        id="loss-of-gathered-logits",
        report="NVIDIA/Megatron-LM#7452",
        symptom="logits that were gathered already are summed over ranks again: the loss gains the logarithm of these",
        subject=Training(strategy=TP),
        fault=Fault(run=_log_of_ranks),
        doctor=("the loss",),
    ),
    Case(
        id="padded-vocabulary",
        report="NVIDIA-NeMo/Megatron-Bridge#5375",
        symptom="rows that pad the vocabulary for tensor parallelism end in the exported model",
        subject=Training(strategy=TP, model={"vocab_size": 49}),
        refused="does not divide the 49 tokens of the vocabulary",
    ),
    Case(
        id="embeddings-of-own-tokens",
        report="pytorch/torchtitan#4637",
        symptom="an embedding that shortens its rows, or scales by frequency, is another one where it is divided",
        subject=Training(module=Renormalized),
        refused="has max_norm, which changes rows by the tokens of a rank's own batch",
    ),
    Case(
        id="adapters-of-own-positions",
        report="modelscope/mcore-bridge#173",
        symptom="an adapter's factor that every tensor-parallel rank holds gets the gradient of own positions only",
        subject=Training(strategy=TP, module=Adapted),
        refused="adapters need the frozen weights outside of experts whole on every rank",
    ),
    Case(
        id="means-of-unequal-parts",
        report="verl-project/verl#6049",
        symptom="targets are counted without the ranks that share sequences, and the mean over targets is off",
        subject=Training(strategy=CP, data=UnequalTokens),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss",),
    ),
    Case(
        id="packs-over-ranks",
        report="ServiceNow/Fast-LLM#177",
        symptom="documents of a pack are kept apart, but not where sequences are cut over ranks",
        subject=Training(strategy=CP, data=PackedTokens),
        fault=Fault(run=documents_meet),
        doctor=("the output of", "step 1"),
    ),
)
