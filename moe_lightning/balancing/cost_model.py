"""Cost model of one MoE block, and the schedule of transfers under computation.

Pro-Prophet's model (eq. 1-6 and 8) for one expert per device, generalized: experts have replicas and shadows, ranks may
differ in throughput, an exchange has a latency, an expert has a fixed cost, and copies are sent by a
stated method. With those at their neutral values the formulas are the paper's, except that an exchange takes as long as
its busiest sender *or* receiver: the paper counts receivers, but the results travel back over the same links, where
roles are exchanged. All functions broadcast over leading axes, so that a search can judge many plans at once.

Schedule: a block is a MoE layer and the dense layers that follow it. In the forward pass the next block's weights are
sent (Trans) under this block's experts and dense layers; in the backward pass the next block's gradients (Agg) are. The
first block's Trans precedes the forward pass and its Agg follows the backward pass, both exposed.
Source: Pro-Prophet V, Alg. 2, whose single loop must be two.

Shapes: N ranks, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from moe_lightning.arrays import BoolArray, FloatArray, IntArray, Pairs
from moe_lightning.config import NonNegative, validated
from moe_lightning.dispatch.quota import speeds_in_proportion
from moe_lightning.errors import ConfigurationError

ONE_COPY = 1 << 32
"""Fixed-point unit of copies of an expert, so that fractions of copies add up alike on every machine."""

_ROUNDING = 1 - 1e-9
"""Keeps a bound a bound where sums are rounded."""

_PARTS = 1 << 20
"""Shares of transfers are multiples of one of these."""

TransferMethod = Literal["direct", "average"]
"""Way of an expert's weights to m ranks. "direct": the home sends m copies, as training does. "average": eq. 4 of
Pro-Prophet, which divides all bytes, the owner's included, by the bandwidth of all ranks."""


@validated
@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCosts:
    """Measured constants of one MoE block and the dense layers that follow it.

    Attributes:
        row_bytes: activations of one routed assignment.
        weight_bytes: weights of one expert, as Trans sends them.
        gradient_bytes: gradients of one expert, as Agg sends them.
        bytes_per_s: bandwidth of each rank in each direction.
        rows_per_s: assignments per second of each rank in the forward pass of an expert, one number or [N].
        exchange_s: latency of one exchange.
        expert_s: fixed forward cost of every expert that a rank computes.
        backward_ratio: backward over forward time of experts.
        dense_forward_s, dense_backward_s: the dense layers of the block.
        transfer: how shadows are copied.
        scheduled: Trans and Agg run under computations (eq. 8); else on their own (eq. 6).

    Raises:
        ConfigurationError: a bandwidth or throughput that is not positive, a negative time, an unknown transfer method.
    """

    row_bytes: NonNegative
    weight_bytes: NonNegative
    gradient_bytes: NonNegative
    bytes_per_s: float
    rows_per_s: float | FloatArray
    exchange_s: NonNegative = 0.0
    expert_s: NonNegative = 0.0
    backward_ratio: Annotated[float, Interval(gt=0)] = 2.0
    dense_forward_s: NonNegative = 0.0
    dense_backward_s: NonNegative = 0.0
    transfer: TransferMethod = "direct"
    scheduled: bool = True

    @property
    def speeds(self) -> IntArray | None:
        """int64 [N]: how fast ranks are in experts, see `dispatch.quota`; None where all are alike."""
        return speeds_in_proportion(self.rows_per_s) if isinstance(self.rows_per_s, np.ndarray) else None

    def at(self, speeds: IntArray | None) -> BlockCosts:
        """With ranks of these speeds, int64 [N], where now they all have the median's; None: with equal ranks."""
        rows_per_s = float(np.median(self.rows_per_s))
        if speeds is None:
            return replace(self, rows_per_s=rows_per_s)
        return replace(self, rows_per_s=rows_per_s * (speeds / np.median(speeds)))

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "rows_per_s"):
            if not np.all(np.asarray(getattr(self, name)) > 0):
                raise ConfigurationError(f"{name}={getattr(self, name)} is not positive: measure it on a working link")


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTimes:
    """Predicted seconds of one block; arrays where many plans were judged at once.

    Attributes:
        exchange_s: one token exchange; a step has four.
        forward_s, backward_s: experts (FEC, BEC).
        trans_s, agg_s: copying the shadows' weights and collecting their gradients.
        exposed_trans_s, exposed_agg_s: the parts of them that nothing hides.
        total_s: T' of eq. 6, with exposed parts where the scheduler runs (eq. 8). Dense layers are not included.
    """

    exchange_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    trans_s: FloatArray
    agg_s: FloatArray
    exposed_trans_s: FloatArray
    exposed_agg_s: FloatArray
    total_s: FloatArray


