"""The strategy's way to edit experts while a run goes on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from moe_lightning.algorithms.expert_edits import ExpertEdit, edit_tables
from moe_lightning.modules.router import Router
from moe_lightning.strategies.evaluating import EvaluatingStrategy
from moe_lightning.strategies.expert_editing import EditListener, ExpertEditing
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stand_ins import without_traces
from moe_lightning.strategies.step_logs import StepLogs


class EditingStrategy(EvaluatingStrategy):
    """What changes the number of experts.

    A checkpoint says how many experts its run had, and whoever resumes from it gets them.
    """

    @property
    @abstractmethod
    def experts(self) -> PlacedExperts:
        """The experts under their placements."""

    @property
    def editing(self) -> ExpertEditing:
        """Does it, and remembers it."""
        return self.checkpoints.editing

    @override
    def follow_edits(self, checkpoint: Mapping[str, Any]) -> None:
        with self._reshaped():
            self.editing.follow(checkpoint, self._experts_in(checkpoint))

    def _experts_in(self, checkpoint: Mapping[str, Any]) -> int | None:
        """Of a layer, whose values an opened checkpoint has; None: its values have other names than the module's."""
        if self.state.restored is not None:
            return int(self.state.restored.expert_versions().shape[1])
        values = checkpoint.get("state_dict", {})
        return next((len(values[key]) for key in self.experts.keys(self.state.module) if key in values), None)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        for layer in self.experts.layers:
            if isinstance(layer.router, Router) and not self.state.is_shared:
                layer.router.find_twins()

    @contextmanager
    def _reshaped(self) -> Generator[None, None, None]:
        """Inside, dense parameters may get other shapes; collective."""
        is_wrapped, self.model = self.model is not self.state.module, self.state.module  # DDP keeps shapes
        yield
        if is_wrapped:
            self.configure_ddp()

    def require_editable(self) -> None:
        """
        Raises:
            ConfigurationError: a run whose experts cannot be edited.
        """
        self.steps.require_stated_end("live edits of experts")
        self.editing.require_editable()

    def edit_experts(self, edits: Sequence[ExpertEdit], loads_LE: NDArray[np.int64] | None = None) -> None:
        """Prune, merge and duplicate experts of the running fit, with their router rows and all optimizer states, as
        `moe-ckpt edit` does in a file; collective, between steps.

        Args:
            edits: one for each MoE layer, the same on every rank; afterwards all layers have equally many experts.
            loads_LE: tokens of each expert, in proportion to which merged ones count; None: equally.

        Raises:
            ConfigurationError: an edit that cannot be, or a run whose experts cannot be edited.
        """
        self.require_editable()
        self.edit_by_tables(edit_tables(edits, self.editing.num_experts, loads_LE))

    def loss_of(self, batch: Any, batch_idx: int) -> float:
        """Of a training batch over all ranks, without dropout and noise, and without learning, logging or counting
        anything; collective, between steps.
        """
        module, steps = self.state.module, self.steps
        was_training = [part for part in module.modules() if part.training]
        for part in module.children():
            part.eval()  # the module itself weighs its loss over the ranks as in training
        self.experts.forget_step()
        try:
            with without_traces(module), StepLogs().taking(module, 1, lambda: None), torch.no_grad():
                answer = steps.measure(self.precision_plugin.train_step_context, batch, batch_idx)
        finally:
            for part in was_training:
                part.training = True
            self.experts.forget_step()
        return answer

    def edit_by_tables(self, tables: Sequence[NDArray[np.float64]]) -> None:
        """The same with shares [new experts, old experts] of each layer."""
        self.editing.check_size(len(tables[0]))
        trainer = self.state.trainer
        self.worlds.leave()
        with self._reshaped():
            self.editing.edit(tables, trainer.global_step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EditListener):
                callback.experts_edited(trainer)
