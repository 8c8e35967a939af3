"""The block-wise schedule: order, completeness, the split of transfers, and agreement with the closed form of the
model.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cost_model import (
    BlockCosts,
    BlockTimes,
    Kind,
    Stage,
    backward_schedule,
    forward_schedule,
    predict_block,
    predict_timeline,
    split_transfer,
)

FORWARD_TRANS = {Kind.TRANS_WHOLE, Kind.TRANS_UNDER_EXPERTS, Kind.TRANS_UNDER_DENSE}
BACKWARD_AGG = {Kind.AGG_WHOLE, Kind.AGG_UNDER_EXPERTS, Kind.AGG_UNDER_DENSE}


def flat(stages: tuple[Stage, ...]) -> list[tuple[Kind, int]]:
    operations = [operation for stage in stages for operation in (stage.foreground, stage.background) if operation]
    return [(operation.kind, operation.block) for operation in operations]


def test_the_forward_pass_of_two_blocks() -> None:
    assert flat(forward_schedule(2)) == [
        (Kind.TRANS_WHOLE, 0),
        (Kind.EXCHANGE, 0),
        (Kind.PLAN, 0),
        (Kind.EXPERTS_FORWARD, 0),
        (Kind.TRANS_UNDER_EXPERTS, 1),
        (Kind.EXCHANGE, 0),
        (Kind.DENSE_FORWARD, 0),
        (Kind.TRANS_UNDER_DENSE, 1),
        (Kind.EXCHANGE, 1),
        (Kind.PLAN, 1),
        (Kind.EXPERTS_FORWARD, 1),
        (Kind.EXCHANGE, 1),
        (Kind.DENSE_FORWARD, 1),
    ]


def test_the_backward_pass_of_two_blocks() -> None:
    assert flat(backward_schedule(2)) == [
        (Kind.DENSE_BACKWARD, 1),
        (Kind.EXCHANGE, 1),
        (Kind.EXPERTS_BACKWARD, 1),
        (Kind.EXCHANGE, 1),
        (Kind.DENSE_BACKWARD, 0),
        (Kind.AGG_UNDER_DENSE, 1),
        (Kind.EXCHANGE, 0),
        (Kind.EXPERTS_BACKWARD, 0),
        (Kind.AGG_UNDER_EXPERTS, 1),
        (Kind.EXCHANGE, 0),
        (Kind.AGG_WHOLE, 0),
    ]


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_weights_arrive_before_and_gradients_leave_after_their_experts(num_blocks: int) -> None:
    forward, backward = flat(forward_schedule(num_blocks)), flat(backward_schedule(num_blocks))
    for block in range(num_blocks):
        trans = [i for i, (kind, owner) in enumerate(forward) if kind in FORWARD_TRANS and owner == block]
        agg = [i for i, (kind, owner) in enumerate(backward) if kind in BACKWARD_AGG and owner == block]
        assert len(trans) == len(agg) == (1 if block == 0 else 2)
        assert max(trans) < forward.index((Kind.EXPERTS_FORWARD, block))
        assert min(agg) > backward.index((Kind.EXPERTS_BACKWARD, block))
    assert forward.count((Kind.EXCHANGE, 0)) == backward.count((Kind.EXCHANGE, 0)) == 2


@settings(deadline=None, max_examples=100)
@given(payload=st.integers(0, 10**9), transfer_s=st.floats(0, 10), dense_s=st.floats(0, 10))
def test_the_split_loses_no_byte_and_fills_dense_layers_first(payload: int, transfer_s: float, dense_s: float) -> None:
    under_experts, under_dense = split_transfer(payload, transfer_s, dense_s)
    assert under_experts + under_dense == payload
    assert min(under_experts, under_dense) >= 0
    if transfer_s > dense_s:
        assert under_dense == pytest.approx(payload * dense_s / transfer_s, abs=1)
    else:
        assert under_experts == 0


def block(copies: float, **changes: float) -> tuple[BlockTimes, BlockCosts]:
    settings_ = {"dense_forward_s": 1.0, "dense_backward_s": 2.0, "gradient_bytes": 5.0} | changes
    costs = BlockCosts(row_bytes=1, weight_bytes=5, bytes_per_s=1, rows_per_s=4, **settings_)  # type: ignore[arg-type]
    volumes = np.array([[4, 4], [1, 0], [0, 1], [1, 1]])
    return predict_block(volumes, np.full((1, 2, 2), copies), costs), costs


@settings(deadline=None, max_examples=60)
@given(copies=st.integers(0, 30).map(lambda tenths: tenths / 10), num_blocks=st.integers(1, 4))
def test_the_time_line_agrees_with_the_closed_form(copies: float, num_blocks: int) -> None:
    times, costs = block(copies)
    line = predict_timeline([times] * num_blocks, [costs] * num_blocks)
    hidden_blocks = num_blocks - 1
    first = float(times.trans_s + times.agg_s)
    exposed = first + hidden_blocks * float(times.exposed_trans_s + times.exposed_agg_s)
    assert line.exposed_s == pytest.approx(exposed)
    assert line.transfer_s == pytest.approx(num_blocks * first)
    idle = num_blocks * float(4 * times.exchange_s + times.forward_s + times.backward_s + 1.0 + 2.0)
    assert line.total_s == pytest.approx(idle + exposed)
    assert line.transfer_s == pytest.approx(num_blocks * first)
    assert all(span.end_s > span.start_s for span in line.spans)
    assert max(span.end_s for span in line.spans) == pytest.approx(line.total_s)


def test_many_blocks_hide_small_copies_and_long_plans_show() -> None:
    times, costs = block(0.2)
    line = predict_timeline([times] * 12, [costs] * 12)
    assert line.exposed_s < 0.1 * line.transfer_s
    quick, slow = (predict_timeline([times] * 3, [costs] * 3, plan_s=plan_s) for plan_s in (0.5, 1.5))
    assert slow.total_s == pytest.approx(quick.total_s + 3 * 0.5)
    assert {span.operation.kind for span in quick.spans} >= {Kind.PLAN, Kind.EXCHANGE, Kind.TRANS_WHOLE, Kind.AGG_WHOLE}
