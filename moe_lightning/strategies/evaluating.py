"""Lightning's validation, test and prediction, over ranks and through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.strategies.evaluation_weights import EvaluationWeights
from moe_lightning.strategies.pipeline import Context, Pipeline
from moe_lightning.strategies.rank_state import RankState
from moe_lightning.strategies.saving import SavingStrategy
from moe_lightning.strategies.steps import Steps


class EvaluatingStrategy(SavingStrategy):
    """What Lightning asks of a strategy for a batch outside of training.

    Attributes:
        state: what this rank holds of the run.
        steps: batches, losses and gradients.
    """

    state: RankState
    steps: Steps
    _pipeline: Pipeline | None

    @property
    def is_stand_in(self) -> bool:
        """This rank has no sample in the running or the last batch: callbacks that count samples skip it."""
        return self.steps.is_stand_in

    @cached_property
    def evaluation_weights(self) -> EvaluationWeights:
        """What is in the place of the weights that are trained, where those are not the ones to evaluate at."""
        return EvaluationWeights(self.state, self.worlds)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.evaluation_weights.stay()  # a training may have failed while it evaluated
        super().setup_optimizers(trainer)

    @override
    def on_validation_start(self) -> None:
        self.evaluation_weights.put()

    @override
    def on_validation_end(self) -> None:
        self.evaluation_weights.leave()

    @override
    def on_train_end(self) -> None:
        self.evaluation_weights.put()
        self.evaluation_weights.stay()
        super().on_train_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """In a file those to evaluate at; beside the states of the optimizer those that are trained."""
        if self.checkpoints.leaves_state_out:
            return self.trained_state_dict()
        with self.evaluation_weights.in_place() as is_other:
            state = self.trained_state_dict()
            return {n: v.clone() if is_other and isinstance(v, Tensor) else v for n, v in state.items()}

    def trained_state_dict(self) -> dict[str, Any]:
        """The module's state_dict on rank 0 as it is trained; collective."""
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.checkpoints.leaves_state_out:
            return super().optimizer_state(optimizer)
        with self.evaluation_weights.in_place():
            return super().optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.evaluation_weights.take_up()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._evaluation("validation_step", self.precision_plugin.val_step_context)
        return self.steps.evaluate(step, self.state.trainer.val_dataloaders, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._evaluation("test_step", self.precision_plugin.test_step_context)
        return self.steps.evaluate(step, self.state.trainer.test_dataloaders, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._evaluation("predict_step", self.precision_plugin.predict_step_context)
        return self.steps.predict(step, self.state.trainer.predict_dataloaders, *args, **kwargs)

    def _evaluation(self, name: str, context: Context) -> Callable[..., Any]:
        """How a batch is evaluated: by Lightning, or through the stages."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.is_whole:
            step: Callable[..., Any] = getattr(super(), name)
            return step
        own = getattr(self.state.module, name)
        return lambda *args: pipeline.evaluate(own, context, args)
