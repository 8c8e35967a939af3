"""Small trainings in which experts move and have shadows, for the tests of the balancer's laws."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np

from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import ShadowPlan
from tests.distributed import training

NUM_EXPERTS = 6


def random_placement(rng: np.random.Generator, num_ranks: int, slots: int, num_experts: int = NUM_EXPERTS) -> Placement:
    """Every expert somewhere, at most `slots` experts on a rank, some ranks fuller than others."""
    table = np.zeros((num_experts, num_ranks), dtype=np.int64)
    room = np.full(num_ranks, slots)
    for expert in rng.permutation(num_experts):
        rank = rng.choice(np.flatnonzero(room))
        table[expert, rank] = 1
        room[rank] -= 1
    for rank in range(num_ranks):
        absent = np.flatnonzero(table[:, rank] == 0)
        extra = rng.permutation(absent)[: rng.integers(0, min(room[rank], len(absent)) + 1)]
        table[extra, rank] = 1
    return Placement(replicas=table * rng.integers(1, 3, table.shape))


def random_shadows(rng: np.random.Generator, placement: Placement) -> ShadowPlan:
    """Shadows of random experts on random ranks that do not hold them; sometimes none."""
    resident = placement.replicas > 0
    wanted = rng.random(resident.shape) < rng.choice([0.0, 0.3, 0.7])
    homes = np.array([rng.choice(np.flatnonzero(holders)) for holders in resident])
    rule = "balanced" if rng.random() < 0.5 else "local"
    return ShadowPlan(shadows=wanted & ~resident, homes=homes, quota_rule=rule)  # type: ignore[arg-type]


class Moving(pl.Callback):
    """Moves all experts to random places before some steps, and gives random experts shadows in every step."""

    def __init__(self, move_at: tuple[int, ...] = (), slots: int = 6, shadows: bool = False, seed: int = 0) -> None:
        self._move_at, self._slots, self._shadows = move_at, slots, shadows
        self._rng = np.random.default_rng(seed)  # the same on every rank
        self._last_step = -1
        self.moved_states = 0
        self.shadow_copies = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step == self._last_step:
            return  # a later micro-batch of the same step
        self._last_step = trainer.global_step
        layers = strategy.experts.layers
        if trainer.global_step in self._move_at:
            placements = [
                random_placement(self._rng, strategy.world.size, self._slots, layer.num_experts) for layer in layers
            ]
            self.moved_states += strategy.replace_experts(placements).moved_states
        if self._shadows:
            plans = [random_shadows(self._rng, placement) for placement in strategy.experts.placements]
            self.shadow_copies += sum(plan.num_copies for plan in plans)
            strategy.start_shadow_experts(plans, self._rng.random(len(plans)).tolist())


def train(
    rank: int, world_size: int, *, moving: dict[str, Any] | None = None, steps: int = 12, **options: Any
) -> dict[str, Any]:
    """As `training.train`, with experts that move and visit; also says how many did."""
    mover = Moving(**(moving or {}))
    result = training.train(rank, world_size, steps=steps, callbacks=[mover], **options)
    return result | {"moved_states": mover.moved_states, "shadow_copies": mover.shadow_copies}
