"""Windows of sparse snapshots from which nothing is lost: which snapshot holds what, and what that costs.

In a window of W consecutive steps every snapshot holds the whole state of K experts of each layer (their turn), and
only the weights that the experts whose turn is yet to come compute with; the first one holds everything else as well.
A restore takes the first snapshot and runs the steps of the window again. Experts whose turn is yet to come take part
with the weights of the step, and at their turn get their whole state; so after W - 1 steps all state is that of the
window's last step, to the bit. Source: MoEvement (arXiv 2412.15411) 3; ours leaves out its logs of a pipeline's
activations, and takes dense state whole at the first step.

Shapes: L MoE layers, E experts a layer, K experts a turn, W = ceil(E / K) turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.errors import ConfigurationError


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

    Raises:
        ConfigurationError: k < 1.
    """
    if k < 1:
        raise ConfigurationError(f"k={k} experts cannot be saved: use 1 to {tokens.shape[1]}")
    turns = np.empty(tokens.shape, dtype=np.int64)
    order = np.argsort(tokens, axis=1, kind="stable")
    np.put_along_axis(turns, order, np.arange(tokens.shape[1])[None] // k, axis=1)
    return ReplayWindow(first=first, turns=turns)


def window_length(num_experts: int, k: int) -> int:
    """W: snapshots of a window."""
    return -(-num_experts // min(k, num_experts))


def most_frozen(num_experts: int, k: int, written: int) -> int:
    """How many copies of an expert's weights a window can hold of `written` experts of one layer: those whose turns
    come last."""
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
