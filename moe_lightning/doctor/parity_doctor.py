"""Parity doctor: a few steps of a distributed run compared with one process, and the first difference explained."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Annotated, Any

import lightning.pytorch as pl
from annotated_types import Interval
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from moe_lightning.compat import private_torch
from moe_lightning.config import PositiveInt, validated
from moe_lightning.doctor.comparison import Comparison, Parting, compare, merged
from moe_lightning.doctor.read_back import ReadBack
from moe_lightning.doctor.recorder import Recorder
from moe_lightning.doctor.reference import (
    Batches,
    follow,
    one_process_loader,
    pristine_copy,
    without_dropout,
)
from moe_lightning.errors import ConfigurationError, ParityError
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object
from moe_lightning.parallel.context import World
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

_LABEL = 10
_MOST_LISTED = 3


def sentence(comparison: Comparison, num_ranks: int) -> str:
    """Return the first difference: its place, size and likely cause."""
    first = comparison.partings[0]
    return f"parity fails at step {first.step}: {_what(first)} {_how(first)}: {_cause(comparison.partings, num_ranks)}"


def table(comparison: Comparison, num_ranks: int, remarks: Sequence[str] = ()) -> str:
    """The verdict, some lines."""
    notes = [("note", remark) for remark in remarks]
    if comparison.near_tie:
        notes.append(("note", f"two experts tie in {comparison.near_tie}, so nothing after it can be compared"))
    if not comparison.partings:
        steps = f"{comparison.steps} step{'s' if comparison.steps != 1 else ''}"
        same = f"{steps}, {comparison.tensors} tensors, largest difference {comparison.largest:.0e}: the same"
        return _lines([("doctor", same), *notes])
    first = comparison.partings[0]
    others = comparison.partings[1:]
    lines = [
        ("doctor", f"parity fails at step {first.step}"),
        ("first", _what(first)),
        ("values", _how(first)),
        ("cause", _cause(comparison.partings, num_ranks)),
    ]
    if others:
        listed = ", ".join(dict.fromkeys(_what(other) for other in others[:_MOST_LISTED]))
        lines.append(
            ("then", f"{listed}{f' and {len(others) - _MOST_LISTED} more' if len(others) > _MOST_LISTED else ''}")
        )
    return _lines([*lines, *notes])


def _lines(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<{_LABEL}}{text}" for label, text in lines)


_WHAT: dict[str, str] = {
    "loss": "the loss",
    "inputs": "the batch ({})",
    "activation": "the output of {}",
    "counts": "the assignments of {}",
    "counted tokens": "the tokens that are counted for the selection bias of {}",
    "selection bias": "the change of the selection bias of {}",
}


def _what(parting: Parting) -> str:
    return _WHAT.get(parting.kind, f"the {parting.kind} of {{}}").format(parting.name.partition(" [")[0])


def _how(parting: Parting) -> str:
    if parting.differing is not None:
        rank, other, norm, its_norm = parting.differing
        verb = "differ" if parting.kind in ("weights", "counted tokens") else "differs"
        return f"{verb} between ranks {rank} and {other} (norms {norm:.6g} and {its_norm:.6g})"
    if parting.kind == "inputs" and parting.here == parting.there:
        return f"is the same on ranks {parting.ranks[0]} and {parting.ranks[1]}"
    tells = parting.here != 0 and not math.isnan(parting.ratio) and abs(parting.ratio - 1) > 1e-3
    ratio = f", {parting.ratio:.4g} times that" if tells else ""
    where = f" in {len(parting.samples)} of {parting.total} samples" if parting.total > 1 else ""
    verb = "are" if parting.kind in ("counts", "weights", "counted tokens") else "is"
    return f"{verb} {parting.here:.6g} and in one process {parting.there:.6g}{ratio}{where}"


def _cause(partings: Sequence[Parting], num_ranks: int) -> str:
    first = partings[0]
    if math.isnan(first.here) and not math.isnan(first.there):
        return "a number that is none: overflow, or memory that was never written"
    alike = [p for p in partings if p.kind == first.kind]
    if first.kind == "weights" and first.differing is None:
        return (
            "one process has them as checkpoints do, from all ranks: they come together from other experts, layers or "
            f"shards than they are of{_all(alike)}"
        )
    if first.kind == "weights":
        return "copies of one tensor part before the step: one of them was not sent, or not updated"
    if first.kind == "inputs":
        on = _on(first)
        return f"{first.hint or 'other samples than in one process'}; look at the sampler and the seed{on}"
    if first.kind == "counts":
        return f"{first.hint}: tokens are dropped, doubled or counted on some ranks only"
    if first.kind == "activation":
        return _of_activation(first, num_ranks)
    if first.kind == "loss":
        return "all layers are the same, so the mean over ranks, a weight, or an auxiliary loss is not"
    if first.kind == "update":
        return _of_update(first)
    if first.kind == "counted tokens":
        return (
            "assignments were the same, so others are counted too (of padding, an evaluation, a dummy batch, an "
            f"earlier step), some twice (in a recomputation), or those of one rank alone{_all(alike)}"
        )
    if first.kind == "selection bias":
        return (
            "the counts were the same, so the bias is moved in other steps or layers, by another rate, or rounded"
            f"{_all(alike)}"
        )
    if first.kind == "clipped gradient":
        return f"gradients were the same before clipping, so the norm is not that of the whole model{_all(alike)}"
    return _of_gradient(first, alike, num_ranks)


def _of_activation(first: Parting, num_ranks: int) -> str:
    if 0 < len(first.ranks) < num_ranks and len(first.samples) < first.total:
        return f"what comes in is the same, and only samples{_on(first)} part: weights, dropout or rows of that rank"
    likely = "precision, eps, weights, or a sum over ranks"
    return f"what comes in is the same, but not what the layer makes of it ({first.hint}): {likely}"


def _of_gradient(first: Parting, alike: Sequence[Parting], num_ranks: int) -> str:
    if first.differing is not None:
        return f"ranks that share a tensor do not sum its gradient{_all(alike)}"
    if not first.here:
        return f"it never arrives: detached, or not sent back{_all(alike)}"
    ratio = first.ratio
    if not math.isnan(ratio) and abs(ratio + 1) < 0.01:
        return "the sign is wrong"
    if not math.isnan(ratio) and ratio > 1.5 and abs(ratio - round(ratio)) < 0.01 * ratio:
        of = f"{round(ratio)} ranks" if round(ratio) <= num_ranks else "ranks"
        return f"a sum over {of} stands where their mean is due, or it is summed twice{_all(alike)}"
    if not math.isnan(ratio) and 0 < ratio < 0.7 and abs(1 / ratio - round(1 / ratio)) < 0.01 / ratio:
        return f"it is divided by {round(1 / ratio)} once too often{_all(alike)}"
    likely = "parts of some ranks are lacking or come twice, or one term of the loss is weighed otherwise"
    later = ", or gradients of the step before are still in it" if first.step > 1 else ""
    return f"{likely}{later}{_all(alike)}"


def _of_update(first: Parting) -> str:
    if first.differing is not None:
        return "copies of one tensor are updated otherwise"
    if not first.here:
        return "the optimizer leaves it out"
    times = "" if math.isnan(first.ratio) else f" ({first.ratio:.4g} times the step)"
    if first.step > 1:
        return f"its gradient is the same, and so was the update before: moments, betas or a schedule{times}"
    return f"its gradient is the same: learning rate, weight decay, or another setting of its group{times}"


def _on(parting: Parting) -> str:
    ranks = ", ".join(map(str, parting.ranks))
    return f" of rank{'s' if len(parting.ranks) > 1 else ''} {ranks}" if ranks else ""


def _all(alike: Sequence[Parting]) -> str:
    return f" ({len(alike)} tensors alike)" if len(alike) > 1 else ""


_FLOAT32, _LOWER = 1e-4, 0.05
"""Tolerances: of float32, and of products in 16 bits."""


@validated
class ParityDoctor(Recorder):
    """Compares the first steps of a training on several ranks with the same steps in one process on rank 0, names the
    first layer, tensor and step that part, and ends the training.

    Each step of the reference begins with the weights of the run and takes the same samples. Under
    ExpertParallelStrategy it reads them itself; under stock strategies (one device, DDP) it takes what the ranks got,
    as micro-batches. Under manual optimization a batch is a step. Inputs, outputs of modules, assignments of experts,
    losses, gradients before and after clipping, and updates are compared by digests that add up over ranks. If all is
    the same, a checkpoint is written and read back into a state that was overwritten: weights, moments, schedules and
    the position of the data must return as they were. torch's own dropout is turned off meanwhile. Rank 0 needs room
    for a second copy of the whole model with its optimizer, and on the host for `steps` times its weights.

    Args:
        steps: to compare; fewer where the training, or under stock strategies its first epoch, ends before.
        tolerance: relative difference of digests that is the same; None: 1e-4, and 0.05 below 32 bits.

    Attributes:
        comparison: what was found; on other ranks than 0 only that the steps are the same. None before.

    Raises:
        ConfigurationError: steps below 1, a tolerance outside its range; when training starts: a strategy of another
            kind, precision=16-mixed, a run that changes its ranks or was resumed, or a loader that cannot be read in
            one process.
        ParityError: on every rank, the runs part.
    """

    def __init__(self, steps: PositiveInt = 3, tolerance: Annotated[float, Interval(gt=0, lt=1)] | None = None) -> None:
        super().__init__(tolerance or _FLOAT32)
        self._steps, self._tolerance = steps, tolerance
        self.comparison: Comparison | None = None
        self._copy: pl.LightningModule | None = None
        self._loader: Any = None
        self._states: list[dict[str, Tensor]] = []
        self._batches: list[Any] = []
        self._remarks: list[str] = []
        self._undo: list[Callable[[], None]] = []  # what restores the dropout and the least training
        self._is_own = False
        self._read_back: ReadBack | None = None

    # ------------------------------------------------------------------ before

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            self._copy = pristine_copy(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        _require_comparable(trainer)
        self._is_own = isinstance(strategy, ExpertParallelStrategy)
        self.world = strategy.world if self._is_own else World.before_setup(strategy.root_device)  # type: ignore[attr-defined]
        if isinstance(strategy, ExpertParallelStrategy):
            strategy.update.state_check.schedule.stop()  # it would end the run before they are explained
        loader = one_process_loader(trainer) if self._is_own else None
        self._loader = loader if trainer.is_global_zero else None
        is_low = "16" in str(trainer.precision)
        self.tolerance = self._tolerance or (_LOWER if is_low else _FLOAT32)
        self.comparison, self._states, self._batches = None, [], []
        without, loop = without_dropout(pl_module), trainer.fit_loop
        self._undo = [*without.values(), partial(_set_least, trainer, loop.min_epochs, loop.epoch_loop.min_steps)]
        self._remarks = [f"torch's dropout is off ({', '.join(without)}): each rank draws its own"] if without else []
        self.begin(trainer, pl_module)
        self._read_back = ReadBack(trainer)

    # ------------------------------------------------------------------ steps

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.comparison is not None:
            return
        if len(self._states) == len(self.notes):
            state = trainer.strategy.lightning_module_state_dict()
            self._states.append(
                {name: t.detach().to("cpu", copy=True) for name, t in state.items()} if self._copy else {}
            )
        if not self._is_own:
            host = private_torch.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch)
            for rank in range(self.world.size):
                told = broadcast_object(private_torch.tree_leaves(host), rank, self.world)
                if self._copy is not None:
                    self._batches.append(_like(host, told))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.comparison is not None:
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        done, is_last = len(self.notes), trainer.is_last_batch and not self._is_own
        if done == self._steps or done == trainer.max_steps or is_last:
            self._conclude(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.comparison is None and self.notes:
            self._conclude(trainer, pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.end()
        self._copy, self._loader, self._states, self._batches = None, None, [], []
        for undo in self._undo:
            undo()
        self._undo = []
        if isinstance(trainer.strategy, ExpertParallelStrategy):
            trainer.strategy.update.state_check.schedule.resume()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning calls none then

    # ------------------------------------------------------------------ after

    def _conclude(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Take the steps in one process, say on every rank where they part, and read a checkpoint back; collective."""
        self.end()
        verdict: list[Any] = [None, None]
        if self._copy is not None:
            try:
                self.comparison = self._compared(trainer)
            except Exception as error:
                # The others wait for a word.
                all_gather_json([f"the run in one process failed: {error}", None], self.world)
                raise
            parting = sentence(self.comparison, self.world.size) if self.comparison.partings else None
            print(table(self.comparison, self.world.size, self._remarks), flush=True)
            verdict = [None, parting]
        failure, parting = all_gather_json(verdict, self.world)[0]
        problem = failure or parting
        if problem is None:
            assert self._read_back is not None
            problem = self._read_back.first_change(trainer, module, self.world)
            if self._copy is not None:
                print(
                    _lines([("resume", problem or "a checkpoint of the last step is read back as it was")]), flush=True
                )
        if problem is not None:
            _end_without_traceback(self.world.rank)
            raise ParityError(problem)
        if self.comparison is None:
            self.comparison = Comparison(partings=(), steps=len(self.notes), tensors=0, largest=0.0)
        trainer.should_stop = True
        _set_least(trainer, None, None)

    def _compared(self, trainer: pl.Trainer) -> Comparison:
        assert self._copy is not None
        without_dropout(self._copy)
        notes, tolerance = self.notes, self.tolerance
        data = self._loader if self._is_own else Batches(self._batches)
        alone = follow(trainer, self._copy, self._states[: len(notes)], data, tolerance)
        return compare([merged(step) for step in notes], [merged(step) for step in alone], tolerance)


