"""Grouped matmuls of the experts with Triton: products of rows, and gradients of weights.

Products of rows: persistent programs walk over a list of tiles that the device has built. The loops over tiles and over
the inner width are one loop to the compiler, so that the operands of the next tile are on their way under the end of
the present one. Operands come by descriptors where the device has a copy engine, by pointers elsewhere, and where rows
are gathered; whole tiles of plain sums leave by descriptors, too. What follows a projection runs on its sums: the
activation, forward and backward.

Gradients of weights: a sum over the rows of each slot. A program walks over several tiles, of any slots, in one loop;
the copy engine stores a result beside the threads. A tile takes as long as its slot has rows: there are several
programs for each multiprocessor, so that one with a busy slot's tile takes fewer of them.

Legend: M rows, A assignments, D inner width, F output width, S slots, R row tiles, C column tiles.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.interface import ACTIVATIONS, GATED, HiddenGradients
from moe_lightning.kernels.tile_table import Tile
from moe_lightning.kernels.triton.activation import activated, slopes
from moe_lightning.kernels.triton.launch import FLATTENS, INTERPRETED, ceil_div, launch, power_of_two
from moe_lightning.kernels.triton.tiles import RowTiles, described, limits, precision, row_tiles, tiles_for

_PROGRAMS = 4
"""Programs of a multiprocessor, one after the other."""


@triton.jit(do_not_specialize=["num_slots"])
def _weight_kernel(
    x, grad, starts, gather, out, out_blocks, inner, width, num_slots,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, GRAD_GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All tiles of a program are one loop over steps of BLOCK_K rows, though slots differ in rows."""
    num_columns = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.cdiv(inner, BLOCK_M) * num_columns
    slots = tl.arange(0, SLOTS)
    is_slot = slots < num_slots
    counts = tl.load(starts + slots + 1, mask=is_slot, other=0) - tl.load(starts + slots, mask=is_slot, other=0)
    before = _mine(slots * num_tiles)
    mine = tl.where(is_slot, _mine((slots + 1) * num_tiles) - before, 0)
    total_steps = tl.sum(mine * _steps(counts, BLOCK_K), axis=0)

    index = tl.program_id(0) - tl.num_programs(0)
    step, steps, slot, start, end, row_d, column_f = 0, 1, 0, 0, 0, 0, 0
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, total_steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            index += tl.num_programs(0)
            slot = index // num_tiles
            row_d = index % num_tiles // num_columns * BLOCK_M
            column_f = index % num_columns * BLOCK_N
            start = tl.load(starts + slot)
            end = tl.load(starts + slot + 1)
            steps = _steps(end - start, BLOCK_K)
        d = row_d + tl.arange(0, BLOCK_M)
        f = column_f + tl.arange(0, BLOCK_N)
        row = start + step * BLOCK_K + tl.arange(0, BLOCK_K)
        in_slot = row < end
        left, right = row.to(tl.int64), row.to(tl.int64)
        if GATHERED or GRAD_GATHERED:
            source = tl.load(gather + row, mask=in_slot, other=0) // DIVISOR
            if GATHERED:
                left = source
            if GRAD_GATHERED:
                right = source
        a = tl.load(x + left[None, :] * inner + d[:, None], mask=(d < inner)[:, None] & in_slot[None, :], other=0)
        b = tl.load(grad + right[:, None] * width + f[None, :], mask=in_slot[:, None] & (f < width)[None, :], other=0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if step == steps - 1:
            result = total.to(out.dtype.element_ty)
            if out_blocks is not None:
                out_blocks.store([slot, row_d, column_f], result.reshape(1, BLOCK_M, BLOCK_N))
            else:
                here = out + tl.cast(slot, tl.int64) * inner * width + d.to(tl.int64)[:, None] * width + f[None, :]
                tl.store(here, result, mask=(d < inner)[:, None] & (f < width)[None, :])
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def _mine(bound):
    """Return the number of tiles below a bound that this program computes: every tl.num_programs(0)-th."""
    return tl.maximum(bound - tl.program_id(0) + tl.num_programs(0) - 1, 0) // tl.num_programs(0)


@triton.jit
def _steps(count, BLOCK_K: tl.constexpr):
    """Return the steps of a tile: an empty slot has one, which stores its zeros."""
    return tl.maximum(tl.cdiv(count, BLOCK_K), 1)


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, cut: RowTiles) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    return _wgrad(x_MD, grad_MF, cut, None, 1, gathers_grad=False)


