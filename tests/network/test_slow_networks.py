"""A network that loses or delays packets, or is narrow, is slow and not dead: nobody is evicted, and the run makes at
least half of the steps that plain torchrun makes at the same time over the same network.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.network.hosts import Hosts, wait_for
from tests.network.trainings import BACK_S, GOES_ON_S, Training, set_pace, steps_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]

_MEASURED_S = 60.0
_IDLE_PACE_S = 2.0
_NETWORKS: dict[str, Callable[[Hosts], None]] = {
    "2 % loss everywhere": lambda hosts: hosts.loss(2),
    "5 % loss everywhere": lambda hosts: hosts.loss(5),
    "10 % loss of one host": lambda hosts: hosts.loss(10, "b"),
    "50 +- 20 ms": lambda hosts: hosts.delay(0.05, jitter_s=0.02),
    "10 Mbit/s": lambda hosts: hosts.rate(10e6),
    "1 Mbit/s of one host": lambda hosts: hosts.rate(1e6, "b"),
}


def _steps_beside(training: Training, arguments: tuple[str, ...], seconds: float) -> tuple[int, int]:
    """Steps that the run and a torchrun made at the same time, both as fast as they can."""
    folder = training.beside(*arguments)
    diary = folder / f"diary-{training.members[0]}.jsonl"
    set_pace(folder, 0.0)
    training.pace(0.0)
    began = training.newest(), len(steps_in(diary))
    time.sleep(seconds)
    ended = training.newest(), len(steps_in(diary))
    set_pace(folder, _IDLE_PACE_S)
    training.pace(training.pace_s)
    return ended[0] - began[0], ended[1] - began[1]


@pytest.mark.parametrize("network", _NETWORKS)
def test_slow_is_not_dead(three: Training, measured: Measured, network: str) -> None:
    began = time.monotonic()
    three.beside()
    _NETWORKS[network](three.hosts)
    ours, plain = _steps_beside(three, (), _MEASURED_S)
    pause = three.pause(three.members, began)
    three.go_on(three.members, timeout_s=BACK_S, size=3)
    value = f"{ours / _MEASURED_S:.2f} steps/s, torchrun {plain / _MEASURED_S:.2f}, longest pause {pause:.1f} s"
    measured("same world, half of torchrun's steps", value)
    assert len(three.worlds_since("a", began)) == 1
    assert ours >= 0.5 * plain
    three.hosts.calm()
    three.assert_losses()


_SLOW_LINKS: dict[str, Callable[[Hosts], None]] = {
    "20 ms": lambda hosts: hosts.delay(0.02, "b"),
    "1 Mbit/s": lambda hosts: hosts.rate(1e6, "b"),
    "5 % loss": lambda hosts: hosts.loss(5, "b"),
}


@pytest.mark.parametrize("link", _SLOW_LINKS)
def test_the_host_of_a_slow_link_is_named(three: Training, measured: Measured, link: str) -> None:
    def named() -> list[str]:
        files = sorted(three.folder.glob("output-*"))
        lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
        return [line for line in lines if "slow: the link of rank" in line]

    three.pace(0.0)
    before, began = len(named()), time.monotonic()
    _SLOW_LINKS[link](three.hosts)
    wait_for(lambda: len(named()) > before, 180, three.words, poll_s=1.0)
    line = named()[before]
    measured("named", f"{time.monotonic() - began:.0f} s: {line}")
    assert f"slow: the link of rank {three.last('b').rank} ({three.hosts.address('b')}): " in line


def test_ddp_under_2_percent_loss(three: Training, measured: Measured) -> None:
    """Stock DDP sums once a step where expert parallelism exchanges several times, so this one is only told."""
    three.beside("--ddp")
    three.hosts.loss(2)
    ours, plain = _steps_beside(three, ("--ddp",), _MEASURED_S)
    measured("-", f"{ours / _MEASURED_S:.2f} steps/s, torchrun with DDP {plain / _MEASURED_S:.2f}")
    assert ours > 0
    assert plain > 0


@pytest.mark.parametrize("percent", [5, 10])
def test_a_rank_is_killed_and_joins_under_loss(three: Training, measured: Measured, percent: int) -> None:
    three.hosts.loss(percent)
    three.go_on(three.members, timeout_s=BACK_S, size=3, steps=20)
    began = time.monotonic()
    three.kill("b")
    three.go_on("ac", timeout_s=60)
    pause = three.pause("ac", began)
    back = three.go_on(three.members, timeout_s=BACK_S, size=3)
    measured(f"{percent} % loss: goes on in {GOES_ON_S:g} s, it joins again", f"{pause:.1f} s, {back:.1f} s")
    assert pause <= GOES_ON_S
    three.hosts.calm()
    three.assert_losses()