def _set_least(trainer: pl.Trainer, epochs: int | None, steps: int | None) -> None:
    """Set the least epochs and steps of a training, before which it does not stop."""
    trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = epochs, steps


def _end_without_traceback(rank: int) -> None:
    """Let a script that does not catch the error end with its sentence, written by one rank: the stack says nothing of
    the run that was examined, and would stand between the user and the verdict."""
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, ParityError):
            former(kind, error, trace)
        elif rank == 0:
            print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _like(batch: Any, leaves: list[Any]) -> Any:
    """Another rank's leaves in the shape of a batch."""
    left = iter(leaves)
    return private_torch.tree_map(lambda _: next(left), batch)


def _require_comparable(trainer: pl.Trainer) -> None:
    strategy = trainer.strategy
    if type(strategy) not in (DDPStrategy, SingleDeviceStrategy) and not isinstance(strategy, ExpertParallelStrategy):
        raise ConfigurationError(
            f"ParityDoctor cannot read whole tensors under {type(strategy).__name__}: use ExpertParallelStrategy, "
            "strategy='ddp' or one device"
        )
    if trainer.precision == "16-mixed":
        raise ConfigurationError(
            "ParityDoctor cannot repeat how 16-mixed scales losses: compare with precision=bf16-mixed or 32-true"
        )
    if isinstance(strategy, ExpertParallelStrategy) and strategy.worlds.is_elastic:
        raise ConfigurationError("ParityDoctor needs ranks that stay: set elastic.enabled=false for its run")
    if trainer.global_step:
        raise ConfigurationError(
            f"ParityDoctor compares a training's first steps, and this one resumes after step {trainer.global_step}: "
            "drop ckpt_path"
        )
