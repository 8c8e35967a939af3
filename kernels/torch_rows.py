"""Row movement with torch: gathers, and `embedding_bag` for the weighted sum, its fastest form on the CPU.

On the CPU the work goes block by block through the cache into pooled memory: a steady step allocates nothing large.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning.kernels import buffers

_BLOCK_BYTES = 2 << 20
"""Bytes of one block and thread: small enough for the second-level cache, large enough to hide the call."""

_HEAP_BYTES = 32 << 20
"""Below this size malloc keeps freed memory, so `embedding_bag` may allocate its result; it cannot write into ours."""


def row_blocks(num_rows: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover the rows: cache-sized on the CPU, all rows at once on a device."""
    step = num_rows
    if device.type == "cpu":
        step = max(64, _BLOCK_BYTES * torch.get_num_threads() // max(1, row_bytes))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, max(1, step)))


def gather(x_TD: Tensor, index_M: Tensor, divisor: int) -> Tensor:
    """[M, D]: x[index // divisor]."""
    source_M = index_M if divisor == 1 else index_M // divisor
    out_MD = buffers.empty((len(index_M), x_TD.shape[1]), x_TD.dtype, x_TD.device)
    return torch.index_select(x_TD, 0, source_M, out=out_MD)


def combine(rows_MD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, D]: weighted sums of the rows of each token. Weights are rounded to the rows' dtype; sums are fp32 inside."""
    num_tokens = len(inverse_TK)
    width = rows_MD.shape[1]
    if not len(rows_MD) or not num_tokens:
        return rows_MD.new_zeros(num_tokens, width)
    weights_TK = None if weights_TK is None else weights_TK.to(rows_MD.dtype)
    row_bytes = width * rows_MD.element_size()
    has_drops = len(rows_MD) != inverse_TK.numel()  # more rows: some are padding, and some may be dropped, too
    if rows_MD.device.type != "cpu" or num_tokens * row_bytes < _HEAP_BYTES:
        return _bags(rows_MD, inverse_TK, weights_TK, has_drops)
    out_TD = buffers.empty((num_tokens, width), rows_MD.dtype, rows_MD.device)
    for block in row_blocks(num_tokens, row_bytes, rows_MD.device):
        out_TD[block] = _bags(rows_MD, inverse_TK[block], None if weights_TK is None else weights_TK[block], has_drops)
    return out_TD


def _bags(rows_MD: Tensor, index_TK: Tensor, weights_TK: Tensor | None, has_drops: bool) -> Tensor:
    if not has_drops:
        return F.embedding_bag(index_TK, rows_MD, mode="sum", per_sample_weights=weights_TK)
    # Bags of unequal size where assignments were dropped: a weight of zero would make NaN of an infinite foreign row.
    kept_TK = index_TK >= 0
    sizes_T = kept_TK.sum(1)
    weights_M = None if weights_TK is None else weights_TK[kept_TK]
    starts_T = sizes_T.cumsum(0) - sizes_T
    return F.embedding_bag(index_TK[kept_TK], rows_MD, starts_T, mode="sum", per_sample_weights=weights_M)


def spread(
    grad_TD: Tensor, order_M: Tensor, rows_MD: Tensor | None, weights_TK: Tensor, want_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `combine`: each row is read and written once, so nothing is scattered."""
    width, top_k = grad_TD.shape[1], weights_TK.shape[1]
    source_M = order_M // top_k
    weights_M1 = weights_TK.reshape(-1)[order_M].unsqueeze(1)
    device = grad_TD.device
    out_MD = buffers.empty((len(order_M), width), grad_TD.dtype, device) if want_rows else None
    compute = torch.promote_types(grad_TD.dtype, torch.float32)
    products_M = None if rows_MD is None else torch.empty(len(order_M), dtype=compute, device=device)
    for block in row_blocks(len(order_M), width * grad_TD.element_size(), device):
        grad = grad_TD.index_select(0, source_M[block])
        if products_M is not None and rows_MD is not None:
            torch.sum(grad.to(compute) * rows_MD[block], dim=1, out=products_M[block])
        if out_MD is not None:
            torch.mul(grad, weights_M1[block].to(grad.dtype), out=out_MD[block])
    return out_MD, products_M
