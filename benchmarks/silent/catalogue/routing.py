"""Gradients of the router through its weights and through auxiliary losses, and the state of routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Case, Fault, Training
from benchmarks.silent.faults import at_backward, replace
from benchmarks.silent.model import Biased, PaddedTokens, Poisoned, PoisonedTokens, Recomputed, RecomputedReentrant
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.moe.randomness import SampleStream

KIND, STATE = "router gradients", "routing state"
ACCUMULATED = {"accumulate_grad_batches": 3}
BALANCED = {"router": {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}}
BIASED = {"router": {"bias_update_rate": 0.02, "score": "sigmoid", "aux_loss_coef": 0.0}}
FORCED = {"router": {"forced": {"kind": "zipf", "exponent": 1.0}}}
SLOW = {"router": {"bias_update_rate": 0.001, "score": "sigmoid", "aux_loss_coef": 0.0}}


def _routed(change: Callable[[Any, MoELayer], Any]) -> Fault:
    """Change what routers decide, given (routing, layer)."""

    def run(trainer: Any, module: Any) -> None:
        for layer in moe_layers(module):

            def around(own: Any, *args: Any, _layer: MoELayer = layer, **kwargs: Any) -> Any:
                return change(own(*args, **kwargs), _layer)

            replace(layer.router, "forward", around)

    return Fault(run=run)


def _weighed(change: Callable[[Tensor, Any, MoELayer], Tensor]) -> Fault:
    """Change the gradient of the routers' weights, given (gradient, routing, layer)."""

    def changed(routing: Any, layer: MoELayer) -> Any:
        if routing.weights_TK.requires_grad:
            routing.weights_TK.register_hook(lambda gradient: change(gradient, routing, layer))
        return routing

    return _routed(changed)


def _detached(routing: Any, layer: MoELayer) -> Any:
    return dataclasses.replace(routing, weights_TK=routing.weights_TK.detach())


def _of_own_experts(gradient: Tensor, routing: Any, layer: MoELayer) -> Tensor:
    is_here: Tensor = torch.isin(routing.expert_ids_TK, torch.tensor(layer.experts.slot_experts))
    return gradient * is_here


def _of_empty_places(gradient: Tensor, routing: Any, layer: MoELayer) -> Tensor:
    is_empty: Tensor = routing.expert_ids_TK < 0
    return gradient + is_empty * gradient.abs().mean() * torch.tensor([1.0, -1.0])


def _auxiliary(change: Callable[[Tensor], Tensor]) -> Fault:
    def run(trainer: Any, module: Any) -> None:
        def changed(layer: Any, arguments: Any, output: Any) -> None:
            if layer.auxiliary_loss is not None:
                layer.auxiliary_loss = change(layer.auxiliary_loss)

        for layer in moe_layers(module):
            layer.register_forward_hook(changed)

    return Fault(run=run)


def _with_counts_of_earlier_micro_batches(trainer: Any, module: Any) -> None:
    """Assignments are summed over the micro-batches of a step, and divided by the tokens of the present one."""
    for layer in moe_layers(module):
        counts: list[Tensor] = []

        def around(own: Any, routing: Any, tokens_NE: Tensor, mask: Any, _counts: list[Tensor] = counts) -> Any:
            if len(_counts) == trainer.accumulate_grad_batches:
                _counts.clear()
            _counts.append(tokens_NE)
            total_NE = torch.stack(_counts).sum(0)
            return own(routing, total_NE, mask) * (total_NE.sum() / tokens_NE.sum() / len(_counts))

        replace(layer, "_auxiliary_loss", around)


def _local_counts(trainer: Any, module: Any) -> None:
    for layer in moe_layers(module):
        layer.router.config = dataclasses.replace(layer.router.config, aux_loss_scope="local")


def _padding_in_means(trainer: Any, module: Any) -> None:
    for layer in moe_layers(module):
        replace(layer, "_real_tokens", lambda own, *args: None)


def _count_evaluation(trainer: Any, module: Any) -> None:
    def counted(layer: Any, arguments: Any, output: Any) -> None:
        if not layer.training:
            layer.router.count_for_bias(layer.statistics.tokens_NE.sum(0))

    for layer in moe_layers(module):
        layer.register_forward_hook(counted)


def _count_again(trainer: Any, module: Any) -> None:
    for layer in moe_layers(module):

        def around(own: Any, tokens_NE: Tensor, *, is_again: bool, _layer: Any = layer) -> None:
            _layer.router.count_for_bias(tokens_NE.sum(0))

        replace(layer, "_count_for_bias", around)


def _update_every_micro_batch(trainer: Any, module: Any, is_last: bool) -> None:
    for layer in moe_layers(module) if not is_last else ():
        layer.router.update_bias()


def _update_first_layer(trainer: Any, module: Any) -> None:
    for layer in moe_layers(module)[1:]:
        layer.router.update_bias = layer.router.forget_counts  # type: ignore[method-assign]


