"""Fewer ranks than may train: the rest hold the state and wait; they go on with those that come, or save and end."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.checkpoint.loader import find_newest
from tests.chaos.elastic_runs import SETTINGS, ElasticRun, Kill, assert_same_losses, elastic_run, finish, reference
from tests.chaos.elastic_worker import checkpoints_of
from tests.forks import PATIENCE_S

STEPS = 6
KILLS = [Kill(worker=worker, step=3, place="backward") for worker in (1, 2)]
OPTIONS: dict[str, Any] = {"recovery": {"min_replicas": 3}, "kills": KILLS}


def wait_for_recovery(run: ElasticRun, worker: int, *, ranks: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while all(line["report"]["ranks_after"] != ranks for line in run.recoveries(worker)):
        assert time.monotonic() < deadline, run.words()
        run.reap(run.processes)
        time.sleep(0.02)


def test_a_world_that_is_too_small_waits_for_others(tmp_path: Path) -> None:
    with elastic_run(tmp_path, workers=3, steps=STEPS, settings=replace(SETTINGS, min_ranks=2), **OPTIONS) as run:
        wait_for_recovery(run, 0, ranks=1)
        assert max(run.losses()) == 3, "alone it does not train"
        run.start(1)
        run.supervise()
        assert_same_losses(run, reference(STEPS))
        assert run.world_sizes()[STEPS] == 2


@pytest.mark.slow
def test_without_others_it_saves_and_ends_with_a_sentence(tmp_path: Path) -> None:
    settings = replace(SETTINGS, min_ranks=2, join_timeout_s=2.0)
    saving = {"every_n_steps": 100}
    with elastic_run(tmp_path, workers=3, steps=STEPS, settings=settings, saving=saving, **OPTIONS) as run:
        with pytest.raises(AssertionError, match=r"(?s)worker 0 ended with 1: .*only 1 of at least 2 ranks"):
            run.supervise()
        found = find_newest(checkpoints_of(tmp_path)).checkpoint
        assert found.step == 3, "every committed step is saved, though no snapshot was due"
        found.verify()
        assert max(run.losses()) == 3


@pytest.mark.slow
def test_a_first_world_that_is_too_small_waits_too(tmp_path: Path) -> None:
    settings = replace(SETTINGS, min_ranks=2, start_timeout_s=0.5)
    with elastic_run(tmp_path, workers=1, steps=4, settings=settings) as run:
        run.expected = 2
        run.start(1)
        run.supervise()
        assert run.world_sizes() == dict.fromkeys(range(1, 5), 2)


# ----------------------------------------------------------------------
# Ranks that come back when the others have finished the run: there is nothing left to wait for.


SOON_S = 30.0


@pytest.mark.slow
def test_a_rank_that_wakes_after_the_others_have_finished_ends(tmp_path: Path) -> None:
    """Stopped in the middle of a step, evicted, and continued when nobody is left."""
    stops = [Kill(worker=1, step=2, place="forward", signal=signal.SIGSTOP)]
    with elastic_run(tmp_path, workers=3, steps=6, kills=stops) as run:
        finish(run, [0, 2])
        began = time.monotonic()
        run.signal(1, signal.SIGCONT)
        finish(run, [1], SOON_S)
        assert time.monotonic() - began < SOON_S
        assert max(run.losses()) == 6
