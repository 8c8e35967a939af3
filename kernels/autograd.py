"""The gradients of the operations, written once over the primitives of `interface`.

Every backward of rows is made of gathers and matmuls; nothing is scattered, so nothing is added in an undefined order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.interface import (
    ActivationKernels,
    Choice,
    Draw,
    FusedKernels,
    MatmulKernels,
    RouterKernels,
    RoutingKernels,
    RowKernels,
    StreamKernels,
)

Grads = tuple[Tensor | None, ...]


def apply(function: Any, *arguments: object) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*arguments)


def _require_first_derivative() -> None:
    """
    Raises:
        ConfigurationError: the gradients, which kernels compute outside of any graph, are to be differentiated.
    """
    if torch.is_grad_enabled():
        raise ConfigurationError(
            "kernels have no second derivatives, but create_graph=True asks for them: leave it out, or set the kernel "
            "backend 'reference'"
        )


class TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, top_k: int, kernels: RoutingKernels) -> tuple[Tensor, Tensor]:
        ids_TK = kernels.top_k(scores_TE, top_k)
        ctx.save_for_backward(ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        ctx.shape = scores_TE.shape
        return scores_TE.gather(1, ids_TK), ids_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        (ids_TK,) = ctx.saved_tensors
        # Ids of a token are distinct, so nothing is added twice and the scatter is deterministic.
        return grads[0].new_zeros(ctx.shape).scatter_(1, ids_TK, grads[0]), None, None


class Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        selection_E: Tensor | None,
        choice: Choice,
        kernels: RouterKernels,
    ) -> tuple[Tensor | None, ...]:
        routed, terms_3ED = kernels.route(x_TD, weight_ED, bias_E, selection_E, choice)
        ctx.save_for_backward(x_TD, terms_3ED, routed.scores_TE, routed.ids_TK)
        ctx.choice, ctx.kernels = choice, kernels
        ctx.dtypes = (weight_ED.dtype, None if bias_E is None else bias_E.dtype)
        ctx.mark_non_differentiable(routed.ids_TK)
        ctx.set_materialize_grads(False)
        return *routed[:4], x_TD if ctx.needs_input_grad[0] else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        _require_first_derivative()
        if all(grad is None for grad in grads[:3]):
            return grads[4], None, None, None, None, None
        x_TD, terms_3ED, scores_TE, ids_TK = ctx.saved_tensors
        logits, scores, weights, _, beside = (None if grad is None else grad.contiguous() for grad in grads)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grads_3TE, grad_x = ctx.kernels.logit_gradients(
            terms_3ED, scores_TE, ids_TK, (logits, scores, weights), ctx.choice, wants_x, beside
        )
        grad_weight = ctx.kernels.router_wgrad(grads_3TE, x_TD).to(ctx.dtypes[0]) if wants_weight else None
        grad_bias = grads_3TE.sum((0, 1), dtype=torch.float32).to(ctx.dtypes[1]) if wants_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


class Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, counts_E: Tensor, kernels: RouterKernels) -> Tensor:
        ctx.save_for_backward(scores_TE, counts_E)
        ctx.kernels = kernels
        return kernels.balance(scores_TE, counts_E).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        _require_first_derivative()
        return ctx.kernels.balance_gradient(*ctx.saved_tensors, grads[0]), None, None


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_M: Tensor, inverse_TK: Tensor, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        ctx.kernels = kernels
        return kernels.gather(x_TD, order_M, inverse_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        _require_first_derivative()
        (inverse_TK,) = ctx.saved_tensors
        return ctx.kernels.combine(grads[0].contiguous(), inverse_TK, None), None, None, None


class Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, inverse_TK: Tensor, order_M: Tensor, weights_TK: Tensor | None, kernels: RowKernels
    ) -> Tensor:
        ctx.kernels, ctx.top_k = kernels, inverse_TK.shape[1]
        needs_rows = weights_TK is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(inverse_TK, order_M, weights_TK, rows_MD if needs_rows else None)
        return kernels.combine(rows_MD, inverse_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        _require_first_derivative()
        inverse_TK, order_M, weights_TK, rows_MD = ctx.saved_tensors
        grad_TD = grads[0].contiguous()
        if weights_TK is None:
            return ctx.kernels.gather(grad_TD, order_M, ctx.top_k), None, None, None, None
        grad_rows, products_M = ctx.kernels.spread(grad_TD, order_M, rows_MD, weights_TK, ctx.needs_input_grad[0])
        grad_weights = None
        if products_M is not None and len(order_M) > inverse_TK.numel():  # padded: several rows name an assignment
            grad_weights = products_M[inverse_TK.clamp_min(0)].masked_fill_(inverse_TK < 0, 0).to(weights_TK.dtype)
        elif products_M is not None:
            grad_weights = products_M.new_zeros(inverse_TK.numel())
            grad_weights[order_M] = products_M
            grad_weights = grad_weights.view(inverse_TK.shape).to(weights_TK.dtype)
        return grad_rows, None, None, grad_weights, None


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, index_M: Tensor, inverse_M: Tensor | None, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(index_M, inverse_M)
        ctx.kernels = kernels
        return kernels.gather(x_MD, index_M, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        index_M, inverse_M = ctx.saved_tensors
        return (
            ctx.kernels.gather(grads[0].contiguous(), invert(index_M) if inverse_M is None else inverse_M, 1),
            None,
            None,
            None,
        )


class KeyedDropout(torch.autograd.Function):
    """Keeps nothing but the key: the backward draws the same numbers again."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, p: float, draw: Draw, kernels: StreamKernels) -> Tensor:
        ctx.drawn = p, draw, kernels
        return kernels.dropout(x_MD, p, draw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        p, draw, kernels = ctx.drawn
        return kernels.dropout(grads[0].contiguous(), p, draw), None, None, None


class GroupedMM(torch.autograd.Function):
    """x @ w by slot; where `order` is given, x is still in token order and the gather happens in the load."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_SDF: Tensor,
        tokens_S: Tensor,
        order_M: Tensor | None,
        inverse_TK: Tensor | None,
        kernels: tuple[MatmulKernels, RowKernels],
    ) -> Tensor:
        ctx.save_for_backward(x, weight_SDF, order_M, inverse_TK)
        ctx.kernels = kernels
        ctx.divisor = 1 if inverse_TK is None else inverse_TK.shape[1]
        ctx.cut = kernels[0].cut(tokens_S, len(x) if order_M is None else len(order_M), x)
        return kernels[0].grouped_mm(x, weight_SDF, ctx.cut, order_M, ctx.divisor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        _require_first_derivative()
        x, weight_SDF, order_M, inverse_TK = ctx.saved_tensors
        matmul, rows = ctx.kernels
        grad_MF = grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul.grouped_mm(grad_MF, weight_SDF.transpose(1, 2), ctx.cut, None, 1)
            if inverse_TK is not None:
                grad_x = rows.combine(grad_x, inverse_TK, None)
        if ctx.needs_input_grad[1]:
            grad_weight = matmul.grouped_wgrad(x, grad_MF, ctx.cut, order_M, ctx.divisor)
        return grad_x, grad_weight, None, None, None, None


class ExpertActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_MH: Tensor, gate_M: Tensor | None, kind: str, kernels: ActivationKernels) -> Tensor:
        ctx.kernels, ctx.kind = kernels, kind
        ctx.save_for_backward(h_MH, gate_M)
        return kernels.activation(h_MH, kind, gate_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        h_MH, gate_M = ctx.saved_tensors
        grad_h, grad_gate = ctx.kernels.activation_grad(grads[0].contiguous(), h_MH, ctx.kind, gate_M)
        if grad_gate is not None:
            grad_gate = grad_gate.to(gate_M.dtype)
        return grad_h, grad_gate, None, None


class ExpertMLP(torch.autograd.Function):
    """Both projections and the activation between them. Where `order` is given x and the result are in token order, and
    the rows of a token are weighed and summed. The backward keeps x and h only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_SDH: Tensor,
        down_SFD: Tensor,
        tokens_S: Tensor,
        kind: str,
        order_M: Tensor | None,
        inverse_TK: Tensor | None,
        weights_TK: Tensor | None,
        kernels: tuple[MatmulKernels, FusedKernels, RowKernels],
    ) -> Tensor:
        matmul, fused, rows = kernels
        ctx.kernels, ctx.kind = kernels, kind
        ctx.divisor = 1 if inverse_TK is None else inverse_TK.shape[1]
        ctx.cut = matmul.cut(tokens_S, len(x) if order_M is None else len(order_M), x)
        h_MH, activation_MF = fused.up_and_activation(x, up_SDH, ctx.cut, order_M, ctx.divisor, kind)
        ctx.save_for_backward(x, up_SDH, down_SFD, order_M, inverse_TK, weights_TK, h_MH)
        y_MD = matmul.grouped_mm(activation_MF, down_SFD, ctx.cut, None, 1)
        return y_MD if inverse_TK is None else rows.combine(y_MD, inverse_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        _require_first_derivative()
        x, up_SDH, down_SFD, order_M, inverse_TK, weights_TK, h_MH = ctx.saved_tensors
        matmul, fused, rows = ctx.kernels
        grad = grads[0].contiguous()
        hidden = fused.down_gradient(grad, down_SFD, ctx.cut, h_MH, ctx.kind, order_M, weights_TK)
        grad_x = grad_up = grad_down = grad_weights = None
        if ctx.needs_input_grad[2]:
            grad_down = fused.down_wgrad(hidden.activation_MF, grad, ctx.cut, order_M, ctx.divisor)
        if ctx.needs_input_grad[0]:
            grad_x = matmul.grouped_mm(hidden.h_MH, up_SDH.transpose(1, 2), ctx.cut, None, 1)
            if inverse_TK is not None:
                grad_x = rows.combine(grad_x, inverse_TK, None)
        if ctx.needs_input_grad[1]:
            grad_up = matmul.grouped_wgrad(x, hidden.h_MH, ctx.cut, order_M, ctx.divisor)
        if ctx.needs_input_grad[7]:
            grad_weights = hidden.products_CA.sum(0).view(weights_TK.shape).to(weights_TK.dtype)
        return grad_x, grad_up, grad_down, None, None, None, None, grad_weights, None


def invert(index_M: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_M = torch.empty_like(index_M)
    inverse_M[index_M] = torch.arange(len(index_M), device=index_M.device)
    return inverse_M
