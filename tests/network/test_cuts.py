"""Cables are pulled, and put back or not: of one host, and between two halves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.network.trainings import BACK_S, END_S, GOES_ON_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]


@pytest.mark.parametrize("which", ["rank 0", "a follower"])
@pytest.mark.parametrize("seconds", [5, 30])
def test_a_host_is_cut_off_for_a_while(three: Training, measured: Measured, which: str, seconds: int) -> None:
    lost, *rest = three.by_rank() if which == "rank 0" else reversed(three.by_rank())
    began = time.monotonic()
    three.hosts.cut(lost)
    time.sleep(seconds)
    three.hosts.heal()
    three.go_on(rest, timeout_s=30)
    pause = three.pause(rest, began)
    back = three.go_on(three.members, timeout_s=BACK_S, size=3)
    measured(f"others go on in {GOES_ON_S:g} s, all come back", f"{pause:.1f} s, back {back:.1f} s after healing")
    assert pause <= GOES_ON_S
    three.assert_losses()


@pytest.mark.parametrize("which", ["rank 0", "a follower"])
def test_a_host_is_cut_off_for_ever(three: Training, measured: Measured, which: str) -> None:
    lost, *rest = three.by_rank() if which == "rank 0" else reversed(three.by_rank())
    began = time.monotonic()
    three.hosts.cut(lost)
    three.go_on(rest, timeout_s=30, size=2)
    pause = three.pause(rest, began)
    sentence = three.assert_ends(lost, timeout_s=END_S + 10)
    ended = three.ended_after(lost, began)
    goal = f"others go on in {GOES_ON_S:g} s, it ends in {END_S:g} s"
    measured(goal, f"{pause:.1f} s, {ended:.1f} s with {sentence!r}")
    assert pause <= GOES_ON_S
    assert ended <= END_S
    three.assert_alive(rest)
    three.assert_losses()


def test_the_rendezvous_hosts_machine_is_cut_off_with_a_rank(apart: Training, measured: Measured) -> None:
    """Rank 0's machine is the rendezvous host's: it goes on alone, the others end."""
    alone, *rest = apart.members
    began = time.monotonic()
    apart.hosts.cut(alone)
    apart.go_on([alone], timeout_s=30, size=1)
    pause = apart.pause([alone], began)
    sentences = {apart.assert_ends(name, timeout_s=END_S + 10) for name in rest}
    ended = max(apart.ended_after(name, began) for name in rest)
    goal = f"one goes on in {GOES_ON_S:g} s, two end in {END_S:g} s"
    measured(goal, f"{pause:.1f} s, {ended:.1f} s with {sentences}")
    assert pause <= GOES_ON_S
    assert ended <= END_S
    apart.assert_losses()


@pytest.mark.parametrize("side", ["ab", "cd"])
def test_two_halves_healed_after_30_s(four: Training, measured: Measured, side: str) -> None:
    rest = [name for name in four.members if name not in side]
    began = time.monotonic()
    four.hosts.part([*side, four.rendezvous], rest)
    four.go_on(side, timeout_s=30, size=2)
    pause = four.pause(side, began)
    stood = four.newest_of(rest)
    time.sleep(began + 30 - time.monotonic())
    assert four.newest_of(rest) == stood, "never two worlds"
    four.hosts.heal()
    back = four.go_on(four.members, timeout_s=BACK_S, size=4)
    measured(
        f"the rendezvous host's side goes on in {GOES_ON_S:g} s", f"{pause:.1f} s, back {back:.1f} s after healing"
    )
    assert pause <= GOES_ON_S
    four.assert_losses()


def test_two_halves_for_ever(four: Training, measured: Measured) -> None:
    began = time.monotonic()
    four.hosts.part(["a", "b", four.rendezvous], ["c", "d"])
    four.go_on("ab", timeout_s=30, size=2)
    pause = four.pause("ab", began)
    sentences = {four.assert_ends(name, timeout_s=END_S + 10) for name in "cd"}
    ended = max(four.ended_after(name, began) for name in "cd")
    goal = f"one side goes on in {GOES_ON_S:g} s, the other ends in {END_S:g} s"
    measured(goal, f"{pause:.1f} s, {ended:.1f} s with {sentences}")
    assert pause <= GOES_ON_S
    assert ended <= END_S
    four.assert_losses()
