"""What lossless windows of sparse snapshots cost (`algorithms/replay_window.py`), as shares of a full checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lightning.algorithms.checkpoint_size import MIXED_PRECISION_BYTES
from moe_lightning.algorithms.replay_window import window_bytes
from moe_lightning.simulate.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WindowCost:
    """Of one window in the first world.

    Attributes:
        steps: W.
        copied_bytes: by the busiest rank, in each of its snapshots.
        stall_s: that training waits, in all of it.
        replay_s: of the steps that a restore runs again.
    """

    steps: int
    copied_bytes: tuple[float, ...]
    stall_s: float
    replay_s: float


def window_shares(workload: Workload, k: int) -> tuple[float, ...]:
    """Bytes [W] of each snapshot of a window of K experts a turn, as shares of a full checkpoint. Frozen experts are
    kept in the low precision that they compute in."""
    expert = sum(MIXED_PRECISION_BYTES.values()) * workload.expert_params
    sizes = {
        "dense_bytes": sum(MIXED_PRECISION_BYTES.values()) * workload.dense_params,
        "expert_bytes": expert,
        "weight_bytes": MIXED_PRECISION_BYTES["weight"] * workload.expert_params,
    }
    shape = {"num_layers": workload.num_layers, "num_experts": workload.num_experts}
    (whole,) = window_bytes(**shape, k=workload.num_experts, **sizes)
    return tuple(size / whole for size in window_bytes(**shape, k=k, **sizes))


def stall_of(copies_s: tuple[float, ...], overlap_s: float) -> float:
    """Seconds that training waits for copies, each of which hides under one step."""
    return sum(max(0.0, copy_s - overlap_s) for copy_s in copies_s)
