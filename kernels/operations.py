"""Operations of a Mixture-of-Experts layer: choice of the implementation, checks of the arguments, gradients.

The implementation follows the device of the data, or the user's choice, and is logged once for each device. Gradients
are written once over the primitives of `interface`: every backward of rows is made of gathers and matmuls; nothing is
scattered, so nothing is added in an undefined order.

Legend: T tokens, K choices, A = T*K assignments, M rows (A less the dropped), E experts, S or C slots, D model width,
F expert width, H columns of h, N ranks or sources, C chunks, L elements.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import reference, torch_grouped, torch_kernels
from moe_lightning.kernels.interface import (
    ACTIVATIONS,
    GATED,
    ActivationKernels,
    Choice,
    Draw,
    ExpertSort,
    FusedKernels,
    MatmulKernels,
    PlanKernels,
    QuotaRounds,
    Routed,
    RouterKernels,
    RoutingKernels,
    RowKernels,
    Runs,
)
from moe_lightning.kernels.torch_kernels import empty, upload

BackendName = Literal["auto", "torch", "triton", "grouped", "reference"]
BACKENDS: tuple[str, ...] = get_args(BackendName)

_OLDEST_GPU = (8, 0)
"""Compute capability from which on Triton compiles for a GPU."""

_log = logging.getLogger(__name__)
_chosen = "auto"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Kernels of one backend."""

    routing: RoutingKernels
    rows: RowKernels
    matmul: MatmulKernels
    activation: ActivationKernels
    plan: PlanKernels
    fused: FusedKernels | None = None
    router: RouterKernels | None = None


_TORCH = Implementation(
    routing=torch_kernels,
    rows=torch_kernels,
    matmul=torch_kernels,
    activation=torch_kernels,
    plan=torch_kernels,
)


def set_backend(name: str) -> None:
    """Choose the implementation for this process: "auto" (Triton, where it is installed, on GPUs of compute capability
    8.0 and later, else torch), "torch", "triton", "grouped" (as "auto", but torch's own kernel multiplies the experts,
    see `torch_grouped`) or "reference".

    Raises:
        ConfigurationError: an unknown name, or "triton" where it is not installed.
    """
    global _chosen
    if name not in BACKENDS:
        raise ConfigurationError(f"kernel backend {name!r} does not exist: use one of {', '.join(BACKENDS)}")
    if name == "triton" and not _has_triton():
        raise ConfigurationError("kernel backend 'triton' needs the package triton: install it, or use 'auto'")
    _chosen = name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the implementation inside a `with` block (see `set_backend`)."""
    before = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def implementation(device: torch.device, dtype: torch.dtype | None = None) -> Implementation | None:
    """Return the implementation for tensors of a device and dtype; None stands for the reference.

    The Triton kernels accumulate in fp32 and torch's grouped kernel takes no fp64, so that runs on torch.

    Raises:
        ConfigurationError: Triton was asked for and cannot run on the device.
    """
    found = _implementation(_chosen, device.type)
    return _TORCH if found is not None and dtype == torch.float64 else found


@functools.cache
def _implementation(name: str, device_type: str) -> Implementation | None:
    is_grouped = name == "grouped"
    if name == "auto" or is_grouped:
        name = "triton" if device_type == "cuda" and _has_triton() and not _is_too_old() else "torch"
    _log.info("kernels on %s: %s%s", device_type, name, ", experts by torch's grouped_mm" if is_grouped else "")
    if name == "reference":
        return None
    found = _TORCH if name == "torch" else _load_triton(device_type)
    return replace(found, matmul=torch_grouped, fused=None) if is_grouped else found


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_too_old() -> bool:
    """True if Triton no longer compiles for this rank's GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < _OLDEST_GPU


def _load_triton(device_type: str) -> Implementation:
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigurationError(
            f"kernel backend 'triton' cannot run on device {device_type!r}: use 'auto', or interpret it with "
            "TRITON_INTERPRET=1 set before the start"
        )
    if device_type == "cuda" and _is_too_old():
        raise ConfigurationError(
            "kernel backend 'triton' needs a GPU of compute capability 8.0 (A100) or later: use 'auto'"
        )
    # Imported here: Triton is absent on most CPUs, and reads TRITON_INTERPRET when its kernels are defined.
    from moe_lightning.kernels.triton import activation, matmul, plan, router, routing, rows

    return Implementation(
        routing=routing,
        rows=rows,
        matmul=matmul,
        activation=activation,
        plan=plan,
        fused=matmul,
        router=router,
    )


