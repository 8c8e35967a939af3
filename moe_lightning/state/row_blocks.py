"""Tensors of which a rank holds a part, as the plain tensors that they hold: DTensors cut by rows over a shard group,
and parameters that say themselves how they are cut (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_lightning.algorithms.dense_shards import RowCut, TensorCut
from moe_lightning.state.pieces import Block

_CUT = "moe_lightning_cut"


def cut_of(tensor: object) -> TensorCut | None:
    """How a tensor is cut of which this rank holds a part only; None: it is whole."""
    if isinstance(tensor, DTensor):
        return TensorCut(sections=(tensor.shape[0],))
    return getattr(tensor, _CUT, None)


def is_cut(tensor: object) -> bool:
    """Whether this rank holds a part of it only."""
    return isinstance(tensor, DTensor) or hasattr(tensor, _CUT)


def cuts_of(module: nn.Module) -> dict[str, TensorCut]:
    """How the parameters of a module are cut, under all of their names."""
    found = {name: cut_of(p) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: cut for name, cut in found.items() if cut is not None}


@torch.no_grad()
def keep_part(parameter: nn.Parameter, cut: TensorCut, part: int, parts: int) -> None:
    """Leave a parameter a part of its values."""
    own = part_of_whole(parameter.data, cut, part, parts)
    hold(parameter, own.clone(memory_format=torch.contiguous_format), cut)


def hold(parameter: nn.Parameter, values: Tensor, cut: TensorCut | None) -> None:
    """Give a parameter other values, which are a part of its tensor, or with no cut the whole one."""
    parameter.data = values
    parameter.__dict__.pop(_CUT, None)
    if cut is not None:
        setattr(parameter, _CUT, cut)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shape(tensor: Tensor) -> torch.Size:
    """Of the tensor of which this rank may hold a part."""
    shape, cut = list(tensor.shape), getattr(tensor, _CUT, None)
    if cut is not None:
        shape[cut.dim] = cut.size
    return torch.Size(shape)


def rows_like(parameter: Tensor, rows: Tensor) -> Tensor:
    """This rank's rows as a tensor that is cut like a parameter; the rows themselves where that is a plain tensor."""
    if not isinstance(parameter, DTensor):
        return rows
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def part_of_whole(whole: Tensor, cut: TensorCut, part: int, parts: int) -> Tensor:
    """What is in a part of a tensor."""
    ranges = cut.ranges(part, parts)
    found = [whole.narrow(cut.dim, first, last - first) for first, last in ranges]
    return found[0] if len(found) == 1 else torch.cat([whole.narrow(cut.dim, 0, 0), *found], dim=cut.dim)


def joined(held: Sequence[Tensor], cut: TensorCut) -> Tensor:
    """The whole tensor of all its parts."""
    shape = list(held[0].shape)
    shape[cut.dim] = cut.size
    whole = held[0].new_empty(shape)
    for part, values in enumerate(held):
        at = 0
        for first, last in cut.ranges(part, len(held)):
            whole.narrow(cut.dim, first, last - first).copy_(values.narrow(cut.dim, at, last - first))
            at += last - first
    return whole


def own_part(parameter: Tensor, whole: Tensor, cut: RowCut) -> Tensor:
    """What this rank keeps of a tensor that is cut as a parameter is."""
    way = cut_of(parameter)
    return whole if way is None else part_of_whole(whole, way, cut.part, cut.parts)


def own_blocks(parameter: Tensor, tensor: Tensor, cut: RowCut) -> list[tuple[Tensor, Block]]:
    """What this rank holds of a tensor that is cut as a parameter is: views, and which blocks of the whole they are."""
    way = cut_of(parameter)
    if way is None:
        return [(tensor, Block.of(tensor.shape))]
    found, at = [], 0
    for first, last in way.ranges(cut.part, cut.parts):
        view = tensor.narrow(way.dim, at, last - first)
        offsets = tuple(first if dim == way.dim else 0 for dim in range(tensor.ndim))
        found.append((view, Block(offsets=offsets, sizes=tuple(view.shape), whole=tuple(whole_shape(parameter)))))
        at += last - first
    return found


@contextmanager
def updating_blocks(optimizer: Optimizer) -> Generator[Callable[[], None], None, None]:
    """From the call of what it yields to its end, the optimizer sees the blocks of its parameters and gradients as
    plain parameters.

    Updates that work element by element are the same there, take no dispatch of DTensors, and may be fused or batched
    with those of parameters that are whole. States stay plain tensors of the block, under the parameter.
    """
    blocks: dict[nn.Parameter, nn.Parameter] = {}

    def see_blocks() -> None:
        for group in optimizer.param_groups:
            rows = [p for p in group["params"] if hasattr(p, "placements")]
            blocks.update((p, _block_of(p)) for p in rows)
        swap_parameters(optimizer, blocks)

    try:
        yield see_blocks
    finally:
        swap_parameters(optimizer, {block: p for p, block in blocks.items()})


def swap_parameters(optimizer: Optimizer, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let other parameters take the places, and the states, of some of an optimizer's."""
    if not others:
        return
    for group in optimizer.param_groups:
        group["params"] = [others.get(p, p) for p in group["params"]]
    states = [(others.get(p, p), state) for p, state in optimizer.state.items()]  # type: ignore[call-overload]
    optimizer.state.clear()
    optimizer.state.update(states)


def _block_of(parameter: nn.Parameter) -> nn.Parameter:
    block = nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)
    block.grad = None if parameter.grad is None else local(parameter.grad)
    return block
