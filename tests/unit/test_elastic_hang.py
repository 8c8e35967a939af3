"""A slow first step is no hang: kernels compile in it, and nothing interrupts them. What hangs is ended."""

from __future__ import annotations

import os

import pytest

from moe_lightning.elastic.client_state import ClientState
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.worker import EXIT_HANGING, FAILURE_FILE_VARIABLE, end_hanging_process, report_failure

SETTINGS = ElasticSettings(hang_timeout_s=0.5, build_timeout_s=0.1, start_timeout_s=3.0)


@pytest.mark.parametrize(
    ("steps", "seconds", "is_ended"),
    [(0, 0.6, False), (0, 2.9, False), (0, 3.1, True), (1, 0.4, False), (1, 0.6, True)],
)
def test_who_hangs_in_a_broken_world(steps: int, seconds: float, is_ended: bool) -> None:
    state = ClientState(ElasticTask(address="none", secret_file="none", node="a", settings=SETTINGS))
    state.start_join(is_ready=True, is_spare=False)
    state.receive({"t": "formed", "number": 1, "members": [state.member_id], "probes": [None]}, 0.0)
    assert state.world is not None
    state.guard(state.world.members)
    for _ in range(steps):
        state.record_progress()
    state.receive({"t": "broken", "number": 1, "reason": "b died", "rating": 3}, 10.0)
    assert (state.exceeded_limit_s(10.0 + seconds) is not None) == is_ended
    state.start_join(is_ready=True, is_spare=False)
    assert state.exceeded_limit_s(1000.0) is None


def test_a_full_disk_keeps_no_hanging_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, "/dev/full")
    monkeypatch.setenv("RANK", "0")
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end_hanging_process(1.0, "a peer died")
    assert codes == [EXIT_HANGING]


def test_a_failure_that_cannot_be_written_is_raised_as_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, "/dev/full")
    monkeypatch.setenv("RANK", "0")
    assert not report_failure("crash", "ValueError: no", "Traceback")
