"""A case's training on the ranks of a world, and what its hooks and checkpoints give."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.silent.case import Fault, Training
from benchmarks.silent.comparison import Run, Snapshot
from benchmarks.silent.faults import replace
from benchmarks.silent.ranks import describe_rank
from moe_lightning import ExpertParallelStrategy, MoELayer
from moe_lightning.compat import private_lightning
from moe_lightning.doctor.recorder import blocks
from moe_lightning.errors import ParityError
from moe_lightning.state.tensors import local

STEPS = 3
"""Before the checkpoint, and again after the resume."""

Piece = tuple[str, tuple[int, ...], Tensor]
"""Of a gradient: name of the whole, where it begins, values."""


class Seed(pl.Callback):
    """Puts a fault into the objects of a run."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fault.run is not None:
            self._fault.run(trainer, pl_module)


class Observer(pl.Callback):
    """Keeps losses, norms and gradients of this rank, saves checkpoints, and ends the training with the last.

    Args:
        paths: of the checkpoints, by the step that they follow.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._paths = paths
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validations: list[float] = []
        self.gradients: list[list[Piece]] = []
        self._has_begun = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at gradients when the backward pass of a step has ended: a hook of Lightning's between that and the
        update would let the strategy compare gradients, which is for modules that change them.
        """

        def around(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            if not private_lightning.is_accumulating(trainer):
                del self.gradients[len(self.gradients) - self._has_begun :]  # of an earlier pass of the same step
                self.gradients.append(_gradients(trainer, pl_module))
                self._has_begun = True
            return result

        replace(trainer.strategy, "backward", around)

    def found(self) -> dict[str, Any]:
        """What this rank has seen."""
        lists = {"losses": self.losses, "norms": self.norms, "validations": self.validations}
        return lists | {"gradients": self.gradients}

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validations.append(float(trainer.callback_metrics["val/loss"]))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._has_begun = False
        step = trainer.global_step // len(trainer.optimizers)
        if len(self.losses) == step or private_lightning.is_accumulating(trainer):
            return
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        norm = trainer.strategy.last_gradient_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.norms.append(float(norm))
        if step in self._paths:
            trainer.save_checkpoint(self._paths[step])
            trainer.should_stop = step == max(self._paths)


def _gradients(trainer: pl.Trainer, module: pl.LightningModule) -> list[Piece]:
    pieces: list[Piece] = []
    for block in blocks(trainer, module):
        gradient = block.parameter.grad
        whole = torch.zeros_like(local(block.parameter)) if gradient is None else local(gradient)
        pieces.append((block.name, tuple(block.offsets), block.of(whole).detach().clone()))
    for name, layer in module.named_modules():
        if isinstance(layer, MoELayer) and layer.router.config.bias_update_rate:
            counts: Any = layer.router.unbalanced_tokens_E  # type: ignore[attr-defined]
            pieces.append((f"counts of {name}", (0,), counts.float()))
    return pieces


def train(
    rank: int,
    size: int,
    training: Training,
    callbacks: Sequence[pl.Callback],
    *,
    strategy: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    ckpt_path: str | None = None,
) -> None:
    """Train on a rank of a world, from the beginning or from a checkpoint."""
    describe_rank(rank, size)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch.*")
    pl.seed_everything(7, verbose=False)
    flags: dict[str, Any] = dict(training.trainer)
    if training.validates:
        flags["val_check_interval"] = training.micro_batches
    unchecked = {"check_state_every": 0}  # the check ends a run whose replicas differ before they are compared here
    trainer = pl.Trainer(
        strategy=ExpertParallelStrategy(**unchecked | dict(training.strategy if strategy is None else strategy)),
        plugins=[LightningEnvironment(), *flags.pop("plugins", ())],
        accelerator="cpu",
        devices=size,
        max_steps=2 * STEPS * training.optimizers,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **flags,
    )
    loader = DataLoader(training.data(), batch_size=training.batch_size, shuffle=training.shuffles)
    held_out = DataLoader(training.data(), batch_size=6) if training.validates else None
    trainer.fit(training.module(training.model if model is None else model), loader, held_out, ckpt_path=ckpt_path)


def observed(rank: int, size: int, id: str, is_faulty: bool, folder: str, resumes: bool) -> dict[str, Any]:
    """Run a phase of a case on a rank, from the beginning or from the checkpoint."""
    case = _case(id)
    training, paths = case.subject, _paths(folder)
    last = STEPS * (1 + resumes)
    observer = Observer({last: paths[last]})
    later: dict[str, Any] = {"strategy": training.resumed_strategy, "model": training.resumed_model}
    later["ckpt_path"] = paths[STEPS]
    seeds = _seeds(case) if is_faulty else []
    callbacks = [*seeds, *training.callbacks(), observer]
    train(rank, size, training, callbacks, **(later if resumes else {}))
    return observer.found()


def unbroken(rank: int, size: int, id: str, folder: str) -> dict[str, Any]:
    """Run both phases of a case in one training on one rank, without its callbacks."""
    training, observer = _case(id).subject, Observer(_paths(folder))
    train(rank, size, training, [observer], strategy={})
    return observer.found()


def diagnosed(rank: int, size: int, id: str, is_faulty: bool) -> str:
    """Return what the parity doctor says of a run; empty if it finds nothing."""
    from moe_lightning import ParityDoctor

    case = _case(id)
    seeds = _seeds(case) if is_faulty else []
    try:
        with redirect_stdout(io.StringIO()):
            train(rank, size, case.subject, [*seeds, *case.subject.callbacks(), ParityDoctor()])
    except ParityError as error:
        return str(error)
    return ""


def _paths(folder: str) -> dict[int, str]:
    return {step: f"{folder}/{step}.ckpt" for step in (STEPS, 2 * STEPS)}


def _seeds(case: Any) -> list[pl.Callback]:
    if case.fault.process is not None:
        case.fault.process()
    return [Seed(case.fault)]


def _case(id: str) -> Any:
    from benchmarks.silent.catalogue import case_named

    return case_named(id)


def whole_run(phases: Sequence[Sequence[dict[str, Any]]], folder: Path, names: Sequence[Sequence[str]]) -> Run:
    """Join what the ranks saw in both phases.

    Args:
        names: of each optimizer's parameters.
    """
    run = Run()
    for phase in phases:
        run.losses += phase[0]["losses"]
        run.norms += phase[0]["norms"]
        run.validations += phase[0]["validations"]
        for rank, seen in enumerate(phase):
            for what in ("losses", "norms", "validations"):
                if str(seen[what]) != str(phase[0][what]):
                    run.unlike.append(f"{what} of ranks 0 and {rank}")
        for step in range(min(len(seen["gradients"]) for seen in phase)):
            run.gradients.append(_joined([seen["gradients"][step] for seen in phase], run.unlike))
    for path in map(Path, _paths(str(folder)).values()):
        if path.exists():
            run.snapshots.append(Snapshot.of(torch.load(path, weights_only=False), names))
    return run


def _joined(ranks: Sequence[Sequence[Piece]], unlike: list[str]) -> dict[str, Tensor]:
    pieces: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for rank, held in enumerate(ranks):
        for name, offsets, values in held:
            first = pieces.setdefault(name, {}).setdefault(offsets, values)
            if not torch.equal(first.nan_to_num(), values.nan_to_num()):
                unlike.append(f"gradient of {name} on rank {rank}")
    found = {}
    for name, by_place in pieces.items():
        shape = [
            max(offsets[dim] + values.shape[dim] for offsets, values in by_place.items())
            for dim in range(next(iter(by_place.values())).ndim)
        ]
        whole = next(iter(by_place.values())).new_zeros(shape)
        for offsets, values in by_place.items():
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))] = values
        found[name] = whole
    return found
