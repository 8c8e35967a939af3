"""A rank that is told to leave hands over what only it holds, and the others go on without losing a step."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from tests.chaos.elastic_runs import SETTINGS, elastic_run

STEPS = 24


def _wait_for_steps(diary: Path, steps: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not diary.exists() or len(diary.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline, f"{diary.name} did not reach {steps} steps"
        time.sleep(0.02)


def test_sigterm_as_a_notice_hands_over_and_leaves(tmp_path: Path) -> None:
    with elastic_run(
        tmp_path,
        workers=3,
        steps=STEPS,
        settings=replace(SETTINGS, notice_on_sigterm=True),
        recovery={"min_replicas": 1},
    ) as run:
        _wait_for_steps(tmp_path / "diary-0.jsonl", 3)
        os.kill(run.processes[1].pid or 0, signal.SIGTERM)
        for worker in range(3):
            run.processes[worker].join(timeout=60)
        assert run.processes[0].exitcode == run.processes[2].exitcode == 0
        assert "SIGTERM asks this process to leave" in (tmp_path / "error-1.txt").read_text()
        report = run.result(0)["reports"][0]
        assert (report["ranks_before"], report["ranks_after"], report["steps_lost"]) == (3, 2, 0)
        assert report["restored"] == "12 experts from replicas, 0 stale"
        assert sorted(run.losses()) == list(range(1, STEPS + 1))
