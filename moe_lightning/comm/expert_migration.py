"""Moves experts with all their state between ranks: one exchange for each dtype, at a step boundary.

Slots are fixed rows. An expert that stays on a rank keeps its slot, so only rows that change hands are touched and
neither parameters nor optimizers are rebuilt. What to move is a plan of `algorithms.migration`.

Shapes: S slots of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_lightning.algorithms.migration import Transfer
from moe_lightning.comm.exchange import PendingExchange
from moe_lightning.comm.world import World


@dataclass(frozen=True, kw_only=True)
class MovingRows:
    """One layer's rows before and after.

    Attributes:
        tensors: all tensors [S, ...] whose row s belongs to the expert in slot s: parameters and optimizer states, in
            an order that all ranks share.
        before, after: expert of each slot, -1 where vacant.
    """

    tensors: Sequence[Tensor]
    before: tuple[int, ...]
    after: tuple[int, ...]


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
def migrate_rows(layers: Sequence[MovingRows], transfers: Sequence[Transfer], world: World) -> int:
    """Carry the transfers out and clear the rows that become vacant; collective.

    Args:
        layers: of the model, in order; each with this rank's slots.
        transfers: of all ranks, the same list on every rank.

    Returns:
        Bytes that left this rank.
    """
    outgoing = sorted((t for t in transfers if t.source == world.rank), key=lambda t: (t.target, t.layer, t.expert))
    incoming = sorted((t for t in transfers if t.target == world.rank), key=lambda t: (t.source, t.layer, t.expert))
    dtypes = sorted({tensor.dtype for layer in layers for tensor in layer.tensors}, key=str) if transfers else []
    # Everything has arrived before anything is overwritten: a leaving expert may lie where an arriving one will, and
    # an exchange that fails leaves every row as it was.
    pending = [(dtype, *_exchange(layers, outgoing, incoming, dtype, world)) for dtype in dtypes]
    arrived = [(dtype, exchange.wait()) for dtype, _, exchange in pending]
    _clear(layers)
    for dtype, rows in arrived:
        _write(layers, incoming, dtype, rows)
    return sum(sent_bytes for _, sent_bytes, _ in pending)


def _exchange(
    layers: Sequence[MovingRows],
    outgoing: Sequence[Transfer],
    incoming: Sequence[Transfer],
    dtype: torch.dtype,
    world: World,
) -> tuple[int, PendingExchange]:
    """The bytes that leave this rank, and their exchange under way."""
    rows, send, recv = [], [0] * world.size, [0] * world.size
    for transfer in outgoing:
        layer = layers[transfer.layer]
        slot = layer.before.index(transfer.expert)
        for tensor in _of_dtype(layer, dtype):
            rows.append(tensor[slot].reshape(-1))
            send[transfer.target] += rows[-1].numel()
    for transfer in incoming:
        recv[transfer.source] += sum(tensor.shape[1:].numel() for tensor in _of_dtype(layers[transfer.layer], dtype))
    flat = torch.cat(rows) if rows else torch.empty(0, dtype=dtype, device=world.device)
    return flat.numel() * flat.element_size(), PendingExchange(flat, send, recv, world)


def _clear(layers: Sequence[MovingRows]) -> None:
    for layer in layers:
        for slot, (before, after) in enumerate(zip(layer.before, layer.after, strict=True)):
            if before >= 0 and after < 0:
                for tensor in layer.tensors:
                    tensor[slot].zero_()


def _write(layers: Sequence[MovingRows], incoming: Sequence[Transfer], dtype: torch.dtype, arrived: Tensor) -> None:
    start = 0
    for transfer in incoming:
        layer = layers[transfer.layer]
        slot = layer.after.index(transfer.expert)
        for tensor in _of_dtype(layer, dtype):
            row = tensor[slot]
            row.copy_(arrived[start : start + row.numel()].view_as(row))
            start += row.numel()


def _of_dtype(layer: MovingRows, dtype: torch.dtype) -> list[Tensor]:
    return [tensor for tensor in layer.tensors if tensor.dtype == dtype]