_Grads = tuple[Tensor | None, ...]


def _apply(function: Any, *arguments: object) -> Tensor:
    """`function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*arguments)
    return result


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


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IDS = (torch.int64,)


def _check(
    name: str, tensor: Tensor, dims: int, device: torch.device | None = None, dtypes: Sequence[torch.dtype] = _FLOATS
) -> None:
    """
    Raises:
        ConfigurationError: other dimensions, another dtype, or another device than that of the data.
    """
    if tensor.dim() != dims:
        raise ConfigurationError(f"{name} has shape {list(tensor.shape)}, but needs {dims} dimensions")
    if tensor.dtype not in dtypes:
        wanted = "int64: call .long() on it" if dtypes is _IDS else "one of float32, bfloat16, float16, float64"
        raise ConfigurationError(f"{name} is {tensor.dtype}, but needs {wanted}")
    if device is not None:
        _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ConfigurationError(f"{name} is on {tensor.device}, but the data is on {device}: move it there")


def _check_order(order_M: Tensor, inverse_TK: Tensor, device: torch.device) -> None:
    _check("order", order_M, 1, device, _IDS)
    _check("inverse", inverse_TK, 2, device, _IDS)


def fuses_router(x_TD: Tensor, num_experts: int) -> bool:
    """True if `route` takes such rows: bf16, on a device with a kernel for it, and all experts fit one program."""
    impl = implementation(x_TD.device, x_TD.dtype)
    return (
        impl is not None
        and impl.router is not None
        and x_TD.dtype == torch.bfloat16
        and num_experts <= impl.router.MOST_EXPERTS
    )


class _Route(torch.autograd.Function):
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
    def backward(ctx: Any, *grads: Tensor | None) -> _Grads:
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


def route(
    x_TD: Tensor, weight_ED: Tensor, choice: Choice, *, bias_E: Tensor | None = None, selection_E: Tensor | None = None
) -> Routed:
    """Logits x @ weight^T + bias, their scores, the K best experts of each token and what they weigh.

    As exact as in fp32; a row's results are the same in any batch. Ties go to the lower expert id.

    Args:
        x_TD: bf16 [T, D], where `fuses_router` says so. Differentiable, as weight and bias are.
        weight_ED: floats [E, D].
        choice: how to choose.
        bias_E: added to the logits.
        selection_E: added to the scores for the choice alone.

    Raises:
        ConfigurationError: what does not fit together, or rows that `fuses_router` does not take.
    """
    _check("x", x_TD, 2)
    _check("weight", weight_ED, 2, x_TD.device)
    num_experts, width = weight_ED.shape
    if x_TD.shape[1] != width:
        raise ConfigurationError(f"x {list(x_TD.shape)} does not fit weight {list(weight_ED.shape)}")
    if not 1 <= choice.top_k <= num_experts:
        raise ConfigurationError(f"top_k={choice.top_k} must be from 1 to {num_experts} experts")
    for name, value_E in (("bias", bias_E), ("selection", selection_E)):
        if value_E is not None:
            _check(name, value_E, 1, x_TD.device)
            if len(value_E) != num_experts:
                raise ConfigurationError(f"{name} has {len(value_E)} values for {num_experts} experts")
    impl = implementation(x_TD.device, x_TD.dtype)
    if impl is None or impl.router is None or not fuses_router(x_TD, num_experts):
        raise ConfigurationError(
            f"no kernel routes {x_TD.dtype} rows on {x_TD.device.type} to {num_experts} experts in one operation: ask "
            "fuses_router first, or take top_k_routing"
        )
    bias_E, selection_E = (None if value is None else value.contiguous() for value in (bias_E, selection_E))
    routed: Any = _apply(_Route, x_TD.contiguous(), weight_ED.contiguous(), bias_E, selection_E, choice, impl.router)
    return Routed(*routed)


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, counts_E: Tensor, kernels: RouterKernels) -> Tensor:
        ctx.save_for_backward(scores_TE, counts_E)
        ctx.kernels = kernels
        return kernels.balance(scores_TE, counts_E).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
        _require_first_derivative()
        return ctx.kernels.balance_gradient(*ctx.saved_tensors, grads[0]), None, None


def balance(scores_TE: Tensor, tokens_per_expert_E: Tensor) -> Tensor | None:
    """E * sum_e f_e * P_e with f the fraction of assignments and P the mean over tokens of the scores' shares.

    None where no kernel computes it in one pass.

    Args:
        scores_TE: fp32, at least 0. Differentiable.
        tokens_per_expert_E: int64, on the host or the device.

    Raises:
        ConfigurationError: counts of other experts.
    """
    _check("scores", scores_TE, 2)
    _check("tokens_per_expert", tokens_per_expert_E, 1, dtypes=_IDS)
    if len(tokens_per_expert_E) != scores_TE.shape[1]:
        raise ConfigurationError(
            f"tokens_per_expert counts {len(tokens_per_expert_E)} experts, but scores have {scores_TE.shape[1]}"
        )
    impl = implementation(scores_TE.device, scores_TE.dtype)
    if impl is None or impl.router is None or scores_TE.dtype != torch.float32:
        return None
    counts_E = upload(tokens_per_expert_E, scores_TE.device).contiguous()
    return _apply(_Balance, scores_TE.contiguous(), counts_E, impl.router)


def top_k_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """The experts of each token's largest scores, int64 [T, K], descending; ties go to the lower expert id.

    Args:
        scores_TE: floats [T, E]; must not hold NaN.
        top_k: K, from 1 to E.
    """
    _check("scores", scores_TE, 2)
    num_experts = scores_TE.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ConfigurationError(f"top_k={top_k} does not fit {num_experts} experts: use 1 to {num_experts}")
    impl = implementation(scores_TE.device, scores_TE.dtype)
    if impl is None:
        return reference.top_k_experts(scores_TE, top_k)
    return impl.routing.top_k(scores_TE.detach().contiguous(), top_k)


def count_by_expert(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: assignments of each expert, dropped ones (-1) left out; a GPU is not waited for."""
    kernels = (implementation(expert_ids_TK.device) or _TORCH).routing
    return kernels.count(expert_ids_TK.contiguous(), num_experts)


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int, *, num_rows: int | None = None) -> ExpertSort:
    """Sort assignments by expert, stably: the rows of an expert keep the order of their tokens.

    Args:
        expert_ids_TK: int64 [T, K]; -1 marks a dropped assignment, which gets no row.
        num_experts: E.
        num_rows: how many ids are not -1, where the host knows it; then nothing is read back from a GPU.

    Raises:
        ConfigurationError: wrong shape or dtype, or (checked on the CPU only) an id outside -1..E-1.
    """
    _check("expert ids", expert_ids_TK, 2, dtypes=_IDS)
    if num_experts < 1:
        raise ConfigurationError(f"num_experts={num_experts} must be at least 1")
    if expert_ids_TK.device.type == "cpu" and expert_ids_TK.numel():
        low, high = (int(bound) for bound in expert_ids_TK.aminmax())
        lowest = 0 if num_rows == expert_ids_TK.numel() else -1
        if low < lowest or high >= num_experts:
            raise ConfigurationError(
                f"expert ids reach from {low} to {high}, but must lie in {lowest}..{num_experts - 1}"
            )
    impl = implementation(expert_ids_TK.device)
    if impl is None:
        return reference.sort_by_expert(expert_ids_TK, num_experts)
    return impl.routing.sort_by_expert(expert_ids_TK.contiguous(), num_experts, num_rows)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_M: Tensor, inverse_TK: Tensor, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        ctx.kernels = kernels
        return kernels.gather(x_TD, order_M, inverse_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
        _require_first_derivative()
        (inverse_TK,) = ctx.saved_tensors
        return ctx.kernels.combine(grads[0].contiguous(), inverse_TK, None), None, None, None


def permute(x_TD: Tensor, order_M: Tensor, inverse_TK: Tensor) -> Tensor:
    """Rows of tokens in expert-major order: [M, D] with row m = x[order[m] // K].

    The gradient of a token is the sum over its rows, accumulated in fp32 in the order of its choices.

    Args:
        x_TD: floats [T, D].
        order_M, inverse_TK: from `sort_by_expert`, or any pair with inverse[order[m]] = m and -1 elsewhere; for rows of
            padding, which `inverse_TK` does not name, `order_M` has any assignment.
    """
    _check("x", x_TD, 2)
    _check_order(order_M, inverse_TK, x_TD.device)
    if len(inverse_TK) != len(x_TD):
        raise ConfigurationError(f"inverse is made for {len(inverse_TK)} tokens, but x holds {len(x_TD)}")
    impl = implementation(x_TD.device, x_TD.dtype)
    if impl is None:
        return reference.permute(x_TD, order_M, inverse_TK)
    return _apply(_Permute, x_TD.contiguous(), order_M.contiguous(), inverse_TK.contiguous(), impl.rows)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, inverse_TK: Tensor, order_M: Tensor, weights_TK: Tensor | None, kernels: RowKernels
    ) -> Tensor:
        ctx.kernels, ctx.top_k = kernels, inverse_TK.shape[1]
        needs_rows = weights_TK is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(inverse_TK, order_M, weights_TK, rows_MD if needs_rows else None)
        return kernels.combine(rows_MD, inverse_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
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


def unpermute(
    rows_MD: Tensor,
    inverse_TK: Tensor,
    order_M: Tensor,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the rows of each token: [T, D] with y[t] = sum over k of weights[t, k] * rows[inverse[t, k]].

    Accumulated in fp32 in the order of k, result in the dtype of the rows. Dropped assignments add nothing.
    Differentiable in rows and weights; each row is used once, so the gradient of the rows is a gather.

    Args:
        rows_MD: floats [M, D].
        inverse_TK, order_M: as for `permute`.
        weights_TK: floats [T, K], or None for a plain sum. The torch kernel rounds them to the dtype of the rows.
    """
    _check("rows", rows_MD, 2)
    _check_order(order_M, inverse_TK, rows_MD.device)
    if len(order_M) != len(rows_MD):
        raise ConfigurationError(f"order lists {len(order_M)} rows, but there are {len(rows_MD)}")
    if weights_TK is not None:
        _check("weights", weights_TK, 2, rows_MD.device)
        if weights_TK.shape != inverse_TK.shape:
            raise ConfigurationError(
                f"weights {list(weights_TK.shape)} do not fit inverse {list(inverse_TK.shape)}: both are [tokens, "
                "choices]"
            )
        weights_TK = weights_TK.contiguous()
    impl = implementation(rows_MD.device, rows_MD.dtype)
    if impl is None:
        return reference.unpermute(rows_MD, inverse_TK, order_M, weights_TK)
    return _apply(
        _Unpermute, rows_MD.contiguous(), inverse_TK.contiguous(), order_M.contiguous(), weights_TK, impl.rows
    )


def reorder_chunks(starts_C: Tensor, ends_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Index that brings chunks of rows into another order, and its inverse, both int64 [M].

    Args:
        starts_C: int64, where each chunk begins now; in the new order.
        ends_C: int64, where each will end: the sums of their sizes.
        num_rows: M, the last of `ends_C`.
    """
    kernels = (implementation(starts_C.device) or _TORCH).routing
    return kernels.chunk_order(starts_C, ends_C, num_rows)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor, kernels: MatmulKernels) -> Tensor:
        ctx.save_for_backward(x_MD, weight_SDF)
        ctx.kernels, ctx.cut = kernels, kernels.cut(tokens_S, len(x_MD), x_MD)
        return kernels.grouped_mm(x_MD, weight_SDF, ctx.cut)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
        _require_first_derivative()
        x_MD, weight_SDF = ctx.saved_tensors
        grad_MF = grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.kernels.grouped_mm(grad_MF, weight_SDF.transpose(1, 2), ctx.cut)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.kernels.grouped_wgrad(x_MD, grad_MF, ctx.cut)
        return grad_x, grad_weight, None, None


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_per_slot_S: Tensor | Sequence[int]) -> Tensor:
    """Each row times the weight of its slot: [M, F], accumulated in fp32, in the dtype of x or of autocast.

    Rows past the sum of `tokens_per_slot_S` get zeros and have no gradient; a slot without rows gets a zero gradient.

    Args:
        x_MD: floats [M, D], sorted by slot.
        weight_SDF: [S, D, F] in the dtype of x.
        tokens_per_slot_S: int64 [S] on the host or the device (no host synchronisation on a GPU), or plain integers.
            The sum must not exceed M (checked where the counts are on the host).
    """
    _check("x", x_MD, 2)
    _check("weight", weight_SDF, 3, x_MD.device)
    if torch.is_autocast_enabled(x_MD.device.type):
        dtype = torch.get_autocast_dtype(x_MD.device.type)
        x_MD, weight_SDF = x_MD.to(dtype), weight_SDF.to(dtype)
    if weight_SDF.dtype != x_MD.dtype:
        raise ConfigurationError(f"weight is {weight_SDF.dtype}, but x is {x_MD.dtype}: use one dtype, or autocast")
    num_slots, width, _ = weight_SDF.shape
    if x_MD.shape[1] != width:
        raise ConfigurationError(f"x has {x_MD.shape[1]} columns, but weight expects {width}")
    tokens_S = _checked_counts(tokens_per_slot_S, num_slots)
    if tokens_S.device.type == "cpu":
        total = int(tokens_S.sum())
        if total > len(x_MD) or (num_slots and int(tokens_S.min()) < 0):
            raise ConfigurationError(
                f"tokens_per_slot sum to {total}, but x holds {len(x_MD)} rows and counts are at least 0"
            )
    impl = implementation(x_MD.device, x_MD.dtype)
    if impl is None:
        return reference.grouped_mm(x_MD, weight_SDF, tokens_S.tolist())
    return _apply(_GroupedMM, x_MD.contiguous(), weight_SDF, tokens_S, impl.matmul)


