"""Lightning's table of layers, for a model whose experts are spread over ranks."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary, get_human_readable_count
from typing_extensions import override

from moe_lightning.models.size import whole_parameters
from moe_lightning.values import validated

_NOT_APPLICABLE = "n/a"


@validated
class ExpertModelSummary(RichModelSummary):
    """Lightning's summary with the parameters of the whole model, each expert once, and beside them those that rank 0
    holds. The one that a Trainer adds by itself takes rank 0's slots for the model.

    Args:
        max_depth: of the layers that the table lists; 0 shows none, -1 all.
    """

    @override
    def _summary(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> ModelSummary:
        return WholeModelSummary(pl_module, max_depth=self._max_depth)


class WholeModelSummary(ModelSummary):
    """Counts as if all experts were here; `Params per Device` is what this rank holds."""

    @property
    @override
    def param_nums(self) -> list[int]:
        modules = dict(self._model.named_modules())
        return [whole_parameters(modules[name]) for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return whole_parameters(self._model)

    @property
    @override
    def trainable_parameters(self) -> int:
        return whole_parameters(self._model, trained=True)

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        modules = dict(self._model.named_modules())
        held = (sum(p.numel() for p in modules[name].parameters()) for name in self.layer_names)
        here = [get_human_readable_count(count) for count in held]
        here += [_NOT_APPLICABLE] * (len(columns[0][1]) - len(here))  # a row of Lightning's for what no layer owns
        place = [name for name, _ in columns].index("Params") + 1
        return [*columns[:place], ("Params per Device", here), *columns[place:]]
