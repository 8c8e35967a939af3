"""moe-bench layer: the MoE layer against the same mathematics as a loop over experts and as padded matrices.

Shapes: T tokens, K choices, E experts, C slots of a padded expert, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernel_contenders import swiglu
from benchmarks.measuring import interleaved_medians
from moe_lightning.arguments import Count, InputFile, option
from moe_lightning.cli.short_training import machine
from moe_lightning.config import NonNegativeInt
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import ForcedRouting
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.router import RouterConfig
from moe_lightning.text_table import table


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    tokens: Count = option("tokens T", 2048)
    d_model: Count = option("width D", 256)
    d_expert: Count = option("expert width F", 512)
    experts: Count = option("experts E", 32)
    top_k: Count = option("choices K", 2)
    trace: InputFile | None = option("routing trace (.npz) for the row 'trace'", None)
    trace_step: NonNegativeInt = option("iteration of the trace", 2001)
    rounds: Count = option("measurements of each", 9)
    activation: Literal["gelu", "swiglu"] = option("of the experts", "gelu")


def run(options: Options) -> int:
    """Print forward plus backward milliseconds and the ratios to our layer."""
    kinds = {"uniform": ForcedRouting(kind="uniform"), "zipf 1.2": ForcedRouting(kind="zipf", exponent=1.2)}
    if options.trace:
        kinds["trace"] = ForcedRouting(kind="trace", path=str(options.trace))
    headers = ("routing", "busiest/mean", "ours ms", "loop ms", "padded ms", "loop/ours", "padded/ours")
    print(f"{machine()}; medians of {options.rounds} interleaved rounds, forward + backward, float32")
    print(table(headers, [[name, *_row(forced, options)] for name, forced in kinds.items()]))
    return 0


def _row(forced: ForcedRouting, options: Options) -> list[str]:
    torch.manual_seed(0)
    config = RouterConfig(top_k=options.top_k, aux_loss_coef=0.0, forced=forced)
    layer = MoELayer(options.d_model, options.d_expert, options.experts, config, activation=options.activation)
    layer.router.stream.advance(step=options.trace_step, first_sample=0, num_samples=options.tokens)
    x_TD = torch.randn(options.tokens, options.d_model, requires_grad=True)
    grad_TD = torch.randn(options.tokens, options.d_model)
    contenders = {"ours": layer, "loop": LoopLayer(layer), "padded": PaddedLayer(layer)}
    _check_equal(contenders, x_TD)
    medians = interleaved_medians(
        {name: _forward_backward(module, x_TD, grad_TD) for name, module in contenders.items()}, options.rounds
    )
    assert layer.statistics is not None
    counts_E = layer.statistics.computed_NE[0].float()
    ours, loop, padded = (medians[name] for name in ("ours", "loop", "padded"))
    return [
        f"{float(counts_E.max() / counts_E.mean()):.2f}",
        *(f"{1e3 * seconds:.1f}" for seconds in (ours, loop, padded)),
        f"{loop / ours:.2f}",
        f"{padded / ours:.2f}",
    ]


def _forward_backward(module: nn.Module, x_TD: Tensor, grad_TD: Tensor) -> Callable[[], None]:
    def once() -> None:
        x_TD.grad = None
        module.zero_grad(set_to_none=True)
        module(x_TD).backward(grad_TD)

    return once


def _check_equal(contenders: dict[str, nn.Module], x_TD: Tensor) -> None:
    """A benchmark of unequal results would be worthless."""
    with torch.no_grad():
        expected = contenders["ours"](x_TD)
        for name, module in contenders.items():
            difference = float((module(x_TD) - expected).abs().max())
            if difference > 1e-4 * float(expected.abs().max()):
                raise ConfigurationError(f"'{name}' differs from our layer by {difference}: the comparison is void")


class LoopLayer(nn.Module):
    """The plain way: for each expert select its tokens, compute, add the weighted results."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.router, experts = layer.router, layer.experts
        self.activation = experts.activation
        self.up = nn.ParameterList(nn.Parameter(w.detach().clone()) for w in experts.w_up)
        self.down = nn.ParameterList(nn.Parameter(w.detach().clone()) for w in experts.w_down)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, choice = torch.where(routing.expert_ids_TK == expert)
            # Without tokens too: a parameter that is not used is an error under DDP.
            rows = _activate(x_TD[token] @ up, self.activation) @ down
            out_TD.index_add_(0, token, rows * routing.weights_TK[token, choice, None])
        return out_TD.view_as(x)


class PaddedLayer(nn.Module):
    """Every expert padded to the fullest one (no token dropped), one batched matrix product for all."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.router, self.num_experts = layer.router, layer.num_experts
        self.activation = layer.experts.activation
        self.up = nn.Parameter(layer.experts.w_up.detach().clone())
        self.down = nn.Parameter(layer.experts.w_down.detach().clone())

    def forward(self, x_TD: Tensor) -> Tensor:
        routing = self.router(x_TD)
        ids_M = routing.expert_ids_TK.flatten()
        counts_E = torch.bincount(ids_M, minlength=self.num_experts)
        capacity = int(counts_E.max())
        order_M = torch.argsort(ids_M, stable=True)
        first_E = torch.cumsum(counts_E, 0) - counts_E
        place_M = torch.arange(len(ids_M)) - first_E[ids_M[order_M]] + ids_M[order_M] * capacity
        token_M = order_M // routing.expert_ids_TK.shape[1]
        padded = x_TD.new_zeros(self.num_experts * capacity, x_TD.shape[1]).index_copy(0, place_M, x_TD[token_M])
        hidden = _activate(padded.view(self.num_experts, capacity, -1) @ self.up, self.activation)
        rows_MD = (hidden @ self.down).flatten(0, 1)[place_M] * routing.weights_TK.flatten()[order_M, None]
        return torch.zeros_like(x_TD).index_add(0, token_M, rows_MD)


def _activate(hidden: Tensor, activation: str) -> Tensor:
    return F.gelu(hidden) if activation == "gelu" else swiglu(hidden)
