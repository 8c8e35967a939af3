"""Objects and named tensors of several ranks, without pickle: names and shapes travel as JSON, the bytes of each dtype
as one exchange, objects by the codec."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.comm.codec import MAX_BYTES, decode, encode
from moe_lightning.comm.world import World, broadcast_
from moe_lightning.errors import ConfigurationError, ForeignMessageError

_REFUSED = -1
"""In the place of a size: the sender's object cannot travel."""


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
    """Every rank's JSON value, in rank order.

    Raises:
        ForeignMessageError: a rank sent something else.
    """
    text = json.dumps(value).encode()
    if world.size == 1:
        return [json.loads(text)]
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(world.device)
    sizes = torch.empty(world.size, 1, dtype=torch.int64, device=world.device)
    own_size = torch.tensor([payload.numel()], device=world.device)
    dist.all_gather(list(sizes.unbind()), own_size, group=world.background)
    sizes = world.read(sizes)
    for rank, size in enumerate(sizes.flatten().tolist()):
        _check_size(size, rank)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=world.device)
    padded[: payload.numel()] = payload
    rows = padded.new_empty(world.size, padded.numel())
    dist.all_gather(list(rows.unbind()), padded, group=world.background)
    texts = [row[: int(size)].numpy().tobytes() for row, size in zip(world.read(rows), sizes, strict=True)]
    return [_parsed(text, rank) for rank, text in enumerate(texts)]


def broadcast_object(value: Any, source: int, world: World) -> Any:
    """The source rank's value on every rank; the value itself where there is no other rank.

    Args:
        value: plain values and tensors, see `codec`; of other ranks than the source it is not looked at.

    Raises:
        ConfigurationError: on every rank, the source has an object that cannot travel.
        ForeignMessageError: what arrived is not what a rank of ours sends.
    """
    if not world.is_connected:
        return value
    is_source, message, refusal = world.rank == source, b"", None
    if is_source:
        try:
            message = encode(value)
        except ConfigurationError as error:
            refusal = error
    size = torch.tensor([_REFUSED if refusal is not None else len(message)], device=world.device)
    broadcast_(size, source, world)
    if refusal is not None:
        raise refusal
    num_bytes = int(world.read(size))
    if num_bytes == _REFUSED:
        raise ConfigurationError(f"rank {source} has an object that cannot be sent to other ranks: it says which")
    _check_size(num_bytes, source)
    data = (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if is_source
        else torch.empty(num_bytes, dtype=torch.uint8)
    )
    data = data.to(world.device)
    broadcast_(data, source, world)
    return value if is_source else decode(world.read(data).numpy().tobytes(), world.device, sender=f"rank {source}")


def _check_size(size: int, rank: int) -> None:
    if not 0 < size <= MAX_BYTES:
        raise ForeignMessageError(
            f"rank {rank} announces a message of {size} bytes, and at most {MAX_BYTES} are allowed: it is no rank of "
            "this run, or damaged; keep strangers off the run's network"
        )


def _parsed(text: bytes, rank: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ForeignMessageError(
            f"rank {rank} sent something else than JSON ({type(error).__name__}): nothing of it is used; keep "
            "strangers off the run's network, and the same version on all ranks"
        ) from None


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
    pieces = torch.split(world.read(arrived), [torch.Size(item.shape).numel() for item in items])
    return {item.name: piece.view(item.shape).clone() for item, piece in zip(items, pieces, strict=True)}
