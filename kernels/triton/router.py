"""A linear router with Triton: logits, scores, choice and weights in one launch, the gradients in two and a sum.

Rows are bf16 and parameters fp32. A parameter is the sum of three numbers of bf16 without a loss, and the product of
two such numbers is exact in fp32, so that three passes of the tensor cores give what fp32 units would. A row's sums
have one order, whatever stands beside it; those over tokens are cut into pieces that are added in order.

Legend: T tokens, K choices, E experts, D model width, C pieces of the tokens.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.interface import Choice, Routed
from moe_lightning.kernels.triton.launch import INTERPRETED, ceil_div, launch, power_of_two
from moe_lightning.kernels.triton.tiles import described, limits

MOST_EXPERTS = 256
"""A program holds the scores of all experts in registers."""

_TERMS = 3
_PIECES = 128
"""Programs that a sum over tokens is cut for."""


@triton.jit
def _terms(value):
    """The three numbers of bf16 that a number of fp32 is the sum of."""
    high = value.to(tl.bfloat16)
    rest = value - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split_kernel(weight, terms, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    high, middle, low = _terms(tl.load(weight + place, mask=mask, other=0).to(tl.float32))
    tl.store(terms + place, high, mask=mask)
    tl.store(terms + size + place, middle, mask=mask)
    tl.store(terms + 2 * size + place, low, mask=mask)


@triton.jit
def _block(base, blocks, term, first, column, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] of a term of a [3, num_rows, width]; zeros outside."""
    if blocks is not None:
        block = blocks.load([term, first, column]).reshape(ROWS, COLUMNS)
    else:
        row, in_row = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        place = (term * num_rows + row.to(tl.int64))[:, None] * width + in_row[None, :]
        block = tl.load(base + place, mask=(row < num_rows)[:, None] & (in_row < width)[None, :], other=0)
    return block


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(
    x, x_blocks, terms, terms_blocks, bias, selection, logits, scores, weights, ids,
    num_rows, width, num_experts, scale,
    SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    expert = tl.arange(0, EXPERTS)
    here, real = first + row < num_rows, expert < num_experts
    corner = first.to(tl.int64) * num_experts
    place = row[:, None] * num_experts + expert[None, :]
    mask = here[:, None] & real[None, :]
    value = tl.zeros((BLOCK_M, EXPERTS), dtype=tl.float32)
    for k in range(0, width, BLOCK_K):
        a = _block(x, x_blocks, 0, first, k, num_rows, width, BLOCK_M, BLOCK_K)
        for term in tl.static_range(3):
            b = _block(terms, terms_blocks, term, 0, k, num_experts, width, EXPERTS, BLOCK_K)
            value = tl.dot(a, b.T, value)
    if bias is not None:
        value += tl.load(bias + expert, mask=real, other=0).to(tl.float32)[None, :]
    tl.store(logits + corner + place, value, mask=mask)
    if SIGMOID:
        value = tl.sigmoid(value)
    else:
        value = tl.where(real[None, :], value, float("-inf"))
        value = tl.exp(value - tl.max(value, axis=1)[:, None])
        value /= tl.sum(value, axis=1)[:, None]
    tl.store(scores + corner + place, value, mask=mask)
    if selection is not None:
        value += tl.load(selection + expert, mask=real, other=0)[None, :]

    # Bits made monotone, ties to the lower id, as in `triton.routing`; + 0.0 turns -0.0 into 0.0.
    key = (value + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    lowest = -0x80000000
    key = tl.where(real[None, :], key, lowest)
    choice = tl.arange(0, CHOICES)
    chosen = tl.zeros((BLOCK_M, CHOICES), dtype=tl.int32)
    for k in range(TOP_K):
        best = tl.max(key, axis=1)[:, None]
        winner = tl.min(tl.where(key == best, expert[None, :], EXPERTS - 1), axis=1)[:, None]
        key = tl.where(expert[None, :] == winner, lowest, key)
        chosen = tl.where(choice[None, :] == k, winner, chosen)
    tl.debug_barrier()  # other threads have stored the scores that are read again here
    mask = here[:, None] & (choice < TOP_K)[None, :]
    picked = tl.load(scores + corner + row[:, None] * num_experts + chosen, mask=mask, other=0)
    if NORMALIZED:
        picked /= tl.maximum(tl.sum(picked, axis=1), 1e-20)[:, None]
    there = first.to(tl.int64) * TOP_K + (row[:, None] * TOP_K + choice[None, :])
    tl.store(weights + there, picked * scale, mask=mask)
    tl.store(ids + there, chosen.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _logit_gradient_kernel(
    terms, terms_blocks, scores, ids, grad_weights, grad_scores, grad_logits, beside, grads, grad_x,
    num_rows, width, num_experts, scale,
    SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Terms of the gradient of the logits, and what they make of the rows: those below the last digit are left out."""
    first = tl.program_id(0) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    expert = tl.arange(0, EXPERTS)
    here, real = first + row < num_rows, expert < num_experts
    corner = first.to(tl.int64) * num_experts
    place = row[:, None] * num_experts + expert[None, :]
    mask = here[:, None] & real[None, :]
    score = tl.load(scores + corner + place, mask=mask, other=0)
    grad = tl.zeros((BLOCK_M, EXPERTS), dtype=tl.float32)
    if grad_scores is not None:
        grad = tl.load(grad_scores + corner + place, mask=mask, other=0)
    if grad_weights is not None:
        if NORMALIZED:
            choice = tl.arange(0, CHOICES)
            is_choice = here[:, None] & (choice < TOP_K)[None, :]
            there = first.to(tl.int64) * TOP_K + (row[:, None] * TOP_K + choice[None, :])
            chosen = tl.load(ids + there, mask=is_choice, other=0)
            picked = tl.load(scores + corner + row[:, None] * num_experts + chosen, mask=is_choice, other=0)
            total = tl.sum(picked, axis=1)
            factor = 1.0 / tl.maximum(total, 1e-20)
            mine = tl.load(grad_weights + there, mask=is_choice, other=0)
            shared = tl.where(total > 1e-20, tl.sum(mine * picked, axis=1) * factor, 0.0)
            factor *= scale
        for k in range(TOP_K):
            place_k = first.to(tl.int64) * TOP_K + (row * TOP_K + k)
            above = tl.load(grad_weights + place_k, mask=here, other=0)
            if NORMALIZED:
                above = (above - shared) * factor
            else:
                above *= scale
            winner = tl.load(ids + place_k, mask=here, other=0).to(tl.int32)
            grad += tl.where(expert[None, :] == winner[:, None], above[:, None], 0.0)
    if SIGMOID:
        grad *= score * (1.0 - score)
    else:
        grad = score * (grad - tl.sum(grad * score, axis=1)[:, None])
    if grad_logits is not None:
        grad += tl.load(grad_logits + corner + place, mask=mask, other=0)
    high, middle, low = _terms(grad)
    plane = num_rows.to(tl.int64) * num_experts
    tl.store(grads + corner + place, high, mask=mask)
    tl.store(grads + plane + corner + place, middle, mask=mask)
    tl.store(grads + 2 * plane + corner + place, low, mask=mask)
    if grad_x is not None:
        for column in range(0, width, BLOCK_N):
            in_row = tl.arange(0, BLOCK_N)
            inside = here[:, None] & (column + in_row < width)[None, :]
            tile = first.to(tl.int64) * width + column
            offset = row[:, None] * width + in_row[None, :]
            if beside is not None:  # on its way under the products
                others = tl.load(beside + tile + offset, mask=inside, other=0)
            b = _block(terms, terms_blocks, 0, 0, column, num_experts, width, EXPERTS, BLOCK_N)
            sums = tl.dot(high, b)
            sums = tl.dot(middle, b, sums)
            b = _block(terms, terms_blocks, 1, 0, column, num_experts, width, EXPERTS, BLOCK_N)
            sums = tl.dot(high, b, sums)
            if beside is not None:
                sums += others
            tl.store(grad_x + tile + offset, sums.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "piece"])
def _router_weight_kernel(
    grads, grads_blocks, x, x_blocks, out, num_rows, width, num_experts, piece,
    EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum over one piece of the tokens."""
    column = tl.program_id(0) * BLOCK_N
    start = tl.program_id(1) * piece
    sums = tl.zeros((EXPERTS, BLOCK_N), dtype=tl.float32)
    for token in range(start, tl.minimum(start + piece, num_rows), BLOCK_K):
        b = _block(x, x_blocks, 0, token, column, num_rows, width, BLOCK_K, BLOCK_N)
        for term in tl.static_range(3):
            a = _block(grads, grads_blocks, term, token, 0, num_rows, num_experts, BLOCK_K, EXPERTS)
            sums = tl.dot(a.T, b, sums)
    expert, in_row = tl.arange(0, EXPERTS), column + tl.arange(0, BLOCK_N)
    place = (tl.program_id(1).to(tl.int64) * num_experts + expert)[:, None] * width + in_row[None, :]
    tl.store(out + place, sums, mask=(expert < num_experts)[:, None] & (in_row < width)[None, :])


@triton.jit
def _shares(scores, counts, first, num_rows, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Rows of scores, their sums and what they weigh, the fraction of each expert, and where."""
    row, expert = first.to(tl.int64) + tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    mask = (row < num_rows)[:, None] & (expert < num_experts)[None, :]
    place = row[:, None] * num_experts + expert[None, :]
    count = tl.load(counts + expert, mask=expert < num_experts, other=0).to(tl.float32)
    fraction = (count / tl.maximum(tl.sum(count, axis=0), 1.0))[None, :]
    score = tl.load(scores + place, mask=mask, other=0)
    return fraction, tl.sum(score, axis=1), tl.sum(score * fraction, axis=1), place, mask


@triton.jit(do_not_specialize=["num_rows"])
def _balance_kernel(scores, counts, out, num_rows, num_experts, scale, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    first = tl.program_id(0) * ROWS
    _, total, weighed, _, _ = _shares(scores, counts, first, num_rows, num_experts, ROWS, EXPERTS)
    row = first.to(tl.int64) + tl.arange(0, ROWS)
    tl.store(out + row, scale * weighed / tl.maximum(total, 1e-20), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _balance_gradient_kernel(
    scores, counts, grad, out, num_rows, num_experts, scale, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    first = tl.program_id(0) * ROWS
    fraction, total, weighed, place, mask = _shares(scores, counts, first, num_rows, num_experts, ROWS, EXPERTS)
    floor = tl.maximum(total, 1e-20)
    falling = tl.where(total >= 1e-20, weighed / floor, 0.0)
    factor = scale * tl.load(grad) / floor
    tl.store(out + place, factor[:, None] * (fraction - falling[:, None]), mask=mask)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Tokens, columns of the model width, and depth of a step of a program, and how it is pipelined."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int


def _blocks(experts: int, device: torch.device, *, holds_gradients: bool = False) -> _Blocks:
    """The largest whose operands a device holds; gradients of logits stay in a program beside those of a stage."""
    if INTERPRETED:
        return _Blocks(tokens=16, columns=16, depth=16, warps=4, stages=1)
    shared = limits(device).shared
    tokens = columns = 128 if shared > 128 << 10 else 64
    if holds_gradients and experts > 128:
        return _Blocks(tokens=64, columns=64 if shared > 208 << 10 else 16, depth=0, warps=8, stages=2)
    depth = 64 if experts <= 128 and shared > 128 << 10 else 32
    stages = (shared - (8 << 10)) // (2 * depth * (tokens + _TERMS * experts))
    return _Blocks(tokens=tokens, columns=columns, depth=depth, warps=8, stages=max(1, min(4, stages)))


def route(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, selection_E: Tensor | None, choice: Choice
) -> tuple[Routed, Tensor]:
    """Return the routing, and the terms of the weights [3, E, D] for the gradients."""
    num_tokens, num_experts = len(x_TD), len(weight_ED)
    terms_3ED = x_TD.new_empty(_TERMS, *weight_ED.shape)
    logits_TE, scores_TE = (x_TD.new_empty(num_tokens, num_experts, dtype=torch.float32) for _ in range(2))
    weights_TK = x_TD.new_empty(num_tokens, choice.top_k, dtype=torch.float32)
    ids_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    block = 64 if INTERPRETED else 1024
    launch(
        _split_kernel, (ceil_div(weight_ED.numel(), block),), x_TD, weight_ED, terms_3ED, weight_ED.numel(), BLOCK=block
    )
    experts, found = _experts(num_experts), limits(x_TD.device)
    sizes = _blocks(experts, x_TD.device)
    launch(
        _route_kernel, (ceil_div(num_tokens, sizes.tokens),), x_TD,
        x_TD, described(x_TD[None], [1, sizes.tokens, sizes.depth], found),
        terms_3ED, described(terms_3ED, [1, experts, sizes.depth], found), bias_E, selection_E,
        logits_TE, scores_TE, weights_TK, ids_TK, num_tokens, x_TD.shape[1], num_experts, choice.scale,
        SIGMOID=choice.is_sigmoid, NORMALIZED=choice.normalizes, TOP_K=choice.top_k, CHOICES=power_of_two(choice.top_k),
        BLOCK_M=sizes.tokens, EXPERTS=experts, BLOCK_K=sizes.depth, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return Routed(logits_TE=logits_TE, scores_TE=scores_TE, weights_TK=weights_TK, ids_TK=ids_TK), terms_3ED


def logit_gradients(
    terms_3ED: Tensor,
    scores_TE: Tensor,
    ids_TK: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    choice: Choice,
    want_rows: bool,
    grad_TD: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The terms of the gradient of the logits [3, T, E], and the gradient of the rows [T, D], added to another."""
    _, num_experts, width = terms_3ED.shape
    num_tokens, experts = len(scores_TE), _experts(num_experts)
    grads_3TE = terms_3ED.new_empty(_TERMS, num_tokens, num_experts)
    out_TD = terms_3ED.new_empty(num_tokens, width) if want_rows else None
    sizes = _blocks(experts, terms_3ED.device, holds_gradients=True)
    grad_logits, grad_scores, grad_weights = grads
    launch(
        _logit_gradient_kernel, (ceil_div(num_tokens, sizes.tokens),), scores_TE,
        terms_3ED, described(terms_3ED, [1, experts, sizes.columns], limits(terms_3ED.device)), scores_TE, ids_TK,
        grad_weights, grad_scores, grad_logits, grad_TD, grads_3TE, out_TD, num_tokens, width, num_experts,
        choice.scale, SIGMOID=choice.is_sigmoid, NORMALIZED=choice.normalizes, TOP_K=choice.top_k,
        CHOICES=power_of_two(choice.top_k),
        BLOCK_M=sizes.tokens, EXPERTS=experts, BLOCK_N=sizes.columns, num_warps=sizes.warps,
        num_stages=min(2, sizes.stages),
    )  # fmt: skip
    return grads_3TE, out_TD


def router_wgrad(grads_3TE: Tensor, x_TD: Tensor) -> Tensor:
    """fp32 [E, D]: the sum over tokens of gradient^T @ x."""
    (_, num_tokens, num_experts), width = grads_3TE.shape, x_TD.shape[1]
    experts, found = _experts(num_experts), limits(x_TD.device)
    sizes = _blocks(experts, x_TD.device)
    columns = ceil_div(width, sizes.columns)
    piece = ceil_div(ceil_div(num_tokens, max(1, _PIECES // columns)), sizes.depth) * sizes.depth
    pieces = max(1, ceil_div(num_tokens, max(1, piece)))
    out_CED = x_TD.new_empty(pieces, num_experts, width, dtype=torch.float32)
    launch(
        _router_weight_kernel, (columns, pieces), x_TD,
        grads_3TE, described(grads_3TE, [1, sizes.depth, experts], found),
        x_TD, described(x_TD[None], [1, sizes.depth, sizes.columns], found), out_CED, num_tokens, width, num_experts,
        piece, EXPERTS=experts, BLOCK_N=sizes.columns, BLOCK_K=sizes.depth, num_warps=sizes.warps,
        num_stages=sizes.stages,
    )  # fmt: skip
    return out_CED.sum(0)


def balance(scores_TE: Tensor, counts_E: Tensor) -> Tensor:
    """fp32 [T]: each token's part of the load-balancing loss."""
    out_T = scores_TE.new_empty(len(scores_TE))
    rows, experts, scale = _balance_sizes(scores_TE)
    launch(
        _balance_kernel, (ceil_div(len(scores_TE), rows),), scores_TE,
        scores_TE, counts_E, out_T, *scores_TE.shape, scale, ROWS=rows, EXPERTS=experts,
    )  # fmt: skip
    return out_T


def balance_gradient(scores_TE: Tensor, counts_E: Tensor, grad: Tensor) -> Tensor:
    """fp32 [T, E], of the sum over tokens, whose gradient is a scalar."""
    out_TE = torch.empty_like(scores_TE)
    rows, experts, scale = _balance_sizes(scores_TE)
    launch(
        _balance_gradient_kernel, (ceil_div(len(scores_TE), rows),), scores_TE,
        scores_TE, counts_E, grad, out_TE, *scores_TE.shape, scale, ROWS=rows, EXPERTS=experts,
    )  # fmt: skip
    return out_TE


def _balance_sizes(scores_TE: Tensor) -> tuple[int, int, float]:
    """Rows and columns of a program, and the factor on all that it finds."""
    num_tokens, num_experts = scores_TE.shape
    experts = power_of_two(num_experts)
    return max(1, (256 if INTERPRETED else 4096) // experts), experts, num_experts / max(1, num_tokens)


def _experts(num_experts: int) -> int:
    """Columns of a program: what the tensor cores take at least, or more."""
    return max(16, power_of_two(num_experts))
