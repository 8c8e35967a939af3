"""HAS: the bubble formula against an event simulation, and windows that are filled in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.algorithms.snapshot_windows import pipeline_bubble_s, schedule_snapshot
from moe_lightning.errors import ConfigurationError


def simulated_idle_s(num_stages: int, micro_batches: int, forward_s: float, backward_s: float) -> list[float]:
    """Idle time of every stage of a 1F1B schedule, by letting each operation start when its inputs are there."""
    orders = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, micro_batches)
        order = [("f", i) for i in range(warm_up)]
        for i in range(micro_batches - warm_up):
            order += [("f", warm_up + i), ("b", i)]
        orders.append(order + [("b", i) for i in range(micro_batches - warm_up, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * num_stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, i = order[0]
            before = (kind, i, stage - 1) if kind == "f" else (kind, i, stage + 1)
            first = before[2] < 0 or before[2] == num_stages
            if not first and before not in done:
                continue
            ready = done.get(before, 0.0) if not first else done[("f", i, stage)] if kind == "b" else 0.0
            clocks[stage] = max(clocks[stage], ready) + (forward_s if kind == "f" else backward_s)
            done[(kind, i, stage)] = clocks[stage]
            order.pop(0)
    step_s = max(clocks)
    return [step_s - micro_batches * (forward_s + backward_s)] * num_stages


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(0, 6), st.floats(0.5, 2.0), st.floats(0.5, 3.0))
def test_the_bubble_of_the_first_stage_is_exact(stages: int, more: int, forward_s: float, backward_s: float) -> None:
    idle_s = simulated_idle_s(stages, stages + more, forward_s, backward_s)
    mean_s = (forward_s + backward_s) / 2
    assert pipeline_bubble_s(0, stages, mean_s) == pytest.approx(idle_s[0])
    for stage in range(1, stages):
        assert pipeline_bubble_s(stage, stages, mean_s) == pytest.approx(idle_s[stage] - 0.2 * stage * mean_s)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10_000), st.floats(1, 1000), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.booleans())
def test_windows_are_filled_in_order(
    nbytes: int, rate: float, idle_s: float, compute_s: float, communication_s: float, separate: bool
) -> None:
    found = schedule_snapshot(
        nbytes,
        bytes_per_s=rate,
        idle_s=idle_s,
        compute_s=compute_s,
        communication_s=communication_s,
        separate_link=separate,
    )
    assert found.total_bytes == nbytes
    rooms = [idle_s * rate, compute_s * rate, communication_s * rate if separate else 0.0]
    used = [found.idle_bytes, found.compute_bytes, found.communication_bytes]
    for i, (part, room) in enumerate(zip(used, rooms, strict=True)):
        assert 0 <= part <= room
        if found.stall_bytes or any(used[i + 1 :]):
            assert part > room - 1, "a later window only after this one is full"
    assert found.stall_s * rate == pytest.approx(found.stall_bytes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pipeline_bubble_s(3, 3, 1.0), "stage=3"),
        (lambda: pipeline_bubble_s(0, 2, -1.0), "micro_batch_s=-1.0"),
        (lambda: schedule_snapshot(1, bytes_per_s=0.0, idle_s=0, compute_s=1), "bytes_per_s=0.0"),
        (lambda: schedule_snapshot(1, bytes_per_s=1.0, idle_s=-1, compute_s=1), "idle_s=-1"),
        (lambda: schedule_snapshot(-1, bytes_per_s=1.0, idle_s=0, compute_s=1), "snapshot_bytes=-1"),
    ],
)
def test_wrong_numbers_are_named(call: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()  # type: ignore[operator]
