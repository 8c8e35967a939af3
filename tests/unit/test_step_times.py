"""Times of steps, from which an automatic interval of checkpoints follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_lightning.callbacks.checkpoint import StepTimes


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], StepTimes]:
    """Returns the times of steps that began at 0 s, with the clock at a second."""
    seconds = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])
    times = StepTimes()

    def set_clock(now_s: float) -> StepTimes:
        seconds[0] = now_s
        return times

    return set_clock


def test_copies_hide_under_the_passes_of_all_micro_batches(at: Callable[[float], StepTimes]) -> None:
    for start in (0, 10):
        at(start).begin_batch()
        at(start + 4).begin_batch()
        at(start + 7).begin_update()
        at(start + 8).begin_update()  # of another optimizer
        at(start + 9).end_step()
        assert (at(start + 9).step_s, at(start + 9).overlap_s) == (9, 7)


def test_waits_for_copies_and_what_comes_after_the_update_belong_to_no_step(at: Callable[[float], StepTimes]) -> None:
    at(1).end_step()
    at(21).wait(3)  # between two steps
    at(22).begin_batch()
    at(24).begin_update()
    at(29).wait(5)
    at(30).end_step()
    assert (at(30).step_s, at(30).overlap_s) == (3, 2)
    assert at(30).take_stall() == 8
    assert at(30).stall_s == 0
