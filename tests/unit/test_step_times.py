"""Times of steps, from which an automatic interval of checkpoints follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint, StepTimes


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
        at(start + 3).end_batch(is_update=False)
        at(start + 4).begin_batch()
        at(start + 7).begin_update()
        at(start + 8).begin_update()  # of another optimizer
        at(start + 9).end_batch(is_update=True)
        assert at(start + 9).overlap_s == 7


def test_waits_for_copies_and_saves_belong_to_no_step(at: Callable[[float], StepTimes]) -> None:
    at(1).end_batch(is_update=True)
    at(21).skip()  # a save
    at(22).begin_batch()
    at(24).begin_update()
    at(29).wait(5)
    at(30).end_batch(is_update=True)
    assert (at(30).step_s, at(30).overlap_s) == (4, 2)
    assert at(30).take_stall() == 5


@pytest.mark.parametrize("is_between_steps", [True, False])
def test_a_validation_belongs_to_no_step(
    at: Callable[[float], StepTimes], tmp_path: Path, is_between_steps: bool
) -> None:
    callback = PartialExpertsCheckpoint(str(tmp_path))
    callback._times = at(0)
    at(0).begin_batch()
    at(1).end_batch(is_update=is_between_steps)
    at(61)
    callback.on_validation_end()
    at(61).begin_batch()
    at(62).begin_update()
    at(63).end_batch(is_update=True)
    times = at(63)
    assert (times.step_s, times.overlap_s) == ((2, 1) if is_between_steps else (3, 2))
