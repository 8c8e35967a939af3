"""Flipped bits in matrix products of one rank: named, and what looking for them costs.

A fault flips a bit of one element of one product of each step, the same in all of them. It lasts for two checks, which
are to name its rank, or for one step, which is checked or not. An element and a bit are drawn whose flip changes
the product by a part of its largest element. In the steps between faults no alarm may come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import goal
from benchmarks.silent.flips import MESHES, Costs, fit, print_costs, print_goals
from benchmarks.silent.ranks import run_ranks
from moe_lightning.compat import private_torch
from moe_lightning.state.sums import BITS
from moe_lightning.text_table import table

_FIRST_STEP = 2
_EVERY = 4
_TURN = 4 * _EVERY
"""Steps in which a fault comes and goes."""

_LEAST, _LEAST_ROUNDINGS = 1e-3, 16
"""Change by a flip, as a part of the largest element of its product, and in roundings of that."""

_MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
}


class WrongProducts(private_torch.OperationMode):
    """Flips a bit in the result of some matrix products.

    Args:
        draw: of element and bit.

    Attributes:
        number: of the product in a step that is wrong; None: none is; -1: all are.
        count: products of the running step.
        flips: that were made.
    """

    def __init__(self, draw: np.random.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self.number: int | None = None
        self.count = self.flips = 0

    def during(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute, and flip."""
        result = func(*args, **kwargs)
        if func in _MATRIX_PRODUCTS and result.shape[-1] > 1:  # others are of the check itself
            if self.number in (self.count, -1):
                self.flips += self._flip(result)
            self.count += 1
        return result

    def _flip(self, result: Tensor) -> bool:
        """Flip a bit that changes an element by enough; return False if several draws give none."""
        least = max(_LEAST, _LEAST_ROUNDINGS * torch.finfo(result.dtype).eps) * float(result.abs().max())
        bits = result.view(BITS[result.element_size()])
        for _ in range(100):
            place = tuple(int(self._draw.integers(size)) for size in result.shape)
            before, flipped = result[place].clone(), bits[place].clone()
            bits[place] ^= 1 << int(self._draw.integers(8 * result.element_size() - 1))
            change = abs(float(result[place]) - float(before))
            if not change < least and least > 0:
                return True
            bits[place] = flipped
        return False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A fault.

    Attributes:
        lasts: it lasted for two checks.
        is_named: a check has named its rank.
        is_checked: one of its steps was checked.
    """

    lasts: bool
    is_named: bool
    is_checked: bool


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """Rank and steps of a fault, and which of the products of a step is wrong."""

    rank: int
    lasts: bool
    first: int
    share: float

    def is_on(self, step: int) -> bool:
        """Return True in its steps."""
        return self.first <= step < self.first + (2 * _EVERY if self.lasts else 1)

    @property
    def is_checked(self) -> bool:
        """True if one of its steps is checked."""
        return self.lasts or self.first % _EVERY == 0


class Faults(pl.Callback):
    """Makes products of one rank wrong for some steps, again and again; without a seed none.

    Attributes:
        outcomes: of the faults of this rank.
        alarms: of checks in other steps, or that have named this rank for a fault of another.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._wrong = WrongProducts(np.random.default_rng(seed))
        self._products = 0
        self._is_named = False
        self.outcomes: list[Outcome] = []
        self.alarms: list[str] = []

    def _fault(self, trainer: pl.Trainer, step: int) -> _Fault | None:
        """Return the fault of a step's turn, which all ranks share."""
        turn = (step - _FIRST_STEP) // _TURN
        if self._seed is None or turn < 1:
            return None
        draw = np.random.default_rng([self._seed, turn])
        return _Fault(
            rank=int(draw.integers(trainer.world_size)),
            lasts=bool(draw.integers(2)),
            first=_FIRST_STEP + turn * _TURN + int(draw.integers(_EVERY)),
            share=float(draw.random()),
        )

    def _running(self, trainer: pl.Trainer) -> _Fault | None:
        """Return the fault of the running step, on whatever rank it is; None: there is none."""
        fault = self._fault(trainer, trainer.global_step)
        return fault if fault is not None and fault.is_on(trainer.global_step) else None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._wrong.__enter__()  # type: ignore[no-untyped-call]
        check: Any = trainer.strategy.update.arithmetic_check  # type: ignore[attr-defined]
        own = check.before_update

        def watched() -> str:
            before, words, fault = check.times_wrong, own(), self._running(trainer)
            is_named = check.times_wrong > before
            if fault is not None and fault.rank == trainer.global_rank:
                self._is_named |= is_named
            elif is_named or (words and fault is None):
                self.alarms.append(words)
            return str(words)

        check.before_update = watched

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        fault = self._running(trainer)
        self._products = max(1, self._wrong.count) if fault is None else self._products
        self._wrong.count = 0
        is_here = fault is not None and fault.rank == trainer.global_rank
        self._wrong.number = int(fault.share * self._products) if fault is not None and is_here else None

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self._running(trainer) is not None:  # in steps without a check it would be trained on
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    on_before_optimizer_step.__module__ = "torch"  # no hook of the user's that changes gradients

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        fault = self._fault(trainer, trainer.global_step - 1)
        is_last = (trainer.global_step - _FIRST_STEP) % _TURN == 0
        if fault is not None and fault.rank == trainer.global_rank and is_last:
            if self._wrong.flips:
                named = Outcome(lasts=fault.lasts, is_named=self._is_named, is_checked=fault.is_checked)
                self.outcomes.append(named)
            self._is_named, self._wrong.flips = False, 0

    def on_train_end(self, *_: Any) -> None:
        self._wrong.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _trained(
    rank: int, size: int, strategy: Mapping[str, Any], steps: int, seed: int | None, precision: Any, is_large: bool
) -> tuple[list[Outcome], list[str], list[float]]:
    """Return faults of this rank, false alarms, and median seconds of steps with and without checks."""
    faults, costs = Faults(seed), Costs("arithmetic_check")
    options = {"check_state_every": 0, "check_arithmetic_every": _EVERY, **strategy}
    fit(rank, size, options, [costs if is_large else faults], steps, precision, is_large=is_large)
    return faults.outcomes, faults.alarms, costs.medians if is_large else []


