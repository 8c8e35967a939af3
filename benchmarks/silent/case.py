"""A case of the catalogue: a small training, the public report that it follows, and the fault of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.silent.model import Language, Tokens

KINDS = (
    "norm and clipping",
    "sums of gradients",
    "tensor parallelism",
    "router gradients",
    "routing state",
    "grouped products",
    "data and loss",
    "saving and resuming",
    "export",
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest differences that orders of summation explain.

    Attributes:
        loss: absolute, law L1.
        gradient: of an element, relative to the largest one of its tensor; also of moments.
        norm: relative.
        parameter: absolute.
    """

    loss: float = 1e-5
    gradient: float = 1e-4
    norm: float = 1e-5
    parameter: float = 1e-5


BFLOAT16 = Limits(loss=0.02, gradient=0.1, norm=0.03, parameter=0.02)
"""Of products in bfloat16, whose rounding depends on the rows beside."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Three steps, a checkpoint, and three more steps of a new Trainer that resumes from it.

    Attributes:
        ranks: processes.
        strategy: options of ExpertParallelStrategy.
        trainer: options of the Trainer.
        model: options of the GPT, beside those of `model.TINY`.
        module: builds the module of these.
        data: its samples.
        batch_size: samples of a micro-batch over all ranks.
        shuffles: in another order in every epoch; plain PyTorch has another one.
        resumed_ranks, resumed_strategy, resumed_model: of the training that resumes; None: as before.
        callbacks: further ones.
        optimizers: that the module has.
        validates: a validation after every step.
        reference: "plain": a loop of plain PyTorch with experts one by one; "one rank": ours on one.
    """

    ranks: int = 2
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    module: Callable[..., pl.LightningModule] = Language
    data: Callable[[], Dataset[Any]] = Tokens
    batch_size: int = 8
    shuffles: bool = False
    resumed_ranks: int | None = None
    resumed_strategy: Mapping[str, Any] | None = None
    resumed_model: Mapping[str, Any] | None = None
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple
    optimizers: int = 1
    validates: bool = False
    reference: str = "plain"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return int(self.trainer.get("accumulate_grad_batches", 1))


@dataclass(frozen=True, kw_only=True)
class Check:
    """Tensors by name that this project computes, and the same by arithmetic.

    Attributes:
        ranks: processes that call the function.
        function: (rank) -> (found, expected); those of rank 0 are compared, and an assertion on any rank fails.
    """

    ranks: int = 1
    function: Callable[[int], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault as in the report, put into the processes of a run.

    Attributes:
        process: changes code, before the Trainer is built.
        run: changes objects of a run, when its training starts.
    """

    process: Callable[[], object] | None = None
    run: Callable[[pl.Trainer, Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One report, tried here.

    Attributes:
        id: short name.
        kind: one of `KINDS`; empty: `KIND` of its module.
        report: repository#number, read at its source.
        symptom: what happened there, in our words.
        subject: what is run.
        fault: that of the report, which the comparison must see; None for a refused combination.
        doctor: words that the parity doctor's sentence must have under the fault; empty: it is out of its reach.
        beyond: why it is; empty: `BEYOND` of its module, if it has one.
        refused: words of the sentence that refuses the combination; empty: it runs.
        limits: see `Limits`.
    """

    id: str
    kind: str = ""
    report: str
    symptom: str
    subject: Training | Check
    fault: Fault | None = None
    doctor: tuple[str, ...] = ()
    beyond: str = ""
    refused: str = ""
    limits: Limits = Limits()
