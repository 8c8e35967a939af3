"""Runs cases: as they are, with the fault of their report, and that with the parity doctor."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.silent.case import Case, Check, Training
from benchmarks.silent.comparison import Difference, Run, differences, unexplained, values
from benchmarks.silent.model import Reordered
from benchmarks.silent.ranks import RankFailure, run_ranks
from benchmarks.silent.reference import build, names_of, optimizers_of, plain_run
from benchmarks.silent.training import STEPS, diagnosed, observed, unbroken, whole_run


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a case.

    Attributes:
        id: of the case.
        holds: it is right, or refused as it should be.
        largest: largest difference of a number by what it is; empty for a refusal.
        problem: what is wrong where it does not hold.
        seen: first difference under the fault; empty: none.
        rounding: where a limit is exceeded, times that the training is as far from float64 as plain PyTorch in float32.
        loss_apart: largest difference of a loss under the fault, which is what a user would see.
        doctor: "named", "seen" where words lack, "stopped" where the strategy raised these words before, "silent", or
            empty where it was not asked.
        told: its sentence.
        seconds: of the whole case.
    """

    id: str
    holds: bool
    largest: dict[str, float]
    problem: str = ""
    seen: str = ""
    rounding: float | None = None
    loss_apart: float | None = None
    doctor: str = ""
    told: str = ""
    seconds: float = 0.0

    def is_good(self, case: Case) -> bool:
        """True if the case holds, and its fault is seen."""
        return self.holds and (case.fault is None or bool(self.seen))


def run_case(case: Case) -> Result:
    """Run a case."""
    start = time.perf_counter()
    try:
        found = _check(case, case.subject) if isinstance(case.subject, Check) else _training(case, case.subject)
    except RankFailure as failure:
        found = {"holds": False, "largest": {}, "problem": str(failure)}
    return Result(id=case.id, seconds=round(time.perf_counter() - start, 1), **found)


def run_healthy(case: Case) -> Result:
    """Run a training without a fault; a refusal holds, and so does what rounding explains."""
    start = time.perf_counter()
    training: Any = case.subject
    is_plain = training.reference == "plain"
    try:
        expected, names = _expected(case, training)
        right = _run(case, training, names, is_faulty=False)
        if isinstance(right, str):
            found: dict[str, Any] = {"holds": True, "largest": {}, "told": right}
        else:
            found = _judged(differences(right, expected, case.limits, until_tie=is_plain))
        if is_plain and not isinstance(right, str) and not found["holds"]:
            exact, *reordered = run_ranks(1, _for_rounding, case.id)[0]
            left, found["rounding"] = unexplained(right, expected, reordered, exact, case.limits)
            found |= {"holds": not left, "problem": "; ".join([found["problem"], *map(str, left[:3])]) if left else ""}
    except RankFailure as failure:
        found = {"holds": False, "largest": {}, "problem": str(failure)}
    return Result(id=case.id, seconds=round(time.perf_counter() - start, 1), **found)


def _training(case: Case, training: Training) -> dict[str, Any]:
    expected, names = _expected(case, training)
    right = _run(case, training, names, is_faulty=False)
    if case.refused or isinstance(right, str):
        is_right = bool(case.refused) and isinstance(right, str) and re.search(case.refused, right) is not None
        told = right if isinstance(right, str) else "it was not refused"
        return {"holds": is_right, "largest": {}, "problem": "" if is_right else told, "told": told}
    outcome = _judged(differences(right, expected, case.limits))
    if case.fault is None:
        return outcome
    wrong = _run(case, training, names, is_faulty=True)
    if isinstance(wrong, str):
        outcome["seen"] = f"stopped: {wrong.splitlines()[0]}"
    else:
        apart = differences(wrong, expected, case.limits)
        outcome["seen"] = next((str(difference) for difference in apart if difference.is_seen), "")
        outcome["loss_apart"] = max((d.apart for d in apart if d.what == "loss"), default=None)
    if not case.beyond:
        try:
            told = run_ranks(training.ranks, diagnosed, case.id, True)[0]
        except RankFailure as failure:
            told = f"({failure.sentence})"
        outcome |= {"doctor": _verdict(case, told), "told": told}
    return outcome


