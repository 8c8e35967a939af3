"""A host comes back when the others have finished the run."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.network.trainings import END_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]


@pytest.mark.parametrize("how", ["cut off", "stopped"])
def test_a_host_that_comes_back_after_the_end_ends_well(three: Training, measured: Measured, how: str) -> None:
    lost, *rest = reversed(three.by_rank())
    away, back = (three.hosts.cut, three.hosts.heal) if how == "cut off" else (three.hosts.freeze, three.hosts.thaw)
    away(lost)
    three.go_on(rest, timeout_s=30, size=2)
    (three.folder / "end").write_text(str(three.newest()))  # who is away for 40 s ends with a sentence
    assert [three.launchers[name].wait(END_S) for name in rest] == [0, 0], three.words()
    began = time.monotonic()
    back(*([] if how == "cut off" else [lost]))
    assert three.launchers[lost].wait(END_S) == 0, three.words()
    measured("it ends at once", f"{three.ended_after(lost, began):.1f} s after it is back")
    assert "have finished the run" in "".join(p.read_text() for p in three.folder.glob("output-*"))
    (three.folder / "end").unlink()
