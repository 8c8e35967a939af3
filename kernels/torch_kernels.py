"""Kernels in torch: routing, row movement, grouped matmuls, activations, dispatch plans, keyed random numbers, bytes.

On the CPU large work goes block by block through the cache into pooled memory: a steady step allocates nothing large.
The first touch of fresh memory costs several times the copy that fills it (the system zeroes every page), and malloc
returns large blocks to the system as soon as they are free. The pool lends blocks to tensors and reuses each when the
last tensor over it is gone (autograd, optimizers and users included). CUDA caches blocks itself. A GPU is never waited
for.

Legend: T tokens, K choices, M rows, E experts, N ranks, S or C slots, D model width, F expert width, H columns of h.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moe_lightning.kernels import torch_grouped
from moe_lightning.kernels.interface import (
    CLAMPED_ALPHA,
    CLAMPED_LIMIT,
    GATED,
    SAMPLE_ROWS,
    Draw,
    ExpertSort,
    QuotaRounds,
    Runs,
)

_ALIGNMENT = 64
_LARGE = 1 << 20
"""Bytes from which a tensor is worth a lent block; malloc keeps smaller ones on its heap."""

Block = NDArray[np.uint8]


class BufferPool:
    """Lends blocks of touched host memory as tensors; safe to use from several threads.

    A request takes the smallest idle block that holds it and is at most twice as large. Idle blocks beyond
    `idle_limit_bytes` are given back to the system, those that were used longest ago first.

    Attributes:
        fresh, reused: blocks allocated, and those lent again, since the pool was made.
    """

    def __init__(self, idle_limit_bytes: int = 4 << 30) -> None:
        self._limit = idle_limit_bytes
        self._idle: list[Block] = []
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()
        self.fresh = self.reused = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor; NaN where torch is told to fill uninitialised memory, as `torch.empty` does."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LARGE:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(num_bytes)
        lent = block[:num_bytes]  # a tensor keeps this view alive; when it dies the block comes back
        weakref.finalize(lent, self._returned.append, block).atexit = False
        tensor = torch.from_numpy(lent).view(dtype).view(tuple(shape))
        poison: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if poison and torch.are_deterministic_algorithms_enabled():
            tensor.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        return tensor

    @property
    def idle_bytes(self) -> int:
        """Bytes that are lent to nobody now."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in self._idle)

    def clear(self) -> None:
        """Free all idle blocks."""
        with self._lock:
            self._collect()
            self._idle.clear()

    def _take(self, num_bytes: int) -> Block:
        with self._lock:
            self._collect()
            fitting = [i for i, block in enumerate(self._idle) if num_bytes <= block.nbytes <= 2 * num_bytes]
            if fitting:
                self.reused += 1
                return self._idle.pop(min(fitting, key=lambda i: self._idle[i].nbytes))
            self.fresh += 1
        step = max(_ALIGNMENT, 1 << (num_bytes.bit_length() - 4))  # of an eighth: uneven batches share blocks
        size = -(-num_bytes // step) * step
        raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
        return raw[offset : offset + size]

    def _collect(self) -> None:
        # Finalizers run wherever the garbage collector does, also inside `_take`: they only append to the queue.
        while self._returned:
            self._idle.append(self._returned.popleft())
        idle_bytes = sum(block.nbytes for block in self._idle)
        while idle_bytes > self._limit:
            idle_bytes -= self._idle.pop(0).nbytes


pool = BufferPool()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor: from the pool on the CPU, from the device's caching allocator elsewhere."""
    return pool.empty(shape, dtype) if device.type == "cpu" else torch.empty(tuple(shape), dtype=dtype, device=device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for it: by way of page-locked memory on CUDA."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    staged = tensor.pin_memory() if device.type == "cuda" else tensor
    return staged.to(device, non_blocking=True)


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
    out_MD = empty((len(index_M), x_TD.shape[1]), x_TD.dtype, x_TD.device)
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
    out_TD = empty((num_tokens, width), rows_MD.dtype, rows_MD.device)
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
    out_MD = empty((len(order_M), width), grad_TD.dtype, device) if want_rows else None
    compute = torch.promote_types(grad_TD.dtype, torch.float32)
    products_M = None if rows_MD is None else torch.empty(len(order_M), dtype=compute, device=device)
    for block in row_blocks(len(order_M), width * grad_TD.element_size(), device):
        grad = grad_TD.index_select(0, source_M[block])
        if products_M is not None and rows_MD is not None:
            torch.sum(grad.to(compute) * rows_MD[block], dim=1, out=products_M[block])
        if out_MD is not None:
            torch.mul(grad, weights_M1[block].to(grad.dtype), out=out_MD[block])
    return out_MD, products_M


_SMALL_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def top_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: ids of the largest scores, descending, ties to the lower id."""
    integer = _SMALL_BITS.get(scores_TE.dtype)
    if integer is None:
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    # torch.topk leaves the order of ties open. A key of the score's bits, made monotone, over the reversed id has none.
    num_tokens, num_experts = scores_TE.shape
    reversed_id_E = torch.arange(num_experts - 1, -1, -1, device=scores_TE.device)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=scores_TE.device)
    limits = torch.iinfo(integer)
    for block in row_blocks(num_tokens, 32 * num_experts, scores_TE.device):
        bits = (scores_TE[block] + 0.0).view(integer)  # + 0.0 turns -0.0 into 0.0, which it equals
        bits ^= (bits >> (limits.bits - 1)) & limits.max  # negative numbers: larger bits mean smaller scores
        keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(reversed_id_E)
        torch.sub(num_experts - 1, keys.topk(top_k, dim=-1).values & 0xFFFFFFFF, out=ids_TK[block])
    return ids_TK


def count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: assignments of each expert, those of -1 left out."""
    return torch.bincount(ids_TK.flatten() + 1, minlength=num_experts + 1)[1:]


def chunk_order(starts_C: Tensor, ends_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 [M] each: the old place of each row, and its inverse."""
    sizes_C = torch.diff(ends_C, prepend=ends_C.new_zeros(1))
    shift_C = starts_C - (ends_C - sizes_C)
    rows_M = torch.arange(num_rows, device=starts_C.device)
    index_M = torch.repeat_interleave(shift_C, sizes_C, output_size=num_rows).add_(rows_M)
    inverse_M = torch.empty_like(index_M)
    inverse_M[index_M] = rows_M
    return index_M, inverse_M


def fill_blocks(
    order_A: Tensor, starts_C: Tensor, ends_C: Tensor, num_routed: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """int64 [M] and [A]: the assignment of each row, and the row of each assignment."""
    index_M, inverse_M = chunk_order(starts_C, ends_C, num_rows)
    sorted_A = torch.arange(len(order_A), device=order_A.device)
    inverse_A = torch.empty_like(order_A)
    inverse_A[order_A] = torch.where(sorted_A < num_routed, inverse_M[: len(order_A)], -1)
    return order_A[index_M.clamp_max(len(order_A) - 1)], inverse_A


def sort_by_expert(ids_TK: Tensor, num_experts: int, num_rows: int | None) -> ExpertSort:
    """A stable sort on the narrowest integer type: torch sorts those by counting."""
    ids = ids_TK.reshape(-1)
    # Dropped assignments sort behind the last expert.
    keys = ids if num_rows == ids.numel() else torch.where(ids < 0, num_experts, ids)
    order = torch.sort(keys.to(_key_type(num_experts)), stable=True).indices
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
    num_rows = int(counts.sum()) if num_rows is None else num_rows
    row_of = torch.empty_like(order)
    row_of[order] = torch.arange(ids.numel(), device=ids.device)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(counts, 0, out=starts[1:])
    rank = row_of - starts[keys]
    if num_rows < ids.numel():
        dropped = ids < 0
        row_of.masked_fill_(dropped, -1)
        rank.masked_fill_(dropped, -1)
        order = order[:num_rows].contiguous()
    return ExpertSort(order, row_of.view(ids_TK.shape), counts, rank.view(ids_TK.shape))


def _key_type(largest: int) -> torch.dtype:
    return next(t for t in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(t).max)


def cut(tokens_S: Tensor, num_rows: int, x: Tensor) -> Tensor:
    """The counts themselves."""
    return tokens_S


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero."""
    if _on_device(x_MD, weight_SDF.shape[2]):
        return torch_grouped.grouped_mm(x_MD, weight_SDF, tokens_S)
    out_MF = empty((len(x_MD), weight_SDF.shape[2]), x_MD.dtype, x_MD.device)
    stop = 0
    for slot, rows in _segments(tokens_S):
        torch.mm(x_MD[rows], weight_SDF[slot], out=out_MF[rows])
        stop = rows.stop
    out_MF[stop:].zero_()
    return out_MF


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    if _on_device(x_MD, grad_MF.shape[1]):
        return torch_grouped.grouped_wgrad(x_MD, grad_MF, tokens_S)
    grad_SDF = empty((len(tokens_S), x_MD.shape[1], grad_MF.shape[1]), x_MD.dtype, x_MD.device)
    filled = 0
    for slot, rows in _segments(tokens_S):
        grad_SDF[filled:slot].zero_()
        torch.mm(x_MD[rows].t(), grad_MF[rows], out=grad_SDF[slot])
        filled = slot + 1
    grad_SDF[filled:].zero_()
    return grad_SDF


def _segments(tokens_S: Tensor) -> Iterator[tuple[int, slice]]:
    """(slot, its rows) of the non-empty slots."""
    start = 0
    for slot, count in enumerate(tokens_S.tolist()):
        if count:
            yield slot, slice(start, start + count)
            start += count


def _on_device(x_MD: Tensor, width: int) -> bool:
    """True if torch has one kernel for such operands: bf16 on CUDA, with whole rows."""
    return x_MD.is_cuda and x_MD.dtype == torch.bfloat16 and torch_grouped.takes(x_MD.dtype, x_MD.shape[1], width)


def activation(h_MH: Tensor, kind: str) -> Tensor:
    """[M, F]: the activation of h."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind in GATED else hidden
    compute = torch.promote_types(h_MH.dtype, torch.float32)
    out_MF = empty((num_rows, width), h_MH.dtype, h_MH.device)
    for block in row_blocks(num_rows, hidden * compute.itemsize, h_MH.device):
        value = _in_place_or_wider(out_MF[block], compute)
        _activate(h_MH[block].to(compute), kind, value)
        if value.dtype != out_MF.dtype:
            out_MF[block] = value
    return out_MF


def activation_grad(grad_MF: Tensor, h_MH: Tensor, kind: str) -> Tensor:
    """[M, H]: the gradient for h."""
    num_rows, hidden = h_MH.shape
    compute = torch.promote_types(h_MH.dtype, torch.float32)
    grad_MH = empty((num_rows, hidden), h_MH.dtype, h_MH.device)
    for block in row_blocks(num_rows, hidden * compute.itemsize, h_MH.device):
        h, grad = h_MH[block].to(compute), grad_MF[block].to(compute)
        target = _in_place_or_wider(grad_MH[block], compute)
        _differentiate(grad, h, kind, target)
        if target.dtype != grad_MH.dtype:
            grad_MH[block] = target
    return grad_MH


def _activate(h: Tensor, kind: str, out: Tensor) -> None:
    if kind not in GATED:
        torch.ops.aten.gelu.out(h, approximate=_gelu_form(kind), out=out)
        return
    left, right = h.chunk(2, dim=1)
    if kind == "swiglu":
        torch.ops.aten.silu.out(left, out=out).mul_(right)
    else:
        left, right = _clamped(left, right)
        torch.sigmoid(CLAMPED_ALPHA * left, out=out).mul_(left).mul_(right.add_(1.0))


def _differentiate(grad: Tensor, h: Tensor, kind: str, out: Tensor) -> None:
    if kind not in GATED:
        torch.ops.aten.gelu_backward.grad_input(grad, h, approximate=_gelu_form(kind), grad_input=out)
        return
    (left, right), (to_left, to_right) = h.chunk(2, dim=1), out.chunk(2, dim=1)
    if kind == "swiglu":
        torch.ops.aten.silu_backward.grad_input(grad * right, left, grad_input=to_left)
        torch.ops.aten.silu.out(left, out=to_right).mul_(grad)
        return
    gate, up = _clamped(left, right)
    sigmoid = torch.sigmoid(CLAMPED_ALPHA * gate)
    slope = sigmoid * (1.0 + CLAMPED_ALPHA * gate * (1.0 - sigmoid))
    torch.mul(grad * (up + 1.0) * slope, left <= CLAMPED_LIMIT, out=to_left)
    torch.mul(grad * gate * sigmoid, right.abs() <= CLAMPED_LIMIT, out=to_right)


def _gelu_form(kind: str) -> str:
    return "tanh" if kind == "gelu_tanh" else "none"


def _clamped(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left.clamp(max=CLAMPED_LIMIT), right.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)


def _in_place_or_wider(result: Tensor, compute: torch.dtype) -> Tensor:
    """Return the tensor to compute in: the result itself, or, where that is narrower, a temporary of its shape."""
    return result if result.dtype == compute else torch.empty_like(result, dtype=compute)


def share_out(tokens_E: Tensor, replicas_EN: Tensor, sharing: QuotaRounds) -> Tensor:
    """int64 [E, N]: see `kernels.share_out`."""
    if sharing.rounds == 0:
        return _split(tokens_E, replicas_EN)
    pull_EN, first_EN = _balancing_pull(tokens_E, replicas_EN, sharing)
    best_EN, first_EN = _split(tokens_E, pull_EN), _split(tokens_E, first_EN)
    return torch.where(first_EN.sum(0).max() < best_EN.sum(0).max(), first_EN, best_EN)


def _split(tokens_E: Tensor, pull_EN: Tensor) -> Tensor:
    """Tokens of each expert in proportion to its pulls, by cumulative rounding."""
    upto_EN, tokens_E1 = pull_EN.cumsum(1), tokens_E.unsqueeze(1)
    norm_E1 = upto_EN[:, -1:].clamp_min(1)
    return tokens_E1 * upto_EN // norm_E1 - tokens_E1 * (upto_EN - pull_EN) // norm_E1


def _balancing_pull(tokens_E: Tensor, replicas_EN: Tensor, sharing: QuotaRounds) -> tuple[Tensor, Tensor]:
    """weight of the rank * replicas, for the best weights found and for the first."""
    tokens_E1, num_ranks = tokens_E.unsqueeze(1), replicas_EN.shape[1]
    mean = ((tokens_E.sum() + num_ranks - 1) // num_ranks).clamp_min(1)
    holders_E = (replicas_EN > 0).sum(1).clamp_min(1)
    bound = torch.maximum(mean, ((tokens_E + holders_E - 1) // holders_E).max())
    enough = bound + bound // sharing.slack
    largest = (replicas_EN.sum(1) * tokens_E).max().clamp_min(1)
    one = ((1 << 62) // largest).clamp(1, sharing.one)
    weights_N = one.expand(num_ranks)
    best_EN = first_EN = replicas_EN
    best_load = torch.full_like(mean, torch.iinfo(torch.int64).max)
    best_round = torch.zeros_like(mean)
    is_over = torch.zeros_like(mean, dtype=torch.bool)
    for index in range(sharing.rounds):
        pull_EN = weights_N * replicas_EN
        load_N = (tokens_E1 * pull_EN // pull_EN.sum(1, keepdim=True).clamp_min(1)).sum(0)
        most = load_N.max()
        if not index:
            first_EN = pull_EN
        is_better = (most < best_load) & ~is_over
        best_EN, best_load = torch.where(is_better, pull_EN, best_EN), torch.where(is_better, most, best_load)
        best_round = torch.where(is_better, index, best_round)
        is_stuck = (index - best_round >= sharing.patience) & (best_load <= enough)
        is_over = is_over | is_stuck | (most * 500 <= bound * 501)
        weights_N = weights_N * mean // torch.maximum(load_N, (mean // 64).clamp_min(1))
        weights_N = (weights_N * one // weights_N.max().clamp_min(1)).clamp_min(1)
    return best_EN, first_EN


def send_and_receive(tokens_EN: Tensor, quota_EN: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """int64 [E, N] each: see `kernels.plan_rows`."""
    local_EN = torch.minimum(tokens_EN, quota_EN)
    surplus_EN, lack_EN = tokens_EN - local_EN, quota_EN - local_EN
    surplus_end_EN, lack_end_EN = surplus_EN.cumsum(1), lack_EN.cumsum(1)
    here = slice(rank, rank + 1)
    send_EN = _overlap(surplus_end_EN[:, here], surplus_EN[:, here], lack_end_EN, lack_EN)
    recv_EN = _overlap(lack_end_EN[:, here], lack_EN[:, here], surplus_end_EN, surplus_EN)
    # A rank lacks nothing of an expert of which it has too much: what stays here is in neither overlap.
    send_EN[:, here] = recv_EN[:, here] = local_EN[:, here]
    return send_EN, recv_EN


def _overlap(end: Tensor, length: Tensor, other_end: Tensor, other_length: Tensor) -> Tensor:
    """Length of what two intervals share that end there."""
    return (torch.minimum(end, other_end) - torch.maximum(end - length, other_end - other_length)).clamp_min(0)


def plan_rows(tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: QuotaRounds) -> tuple[Tensor, Tensor]:
    """int64 [E, N] each: see `kernels.plan_rows`."""
    return send_and_receive(tokens_EN, share_out(tokens_EN.sum(1), replicas_EN, sharing), rank)


def runs(send_EN: Tensor, recv_EN: Tensor, slots_C: Tensor, block: int) -> Runs:
    """See `kernels.plan_runs`."""
    send_N, recv_N = send_EN.sum(0), recv_EN.sum(0)
    room_N = block - send_N
    send_sizes = torch.cat([send_EN, room_N.unsqueeze(0)]).t()
    send_starts = torch.cat([_starts(send_EN), (_starts(room_N) + send_N.sum()).unsqueeze(0)]).t()
    begin_N = torch.arange(len(recv_N), device=recv_N.device) * block
    starts_EN = begin_N + recv_EN.cumsum(0) - recv_EN
    # A vacant slot names the row that is padded: its runs are empty, wherever they begin.
    slot_sizes, slot_starts = (F.pad(table, (0, 0, 0, 1))[slots_C] for table in (recv_EN, starts_EN))
    return Runs(
        send_starts=send_starts.reshape(-1),
        send_ends=send_sizes.reshape(-1).cumsum(0),
        recv_starts=torch.cat([slot_starts.reshape(-1), begin_N + recv_N]),
        recv_ends=torch.cat([slot_sizes.reshape(-1), block - recv_N]).cumsum(0),
        tokens_C=slot_sizes.sum(1),
    )


def _starts(sizes: Tensor) -> Tensor:
    """Return the start of each run, runs in row-major order."""
    return (sizes.reshape(-1).cumsum(0) - sizes.reshape(-1)).view(sizes.shape)


_BITS = (1 << 64) - 1
_MASK_24 = (1 << 24) - 1


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds it in."""
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)


def mixed(value: int) -> int:
    """`_mix` of one number, as the int64 of its bits."""
    value &= _BITS
    value = (value ^ (value >> 30)) * MIX_1 & _BITS
    value = (value ^ (value >> 27)) * MIX_2 & _BITS
    return signed(value ^ (value >> 31))


def _mix(x: Tensor) -> Tensor:
    """Bijective avalanche of int64 bit patterns; shifts are made logical by masking."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def global_rows(draw: Draw, num_rows: int, device: torch.device) -> Tensor:
    """Global index of each local row."""
    local = torch.arange(num_rows, device=device)
    return (local // draw.here + draw.first) * SAMPLE_ROWS + local % draw.here + draw.part * draw.here


def uniform(draw: Draw, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """float32 [num_rows, num_columns] in the open interval (0, 1)."""
    rows = _mix(global_rows(draw, num_rows, device) * GOLDEN + draw.key)
    bits = _mix(rows[:, None] + torch.arange(1, num_columns + 1, device=device) * GOLDEN)
    return (((bits >> 40) & _MASK_24).float() + 0.5) * 2.0**-24


def dropout(x_MD: Tensor, p: float, draw: Draw) -> Tensor:
    """[M, D]: see `kernels.keyed_dropout`."""
    keep_MD = uniform(draw, len(x_MD), x_MD.shape[1], x_MD.device) >= p
    return x_MD * (keep_MD / (1.0 - p)).to(x_MD.dtype)


_SUM_BLOCK_BYTES = 1 << 18


def xor(buffers: Sequence[Tensor], out: Tensor) -> None:
    """out = XOR of equal-length uint8 buffers; `out` may be one of them."""
    for parts, result in words(buffers, out):
        for block in _sum_blocks(result):
            parity = parts[0][block]
            for other in parts[1:]:
                parity = parity ^ other[block]
            result[block] = parity


def words(buffers: Sequence[Tensor], out: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The buffers and the result as eight-byte words and a rest of bytes; as bytes alone where one is misaligned."""
    if any(b.data_ptr() % 8 or b.storage_offset() % 8 for b in (*buffers, out)):
        yield list(buffers), out
        return
    whole = out.numel() // 8 * 8
    yield [b[:whole].view(torch.int64) for b in buffers], out[:whole].view(torch.int64)
    yield [b[whole:] for b in buffers], out[whole:]


def sum_in_rank_order(parts_NL: Tensor, out_L: Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + ..., accumulated in fp32 (fp64 for fp64) and rounded once."""
    compute = torch.promote_types(parts_NL.dtype, torch.float32)
    for block in _sum_blocks(out_L):
        total = parts_NL[0, block].to(compute, copy=True)
        for part in parts_NL[1:, block]:
            total += part
        out_L[block] = total


def _sum_blocks(out: Tensor) -> list[slice]:
    step = (
        max(1, _SUM_BLOCK_BYTES * torch.get_num_threads() // out.element_size())
        if out.device.type == "cpu"
        else out.numel()
    )
    return [slice(start, start + step) for start in range(0, out.numel(), max(1, step))]
