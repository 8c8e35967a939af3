"""A case's training on the ranks of a world, and what its hooks and checkpoints give."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Sequence
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
from moe_lightning import ExpertParallelStrategy
from moe_lightning.compat import private_lightning
from moe_lightning.doctor.recorder import blocks
from moe_lightning.errors import ParityError
from moe_lightning.state.tensors import local
from moe_lightning.user_errors import sentence_of

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
    """Keeps losses, norms and gradients of this rank, saves a checkpoint, and ends the training with it.

    Args:
        last: step with which it ends.
        path: of the checkpoint.
    """

    def __init__(self, last: int, path: str) -> None:
        self._last, self._path = last, path
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[list[Piece]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at gradients when the backward pass of a step has ended: a hook of Lightning's between that and the
        update would let the strategy compare gradients, which is for modules that change them.
        """

        def around(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            if not private_lightning.is_accumulating(trainer):
                self.gradients.append(_gradients(trainer, pl_module))
            return result

        replace(trainer.strategy, "backward", around)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if len(self.losses) == trainer.global_step or private_lightning.is_accumulating(trainer):
            return
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        norm = trainer.strategy.last_gradient_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.norms.append(float(norm))
        if trainer.global_step == self._last:
            trainer.save_checkpoint(self._path)
            trainer.should_stop = True


def _gradients(trainer: pl.Trainer, module: pl.LightningModule) -> list[Piece]:
    pieces: list[Piece] = []
    for block in blocks(trainer, module):
        gradient = block.parameter.grad
        whole = torch.zeros_like(local(block.parameter)) if gradient is None else local(gradient)
        pieces.append((block.name, tuple(block.offsets), block.of(whole).detach().clone()))
    return pieces


def train(
    rank: int, size: int, training: Training, fault: Fault | None, folder: str, resumes: bool, doctor: Any = None
) -> dict[str, Any]:
    """Train on a rank of a world for `STEPS` steps, from the beginning or from the checkpoint of these.

    Args:
        doctor: examines the training, which then is not recorded.
    """
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "NODE_RANK": "0"},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch.*")
    if fault is not None and fault.process is not None:
        fault.process()
    paths = [f"{folder}/{last}.ckpt" for last in (STEPS, 2 * STEPS)]
    observer = Observer(STEPS * (1 + resumes), paths[resumes])
    seeds = [Seed(fault)] if fault is not None else []
    pl.seed_everything(7, verbose=False)
    options = training.resumed_strategy if resumes and training.resumed_strategy is not None else training.strategy
    flags: dict[str, Any] = dict(training.trainer)
    if training.validates:
        flags["val_check_interval"] = training.micro_batches
    trainer = pl.Trainer(
        strategy=ExpertParallelStrategy(**options),
        plugins=[LightningEnvironment()],
        accelerator="cpu",
        devices=size,
        max_steps=2 * STEPS,
        callbacks=[*seeds, *training.callbacks(), observer if doctor is None else doctor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **flags,
    )
    module = training.module(training.model)
    loader = DataLoader(training.data(), batch_size=training.batch_size)
    held_out = DataLoader(training.data(), batch_size=6) if training.validates else None
    trainer.fit(module, loader, held_out, ckpt_path=paths[0] if resumes else None)
    return {"losses": observer.losses, "norms": observer.norms, "gradients": observer.gradients}


def observed(rank: int, size: int, id: str, is_faulty: bool, folder: str, resumes: bool) -> dict[str, Any]:
    """Run a phase of a case on a rank; a user's mistake is its sentence."""
    case = _case(id)
    try:
        return train(rank, size, case.subject, case.fault if is_faulty else None, folder, resumes)
    except Exception as error:
        told = sentence_of(error)
        if told is None and not is_faulty:
            raise
        return {"refused": told or f"{type(error).__name__}: {error}"}


def diagnosed(rank: int, size: int, id: str, folder: str) -> str:
    """Return what the parity doctor says of a faulty run; empty if it finds nothing."""
    from moe_lightning import ParityDoctor

    case = _case(id)
    try:
        with redirect_stdout(io.StringIO()):
            train(rank, size, case.subject, case.fault, folder, False, ParityDoctor())
    except ParityError as error:
        return str(error)
    except Exception as error:
        return f"({sentence_of(error) or type(error).__name__})"
    return ""


def _case(id: str) -> Any:
    from benchmarks.silent.catalogue import CASES

    return CASES[id]


def whole_run(phases: Sequence[Sequence[dict[str, Any]]], folder: Path, names: Sequence[str]) -> Run:
    """Join what the ranks saw in both phases.

    Args:
        names: of the optimizer's parameters.
    """
    run = Run()
    for phase in phases:
        run.losses += phase[0]["losses"]
        run.norms += phase[0]["norms"]
        for rank, seen in enumerate(phase):
            if seen["losses"] != phase[0]["losses"]:
                run.unlike.append(f"losses of ranks 0 and {rank}")
            if seen["norms"] != phase[0]["norms"]:
                run.unlike.append(f"norms of ranks 0 and {rank}")
        for step in range(min(len(seen["gradients"]) for seen in phase)):
            run.gradients.append(_joined([seen["gradients"][step] for seen in phase], run.unlike))
    for last in (STEPS, 2 * STEPS):
        path = folder / f"{last}.ckpt"
        if path.exists():
            run.snapshots.append(Snapshot.of(torch.load(path, weights_only=False), names))
    return run


def _joined(ranks: Sequence[Sequence[Piece]], unlike: list[str]) -> dict[str, Tensor]:
    pieces: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for rank, held in enumerate(ranks):
        for name, offsets, values in held:
            first = pieces.setdefault(name, {}).setdefault(offsets, values)
            if not torch.equal(first, values):
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