def _verdict(case: Case, told: str) -> str:
    is_named = bool(told) and all(word in told for word in case.doctor)
    if told.startswith("("):
        return "stopped" if is_named else "silent"
    return "named" if is_named else "seen" if told else "silent"


def _expected(case: Case, training: Training) -> tuple[Run, list[list[str]]]:
    """The run to compare with, and the names of each optimizer's parameters."""
    expected, names = run_ranks(1, _reference, case.id)[0]
    return (_alone(case, names) if training.reference == "one rank" else expected), names


def _alone(case: Case, names: Sequence[Sequence[str]]) -> Run:
    """One rank that trains without a break."""
    with tempfile.TemporaryDirectory(prefix="moe-silent-") as folder:
        return whole_run([run_ranks(1, unbroken, case.id, folder)], Path(folder), names)


def _judged(compared: Sequence[Difference]) -> dict[str, Any]:
    largest: dict[str, float] = {}
    for difference in compared:
        largest[difference.what] = max(largest.get(difference.what, 0.0), difference.apart)
    wrong = [str(difference) for difference in compared if difference.is_seen]
    return {"holds": not wrong, "largest": largest, "problem": "; ".join(wrong[:3])}


def _run(case: Case, training: Training, names: Sequence[Sequence[str]], *, is_faulty: bool) -> Run | str:
    """Run both phases; a refusal is its sentence."""
    with tempfile.TemporaryDirectory(prefix="moe-silent-") as folder:
        phases = []
        for ranks, resumes in ((training.ranks, False), (training.resumed_ranks or training.ranks, True)):
            try:
                phases.append(run_ranks(ranks, observed, case.id, is_faulty, folder, resumes))
            except RankFailure as failure:
                if is_faulty or failure.is_mistake:
                    return failure.sentence
                raise
        return whole_run(phases, Path(folder), names)


def _reference(rank: int, size: int, id: str) -> tuple[Run, list[list[str]]]:
    from benchmarks.silent.catalogue import case_named

    training: Any = case_named(id).subject
    module = build(training)
    optimizers, _ = optimizers_of(module)
    run = Run() if training.reference == "one rank" else plain_run(training, 2 * STEPS, STEPS)
    return run, [names_of(module, optimizer) for optimizer in optimizers]


_ORDERS = 4


def _for_rounding(rank: int, size: int, id: str) -> list[Run]:
    """The training in float64, and in float32 with the samples of each micro-batch in other orders."""
    from benchmarks.silent.catalogue import case_named

    training: Any = case_named(id).subject
    runs = [plain_run(training, 2 * STEPS, STEPS, torch.float64)]
    for seed in range(_ORDERS):
        order = torch.randperm(training.batch_size, generator=torch.Generator().manual_seed(seed)).tolist()
        reordered = replace(training, data=partial(Reordered, training.data, order))
        runs.append(plain_run(reordered, 2 * STEPS, STEPS))
    return runs


def _check(case: Case, check: Check) -> dict[str, Any]:
    right = run_ranks(check.ranks, _checked, case.id, False)[0]
    outcome = _judged(values(right[0], right[1], case.limits.gradient))
    if case.fault is not None:
        try:
            wrong = run_ranks(check.ranks, _checked, case.id, True)[0]
            apart = values(wrong[0], wrong[1], case.limits.gradient)
            outcome["seen"] = next((str(difference) for difference in apart if difference.is_seen), "")
        except RankFailure as failure:
            outcome["seen"] = f"stopped: {failure.sentence}"
    return outcome


def _checked(rank: int, size: int, id: str, is_faulty: bool) -> Any:
    from benchmarks.silent.catalogue import CASES

    case = CASES[id]
    if is_faulty and case.fault is not None and case.fault.process is not None:
        case.fault.process()
    return case.subject.function(rank)  # type: ignore[union-attr]
