"""Wrong values in every key, option and file of the commands: one clear sentence each. The default run takes a sample.

`python -m tests.sweep` prints the table of all of them.
"""

from __future__ import annotations

import os

import pytest

from tests.distributed.harness import run_ranks
from tests.sweep.__main__ import SUITES, Suite, swept
from tests.sweep.cases import PROBLEMS, Answer, Case, answer, judged
from tests.sweep.elastic import hosting
from tests.sweep.moe_train import building_text

SAMPLED: dict[Suite, int] = {building_text: 90, hosting: 8}
"""By suite, how many cases one is taken of."""


def _sweep(rank: int, world_size: int, suite: Suite, every: int) -> tuple[int, list[str]]:
    found = [(case.label, verdict) for case, verdict in swept(suite, every=every)]
    wrong = [f"{verdict.kind}: {label}: {verdict.text}" for label, verdict in found if verdict.kind in PROBLEMS]
    return len(found), wrong


def _wrong(suite: Suite, every: int = 1, timeout_s: float = 240.0) -> list[str]:
    [(number, wrong)] = run_ranks(1, _sweep, suite, every, timeout_s=timeout_s)
    assert number
    return wrong


@pytest.mark.parametrize("suite", SAMPLED, ids=lambda suite: suite.__name__)
def test_a_sample(suite: Suite) -> None:
    assert _wrong(suite, SAMPLED[suite]) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES)
def test_all(suite: str) -> None:
    assert _wrong(SUITES[suite], timeout_s=3500.0) == []


def _case(run: object, *, sensible: bool = False) -> Case:
    return Case(label="x", run=run, subjects=("lr",), sensible=sensible, timeout_s=0.5)  # type: ignore[arg-type]


def _hang() -> int:
    while True:
        pass


def _crash() -> int:
    raise TypeError("lr is wrong")


def _die() -> int:
    os.kill(os.getpid(), 9)
    return 0


@pytest.mark.parametrize(
    ("run", "kind"),
    [(_hang, "hang"), (_crash, "traceback"), (_die, "traceback"), (lambda: 0, "nonsense"), (lambda: 2, "vague")],
)
def test_outcomes_are_told_apart(run: object, kind: str) -> None:
    case = _case(run)
    assert judged(case, answer(case)).kind == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("error: lr=-1 must be a number above 0", "clear"),
        ("error: lr=-1 is wrong", "vague"),
        ("error: weight=-1 must be above 0", "vague"),
        ("error: lr: '<' not supported between 'NoneType' and 'int', use another", "vague"),
    ],
)
def test_sentences_are_told_apart(text: str, kind: str) -> None:
    assert judged(_case(None), Answer(code=2, text=text, seconds=0.0)).kind == kind
    assert judged(_case(None, sensible=True), Answer(code=0, text=text, seconds=0.0)).kind == "accepted"
