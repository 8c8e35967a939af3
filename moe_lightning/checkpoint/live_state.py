"""The live state of a run as a newcomer needs it: what is replicated on every rank comes from one of them.

A process that joins a running world has built the same model and optimizers, but its values are those of the start and
its optimizers have made no states yet. It is told which states there are, makes them, and then receives every dense
tensor by broadcast; experts come by migration. Nothing that travels is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.checkpoint.full_state import OptimizerLayout
from moe_lightning.comm.world import World, broadcast_

OptimizerLayouts = Sequence[tuple[Optimizer, OptimizerLayout]]

_BUCKET_ELEMENTS = 1 << 22


def optimizer_schema(optimizers: OptimizerLayouts) -> list[dict[str, Any]]:
    """For each optimizer: hyperparameters of its groups, and the state names, shapes, dtypes and scalars of each
    parameter, numbered as in a run of one process."""
    described = []
    for optimizer, layout in optimizers:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        states = {
            number: {name: _describe(value) for name, value in sorted(optimizer.state[parameter].items())}
            for number, parameter in enumerate(layout.numbered())
            if parameter in optimizer.state
        }
        described.append({"param_groups": groups, "states": states})
    return described


@torch.no_grad()
def adopt_optimizers(optimizers: OptimizerLayouts, schema: Sequence[dict[str, Any]]) -> None:
    """Take over hyperparameters and scalars, and make the states that are missing, filled with zeros."""
    for (optimizer, layout), described in zip(optimizers, schema, strict=True):
        for group, values in zip(optimizer.param_groups, described["param_groups"], strict=True):
            group.update(values)
        kept = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for number, parameter in enumerate(layout.numbered()):
            if id(parameter) in kept and number in described["states"]:
                state = optimizer.state[parameter]
                for name, entry in described["states"][number].items():
                    state[name] = _made(entry, parameter, state.get(name), is_stack=parameter in layout.experts)


@torch.no_grad()
def broadcast_dense(module: nn.Module, optimizers: OptimizerLayouts, world: World, source: int) -> int:
    """Every dense parameter, its optimizer states and every buffer get the source rank's values; bytes that travelled.

    Optimizer states that one rank keeps for all (ZeRO-1) stay where they are.
    """
    tensors = list(_dense_tensors(module, optimizers))
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        bucket: list[Tensor] = []
        for tensor in [t for t in tensors if t.dtype == dtype]:
            bucket.append(tensor)
            if sum(t.numel() for t in bucket) >= _BUCKET_ELEMENTS:
                _broadcast_bucket(bucket, world, source)
                bucket = []
        _broadcast_bucket(bucket, world, source)
    return sum(t.nbytes for t in tensors)


def _describe(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor) and value.ndim > 0:
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return {"value": value.cpu() if isinstance(value, Tensor) else value}


def _made(entry: dict[str, Any], parameter: nn.Parameter, known: Any, *, is_stack: bool) -> Any:
    if "value" in entry:
        value = entry["value"]
        return value.clone() if isinstance(value, Tensor) else value
    # Of a stack only the rows' shape is the source's: this rank may keep another number of slots.
    shape = [parameter.shape[0], *entry["shape"][1:]] if is_stack else entry["shape"]
    if isinstance(known, Tensor) and list(known.shape) == shape:
        return known
    return torch.zeros(shape, dtype=getattr(torch, entry["dtype"]), device=parameter.device)


def _dense_tensors(module: nn.Module, optimizers: OptimizerLayouts) -> Iterator[Tensor]:
    stacked = {id(p) for _, layout in optimizers for p in layout.experts}
    for parameter in module.parameters():
        if id(parameter) not in stacked:
            yield parameter.detach()
    yield from (buffer for buffer in module.buffers() if buffer.numel())
    for optimizer, layout in optimizers:
        for parameter in layout.numbered():
            if parameter in layout.experts or parameter in layout.owners or parameter not in optimizer.state:
                continue
            for _, value in sorted(optimizer.state[parameter].items()):
                if isinstance(value, Tensor) and value.ndim > 0:
                    yield value


def _broadcast_bucket(tensors: Sequence[Tensor], world: World, source: int) -> None:
    if not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(world.device)
    broadcast_(flat, source, world)
    if world.rank != source:
        for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))
