"""Shards of a checkpoint over data-parallel ranks, and its size.

Sizes come from a description of the model's tensors, without allocating any. `Accounting` says what counts: the kinds
of state and their bytes per parameter, which of them are partial, and buffers that are saved as they are. Sources: PEC
4, MoC-System eq. 5-6 and Table 3.

EE deals the selected experts over the expert-parallel groups that hold the same experts; EN spreads the non-expert
modules evenly over all ranks; AN does the same on top of the experts' bytes of this very checkpoint, so that ranks
without a selected expert write more. Modules larger than a rank's fair share (embeddings) are split by rows. Only
replicated state is sharded so; state that is already sharded (ZeRO-3, FSDP) is written by its owners.
Sources: PEC 3.2, MoC-System 4.

Rank layout: data-parallel rank r has expert-parallel rank r mod D_ep in group r div D_ep, and expert-parallel rank q
owns experts [q * E / D_ep, (q + 1) * E / D_ep) of every layer.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from moe_lightning.arrays import IntArray, cut
from moe_lightning.checkpoint.selection import Selection
from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        name: its key.
        shape: of one expert where the tensor belongs to experts.
        experts: how many experts of its layer have one; 0 for a non-expert tensor.
        buffer: not trained: saved once in fp32, without optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0
    buffer: bool = False

    @property
    def numel(self) -> int:
        """Elements over all experts."""
        return math.prod(self.shape) * max(1, self.experts)


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Bytes per parameter of each kind of state, and the kinds that are saved for K experts only."""

    scope_bytes: Mapping[str, int]
    partial: frozenset[str]
    buffer_bytes: int = 4


MIXED_PRECISION_BYTES = MappingProxyType({"weight": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4})


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Payload bytes of one checkpoint; framing and metadata excluded."""

    dense_bytes: int
    expert_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes


def checkpoint_size(tensors: Iterable[TensorSpec], *, accounting: Accounting, k: int | None = None) -> CheckpointSize:
    """Bytes that a checkpoint of K experts per layer writes (None: all), over all ranks, every tensor once."""
    dense = expert = 0
    for tensor in tensors:
        if tensor.buffer:
            dense += tensor.numel * accounting.buffer_bytes
        elif not tensor.experts:
            dense += tensor.numel * sum(accounting.scope_bytes.values())
        else:
            one = math.prod(tensor.shape)
            saved = tensor.experts if k is None else min(k, tensor.experts)
            for scope, size in accounting.scope_bytes.items():
                expert += one * size * (saved if scope in accounting.partial else tensor.experts)
    return CheckpointSize(dense_bytes=dense, expert_bytes=expert)


@dataclass(frozen=True, kw_only=True)
class Module:
    """A unit of non-expert state.

    Attributes:
        name: its key.
        nbytes: bytes of all its saved state.
        rows: rows into which it may be cut, 1 where it may not be.
    """

    name: str
    nbytes: int
    rows: int = 1


@dataclass(frozen=True, kw_only=True)
class ModuleRows:
    """Rows [first_row, last_row) of a module, written by one rank."""

    module: str
    rank: int
    first_row: int
    last_row: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Writers of pieces of modules.

    Attributes:
        pieces: every module exactly once, cut into one or more pieces.
        rank_bytes: predicted payload bytes of each rank.
    """

    pieces: tuple[ModuleRows, ...]
    rank_bytes: tuple[int, ...]

    @property
    def bottleneck_bytes(self) -> int:
        return max(self.rank_bytes)


def longest_processing_time(
    sizes: Sequence[int], num_ranks: int, initial_load: Sequence[int] | None = None
) -> list[int]:
    """Greedy assignment: by size descending (ties in input order) to the rank with the least load (ties to the lowest
    rank).

    Without initial load the largest load is at most 4/3 - 1/(3 * num_ranks) of the optimum.

    Returns:
        The rank of each item.
    """
    heap = [(load, rank) for rank, load in enumerate(initial_load or [0] * num_ranks)]
    heapq.heapify(heap)
    ranks = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, rank = heapq.heappop(heap)
        ranks[item] = rank
        heapq.heappush(heap, (load + sizes[item], rank))
    return ranks


def equal_expert_writers(selection: Selection, *, dp_size: int, ep_size: int) -> dict[tuple[int, int], int]:
    """EE: each expert-parallel rank's selected experts, in layer order, cut into equal contiguous chunks over the
    groups.

    Raises:
        ConfigurationError: ep_size does not divide dp_size or the number of experts.
    """
    if dp_size % ep_size or selection.num_experts % ep_size:
        raise ConfigurationError(
            f"ep_size={ep_size} must divide dp_size={dp_size} and the {selection.num_experts} experts"
        )
    groups, per_rank = dp_size // ep_size, selection.num_experts // ep_size
    writers: dict[tuple[int, int], int] = {}
    for q in range(ep_size):
        mine = [
            (layer, expert)
            for layer, chosen in enumerate(selection.experts)
            for expert in sorted(chosen)
            if expert // per_rank == q
        ]
        bounds = cut(len(mine), groups)
        for group in range(groups):
            writers.update(dict.fromkeys(mine[bounds[group] : bounds[group + 1]], group * ep_size + q))
    return writers


