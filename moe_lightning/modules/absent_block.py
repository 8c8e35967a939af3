"""What stands in a model for a block that other ranks compute, in another stage of a pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class AbsentBlock(nn.Module):
    """Hands its first argument on.

    Attributes:
        auxiliary_loss: of the layers of the stages before, where this is the last block before the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x
