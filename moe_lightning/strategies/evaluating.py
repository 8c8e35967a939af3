"""Lightning's validation, test and prediction, over ranks and through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

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