def balanced_expert_writers(
    holders: Sequence[Sequence[Sequence[int]]], before: Mapping[tuple[int, int], int] | None = None
) -> dict[tuple[int, int], int]:
    """EE for any placement: each expert is written by that of its holders that writes fewest so far (ties: lowest
    rank).

    Experts with the fewest holders choose first. `holders[layer][expert]` are the ranks with a replica. Who wrote an
    expert `before` goes on, where it still holds it.
    """
    pairs = [(layer, expert) for layer, row in enumerate(holders) for expert in range(len(row))]
    known = before or {}
    writers = {pair: known[pair] for pair in pairs if known.get(pair) in holders[pair[0]][pair[1]]}
    written = Counter(writers.values())
    pairs = [pair for pair in pairs if pair not in writers]
    for layer, expert in sorted(pairs, key=lambda pair: len(holders[pair[0]][pair[1]])):
        rank = min(holders[layer][expert], key=lambda r: (written[r], r))
        written[rank] += 1
        writers[layer, expert] = rank
    return writers


def shard_checkpoint(
    expert_writer: Mapping[tuple[int, int], int],
    *,
    expert_bytes: int,
    modules: Sequence[Module],
    num_ranks: int,
    adaptive: bool = True,
) -> ShardPlan:
    """EN (adaptive=False) or AN sharding of the non-expert modules beside the given experts.

    Args:
        expert_writer: the rank that writes each selected (layer, expert).
        expert_bytes: bytes saved per expert.
        modules: non-expert modules; those above a rank's fair share of them are cut by rows where they have rows.
        adaptive: balance on top of the experts' bytes; a function of this checkpoint's selection, equal on every rank.
    """
    load = [0] * num_ranks
    for rank in expert_writer.values():
        load[rank] += expert_bytes
    fair_share = -(-sum(m.nbytes for m in modules) // num_ranks)
    parts = [part for module in modules for part in _split(module, fair_share)]
    ranks = longest_processing_time([p.nbytes for p in parts], num_ranks, load if adaptive else None)
    pieces = _one_range_a_rank(modules, parts, ranks)
    for piece in pieces:
        load[piece.rank] += piece.nbytes
    return ShardPlan(pieces=tuple(pieces), rank_bytes=tuple(load))


def _split(module: Module, fair_share: int) -> list[ModuleRows]:
    """The module in as few pieces of rows, none above the fair share where rows allow."""
    count = min(module.rows, max(1, -(-module.nbytes // max(1, fair_share))))
    bounds = cut(module.rows, count)
    return [_piece(module, -1, first, last) for first, last in pairwise(bounds)]


def _one_range_a_rank(modules: Sequence[Module], parts: Sequence[ModuleRows], ranks: Sequence[int]) -> list[ModuleRows]:
    """Every module cut anew, in ascending ranks, each with as many rows as its parts had.

    A rank that got several parts of a module would otherwise have several ranges of one tensor.
    """
    rows: dict[str, Counter[int]] = defaultdict(Counter)
    for part, rank in zip(parts, ranks, strict=True):
        rows[part.module][rank] += part.last_row - part.first_row
    pieces: list[ModuleRows] = []
    for module in modules:
        first = 0
        for rank, count in sorted(rows[module.name].items()):
            pieces.append(_piece(module, rank, first, first + count))
            first += count
    return pieces


def _piece(module: Module, rank: int, first: int, last: int) -> ModuleRows:
    nbytes = module.nbytes * last // module.rows - module.nbytes * first // module.rows
    return ModuleRows(module=module.name, rank=rank, first_row=first, last_row=last, nbytes=nbytes)


def baseline_rank_bytes(
    *, dense_params: int, expert_params: int, weight_bytes: int, optimizer_bytes: int, dp_size: int, ep_size: int
) -> IntArray:
    """int64 [dp_size]: Megatron-DeepSpeed's layout (MoC-System 4): rank 0 writes all non-expert weights, the first
    expert-parallel group the experts' weights, and every rank its ZeRO shard of the optimizer."""
    load = np.full(dp_size, (dense_params + expert_params) * optimizer_bytes // dp_size, dtype=np.int64)
    load[:ep_size] += expert_params * weight_bytes // ep_size
    load[0] += dense_params * weight_bytes
    return load
