"""Which transfer runs under which computation: Pro-Prophet's block-wise schedule as data, and its time line.

A block is a MoE layer and the dense layers that follow it. In the forward pass the next block's weights travel (Trans)
under this block's experts and dense layers; in the backward pass the next block's gradients (Agg) do. The first block's
Trans precedes the forward pass and its Agg follows the backward pass, with nothing to hide under.

Source: Pro-Prophet V, Alg. 2, whose single loop must be two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from moe_lightning.algorithms.performance_model import BlockCosts, BlockTimes


class Kind(Enum):
    """What an operation does; the values are names for pictures and metrics."""

    EXCHANGE = "exchange"
    EXPERTS_FORWARD = "experts_forward"
    DENSE_FORWARD = "dense_forward"
    EXPERTS_BACKWARD = "experts_backward"
    DENSE_BACKWARD = "dense_backward"
    PLAN = "plan"
    TRANS_UNDER_EXPERTS = "trans_under_experts"
    TRANS_UNDER_DENSE = "trans_under_dense"
    TRANS_WHOLE = "trans_whole"
    AGG_UNDER_DENSE = "agg_under_dense"
    AGG_UNDER_EXPERTS = "agg_under_experts"
    AGG_WHOLE = "agg_whole"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that happens for one block (0-based)."""

    kind: Kind
    block: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A foreground operation and what runs beside it; the stage ends when both have ended."""

    foreground: Operation
    background: Operation | None = None


def forward_schedule(num_blocks: int) -> tuple[Stage, ...]:
    """Stages of the forward pass: per block an exchange (and planning), experts, an exchange, dense layers."""
    stages = [Stage(foreground=Operation(kind=Kind.TRANS_WHOLE, block=0))]
    for block in range(num_blocks):
        following = block + 1 if block + 1 < num_blocks else None
        stages += [
            _stage(Kind.EXCHANGE, block, Kind.PLAN, block),
            _stage(Kind.EXPERTS_FORWARD, block, Kind.TRANS_UNDER_EXPERTS, following),
            _stage(Kind.EXCHANGE, block),
            _stage(Kind.DENSE_FORWARD, block, Kind.TRANS_UNDER_DENSE, following),
        ]
    return tuple(stages)


def backward_schedule(num_blocks: int) -> tuple[Stage, ...]:
    """Stages of the backward pass, last block first; all Aggs end before the update."""
    stages: list[Stage] = []
    for block in reversed(range(num_blocks)):
        following = block + 1 if block + 1 < num_blocks else None
        stages += [
            _stage(Kind.DENSE_BACKWARD, block, Kind.AGG_UNDER_DENSE, following),
            _stage(Kind.EXCHANGE, block),
            _stage(Kind.EXPERTS_BACKWARD, block, Kind.AGG_UNDER_EXPERTS, following),
            _stage(Kind.EXCHANGE, block),
        ]
    return (*stages, Stage(foreground=Operation(kind=Kind.AGG_WHOLE, block=0)))


def _stage(kind: Kind, block: int, under: Kind | None = None, under_block: int | None = None) -> Stage:
    background = None if under is None or under_block is None else Operation(kind=under, block=under_block)
    return Stage(foreground=Operation(kind=kind, block=block), background=background)


def split_transfer(payload_bytes: int, transfer_s: float, dense_s: float) -> tuple[int, int]:
    """Cut a transfer in the bytes that run under experts and those that run under dense layers.

    Dense layers take the same time in every step, so they are filled first: they get the fraction min(1, dense /
        transfer).
    """
    if transfer_s <= dense_s:
        return 0, payload_bytes
    under_dense = int(payload_bytes * dense_s / transfer_s)
    return payload_bytes - under_dense, under_dense


@dataclass(frozen=True, kw_only=True)
class Span:
    """When an operation runs, in seconds from the start of the forward pass's first transfer."""

    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A predicted step.

    Attributes:
        spans: all operations with a duration, in order of their stages.
        total_s: forward and backward pass with dense layers, without the update.
        transfer_s: Trans and Agg of all blocks together.
        exposed_s: how much of that lengthens the step.
    """

    spans: tuple[Span, ...]
    total_s: float
    transfer_s: float
    exposed_s: float


def predict_timeline(times: Sequence[BlockTimes], costs: Sequence[BlockCosts], plan_s: float = 0.0) -> Timeline:
    """The time line of a step whose blocks take these (scalar) times.

    Args:
        times: predictions of each block; their exposed parts are not used, since the schedule is played here.
        costs: constants of each block, for its dense layers.
        plan_s: seconds to plan one block's next step.
    """
    spans: list[Span] = []
    now_s = exposed_s = 0.0
    for stage in forward_schedule(len(times)) + backward_schedule(len(times)):
        foreground_s = _duration_s(stage.foreground, times, costs, plan_s)
        background_s = _duration_s(stage.background, times, costs, plan_s) if stage.background else 0.0
        for operation, duration_s in ((stage.foreground, foreground_s), (stage.background, background_s)):
            if operation and duration_s > 0:
                spans.append(Span(operation=operation, start_s=now_s, end_s=now_s + duration_s))
        if stage.foreground.kind in (Kind.TRANS_WHOLE, Kind.AGG_WHOLE):
            exposed_s += foreground_s
        elif stage.background and stage.background.kind is not Kind.PLAN:
            exposed_s += max(0.0, background_s - foreground_s)
        now_s += max(foreground_s, background_s)
    transfer_s = sum(float(block.trans_s) + float(block.agg_s) for block in times)
    return Timeline(spans=tuple(spans), total_s=now_s, transfer_s=transfer_s, exposed_s=exposed_s)


def _duration_s(operation: Operation, times: Sequence[BlockTimes], costs: Sequence[BlockCosts], plan_s: float) -> float:
    block = operation.block
    trans_s, agg_s = float(times[block].trans_s), float(times[block].agg_s)
    host = max(block - 1, 0)  # the block under whose dense layers a split transfer of this block runs
    trans_under_dense_s = min(trans_s, costs[host].dense_forward_s)
    agg_under_dense_s = min(agg_s, costs[host].dense_backward_s)
    return {
        Kind.EXCHANGE: float(times[block].exchange_s),
        Kind.EXPERTS_FORWARD: float(times[block].forward_s),
        Kind.DENSE_FORWARD: costs[block].dense_forward_s,
        Kind.EXPERTS_BACKWARD: float(times[block].backward_s),
        Kind.DENSE_BACKWARD: costs[block].dense_backward_s,
        Kind.PLAN: plan_s,
        Kind.TRANS_UNDER_EXPERTS: trans_s - trans_under_dense_s,
        Kind.TRANS_UNDER_DENSE: trans_under_dense_s,
        Kind.TRANS_WHOLE: trans_s,
        Kind.AGG_UNDER_DENSE: agg_under_dense_s,
        Kind.AGG_UNDER_EXPERTS: agg_s - agg_under_dense_s,
        Kind.AGG_WHOLE: agg_s,
    }[operation.kind]
