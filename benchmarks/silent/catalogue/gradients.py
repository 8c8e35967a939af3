"""Sums of gradients over ranks and micro-batches."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Case, Fault, Training
from benchmarks.silent.faults import at_backward, at_gradients, blocked, replace
from benchmarks.silent.model import Adapted, Idle, Manual, Unfrozen
from moe_lightning.callbacks.dense_blocks import RecomputeDense
from moe_lightning.dispatch.transports import ExchangeBackend
from moe_lightning.moe.layer import moe_layers

KIND = "sums of gradients"


def _experts(trainer: Any) -> list[Any]:
    return list(trainer.strategy.experts.stack_of)


def _times(factor: float) -> Fault:
    return at_gradients(lambda trainer, module: [p.grad.mul_(factor) for p in _experts(trainer) if p.grad is not None])


def _no_replica_sum(trainer: Any, module: Any) -> None:
    replace(trainer.strategy.experts, "sum_replica_gradients", lambda own: None)


def _no_sum_over_copies() -> None:
    """Of the sum over shards and the sum over copies of these leave the second out."""

    def around(own: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "_fsdp_collectives" in sys._getframe(2).f_code.co_filename:
            return None
        return own(tensor, *args, **kwargs)

    replace(dist, "all_reduce", around)


def _nothing_comes_back() -> None:
    """The gradient of rows that were sent to other ranks."""

    def around(own: Any, backend: Any, rows: Tensor, spec: Any) -> Tensor:
        if spec.is_return or backend.world.size == 1 or not rows.requires_grad:
            return own(backend, rows, spec)  # type: ignore[no-any-return]
        first = sum(spec.send_splits[: backend.world.rank])
        mask = torch.zeros(len(rows), 1)
        mask[first : first + spec.send_splits[backend.world.rank]] = 1
        rows = rows * 1
        rows.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]
        return own(backend, rows, spec)  # type: ignore[no-any-return]

    replace(ExchangeBackend, "exchange", around)


def _without_idle(trainer: Any, module: Any) -> None:
    for parameter in _experts(trainer) if trainer.global_step else ():  # with the first step they have moments
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None


def _last_micro_batch(trainer: Any, module: Any, is_last: bool) -> None:
    if is_last:
        for parameter in module.parameters():
            parameter.grad = None


def _own_earlier_ones(trainer: Any, module: Any, is_last: bool) -> None:
    """Gradients of earlier micro-batches that other ranks never see."""
    if is_last and trainer.global_rank:
        for parameter in _experts(trainer):
            parameter.grad = None


def _sums_again(trainer: Any, module: Any, is_last: bool) -> None:
    """What an earlier backward pass has left, and all ranks have, is averaged over ranks with the gradient of this."""
    for parameter in module.parameters():
        if parameter.grad is not None and parameter not in trainer.strategy.experts.stack_of:
            parameter.grad.mul_(1.25)


def _halved_again(trainer: Any, module: Any, is_last: bool) -> None:
    """The division by the number of ranks hits gradients of earlier micro-batches, too."""
    for parameter in _experts(trainer):
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _faster_on_last(trainer: Any, module: Any) -> None:
    for group in trainer.optimizers[0].param_groups if trainer.global_rank else ():
        group["lr"] *= 1.2


def _half_of_tied(trainer: Any, module: Any) -> None:
    own = module.model.head.forward
    module.model.head.forward = lambda x: torch.nn.functional.linear(x, module.model.head.weight.detach()) + 0 * own(x)


def _fresh_noise() -> None:
    """Draw other noise when a block is computed again."""
    from moe_lightning.callbacks import dense_blocks

    def around(own: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        calls: list[int] = []

        def again(part: Any, *inputs: Any) -> Any:
            calls.append(1)
            return function(part, *(x * 1.1 if len(calls) > 1 and torch.is_tensor(x) else x for x in inputs))

        return own(again, *args, **kwargs)

    replace(dense_blocks, "checkpoint", around)


def _shared_of_one(trainer: Any, module: Any) -> None:
    """Each rank's part of a shared expert gets the gradient of its own positions only."""
    for layer in moe_layers(module):
        for parameter in layer.shared_expert.parameters():  # type: ignore[union-attr]
            parameter.register_hook(lambda gradient: gradient * (0.5 if trainer.global_rank else 1.5))


def _adapters_of_first(trainer: Any, module: Any) -> None:
    for name, parameter in module.named_parameters():
        if "lora_" in name and ".experts." in name and trainer.global_rank and parameter.grad is not None:
            parameter.grad.zero_()


ACCUMULATED = {"accumulate_grad_batches": 3}

