"""Tensors of which a rank holds some rows (DTensors cut over a shard group), as the plain tensors that they hold."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_lightning.algorithms.dense_shards import RowCut
from moe_lightning.state.pieces import Block


def is_cut(tensor: object) -> bool:
    """Whether this rank holds a block of it only."""
    return isinstance(tensor, DTensor)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_like(parameter: Tensor, rows: Tensor) -> Tensor:
    """This rank's rows as a tensor that is cut like a parameter; the rows themselves where that is whole."""
    if not isinstance(parameter, DTensor):
        return rows
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_rows(parameter: Tensor, whole: Tensor, cut: RowCut) -> Tensor:
    """What this rank keeps of a tensor that has the rows of a parameter."""
    if not is_cut(parameter):
        return whole
    first, last = cut.bounds(len(whole))
    return whole[first:last]


def own_block(tensor: Tensor, cut: RowCut) -> Block:
    """Which of the whole tensor this rank holds."""
    if not is_cut(tensor):
        return Block.of(tensor.shape)
    first, last = cut.bounds(tensor.shape[0])
    return Block.of_rows((last - first, *tensor.shape[1:]), first, tensor.shape[0])


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
            blocks.update((p, _block_of(p)) for p in group["params"] if is_cut(p))
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