def _bias_in_bfloat16(trainer: Any, module: Any) -> None:
    for layer in moe_layers(module):
        router: Any = layer.router

        def around(own: Any, _router: Any = router) -> None:
            own()
            _router.expert_bias_E.copy_(_router.expert_bias_E.bfloat16().float())

        replace(router, "update_bias", around)


def _counted(change: Callable[[Tensor, Any], Tensor]) -> Fault:
    """Change what is counted for the selection bias, given (counts over all ranks, routing of this rank)."""

    def run(trainer: Any, module: Any) -> None:
        for layer in moe_layers(module):
            last: dict[str, Any] = {}

            def forward(own: Any, x: Tensor, mask: Any = None, _last: dict[str, Any] = last) -> Any:
                with torch.no_grad():
                    _last["all"] = own(x, None).tokens_per_expert_E
                _last["routing"] = own(x, mask)
                return _last["routing"]

            def count(own: Any, counts_E: Tensor, _last: dict[str, Any] = last) -> None:
                own(change(counts_E, _last))

            replace(layer.router, "forward", forward)
            replace(layer.router, "count_for_bias", count)

    return Fault(run=run)


def _with_padding(counts_E: Tensor, last: Any) -> Tensor:
    total: Tensor = last["all"].clone()
    dist.all_reduce(total)
    return total


def _of_this_rank(counts_E: Tensor, last: Any) -> Tensor:
    found: Tensor = last["routing"].tokens_per_expert_E
    return found


def _same_places() -> None:
    """Tokens are numbered from zero on every rank."""

    def around(own: Any, stream: SampleStream, *, first_sample: int, **rest: Any) -> None:
        own(stream, first_sample=0, **rest)

    replace(SampleStream, "advance", around)


def _counts_stay(trainer: Any, module: Any) -> None:
    for layer in moe_layers(module):
        layer.router.forget_counts = lambda: None  # type: ignore[method-assign]


