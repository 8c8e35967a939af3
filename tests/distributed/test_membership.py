"""Worlds that break and form again: real processes, kill -9, SIGSTOP, growth, and nothing leaks."""

from __future__ import annotations

import re
import signal
import statistics
import sys

import pytest

from tests.distributed.elastic_toy import FAST, Toy
from tests.parameters import slow
from tests.races import LOST_WAKE_UP

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes and looks into /proc")


SLACK_S = 3.0
"""What a join may take beside the timeouts, on a busy machine."""


@pytest.mark.parametrize("victims", [slow([3]), [0], slow([1, 2]), [0, 3]])
def test_survivors_go_on_in_a_new_world(victims: list[int]) -> None:
    with Toy() as toy:
        workers = toy.start(4)
        first = toy.wait_for_world(workers)
        assert sorted(e["rank"] for e in first) == [0, 1, 2, 3]
        by_rank = {e["rank"]: w for e, w in zip(first, workers, strict=True)}
        killed = [by_rank[rank].signal(signal.SIGKILL) for rank in victims][-1]
        survivors = [by_rank[rank] for rank in range(4) if rank not in victims]
        after = toy.wait_for_world(survivors, after=killed)
        assert [e["rank"] for e in after] == list(range(4 - len(victims))), "the order of births stays"
        words = r"rank \d( on node node\d lost its connection|: .*(onnection|rror))"  # the host's, or some rank's own
        assert all(re.match(words, e["reason"]) for e in after), [e["reason"] for e in after]
        assert not any("\n" in e["reason"] or "typically" in e["reason"] for e in after)
        toy.stop(survivors)


def test_newcomers_are_let_in() -> None:
    with Toy() as toy:
        old = toy.start(1)
        toy.wait_for_world(old)
        new = toy.start(2)
        events = toy.wait_for_world(old + new)
        assert events[0]["rank"] == 0, "who was there first comes first"
        assert sorted(e["rank"] for e in events) == [0, 1, 2]
        assert events[0]["reason"] is None, "nothing broke"
        toy.stop(old + new)


@pytest.mark.parametrize("other", ["ready", "sets up"])
def test_who_sets_up_keeps_out_of_a_world_that_trains(other: str) -> None:
    """The world that the ready one waited for is gone: both come to a first world at the same moment."""
    with Toy() as toy:
        workers = toy.start(2, behaviours={0: other, 1: "sets up"})
        toy.wait_for_world(workers)
        firsts = [event["early"] for event in workers[1].events if event["event"] == "first"]
        assert firsts == [other == "ready"]
        toy.stop(workers)


@pytest.mark.known_race(LOST_WAKE_UP)
@pytest.mark.slow
def test_a_stopped_rank_is_expelled_and_comes_back_as_another_member() -> None:
    with Toy() as toy:
        workers = toy.start(3)
        first = toy.wait_for_world(workers)
        stopped = workers[1].signal(signal.SIGSTOP)
        others = [workers[0], workers[2]]
        after = toy.wait_for_world(others, after=stopped)
        assert max(e["time"] for e in after) - stopped < FAST.silence_timeout_s + SLACK_S
        rank = first[1]["rank"]
        for event in after:
            assert event["reason"] == f"rank {rank} on node node1 stopped answering for 1.0 s"
        workers[1].signal(signal.SIGCONT)
        toy.wait_for_world(others, maybe=[workers[1]])
        if not workers[1].pipe.closed:
            event = workers[1].worlds()[-1]
            assert event["id"] != first[1]["id"]
            assert event["rank"] == 2, "as the youngest"
            others.append(workers[1])
        toy.stop(others)


@pytest.mark.parametrize(
    "delay_s", [slow(0.0), *(pytest.param(delay_s, marks=pytest.mark.slow) for delay_s in (0.002, 0.004)), 0.008]
)
@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_a_member_is_lost_while_groups_are_built(fate: str, delay_s: float) -> None:
    with Toy() as toy:
        workers = toy.start(3, behaviours={1: f"{fate} 0 {delay_s}"})
        toy.wait_for_world([workers[0], workers[2]])  # fails where the two do not meet
        toy.stop([workers[0], workers[2]])


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


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=pytest.mark.slow)])
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
