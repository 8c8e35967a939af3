"""Intervals, windows and cost of checkpoints.

Cost: the interval and numbers of experts of least cost (MoC-System eq. 3-16 and 5.3, Young's interval). All times are
in seconds (the papers mix iterations and seconds in eq. 4).

Windows of sparse snapshots that lose nothing: in a window of W consecutive steps every snapshot has the whole state of
K experts of each layer (their turn), and only the compute weights of the experts whose turn is yet to come; the first
snapshot has everything else as well. A restore loads the first snapshot and runs the steps of the window again. Experts
whose turn is yet to come use the weights of the step, and get their whole state at their turn; so after W - 1 steps all
state is that of the window's last step, to the bit. Source: MoEvement (arXiv 2412.15411) 3; ours leaves out its logs of
a pipeline's activations, and takes dense state whole at the first step.

Hierarchical asynchronous snapshotting (HAS): a snapshot is copied first in a pipeline's bubbles, then in other idle
time (waiting for data), then during computation, then during communication, which is used only if training and snapshot
take different links (NVLink and PCIe); the rest stalls training. Source: REFT 4.1, Alg. 1. Ours: bytes instead of
elements, the third window (in the paper's text, not in its algorithm), the rest as a stall, guards for empty snapshots
and single stages.

Shapes: L MoE layers, E experts a layer, K experts a turn, W = ceil(E / K) turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.config import NonNegative, Seconds, validated
from moe_lightning.errors import ConfigurationError


@validated
@dataclass(frozen=True, kw_only=True)
class OverheadModel:
    """Measured times of one training run.

    Attributes:
        step_s: one iteration without checkpointing.
        overlap_s: forward and backward, under which a snapshot may hide.
        snapshot_s: copying one checkpoint to host memory on the slowest rank.
        persist_s: writing one checkpoint to storage on the slowest rank.
        restart_s: from a fault to the first iteration after it.
        failure_rate_per_s: faults per second of training.
    """

    step_s: Seconds
    overlap_s: NonNegative
    snapshot_s: NonNegative
    persist_s: NonNegative
    restart_s: NonNegative = 0.0
    failure_rate_per_s: NonNegative = 0.0

    @property
    def save_s(self) -> float:
        """Training time that one checkpoint costs: what of the snapshot does not fit under forward and backward (eq.
        10)."""
        return max(0.0, self.snapshot_s - self.overlap_s)

    @property
    def min_interval_steps(self) -> int:
        """Fewest iterations between two checkpoints: a persist must end before the next one starts."""
        return max(1, math.ceil(self.persist_s / self.step_s))

    def overhead_share(self, interval_steps: float) -> float:
        """Expected overhead per second of training at an interval (eq. 4): saving, plus restarts and half an interval
        lost per fault."""
        interval_s = interval_steps * self.step_s
        return self.save_s / interval_s + self.failure_rate_per_s * (self.restart_s + interval_s / 2)

    def best_interval_steps(self) -> int:
        """The interval with the least overhead: sqrt(2 * save / failure rate), at least the shortest one that storage
        can follow.

        Raises:
            ConfigurationError: saving costs time and no failure rate is known, so that no finite interval is best.
        """
        if self.save_s == 0:
            return self.min_interval_steps
        if self.failure_rate_per_s == 0:
            raise ConfigurationError(
                f"failure_rate_per_s=0 while a snapshot stalls for {self.save_s:.3g} s: no finite interval is "
                "best; give a failure rate or an interval"
            )
        young = math.sqrt(2 * self.save_s / self.failure_rate_per_s) / self.step_s
        below = max(self.min_interval_steps, math.floor(young))
        return min((below, below + 1), key=self.overhead_share)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfiguration:
    """The result of `adapt`: experts per layer to snapshot and to persist, and iterations between checkpoints."""

    k_snapshot: int
    k_persist: int
    interval_steps: int
    save_s: float


def adapt(
    *,
    snapshot_s: Callable[[int], float],
    persist_s: Callable[[int], float],
    step_s: float,
    overlap_s: float,
    num_experts: int,
    num_layers: int = 1,
    ep_size: int = 1,
    failure_rate_per_s: float = 0.0,
    restart_s: float = 0.0,
    k_snapshot: int | None = None,
    k_persist: int = 1,
) -> AdaptiveConfiguration:
    """Choose K_snapshot, K_persist and the interval from measured times (MoC-System 5.3).

    Args:
        snapshot_s: K -> seconds that a snapshot of K experts per layer takes on the slowest rank; must not fall with K.
        persist_s: the same for writing to storage.
        step_s: an iteration without checkpointing.
        overlap_s: forward and backward.
        num_layers, ep_size: layers, and ranks that write their experts, for the growth of K_persist; 1 and 1: it does
            not grow.
        k_snapshot: experts of a layer that are copied; None: the most that hide under forward and backward, 1 if none
            does.
        k_persist: the smallest K_persist wanted; grown while the busiest rank writes no more experts.

    Returns:
        K_snapshot, K_persist <= K_snapshot, and the interval of least cost; without a failure rate the shortest one
        that storage can follow.
    """
    if k_snapshot is None:
        hidden = [k for k in range(1, num_experts + 1) if snapshot_s(k) <= overlap_s]
        k_snapshot = max(hidden, default=min(1, num_experts))
    # Spare capacity is free: as many as keep the number on the busiest rank.
    busiest = -(-min(k_persist, k_snapshot) * num_layers // ep_size)
    k_persist = min(k_snapshot, num_experts, max(k_persist, busiest * ep_size // num_layers))
    model = OverheadModel(
        step_s=step_s,
        overlap_s=overlap_s,
        snapshot_s=snapshot_s(k_snapshot),
        persist_s=persist_s(k_persist),
        restart_s=restart_s,
        failure_rate_per_s=failure_rate_per_s,
    )
    known = model.save_s == 0 or failure_rate_per_s > 0
    interval = model.best_interval_steps() if known else model.min_interval_steps
    return AdaptiveConfiguration(
        k_snapshot=k_snapshot, k_persist=k_persist, interval_steps=interval, save_s=model.save_s
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayWindow:
    """A window of snapshots, the same on every rank.

    Attributes:
        first: the step after which its first snapshot is taken.
        turns: int64 [L, E], which snapshot of the window, from 0, holds each expert's whole state.
    """

    first: int
    turns: IntArray

    @property
    def last(self) -> int:
        """The step after which its last snapshot is taken."""
        return self.first + int(self.turns.max(initial=0))

    def whole_at(self, step: int) -> BoolArray:
        """bool [L, E]: the experts whose turn it is after a step."""
        return np.asarray(self.turns == step - self.first)

    def frozen_at(self, step: int) -> BoolArray:
        """bool [L, E]: the experts of which the snapshot after a step holds weights only."""
        return np.asarray(self.turns > step - self.first)


def plan_window(first: int, tokens: IntArray, k: int) -> ReplayWindow:
    """The window that begins after a step. Popular experts come last: a replay needs neither their gradients nor
    their updates while they are frozen.

    Args:
        tokens: int64 [L, E], recent tokens of each expert, the same on every rank.
        k: experts of a layer in each turn, clamped to E.
    """
    turns = np.empty(tokens.shape, dtype=np.int64)
    order = np.argsort(tokens, axis=1, kind="stable")
    np.put_along_axis(turns, order, np.arange(tokens.shape[1])[None] // k, axis=1)
    return ReplayWindow(first=first, turns=turns)


def window_length(num_experts: int, k: int) -> int:
    """W: snapshots of a window."""
    return -(-num_experts // min(k, num_experts))


def most_frozen(num_experts: int, k: int, written: int) -> int:
    """Return the most copies of weights in a window of `written` experts of a layer: those whose turns come last."""
    return sum(position // k for position in range(num_experts - written, num_experts))


def window_bytes(
    *, num_layers: int, num_experts: int, k: int, dense_bytes: float, expert_bytes: float, weight_bytes: float
) -> tuple[float, ...]:
    """Bytes [W] of every snapshot of a window.

    Args:
        dense_bytes: of everything that is no expert.
        expert_bytes: of an expert's whole state.
        weight_bytes: of what it computes with.
    """
    found = []
    for turn in range(window_length(num_experts, k)):
        whole = min(k, num_experts - turn * k)
        frozen = num_experts - turn * k - whole
        experts = num_layers * (whole * expert_bytes + frozen * weight_bytes)
        found.append(experts + (dense_bytes if turn == 0 else 0))
    return tuple(found)


class Window(Enum):
    """Part of a step, as a copy sees it; the earlier ones are filled first."""

    BUBBLE = "bubble"
    """In a batch, waiting for another stage of a pipeline."""
    IDLE = "idle"
    """Between two batches: waiting for data, validation."""
    COMPUTE = "compute"
    """In forward and backward, outside exchanges and bubbles."""
    COMMUNICATION = "communication"
    """In a token exchange."""


def schedule_snapshot(
    snapshot_bytes: int, window_s: Mapping[Window, float], *, bytes_per_s: float
) -> dict[Window, int]:
    """Fill the windows of one step in order; the step stalls for bytes that fit into none.

    Args:
        snapshot_bytes: to be copied until the next update; 0 needs no window.
        window_s: seconds of a step by window; without one that is missing. That of communication only if training
            communicates over another link than the copy takes.
        bytes_per_s: of the copy.
    """
    left, copied = snapshot_bytes, {}
    for window in Window:
        copied[window] = int(min(left, window_s.get(window, 0.0) * bytes_per_s))
        left -= copied[window]
    return copied
