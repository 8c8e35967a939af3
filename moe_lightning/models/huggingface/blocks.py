"""What takes the place of a Hugging Face feed-forward block."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_lightning.modules.moe_layer import MoELayer


class SparseBlock(nn.Module):
    """[..., D] -> [..., D]: an MoE layer, and the block's own shared experts beside it.

    Args:
        moe: the layer.
        shared_experts: the dense layer that every token passes; None: there is none.
        after: applied to the result, such as the dropout of the dense block; None: nothing.
        returns_scores: answer (output, None), where the model expects scores of the router and drops them.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        shared_experts: nn.Module | None = None,
        after: nn.Module | None = None,
        returns_scores: bool = False,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.shared_experts = shared_experts
        self.after = after
        self._returns_scores = returns_scores

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        out: Tensor = self.moe(hidden_states)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        if self.after is not None:
            out = self.after(out)
        return (out, None) if self._returns_scores else out
