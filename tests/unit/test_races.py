"""Only a marked race is run again."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.programs import ROOT, TESTS, run_program

CONFTEST = """
from tests.races import rerun_known_races
def pytest_collection_modifyitems(items): rerun_known_races(items)
"""
TWICE = """
import pathlib, pytest
def fails_the_first_time(name):
    seen = pathlib.Path(__file__).with_name(name)
    before = seen.exists()
    seen.touch()
    assert before
def test_plain(): fails_the_first_time("plain")
@pytest.mark.known_race("why")
def test_race(): fails_the_first_time("race")
@pytest.mark.known_race("why", sign="ended with 75")
def test_other(): fails_the_first_time("other")
@pytest.mark.known_race("why", sign="assert")
def test_signed(): fails_the_first_time("signed")
"""
OPTIONS = ("-q", "-rRf", "-n0", "-p", "no:hydra_pytest", "-c", "pytest.ini")


def test_only_a_known_race_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = known_race\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_twice.py").write_text(TWICE)
    done = run_program("-m", "pytest", *OPTIONS, folder=tmp_path, variables=TESTS)
    assert "RERUN test_twice.py::test_race" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_twice.py::test_plain" in done.stdout
    assert "FAILED test_twice.py::test_other" in done.stdout
    assert "RERUN test_twice.py::test_signed" in done.stdout
    assert "2 failed, 2 passed, 2 rerun" in done.stdout
    (tmp_path / "test_twice.py").write_text("import pytest\n@pytest.mark.known_race\ndef test_it(): pass\n")
    done = run_program("-m", "pytest", *OPTIONS, folder=tmp_path, variables=TESTS)
    assert "test_it: known_race needs the reason" in done.stdout + done.stderr


def test_nothing_is_run_again_by_default() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "reruns" not in options["addopts"]
