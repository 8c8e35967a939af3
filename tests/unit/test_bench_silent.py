"""Cases of public reports: some of them run, and the page of all agrees with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.silent.case import KINDS
from benchmarks.silent.catalogue import CASES
from benchmarks.silent.runner import run_case, run_composition
from moe_lightning.cli.bench import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "silent-errors.md"
QUICK = ["norm-of-own-experts", "largest-element-as-norm", "expert-replicas-not-summed", "bias-of-own-counts"]
QUICK += ["experts-of-one-rank-saved", "weights-of-empty-experts"]


@pytest.mark.parametrize("id", [*QUICK, *(pytest.param(id, marks=pytest.mark.slow) for id in CASES if id not in QUICK)])
def test_a_case_holds_and_its_fault_is_seen(id: str) -> None:
    result = run_case(CASES[id])
    assert result.is_good(CASES[id]), result.problem or "the fault of the report is not seen"
    assert result.doctor in ("", "named"), result.told


@pytest.mark.parametrize("number", [2, 5])
def test_a_composition_is_the_same(number: int) -> None:
    result = run_composition(number)
    assert result.holds, result.problem
    assert not result.told, "it is refused"


def test_the_page_has_every_case_in_its_kind() -> None:
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        for id, repository, number in re.findall(
            r"^\| `([^`]+)` \| \[[^]]+\]\(https://github.com/(.+?)/issues/(\d+)\)", section, re.M
        ):
            found[id] = section.partition("\n")[0].lower(), f"{repository}#{number}"
    assert found == {case.id: (case.kind, case.report) for case in CASES.values()}


def test_every_case_is_whole() -> None:
    for case in CASES.values():
        assert case.kind in KINDS
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.report), case.id
        assert bool(case.fault) != bool(case.refused), case.id
        assert bool(case.doctor) != bool(case.beyond or case.refused), case.id


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["silent", "--case", "nothing"]) == 2
    assert "--case nothing is no case: choose of" in capsys.readouterr().err
