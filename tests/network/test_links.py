"""One link between two hosts dies, in both or in one direction, while everybody reaches the rendezvous host."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.network.trainings import BACK_S, END_S, GOES_ON_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]


def _evicted(training: Training, pair: tuple[str, str]) -> tuple[str, list[str]]:
    """Which of two hosts is left out of the newest world, and who is in it."""
    newest = max(training.members, key=lambda name: training.last(name).time)
    world = training.last(newest).world
    inside = [name for name in training.members if training.last(name).world == world]
    (outside,) = set(pair) - set(inside)
    return outside, inside


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
def test_a_link_dies_and_is_healed(three: Training, measured: Measured, one_way: bool) -> None:
    began = time.monotonic()
    three.hosts.block("a", "b", one_way=one_way)
    three.go_on("c", timeout_s=60, size=2)
    outside, inside = _evicted(three, ("a", "b"))
    pause = three.pause(inside, began)
    three.hosts.heal()
    back = three.go_on(three.members, timeout_s=BACK_S, size=3)
    value = f"{pause:.1f} s, {outside} back {back:.1f} s after healing"
    measured(f"two of three go on in {GOES_ON_S:g} s", value)
    assert pause <= GOES_ON_S
    three.assert_losses()


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
def test_a_link_dies_for_ever(three: Training, measured: Measured, one_way: bool) -> None:
    began = time.monotonic()
    three.hosts.block("b", "c", one_way=one_way)
    three.go_on("a", timeout_s=60, size=2)
    outside, inside = _evicted(three, ("b", "c"))
    pause = three.pause(inside, began)
    sentence = three.assert_ends(outside, timeout_s=END_S + 10)
    ended = three.ended_after(outside, began)
    goal = f"two of three go on in {GOES_ON_S:g} s, one ends in {END_S:g} s"
    measured(goal, f"{pause:.1f} s, {ended:.1f} s with {sentence!r}")
    assert pause <= GOES_ON_S
    assert ended <= END_S
    three.go_on(inside, timeout_s=30, size=2)
    assert len(three.worlds_since(inside[0], began)) <= 3, "who stays out tries to return once"
    three.assert_losses()


def test_a_host_hears_only_one_of_three_others(four: Training, measured: Measured) -> None:
    leader = four.leader() if four.etcd else None
    alone = next(name for name in four.members if name != leader)  # others must reach who hosts the rendezvous
    others = [name for name in four.members if name != alone]
    deaf = [name for name in others if name != leader][:2]
    began = time.monotonic()
    four.hosts.block(alone, deaf[0])
    four.hosts.block(alone, deaf[1], one_way=True)
    four.go_on(others, timeout_s=60, size=3)
    pause = four.pause(others, began)
    four.hosts.heal()
    four.go_on(four.members, timeout_s=BACK_S, size=4)
    measured(f"the three that hear each other go on in {GOES_ON_S:g} s", f"{pause:.1f} s")
    assert pause <= GOES_ON_S
    four.assert_losses()
