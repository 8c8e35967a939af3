"""Brings named tensors that lie on several ranks to rank 0, without pickle: names and shapes travel as JSON, bytes as one exchange a dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.comm.world import World


def collect_on_root(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Every rank's tensors by name, on rank 0 and on the host; an empty dict on the others.

    Args:
        tensors: what this rank contributes; a name may be given by one rank only.
    """
    if world.size == 1:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    own = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
    listings = all_gather_json(own, world)
    dtypes = sorted({dtype for listing in listings for _, _, dtype in listing})
    result: dict[str, Tensor] = {}
    for dtype in dtypes:
        result |= _collect_dtype(tensors, listings, dtype, world)
    return result


def all_gather_json(value: object, world: World) -> list[list[list[object]]]:
    """Every rank's JSON value, in rank order."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    sizes = torch.empty(world.size, 1, dtype=torch.int64, device=world.device)
    dist.all_gather(list(sizes.unbind()), torch.tensor([payload.numel()], device=world.device), group=world.background)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=world.device)
    padded[: payload.numel()] = payload
    rows = padded.new_empty(world.size, padded.numel())
    dist.all_gather(list(rows.unbind()), padded, group=world.background)
    return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows.cpu(), sizes, strict=True)]


def _collect_dtype(tensors: Mapping[str, Tensor], listings: list[list[list[object]]], dtype: str, world: World) -> dict[str, Tensor]:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    own = [tensors[str(name)].detach().reshape(-1) for name, _, d in listings[world.rank] if d == dtype]
    flat = torch.cat(own).to(world.device) if own else torch.empty(0, dtype=torch_dtype, device=world.device)
    shapes = [[(str(name), torch.Size(shape)) for name, shape, d in listing if d == dtype] for listing in listings]  # type: ignore[arg-type]
    sizes = [sum(shape.numel() for _, shape in listing) for listing in shapes]
    arrived = torch.empty(sum(sizes) if world.rank == 0 else 0, dtype=torch_dtype, device=world.device)
    send = [flat.numel()] + [0] * (world.size - 1)
    recv = sizes if world.rank == 0 else [0] * world.size
    dist.all_to_all_single(arrived, flat, recv, send, group=world.background)
    if world.rank:
        return {}
    pieces = arrived.cpu().split([shape.numel() for listing in shapes for _, shape in listing])
    names = [pair for listing in shapes for pair in listing]
    return {name: piece.view(shape).clone() for (name, shape), piece in zip(names, pieces, strict=True)}
