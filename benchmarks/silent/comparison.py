"""What a training gives, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.silent.case import Limits

_FLOOR = 1e-3
"""Share of the largest gradient of a step below which a tensor's own are rounding errors."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of a training in a checkpoint.

    Attributes:
        tensors: parameters and buffers by name.
        moments: of the optimizer, by their name and the parameter's.
        rates: learning rates and other numbers of the optimizer's groups.
    """

    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    rates: Mapping[str, float]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Snapshot:
        """Read a checkpoint of stock Lightning.

        Args:
            names: of each optimizer's parameters in their order.
        """
        moments, rates = {}, {}
        for number, optimizer in enumerate(checkpoint["optimizer_states"]):
            for index, entry in optimizer["state"].items():
                for key, value in entry.items():
                    if isinstance(value, Tensor | float | int):
                        moments[f"{key} of {names[number][int(index)]}"] = torch.as_tensor(value).float()
            for at, group in enumerate(optimizer["param_groups"]):
                for key in ("lr", "weight_decay"):
                    rates[f"{key} of group {at} of optimizer {number}"] = float(group[key])
        tensors = checkpoint.get("current_model_state", checkpoint["state_dict"])  # beside an average
        return cls(tensors=tensors, moments=moments, rates=rates)


@dataclass
class Run:
    """A training as it was seen.

    Attributes:
        losses: of each step, as logged.
        validations: losses after each step, where there are any.
        norms: of the gradients over the whole model, where they are clipped.
        gradients: of each step, by name.
        snapshots: before and after the resume.
        gaps: of each step, the least difference between scores of which one was chosen and the other not; in plain
            PyTorch only.
        unlike: copies of one gradient that differ between ranks.
    """

    losses: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A number of a run beside that of the reference.

    Attributes:
        what: "loss", "gradient", "validation", "norm", "parameter", "moment",
            "schedule", "replicas", "value", or "steps".
        name: of the tensor, with its step.
        apart: how far.
        limit: how far it may be.
    """

    what: str
    name: str
    apart: float
    limit: float

    @property
    def is_seen(self) -> bool:
        return not self.apart <= self.limit

    def __str__(self) -> str:
        return f"{self.what} {self.name}: {self.apart:.1e} apart (limit {self.limit:.0e})"


TIE = 1e-5
"""Gap between scores below which rounding may choose another expert."""


def differences(found: Run, expected: Run, limits: Limits, *, until_tie: bool = False) -> list[Difference]:
    """All numbers of two runs side by side, in the order of the training.

    Args:
        until_tie: end before the first step in which experts tie.
    """
    return list(_differences(found, expected, limits, until_tie=until_tie))


ROUNDING = 3.0
"""Most times that a training may be as far from float64 as plain PyTorch in float32 is."""


def unexplained(
    found: Run, plain: Run, reordered: Sequence[Run], exact: Run, limits: Limits
) -> tuple[list[Difference], float]:
    """Differences above their limits that rounding does not explain: those of a kind of number, such as gradients, that
    lie farther from float64 in some step than `ROUNDING` times the farthest of plain PyTorch in float32.

    Args:
        found: the training under test.
        plain: plain PyTorch in float32, whose ties end the comparison.
        reordered: the same with the samples of each micro-batch in other orders, which changes nothing but rounding.
        exact: the same in float64.

    Returns:
        The differences, and the largest of the ratios of these distances.
    """

    def farthest(run: Run) -> dict[tuple[str, int], Difference]:
        by_step: dict[tuple[str, int], Difference] = {}
        for difference in _differences(run, replace(exact, gaps=plain.gaps), limits, until_tie=True):
            step = int(difference.name.rpartition(" ")[2]) if difference.name[-1].isdecimal() else 0
            key = difference.what, step
            if key not in by_step or not difference.apart <= by_step[key].apart:
                by_step[key] = difference
        return by_step

    own: dict[tuple[str, int], float] = {}
    for run in (plain, *reordered):
        for key, difference in farthest(run).items():
            own[key] = max(own.get(key, 0.0), difference.apart)
    left, largest = [], 0.0
    for key, difference in farthest(found).items():
        if difference.is_seen:
            bound = ROUNDING * own.get(key, 0.0)
            largest = max(largest, difference.apart / own[key] if bound else math.inf)
            if not difference.apart <= bound:
                left.append(difference)
    return left, largest