def _checked_counts(tokens_per_slot_S: Tensor | Sequence[int], num_slots: int) -> Tensor:
    tokens_S = torch.as_tensor(tokens_per_slot_S)
    if not len(tokens_S):
        tokens_S = tokens_S.long()
    _check("tokens_per_slot", tokens_S, 1, dtypes=_IDS)
    if len(tokens_S) != num_slots:
        raise ConfigurationError(f"tokens_per_slot counts {len(tokens_S)} slots, but weight has {num_slots}")
    return tokens_S


class _ExpertMLP(torch.autograd.Function):
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
        kernels: tuple[FusedKernels, RowKernels],
    ) -> Tensor:
        fused, rows = kernels
        ctx.kernels, ctx.kind = kernels, kind
        ctx.divisor = 1 if inverse_TK is None else inverse_TK.shape[1]
        ctx.cut = fused.cut(tokens_S, len(x) if order_M is None else len(order_M), x)
        h_MH, activation_MF = fused.up_and_activation(x, up_SDH, ctx.cut, order_M, ctx.divisor, kind)
        ctx.save_for_backward(x, up_SDH, down_SFD, order_M, inverse_TK, weights_TK, h_MH)
        y_MD = fused.grouped_mm(activation_MF, down_SFD, ctx.cut)
        return y_MD if inverse_TK is None else rows.combine(y_MD, inverse_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
        _require_first_derivative()
        x, up_SDH, down_SFD, order_M, inverse_TK, weights_TK, h_MH = ctx.saved_tensors
        fused, rows = ctx.kernels
        grad = grads[0].contiguous()
        hidden = fused.down_gradient(grad, down_SFD, ctx.cut, h_MH, ctx.kind, order_M, weights_TK)
        grad_x = grad_up = grad_down = grad_weights = None
        if ctx.needs_input_grad[2]:
            grad_down = fused.down_wgrad(hidden.activation_MF, grad, ctx.cut, order_M, ctx.divisor)
        if ctx.needs_input_grad[0]:
            grad_x = fused.grouped_mm(hidden.h_MH, up_SDH.transpose(1, 2), ctx.cut)
            if inverse_TK is not None:
                grad_x = rows.combine(grad_x, inverse_TK, None)
        if ctx.needs_input_grad[1]:
            grad_up = fused.up_wgrad(x, hidden.h_MH, ctx.cut, order_M, ctx.divisor)
        if ctx.needs_input_grad[7]:
            grad_weights = hidden.products_CA.sum(0).view(weights_TK.shape).to(weights_TK.dtype)
        return grad_x, grad_up, grad_down, None, None, None, None, grad_weights, None


def expert_mlp(
    x: Tensor,
    up_SDH: Tensor,
    down_SFD: Tensor,
    tokens_per_slot_S: Tensor | Sequence[int],
    kind: str,
    *,
    sort: ExpertSort | None = None,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """The experts of rows: activation(x @ up) @ down, by the slot of each row, as `grouped_mm` and `expert_activation`
    would compute it, in two launches where the device has kernels for that (`fuses_experts`).

    Args:
        x: floats [M, D], sorted by slot; or tokens [T, D] with `sort` and `weights_TK`.
        up_SDH, down_SFD: weights in the dtype of x; H = 2F where the kind is gated.
        tokens_per_slot_S: as for `grouped_mm`.
        kind: of the activation.
        sort: which rows the tokens have; then rows are gathered first, in the load where fused, and weighed and summed
            behind.
        weights_TK: floats [T, K], with `sort`; differentiable.

    Returns:
        [M, D], or [T, D] with `sort`.
    """
    if (sort is None) != (weights_TK is None):
        raise ConfigurationError("sort and weights belong together: give both or neither")
    impl = implementation(x.device, x.dtype)
    if impl is None or impl.fused is None:
        x_MD = x if sort is None else permute(x, sort.order_M, sort.inverse_TK)
        h_MH = grouped_mm(x_MD, up_SDH, tokens_per_slot_S)
        y_MD = grouped_mm(expert_activation(h_MH, kind), down_SFD, tokens_per_slot_S)
        return y_MD if sort is None else unpermute(y_MD, sort.inverse_TK, sort.order_M, weights_TK)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, up_SDH, down_SFD = x.to(dtype), up_SDH.to(dtype), down_SFD.to(dtype)
    _check_experts(x, up_SDH, down_SFD, kind)
    tokens_S = _checked_counts(tokens_per_slot_S, len(up_SDH))
    order_M, inverse_TK = (None, None) if sort is None else (sort.order_M, sort.inverse_TK)
    if weights_TK is not None:
        weights_TK = weights_TK.contiguous()
    return _apply(
        _ExpertMLP, x.contiguous(), up_SDH, down_SFD, tokens_S, kind, order_M, inverse_TK, weights_TK,
        (impl.fused, impl.rows),
    )  # fmt: skip


def fuses_experts(x: Tensor) -> bool:
    """True if `expert_mlp` of such rows runs fused; else gathering in the load saves nothing."""
    impl = implementation(x.device, x.dtype)
    return impl is not None and impl.fused is not None


def _check_experts(x: Tensor, up_SDH: Tensor, down_SFD: Tensor, kind: str) -> None:
    _check("x", x, 2)
    _check("up", up_SDH, 3)
    _check("down", down_SFD, 3)
    if kind not in ACTIVATIONS:
        raise ConfigurationError(f"activation {kind!r} does not exist: use one of {', '.join(ACTIVATIONS)}")
    slots, width, hidden = up_SDH.shape
    wanted = (slots, hidden // 2 if kind in GATED else hidden, width)
    if tuple(down_SFD.shape) != wanted or x.shape[1] != width:
        raise ConfigurationError(
            f"x {list(x.shape)}, up {list(up_SDH.shape)} and down {list(down_SFD.shape)} do not fit: with {kind} down "
            f"is {list(wanted)}"
        )
    for name, weight in (("up", up_SDH), ("down", down_SFD)):
        _check_device(name, weight, x.device)
        if weight.dtype != x.dtype:
            raise ConfigurationError(f"{name} is {weight.dtype}, but x is {x.dtype}: use one dtype, or autocast")


class _ExpertActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_MH: Tensor, kind: str, kernels: ActivationKernels) -> Tensor:
        ctx.kernels, ctx.kind = kernels, kind
        ctx.save_for_backward(h_MH)
        return kernels.activation(h_MH, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
        _require_first_derivative()
        (h_MH,) = ctx.saved_tensors
        return ctx.kernels.activation_grad(grads[0].contiguous(), h_MH, ctx.kind), None, None


def expert_activation(h_MH: Tensor, kind: str) -> Tensor:
    """The activation of an expert MLP.

    Computed in fp32 and rounded once. The backward keeps h only and computes the activation again.

    Args:
        h_MH: floats; [M, F] for the kinds of gelu, [M, 2F] = gate | up for those of swiglu.
        kind: "gelu" (the exact erf form), "gelu_tanh" (GPT-2's approximation of it), "swiglu" (silu(gate) * up), or
            "swiglu_clamped" (GPT-OSS: gate * sigmoid(1.702 gate) * (up + 1), gate cut at 7, up at -7 and 7).

    Returns:
        [M, F] in the dtype of h.
    """
    _check("h", h_MH, 2)
    if kind not in ACTIVATIONS:
        raise ConfigurationError(f"activation {kind!r} does not exist: use one of {', '.join(ACTIVATIONS)}")
    if kind in GATED and h_MH.shape[1] % 2:
        raise ConfigurationError(f"{kind} halves its {h_MH.shape[1]} columns: use an even number")
    impl = implementation(h_MH.device, h_MH.dtype)
    if impl is None:
        return reference.expert_activation(h_MH, kind)
    return _apply(_ExpertActivation, h_MH.contiguous(), kind, impl.activation)


def plan_rows(tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: QuotaRounds) -> tuple[Tensor, Tensor]:
    """Rows of each expert that a rank sends to, and receives from, every rank: the integers of
    `dispatch.quota.dispatch_splits`, for quotas by `QuotaRounds` or, without rounds, those of `equal_quota`.

    Args:
        tokens_EN: int64, assignments of every rank to every expert; every expert with some has a replica.
        replicas_EN: int64.
        rank: whose rows.
        sharing: how the holders of an expert share its tokens.

    Returns:
        (sent, received), int64 [E, N] each.
    """
    for name, table in (("tokens", tokens_EN), ("replicas", replicas_EN)):
        _check(name, table, 2, tokens_EN.device, _IDS)
    if not (tokens_EN.shape == replicas_EN.shape and 0 <= rank < tokens_EN.shape[1]):
        raise ConfigurationError(
            f"tokens {list(tokens_EN.shape)}, replicas {list(replicas_EN.shape)} and rank {rank} do not fit"
        )
    kernels = (implementation(tokens_EN.device) or _TORCH).plan
    return kernels.plan_rows(tokens_EN, replicas_EN.contiguous(), rank, sharing)


def plan_runs(send_EN: Tensor, recv_EN: Tensor, slots_C: Tensor, block: int) -> Runs:
    """The runs of rows that bring a plan's assignments into blocks, one for each rank, and what arrives to its slots.

    Args:
        send_EN, recv_EN: from `plan_rows`.
        slots_C: int64, the expert of each slot, E where it is vacant.
        block: rows that a rank may send to another.
    """
    for name, table, dims in (("send", send_EN, 2), ("recv", recv_EN, 2), ("slots", slots_C, 1)):
        _check(name, table, dims, send_EN.device, _IDS)
    if send_EN.shape != recv_EN.shape:
        raise ConfigurationError(f"send {list(send_EN.shape)} and recv {list(recv_EN.shape)} do not fit")
    kernels = (implementation(send_EN.device) or _TORCH).plan
    return kernels.runs(send_EN.contiguous(), recv_EN.contiguous(), slots_C.contiguous(), block)


def fill_blocks(
    order_A: Tensor, starts_C: Tensor, ends_C: Tensor, num_routed: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The assignments in the new order of their runs, and where each went.

    Args:
        order_A: int64, assignments sorted by expert, those that are dropped last; at least one.
        starts_C, ends_C: the runs that are sent, of `plan_runs`.
        num_routed: int64 [], how many are not dropped.
        num_rows: M, the last of `ends_C`; more than A.

    Returns:
        (int64 [M], the assignment of each row, any where the row is left over; int64 [A], the row of each assignment,
        -1 where it is dropped).
    """
    kernels = (implementation(order_A.device) or _TORCH).routing
    return kernels.fill_blocks(order_A, starts_C, ends_C, num_routed, num_rows)


class _KeyedDropout(torch.autograd.Function):
    """Keeps nothing but the key: the backward draws the same numbers again."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, p: float, draw: Draw, kernels: RowKernels) -> Tensor:
        ctx.drawn = p, draw, kernels
        return kernels.dropout(x_MD, p, draw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Grads:
        _require_first_derivative()
        p, draw, kernels = ctx.drawn
        return kernels.dropout(grads[0].contiguous(), p, draw), None, None, None


def keyed_dropout(x_MD: Tensor, p: float, draw: Draw) -> Tensor:
    """x with zeros where the number drawn for an element is below p, and all else over 1 - p; differentiable.

    Args:
        x_MD: floats.
        p: from 0, below 1.
        draw: which numbers.
    """
    _check("x", x_MD, 2)
    impl = implementation(x_MD.device, x_MD.dtype)
    if impl is None or impl.rows is torch_kernels:
        return torch_kernels.dropout(x_MD, p, draw)
    return _apply(_KeyedDropout, x_MD.contiguous(), p, draw, impl.rows)


_ALIGNMENT = 64


@torch.no_grad()
def pack(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy tensors of any dtypes into one flat uint8 buffer, each piece aligned to 64 bytes, gaps filled with zeros.

    Args:
        tensors: at least one, all on one device.
        out: uint8 to fill, as long as all tensors rounded up, aligned to 16 bytes; by default a new buffer.
    """
    if not len(tensors):
        raise ConfigurationError("pack needs at least one tensor")
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    if out is None:
        out = empty((sum(rooms),), torch.uint8, tensors[0].device)
    _check_bytes("flat buffer", out, sum(rooms))
    if out.data_ptr() % 16 or out.storage_offset() % 16:
        raise ConfigurationError(
            f"flat buffer begins at byte {out.storage_offset()} of its storage: begin at a multiple of 16"
        )
    for i, tensor in enumerate(tensors):
        _check_device(f"tensor {i}", tensor, out.device)
    for tensor, size, piece in zip(tensors, sizes, torch.split(out, rooms), strict=True):
        piece[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        piece[size:].zero_()
    return out


@torch.no_grad()
def xor_parity(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """XOR of equal-length byte buffers: the parity of all, or the lost one from the others and the parity (REFT 4.2).

    Args:
        parts: at least one uint8 [L], all on one device.
        out: uint8 [L] to fill, which may be one of the parts; by default a new buffer.
    """
    if not len(parts):
        raise ConfigurationError("parity needs at least one buffer")
    length, device = parts[0].numel(), parts[0].device
    out = empty((length,), torch.uint8, device) if out is None else out
    for i, part in enumerate([*parts, out]):
        name = f"buffer {i}" if i < len(parts) else "out"
        _check_bytes(name, part, length)
        _check_device(name, part, device)
    impl = implementation(device)
    if impl is None:
        return out.copy_(reference.xor_parity(parts))
    impl.rows.xor(parts, out)
    return out


@torch.no_grad()
def sum_in_rank_order(parts_NL: Tensor, out: Tensor | None = None) -> Tensor:
    """[L]: ((parts[0] + parts[1]) + parts[2]) + ..., accumulated in fp32 and rounded once: the same bits everywhere.

    Args:
        parts_NL: floats [N, L], N at least 1.
        out: [L] in the dtype of the parts to fill; by default a new tensor.
    """
    _check("parts", parts_NL, 2)
    if not len(parts_NL):
        raise ConfigurationError("a sum needs at least one part")
    length = parts_NL.shape[1]
    out = empty((length,), parts_NL.dtype, parts_NL.device) if out is None else out
    _check_device("out", out, parts_NL.device)
    if out.shape != (length,) or out.dtype != parts_NL.dtype:
        raise ConfigurationError(
            f"out is {out.dtype} of shape {list(out.shape)}, but the sum is {parts_NL.dtype} of shape {[length]}"
        )
    impl = implementation(parts_NL.device, parts_NL.dtype)
    if impl is None:
        return out.copy_(reference.sum_in_rank_order(parts_NL))
    impl.rows.sum_in_rank_order(parts_NL, out)
    return out


def _check_bytes(name: str, tensor: Tensor, num_bytes: int) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, but needs a flat contiguous uint8 buffer"
        )
    if tensor.numel() != num_bytes:
        raise ConfigurationError(f"{name} holds {tensor.numel()} bytes, but {num_bytes} are needed")