def run_products(count: int) -> int:
    """Print a table of so many faults over the rows of `MESHES`, runs without any and the costs; 0 if all goals are
    met.
    """
    each, rows, everything, alarms = -(-count // len(MESHES)), [], list[Outcome](), list[str]()
    for seed, (name, (size, strategy)) in enumerate(MESHES.items()):
        steps = _FIRST_STEP + _TURN * (1 + each)
        results = run_ranks(size, _trained, strategy, steps, seed, "32-true", False, timeout_s=3600.0)
        outcomes = [outcome for own, *_ in results for outcome in own]
        everything += outcomes
        alarms += [alarm for _, own, _ in results for alarm in own]
        rows.append([name, *_counts(outcomes), sum(len(own) for _, own, _ in results)])
        print(*rows[-1], flush=True)
    for precision in ("32-true", "bf16-mixed"):
        calm = run_ranks(2, _trained, {"replicas": 2}, 1000, None, precision, False, timeout_s=3600.0)
        alarms += calm[0][1]
        rows.append([f"no fault, {precision}", *_counts([]), len(calm[0][1])])
    print(table(["training", "lasting", "named", "one step", "checked", "named", "false alarms"], rows))
    print_costs(_trained)
    lasting, named, _, checks, named_once = _counts(everything)
    return print_goals(
        [
            goal("lasting faults whose rank was not named", lasting - named, 0),
            goal("faults in a step that was checked whose rank was not named", checks - named_once, 0),
            goal("false alarms", len(alarms), 0),
        ]
    )


def _counts(outcomes: Sequence[Outcome]) -> list[int]:
    lasting = [outcome for outcome in outcomes if outcome.lasts]
    once = [outcome for outcome in outcomes if not outcome.lasts]
    checked = [outcome for outcome in once if outcome.is_checked]
    named = (sum(outcome.is_named for outcome in some) for some in (lasting, checked))
    return [len(lasting), next(named), len(once), len(checked), next(named)]
