"""Batches, and means over them."""

from __future__ import annotations

from typing import Any

from benchmarks.silent.case import Case, Fault, Training
from benchmarks.silent.catalogue.tensor import documents_meet, weighs_ranks_alike
from benchmarks.silent.faults import replace
from benchmarks.silent.model import FewTokens, OneMore, PackedTokens, PaddedTokens, UnequalTokens
from moe_lightning.moe.randomness import SampleStream

KIND = "data and loss"

BIASED = {"router": {"bias_update_rate": 0.02, "score": "sigmoid"}}


def _padding_is_routed(trainer: Any, module: Any) -> None:
    replace(module.model, "forward", lambda own, ids, is_token=None, begins=None: own(ids, None, begins))


def _validation_times_ranks(trainer: Any, module: Any) -> None:
    replace(module, "loss", lambda own, batch: own(batch) * (1 if module.training else trainer.world_size))


def _empty_batches_count() -> None:
    def around(own: Any, stream: SampleStream, **place: Any) -> None:
        own(stream, **place)
        stream.is_dummy_batch = False

    replace(SampleStream, "advance", around)


def _same_samples(trainer: Any, module: Any) -> None:
    replace(
        trainer.strategy, "batch_to_device", lambda own, batch, *args, **kwargs: own(_first(batch), *args, **kwargs)
    )


def _first(batch: Any) -> Any:
    for leaf in batch:
        leaf[1:] = leaf[:1]
    return batch


CASES = (
    Case(
        id="micro-batches-of-unequal-targets",
        report="meta-pytorch/torchtune#1875",
        symptom="with accumulation the mean of means is not the mean over targets",
        subject=Training(batch_size=5, data=UnequalTokens, trainer={"accumulate_grad_batches": 3}),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss",),
    ),
    Case(
        id="ranks-of-unequal-targets",
        report="PrimeIntellect-ai/prime-rl#1960",
        symptom="a rank with few targets counts as much as one with many",
        subject=Training(data=UnequalTokens),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss",),
    ),
    Case(
        id="unequal-targets-in-micro-batches-of-ranks",
        report="pytorch/torchtitan#2206",
        symptom="losses are divided by the targets of a rank's micro-batch instead of those of the step",
        subject=Training(ranks=4, data=UnequalTokens, trainer={"accumulate_grad_batches": 2}, strategy={"replicas": 2}),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss",),
    ),
    Case(
        id="samples-that-ranks-do-not-divide",
        report="huggingface/transformers#608",
        symptom="13 samples are 7 and 6 on two ranks, whose means count alike",
        subject=Training(batch_size=7),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss",),
    ),
    Case(
        id="ranks-without-samples",
        report="pytorch/pytorch#42577",
        symptom="ranks that have run out of samples take part in the collectives of the others, and must add nothing",
        subject=Training(data=OneMore, model=BIASED),
        fault=Fault(process=_empty_batches_count),
        doctor=("the assignments of", "step 3", "doubled"),
    ),
    Case(
        id="fewer-samples-than-ranks",
        report="pytorch/pytorch#67253",
        symptom="ranks with other numbers of samples are averaged as if they had the same",
        subject=Training(ranks=4, batch_size=3),
        refused="leaves 3 samples for 4 ranks; set it to at least 4",
    ),
    Case(
        id="short-last-batch",
        report="keras-team/keras#20241",
        symptom="with accumulation the short last batch of an epoch counts as a full one",
        subject=Training(data=FewTokens, trainer={"accumulate_grad_batches": 2}),
        fault=Fault(run=weighs_ranks_alike),
        doctor=("the loss", "step 3"),
    ),
    Case(
        id="documents-see-each-other",
        report="huggingface/nanoVLM#204",
        symptom="a packed document attends to those before it, and its positions do not begin at zero",
        subject=Training(data=PackedTokens),
        fault=Fault(run=documents_meet),
        doctor=("the output of", "step 1"),
    ),
    Case(
        id="padding-reaches-experts",
        report="AI-Hypercomputer/maxtext#3699",
        symptom="padded rows are not masked inside the experts, and give biases a gradient",
        subject=Training(data=PaddedTokens),
        fault=Fault(run=_padding_is_routed),
        doctor=("step 1", "router"),
    ),
    Case(
        id="validation-times-ranks",
        report="huggingface/transformers#48167",
        symptom="the validation loss is as many times too large as ranks share a sequence",
        subject=Training(validates=True, strategy={"mesh": {"cp": 2}}, data=UnequalTokens),
        fault=Fault(run=_validation_times_ranks),
        beyond="validations are off in its run",
    ),
    Case(
        id="samples-come-twice",
        report="k2-fsa/icefall#1616",
        symptom="all ranks get the same batches, because nothing tells the sampler of them",
        subject=Training(),
        fault=Fault(run=_same_samples),
        doctor=("the batch", "comes twice"),
    ),
)
