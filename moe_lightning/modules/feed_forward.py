"""The dense feed-forward layer, of the same shape as one expert."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from moe_lightning.modules.experts import Activation


class FeedForward(nn.Module):
    """[..., D] -> [..., D] through a hidden layer: GELU (up, down) or SwiGLU (gate and up in one matrix, down).

    Args:
        d_model: width D.
        d_hidden: hidden width.
        activation: "gelu" or "swiglu".
        bias: add biases.
        init_std: standard deviation of the weights; `down_init_std` of the output matrix (default: the same).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: Activation,
        bias: bool,
        *,
        init_std: float = 0.02,
        down_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(d_model, 2 * d_hidden if activation == "swiglu" else d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)
        for linear, std in ((self.up, init_std), (self.down, init_std if down_init_std is None else down_init_std)):
            nn.init.normal_(linear.weight, std=std)
            if bias:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.activation == "gelu":
            return self.down(F.gelu(hidden))  # type: ignore[no-any-return]
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]
