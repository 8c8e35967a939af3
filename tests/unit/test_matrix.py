"""The command for the slow matrix: parts are equal in time, results survive crashes, every failure is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import matrix
from tests.programs import ROOT, run_program

CASES = [f"tests/{file}.py::test[{i}]" for file, count in (("a", 40), ("b", 3), ("c", 10)) for i in range(count)]
SECONDS = {"tests/a.py": 1.0, "tests/b.py": 20.0, "tests/c.py": 2.0}

LITTLE_TESTS = """
import os, pathlib, time
import pytest
pytestmark = pytest.mark.slow
def test_passes(): pass
def test_fails(): assert 1 == 2, "not equal"
def test_skips(): pytest.skip("no reason")
def test_crashes(): os._exit(3)
def test_last(): pass
"""


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_hold_every_case_once_and_take_the_same_time(parts: int) -> None:
    found = matrix.cut(CASES, parts, SECONDS)
    assert sorted(case for part in found for case in part) == sorted(CASES)
    times = [sum(matrix.estimate(case, SECONDS) for case in part) for part in found]
    assert max(times) <= sum(times) / parts + 20.0, "one case of the slowest file at most"


def arguments(folder: Path, *more: str) -> list[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (folder / "test_little.py").write_text(LITTLE_TESTS)
    ini = ("-c", f"{folder}/pytest.ini", f"--rootdir={folder}")
    options = ("-n0", "-p", "no:hydra_pytest", *ini, f"{folder}/test_little.py", *more)
    return ["-m", "tests.matrix", "--results", f"{folder}/results.jsonl", "--part", "1/1", "--", *options]


@pytest.mark.slow
def test_a_crash_is_one_failure_and_a_second_command_runs_nothing_twice(tmp_path: Path) -> None:
    first = run_program(*arguments(tmp_path), folder=ROOT)
    assert first.returncode == 1, first.stdout + first.stderr
    (part,) = matrix.read(tmp_path / "results.jsonl").values()
    names = {case.partition("::")[2]: line["outcome"] for case, line in part.outcomes.items()}
    assert names == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_crashes": "failed",
        "test_last": "passed",
    }
    *_, fails, crashes = matrix.table({"1/1": part}).splitlines()
    assert fails == "FAILED 1/1 test_little.py::test_fails: AssertionError: not equal"
    assert crashes == "FAILED 1/1 test_little.py::test_crashes: the test process ended with 3 in it"
    assert matrix.record({"1/1": part}).keys() == {"test_little.py"}
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "1/1", "case": "cut sh')  # what a kill amid a line leaves
    again = run_program(*arguments(tmp_path), folder=ROOT)
    assert "1/1      5       2       2        1        0" in again.stdout
    assert "passed in" not in again.stdout, "nothing was run"


@pytest.mark.slow
def test_a_part_ends_when_its_time_is_over_and_goes_on_later(tmp_path: Path) -> None:
    limited = arguments(tmp_path, "-k", "passes or last")
    limited[2:2] = ["--minutes", "0"]
    late = run_program(*limited, folder=ROOT)
    assert late.returncode == 1
    assert "1/1      2       1       0        0        1" in late.stdout, late.stdout + late.stderr
    done = run_program(*arguments(tmp_path, "-k", "passes or last"), folder=ROOT)
    assert done.returncode == 0
    assert "1/1      2       2       0        0        0" in done.stdout
