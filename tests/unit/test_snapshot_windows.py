"""HAS: windows that are filled in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint.schedule import schedule_snapshot
from moe_lightning.errors import ConfigurationError


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10_000), st.floats(1, 1000), *[st.floats(0, 9)] * 4, st.booleans())
def test_windows_are_filled_in_order(
    nbytes: int, rate: float, bubble_s: float, idle_s: float, compute_s: float, communication_s: float, separate: bool
) -> None:
    found = schedule_snapshot(
        nbytes,
        bytes_per_s=rate,
        bubble_s=bubble_s,
        idle_s=idle_s,
        compute_s=compute_s,
        communication_s=communication_s,
        separate_link=separate,
    )
    assert found.total_bytes == nbytes
    rooms = [bubble_s * rate, idle_s * rate, compute_s * rate, communication_s * rate if separate else 0.0]
    used = [found.bubble_bytes, found.idle_bytes, found.compute_bytes, found.communication_bytes]
    for i, (part, room) in enumerate(zip(used, rooms, strict=True)):
        assert 0 <= part <= room
        if found.stall_bytes or any(used[i + 1 :]):
            assert part > room - 1, "a later window only after this one is full"
    assert found.stall_s * rate == pytest.approx(found.stall_bytes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule_snapshot(1, bytes_per_s=0.0, idle_s=0, compute_s=1), "bytes_per_s=0.0"),
        (lambda: schedule_snapshot(1, bytes_per_s=1.0, idle_s=-1, compute_s=1), "idle_s=-1"),
        (lambda: schedule_snapshot(-1, bytes_per_s=1.0, idle_s=0, compute_s=1), "snapshot_bytes=-1"),
    ],
)
def test_wrong_numbers_are_named(call: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()  # type: ignore[operator]
