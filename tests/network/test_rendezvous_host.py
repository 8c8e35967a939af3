"""The rendezvous host dies, comes back, or is silent: training goes on; without it no fault can be recovered from."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.network.hosts import wait_for
from tests.network.trainings import BACK_S, END_S, GOES_ON_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]


def _kill(training: Training) -> None:
    service = training.services[training.rendezvous]
    service.send(signal.SIGKILL)
    service.wait(10)


def test_it_is_silent_for_30_s(three: Training, measured: Measured) -> None:
    began = time.monotonic()
    three.hosts.cut(three.rendezvous)
    time.sleep(30)
    three.hosts.heal()
    three.go_on(three.members, timeout_s=BACK_S, size=3, steps=50)
    pause = three.pause(three.members, began)
    measured("no step is late by more than 1 s, same world", f"{pause:.1f} s")
    assert len(three.worlds_since("a", began)) == 1
    assert pause <= 1
    three.assert_losses()


def test_it_is_killed_and_started_again(three: Training, measured: Measured) -> None:
    began = time.monotonic()
    _kill(three)
    three.go_on(three.members, timeout_s=BACK_S, size=3, steps=30)
    three.serve()
    three.go_on(three.members, timeout_s=BACK_S, size=3, steps=100)
    pause = three.pause(three.members, began)
    assert len(three.worlds_since("a", began)) == 1
    killed = time.monotonic()
    three.kill("b")
    three.go_on("ac", timeout_s=30)
    recovery = three.pause("ac", killed)
    three.go_on(three.members, timeout_s=BACK_S, size=3)
    goal = f"no step late by more than 1 s; a later kill: goes on in {GOES_ON_S:g} s"
    measured(goal, f"{pause:.1f} s; {recovery:.1f} s")
    assert pause <= 1
    assert recovery <= GOES_ON_S
    three.assert_losses()


def test_it_is_killed_for_ever(three: Training, measured: Measured) -> None:
    """Training goes on, however long; after a fault nobody can go on, and everybody says so."""
    began = time.monotonic()
    _kill(three)
    wait_for(lambda: time.monotonic() - began > 70, 80)
    three.go_on(three.members, timeout_s=30, size=3)
    pause = three.pause(three.members, began)
    lost = time.monotonic()
    three.kill("c")
    sentences = {three.assert_ends(name, timeout_s=END_S + 10) for name in three.members}
    ended = max(three.ended_after(name, lost) for name in three.members)
    goal = f"goes on; after a fault all end in {END_S:g} s"
    measured(goal, f"{pause:.1f} s; {ended:.1f} s with {sentences}")
    assert pause <= 1
    assert ended <= END_S
    assert three.etcd or all(three.rdzv_endpoint in sentence for sentence in sentences)
    three.assert_losses()


def test_it_is_killed_and_started_again_while_a_fault_waits(three: Training, measured: Measured) -> None:
    _kill(three)
    lost = time.monotonic()
    three.kill("b")
    time.sleep(10)
    three.serve()
    came = time.monotonic()
    three.go_on("ac", timeout_s=60)
    went_on = min(s.time for s in three.steps("a") if s.time > came) - came
    three.go_on(three.members, timeout_s=BACK_S, size=3)
    measured(f"goes on {GOES_ON_S:g} s after it is back", f"{went_on:.1f} s")
    assert went_on <= GOES_ON_S
    assert lost < came
    three.assert_losses()
