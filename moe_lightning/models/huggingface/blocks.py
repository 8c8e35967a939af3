"""What takes the place of modules of a Hugging Face model: feed-forward blocks, norms of branches that are dropped."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.moe_layer import MoELayer
from moe_lightning.modules.stream import SampleStream


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


class DroppingLayerNorm(nn.LayerNorm):
    """[B, ..., D] -> [B, ..., D]: the LayerNorm at the end of a residual branch, with stochastic depth: while training,
    the branch is zero for some samples (Huang et al. 2016). Which ones follows the sample, not the rank.

    Args:
        norm: the layer in whose place it comes, of the same parameters.
        p: probability of dropping the branch, in [0, 1).

    Raises:
        ConfigurationError: p is outside its range.
    """

    def __init__(self, norm: nn.LayerNorm, p: float) -> None:
        super().__init__(norm.normalized_shape, norm.eps)
        if not 0.0 <= p < 1.0:
            raise ConfigurationError(f"drop_path_rate={p} must be at least 0 and below 1")
        self.p = p
        self.tag = 0
        self.stream = SampleStream()

    def forward(self, input: Tensor) -> Tensor:
        branch = super().forward(input)
        if not self.training or self.p == 0.0:
            return branch
        # Negative tags are nobody else's: routers and dropouts count upwards.
        uniform_B1 = self.stream.uniform(-1 - self.tag, branch.shape[0], 1, branch.device)
        kept_B = (uniform_B1[:, 0] >= self.p).to(branch.dtype) / (1.0 - self.p)
        return branch * kept_B.view(-1, *[1] * (branch.ndim - 1))
