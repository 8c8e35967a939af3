"""Lightning's table of layers, for a model whose experts are spread over ranks."""

from __future__ import annotations

from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from typing_extensions import override

from moe_lightning.config import validated
from moe_lightning.models.size import whole_parameters
from moe_lightning.seams import SummaryShown, SummaryTable

_NOT_APPLICABLE = "n/a"


class WholeModelSummary(SummaryTable):
    """Counts as if all experts were here; `Params per Device` is what this rank holds."""

    @property
    @override
    def param_nums(self) -> list[int]:
        modules = dict(self.module.named_modules())
        return [whole_parameters(modules[name]) for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return whole_parameters(self.module)

    @property
    @override
    def trainable_parameters(self) -> int:
        return whole_parameters(self.module, trained=True)

    @override
    def columns(self, stock: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        modules = dict(self.module.named_modules())
        held = (sum(p.numel() for p in modules[name].parameters()) for name in self.layer_names)
        here = [get_human_readable_count(count) for count in held]
        here += [_NOT_APPLICABLE] * (len(stock[0][1]) - len(here))  # a row of Lightning's for what no layer owns
        place = [name for name, _ in stock].index("Params") + 1
        return [*stock[:place], ("Params per Device", here), *stock[place:]]


@validated
class ExpertModelSummary(SummaryShown):
    """Lightning's summary with the parameters of the whole model, each expert once, and beside them those that rank 0
    holds. The one that a Trainer adds by itself takes rank 0's slots for the model.

    Args:
        max_depth: of the layers that the table lists; 0 shows none, -1 all.
    """

    table = WholeModelSummary