CASES = (
    Case(
        id="router-detached-from-the-loss",
        report="NVIDIA-NeMo/Automodel#2995",
        symptom="routing weights pass a gather without a gradient: the router learns from auxiliary losses alone",
        subject=Training(),
        fault=_routed(_detached),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="router-gradient-of-own-experts",
        report="huggingface/transformers#48205",
        symptom="each rank's gradient of the scores covers its own experts, and the parts are never summed",
        subject=Training(),
        fault=_weighed(_of_own_experts),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="router-gradient-of-empty-places",
        report="huggingface/transformers#48687",
        symptom="places that hold no assignment give the router a gradient, but count for nothing in the loss",
        subject=Training(data=PaddedTokens),
        fault=_weighed(_of_empty_places),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="balance-loss-without-gradient",
        report="NVIDIA-NeMo/Automodel#1408",
        symptom="the balancing loss is logged, but its gradient never reaches the router",
        subject=Training(model=BALANCED),
        fault=_auxiliary(lambda loss: loss.detach()),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="balance-loss-of-each-micro-batch",
        report="NVIDIA-NeMo/Automodel#3359",
        symptom="the balancing loss enters every micro-batch undivided, and weighs as often as gradients accumulate",
        subject=Training(model=BALANCED, trainer=ACCUMULATED),
        fault=_auxiliary(lambda loss: 3 * loss),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-of-unequal-micro-batches",
        report="NVIDIA/Megatron-LM#7213",
        symptom="counts of all micro-batches so far are divided by the tokens of the present one",
        subject=Training(model={"router": {"aux_loss_coef": 0.1}}, data=PaddedTokens, trainer=ACCUMULATED),
        fault=Fault(run=_with_counts_of_earlier_micro_batches),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-times-tensor-ranks",
        report="NVIDIA/Megatron-LM#5047",
        symptom="balancing and z losses are scaled by a number of tokens that depends on the tensor-parallel size",
        subject=Training(model=BALANCED, strategy={"mesh": {"tp": 2}}),
        fault=_auxiliary(lambda loss: loss / 2),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-of-own-counts",
        report="NVIDIA/Megatron-LM#3768",
        symptom="variants of the balancing loss, over ranks or over the batch, push with different strength",
        subject=Training(model=BALANCED),
        fault=Fault(run=_local_counts),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-times-tokens",
        report="verl-project/verl#6609",
        symptom="under context parallelism gradients of balancing and z losses lack the division by tokens",
        subject=Training(model=BALANCED, strategy={"mesh": {"cp": 2}}),
        fault=_auxiliary(lambda loss: 64 * loss),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-counts-padding",
        report="NVIDIA/Megatron-LM#2121",
        symptom="padding counts in the means of the balancing and z losses",
        subject=Training(model=BALANCED, data=PaddedTokens),
        fault=Fault(run=_padding_in_means),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-counts-padding-of-tensor-ranks",
        report="NVIDIA/Megatron-LM#7452",
        symptom="with padding under sequence parallelism a local count becomes a global one, and the gradient doubles",
        subject=Training(model=BALANCED, data=PaddedTokens, strategy={"mesh": {"tp": 2}}),
        fault=_auxiliary(lambda loss: 2 * loss),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-counts-padding-of-sequence-parts",
        report="modelscope/ms-swift#10181",
        symptom="padding of sequences that are split over ranks enters the balancing loss, and real tokens leave it",
        subject=Training(model=BALANCED, data=PaddedTokens, strategy={"mesh": {"cp": 2}}),
        fault=Fault(run=_padding_in_means),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="balance-loss-added-twice",
        report="modelscope/ms-swift#5375",
        symptom="the model adds the balancing loss to its own, and the trainer adds it again",
        subject=Training(model=BALANCED, strategy={"dense": "fsdp"}),
        fault=_auxiliary(lambda loss: 2 * loss),
        doctor=("the loss", "auxiliary loss"),
    ),
    Case(
        id="z-loss-without-gradient",
        report="NVIDIA/Megatron-LM#1652",
        symptom="the z-loss is divided by tokens that were counted already, and hardly reaches the router",
        subject=Training(model={"router": {"aux_loss_coef": 0.0, "z_loss_coef": 0.1}}, strategy={"mesh": {"cp": 2}}),
        fault=_auxiliary(lambda loss: loss.detach() + 0.02 * (loss - loss.detach())),
        doctor=("the gradient of", "router"),
    ),
    Case(
        id="bias-counts-evaluation",
        kind=STATE,
        report="pytorch/torchtitan#4148",
        symptom="tokens of a validation leak into the next update of the selection bias",
        subject=Training(model=BIASED, validates=True),
        fault=Fault(run=_count_evaluation),
        doctor=("counted for the selection bias", "step 2", "an evaluation"),
    ),
    Case(
        id="bias-counts-recomputation",
        kind=STATE,
        report="pytorch/torchtitan#1593",
        symptom="tokens are counted twice where a layer is computed again in the backward pass",
        subject=Training(model=BIASED, module=Recomputed),
        fault=Fault(run=_count_again),
        doctor=("counted for the selection bias", "2 times that", "recomputation"),
    ),
    Case(
        id="bias-counts-reentrant-recomputation",
        kind=STATE,
        report="NVIDIA-NeMo/Automodel#3247",
        symptom="a replay of the layer adds to its cumulative load a second time",
        subject=Training(model=BIASED, module=RecomputedReentrant),
        fault=Fault(run=_count_again),
        doctor=("counted for the selection bias", "2 times that", "recomputation"),
    ),
    Case(
        id="bias-moves-every-micro-batch",
        kind=STATE,
        report="pytorch/torchtitan#1304",
        symptom="the selection bias moves with every micro-batch of a step instead of once",
        subject=Training(model=BIASED, trainer=ACCUMULATED),
        fault=at_backward(_update_every_micro_batch),
        doctor=("router", "step 1"),
    ),
    Case(
        id="bias-of-some-layers",
        kind=STATE,
        report="pytorch/torchtitan#3686",
        symptom="a layer without a bias ends the loop, so the layers behind it are never balanced",
        subject=Training(model=BIASED),
        fault=Fault(run=_update_first_layer),
        doctor=("router", "step 1"),
    ),
    Case(
        id="bias-in-bfloat16",
        kind=STATE,
        report="PrimeIntellect-ai/prime-rl#3411",
        symptom="a selection bias in bfloat16 loses its small steps",
        subject=Training(model=SLOW, module=Biased),
        fault=Fault(run=_bias_in_bfloat16),
        doctor=("router", "step 1"),
    ),
    Case(
        id="bias-counts-padding",
        kind=STATE,
        report="NVIDIA/Megatron-LM#4776",
        symptom="padding counts as load when the selection bias is updated",
        subject=Training(model=BIASED, data=PaddedTokens),
        fault=_counted(_with_padding),
        doctor=("router", "step 1"),
    ),
    Case(
        id="bias-of-own-counts",
        kind=STATE,
        report="pytorch/torchtitan#1114",
        symptom="counts that are not summed over ranks give each rank another bias",
        subject=Training(model=BIASED),
        fault=_counted(_of_this_rank),
        doctor=("router", "step 1"),
    ),
    Case(
        id="forced-routing-by-rank",
        kind=STATE,
        report="vllm-project/afd-plugin#156",
        symptom="a forced routing begins with the same experts on every rank",
        subject=Training(model=FORCED, reference="one rank"),
        fault=Fault(process=_same_places),
        doctor=("the output of", "router", "only samples of rank 1"),
    ),
    Case(
        id="bias-counts-a-skipped-step",
        kind=STATE,
        report="marin-community/levanter#973",
        symptom="a step that is skipped for its loss still changes state beside the weights",
        subject=Training(model=BIASED, module=Poisoned, data=PoisonedTokens, strategy={"stop_on_nan": "skip"}),
        fault=Fault(run=_counts_stay),
        doctor=("the change of the selection bias", "step 2", "other steps"),
    ),
)
