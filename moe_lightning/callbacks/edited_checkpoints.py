"""What edits of experts mean for partial checkpoints: versions of other experts cannot stand in for those of now."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from moe_lightning.callbacks import checkpoint_budget as budget
from moe_lightning.checkpoint.checkpoint_ledger import CheckpointLedger
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.checkpoint.settings import CheckpointSettings
from moe_lightning.strategies.expert_editing import EditListener
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


class EditedCheckpoints(EditListener):
    """Ends the session at an edit: the next checkpoint opens another one, and holds every expert."""

    settings: CheckpointSettings
    session: CheckpointSession | None
    checkpoint_ledger: CheckpointLedger | None
    _received_ledger: dict[str, Any] | None
    _lost: budget.EditedLosses | None = None  # by the restore that this process began with
    _counts: budget.TokenCounts
    _experts_moved: bool
    _is_interrupted: bool

    def _close(self, *, wait: bool) -> None:
        raise NotImplementedError

    @override
    def forget_experts(self, trainer: pl.Trainer) -> None:
        assert isinstance(trainer.strategy, ExpertParallelStrategy)
        self._close(wait=False)
        self._counts, self._experts_moved, self._is_interrupted = budget.TokenCounts(), False, True
        former, restored = self._received_ledger, trainer.strategy.state.restored
        if self.checkpoint_ledger is not None:
            former = self.checkpoint_ledger.state_dict()
        if former is not None:
            state = trainer.strategy.state.training_state()
            self.checkpoint_ledger = budget.ledger_after_edit(former, state, self.settings)
            self._received_ledger = None
        elif restored is not None and restored.keys("ledger") and self._lost is None:
            self._lost = budget.EditedLosses.of(restored)
