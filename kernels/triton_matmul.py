"""Grouped matmul with Triton: persistent programs walk over a list of tiles that the device has built.

The loops over tiles and over the inner width are one loop to the compiler, so that the operands of the next tile are
on their way under the end of the present one. Operands come by descriptors where the device has a copy engine, by
pointers elsewhere, and where rows are gathered. What follows a projection runs on its sums: the activation, forward and
backward.

Legend: M rows, D inner width, F output width, S slots, R row tiles, C column tiles.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.bodies import ACTIVATIONS, HiddenGradients, is_gated
from moe_lightning.kernels.triton_activation import activated, slopes
from moe_lightning.kernels.triton_launch import INTERPRETED, ceil_div, launch, power_of_two
from moe_lightning.kernels.triton_tiles import Tiles, described, limits, tile_list, tiles_for

_GROUP = 8


@triton.jit
def _pick(values, slots, slot):
    """values[slot] of a vector in registers."""
    return tl.sum(tl.where(slots == slot, values, 0), axis=0)


@triton.jit
def _right(weight, descriptor, slot, k, column, inner, width, stride_slot, stride_inner, stride_width,
           TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of a slot's weight; zeros outside."""
    if descriptor is None:
        in_k = k + tl.arange(0, BLOCK_K)
        in_n = column + tl.arange(0, BLOCK_N)
        place = weight + slot.to(tl.int64) * stride_slot + in_k[:, None] * stride_inner + in_n[None, :] * stride_width
        block = tl.load(place, mask=(in_k < inner)[:, None] & (in_n < width)[None, :], other=0)
    elif TRANSPOSED:
        block = descriptor.load([slot, column, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        block = descriptor.load([slot, k, column]).reshape(BLOCK_K, BLOCK_N)
    return block


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _rows_kernel(
    x, x_blocks, weight, weight_blocks, gather, tiles, total, out, h, grad_h, scale, products,
    num_rows, inner, width, num_slots, capacity, stride_slot, stride_inner, stride_width,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr,
    EPILOGUE: tl.constexpr, KIND: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    FAR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """EPILOGUE 0 stores the sums; 1 stores them as h, and their activation; 2 takes them for the gradient of the
    activation, and stores that of h, the activation, and its products by row with the gradient, before any scale.
    """
    num_columns = tl.cdiv(width, BLOCK_N)
    row_tiles = tl.load(total)
    for index in tl.range(tl.program_id(0), row_tiles * num_columns, tl.num_programs(0), flatten=FLATTEN):
        # GROUP row tiles walk the columns together: neighbours share rows and weights in the second-level cache.
        group = index // (GROUP * num_columns)
        inside = index % (GROUP * num_columns)
        height = tl.minimum(row_tiles - group * GROUP, GROUP)
        tile = group * GROUP + inside % height
        column_tile = inside // height
        column = column_tile * BLOCK_N
        slot = tl.load(tiles + tile)
        first = tl.load(tiles + capacity + tile)
        end = tl.load(tiles + 2 * capacity + tile)
        present = slot < num_slots
        held = tl.minimum(slot, num_slots - 1)
        in_tile = tl.arange(0, BLOCK_M)
        in_slot = first + in_tile < end
        if x_blocks is None:
            source = first + in_tile
            if GATHERED:
                source = (tl.load(gather + source, mask=in_slot, other=0) // DIVISOR).to(tl.int32)
            offset = source.to(tl.int64) * inner if FAR else source * inner
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if EPILOGUE == 1 and TWO:
            more = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, inner, BLOCK_K):
            if x_blocks is None:
                in_k = k + tl.arange(0, BLOCK_K)
                if EVEN:
                    a = tl.load(x + offset[:, None] + in_k[None, :], mask=in_slot[:, None], other=0)
                else:
                    mask = in_slot[:, None] & (in_k < inner)[None, :]
                    a = tl.load(x + offset[:, None] + in_k[None, :], mask=mask, other=0)
            else:
                a = x_blocks.load([first, k])
            b = _right(weight, weight_blocks, held, k, column, inner, width, stride_slot, stride_inner, stride_width,
                       TRANSPOSED, BLOCK_N, BLOCK_K)  # fmt: skip
            sums = tl.dot(a, b, sums, input_precision=PRECISION)
            if EPILOGUE == 1 and TWO:
                if weight_blocks is None:
                    up = weight + width * stride_width
                    c = _right(up, None, held, k, column, inner, width, stride_slot, stride_inner, stride_width,
                               TRANSPOSED, BLOCK_N, BLOCK_K)  # fmt: skip
                else:
                    c = _right(weight, weight_blocks, held, k, width + column, inner, width, stride_slot, stride_inner,
                               stride_width, TRANSPOSED, BLOCK_N, BLOCK_K)  # fmt: skip
                more = tl.dot(a, c, more, input_precision=PRECISION)

        # Rows past all slots get zeros: their sums are another slot's. Sums are rounded before anything follows, as if
        # a kernel of its own had read them; what follows runs in two halves, which need half of the registers.
        sums = tl.where(present, sums, 0.0).to(out.dtype.element_ty)
        if EPILOGUE == 0:
            in_row = tl.arange(0, BLOCK_N)
            mask = in_slot[:, None] & (column + in_row < width)[None, :]
            corner = first.to(tl.int64) * width + column
            tl.store(out + corner + in_tile[:, None] * width + in_row[None, :], sums, mask=mask)
        else:
            one, two = _halves(sums, BLOCK_M, BLOCK_N)
            if EPILOGUE == 1:
                one_more, two_more = one, two
                if TWO:
                    one_more, two_more = _halves(
                        tl.where(present, more, 0.0).to(out.dtype.element_ty), BLOCK_M, BLOCK_N
                    )
                _activation(one, one_more, out, h, first, end, column, width, KIND, TWO, BLOCK_M, BLOCK_N // 2)
                _activation(
                    two, two_more, out, h, first, end, column + BLOCK_N // 2, width, KIND, TWO, BLOCK_M, BLOCK_N // 2
                )
            else:
                product = _hidden_gradients(
                    one, out, h, grad_h, gather, scale, first, end, column, width, SCALED, KIND, TWO, BLOCK_M,
                    BLOCK_N // 2,
                ) + _hidden_gradients(
                    two, out, h, grad_h, gather, scale, first, end, column + BLOCK_N // 2, width, SCALED, KIND, TWO,
                    BLOCK_M, BLOCK_N // 2,
                )  # fmt: skip
                if SCALED:
                    tl.store(products + column_tile.to(tl.int64) * num_rows + first + in_tile, product, mask=in_slot)


@triton.jit
def _halves(block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns."""
    return tl.split(block.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def _activation(
    left, right, out, h, first, end, column, width,
    KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a block of h (two, where it is gated) and its activation."""
    row, in_row = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (first + row < end)[:, None] & (column + in_row < width)[None, :]
    span = 2 * width if TWO else width
    there = h + (first.to(tl.int64) * span + column) + (row[:, None] * span + in_row[None, :])
    tl.store(there, left, mask=mask)
    if TWO:
        tl.store(there + width, right, mask=mask)
    result = activated(left.to(tl.float32), right.to(tl.float32), KIND).to(out.dtype.element_ty)
    corner = first.to(tl.int64) * width + column
    tl.store(out + corner + row[:, None] * width + in_row[None, :], result, mask=mask)


@triton.jit
def _hidden_gradients(
    above, out, h, grad_h, gather, scale, first, end, column, width,
    SCALED: tl.constexpr, KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`_hidden_gradient` of both halves of a block."""
    one, two = _halves(above, ROWS, COLUMNS)
    product = _hidden_gradient(
        one, out, h, grad_h, gather, scale, first, end, column, width, SCALED, KIND, TWO, ROWS, COLUMNS // 2
    )
    return product + _hidden_gradient(
        two, out, h, grad_h, gather, scale, first, end, column + COLUMNS // 2, width, SCALED, KIND, TWO, ROWS,
        COLUMNS // 2,
    )  # fmt: skip


@triton.jit
def _hidden_gradient(
    above, out, h, grad_h, gather, scale, first, end, column, width,
    SCALED: tl.constexpr, KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of h and the activation of a block, scaled by row; their products by row before that."""
    row, in_row = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_slot = first + row < end
    mask = in_slot[:, None] & (column + in_row < width)[None, :]
    span = 2 * width if TWO else width
    corner = first.to(tl.int64) * span + column
    there = row[:, None] * span + in_row[None, :]
    left = tl.load(h + corner + there, mask=mask, other=0).to(tl.float32)
    right = left
    if TWO:
        right = tl.load(h + corner + width + there, mask=mask, other=0).to(tl.float32)
    above = above.to(tl.float32)
    result = activated(left, right, KIND)
    product = tl.sum(tl.where(mask, result * above, 0.0), axis=1)
    if SCALED:
        place = tl.load(gather + first + row, mask=in_slot, other=0)
        factor = tl.load(scale + place, mask=in_slot, other=0).to(tl.float32)[:, None]
        result *= factor
        above *= factor
    flat = first.to(tl.int64) * width + column
    tl.store(out + flat + row[:, None] * width + in_row[None, :], result.to(out.dtype.element_ty), mask=mask)
    by_left, by_right = slopes(left, right, KIND)
    tl.store(grad_h + corner + there, (above * by_left).to(grad_h.dtype.element_ty), mask=mask)
    if TWO:
        tl.store(grad_h + corner + width + there, (above * by_right).to(grad_h.dtype.element_ty), mask=mask)
    return product


@triton.jit(do_not_specialize=["num_slots"])
def _weight_kernel(
    x, grad, tokens, gather, out, inner, width, num_slots,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, GRAD_GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    num_columns = tl.cdiv(width, BLOCK_N)
    slots = tl.arange(0, SLOTS)
    counts = tl.load(tokens + slots, mask=slots < num_slots, other=0)
    count = _pick(counts, slots, slot).to(tl.int32)
    start = _pick(tl.cumsum(counts, axis=0), slots, slot) - count

    d = (tl.program_id(0) // num_columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, count, BLOCK_K):
        in_slot = done + k < count
        row = start + done + k
        left = row
        right = row
        if GATHERED or GRAD_GATHERED:
            source = tl.load(gather + row, mask=in_slot, other=0) // DIVISOR
            if GATHERED:
                left = source
            if GRAD_GATHERED:
                right = source
        a = tl.load(x + left[None, :] * inner + d[:, None], mask=(d < inner)[:, None] & in_slot[None, :], other=0)
        b = tl.load(
            grad + right[:, None] * width + column[None, :],
            mask=in_slot[:, None] & (column < width)[None, :],
            other=0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    here = slot.to(tl.int64) * inner * width + d.to(tl.int64)[:, None] * width + column[None, :]
    mask = (d < inner)[:, None] & (column < width)[None, :]
    tl.store(out + here, total.to(out.dtype.element_ty), mask=mask)


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero. Any strides of the weight."""
    num_rows = len(x_MD) if gather_M is None else len(gather_M)
    out_MF = x_MD.new_empty(num_rows, weight_SDF.shape[2])
    rows_matmul(x_MD, weight_SDF, tokens_S, gather_M, divisor, out_MF)
    return out_MF


def up_and_activation(
    x_MD: Tensor, up_SDH: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int, kind: str
) -> tuple[Tensor, Tensor]:
    """(h [M, H], its activation [M, F]) of one launch."""
    num_rows, hidden = len(x_MD) if gather_M is None else len(gather_M), up_SDH.shape[2]
    h_MH = x_MD.new_empty(num_rows, hidden)
    a_MF = x_MD.new_empty(num_rows, hidden // 2 if is_gated(kind) else hidden)
    rows_matmul(x_MD, up_SDH, tokens_S, gather_M, divisor, a_MF, epilogue=FORWARD, kind=kind, h_MH=h_MH)
    return h_MH, a_MF


def down_gradient(
    grad_MD: Tensor,
    down_SFD: Tensor,
    tokens_S: Tensor,
    h_MH: Tensor,
    kind: str,
    gather_M: Tensor | None,
    weights_TK: Tensor | None,
) -> HiddenGradients:
    """The gradient of the down projection's input, passed on through the activation, in one launch.

    Args:
        grad_MD: by rows; or by tokens [T, D], where `gather_M` and `weights_TK` say which and with what factor.
    """  # fmt: skip
    tile = _tiles(grad_MD, len(h_MH), len(tokens_S), HIDDEN_GRADIENT)
    width = down_SFD.shape[1]
    grad_h, activation = torch.empty_like(h_MH), h_MH.new_empty(len(h_MH), width)
    products = None
    if weights_TK is not None:
        products = h_MH.new_empty(ceil_div(width, tile.n), len(h_MH), dtype=torch.float32)
    rows_matmul(
        grad_MD, down_SFD.transpose(1, 2), tokens_S, gather_M, 1 if weights_TK is None else weights_TK.shape[1],
        activation, epilogue=HIDDEN_GRADIENT, kind=kind, h_MH=h_MH, grad_MH=grad_h, weights_TK=weights_TK,
        products_CM=products,
    )  # fmt: skip
    return HiddenGradients(h_MH=grad_h, activation_MF=activation, products_CM=products)


PLAIN, FORWARD, HIDDEN_GRADIENT = 0, 1, 2
"""What follows the sums of a tile."""


def rows_matmul(
    x: Tensor,
    weight_SDF: Tensor,
    tokens_S: Tensor,
    gather_M: Tensor | None,
    divisor: int,
    out_MF: Tensor,
    *,
    epilogue: int = PLAIN,
    kind: str = ACTIVATIONS[0],
    h_MH: Tensor | None = None,
    grad_MH: Tensor | None = None,
    weights_TK: Tensor | None = None,
    products_CM: Tensor | None = None,
) -> None:
    """Fill `out_MF` with x @ weight[slot of the row], or with what an epilogue makes of it."""
    num_slots, inner, _ = weight_SDF.shape
    num_rows, width = out_MF.shape
    if not out_MF.numel():
        return
    found, tile = limits(x.device), _tiles(x, num_rows, num_slots, epilogue, kind)
    tiles = tile_list(tokens_S.to(x.device), num_rows, tile.m)
    transposed = weight_SDF.stride(2) != 1
    stored = weight_SDF.transpose(1, 2) if transposed else weight_SDF
    weight_blocks = described(stored, [1, tile.n, tile.k] if transposed else [1, tile.k, tile.n], found)
    x_blocks = None if gather_M is not None else described(x, [tile.m, tile.k], found)
    launch(
        _rows_kernel, (min(found.multiprocessors, tiles.capacity * ceil_div(width, tile.n)),), x,
        x, x_blocks, weight_SDF, weight_blocks, gather_M, tiles.entries_3R, tiles.total, out_MF, h_MH, grad_MH,
        weights_TK, products_CM, num_rows, inner, width, num_slots, tiles.capacity, *weight_SDF.stride(),
        DIVISOR=divisor, GATHERED=gather_M is not None, TRANSPOSED=transposed, SCALED=weights_TK is not None,
        EPILOGUE=epilogue, KIND=ACTIVATIONS.index(kind), TWO=is_gated(kind), PRECISION=_precision(),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=_GROUP,
        FLATTEN=found.has_copy_engine and not INTERPRETED, FAR=x.numel() >= 1 << 31, EVEN=inner % tile.k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    return _wgrad(x_MD, grad_MF, tokens_S, gather_M, divisor, gathers_grad=False)


def down_wgrad(activation_MF: Tensor, grad: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, F, D]: activation^T @ grad, where the gradient may be by tokens."""
    return _wgrad(activation_MF, grad, tokens_S, gather_M, divisor, gathers_grad=True)


def _wgrad(
    x: Tensor, grad: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int, *, gathers_grad: bool
) -> Tensor:
    num_slots, inner, width = len(tokens_S), x.shape[1], grad.shape[1]
    out_SDF = x.new_empty(num_slots, inner, width)
    tile = tiles_for(x.dtype, inner, limits(x.device))
    launch(
        _weight_kernel, (ceil_div(inner, tile.m) * ceil_div(width, tile.n), num_slots), x,
        x, grad, tokens_S.to(x.device), gather_M, out_SDF, inner, width, num_slots,
        DIVISOR=divisor, GATHERED=gather_M is not None and not gathers_grad,
        GRAD_GATHERED=gather_M is not None and gathers_grad, PRECISION=_precision(), SLOTS=power_of_two(num_slots),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps,
        # Half of the stages wait for indices.
        num_stages=tile.stages if gather_M is None else 2 * tile.stages - 1,
    )  # fmt: skip
    return out_SDF


def _tiles(x: Tensor, num_rows: int, num_slots: int, epilogue: int, kind: str = ACTIVATIONS[0]) -> Tiles:
    tile = tiles_for(x.dtype, num_rows // max(1, num_slots), limits(x.device))
    if epilogue == HIDDEN_GRADIENT:
        return replace(tile, n=min(tile.n, 128), stages=min(tile.stages, 3))  # registers hold several tiles
    if epilogue == FORWARD and not INTERPRETED:
        return replace(tile, n=tile.n // 2 if is_gated(kind) else min(tile.n, 128))  # gated: of gate and of up each
    return tile


def _precision() -> str:
    """fp32 operands are multiplied exactly unless torch was told that TF32 will do."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"  # the older flag may raise
