"""What the README shows works: its example runs as a user would run it, its test command is the one that CI reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program, users_environment

README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    match = re.search(rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert match is not None, f"README.md has no block after <!-- {marker} -->"
    return match.group(1)


@pytest.mark.slow
def test_own_module_trains_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block_after("example: own module"))
    done = run_program(script, folder=tmp_path, variables={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_epochs=4" in done.stderr + done.stdout


def test_the_readme_shows_the_test_command() -> None:
    assert block_after("test command").strip() == 'pip install -e ".[test]" && pytest -n 2'


@pytest.mark.parametrize(("failing", "code"), [(None, 0), ("ruff", 1), ("mypy", 1), ("sphinx-build", 1), ("pytest", 1)])
def test_ci_checks_and_then_runs_the_test_command_of_the_readme(failing: str | None, code: int, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = Path(shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run"))
    (tmp_path / "README.md").write_text(README)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python", "pip", "ruff", "mypy", "sphinx-build", "pytest"):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*"\nexit {int(name == failing)}\n')
        tool.chmod(0o755)
    # In place of `python -m venv FOLDER`: an environment with nothing in it.
    (tools / "python").write_text('#!/bin/sh\nmkdir -p "$3/bin" && touch "$3/bin/activate"\n')
    variables = users_environment() | {"PYTHON": str(tools / "python"), "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([script], env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("+")]
    notes = [line for line in said if line.startswith("failed before the tests")]
    assert len(notes) == (failing in ("ruff", "mypy", "sphinx-build"))
    assert [line for line in said if line not in notes] == [
        "pip install -e .[test]",
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "sphinx-build -q -W --keep-going docs build/docs",
        "pip install -e .[test]",
        "pytest -n 2",
    ]