def up_wgrad(x: Tensor, grad_MH: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, D, H]: x^T @ grad, where x may be by tokens."""
    return _wgrad(x, grad_MH, cut, gather_M, divisor, gathers_grad=False)


def down_wgrad(activation_MF: Tensor, grad: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, F, D]: activation^T @ grad, where the gradient may be by tokens."""
    return _wgrad(activation_MF, grad, cut, gather_M, divisor, gathers_grad=True)


def _wgrad(
    x: Tensor, grad: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int, *, gathers_grad: bool
) -> Tensor:
    num_slots, inner, width = len(cut.starts_S) - 1, x.shape[1], grad.shape[1]
    out_SDF = x.new_empty(num_slots, inner, width)
    found = limits(x.device)
    tile = tiles_for(x.dtype, inner, found)
    tiles = num_slots * ceil_div(inner, tile.m) * ceil_div(width, tile.n)
    launch(
        _weight_kernel, (min(_PROGRAMS * found.multiprocessors, tiles),), x,
        x, grad, cut.starts_S, gather_M, out_SDF, described(out_SDF, [1, tile.m, tile.n], found), inner, width,
        num_slots, DIVISOR=divisor, GATHERED=gather_M is not None and not gathers_grad,
        GRAD_GATHERED=gather_M is not None and gathers_grad, PRECISION=precision(), SLOTS=power_of_two(num_slots),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps,
        # Half of the stages wait for indices.
        num_stages=tile.stages if gather_M is None else 2 * tile.stages - 1,
    )  # fmt: skip
    return out_SDF


_GROUP = 8
_PIECE: tl.constexpr = tl.constexpr(8 if INTERPRETED else 32)
"""Columns that an epilogue holds at once; its gradients take half of them."""


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


