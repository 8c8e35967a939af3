"""Copies keep to the windows that HAS gives them, measured in a step whose parts are known."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint import snapshotter
from moe_lightning.checkpoint.schedule import Window, schedule_snapshot
from moe_lightning.checkpoint.snapshotter import CopyWindows
from moe_lightning.parallel import context
from moe_lightning.parallel.context import ExchangeClock, World

ALL = frozenset(Window)
FREE = {Window.BUBBLE, Window.IDLE}
CPU = torch.device("cpu")


class HandClock:
    """Seconds that pass only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        stub = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(snapshotter, "time", stub)
        monkeypatch.setattr(context, "time", stub)

    def __call__(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch)


def world_on(device: str) -> World:
    return World(rank=0, size=2, device=torch.device(device))


def one_step(
    windows: CopyWindows, world: World, passes: HandClock, *, idle_s: float, compute_s: float, exchange_s: float
) -> None:
    windows.step.begin()
    passes(idle_s)
    windows.step.begin_batch()
    passes(compute_s)
    with world.exchanges.exchange(CPU):
        passes(exchange_s)
    windows.before_update()


def copied(windows: CopyWindows, num_bytes: int, copy_s: float) -> None:
    """A whole copy that took so long and was not held back."""
    windows.copy_begins(num_bytes)
    windows.copy_ended(num_bytes, copy_s)


@pytest.mark.parametrize(
    ("device", "separate_link", "num_bytes", "expected"),
    [
        ("cuda", False, 1_000, FREE),
        ("cuda", False, 2_000, FREE | {Window.COMPUTE}),
        ("cuda", True, 2_000, FREE | {Window.COMPUTE}),
        ("cuda", True, 7_000, ALL),
        ("cuda", False, 7_000, ALL),  # without the exchanges it would stall
        ("cuda", True, 1_000_000, ALL),
        ("cpu", False, 3_000, FREE | {Window.COMMUNICATION}),
        ("cpu", False, 4_000, ALL),
    ],
)
def test_windows_open_in_order_as_far_as_they_are_needed(
    passes: HandClock, device: str, separate_link: bool, num_bytes: int, expected: set[Window]
) -> None:
    """A step of 1 s idle, 5 s of computation, 2 s of exchanges; 2000 bytes a second, half of which are planned with."""
    world = world_on(device)
    windows = CopyWindows(world, separate_link=separate_link)
    assert windows.open == ALL
    copied(windows, 2_000, 1.0)
    assert windows.open == ALL, "nothing is measured yet"
    one_step(windows, world, passes, idle_s=1.0, compute_s=5.0, exchange_s=2.0)
    windows.copy_begins(num_bytes)
    assert windows.open == expected


def test_a_plan_that_made_training_wait_doubles_the_reserve(passes: HandClock) -> None:
    """2000 bytes a second: half of what fits into the idle second is planned there, then a quarter, then an eighth."""
    world = world_on("cuda")
    windows = CopyWindows(world, separate_link=False)
    copied(windows, 2_000, 1.0)
    one_step(windows, world, passes, idle_s=1.0, compute_s=9.0, exchange_s=0.0)
    for stall_s, opened in [(0.0001, FREE), (0.5, FREE), (0.5, FREE), (0.0, FREE | {Window.COMPUTE})]:
        windows.copy_begins(300)
        assert windows.open == opened
        windows.waited(stall_s)


def test_what_to_expect_is_the_median_of_the_last_steps(passes: HandClock) -> None:
    """Now and then a step is far longer: that promises nothing."""
    world = world_on("cuda")
    windows = CopyWindows(world, separate_link=False)
    copied(windows, 2_000, 1.0)
    for idle_s in (100.0, 1.0, 1.0, 90.0, 1.0):
        one_step(windows, world, passes, idle_s=idle_s, compute_s=9.0, exchange_s=0.0)
    windows.copy_begins(2_000)
    assert windows.open == FREE | {Window.COMPUTE}


def pipeline_step(windows: CopyWindows, world: World, passes: HandClock, bubbles_s: Sequence[float]) -> None:
    """A second of computation, a bubble, and again."""
    windows.step.begin()
    with world.bubbles.exchange(CPU):
        passes(50.0)  # of a validation: idle time in any case
    windows.step.begin_batch()
    for bubble_s in bubbles_s:
        passes(1.0)
        with world.bubbles.exchange(CPU):
            passes(bubble_s)
    windows.before_update()


