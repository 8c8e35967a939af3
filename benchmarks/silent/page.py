"""Results as lines of a table, and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.silent.case import KINDS, Case, Check
from benchmarks.silent.runner import Result

_DOCTOR = {"named": "named", "seen": "seen", "silent": "no", "": "-"}

_INTRODUCTION = """\
# Silent errors

The worst errors of a training stack raise nothing: the loss falls, and gradients are wrong, or a resume looks like one
and is none. These are public reports of such errors, tried on this project:

```bash
moe-bench silent                                          # all of them, in a checkout, on two cores
moe-bench silent --case norm-without-experts              # one, in seconds
```

Each case trains a tiny GPT with experts for three steps on 1, 2 or 4 ranks, saves a checkpoint, and resumes from it in
new processes for three more. The loss, every gradient, the gradient norm, parameters and buffers, the optimizer's
moments and learning rates are compared with a loop of plain PyTorch in one process, whose experts are computed one by
one, or, where noise is drawn, with our own run on one rank; cases of kernels and exports compare with arithmetic.
Limits: loss 1e-5; gradients 1e-4 and moments 2e-4 of the largest element of their tensor; norm 1e-5; parameters 1e-5,
in float32.

Then **the fault of the report is put into our code**, in the processes of that run, and the comparison must see it: a
case without teeth is no case. The last column says whether the [parity doctor](doctor.md), which knows nothing of the
case, names tensor, step and cause in a run with the fault; `seen` means that it reports a difference in other words,
and `-` that the fault lies where it does not look, such as in a resume.
"""

_COMPOSITIONS = """\
## Compositions

The same comparison for trainings drawn by number: 1 to 4 ranks, mesh, sharding, placement, quota, balancing, router,
model, data, accumulation, clipping, recomputation, adapters, optimizer, and in half of them other ranks and another
mesh after the resume (`moe-bench silent --compositions 200`). A comparison ends before a step in which the scores of
two experts lie closer than 1e-5, where rounding may choose another one. Where a number exceeds its limit, plain PyTorch
runs in float64 too: the training counts as the same only if in every step it is at most three times as far from float64
as plain PyTorch in float32 is.

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
    parts = [_INTRODUCTION]
    named = sum(result.doctor == "named" for result in results.values())
    refused = sum(bool(case.refused) for case in cases.values())
    minutes = sum(result.seconds for result in results.values()) / 60
    asked = sum(bool(result.doctor) for result in results.values())
    parts.append(
        f"Of {len(cases)} cases {len(cases) - refused} hold, {refused} are combinations that are refused in one line, "
        f"and every fault is\nseen. The doctor examined {asked} and names {named}. All ran in {minutes:.0f} minutes on "
        "two cores.\n"
    )
    for kind in KINDS:
        of_kind = [case for case in cases.values() if case.kind == kind]
        if of_kind:
            parts.append(f"## {kind.capitalize()}\n")
            parts.append(
                "\n".join(["| case | report | what happened there | here | with its fault | doctor |", "|-|-|-|-|-|-|"])
            )
            parts[-1] += "\n" + "\n".join(_row(case, results[case.id]) for case in of_kind) + "\n"
    if drawn:
        parts.append(_of_compositions(drawn))
    parts.append("Next: [the laws](expert-parallelism.md#laws), [the parity doctor](doctor.md), [limits](limits.md).\n")
    return "\n".join(parts)


def _row(case: Case, result: Result) -> str:
    repository, number = case.report.split("#")
    link = f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"
    cells = (f"`{case.id}`", link, case.symptom, _here(case, result), _fault(case, result), _DOCTOR[result.doctor])
    return f"| {' | '.join(cells)} |"


def _here(case: Case, result: Result) -> str:
    if case.refused:
        return "refused: " + result.told.replace("|", "\\|")
    if isinstance(case.subject, Check):
        return f"{result.largest['value']:.0e}"
    names = [name for name in ("loss", "gradient", "norm", "moment") if name in result.largest]
    return ", ".join(f"{name} {result.largest[name]:.0e}" for name in names)


def _fault(case: Case, result: Result) -> str:
    if case.fault is None:
        return "-"
    if result.seen.startswith("stopped"):
        return "stopped by an error"
    what = result.seen.partition(" (limit")[0].replace("model.", "").replace("|", "\\|")
    return what + (f"; loss {result.loss_apart:.0e}" if result.loss_apart is not None else "")
