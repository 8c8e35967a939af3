"""Hosts stand still for a while: stopped by a signal, all their processes at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.network.trainings import BACK_S, GOES_ON_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]


def test_a_short_stop_costs_only_its_time(three: Training, measured: Measured) -> None:
    began = time.monotonic()
    three.hosts.freeze("c")
    time.sleep(3)
    three.hosts.thaw("c")
    three.go_on(three.members, timeout_s=30, size=3)
    pause = three.pause(three.members, began)
    measured("same world, goes on when woken", f"{pause:.1f} s without a step")
    assert len(three.worlds_since("a", began)) == 1
    assert pause <= 3 + 1
    three.assert_losses()


@pytest.mark.parametrize("seconds", [20, 120])
@pytest.mark.parametrize("which", ["rank 0", "a follower"])
def test_a_long_stop_is_an_expulsion_until_it_wakes(
    three: Training, measured: Measured, which: str, seconds: int
) -> None:
    lost, *rest = three.by_rank() if which == "rank 0" else reversed(three.by_rank())
    began = time.monotonic()
    three.hosts.freeze(lost)
    three.go_on(rest, timeout_s=30, size=2)
    pause = three.pause(rest, began)
    three.pace(1.0)
    time.sleep(began + seconds - time.monotonic())
    three.pace(three.pace_s)
    three.hosts.thaw(lost)
    back = three.go_on(three.members, timeout_s=BACK_S, size=3)
    goal = f"others go on in {GOES_ON_S:g} s, it comes back"
    measured(goal, f"{pause:.1f} s, back {back:.1f} s after waking")
    assert pause <= GOES_ON_S
    three.assert_losses()
