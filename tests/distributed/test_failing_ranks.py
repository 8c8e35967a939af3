"""An exception on one rank ends all of them soon and is shown once, whatever its hooks save; one on all is saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ForkedProgram
from tests.forks import PATIENCE_S
from tests.parameters import slow
from tests.programs import ROOT


def fails(what: str, who: str, folder: Path) -> str:
    """What the script prints on stderr; it ends long before the time-out of its collectives."""
    script = str(ROOT / "tests" / "distributed" / "failing_script.py")
    with ForkedProgram(script, what, who, str(folder), folder=ROOT) as program:
        done = program.end(PATIENCE_S)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("what", "who"), [("stock", "1"), ("on_exception", "1"), ("own", "1"), ("own", "0")])
def test_an_error_on_one_rank_is_shown_once_and_nothing_is_saved(what: str, who: str, tmp_path: Path) -> None:
    shown = fails(what, who, tmp_path)
    assert len(re.findall(r"^\S*\s*ValueError: an error of the user's$", shown, re.M)) == 1
    if who != "0":  # with rank 0 the program ends, before the other has said so
        assert f"rank {who} failed: ValueError: an error of the user's" in shown
    assert shown.count("no checkpoint is saved now") == 1
    assert "saved checkpoint to" not in shown
    assert len(shown.splitlines()) < 100
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("what", ["stock", slow("on_exception"), slow("own")])
def test_an_error_on_all_ranks_is_saved(what: str, tmp_path: Path) -> None:
    shown = fails(what, "all", tmp_path)
    assert "no checkpoint is saved now" not in shown
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
