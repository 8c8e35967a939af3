"""Brings named tensors that lie on several ranks to rank 0, without pickle: names and shapes travel as JSON, the bytes
of each dtype as one exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.comm.world import World


class _Listed(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str


def collect_on_root(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Every rank's tensors by name, on rank 0 and on the host; an empty dict on the others.

    Args:
        tensors: what this rank contributes; a name may be given by one rank only.
    """
    if world.size == 1:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    own = [_Listed(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    listings = [[_Listed(n, tuple(s), d) for n, s, d in listing] for listing in all_gather_json(own, world)]
    result: dict[str, Tensor] = {}
    for dtype in sorted({item.dtype for listing in listings for item in listing}):
        result |= _collect_dtype(tensors, listings, dtype, world)
    return result


def all_gather_json(value: Any, world: World) -> list[Any]:
    """Every rank's JSON value, in rank order."""
    if world.size == 1:
        return [json.loads(json.dumps(value))]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    sizes = torch.empty(world.size, 1, dtype=torch.int64, device=world.device)
    own_size = torch.tensor([payload.numel()], device=world.device)
    dist.all_gather(list(sizes.unbind()), own_size, group=world.background)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=world.device)
    padded[: payload.numel()] = payload
    rows = padded.new_empty(world.size, padded.numel())
    dist.all_gather(list(rows.unbind()), padded, group=world.background)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows.cpu(), sizes, strict=True)]


def _collect_dtype(
    tensors: Mapping[str, Tensor], listings: Sequence[Sequence[_Listed]], dtype: str, world: World
) -> dict[str, Tensor]:
    listings = [[item for item in listing if item.dtype == dtype] for listing in listings]
    own = [tensors[item.name].detach().reshape(-1) for item in listings[world.rank]]
    flat = torch.cat(own).to(world.device) if own else torch.empty(0, dtype=getattr(torch, dtype), device=world.device)
    sizes = [sum(torch.Size(item.shape).numel() for item in listing) for listing in listings]
    is_root = world.rank == 0
    arrived = flat.new_empty(sum(sizes) if is_root else 0)
    send = [flat.numel()] + [0] * (world.size - 1)
    recv = sizes if is_root else [0] * world.size
    dist.all_to_all_single(arrived, flat, recv, send, group=world.background)
    if not is_root:
        return {}
    items = [item for listing in listings for item in listing]
    pieces = torch.split(arrived.cpu(), [torch.Size(item.shape).numel() for item in items])
    return {item.name: piece.view(item.shape).clone() for item, piece in zip(items, pieces, strict=True)}
