"""Tensors of which a rank holds a part, as the plain tensors that they hold: DTensors cut by rows over a shard group,
and parameters, DTensors among them, that say themselves how they are cut by tensor index (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_lightning.parallel.mesh import Part, TensorCut
from moe_lightning.state.pieces import Block

_CUT = "moe_lightning_cut"


def cut_of(tensor: object) -> TensorCut | None:
    """How a tensor is cut of which this rank holds a part only; None: it is whole."""
    known: TensorCut | None = getattr(tensor, _CUT, None)
    if known is None and isinstance(tensor, DTensor):
        return TensorCut(shape=tuple(tensor.shape))
    return known


def is_cut(tensor: object) -> bool:
    """Whether this rank holds a part of it only."""
    return isinstance(tensor, DTensor) or hasattr(tensor, _CUT)


def cuts_of(module: nn.Module) -> dict[str, TensorCut]:
    """How the parameters of a module are cut, under all of their names."""
    found = {name: cut_of(p) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: cut for name, cut in found.items() if cut is not None}


def mark(parameter: nn.Parameter, cut: TensorCut | None) -> None:
    """Note that a parameter is cut by tensor index, or one of another stage in any way; or that it is not."""
    parameter.__dict__.pop(_CUT, None)
    if cut is not None and (cut.sections or parameter.is_meta):
        setattr(parameter, _CUT, cut)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shape(tensor: Tensor) -> torch.Size:
    """Of the tensor of which this rank may hold a part."""
    cut = cut_of(tensor)
    return tensor.shape if cut is None else torch.Size(cut.shape)


def rows_like(parameter: Tensor, rows: Tensor) -> Tensor:
    """This rank's rows as a tensor that is cut like a parameter; the rows themselves where that is a plain tensor."""
    if not isinstance(parameter, DTensor):
        return rows
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def blocks_of(cut: TensorCut, part: Part) -> Iterator[tuple[tuple[slice, ...], Block]]:
    """What is in a part of a tensor: where it lies in the tensor that holds the part, and in the whole one."""
    at = 0
    for offsets, sizes in cut.blocks(part):
        begins = (at if dim == cut.dim else 0 for dim in range(len(sizes)))
        yield (
            tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)),
            Block(offsets=offsets, sizes=sizes, whole=cut.shape),
        )
        at += sizes[cut.dim]


def part_of_whole(whole: Tensor, cut: TensorCut, part: Part) -> Tensor:
    """What is in a part of a tensor."""
    found = [whole[block.slices] for _, block in blocks_of(cut, part)]
    if not found:
        return whole.new_empty(cut.shape_of(part))
    return found[0] if len(found) == 1 else torch.cat(found, dim=cut.dim)


def joined(held: Mapping[Part, Tensor], cut: TensorCut) -> Tensor:
    """The whole tensor of all its parts."""
    whole = next(iter(held.values())).new_empty(cut.shape)
    for part, values in held.items():
        for here, block in blocks_of(cut, part):
            whole[block.slices] = values[here]
    return whole


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
