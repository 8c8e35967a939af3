"""What the README shows works: its example runs as a user would run it, its test command is the one that CI reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program

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


def test_ci_reads_the_test_command_from_the_readme() -> None:
    command = block_after("test command").strip()
    assert command == 'pip install -e ".[test]" && pytest -n 2'
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
