"""A race of contenders that may be wrong or break: values are checked first, turns are taken, and whoever raises is out
with its reason while the others go on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Race:
    """How it ended.

    Attributes:
        medians: of each contender that came through, by what was measured.
        left_out: why the others are not there.
    """

    medians: dict[str, dict[str, float]]
    left_out: dict[str, str]


def disagreements(
    results: Mapping[str, Callable[[], Sequence[Tensor]]], wanted: Sequence[Tensor], most: float
) -> dict[str, str]:
    """Who computes something else, or nothing, and why.

    Args:
        results: what each contender computes.
        wanted: what it should be.
        most: norm of a difference over that of what is wanted.
    """
    found = {}
    for name, compute in results.items():
        try:
            errors = [_error(mine, theirs) for mine, theirs in zip(compute(), wanted, strict=True)]
        except Exception as error:  # whatever a stranger's kernel raises
            found[name] = reason(error)
            continue
        if not max(errors) <= most:  # NaN is none
            found[name] = f"other values: relative error {max(errors):.3g}, at most {most:g} is allowed"
    return found


def race(measures: Mapping[str, Mapping[str, Callable[[], float]]], rounds: int, warmup: int = 2) -> Race:
    """Let all measure in turns, so that a slow spell of the machine hits all.

    Args:
        measures: of each contender, by what is measured.
        rounds: that count.
        warmup: rounds before.
    """
    found = {name: {what: list[float]() for what in of} for name, of in measures.items()}
    left_out: dict[str, str] = {}
    for _ in range(warmup + rounds):
        for name, of in measures.items():
            if name in left_out:
                continue
            try:
                for what, measure in of.items():
                    found[name][what].append(measure())
            except Exception as error:  # whatever a stranger's kernel raises
                left_out[name] = reason(error)
    medians = {
        name: {what: statistics.median(values[warmup:]) for what, values in of.items()}
        for name, of in found.items()
        if name not in left_out
    }
    return Race(medians=medians, left_out=left_out)


def reason(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _error(mine: Tensor, wanted: Tensor) -> float:
    if mine.shape != wanted.shape:
        raise ValueError(f"the shape {list(mine.shape)} instead of {list(wanted.shape)}")
    with torch.no_grad():
        return float((mine.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))