CASES = (
    Case(
        id="hsdp-replicas-not-summed",
        report="NVIDIA-NeMo/Automodel#3135",
        symptom="the group of copies of shards was lost, so copies of HSDP train apart",
        subject=Training(ranks=4, strategy={"dense": "hsdp", "shard_size": 2}),
        fault=Fault(process=_no_sum_over_copies),
        doctor=("the gradient of", "step 1"),
    ),
    Case(
        id="expert-replicas-not-summed",
        report="NVIDIA/Megatron-LM#5916",
        symptom="copies of an expert on several ranks each train on the tokens of their own",
        subject=Training(strategy={"replicas": 2}),
        fault=Fault(run=_no_replica_sum),
        doctor=("the gradient of", "do not sum"),
    ),
    Case(
        id="expert-gradients-doubled",
        report="pytorch/pytorch#160285",
        symptom="with two expert-parallel ranks gradients of experts are exactly twice those of one, at equal losses",
        subject=Training(),
        fault=_times(2.0),
        doctor=("the gradient of", "experts", "a sum over 2 ranks"),
    ),
    Case(
        id="expert-gradients-divided",
        report="NVIDIA/Megatron-LM#5956",
        symptom="gradients of experts lack, or have twice, the division by the number of expert-parallel ranks",
        subject=Training(ranks=4),
        fault=_times(0.25),
        doctor=("the gradient of", "experts", "divided by 4"),
    ),
    Case(
        id="token-gradients-stay-away",
        report="NVIDIA-NeMo/Automodel#1260",
        symptom="the backward pass keeps this rank's part only, so tokens lose the gradient of experts on other ranks",
        subject=Training(),
        fault=Fault(process=_nothing_comes_back),
        doctor=("the gradient of",),
    ),
    Case(
        id="idle-experts-skip-the-update",
        report="NVIDIA-NeMo/Automodel#2995",
        symptom="experts without a token have no gradient, and so neither weight decay nor decay of their moments",
        subject=Training(module=Idle, model={"router": {"bias_update_rate": 0.001}}),
        fault=at_gradients(_without_idle),
        doctor=("update", "experts"),
    ),
    Case(
        id="manual-passes-not-summed",
        report="Lightning-AI/pytorch-lightning#9237",
        symptom="gradients of backward passes by hand are not those of all ranks",
        subject=Training(module=Manual, optimizers=2, strategy={"replicas": 2}),
        fault=Fault(run=_no_replica_sum),
        doctor=("leaves the gradients of replicas of experts different",),
    ),
    Case(
        id="manual-passes-summed-twice",
        report="Lightning-AI/pytorch-lightning#4976",
        symptom="several backward passes of one step: what was summed by the first is summed again with the second",
        subject=Training(module=Manual, optimizers=2, strategy={"dense": "zero1"}),
        fault=at_backward(_sums_again),
        doctor=("the gradient of", "step 1"),
    ),
    Case(
        id="experts-below-tensor-parallelism",
        report="NVIDIA/Megatron-LM#7165",
        symptom="gradients of experts are scaled by the size of the dense layers' group, not by that of their own",
        subject=Training(ranks=4, strategy={"mesh": {"tp": 2}}),
        fault=_times(2.0),
        doctor=("the gradient of", "experts"),
    ),
    Case(
        id="only-the-last-micro-batch",
        report="NVIDIA-NeMo/Automodel#3530",
        symptom="gradients of all micro-batches but the last are dropped; the loss looks right",
        subject=Training(trainer=ACCUMULATED),
        fault=at_backward(_last_micro_batch, is_before=True),
        doctor=("the gradient of",),
    ),
    Case(
        id="earlier-micro-batches-not-summed",
        report="pytorch/pytorch#69031",
        symptom="with accumulation only parameters of the last pass are summed over ranks; earlier ones stay apart",
        subject=Training(trainer=ACCUMULATED, strategy={"replicas": 2}),
        fault=at_backward(_own_earlier_ones, is_before=True),
        doctor=("the gradient of", "experts"),
    ),
    Case(
        id="earlier-micro-batches-scaled-again",
        report="ISEEKYAN/Megatron-LM#70",
        symptom="the scale of experts is applied with every micro-batch, to what earlier ones have left as well",
        subject=Training(trainer=ACCUMULATED),
        fault=at_backward(_halved_again, is_before=True),
        doctor=("the gradient of", "experts"),
    ),
    Case(
        id="learning-rate-of-each-rank",
        report="karpathy/nanochat#857",
        symptom="ranks compute the learning rate from their own progress in the data, and update copies differently",
        subject=Training(strategy={"replicas": 2}),
        fault=at_gradients(_faster_on_last),
        doctor=("the update of", "differs between ranks"),
    ),
    Case(
        id="tied-head-not-added",
        report="paiml/entrenar#314",
        symptom="a tied matrix is updated by the gradient of the embedding and that of the head apart",
        subject=Training(model={"tie_embeddings": True}, strategy={"dense": "fsdp"}),
        fault=Fault(run=_half_of_tied),
        doctor=("the gradient of", "token_embedding"),
    ),
    Case(
        id="tied-stages-train-apart",
        report="uw-syfi/piper#13",
        symptom="a matrix that two pipeline stages share is copied, and its gradients are not summed",
        subject=Training(model={"tie_embeddings": True}, strategy={"mesh": {"pp": 2}}),
        refused="both would train apart: untie them",
    ),
    Case(
        id="unfrozen-parts-not-summed",
        report="Lightning-AI/pytorch-lightning#20340",
        symptom="layers that a callback unfreezes later are not in DDP's buckets, and differ between ranks",
        subject=Training(module=Unfrozen),
        fault=blocked("_sum_unfrozen"),
        doctor=("the gradient of", "attention", "step 3"),
    ),
    Case(
        id="recompute-draws-other-noise",
        report="allenai/OLMo-core#828",
        symptom="dropout draws another mask when a block is computed again, so gradients are of another loss",
        subject=Training(model={"dropout": 0.2}, callbacks=lambda: [RecomputeDense()], reference="one rank"),
        fault=Fault(process=_fresh_noise),
        doctor=("the gradient of",),
    ),
    Case(
        id="shared-expert-of-own-positions",
        report="vllm-project/vllm#37856",
        symptom="a shared expert that is cut over ranks sees one rank's positions only",
        subject=Training(model={"num_shared_experts": 1}, strategy={"mesh": {"tp": 2}}),
        fault=Fault(run=_shared_of_one),
        doctor=("the gradient of", "shared_expert"),
    ),
    Case(
        id="adapters-of-one-rank",
        report="hao-ai-lab/FastVideo#1666",
        symptom="adapters that were added late are in no sum over ranks, and train apart",
        subject=Training(module=Adapted, strategy={"replicas": 2}),
        fault=at_gradients(_adapters_of_first),
        doctor=("the gradient of", "lora"),
    ),
)
