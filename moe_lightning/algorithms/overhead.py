"""What checkpointing costs, and the interval and numbers of experts that cost least.

Sources: MoC-System eq. 3-16 and 5.3, Young's interval. All times are in seconds (the papers mix
iterations and seconds in eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_lightning.config import validated
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

    step_s: float
    overlap_s: float
    snapshot_s: float
    persist_s: float
    restart_s: float = 0.0
    failure_rate_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step_s <= 0:
            raise ConfigurationError(f"step_s={self.step_s} must be positive: measure an iteration first")
        negative = [name for name, value in vars(self).items() if value < 0]
        if negative:
            raise ConfigurationError(
                f"{negative[0]}={getattr(self, negative[0])} cannot be negative: give a measured time or rate"
            )

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


def free_k(k: int, *, num_layers: int, num_experts: int, ep_size: int) -> int:
    """The largest K with the same number of experts on the busiest rank, ceil(K * L / ep_size): spare capacity is free
    (MoC 5.3)."""
    busiest = -(-k * num_layers // ep_size)
    return min(num_experts, max(k, busiest * ep_size // num_layers))


def adapt(
    *,
    snapshot_s: Callable[[int], float],
    persist_s: Callable[[int], float],
    step_s: float,
    overlap_s: float,
    num_layers: int,
    num_experts: int,
    ep_size: int,
    failure_rate_per_s: float = 0.0,
    restart_s: float = 0.0,
    k_persist: int = 1,
) -> AdaptiveConfiguration:
    """Choose K_snapshot, K_persist and the interval from measured times (MoC-System 5.3).

    Args:
        snapshot_s: K -> seconds that a snapshot of K experts per layer takes on the slowest rank; must not fall with K.
        persist_s: the same for writing to storage.
        step_s: an iteration without checkpointing.
        overlap_s: forward and backward.
        k_persist: the smallest K_persist wanted; grown while the busiest rank writes no more experts.

    Returns:
        The largest K_snapshot that hides under forward and backward (1 if none does), K_persist <= K_snapshot, and the
        interval.
    """
    hidden = [k for k in range(1, num_experts + 1) if snapshot_s(k) <= overlap_s]
    k_snapshot = max(hidden, default=1)
    k_free = free_k(min(k_persist, k_snapshot), num_layers=num_layers, num_experts=num_experts, ep_size=ep_size)
    k_persist = min(k_snapshot, k_free)
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
