"""When a link is called dead: late enough for a lossy network, early enough for the others to go on in time."""

from __future__ import annotations

import random

import pytest

from moe_lightning.elastic.rendezvous_client import LinkChecker, Prober
from moe_lightning.elastic.rendezvous_state import decision_s

SILENCE_S = 5.0
_TICK_S = 0.1
_RECOVERY_S = 2.0  # for leaving, meeting, building groups and a step, of the second beyond the silence timeout and more


class Lossy(Prober):
    """Packets to one node, of which a share comes back at once.

    Args:
        is_answered: the node has answered before.
    """

    def __init__(self, share_lost: float, seed: int = 0, *, is_answered: bool = True) -> None:
        super().__init__(b"secret", "127.0.0.1")
        self.is_answered = is_answered
        self.lost, self._random = share_lost, random.Random(seed)

    def send(self, now: float, interval_s: float) -> None:
        super().send(now, interval_s)
        while self._open:
            _, node = self._open.popitem()
            if self._random.random() >= self.lost:
                self.last_reply[node], self.misses[node] = now, 0
                self.answers[node] += 1
                self.is_answered = True


def unreachable_at(share_lost: float, until_s: float, seed: int = 0) -> float | None:
    """When a world that stands still from 0 on calls its only link dead; None if it does not."""
    watch, prober = LinkChecker(SILENCE_S), Lossy(share_lost, seed)
    try:
        watch.use(prober, 0.0)
        watch.enter({"b": prober.endpoint}, 0.0, is_first=True)
        for tick in range(round(until_s / _TICK_S)):
            if watch.unreachable(1, tick * _TICK_S, is_connected=True):
                return tick * _TICK_S
        return None
    finally:
        prober.close()


def test_a_dead_link_leaves_two_seconds_to_go_on_within_the_silence_timeout_and_one() -> None:
    found = unreachable_at(1.0, 10.0)
    assert found + decision_s(SILENCE_S) <= SILENCE_S + 1.0 - _RECOVERY_S


@pytest.mark.parametrize("seed", range(3))
def test_ten_percent_loss_in_both_directions_is_no_dead_link(seed: int) -> None:
    assert unreachable_at(1 - 0.9**2, 300.0, seed) is None


@pytest.mark.parametrize("step_s", [0.5, 10.0])
def test_a_world_that_steps_is_not_looked_at(step_s: float) -> None:
    """However long its steps are: three of them are no stall, one that lasts four is."""
    watch, prober = LinkChecker(SILENCE_S), Lossy(1.0)
    watch.use(prober, 0.0)
    watch.enter({"b": prober.endpoint}, 0.0, is_first=True)
    ticks = round(4 * step_s / _TICK_S)
    watch.unreachable(0, 0.0, is_connected=True)
    watch.unreachable(1, step_s, is_connected=True)
    for tick in range(20 * ticks):
        now = step_s + tick * _TICK_S
        assert not watch.unreachable(1 + int(tick * _TICK_S / step_s), now, is_connected=True)
    assert not prober.misses, "nothing was sent"
    assert any(watch.unreachable(80, now + tick * _TICK_S, is_connected=True) for tick in range(ticks + 100))
    prober.close()


def test_the_first_rank_of_a_node_probes_for_all_that_reach_the_host() -> None:
    watch, prober = LinkChecker(SILENCE_S), Lossy(1.0)
    watch.use(prober, 0.0)
    watch.enter({"b": prober.endpoint}, 0.0, is_first=False)
    assert not any(watch.unreachable(1, tick * _TICK_S, is_connected=True) for tick in range(100))
    assert not prober.misses, "nothing was sent"
    assert any(watch.unreachable(1, 10.0 + tick * _TICK_S, is_connected=False) for tick in range(100))
    prober.close()


def test_who_was_left_out_returns_when_its_packets_are_answered() -> None:
    watch, prober = LinkChecker(SILENCE_S), Lossy(1.0)
    watch.use(prober, 0.0)
    watch.leave({"b": prober.endpoint}, 0.0)
    assert not any(watch.do_answer(tick * _TICK_S) for tick in range(100))
    prober.lost = 0.0
    assert any(watch.do_answer(10.0 + tick * _TICK_S) for tick in range(20))
    prober.close()


def test_where_udp_never_passes_no_link_is_dead(caplog: pytest.LogCaptureFixture) -> None:
    watch, prober = LinkChecker(SILENCE_S), Lossy(1.0, is_answered=False)
    watch.enter({"b": prober.endpoint}, 0.0, is_first=True)
    watch.use(prober, 0.0)
    assert not any(watch.unreachable(1, tick * _TICK_S, is_connected=tick < 300) for tick in range(600))
    assert [record.message.split(":")[0] for record in caplog.records] == ["no node answers UDP packets"]
    prober.close()


def test_one_process_of_a_node_says_that_udp_never_passes(caplog: pytest.LogCaptureFixture) -> None:
    watch, prober = LinkChecker(SILENCE_S), Lossy(1.0, is_answered=False)
    watch.use(prober, 0.0)
    watch.enter({"b": prober.endpoint}, 0.0, is_first=False)
    assert not any(watch.unreachable(1, tick * _TICK_S, is_connected=True) for tick in range(600))
    assert not caplog.records
    prober.close()


def test_a_link_is_dead_for_a_prober_of_another_address_too(caplog: pytest.LogCaptureFixture) -> None:
    watch, former, prober = LinkChecker(SILENCE_S), Lossy(0.0), Lossy(1.0, is_answered=False)
    watch.use(former, 0.0)
    watch.enter({"b": former.endpoint}, 0.0, is_first=True)
    watch.use(prober, 0.0)
    assert any(watch.unreachable(1, tick * _TICK_S, is_connected=True) for tick in range(100))
    assert not caplog.records
    former.close()
    prober.close()


@pytest.mark.parametrize("progress_per_tick", [0, 1])
def test_a_link_that_dies_after_a_greeting_is_dead(progress_per_tick: int) -> None:
    watch, prober = LinkChecker(SILENCE_S), Lossy(0.5, is_answered=False)
    watch.use(prober, 0.0)
    watch.enter({"b": prober.endpoint}, 0.0, is_first=True)
    for tick in range(10):
        assert not watch.unreachable(progress_per_tick * tick, tick * _TICK_S, is_connected=True)
    assert prober.is_answered
    prober.lost = 1.0
    assert any(watch.unreachable(9, tick * _TICK_S, is_connected=True) for tick in range(10, 70))
    prober.close()
