"""Routing and row movement: from scores to sorted rows and back.

Legend: T tokens, K choices, M rows (T*K less the dropped), E experts, D model width, N sources, C chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.kernels import backends, buffers, checks, functions, reference, torch_routing
from moe_lightning.kernels.bodies import ExpertSort


def top_k_routing(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each token and their experts, descending, ties to the lower expert id.

    Args:
        scores_TE: floats [T, E]; must not hold NaN. Differentiable.
        top_k: K, from 1 to E.

    Returns:
        (top_scores [T, K] in the dtype of the scores, expert ids int64 [T, K]).
    """
    rooms = _rooms_of_scores(scores_TE, top_k)
    if rooms is None:
        return reference.top_k_routing(scores_TE, top_k)
    scores, ids = functions.apply(functions.TopK, scores_TE.contiguous(), top_k, rooms.routing)
    return scores, ids


def top_k_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """The ids of `top_k_routing` alone: int64 [T, K]."""
    rooms = _rooms_of_scores(scores_TE, top_k)
    if rooms is None:
        return reference.top_k_routing(scores_TE, top_k)[1]
    return rooms.routing.top_k(scores_TE.detach().contiguous(), top_k)


def _rooms_of_scores(scores_TE: Tensor, top_k: int) -> backends.Bodies | None:
    checks.matrix("scores", scores_TE)
    num_experts = scores_TE.shape[1]
    checks.require(
        1 <= top_k <= num_experts, f"top_k={top_k} does not fit {num_experts} experts: use 1 to {num_experts}"
    )
    return backends.bodies(scores_TE.device, scores_TE.dtype)


