"""Worlds that break and form again: real processes, kill -9, SIGSTOP, growth, and nothing leaks."""

from __future__ import annotations

import signal
import statistics
import sys

import pytest

from tests.distributed.elastic_toy import FAST, Toy
from tests.parameters import slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes and looks into /proc")


SLACK_S = 3.0
"""What a join may take beside the timeouts, on a busy machine."""


@pytest.mark.parametrize("other", ["ready", "sets up"])
def test_who_sets_up_keeps_out_of_a_world_that_trains(other: str) -> None:
    """The world that the ready one waited for is gone: both come to a first world at the same moment."""
    with Toy() as toy:
        workers = toy.start(2, behaviours={0: other, 1: "sets up"})
        toy.wait_for_world(workers)
        firsts = [event["early"] for event in workers[1].events if event["event"] == "first"]
        assert firsts == [other == "ready"]
        toy.stop(workers)


@pytest.mark.parametrize("delay_s", [slow(0.0), *(slow(delay_s) for delay_s in (0.002, 0.004)), 0.008])
@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_a_member_is_lost_while_groups_are_built(fate: str, delay_s: float) -> None:
    with Toy() as toy:
        workers = toy.start(3, behaviours={1: f"{fate} 0 {delay_s}"})
        toy.wait_for_world([workers[0], workers[2]])  # fails where the two do not meet
        toy.stop([workers[0], workers[2]])


@pytest.mark.slow
def test_a_member_that_hangs_ends_itself() -> None:
    with Toy() as toy:
        workers = toy.start(3, behaviours={1: "hang"})
        toy.wait_for_world(workers)
        killed = workers[2].signal(signal.SIGKILL)
        after = toy.wait_for_world([workers[0]], after=killed)
        assert after[0]["time"] - killed < FAST.hang_timeout_s + SLACK_S
        workers[1].process.join(timeout=5)
        assert workers[1].process.exitcode == 75
        toy.stop([workers[0]])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [6, slow(50)])
def test_nothing_leaks(rounds: int) -> None:
    with Toy() as toy:
        stayer = toy.start(1)[0]
        toy.wait_for_world([stayer])
        counts, seconds = [], []
        for _ in range(rounds):
            (victim,) = toy.start(1)
            toy.wait_for_world([stayer, victim])
            killed = victim.signal(signal.SIGKILL)
            (event,) = toy.wait_for_world([stayer], after=killed)
            counts.append({name: event[name] for name in ("threads", "descriptors", "sockets")})
            seconds.append(event["time"] - killed)
        assert counts[3] == counts[-1], counts
        print(f"kill -9 to the first all-reduce: median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s")
        toy.stop([stayer])
