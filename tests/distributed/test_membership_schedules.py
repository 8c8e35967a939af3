"""Random schedules of kill -9, stops, continuations and starts: whoever lives ends up in one world, without a hang.

A seed is a schedule, so a failure can be repeated.
"""

from __future__ import annotations

import random
import signal
import sys
import time

import pytest

from tests.distributed.elastic_toy import Toy, Worker
from tests.parameters import slow
from tests.races import LOST_WAKE_UP

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes and looks into /proc"),
    pytest.mark.known_race(LOST_WAKE_UP),
]

RANKS = 4


def run_schedule(seed: int) -> None:
    rng = random.Random(seed)
    with Toy() as toy:
        alive = toy.start(RANKS)
        stopped: list[Worker] = []
        back: list[Worker] = []
        toy.wait_for_world(alive)
        for _ in range(4):
            for victim in rng.sample(alive, rng.randint(1, 2)):
                time.sleep(rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.8)]))  # the schedule itself
                number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                victim.signal(number)
                alive.remove(victim)
                if number == signal.SIGSTOP:
                    stopped.append(victim)
            if stopped and rng.random() < 0.5:
                back.append(stopped.pop())
                back[-1].signal(signal.SIGCONT)
            if rng.random() < 0.5:
                toy.wait_for_world(alive, maybe=back)  # else the next faults fall into the recovery
            alive += toy.start(max(0, RANKS - len(alive)), expected=RANKS)
        toy.wait_for_world(alive, maybe=back)
        toy.stop(alive + [worker for worker in back if not worker.pipe.closed])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *map(slow, [1, 2, *range(1000, 1200)])])
def test_random_faults(seed: int) -> None:
    run_schedule(seed)  # waiting for each world is the assertion
