"""What takes the place of modules of a Hugging Face model: feed-forward blocks, norms of branches that are dropped."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import NoiseSource, SampleStream

IS_TOKEN = "is_token"
"""Keyword of the model's forward pass, bool [B, L]: False where an input is padding that no expert gets."""


class SparseBlock(nn.Module):
    """[..., D] -> [..., D]: an MoE layer, and the block's own shared experts beside it.

    Args:
        moe: the layer.
        shared_experts: the dense layer that every token passes; None: there is none.
        after: applied to the result, such as the dropout of the dense block; None: nothing.
        returns_scores: answer (output, None), where the model expects scores of the router and drops them.

    Attributes:
        is_token: bool [B, L] of the model's running batch, or of that whose layer is recomputed in its backward pass;
            None: there is no padding.
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
        self.is_token: Tensor | None = None
        self._returns_scores = returns_scores

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        # Of a sequence that goes on from a cache, the last tokens are computed.
        is_token = None if self.is_token is None else self.is_token[:, -hidden_states.shape[1] :]
        out: Tensor = self.moe(hidden_states, is_token)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        if self.after is not None:
            out = self.after(out)
        return (out, None) if self._returns_scores else out


def keep_padding_from_experts(model: nn.Module) -> None:
    """Let the model's blocks know of each batch what is padding: by `is_token`, or by the attention_mask [B, L] of
    callers who know nothing of ours.
    """
    model.register_forward_pre_hook(_note_padding, with_kwargs=True)


def _note_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    is_token = kwargs.pop(IS_TOKEN, None)
    if is_token is None and isinstance(mask, Tensor) and mask.ndim == 2:
        is_token = mask.bool()
    for module in model.modules():
        if isinstance(module, SparseBlock):
            module.is_token = is_token
    return args, kwargs


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
        uniform_B1 = self.stream.uniform(NoiseSource.DROP_PATH.key(self.tag), branch.shape[0], 1, branch.device)
        kept_B = (uniform_B1[:, 0] >= self.p).to(branch.dtype) / (1.0 - self.p)
        return branch * kept_B.view(-1, *[1] * (branch.ndim - 1))