def _differences(found: Run, expected: Run, limits: Limits, *, until_tie: bool) -> Iterator[Difference]:
    for name in found.unlike:
        yield Difference(what="replicas", name=name, apart=math.inf, limit=0.0)
    steps = len(expected.losses)
    if len(found.losses) != steps or len(found.gradients) != steps or len(found.snapshots) != 2:
        gave = f"{len(found.losses)} losses, {len(found.gradients)} gradients, {len(found.snapshots)} checkpoints"
        yield Difference(what="steps", name=f"({gave})", apart=math.inf, limit=0.0)
    saved = 0
    for step in range(1, steps + 1):
        at = step - 1
        if until_tie and expected.gaps[at] < TIE:
            return
        if at < len(found.losses):
            apart = _apart(found.losses[at], expected.losses[at])
            yield Difference(what="loss", name=f"of step {step}", apart=apart, limit=limits.loss)
        if at < len(found.gradients) and math.isfinite(expected.losses[at]):  # else the step is left out
            largest = max((float(g.abs().max()) for g in expected.gradients[at].values()), default=0.0)
            for name, apart in _tensors(found.gradients[at], expected.gradients[at], _FLOOR * largest):
                yield Difference(what="gradient", name=f"of {name}, step {step}", apart=apart, limit=limits.gradient)
        if at < min(len(found.validations), len(expected.validations)):
            apart = _apart(found.validations[at], expected.validations[at])
            yield Difference(what="validation", name=f"after step {step}", apart=apart, limit=limits.loss)
        if at < min(len(found.norms), len(expected.norms)):
            apart = _apart(found.norms[at], expected.norms[at]) / expected.norms[at]
            yield Difference(what="norm", name=f"of step {step}", apart=apart, limit=limits.norm)
        if 2 * step in (steps, 2 * steps) and saved < len(found.snapshots):
            yield from _snapshots(found.snapshots[saved], expected.snapshots[saved], step, limits)
            saved += 1


def _snapshots(found: Snapshot, expected: Snapshot, step: int, limits: Limits) -> Iterator[Difference]:
    for name, apart in _tensors(found.tensors, expected.tensors, None):
        yield Difference(what="parameter", name=f"{name} after step {step}", apart=apart, limit=limits.parameter)
    largest: dict[str, float] = {}
    for name, tensor in expected.moments.items():
        key = name.partition(" ")[0]
        largest[key] = max(largest.get(key, 0.0), float(tensor.abs().max()))
    for name, apart in _tensors(
        found.moments, expected.moments, {key: _FLOOR * value for key, value in largest.items()}
    ):
        yield Difference(what="moment", name=f"{name} after step {step}", apart=apart, limit=2 * limits.gradient)
    for name, rate in expected.rates.items():
        apart = _apart(found.rates.get(name, math.nan), rate)
        yield Difference(what="schedule", name=f"{name} after step {step}", apart=apart, limit=1e-12)


def _tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float | Mapping[str, float] | None
) -> Iterator[tuple[str, float]]:
    """Names and largest differences of elements.

    Args:
        floor: differences are relative to the largest element of the tensor, or to this where that is less; None: they
            are absolute.
    """
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            yield name, math.inf
            continue
        ours, theirs = found[name].double(), expected[name].double()
        if not theirs.numel():
            continue
        is_number = ours.isfinite() | theirs.isfinite()  # on one side at least
        apart = float((ours - theirs).abs().where(is_number, 0.0).max())
        if floor is not None:
            least = floor if isinstance(floor, float) else floor[name.partition(" ")[0]]
            apart /= max(float(theirs.abs().max()), least, 1e-30)
        yield name, math.inf if math.isnan(apart) else apart


def _apart(found: float, expected: float) -> float:
    apart = 0.0 if math.isnan(found) and math.isnan(expected) else abs(found - expected)
    return math.inf if math.isnan(apart) else apart


def values(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> list[Difference]:
    """Compare tensors of a check, relative to their largest elements."""
    return [
        Difference(what="value", name=name, apart=apart, limit=limit) for name, apart in _tensors(found, expected, 1e-6)
    ]
