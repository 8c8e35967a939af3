"""Random single-bit flips in the memory of a training: noticed, repaired, and what looking for them costs.

Every second step of a small training gets one flip, on a random rank, in a random unit of its state or, in a step, in a
gradient that other ranks hold as well; bits below the fourth are left out as rounding. A flip between two steps is to
be noticed before the next one uses it, one in a step before the update. It counts as repaired if its bits are as before
then. In the steps between no alarm may come. Costs are those of one run that checks ten steps, and then ten not.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measuring import goal
from benchmarks.silent.model import Language, Tokens
from benchmarks.silent.ranks import describe_rank, run_ranks
from moe_lightning import ExpertParallelStrategy, FaultRecovery
from moe_lightning.cli.short_training import quiet_trainer
from moe_lightning.errors import StateDamagedError
from moe_lightning.state.sums import BITS, GRADIENT, StateUnit, gradient_units
from moe_lightning.text_table import table

MESHES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "ddp, one replica": (2, {"replicas": 1}),
    "ddp, two replicas": (2, {"replicas": 2}),
    "zero1": (2, {"dense": "zero1", "replicas": 2}),
    "fsdp": (2, {"dense": "fsdp"}),
    "hsdp": (4, {"dense": "hsdp", "shard_size": 2, "replicas": 2}),
    "tp": (4, {"mesh": {"tp": 2}, "replicas": 2}),
    "pp": (4, {"mesh": {"pp": 2}, "replicas": 2}),
    "pp, one replica": (2, {"mesh": {"pp": 2}}),
}
"""Ranks and options of the strategy by the name of a row."""

_FIRST_STEP = 2
_LOWEST_BIT = 3
_IN_STEP = 1 / 3
"""Part of the flips."""

TURN = 10
"""Steps with checks, and then without, where costs are measured."""

LARGE = {"vocab_size": 512, "context_length": 128, "num_layers": 4, "d_model": 256, "d_hidden": 512, "num_heads": 4}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A flip.

    Attributes:
        copies: ranks that hold the unit.
        is_noticed: the next check has named the unit and its rank.
        is_repaired: the bits are as before afterwards; of a gradient: it was not used.
    """

    name: str
    copies: int
    is_noticed: bool
    is_repaired: bool


@dataclass(frozen=True, kw_only=True)
class _Flip:
    """Bits that were changed, the place of a number in them, and its bits before."""

    unit: StateUnit
    in_step: bool
    bits: Tensor
    place: tuple[int, ...]
    before: Tensor


class Flips(pl.Callback):
    """Flips one random bit of one rank in every second step; without a seed none.

    Attributes:
        outcomes: of the flips of this rank.
        alarms: units that a check has named in other steps.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed, self._draw = seed, np.random.default_rng(seed)
        self._flip: _Flip | None = None
        self._found: list[str] = []
        self.outcomes: list[Outcome] = []
        self.alarms: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        check: Any = trainer.strategy.update.state_check  # type: ignore[attr-defined]
        repair = check._repair

        def watched(found: Sequence[Any], step: int) -> None:
            names = [f"{damage.name} {rank}" for damage in found for rank in damage.damaged]
            self._found += names
            self.alarms += names if self._shared(step) is None else []
            try:
                repair(found, step)
            except StateDamagedError:  # no rank has it intact: a run would end here, or return to what was saved
                self._undo()

        check._repair = watched

    def _shared(self, step: int) -> np.random.Generator | None:
        """Return the draws of a step that all ranks share; None in one without a flip."""
        if self._seed is None or step % 2 or step < _FIRST_STEP:
            return None
        return np.random.default_rng([self._seed, step])

    def _flip_in(self, trainer: pl.Trainer, module: pl.LightningModule, *, in_step: bool) -> None:
        strategy, draw = trainer.strategy, self._shared(trainer.global_step)
        assert isinstance(strategy, ExpertParallelStrategy)
        if draw is None or (draw.random() < _IN_STEP) != in_step:
            return
        if draw.integers(strategy.world.size) != strategy.world.rank:
            return
        state = strategy.state.training_state()
        units = strategy.update.state_check.units()
        units += gradient_units(state, set(module.parameters())) if in_step else []
        pairs = [(unit, t) for unit in units for t in unit.tensors() if t.is_floating_point() and t.numel()]
        unit, tensor = pairs[self._draw.integers(len(pairs))]
        bits = tensor.detach().data.view(BITS[tensor.element_size()])
        place = tuple(int(self._draw.integers(size)) for size in bits.shape)
        self._flip = _Flip(unit=unit, in_step=in_step, bits=bits, place=place, before=bits[place].clone())
        bits[place] ^= 1 << int(self._draw.integers(_LOWEST_BIT, 8 * tensor.element_size() - 1))
        self._found = []

    def _undo(self) -> None:
        if self._flip is not None:
            self._flip.bits[self._flip.place] = self._flip.before

    def _settle(self, rank: int, *, in_step: bool) -> None:
        flip = self._flip
        if flip is None or flip.in_step != in_step:
            return
        is_noticed = f"{flip.unit.name} {rank}" in self._found
        is_back = flip.unit.name.startswith(GRADIENT) or bool((flip.bits[flip.place] == flip.before).all())
        self._undo()
        outcome = Outcome(
            name=flip.unit.name,
            copies=len(flip.unit.holders),
            is_noticed=is_noticed,
            is_repaired=is_noticed and is_back,
        )
        self.outcomes.append(outcome)
        self._flip = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._settle(trainer.global_rank, in_step=True)
        self._flip_in(trainer, module, in_step=False)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._settle(trainer.global_rank, in_step=False)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._flip_in(trainer, module, in_step=True)

    on_before_backward.__module__ = on_before_optimizer_step.__module__ = "torch"
    """Memory is no hook of the user's that changes gradients."""


