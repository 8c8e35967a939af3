"""A slow first step is no hang: kernels compile in it, and nothing interrupts them. What hangs is ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from moe_lightning.elastic.client_state import ClientState
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.worker import EXIT_HANGING, FAILURE_FILE_VARIABLE, end_hanging_process, report_failure
from moe_lightning.parallel.abort import StuckCollective

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


def _called(text: str, file: str, call: Callable[[], object]) -> None:
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    names["wait"](call)


COLLECTIVE = "def wait(call):\n    work = call\n    work()\n"


@pytest.mark.parametrize(
    ("text", "file", "is_found"),
    [
        (COLLECTIVE, dist.distributed_c10d.__file__, True),
        (COLLECTIVE, "users.py", False),
        ("def wait(call):\n    call()\n", dist.distributed_c10d.__file__, False),
    ],
    ids=["collective", "other code", "building of groups"],
)
def test_a_main_thread_that_no_abort_frees_from_a_collective_is_found(text: str, file: str, is_found: bool) -> None:
    found: list[bool] = []

    def look(lock: threading.Lock, stuck: StuckCollective) -> None:
        try:
            time.sleep(0.2)
            found.extend(stuck.exceeded_limit_s(now) is not None for now in (5.0, 6.9, 7.1))
        finally:
            lock.release()

    stuck = StuckCollective()
    for _ in range(2):  # each time it has its two seconds
        lock = threading.Lock()
        lock.acquire()
        thread = threading.Thread(target=look, args=(lock, stuck))
        thread.start()
        _called(text, file, lock.acquire)
        thread.join()
        assert stuck.exceeded_limit_s(9.0) is None, "it came back"
    assert found == [False, False, is_found] * 2


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
