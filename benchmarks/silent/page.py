"""Results as lines of a table, and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.silent.case import KINDS, Case, Check
from benchmarks.silent.runner import Result

_DOCTOR = {"named": "named", "seen": "seen", "stopped": "stopped", "silent": "no", "": "-"}

_INTRODUCTION = """\
# Silent errors

The loss falls, nothing is raised, and yet gradients are wrong, or a resume loses a part of the state. This page tries
public reports of such errors on this library:

```bash
moe-bench silent                                          # all cases, in a checkout
moe-bench silent --case norm-without-experts              # one case
moe-bench silent --compositions 200 --page PAGE.md        # this page
```

A case trains a tiny GPT with experts for three steps on 1, 2 or 4 ranks, saves a checkpoint, and resumes from it in new
processes for three more. A loop of plain PyTorch in one process, which computes experts one by one, gives the expected
loss, gradients, gradient norm, parameters, buffers, moments and learning rates; our own run on one rank does where
noise is drawn or losses are scaled. Cases of kernels and exports compare with arithmetic. Limits in float32: loss 1e-5;
gradients 1e-4 and moments 2e-4 of the largest element of their tensor; norm 1e-5; parameters 1e-5.

Then the fault of the report is put into our code, and the comparison must see it. The last column is the verdict of the
[parity doctor](doctor.md), which does not know the case: `named` means that it names tensor, step and cause; `stopped`
that the strategy raises an error before; `-` that it was not asked.
"""

_COMPOSITIONS = """\
## Compositions

The same comparison for random trainings: 1 to 4 ranks, mesh, sharding, placement, quota, balancing, router, model,
data, accumulation, clipping, recomputation, adapters, optimizer, and in half of them other ranks and another mesh after
the resume. A comparison ends before a step in which the scores of two experts differ by less than 1e-5, where rounding
may choose another one. Where a number exceeds its limit, plain PyTorch runs in float64 too, and in float32 with the
samples of each micro-batch in four other orders, which changes nothing but rounding. The training counts as the same
only if in every step its distance from float64 is at most three times the largest one of plain PyTorch in float32.

| drawn | the same | above a limit, but by rounding | refused in one line | different |
|-|-|-|-|-|
"""


def heading() -> str:
    """The first line of the table."""
    return f"{'case':<44}{'holds':<9}{'loss':>8}{'gradient':>10}  {'fault':<7}{'doctor':<8}{'s':>5}"


def line(case: Case, result: Result) -> str:
    """A case's line of the table."""
    fault = "-" if case.fault is None else "seen" if result.seen else "MISSED"
    holds = "refused" if case.refused and result.holds else "yes" if result.holds else "NO"
    loss, gradient = (_number(result, *names) for names in (("loss",), ("gradient", "value")))
    return (
        f"{case.id:<44}{holds:<9}{loss:>8}{gradient:>10}  {fault:<7}{_DOCTOR[result.doctor]:<8}{result.seconds:>5.1f}"
    )


def _number(result: Result, *names: str) -> str:
    return next((f"{result.largest[name]:.0e}" for name in names if name in result.largest), "")


def line_of_composition(result: Result) -> str:
    """A line of the table for a training that was drawn."""
    loss, gradient = (_number(result, name) for name in ("loss", "gradient"))
    exact = "rounding" if result.rounding is not None else "yes"
    holds = "refused" if result.told else exact if result.holds else "NO"
    return f"{result.id:<44}{holds:<9}{loss:>8}{gradient:>10}  {'-':<7}{'-':<8}{result.seconds:>5.1f}"


def _of_compositions(drawn: Sequence[Result]) -> str:
    differing = sum(not result.holds for result in drawn)
    refused = sum(bool(result.told) for result in drawn)
    rounded = sum(result.holds and result.rounding is not None for result in drawn)
    numbers = (len(drawn), len(drawn) - rounded - refused - differing, rounded, refused, differing)
    return f"{_COMPOSITIONS}| {' | '.join(map(str, numbers))} |\n"


def written(cases: Mapping[str, Case], results: Mapping[str, Result], drawn: Sequence[Result]) -> str:
    """The page."""
    parts = [_INTRODUCTION, _summary(cases, results)]
    for kind in KINDS:
        of_kind = [case for case in cases.values() if case.kind == kind]
        if of_kind:
            parts.append(f"## {kind.capitalize()}\n")
            rows = [_row(case, results[case.id]) for case in of_kind]
            parts.append("\n".join([_COLUMNS, *rows]) + "\n")
    if drawn:
        parts.append(_of_compositions(drawn))
    parts.append("Next: [the laws](expert-parallelism.md#laws), [the parity doctor](doctor.md), [limits](limits.md).\n")
    return "\n".join(parts)


_COLUMNS = """\
| case | report | what happened there | largest difference here | loss under the fault | doctor |
|-|-|-|-|-|-|"""


def _summary(cases: Mapping[str, Case], results: Mapping[str, Result]) -> str:
    verdicts = Counter(result.doctor for result in results.values())
    refused = sum(bool(case.refused) for case in cases.values())
    untrained = sum(isinstance(case.subject, Check) for case in cases.values())
    seconds = [result.seconds for result in results.values()]
    faults = len(cases) - refused
    lines = (
        f"Of {len(cases)} cases {faults} hold, and every fault is seen; {refused} are combinations that are refused in",
        f"one line. The doctor names {verdicts['named']} of {faults} faults, and the strategy stops "
        f"{verdicts['stopped']};",
        f"{untrained} of the others are checks of kernels, norms, files and exports. The cases ran in",
        f"{sum(seconds) / 60:.0f} minutes, the longest in {max(seconds):.0f} s, on two cores.\n",
    )
    return "\n".join(lines)


def _row(case: Case, result: Result) -> str:
    repository, number = case.report.split("#")
    link = f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"
    cells = (f"`{case.id}`", link, case.symptom, _here(case, result), _fault(case, result), _DOCTOR[result.doctor])
    return f"| {' | '.join(cells)} |"


def _here(case: Case, result: Result) -> str:
    if case.refused:
        return "refused"
    if isinstance(case.subject, Check):
        return f"{result.largest['value']:.0e}"
    return ", ".join(f"{name} {result.largest[name]:.0e}" for name in ("loss", "gradient"))


def _fault(case: Case, result: Result) -> str:
    if case.fault is None:
        return "-"
    if result.seen.startswith("stopped"):
        return "stopped by an error"
    return "seen" if result.loss_apart is None else f"{result.loss_apart:.0e} apart"
