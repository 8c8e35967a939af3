"""The performance model: the paper's formulas at neutral constants, its generalisations, the fit of its constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cost_model import (
    ONE_COPY,
    BlockCosts,
    fit_line,
    mean_relative_error,
    predict_block,
    total_copies,
    total_volumes,
)
from moe_lightning.errors import ConfigurationError
from tests.unit.planning_references import copy_volumes, row_volumes


def costs(**changes: object) -> BlockCosts:
    neutral: dict[str, object] = {
        "row_bytes": 10.0,
        "weight_bytes": 1000.0,
        "gradient_bytes": 500.0,
        "bytes_per_s": 100.0,
        "rows_per_s": 20.0,
        "transfer": "average",
    }
    return BlockCosts(**(neutral | changes))  # type: ignore[arg-type]


TOKENS = np.array([[3, 0, 0], [2, 1, 0], [0, 1, 2]])  # expert e, rank n; loads 3, 3, 3 at home: 3, 3, 3
QUOTA = np.diag([3, 3, 3])


def test_volumes_by_hand() -> None:
    volumes = row_volumes(TOKENS, QUOTA).sum(axis=0)
    assert volumes.tolist() == [[3, 3, 3], [2, 1, 0], [0, 2, 1], [1, 1, 1]]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), method=st.sampled_from(["direct", "scatter", "average"]))
def test_totals_are_sums_over_experts(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, (5, 4)) * (rng.random((5, 4)) < 0.7)
    quota = rng.permuted(tokens, axis=1)
    assert (total_volumes(tokens, quota) == row_volumes(tokens, quota).sum(axis=0)).all()
    homes, shadows = rng.integers(0, 4, 5), rng.random((5, 4)) < 0.3
    shadows[np.arange(5), homes] = False
    copies = copy_volumes(shadows, homes, method)  # type: ignore[arg-type]
    assert (total_copies(shadows, homes, method) == copies.sum(axis=0)).all()  # type: ignore[arg-type]


def test_equations_1_to_6_without_scheduler() -> None:
    shadows = np.array([[False, True, True], [False] * 3, [False] * 3])
    copies = copy_volumes(shadows, np.arange(3), "average").sum(axis=0)
    times = predict_block(row_volumes(TOKENS, QUOTA).sum(axis=0), copies, costs(), scheduled=False)
    assert times.exchange_s == pytest.approx(2 * 10 / 100)  # eq. 1: most received rows
    assert times.forward_s == pytest.approx(3 / 20)
    assert times.backward_s == pytest.approx(2 * 3 / 20)
    assert times.trans_s == pytest.approx(1 * (3 - 0) * 1000 / (3 * 100))  # eq. 4 with s=1, D=3, n=0
    assert times.agg_s == pytest.approx(5.0)
    assert times.total_s == pytest.approx(4 * 0.2 + 3 * 0.15 + 10.0 + 5.0)


def test_scheduler_hides_transfers_under_experts_and_dense_layers() -> None:
    shadows = np.array([[False, True, True], [False] * 3, [False] * 3])
    copies = copy_volumes(shadows, np.arange(3), "average").sum(axis=0)
    volumes = row_volumes(TOKENS, QUOTA).sum(axis=0)
    times = predict_block(volumes, copies, costs(dense_forward_s=4.0, dense_backward_s=9.0))
    assert times.exposed_trans_s == pytest.approx(10.0 - 0.15 - 4.0)
    assert times.exposed_agg_s == 0.0
    assert times.total_s == pytest.approx(0.8 + 0.45 + times.exposed_trans_s)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), method=st.sampled_from(["direct", "scatter"]))
def test_every_copy_is_received_and_what_is_sent_is_received(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    homes = rng.integers(0, 4, 5)
    shadows = rng.random((5, 4)) < 0.5
    shadows[np.arange(5), homes] = False
    copies = copy_volumes(shadows, homes, method)  # type: ignore[arg-type]
    assert (copies.sum(axis=1)[:, 1] == ONE_COPY * shadows).all()
    lost = copies[:, :, 0].sum(axis=-1) - copies[:, :, 1].sum(axis=-1)
    assert ((lost >= 0) & (lost < 4)).all()  # of a copy that is cut in pieces, less than a unit each


def test_scatter_takes_two_copies_time_where_direct_takes_one_per_target() -> None:
    shadows = np.array([[False] + [True] * 8])
    volumes = np.zeros((4, 9), dtype=np.int64)
    by_method = {
        method: float(
            predict_block(volumes, copy_volumes(shadows, np.array([0]), method).sum(axis=0), costs(), False).trans_s
        )
        for method in ("direct", "scatter")
    }
    assert by_method["direct"] == pytest.approx(80.0)
    assert by_method["scatter"] == pytest.approx(10.0 + 10.0 * 7 / 8)


def test_slow_ranks_latency_and_the_cost_of_an_expert() -> None:
    volumes = row_volumes(TOKENS, QUOTA).sum(axis=0)
    none = np.zeros((1, 2, 3), dtype=np.int64)
    uneven = costs(bytes_per_s=np.array([100.0, 100.0, 1.0]), rows_per_s=np.array([20.0, 20.0, 1.0]))
    assert predict_block(volumes, none, uneven).exchange_s == pytest.approx(10.0)
    assert predict_block(volumes, none, uneven).forward_s == pytest.approx(3.0)
    fixed = predict_block(volumes, none, costs(exchange_s=7.0, expert_s=0.5))
    assert fixed.exchange_s == pytest.approx(7.2)
    assert fixed.forward_s == pytest.approx(0.65)
    assert fixed.trans_s == 0.0  # nothing to send costs no latency


def test_many_plans_at_once_equal_one_by_one() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 50, (5, 3, 4))
    quota = rng.permuted(tokens, axis=2)
    volumes, copies = row_volumes(tokens, quota).sum(axis=1), rng.integers(0, 5 * ONE_COPY, (5, 2, 2, 4))
    together = predict_block(volumes, copies, costs(exchange_s=0.1)).total_s
    for index in range(5):
        assert predict_block(volumes[index], copies[index], costs(exchange_s=0.1)).total_s == together[index]


@settings(deadline=None, max_examples=60)
@given(fixed=st.floats(0, 1e-2), per_unit=st.floats(1e-9, 1e-6))
def test_fit_recovers_a_line(fixed: float, per_unit: float) -> None:
    amounts = [1e3, 1e4, 1e5, 1e6]
    line = fit_line(amounts, [fixed + per_unit * amount for amount in amounts])
    assert line.predict_s(5e4) == pytest.approx(fixed + per_unit * 5e4, rel=1e-4)
    assert line.mean_error < 1e-4


@settings(deadline=None, max_examples=60)
@given(
    measured=st.lists(
        st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e2)), min_size=3, max_size=8, unique_by=lambda m: m[0]
    ),
    seed=st.integers(0, 2**31),
)
def test_fit_depends_on_the_measurements_alone(measured: list[tuple[float, float]], seed: int) -> None:
    """Not on the order of summation, in which machines and their libraries differ: all bits are equal."""
    shuffled = [measured[index] for index in np.random.default_rng(seed).permutation(len(measured))]
    line, again = (fit_line(*map(list, zip(*pairs, strict=True))) for pairs in (measured, shuffled))
    assert line == again


def test_fit_never_predicts_negative_parts_and_reports_its_error() -> None:
    steep = fit_line([1, 2, 3], [1.0, 3.0, 5.0])
    assert steep.fixed_s == 0.0
    assert steep.mean_error > 0.1
    falling = fit_line([1, 2, 3], [5.0, 3.0, 1.0])
    assert falling.per_unit_s == 0.0
    assert falling.fixed_s > 0
    assert mean_relative_error(np.array([1.0, 3.0]), np.array([2.0, 2.0])) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes_per_s": 0.0}, "bytes_per_s=0.0 is not positive"),
        ({"rows_per_s": np.array([1.0, -1.0])}, "rows_per_s"),
        ({"dense_forward_s": -1.0}, "dense_forward_s=-1.0 of BlockCosts must be a number of at least 0"),
        ({"transfer": "magic"}, "transfer='magic' of BlockCosts must be 'scatter' or 'direct' or 'average'"),
    ],
)
def test_wrong_constants_are_one_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        costs(**changes)


def test_wrong_measurements_are_one_sentence() -> None:
    for amounts, seconds in (
        ([1.0, 1.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, 0.0]),
        ([1.0, 2.0], [1.0]),
        ([1.0, np.inf], [1.0, 2.0]),
    ):
        with pytest.raises(ConfigurationError, match="do not determine a line"):
            fit_line(amounts, seconds)
