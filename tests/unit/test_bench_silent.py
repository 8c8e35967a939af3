"""Cases of public reports: some of them run, and the page of all agrees with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.silent.case import KINDS, Limits
from benchmarks.silent.catalogue import CASES
from benchmarks.silent.comparison import Run, Snapshot, unexplained
from benchmarks.silent.compositions import composition
from benchmarks.silent.model import Reordered
from benchmarks.silent.ranks import run_ranks
from benchmarks.silent.runner import run_case, run_healthy
from benchmarks.silent.training import diagnosed
from moe_lightning.cli.bench import main
from tests.parameters import slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "silent-errors.md"
QUICK = ["largest-element-as-norm", "weights-of-empty-experts", "changed-groups"]


@pytest.mark.parametrize("id", [*QUICK, *(slow(id) for id in CASES if id not in QUICK)])
def test_a_case_holds_and_its_fault_is_seen(id: str) -> None:
    result = run_case(CASES[id])
    assert result.is_good(CASES[id]), result.problem or "the fault of the report is not seen"
    assert result.doctor in ("", "named", "stopped"), result.told


def _is_examined(id: str) -> bool:
    return bool(CASES[id].doctor)


HEALTHY = ["bias-counts-a-skipped-step"]


@pytest.mark.parametrize(
    "id",
    [*HEALTHY, *(slow(id) for id in filter(_is_examined, CASES) if id not in HEALTHY)],
)
def test_the_doctor_finds_nothing_without_a_fault(id: str) -> None:
    assert run_ranks(CASES[id].subject.ranks, diagnosed, id, False)[0] == ""


@pytest.mark.parametrize("number", [2, slow(5)])
def test_a_composition_is_the_same(number: int) -> None:
    result = run_healthy(composition(number))
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


def test_names_are_listed_and_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["silent", "--names"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CASES)


def test_what_rounding_explains_is_no_difference() -> None:
    def run(*losses: float) -> Run:
        empty = Snapshot(tensors={}, moments={}, rates={})
        return Run(losses=list(losses), gradients=[{}, {}], snapshots=[empty, empty], gaps=[1.0, 1.0])

    exact, plain = run(1.0, 2.0), run(1.0, 2.0 + 1e-4)
    assert unexplained(run(1.0, 2.0 - 2.9e-4), plain, [], exact, Limits())[0] == []
    left, ratio = unexplained(run(1.0, 2.0 - 3.1e-4), plain, [], exact, Limits())
    assert [str(difference).partition(":")[0] for difference in left] == ["loss of step 2"]
    assert ratio == pytest.approx(3.1, rel=1e-3)
    left, ratio = unexplained(run(1.0, 2.0 - 3.1e-4), plain, [run(1.0, 2.0 + 2e-4)], exact, Limits())
    assert not left
    assert ratio == pytest.approx(1.55, rel=1e-3)
    assert unexplained(run(1.1, 2.0), plain, [], exact, Limits())[0], "plain PyTorch is exact in the first step"


def test_samples_change_their_places_within_a_micro_batch() -> None:
    data = Reordered(lambda: list(range(11)), [2, 0, 3, 1])
    assert [data[index] for index in range(len(data))] == [2, 0, 3, 1, 6, 4, 7, 5, 8, 9, 10]