@triton.jit(do_not_specialize=["num_rows", "num_assignments", "capacity"])
def _rows_kernel(
    x, x_blocks, weight, weight_blocks, gather, tiles, total, out, out_blocks, h, grad_h, scale, products,
    num_rows, num_assignments, inner, width, num_slots, capacity, stride_slot, stride_inner, stride_width,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr,
    EPILOGUE: tl.constexpr, KIND: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    FAR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """EPILOGUE 0 stores the sums; 1 stores them as h, and their activation; 2 takes them for the gradient of the
    activation, and stores that of h, the activation, and, by assignment, its products with the gradient before any
    scale.
    """
    tl.assume(inner > 0)
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
        # Rows past all slots get zeros: where both operands come by descriptors, these find nothing else outside.
        present = slot < num_slots
        fetched = tl.where(present, first, num_rows)
        held = slot
        if x_blocks is None or weight_blocks is None:
            held = tl.minimum(slot, num_slots - 1)
        in_tile = tl.arange(0, BLOCK_M)
        in_slot = first + in_tile < end
        if x_blocks is None:
            # A row that is not the slot's takes any that there is: its sums are never stored.
            source = tl.minimum(first + in_tile, num_rows - 1)
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
                    a = tl.load(x + offset[:, None] + in_k[None, :])
                else:
                    a = tl.load(x + offset[:, None] + in_k[None, :], mask=(in_k < inner)[None, :], other=0)
            else:
                a = x_blocks.load([fetched, k])
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

        # Sums are rounded before anything follows, as if a kernel of its own had read them; what follows runs in
        # pieces, which need fewer registers.
        if x_blocks is None or weight_blocks is None:
            sums = tl.where(present, sums, 0.0)
        sums = sums.to(out.dtype.element_ty)
        if EPILOGUE == 0:
            if out_blocks is not None and first + BLOCK_M <= end:
                out_blocks.store([first, column], sums)
            else:
                _store(sums, out, first, end, column, width, BLOCK_M, BLOCK_N)
        elif EPILOGUE == 1:
            right = sums
            if TWO:
                if x_blocks is None or weight_blocks is None:
                    more = tl.where(present, more, 0.0)
                right = more.to(out.dtype.element_ty)
            _activation(sums, right, out, h, first, end, column, width, KIND, TWO, BLOCK_M, BLOCK_N)
        else:
            factor = None
            if SCALED:
                place = tl.load(gather + first + in_tile, mask=in_slot, other=0)
                factor = tl.load(scale + place, mask=in_slot, other=0).to(tl.float32)
            product = _hidden_gradient(
                sums, out, h, grad_h, factor, first, end, column, width, SCALED, KIND, TWO, BLOCK_M, BLOCK_N
            )
            if SCALED:
                tl.store(products + column_tile.to(tl.int64) * num_assignments + place, product, mask=in_slot)


@triton.jit
def _halves(block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns."""
    return tl.split(block.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def _store(block, out, first, end, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the rows of a slot, and the columns that there are."""
    if COLUMNS > _PIECE:
        one, two = _halves(block, ROWS, COLUMNS)
        _store(one, out, first, end, column, width, ROWS, COLUMNS // 2)
        _store(two, out, first, end, column + COLUMNS // 2, width, ROWS, COLUMNS // 2)
    else:
        row, in_row = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        mask = (first + row < end)[:, None] & (column + in_row < width)[None, :]
        corner = first.to(tl.int64) * width + column
        tl.store(out + corner + row[:, None] * width + in_row[None, :], block, mask=mask)


@triton.jit
def _activation(
    left, right, out, h, first, end, column, width,
    KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a block of h (two, where it is gated) and its activation."""
    if COLUMNS > _PIECE:
        one, two = _halves(left, ROWS, COLUMNS)
        one_right, two_right = one, two
        if TWO:
            one_right, two_right = _halves(right, ROWS, COLUMNS)
        _activation(one, one_right, out, h, first, end, column, width, KIND, TWO, ROWS, COLUMNS // 2)
        _activation(two, two_right, out, h, first, end, column + COLUMNS // 2, width, KIND, TWO, ROWS, COLUMNS // 2)
    else:
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
def _hidden_gradient(
    above, out, h, grad_h, factor, first, end, column, width,
    SCALED: tl.constexpr, KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of h and the activation of a block, scaled by row; their products by row before that."""
    if COLUMNS > _PIECE // 2:
        one, two = _halves(above, ROWS, COLUMNS)
        product = _hidden_gradient(
            one, out, h, grad_h, factor, first, end, column, width, SCALED, KIND, TWO, ROWS, COLUMNS // 2
        ) + _hidden_gradient(
            two, out, h, grad_h, factor, first, end, column + COLUMNS // 2, width, SCALED, KIND, TWO, ROWS,
            COLUMNS // 2,
        )  # fmt: skip
    else:
        row, in_row = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        mask = (first + row < end)[:, None] & (column + in_row < width)[None, :]
        span = 2 * width if TWO else width
        corner = first.to(tl.int64) * span + column
        there = row[:, None] * span + in_row[None, :]
        left = tl.load(h + corner + there, mask=mask, other=0).to(tl.float32)
        right = left
        if TWO:
            right = tl.load(h + corner + width + there, mask=mask, other=0).to(tl.float32)
        above = above.to(tl.float32)
        result = activated(left, right, KIND)
        product = tl.sum(result * above, axis=1)
        if SCALED:
            result *= factor[:, None]
            above *= factor[:, None]
        flat = first.to(tl.int64) * width + column
        tl.store(out + flat + row[:, None] * width + in_row[None, :], result.to(out.dtype.element_ty), mask=mask)
        by_left, by_right = slopes(left, right, KIND)
        tl.store(grad_h + corner + there, (above * by_left).to(grad_h.dtype.element_ty), mask=mask)
        if TWO:
            tl.store(grad_h + corner + width + there, (above * by_right).to(grad_h.dtype.element_ty), mask=mask)
    return product


def cut(tokens_S: Tensor, num_rows: int, x: Tensor) -> RowTiles:
    """Return the tiles that the products of rows sorted by slot share."""
    return row_tiles(tokens_S.to(x.device), num_rows, _tiles(x, num_rows, len(tokens_S)))


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, cut: RowTiles) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero. Any strides of the weight."""
    out_MF = x_MD.new_empty(len(x_MD), weight_SDF.shape[2])
    rows_matmul(x_MD, weight_SDF, cut, None, 1, out_MF)
    return out_MF


def up_and_activation(
    x_MD: Tensor, up_SDH: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int, kind: str
) -> tuple[Tensor, Tensor]:
    """(h [M, H], its activation [M, F]) of one launch."""
    num_rows, hidden = len(x_MD) if gather_M is None else len(gather_M), up_SDH.shape[2]
    h_MH = x_MD.new_empty(num_rows, hidden)
    a_MF = x_MD.new_empty(num_rows, hidden // 2 if kind in GATED else hidden)
    rows_matmul(x_MD, up_SDH, cut, gather_M, divisor, a_MF, epilogue=FORWARD, kind=kind, h_MH=h_MH)
    return h_MH, a_MF


def down_gradient(
    grad_MD: Tensor,
    down_SFD: Tensor,
    cut: RowTiles,
    h_MH: Tensor,
    kind: str,
    gather_M: Tensor | None,
    weights_TK: Tensor | None,
) -> HiddenGradients:
    """The gradient of the down projection's input, passed on through the activation, in one launch.

    Args:
        grad_MD: by rows; or by tokens [T, D], where `gather_M` and `weights_TK` say which and with what factor.
    """
    width = down_SFD.shape[1]
    grad_h, activation = torch.empty_like(h_MH), h_MH.new_empty(len(h_MH), width)
    products = None
    if weights_TK is not None:
        shape = (ceil_div(width, cut.tile.n), weights_TK.numel())
        are_all = len(h_MH) == weights_TK.numel()  # assignments; else those that were dropped keep their zeros
        products = (h_MH.new_empty if are_all else h_MH.new_zeros)(shape, dtype=torch.float32)
    rows_matmul(
        grad_MD, down_SFD.transpose(1, 2), cut, gather_M, 1 if weights_TK is None else weights_TK.shape[1],
        activation, epilogue=HIDDEN_GRADIENT, kind=kind, h_MH=h_MH, grad_MH=grad_h, weights_TK=weights_TK,
        products_CA=products,
    )  # fmt: skip
    return HiddenGradients(h_MH=grad_h, activation_MF=activation, products_CA=products)


PLAIN, FORWARD, HIDDEN_GRADIENT = 0, 1, 2
"""Epilogues of a tile's sums."""


def rows_matmul(
    x: Tensor,
    weight_SDF: Tensor,
    cut: RowTiles,
    gather_M: Tensor | None,
    divisor: int,
    out_MF: Tensor,
    *,
    epilogue: int = PLAIN,
    kind: str = ACTIVATIONS[0],
    h_MH: Tensor | None = None,
    grad_MH: Tensor | None = None,
    weights_TK: Tensor | None = None,
    products_CA: Tensor | None = None,
) -> None:
    """Fill `out_MF` with x @ weight[slot of the row], or with what an epilogue makes of it."""
    num_slots, inner, _ = weight_SDF.shape
    num_rows, width = out_MF.shape
    if not out_MF.numel():
        return
    if not weight_SDF.numel():  # no slot, or nothing to add up
        for result in (out_MF, h_MH if grad_MH is None else grad_MH, products_CA):
            if result is not None:
                result.zero_()
        return
    found, tile = limits(x.device), _narrowed(cut.tile, epilogue, kind)
    transposed = weight_SDF.stride(2) != 1
    stored = weight_SDF.transpose(1, 2) if transposed else weight_SDF
    weight_blocks = described(stored, [1, tile.n, tile.k] if transposed else [1, tile.k, tile.n], found)
    x_blocks = None if gather_M is not None else described(x, [tile.m, tile.k], found)
    out_blocks = described(out_MF, [tile.m, tile.n], found) if epilogue == PLAIN else None
    launch(
        _rows_kernel, (min(found.multiprocessors, cut.capacity * ceil_div(width, tile.n)),), x,
        x, x_blocks, weight_SDF, weight_blocks, gather_M, cut.entries_3R, cut.total, out_MF, out_blocks, h_MH, grad_MH,
        weights_TK, products_CA, num_rows, 0 if weights_TK is None else weights_TK.numel(), inner, width, num_slots,
        cut.capacity, *weight_SDF.stride(),
        DIVISOR=divisor, GATHERED=gather_M is not None, TRANSPOSED=transposed, SCALED=weights_TK is not None,
        EPILOGUE=epilogue, KIND=ACTIVATIONS.index(kind), TWO=kind in GATED, PRECISION=precision(),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=_GROUP,
        FLATTEN=found.has_copy_engine and FLATTENS, FAR=x.numel() >= 1 << 31, EVEN=inner % tile.k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tiles(x: Tensor, num_rows: int, num_slots: int) -> Tile:
    return tiles_for(x.dtype, num_rows // max(1, num_slots), limits(x.device))


def _narrowed(tile: Tile, epilogue: int, kind: str) -> Tile:
    """A gated forward holds as many columns of gate and of up; other activations have longer formulas."""
    if epilogue != FORWARD or INTERPRETED:
        return tile
    return tile._replace(n=tile.n // 2 if kind in GATED else min(tile.n, 128))