def total_volumes(tokens: IntArray, quota: IntArray) -> IntArray:
    """int64 [4, N]: as `pair_volumes`, of tokens and quotas int64 [E, N], in time that grows with the holders only."""
    pairs = Pairs.of_table(quota)
    return pair_volumes(tokens, pairs, pairs.replicas)


def pair_volumes(tokens: IntArray, pairs: Pairs, rows: IntArray, own: IntArray | None = None) -> IntArray:
    """int64 [4, N]: rows that each rank computes (Pro-Prophet's H), sends and receives (R), and of how many experts.

    A rank sends what it has and does not compute itself, and receives what it computes and does not have.

    Args:
        tokens: int64 [E, N], assignments on each rank before dispatch.
        pairs: of experts and ranks.
        rows: int64 [P], the quota of each; may be 0.
        own: int64 [N], assignments of each rank, where they are known already.
    """
    computed = pairs.on_ranks(rows)
    at_home = pairs.on_ranks(np.minimum(rows, tokens[pairs.experts, pairs.ranks]))
    touched = np.bincount(pairs.ranks[rows > 0], minlength=pairs.shape[1])
    return np.stack([computed, (tokens.sum(axis=0) if own is None else own) - at_home, computed - at_home, touched])


def total_copies(shadows: BoolArray, homes: IntArray, transfer: TransferMethod) -> IntArray:
    """int64 [2, N]: copies that each rank sends (0) and receives (1) in Trans, in units of 1 / ONE_COPY; Agg is the
    same in reverse.

    Args:
        shadows: bool [E, N], where the shadows go, never the home; only experts with one take time.
        homes: int64 [E], the rank that sends each expert's weights.
        transfer: see `TransferMethod`.
    """
    moved = np.flatnonzero(shadows.any(axis=1))
    num_ranks, visits = shadows.shape[1], shadows[moved].astype(np.int64)
    count = visits.sum(axis=1)
    if transfer == "average":
        evenly = int((ONE_COPY * (count + 1) // num_ranks).sum())
        return np.full((2, num_ranks), evenly, dtype=np.int64)
    at_home = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(at_home, homes[moved], ONE_COPY * count)
    return np.stack([at_home, ONE_COPY * visits.sum(axis=0)])


def predict_block(volumes: IntArray, copies: IntArray, costs: BlockCosts) -> BlockTimes:
    """Seconds of one block from the totals of all ranks.

    Args:
        volumes: int64 [..., 4, N], see `total_volumes`.
        copies: int64 [..., 2, N], see `total_copies`.
        costs: constants.
    """
    computed, sent, received, touched = (volumes[..., index, :] for index in range(4))
    return predict_totals(computed, touched, (sent, received), (copies[..., 0, :], copies[..., 1, :]), costs)


def predict_totals(
    computed: IntArray,
    touched: IntArray,
    exchanged: Sequence[IntArray],
    copied: Sequence[IntArray],
    costs: BlockCosts,
) -> BlockTimes:
    """`predict_block` from its single totals, int64 [..., N] each.

    Args:
        computed, touched: rows and experts that each rank computes.
        exchanged: rows that each rank sends, and those that it receives.
        copied: copies that each rank sends, and those that it receives.
        costs: constants.
    """
    if np.ndim(costs.rows_per_s) == 0 and not costs.expert_s:  # the busiest rank is the slowest
        forward_s = computed.max(axis=-1) / costs.rows_per_s
    else:
        forward_s = (computed / costs.rows_per_s + touched * costs.expert_s).max(axis=-1)
    (exchange_s,) = _exchange_s(exchanged, (costs.row_bytes,), costs)
    units = (costs.weight_bytes / ONE_COPY, costs.gradient_bytes / ONE_COPY)
    trans_s, agg_s = _exchange_s(copied, units, costs)
    return block_times(exchange_s, forward_s, trans_s, agg_s, costs)


def even_forward_s(num_rows: int, costs: BlockCosts, num_ranks: int) -> float:
    """Seconds of experts' forward passes if every rank computed just as many of the rows as it is fast."""
    rows_per_s = costs.rows_per_s
    all_rows_per_s = rows_per_s * num_ranks if isinstance(rows_per_s, float | int) else math.fsum(rows_per_s.tolist())
    return num_rows / all_rows_per_s


def least_s(forward_s: float, times: BlockTimes, costs: BlockCosts, exchange_s: float = 0.0) -> FloatArray:
    """Seconds that no plan with these or more copies falls short of, however it divides the rows.

    Args:
        forward_s: see `even_forward_s`.
        times: of a plan; its Trans and Agg are what counts.
        costs: constants.
        exchange_s: of rows that have to travel whatever is done.
    """
    return block_times(exchange_s, forward_s, times.trans_s, times.agg_s, costs).total_s * _ROUNDING


def sending_s(rows: IntArray, costs: BlockCosts) -> float:
    """Seconds of an exchange in which ranks send int64 [N] rows, if receiving takes no longer."""
    return float(_exchange_s((rows,), (costs.row_bytes,), costs)[0])


def block_times(
    exchange_s: FloatArray | float,
    forward_s: FloatArray | float,
    trans_s: FloatArray,
    agg_s: FloatArray,
    costs: BlockCosts,
) -> BlockTimes:
    """A block from its parts: what hides under what, and the sum."""
    backward_s = costs.backward_ratio * forward_s
    exposed_trans_s, exposed_agg_s = trans_s, agg_s
    if costs.scheduled:
        exposed_trans_s = np.maximum(trans_s - forward_s - costs.dense_forward_s, 0.0)
        exposed_agg_s = np.maximum(agg_s - backward_s - costs.dense_backward_s, 0.0)
    return BlockTimes(
        exchange_s=np.asarray(exchange_s, dtype=np.float64),
        forward_s=np.asarray(forward_s, dtype=np.float64),
        backward_s=np.asarray(backward_s, dtype=np.float64),
        trans_s=trans_s,
        agg_s=agg_s,
        exposed_trans_s=exposed_trans_s,
        exposed_agg_s=exposed_agg_s,
        total_s=4 * exchange_s + forward_s + backward_s + exposed_trans_s + exposed_agg_s,
    )


def _exchange_s(directions: Sequence[IntArray], units_bytes: Sequence[float], costs: BlockCosts) -> list[FloatArray]:
    """Seconds [...] of exchanges of int64 [..., N] units in each direction, for units of each size: the busiest rank
    and direction, and the latency if anything travels."""
    most = reduce(np.maximum, [amounts.max(axis=-1) for amounts in directions])
    busiest = [most * unit / costs.bytes_per_s for unit in units_bytes]
    return [np.asarray(seconds + costs.exchange_s * (seconds > 0), dtype=np.float64) for seconds in busiest]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds as a fixed part and a part per unit, fitted to measurements.

    Attributes:
        fixed_s: latency.
        per_unit_s: seconds per byte, row or whatever was varied.
        mean_error: mean relative error of the fit on its own measurements; above 0.1 the constants deserve a warning.
    """

    fixed_s: float
    per_unit_s: float
    mean_error: float

    def predict_s(self, amount: float) -> float:
        return self.fixed_s + self.per_unit_s * amount


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares of relative errors, neither part negative.

    Relative, because calibration varies amounts over decades and a plain fit would ignore the small ones.

    Raises:
        ConfigurationError: fewer than two different amounts, lists of different lengths, an infinite amount, or a time
            that is not positive and finite.
    """
    x, y = np.array(amounts, dtype=np.float64), np.array(seconds, dtype=np.float64)
    if x.shape != y.shape or len(np.unique(x)) < 2 or not np.isfinite(x).all() or not ((y > 0) & np.isfinite(y)).all():
        raise ConfigurationError(
            f"{len(x)} amounts and {len(y)} times do not determine a line: "
            "measure at least two amounts, with positive times"
        )
    # The normal equations of sum(((fixed + per_unit * x) / y - 1)^2).
    uu, uv, vv = (float((x**power / y**2).sum()) for power in (0, 1, 2))
    su, sv = (float((x**power / y).sum()) for power in (0, 1))
    determinant = uu * vv - uv * uv
    fixed, per_unit = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
    if fixed < 0:
        fixed, per_unit = 0.0, sv / vv
    elif per_unit < 0:
        fixed, per_unit = su / uu, 0.0
    predicted = fixed + per_unit * x
    return Line(fixed_s=fixed, per_unit_s=per_unit, mean_error=mean_relative_error(predicted, y))


def mean_relative_error(predicted_s: FloatArray, measured_s: FloatArray) -> float:
    """Mean of |predicted - measured| / measured."""
    return float((np.abs(predicted_s - measured_s) / measured_s).mean())


def share_under_experts(transfer_s: float, dense_s: float) -> float:
    """Return the share of a transfer that runs under experts; dense layers take the same time in every step, so they
    are filled first.
    """
    return 0.0 if transfer_s <= dense_s else 1.0 - int(_PARTS * dense_s / transfer_s) / _PARTS


Operation = Literal["exchange", "experts", "dense", "trans", "agg"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Begin and end of an operation for a block (0-based), in seconds from the start of the forward pass."""

    operation: Operation
    block: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A predicted step.

    Attributes:
        spans: all operations with a duration, in the order of their starts.
        total_s: forward and backward pass with dense layers, without the update.
        transfer_s: Trans and Agg of all blocks together.
        exposed_s: how much of that lengthens the step.
    """

    spans: tuple[Span, ...]
    total_s: float
    transfer_s: float
    exposed_s: float


def predict_timeline(times: Sequence[BlockTimes], costs: Sequence[BlockCosts]) -> Timeline:
    """The time line of a step whose blocks take these (scalar) times.

    Args:
        times: predictions of each block; their exposed parts are not used, since the schedule is played here.
        costs: constants of each block, for its dense layers.
    """
    spans: list[Span] = []
    now_s = exposed_s = 0.0

    def run(
        operation: Operation, block: int, seconds: float, transfer: Operation = "trans", beside_s: float = 0.0
    ) -> None:
        """Run an operation, and beside it a part of a transfer for the next block."""
        nonlocal now_s, exposed_s
        for name, of, duration_s in ((operation, block, seconds), (transfer, block + 1, beside_s)):
            if duration_s > 0:
                spans.append(Span(operation=name, block=of, start_s=now_s, end_s=now_s + duration_s))
        exposed_s += seconds if operation in ("trans", "agg") else max(0.0, beside_s - seconds)
        now_s += max(seconds, beside_s)

    trans_s, agg_s = [float(each.trans_s) for each in times], [float(each.agg_s) for each in times]
    last = len(times) - 1
    run("trans", 0, trans_s[0])
    for block, (own, of_block) in enumerate(zip(times, costs, strict=True)):
        sent_s = trans_s[block + 1] if block < last else 0.0
        under_dense_s = min(sent_s, of_block.dense_forward_s)
        run("exchange", block, float(own.exchange_s))
        run("experts", block, float(own.forward_s), "trans", sent_s - under_dense_s)
        run("exchange", block, float(own.exchange_s))
        run("dense", block, of_block.dense_forward_s, "trans", under_dense_s)
    for block, (own, of_block) in reversed(list(enumerate(zip(times, costs, strict=True)))):
        sent_s = agg_s[block + 1] if block < last else 0.0
        under_dense_s = min(sent_s, of_block.dense_backward_s)
        run("dense", block, of_block.dense_backward_s, "agg", under_dense_s)
        run("exchange", block, float(own.exchange_s))
        run("experts", block, float(own.backward_s), "agg", sent_s - under_dense_s)
        run("exchange", block, float(own.exchange_s))
    run("agg", 0, agg_s[0])
    return Timeline(spans=tuple(spans), total_s=now_s, transfer_s=sum(trans_s) + sum(agg_s), exposed_s=exposed_s)
