"""Norm of gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.silent.case import Case, Check, Fault, Training
from benchmarks.silent.faults import clips_by, dense_and_expert, over_ranks, replace, squared
from benchmarks.silent.model import Idle, Language, Manual
from benchmarks.silent.training import train
from moe_lightning.strategies import gradients

KIND = "norm and clipping"
CLIPPED = {"gradient_clip_val": 0.5}
NO_BALANCE = {"router": {"aux_loss_coef": 0.0}}
"""In a pipeline the loss that balances experts is that of its micro-batches."""


def of_this_rank(trainer: Any, module: Any) -> Tensor:
    """As if all experts were here."""
    dense, experts = dense_and_expert(trainer, module)
    return squared(dense + experts).sqrt()


def averaged(trainer: Any, module: Any) -> Tensor:
    """The mean over ranks of what each has."""
    return over_ranks(of_this_rank(trainer, module)).div(trainer.world_size)


def without_experts(trainer: Any, module: Any) -> Tensor:
    """Of what every rank has."""
    return squared(dense_and_expert(trainer, module)[0]).sqrt()


def dense_for_each_rank(trainer: Any, module: Any) -> Tensor:
    """All squares of all ranks, those of copies too."""
    return over_ranks(squared([g for gradients in dense_and_expert(trainer, module) for g in gradients])).sqrt()


def apart(trainer: Any, module: Any) -> tuple[Tensor, Tensor]:
    """One for each kind of parameter."""
    dense, experts = dense_and_expert(trainer, module)
    return squared(dense).sqrt(), over_ranks(squared(experts)).sqrt()


def experts_of_first(trainer: Any, module: Any) -> Tensor:
    """Experts of the first rank alone."""
    dense, experts = dense_and_expert(trainer, module)
    return (squared(dense) + over_ranks(squared(experts) * (trainer.global_rank == 0))).sqrt()


def sums_of_norms(trainer: Any, module: Any) -> Tensor:
    """Norms of ranks added, not their squares."""
    dense, experts = dense_and_expert(trainer, module)
    return squared(dense).sqrt() + over_ranks(squared(experts).sqrt())


def _never_clipped(trainer: Any, module: Any) -> None:
    trainer.strategy.precision_plugin.clip_grad_by_norm = lambda *args: None


def of_holders(trainer: Any, module: Any) -> Tensor:
    """On a rank without experts that of dense weights: nobody sends it the rest."""
    dense, experts = dense_and_expert(trainer, module)
    whole = (squared(dense) + over_ranks(squared(experts))).sqrt()
    is_holder = any(stack.held() for stack in trainer.strategy.experts.stack_of.values())
    return whole if is_holder else squared(dense).sqrt()


def of_busy_ranks(trainer: Any, module: Any) -> Tensor:
    """A rank whose experts had no token is left out of the sum, and of what is clipped by it."""
    dense, experts = dense_and_expert(trainer, module)
    is_busy = squared(experts) > 0
    whole = (squared(dense) + over_ranks(squared(experts))).sqrt()
    return whole if is_busy else squared(dense).sqrt()


def _each_for_itself(trainer: Any, module: Any) -> None:
    """Of each optimizer this rank's parameters alone."""

    def clip(own: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        factor = (0.5 / (squared(gradients).sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

    replace(module, "clip_gradients", clip)


def _norms_of_bfloat16(rank: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The norms by which a training in bfloat16 is clipped, and those of its gradients in float64."""
    found: list[Tensor] = []
    expected: list[Tensor] = []

    class Norms(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradients = [p.grad.double() for p in module.parameters()]
            expected.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append(trainer.strategy.last_gradient_norm.double())

    training = Training(
        strategy={"replicas": 2}, trainer={"precision": "bf16-true", "gradient_clip_val": 0.5, "limit_train_batches": 4}
    )
    train(rank, 2, training, [Norms()])
    return {"norms": torch.stack(found)}, {"norms": torch.stack(expected)}


def _norm_in_bfloat16() -> None:
    replace(gradients, "global_gradient_norm", lambda own, *args, **kwargs: own(*args, **kwargs).bfloat16().float())


def _clipped_before_sum(trainer: Any, module: Any) -> None:
    def around(own: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in module.parameters():
            if parameter.grad is not None and parameter not in trainer.strategy.experts.stack_of:
                parameter.grad.clamp_(-1e-3, 1e-3)
        return own(*args, **kwargs)

    replace(trainer.strategy.precision_plugin, "clip_grad_by_value", lambda own, *args: None)
    replace(trainer.strategy.experts, "sum_replica_gradients", around)


class ByHand(Language):
    """Clips in its own hook by torch's function, by the largest element."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5, norm_type=float("inf"))


CASES = (
    Case(
        id="norm-of-own-experts",
        report="NVIDIA-NeMo/Automodel#3816",
        symptom="every expert-parallel group clips by a norm of its own, and shared dense weights drift apart",
        subject=Training(trainer=CLIPPED),
        fault=clips_by(of_this_rank),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-averaged-over-ranks",
        report="deepspeedai/DeepSpeed#8475",
        symptom="norms of ranks that hold other experts are averaged, so the factor depends on where experts lie",
        subject=Training(trainer=CLIPPED),
        fault=clips_by(averaged),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-without-experts",
        report="deepspeedai/DeepSpeed#8613",
        symptom="the clipping norm is that of shared parameters alone, so every gradient is clipped too little",
        subject=Training(trainer=CLIPPED),
        fault=clips_by(without_experts),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-counts-copies",
        report="ROCm/TransformerEngine#715",
        symptom="weights that every rank holds count once for each rank: the norm is 1.4 to 1.5 times too large",
        subject=Training(trainer=CLIPPED, strategy={"mesh": {"tp": 2}}),
        fault=clips_by(dense_for_each_rank),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-counts-expert-replicas",
        report="pytorch/pytorch#88955",
        symptom="gradients that are not sharded count as often as there are ranks",
        subject=Training(trainer=CLIPPED, strategy={"replicas": 2}),
        fault=clips_by(dense_for_each_rank),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-counts-copies-of-shards",
        report="ByteDance-Seed/VeOmni#184",
        symptom="under HSDP the norm is summed over copies of shards, too, and grows with their number",
        subject=Training(trainer=CLIPPED, ranks=4, strategy={"dense": "hsdp", "shard_size": 2}),
        fault=clips_by(dense_for_each_rank),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-in-half-precision",
        report="pytorch/pytorch#194033",
        symptom="norms of gradients in bfloat16 are added in bfloat16, so the norm depends on how ranks divide them",
        subject=Check(ranks=2, function=_norms_of_bfloat16),
        fault=Fault(process=_norm_in_bfloat16),
        beyond="its tolerance in 16 bits is wider",
    ),
    Case(
        id="norms-of-two-optimizers",
        report="NVIDIA/Megatron-LM#785",
        symptom="dense weights and experts are clipped apart, each by its own norm, once experts are parallel",
        subject=Training(trainer=CLIPPED, ranks=4),
        fault=clips_by(apart),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-under-tensor-parallelism",
        report="NVIDIA/Megatron-LM#5916",
        symptom="with tensor and expert parallelism the norm leaves some experts out, and clips too little",
        subject=Training(trainer=CLIPPED, ranks=4, strategy={"mesh": {"tp": 2}}),
        fault=clips_by(experts_of_first),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-of-own-shards",
        report="pytorch/pytorch#170862",
        symptom="clipping under FSDP2 takes the norm of this rank's shards",
        subject=Training(trainer=CLIPPED, strategy={"dense": "fsdp"}),
        fault=clips_by(of_this_rank),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-of-norms",
        report="laekov/fastmoe#65",
        symptom="norms of experts are summed over ranks where their squares should be",
        subject=Training(trainer=CLIPPED, ranks=4),
        fault=clips_by(sums_of_norms),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="no-clipping-in-a-pipeline",
        report="NVIDIA-NeMo/Automodel#576",
        symptom="clipping is left out under pipeline and tensor parallelism",
        subject=Training(trainer=CLIPPED, strategy={"mesh": {"pp": 2}}, model=NO_BALANCE),
        fault=Fault(run=_never_clipped),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="values-clipped-per-shard",
        report="meta-pytorch/torchrec#4388",
        symptom="clipping by value was not possible for shards, whose elements it treats one by one",
        subject=Training(
            trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, strategy={"replicas": 2}
        ),
        fault=Fault(run=_clipped_before_sum),
        doctor=("the gradient of",),
    ),
    Case(
        id="norm-on-a-rank-without-experts",
        report="NVIDIA-NeMo/Megatron-Bridge#852",
        symptom="some ranks have none of the parameters, and leave out a part of the norm's computation",
        subject=Training(trainer=CLIPPED, strategy={"placement": [[1, 0]] * 4}),
        fault=clips_by(of_holders),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norm-with-idle-experts",
        report="deepspeedai/DeepSpeed#8476",
        symptom="ranks whose experts were not used have no gradients of experts, and take another path for the norm",
        subject=Training(trainer=CLIPPED, module=Idle, model={"router": {"bias_update_rate": 0.001}}),
        fault=clips_by(of_busy_ranks),
        doctor=("clipped gradient", "whole model"),
    ),
    Case(
        id="norms-in-manual-optimization",
        report="Lightning-AI/pytorch-lightning#6328",
        symptom="gradient_clip_val does nothing under manual optimization, and who clips by hand does so on each rank",
        subject=Training(module=Manual, optimizers=2),
        fault=Fault(run=_each_for_itself),
        doctor=("step 1", "gradient"),
    ),
    Case(
        id="largest-element-as-norm",
        report="pytorch/pytorch#73405",
        symptom="an infinity norm needs a maximum over ranks, where others need a sum of powers",
        subject=Training(module=ByHand),
        refused=r"norm_type=inf is not computed over all ranks: use norm_type=2",
    ),
)
