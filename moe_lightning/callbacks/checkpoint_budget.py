"""What partial checkpoints may lose: the tokens that a restore lost are counted, and DynamicK, where that callback is
used, raises K so that they keep its budget."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from moe_lightning.arrays import IntArray
from moe_lightning.callbacks.dynamic_k import DynamicK
from moe_lightning.checkpoint.loader import CheckpointSource
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings, Order
from moe_lightning.checkpoint.selection import parse_scopes, worst_case_plt
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import moe_layers
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


class TokenCounts:
    """Assignments of each expert that the ledger has not recorded yet.

    Attributes:
        total: int64 [L, E]; None before the first.
    """

    def __init__(self, total: Tensor | None = None) -> None:
        self.total = total

    def add(self, module: nn.Module) -> None:
        """Those of the last micro-batch."""
        layers = moe_layers(module)
        counts = [layer.statistics.computed_NE.sum(dim=0) for layer in layers if layer.statistics is not None]
        if counts and len(counts) == len(layers):
            stacked = torch.stack(counts)
            self.total = stacked if self.total is None else self.total + stacked

    def record(self, checkpoint_ledger: CheckpointLedger | None) -> None:
        """Into the ledger, where there is one."""
        if self.total is not None and checkpoint_ledger is not None:
            checkpoint_ledger.ledger.record(self.total.cpu().numpy())
            self.total = None


def computed_in(strategy: ExpertParallelStrategy) -> torch.dtype | None:
    """What experts compute in, where that is less than their weights; None: it is not."""
    layers = strategy.experts.layers
    is_less = bool(layers) and strategy.flight_dtype.itemsize < layers[0].experts.dtype.itemsize
    return strategy.flight_dtype if is_less else None


def count_losses(checkpoint_ledger: CheckpointLedger, restored: CheckpointSource) -> float:
    """Account for experts that came back older than the checkpoint; the PLT that this restore cost."""
    saved = restored.read_object("ledger")
    lost = checkpoint_ledger.restore(saved, restored.first_step, restored.expert_versions())
    if lost.any():
        stale = int((lost > 0).sum())
        rank_zero_warn(
            f"{stale} experts were restored from older versions: {int(lost.sum())} assignments lost, "
            f"PLT {100 * checkpoint_ledger.ledger.plt:.3f} percent so far"
        )
    return checkpoint_ledger.ledger.plt_of(lost.sum(axis=1))


def count_stale(checkpoint_ledger: CheckpointLedger, versions: Mapping[tuple[int, int], int]) -> float:
    """Account for experts of the live state that came back older, given by (layer, expert); the PLT that it cost."""
    lost = checkpoint_ledger.lose(versions)
    rank_zero_warn(
        f"{len(versions)} experts came back older: {int(lost.sum())} assignments lost, "
        f"PLT {100 * checkpoint_ledger.ledger.plt:.3f} percent so far"
    )
    return checkpoint_ledger.ledger.plt_of(lost.sum(axis=1))


def new_ledger(
    trainer: pl.Trainer, state: TrainingState, settings: CheckpointSettings, counts: Tensor, steps: int
) -> CheckpointLedger:
    """Of a run that begins, from the assignments of its first steps, int64 [L, E]."""
    per_step: IntArray = counts.sum(dim=1).cpu().numpy() // max(1, steps)
    planned = (per_step * planned_steps(trainer)).clip(min=1)
    return state.checkpoint_ledger(planned, scopes=parse_scopes(settings.scopes), order=settings.order)


def choose_k(
    trainer: pl.Trainer, session: CheckpointSession, settings: CheckpointSettings, *, interval: int, lost: float = 0.0
) -> None:
    """Let DynamicK raise K for this interval, and after a restore that lost tokens; where none are lost, leave it.

    Args:
        interval: steps between checkpoints.
        lost: PLT that faults have cost since K was chosen last.
    """
    dynamic = _dynamic_k(trainer)
    if dynamic is None or settings.lossless:
        return
    total_steps = planned_steps(trainer)

    def predicted_plt(k: int) -> float:
        if settings.order != "sequential":
            return 0.0  # there is no bound: `bound_cost` looks at every checkpoint
        copied = max(k, session.k_snapshot)
        return worst_case_plt(
            num_experts=session.num_experts, k=k, k_snapshot=copied, interval=interval, total_steps=total_steps
        )

    k = dynamic.start(k0=session.k_persist, num_experts=session.num_experts, predicted_plt=predicted_plt)
    if lost:
        k = dynamic.after_fault(lost)
    if k > session.k_persist:
        rank_zero_warn(
            f"DynamicK writes {k} experts of each layer instead of {session.k_persist}: with fewer, the next "
            f"fault could bring the lost tokens above {100 * dynamic.threshold:.2f} percent"
        )
    session.raise_k(k)


def bound_cost(
    trainer: pl.Trainer, session: CheckpointSession, checkpoint_ledger: CheckpointLedger, *, order: Order
) -> None:
    """Under the load-aware orders: let DynamicK raise K until a restore of the next checkpoint keeps the budget."""
    dynamic = _dynamic_k(trainer)
    if dynamic is not None and order != "sequential":
        cost = lambda k: checkpoint_ledger.cost(checkpoint_ledger.plan(max(k, session.k_snapshot), k))  # noqa: E731
        session.raise_k(dynamic.before_checkpoint(cost))


def planned_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole training.

    Raises:
        ConfigurationError: it has no end.
    """
    steps = trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise ConfigurationError(
            "the proportion of lost tokens needs the length of the training: give the Trainer max_steps or max_epochs"
        )
    return int(steps)


def _dynamic_k(trainer: pl.Trainer) -> DynamicK | None:
    return next((c for c in trainer.callbacks if isinstance(c, DynamicK)), None)  # type: ignore[attr-defined]
