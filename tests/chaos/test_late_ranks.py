"""Ranks that come back when the others have finished the run: there is nothing left to wait for."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.chaos.elastic_runs import Kill, elastic_run, finish

SOON_S = 30.0


def test_a_rank_that_wakes_after_the_others_have_finished_ends(tmp_path: Path) -> None:
    """Stopped in the middle of a step, expelled, and continued when nobody is left."""
    stops = [Kill(worker=1, step=2, place="forward", signal=signal.SIGSTOP)]
    with elastic_run(tmp_path, workers=3, steps=6, kills=stops) as run:
        finish(run, [0, 2])
        began = time.monotonic()
        run.signal(1, signal.SIGCONT)
        finish(run, [1], SOON_S)
        assert time.monotonic() - began < SOON_S
        assert max(run.losses()) == 6
