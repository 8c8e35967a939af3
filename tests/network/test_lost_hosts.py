"""Hosts are lost, with and without a word, alone, together, and in the worst moments."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.manifest import METADATA
from moe_lightning.checkpoint.names import MANIFEST
from tests.network.hosts import wait_for
from tests.network.trainings import BACK_S, GOES_ON_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = Callable[[str, str], None]


def _crash(training: Training, name: str) -> None:
    """Every process of a host is killed; its kernel still says so to those that ask."""
    training.hosts[name].signal(-1, signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_two_of_four_within_a_second(four: Training, measured: Measured, how: str) -> None:
    lose = four.hosts.power_off if how == "silent" else lambda name: _crash(four, name)
    began = time.monotonic()
    lose("b")
    time.sleep(0.5)
    lose("d")
    four.go_on("ac", timeout_s=60, size=2)
    pause = four.pause("ac", began)
    measured(f"the others go on in {GOES_ON_S:g} s", f"{pause:.1f} s")
    assert pause <= GOES_ON_S + 0.5
    four.restore()
    four.assert_losses()


def test_one_while_another_joins(four: Training, measured: Measured) -> None:
    _crash(four, "d")
    four.go_on("abc", timeout_s=60, size=3)
    four.launch("d")
    wait_for(lambda: four.workers("d") > 0, BACK_S, four.words)
    began = time.monotonic()
    four.hosts.power_off("b")
    four.go_on("ac", timeout_s=60)
    pause = four.pause("ac", began)
    four.go_on("acd", timeout_s=BACK_S, size=3)
    measured(f"the others go on in {GOES_ON_S:g} s, the new one joins", f"{pause:.1f} s")
    assert pause <= GOES_ON_S
    four.restore()
    four.assert_losses()


@pytest.mark.parametrize("name", ["a", "b"])
def test_one_in_a_commit_of_a_step(three: Training, measured: Measured, name: str) -> None:
    began = time.monotonic()
    (three.folder / f"die-{name}").touch()
    rest = [other for other in three.members if other != name]
    three.go_on(rest, timeout_s=60)
    pause = three.pause(rest, began)
    assert not (three.folder / f"die-{name}").exists(), "it died there"
    three.go_on(three.members, timeout_s=BACK_S, size=3)
    measured(f"the others go on in {GOES_ON_S:g} s", f"{pause:.1f} s")
    assert pause <= GOES_ON_S
    three.assert_losses()


_MOMENTS: dict[str, Callable[[Path], bool]] = {
    "its part is written": lambda staging: True,
    "the parts are there": lambda staging: len(list(staging.glob("part-*.json"))) == 3,
    "it is assembled": lambda staging: (staging / METADATA).exists(),
}


@pytest.mark.parametrize("which", ["one of them", "all"])
@pytest.mark.parametrize("moment", _MOMENTS)
def test_hosts_in_a_commit_of_a_checkpoint(three: Training, measured: Measured, moment: str, which: str) -> None:
    """Host a, or every host, loses its power while a checkpoint is committed, and starts over."""
    root = three.folder / "checkpoints"
    had = set(root.glob(".staging-*"))
    has_come = _MOMENTS[moment]
    wait_for(lambda: any(has_come(path) for path in root.glob(".staging-*") if path not in had), 60, poll_s=0.0)
    began = time.monotonic()
    three.hosts.power_off(*("a" if which == "one of them" else three.members))
    if which == "one of them":
        three.go_on("bc", timeout_s=60, size=2)
        measured(f"the others go on in {GOES_ON_S:g} s", f"{three.pause('bc', began):.1f} s")
        assert three.pause("bc", began) <= GOES_ON_S
    stood = three.newest()
    three.restore()
    again = min(step.step for name in three.members for step in three.steps(name) if step.time > began + 1)
    measured("goes on from the last checkpoint", f"step {again} after step {stood}")
    assert again > 1, "not from the beginning"
    three.assert_losses()
    _assert_one_writer(root)


def _assert_one_writer(root: Path) -> None:
    """Every checkpoint is whole, and no older world has committed one after a newer world."""
    in_time = sorted(checkpoints(root), key=lambda entry: (entry[0] / MANIFEST).stat().st_mtime_ns)
    worlds = [manifest.world for _, manifest in in_time]
    assert worlds == sorted(worlds)
    newest = find_newest(root)
    assert newest.checkpoint is not None
    assert not newest.problems


def test_connections_between_two_ranks_are_reset(three: Training, measured: Measured) -> None:
    began = time.monotonic()
    three.hosts.reset("a", "b")
    three.go_on(three.members, timeout_s=BACK_S, size=3, steps=30)
    pause = three.pause(three.members, began)
    measured(f"all go on in {GOES_ON_S:g} s", f"{pause:.1f} s")
    assert pause <= GOES_ON_S
    three.assert_losses()
