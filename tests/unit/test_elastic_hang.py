"""A slow first step is no hang: kernels compile in it, and nothing interrupts them. What hangs is ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch.distributed as dist

from moe_lightning.elastic.client_state import ClientState
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.worker import EXIT_HANGING, FAILURE_FILE_VARIABLE, end_hanging_process, report_failure
from moe_lightning.parallel.abort import StuckCollective

PATIENCE_S = 20.0
SETTINGS = ElasticSettings(hang_timeout_s=0.5, build_timeout_s=0.1, start_timeout_s=3.0)


def _in_a_world(*peers: str) -> ClientState:
    """Return a process that trains in its first world with these others."""
    state = ClientState(ElasticTask(address="none", secret_file="none", node="a", settings=SETTINGS))
    state.start_join(is_ready=True, is_spare=False)
    members = [state.member_id, *peers]
    state.receive({"t": "formed", "number": 1, "members": members, "probes": {}, "has_set_up": False}, 0.0)
    state.guard(state.world.members)
    return state


@pytest.mark.parametrize(
    ("steps", "seconds", "is_ended"),
    [(0, 0.6, False), (0, 2.9, False), (0, 3.1, True), (1, 0.4, False), (1, 0.6, True)],
)
def test_who_hangs_in_a_broken_world(steps: int, seconds: float, is_ended: bool) -> None:
    state = _in_a_world("1.b.0")
    for _ in range(steps):
        state.record_progress()
    state.receive({"t": "broken", "number": 1, "reason": "b died", "rating": 3}, 10.0)
    assert (state.exceeded_limit_s(10.0 + seconds) is not None) == is_ended
    state.start_join(is_ready=True, is_spare=False)
    assert state.exceeded_limit_s(1000.0) is None


@pytest.mark.parametrize("trains_again", [False, True])
def test_who_works_on_after_the_training_has_time_though_another_rank_fails(trains_again: bool) -> None:
    """It may export for minutes, and needs no other rank for that; in a collective it would be found."""
    state = _in_a_world("1.b.0")
    state.record_progress()
    state.finish()
    if trains_again:
        state.begin_fit()
    state.receive({"t": "broken", "number": 1, "reason": "b died", "rating": 3}, 10.0)
    assert (state.exceeded_limit_s(100.0) is not None) == trains_again
    assert state.awaited_since is not None


@pytest.mark.parametrize("peers", [[], ["1.b.0"]])
def test_who_trains_alone_has_time_to_come_back_with_the_only_state(peers: list[str]) -> None:
    """It learns at its next step that it was evicted, perhaps after a validation."""
    state = _in_a_world(*peers)
    state.record_progress()
    state.receive({"t": "evicted", "reason": "silent", "probes": {}}, 10.0)
    assert (state.exceeded_limit_s(100.0) is None) == (not peers)


def _main_place() -> tuple[str, int]:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_code.co_name, frame.f_lasti


def _looked(text: str, file: str, look: Callable[[], list[bool]]) -> list[bool]:
    """Return what a thread sees while the main thread waits in a function of this text."""
    found: list[bool] = []
    lock = threading.Lock()

    def run() -> None:
        deadline, former = time.monotonic() + PATIENCE_S, ("", 0)
        try:
            while (place := _main_place()) != former or place[0] != "wait":
                assert time.monotonic() < deadline
                former = place
                time.sleep(0.02)
            found.extend(look())
        finally:
            lock.release()

    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    thread = threading.Thread(target=run)
    with lock:
        thread.start()
        names["wait"](lock.acquire)
    thread.join()
    return found


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
    stuck = StuckCollective()
    for _ in range(2):  # each time it has its two seconds
        found = _looked(text, file, lambda: [stuck.exceeded_limit_s(now) is not None for now in (5.0, 6.9, 7.1)])
        assert found == [False, False, is_found]
        assert stuck.exceeded_limit_s(9.0) is None, "it came back"


def test_each_world_gives_the_main_thread_its_two_seconds() -> None:
    """It came back from the same collective of the last one before anybody looked."""

    def look() -> list[bool]:
        found = [client._groups.stuck.exceeded_limit_s(5.0) is not None]
        client.guard(members, lambda: None)
        return [*found, *(client._groups.stuck.exceeded_limit_s(now) is not None for now in (100.0, 102.1))]

    with RendezvousServer() as host:
        task = ElasticTask(address=str(host.address), secret_file=str(host.secret_file), node="a")
        with closing(RendezvousClient(task)) as client:
            members = client.join()
            assert _looked(COLLECTIVE, dist.distributed_c10d.__file__, look) == [False, False, True]


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