def count_by_expert(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: assignments of each expert, dropped ones (-1) left out; a GPU is not waited for."""
    rooms = backends.bodies(expert_ids_TK.device)
    body = torch_routing if rooms is None else rooms.routing
    return body.count(expert_ids_TK.contiguous(), num_experts)


def sort_by_expert(
    expert_ids_TK: Tensor, num_experts: int, *, may_drop: bool = True, num_rows: int | None = None
) -> ExpertSort:
    """Sort assignments by expert, stably: the rows of an expert keep the order of their tokens.

    Args:
        expert_ids_TK: int64 [T, K]; -1 marks a dropped assignment, which gets no row.
        num_experts: E.
        may_drop: False promises that no id is -1; then nothing is read back from a GPU.
        num_rows: how many ids are not -1, where the host knows it; then nothing is read back either.

    Raises:
        ConfigurationError: wrong shape or dtype, or (checked on the CPU only) an id outside -1..E-1.
    """
    checks.index("expert ids", expert_ids_TK, 2, expert_ids_TK.device)
    checks.require(num_experts >= 1, f"num_experts={num_experts} must be at least 1")
    if expert_ids_TK.device.type == "cpu" and expert_ids_TK.numel():
        low, high = (int(bound) for bound in expert_ids_TK.aminmax())
        lowest = -1 if may_drop else 0
        checks.require(
            lowest <= low and high < num_experts,
            f"expert ids reach from {low} to {high}, but must lie in {lowest}..{num_experts - 1}",
        )
    rooms = backends.bodies(expert_ids_TK.device)
    if rooms is None:
        return reference.sort_by_expert(expert_ids_TK, num_experts)
    if not may_drop:
        num_rows = expert_ids_TK.numel()
    return rooms.routing.sort_by_expert(expert_ids_TK.contiguous(), num_experts, num_rows)


def permute(x_TD: Tensor, order_M: Tensor, inverse_TK: Tensor, *, may_pad: bool = False) -> Tensor:
    """Rows of tokens in expert-major order: [M, D] with row m = x[order[m] // K].

    The gradient of a token is the sum over its rows, accumulated in fp32 in the order of its choices.

    Args:
        x_TD: floats [T, D].
        order_M, inverse_TK: from `sort_by_expert`, or any pair with inverse[order[m]] = m and -1 elsewhere.
        may_pad: `order_M` is longer than all assignments and names any for the rows that `inverse_TK` does not.
    """
    checks.matrix("x", x_TD)
    checks.index("order", order_M, 1, x_TD.device)
    checks.index("inverse", inverse_TK, 2, x_TD.device)
    if not may_pad:
        checks.rows_fit(order_M, inverse_TK)
    checks.require(
        len(inverse_TK) == len(x_TD), f"inverse is made for {len(inverse_TK)} tokens, but x holds {len(x_TD)}"
    )
    rooms = backends.bodies(x_TD.device, x_TD.dtype)
    if rooms is None:
        return reference.permute(x_TD, order_M, inverse_TK)
    result: Tensor = functions.apply(
        functions.Permute, x_TD.contiguous(), order_M.contiguous(), inverse_TK.contiguous(), rooms.rows
    )
    return result


def unpermute(
    rows_MD: Tensor,
    inverse_TK: Tensor,
    order_M: Tensor,
    weights_TK: Tensor | None = None,
    *,
    may_pad: bool = False,
) -> Tensor:
    """Weighted sum of the rows of each token: [T, D] with y[t] = sum over k of weights[t, k] * rows[inverse[t, k]].

    Accumulated in fp32 in the order of k, result in the dtype of the rows. Dropped assignments add nothing.
    Differentiable in rows and weights; each row is used once, so the gradient of the rows is a gather.

    Args:
        rows_MD: floats [M, D].
        inverse_TK, order_M: from `sort_by_expert`.
        weights_TK: floats [T, K], or None for a plain sum. The torch body rounds them to the dtype of the rows.
        may_pad: as for `permute`.
    """
    checks.matrix("rows", rows_MD)
    checks.index("order", order_M, 1, rows_MD.device)
    checks.index("inverse", inverse_TK, 2, rows_MD.device)
    if not may_pad:
        checks.rows_fit(order_M, inverse_TK)
    checks.require(len(order_M) == len(rows_MD), f"order lists {len(order_M)} rows, but there are {len(rows_MD)}")
    if weights_TK is not None:
        checks.matrix("weights", weights_TK)
        checks.same_device("weights", weights_TK, rows_MD.device)
        checks.require(
            weights_TK.shape == inverse_TK.shape,
            f"weights {list(weights_TK.shape)} do not fit inverse {list(inverse_TK.shape)}: both are [tokens, choices]",
        )
        weights_TK = weights_TK.contiguous()
    rooms = backends.bodies(rows_MD.device, rows_MD.dtype)
    if rooms is None:
        return reference.unpermute(rows_MD, inverse_TK, order_M, weights_TK)
    result: Tensor = functions.apply(
        functions.Unpermute, rows_MD.contiguous(), inverse_TK.contiguous(), order_M.contiguous(), weights_TK, rooms.rows
    )
    return result


def chunk_order(sizes_NC: Tensor, device: torch.device | None = None) -> Tensor:
    """Index that turns rows in order (source, chunk) into rows in order (chunk, source): rank-major to expert-major.

    Args:
        sizes_NC: int64 [N, C], rows of chunk c from source n, at least 0. On the host, or the call waits for it.
        device: where the index shall be; by default where the sizes are.

    Returns:
        int64 [M], M the sum of the sizes: the old place of each row.
    """
    checks.index("sizes", sizes_NC, 2, sizes_NC.device)
    sizes = sizes_NC.cpu()
    checks.require(not sizes.numel() or int(sizes.min()) >= 0, "sizes count rows and cannot be negative")
    starts_NC = sizes.reshape(-1).cumsum(0).view(sizes.shape) - sizes
    chunks = torch.stack([starts_NC.t().reshape(-1), sizes.t().reshape(-1).cumsum(0)])
    there = buffers.upload(chunks, sizes_NC.device if device is None else device)
    return reorder_chunks(there[0], there[1], int(sizes.sum()))[0]


def reorder_chunks(starts_C: Tensor, ends_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Index that brings chunks of rows into another order, and its inverse, both int64 [M].

    Args:
        starts_C: int64, where each chunk begins now; in the new order.
        ends_C: int64, where each will end: the sums of their sizes.
        num_rows: M, the last of `ends_C`.
    """
    rooms = backends.bodies(starts_C.device)
    body = torch_routing if rooms is None else rooms.routing
    return body.chunk_order(starts_C, ends_C, num_rows)


def gather_rows(x_MD: Tensor, index_M: Tensor, inverse_M: Tensor | None = None) -> Tensor:
    """x[index] for a permutation of all rows; the gradient is the gather by the inverse.

    Args:
        x_MD: floats [M, D].
        index_M: int64 [M], a permutation.
        inverse_M: its inverse, where it is at hand; else the backward computes it.
    """
    checks.matrix("x", x_MD)
    for name, index in (("index", index_M), ("inverse", inverse_M)):
        if index is not None:
            checks.index(name, index, 1, x_MD.device)
            checks.require(len(index) == len(x_MD), f"{name} lists {len(index)} rows, but x holds {len(x_MD)}")
    rooms = backends.bodies(x_MD.device, x_MD.dtype)
    if rooms is None:
        return reference.gather_rows(x_MD, index_M)
    inverse_M = None if inverse_M is None else inverse_M.contiguous()
    result: Tensor = functions.apply(
        functions.GatherRows, x_MD.contiguous(), index_M.contiguous(), inverse_M, rooms.rows
    )
    return result


def invert(index_M: Tensor) -> Tensor:
    """The inverse of a permutation, int64 [M]: invert(index)[index[m]] = m."""
    checks.index("index", index_M, 1, index_M.device)
    return functions.invert(index_M)
