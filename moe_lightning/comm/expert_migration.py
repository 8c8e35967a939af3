"""Moves experts with all their state between ranks: one exchange for each dtype, at a step boundary.

Slots are fixed rows. An expert that stays on a rank keeps its slot, so only rows that change hands are touched and
neither parameters nor optimizers are rebuilt. What to move is a plan of `balancing.migration`.

Shapes: S slots of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe_lightning.balancing.migration import Transfer
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange


def next_slots(slots: Sequence[int], experts: Collection[int]) -> tuple[int, ...]:
    """The slots of a rank after a new placement: experts that stay keep theirs, the others fill the free ones in
    ascending order, and -1 marks what stays vacant.

    Args:
        slots: expert of each slot so far, -1 where vacant.
        experts: what the rank shall hold; at most as many as there are slots.
    """
    assert len(set(experts)) <= len(slots)
    kept = [expert if expert in experts else -1 for expert in slots]
    coming = iter(sorted(set(experts) - set(kept)))
    return tuple(next(coming, -1) if expert < 0 else expert for expert in kept)


@torch.no_grad()
def migrate_rows(
    before: Sequence[ExpertStack],
    after: Sequence[ExpertStack],
    optimizers: Sequence[Optimizer],
    transfers: Sequence[Transfer],
    world: World,
    dtypes: Collection[torch.dtype] | None = None,
) -> int:
    """Carry the transfers out and clear the rows that become vacant; collective.

    Args:
        before, after: the same parameters of each layer, in order, under other slots.
        optimizers: whose states move along.
        transfers: of all ranks, the same list on every rank; with `dtypes`, of the layers given.
        dtypes: of all that travels, where ranks give some of the layers only; none: nothing travels.

    Returns:
        Bytes that left this rank.
    """
    outgoing = sorted((t for t in transfers if t.source == world.rank), key=lambda t: (t.target, t.layer, t.expert))
    incoming = sorted((t for t in transfers if t.target == world.rank), key=lambda t: (t.source, t.layer, t.expert))
    tensors = [stack.tensors(optimizers) for stack in before]
    if dtypes is None:
        dtypes = {tensor.dtype for layer in tensors for tensor in layer} if transfers else ()
    # Everything has arrived before anything is overwritten: a leaving expert may lie where an arriving one will, and
    # an exchange that fails leaves every row as it was.
    pending = []
    for dtype in sorted(dtypes, key=str):
        leaving = [(t.target, row) for t in outgoing for row in _rows(tensors, before, t, dtype)]
        arriving = [(t.source, row) for t in incoming for row in _rows(tensors, after, t, dtype)]
        pending.append((arriving, _exchange(leaving, arriving, dtype, world)))
    arrived = [([row for _, row in arriving], exchange.wait()) for arriving, exchange in pending]
    world.settle()
    for layer, old, new in zip(tensors, before, after, strict=True):
        _clear(layer, old.slot_experts, new.slot_experts)
    for rows, values in arrived:
        for row, value in zip(rows, torch.split(values, [row.numel() for row in rows]), strict=True):
            row.copy_(value.view_as(row))
    layer_bytes = [sum(tensor[:1].nbytes for tensor in layer) for layer in tensors]
    return sum(layer_bytes[transfer.layer] for transfer in outgoing)


def _rows(
    tensors: Sequence[Sequence[Tensor]], stacks: Sequence[ExpertStack], transfer: Transfer, dtype: torch.dtype
) -> list[Tensor]:
    """The expert's rows of a dtype in the tensors of its layer."""
    slot = stacks[transfer.layer].slot_experts.index(transfer.expert)
    return [tensor[slot] for tensor in tensors[transfer.layer] if tensor.dtype == dtype]


def _exchange(
    leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Tensor]], dtype: torch.dtype, world: World
) -> PendingExchange:
    """(peer, row) pairs, ordered by peer, under way; of those that arrive only the sizes count."""
    send, recv = [0] * world.size, [0] * world.size
    for sizes, rows in ((send, leaving), (recv, arriving)):
        for peer, row in rows:
            sizes[peer] += row.numel()
    flat = [row.reshape(-1) for _, row in leaving] or [torch.empty(0, dtype=dtype, device=world.device)]
    return PendingExchange(torch.cat(flat), send, recv, world)


def _clear(tensors: Sequence[Tensor], before: Sequence[int], after: Sequence[int]) -> None:
    """Zeros where an expert was and none comes."""
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        if old >= 0 and new < 0:
            for tensor in tensors:
                tensor[slot].zero_()
