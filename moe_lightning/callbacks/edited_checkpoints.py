"""What edits of experts mean for partial checkpoints: versions of other experts cannot stand in for those of now."""

from __future__ import annotations

import lightning.pytorch as pl
from typing_extensions import override

from moe_lightning.callbacks import checkpoint_budget as budget
from moe_lightning.checkpoint.checkpoint_ledger import CheckpointLedger
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.checkpoint.settings import CheckpointSettings
from moe_lightning.strategies.editing import EditListener
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


class EditedCheckpoints(EditListener):
    """Ends the session at an edit: the next checkpoint opens another one, and holds every expert."""

    settings: CheckpointSettings
    session: CheckpointSession | None
    checkpoint_ledger: CheckpointLedger | None
    _counts: budget.TokenCounts
    _experts_moved: bool
    _is_interrupted: bool

    def _close(self, *, wait: bool) -> None:
        raise NotImplementedError

    @override
    def experts_edited(self, trainer: pl.Trainer) -> None:
        assert isinstance(trainer.strategy, ExpertParallelStrategy)
        self._close(wait=False)
        self._counts, self._experts_moved, self._is_interrupted = budget.TokenCounts(), False, True
        if self.checkpoint_ledger is not None:
            state = trainer.strategy.state.training_state()
            self.checkpoint_ledger = budget.ledger_after_edit(self.checkpoint_ledger, state, self.settings)