class Costs(pl.Callback):
    """Seconds of the processor in steps, by whether they are checked: other work on the machine does not count.

    Args:
        check: name of the check among those of `Steps`.
    """

    def __init__(self, check: str) -> None:
        self._check, self._began = check, 0.0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now, step = time.process_time(), trainer.global_step
        if (step - 1) % TURN > 1:  # the first of a turn may be checked in part
            self.seconds[(step - 1) // TURN % 2 == 0].append(now - self._began)
        check: Any = getattr(trainer.strategy.update, self._check)  # type: ignore[attr-defined]
        check.schedule._every = int(step // TURN % 2 == 0)
        self._began = time.process_time()

    @property
    def medians(self) -> list[float]:
        """Seconds of a step with and without checks."""
        return [statistics.median(self.seconds[kind]) for kind in (True, False)]


def fit(
    rank: int,
    size: int,
    options: Mapping[str, Any],
    callbacks: Sequence[pl.Callback],
    steps: int,
    precision: Any,
    *,
    is_large: bool,
) -> None:
    """Train a small model, or a large one, on this rank, without a word.

    Args:
        options: of the strategy.
    """
    describe_rank(rank, size)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pl.seed_everything(7, verbose=False)
    trainer = quiet_trainer(
        ExpertParallelStrategy(**options),
        steps=steps,
        callbacks=list(callbacks),
        devices=size,
        max_epochs=-1,
        precision=precision,
    )
    data = Tokens(length=128, vocab=512) if is_large else Tokens()
    trainer.fit(Language(LARGE if is_large else {}), DataLoader(data, batch_size=16 if is_large else 8))


def print_costs(trained: Callable[..., Any]) -> None:
    """Print what a checked step costs more, by a `_trained` of a large model."""
    costs = run_ranks(2, trained, {"replicas": 2}, 6 * TURN, None, "32-true", True, timeout_s=3600.0)
    checked, unchecked = costs[0][2]
    share = checked / unchecked - 1
    print(f"a step takes {1e3 * unchecked:.1f} ms of the processor, one that is checked {100 * share:.2f} % more")


def print_goals(verdicts: Sequence[str]) -> int:
    """Print lines of `goal`; 0 if all are met."""
    print("\n".join(verdicts))
    return int(any(line.startswith("missed") for line in verdicts))


def _trained(
    rank: int, size: int, strategy: Mapping[str, Any], steps: int, seed: int | None, precision: Any, is_large: bool
) -> tuple[list[Outcome], list[str], list[float]]:
    """Return flips of this rank, false alarms, and median seconds of steps with and without checks."""
    flips, costs = Flips(seed), Costs("state_check")
    callbacks = [flips, *[costs] * is_large, FaultRecovery(min_replicas=1)]
    options = {"check_state_every": 1, "check_arithmetic_every": 0, **strategy}
    fit(rank, size, options, callbacks, steps, precision, is_large=is_large)
    return flips.outcomes, flips.alarms, costs.medians if is_large else []


def run_flips(count: int, calm: int) -> int:
    """Print a table of so many flips over the rows of `MESHES`, of runs without flips on each of them in both
    precisions, and the costs; 0 if all goals are met.

    Args:
        calm: steps of a run without flips.
    """
    each, rows, everything, alarms = -(-count // len(MESHES)), [], list[Outcome](), list[str]()
    for seed, (name, (size, strategy)) in enumerate(MESHES.items()):
        results = run_ranks(size, _trained, strategy, _FIRST_STEP + 2 * each, seed, "32-true", False, timeout_s=3600.0)
        outcomes = [outcome for own, *_ in results for outcome in own]
        everything += outcomes
        alarms += results[0][1]
        rows.append([name, *_counts(outcomes), len(results[0][1])])
        print(*rows[-1], flush=True)
    for precision, (name, (size, strategy)) in product(("32-true", "bf16-mixed"), MESHES.items()):
        (_, found, _), *_ = run_ranks(size, _trained, strategy, calm, None, precision, False, timeout_s=3600.0)
        alarms += found
        rows.append([f"{name}, {calm} calm steps, {precision}", *_counts([]), len(found)])
        print(*rows[-1], flush=True)
    print(table(["training", "flips", "noticed", "of copies", "repaired", "false alarms"], rows))
    print_costs(_trained)
    _, noticed, copies, repaired = _counts(everything)
    return print_goals(
        [
            goal("flips that were not noticed", len(everything) - noticed, 0),
            goal("flips of copies that were not repaired, %", 100 * (1 - repaired / max(1, copies)), 10),
            goal("false alarms", len(alarms), 0),
        ]
    )


def _counts(outcomes: Sequence[Outcome]) -> list[int]:
    copies = [outcome for outcome in outcomes if outcome.copies > 1]
    noticed = sum(outcome.is_noticed for outcome in outcomes)
    return [len(outcomes), noticed, len(copies), sum(outcome.is_repaired for outcome in copies)]
