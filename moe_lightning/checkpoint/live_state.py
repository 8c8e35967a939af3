"""The live state of a run as a newcomer needs it: what is replicated on every rank comes from one of them.

A process that joins a running world has built the same model and optimizers, but its values are those of the start and
its optimizers have made no states yet. It is told which states there are, makes them, and then receives every dense
tensor by broadcast; experts come by migration. Nothing that travels is unpickled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moe_lightning.parallel.collectives import broadcast_object
from moe_lightning.parallel.context import World, broadcast_
from moe_lightning.state.table import State

_BUCKET_ELEMENTS = 1 << 22


def share_optimizers(state: State, takers: Collection[int], world: World, source: int) -> None:
    """The takers' optimizers get the source rank's hyperparameters and scalars, and states filled with zeros where
    they have none; collective."""
    objects, shapes = broadcast_object((state.objects(), state.moment_shapes()), source, world)
    if world.rank in takers:
        state.adopt(objects, shapes)


@torch.no_grad()
def broadcast_dense(state: State, world: World, source: int, *, but: Collection[str] = ()) -> int:
    """What every rank has gets the source rank's values; bytes that travelled.

    Optimizer states that one rank keeps for all (ZeRO-1) stay where they are.

    Args:
        but: names of parameters that are cut over ranks, or will be.
    """
    everyone, kept = state.world_size, {name for name, p in state.dense.items() if p in state.keepers}
    tensors = [
        piece.tensor
        for piece in state.pieces(transient=True)
        if not piece.is_expert_key and len(piece.holders) == everyone and piece.tensor.numel()
        if (name := piece.key.removeprefix("dense/").rpartition("/")[0]) not in but
        if not (piece.is_moment and name in kept)
    ]
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        bucket: list[Tensor] = []
        for tensor in [t for t in tensors if t.dtype == dtype]:
            bucket.append(tensor)
            if sum(t.numel() for t in bucket) >= _BUCKET_ELEMENTS:
                _broadcast_bucket(bucket, world, source)
                bucket = []
        _broadcast_bucket(bucket, world, source)
    return sum(t.nbytes for t in tensors)


def _broadcast_bucket(tensors: Sequence[Tensor], world: World, source: int) -> None:
    if not tensors:
        return
    flat = torch.cat([t.reshape(-1).to(world.device) for t in tensors])
    broadcast_(flat, source, world)
    if world.rank != source:
        for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))
