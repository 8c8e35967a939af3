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
    """Packets to one node, of which a share comes back at once."""

    def __init__(self, share_lost: float, seed: int = 0) -> None:
        super().__init__(b"secret", "127.0.0.1")
        self._lost, self._random, self._told = share_lost, random.Random(seed), 0

    def send(self, now: float, interval_s: float) -> None:
        super().send(now, interval_s)
        while self._open:
            _, node = self._open.popitem()
            if self._random.random() >= self._lost:
                self.last_reply[node], self.misses[node] = now, 0
                self.answers[node] += 1


def unreachable_at(share_lost: float, until_s: float, seed: int = 0) -> float | None:
    """When a world that stands still from 0 on calls its only link dead; None if it does not."""
    watch, prober = LinkChecker(SILENCE_S), Lossy(share_lost, seed)
    try:
        watch.use(prober)
        watch.enter({"b": prober.endpoint}, 0.0)
        for tick in range(round(until_s / _TICK_S)):
            if watch.unreachable(1, tick * _TICK_S):
                return tick * _TICK_S
        return None
    finally:
        prober.close()


def test_a_dead_link_leaves_two_seconds_to_go_on_within_the_silence_timeout_and_one() -> None:
    found = unreachable_at(1.0, 10.0)
    assert found is not None
    assert found + decision_s(SILENCE_S) <= SILENCE_S + 1.0 - _RECOVERY_S


@pytest.mark.parametrize("seed", range(3))
def test_ten_percent_loss_in_both_directions_is_no_dead_link(seed: int) -> None:
    assert unreachable_at(1 - 0.9**2, 300.0, seed) is None


def test_a_world_that_steps_is_not_looked_at() -> None:
    watch, prober = LinkChecker(SILENCE_S), Lossy(1.0)
    watch.use(prober)
    watch.enter({"b": prober.endpoint}, 0.0)
    assert not any(watch.unreachable(tick // 5, tick * _TICK_S) for tick in range(300))
    prober.close()