def test_what_fits_into_the_bubbles_to_come_waits_for_them(passes: HandClock) -> None:
    """Bubbles of 1 and 2 s are expected, at 1000 bytes a second with the reserve: 3000 bytes, then 2000."""
    world = world_on("cuda")
    windows = CopyWindows(world, separate_link=False)
    copied(windows, 2_000, 1.0)
    pipeline_step(windows, world, passes, (1.0, 2.0))
    assert windows._measured[-1] == {
        Window.BUBBLE: 3.0,
        Window.IDLE: 50.0,
        Window.COMPUTE: 2.0,
        Window.COMMUNICATION: 0.0,
    }
    windows.step.begin()
    windows.copy_begins(4_000)
    assert windows._admits(Window.IDLE)
    windows.admit(1_000)
    assert not windows._admits(Window.IDLE), "the rest fits"
    windows.step.begin_batch()
    passes(1.0)
    with world.bubbles.exchange(CPU):
        windows.admit(500)
        passes(1.0)
    assert not windows._admits(Window.COMPUTE), "no window of this plan"
    assert windows._admits(Window.IDLE), "2500 are left"
    with world.bubbles.exchange(CPU):
        windows.admit(2_500)
    assert windows.copied_bytes == {
        Window.BUBBLE: 3_000,
        Window.IDLE: 1_000,
        Window.COMPUTE: 0,
        Window.COMMUNICATION: 0,
    }
    windows.step.begin()
    windows.copy_begins(3_000)
    assert windows.open == ALL, "nothing is planned elsewhere, and what falls behind goes anywhere"
    assert not windows._admits(Window.IDLE)
    windows.hurry()
    assert windows._admits(Window.COMPUTE)


def test_idle_time_between_micro_batches_counts_once(passes: HandClock) -> None:
    world = world_on("cuda")
    windows = CopyWindows(world, separate_link=False)
    windows.step.begin()
    for _ in range(3):
        passes(1.0)
        windows.step.begin_batch()
        passes(10.0)
        windows.step.end_batch()
    passes(1.0)
    windows.step.begin_batch()
    passes(2.0)
    windows.before_update()
    assert windows._measured[-1] == {
        Window.BUBBLE: 0.0,
        Window.IDLE: 4.0,
        Window.COMPUTE: 32.0,
        Window.COMMUNICATION: 0.0,
    }


def test_a_copy_waits_for_its_window_and_hurries_before_the_update() -> None:
    world = world_on("cuda")
    windows = CopyWindows(world, separate_link=False)
    windows.open = frozenset({Window.IDLE})
    windows.step.begin()
    admitted: list[int] = []

    def copier() -> None:
        for size in (1, 2, 3):
            windows.admit(size)
            admitted.append(size)
            told.release()
            go_on.acquire()

    told, go_on = threading.Semaphore(0), threading.Semaphore(0)
    thread = threading.Thread(target=copier)
    thread.start()
    assert told.acquire(timeout=10)
    windows.step.begin_batch()
    go_on.release()
    assert not told.acquire(timeout=0.05), "computation is no window of this copy"
    windows.step.end_batch()
    assert told.acquire(timeout=10)
    with world.exchanges.exchange(CPU):
        go_on.release()
        assert not told.acquire(timeout=0.05), "nor is an exchange"
        windows.hurry()
        assert told.acquire(timeout=10)
    go_on.release()
    thread.join(timeout=10)
    assert admitted == [1, 2, 3]
    assert {window: size for window, size in windows.copied_bytes.items() if size} == {
        Window.IDLE: 3,
        Window.COMMUNICATION: 3,
    }
    assert windows._held_s > 0.05


class FakeEvent:
    """An event that the device reaches when told."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, **_: Any) -> None:
        self.at_ms: float | None = None
        self.made.append(self)

    def record(self, _stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


def test_on_cuda_the_device_tells_when_an_exchange_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.made = []
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    clock, cuda = ExchangeClock(), torch.device("cuda")
    with clock.exchange(cuda):
        assert not clock.is_busy
    assert not FakeEvent.made, "nobody watches"
    clock.watch()
    for _ in range(2):
        with clock.exchange(cuda):
            assert clock.is_busy
    began, ended, again, _ = FakeEvent.made
    assert not clock.is_busy, "queued behind computation"
    began.at_ms = 5.0
    assert clock.is_busy
    ended.at_ms = 9.0
    assert not clock.is_busy
    assert clock.seconds == pytest.approx(4e-3)
    again.at_ms = 11.0
    assert clock.is_busy
    assert clock.seconds == pytest.approx(4e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_of_a_clock_counts_for_itself(
    passes: HandClock, copied: Callable[[ExchangeClock], ExchangeClock]
) -> None:
    clock = ExchangeClock()
    clock.watch()
    with clock.exchange(CPU):
        passes(1.0)
        other = copied(clock)
    other.watch()
    assert not other.is_busy
    assert (clock.seconds, other.seconds) == (1.0, 0.0)


def test_an_exchange_that_fails_is_over(passes: Callable[[float], None]) -> None:
    clock = ExchangeClock()
    clock.watch()

    def fail() -> None:
        with clock.exchange(CPU):
            passes(2.0)
            raise ConnectionError("a peer died")

    with pytest.raises(ConnectionError):
        fail()
    assert not clock.is_busy
    assert clock.seconds == 2.0


# ----------------------------------------------------------------------
# HAS: windows that are filled in order.


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10_000), st.floats(1, 1000), st.dictionaries(st.sampled_from(Window), st.floats(0, 9)))
def test_windows_are_filled_in_order(nbytes: int, rate: float, window_s: dict[Window, float]) -> None:
    copied = schedule_snapshot(nbytes, window_s, bytes_per_s=rate)
    assert list(copied) == list(Window)
    left = nbytes
    for window, part in copied.items():
        room, left = window_s.get(window, 0.0) * rate, left - part
        assert 0 <= part <= room
        assert not left or part > room - 1, "a later window only after this one is full"
    assert left >= 0
