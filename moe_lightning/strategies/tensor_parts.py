"""Dense parameters of which each rank of a tensor group keeps, updates and computes with a part (mesh.tp).

A model says by `tensor_parallel_plan` how its layers are cut. Parameters stay the objects that they are, with a part of
their values, so that optimizers and other code see plain tensors. What is not cut is on every rank, sees some positions
of each sequence or everything, and gets the sum of the gradients of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from moe_lightning.algorithms.dense_shards import TensorCut
from moe_lightning.algorithms.mesh_shape import MeshShape
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.tensor_ranks import TensorRanks
from moe_lightning.comm.world import World, broadcast_
from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.stream import SampleStream
from moe_lightning.modules.tensor_parallel import PartedForward, Shares, Style, undo_parts
from moe_lightning.state.row_blocks import cut_of, is_cut, joined, keep_part, make_whole
from moe_lightning.strategies.module_checks import cut_parameters


class Holder(Protocol):
    """The state of a rank, `RankState`, as far as parts of layers concern it."""

    @property
    def module(self) -> pl.LightningModule: ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]: ...


def check_parts(axes: MeshShape, dense: str) -> None:
    """
    Raises:
        ConfigurationError: what tensor parallelism does not go with.
    """
    if axes.tp > 1 and dense != "ddp":
        raise ConfigurationError(f"mesh.tp={axes.tp} deals dense parameters out itself: use dense=ddp, not {dense}")
    for axis, size in (("pp", axes.pp), ("cp", axes.cp)):
        if axes.tp > 1 and size > 1:
            raise ConfigurationError(f"mesh.tp={axes.tp} does not go with mesh.{axis}={size} yet: use one of them")


class TensorParts:
    """Cuts the layers of a rank's module, and makes them whole again.

    Args:
        state: of the rank.
    """

    def __init__(self, state: Holder) -> None:
        self._state = state
        self._stream: SampleStream | None = None
        self._cut: list[nn.Parameter] = []

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds parts of layers only."""
        return bool(self._cut)

    def begin(self, world: World, stream: SampleStream) -> None:
        """Leave this rank its part of what rank 0 has; collective. A module that an earlier training has left in parts
        keeps its own.

        Args:
            stream: of keyed randomness, which is drawn for this rank's positions from here on.

        Raises:
            ConfigurationError: a module without a plan, or layers that cannot be dealt out equally.
        """
        self._stream, module, size = stream, self._state.module, world.row_cut.parts
        if not cut_parameters(module):
            for parameter, cut in _cuts(module, dict(_styles(module, size)), size).items():
                broadcast_(parameter.data, 0, world)
                keep_part(parameter, cut, world.row_cut.part, size)
        self._cut = [parameter for parameter in module.parameters() if is_cut(parameter)]
        self.enter(world)

    def enter(self, world: World) -> None:
        """Compute parts of layers with the ranks of a world."""
        assert self._stream is not None
        module, cut = self._state.module, world.row_cut
        ranks = TensorRanks(world.axis_groups["tp"], cut.part, cut.parts)
        undo_parts(module)
        for name, style in _styles(module, ranks.size):
            PartedForward(module.get_submodule(name), style, ranks)
        self._stream.part, self._stream.parts = ranks.rank, ranks.size

    def leave(self) -> None:
        """The world has ended: parts stay, and layers compute by themselves."""
        undo_parts(self._state.module)
        if self._stream is not None:
            self._stream.part, self._stream.parts = 0, 1

    @torch.no_grad()
    def sum_gradients(self, world: World) -> None:
        """Sum the gradients of parts over the ranks that hold them; collective."""
        if world.copy_group is None or not self.is_cut:
            return
        found = [p.grad for p in self._cut if p.grad is not None]
        for dtype in sorted({gradient.dtype for gradient in found}, key=str):
            gradients = [gradient for gradient in found if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=world.copy_group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, values in zip(gradients, parts, strict=True):
                gradient.copy_(values.view_as(gradient))

    @torch.no_grad()
    def gather(self, world: World, most_bytes: int) -> None:
        """Give every rank whole parameters, as before `begin`, where they take no more than this on any rank;
        collective where they are cut.
        """
        if not self.is_cut:
            return
        parts = world.row_cut.parts
        if sum(p.nbytes for p in self._cut) * parts > min(all_gather_json(most_bytes, world)):
            rank_zero_warn(
                "training has ended, and the layers are larger than what a rank may keep of them: every rank has its "
                "part only, so go on from a checkpoint"
            )
            return
        for parameter in self._cut:
            cut, states = cut_of(parameter), self._state.state_of(parameter)
            assert cut is not None
            for name, value in states.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    states[name] = _whole(value, cut, world)
            make_whole(parameter, _whole(parameter.data, cut, world))
        self.leave()
        self._cut = []


def _whole(part: Tensor, cut: TensorCut, world: World) -> Tensor:
    held = [torch.empty_like(part) for _ in range(world.row_cut.parts)]
    dist.all_gather(held, part.contiguous(), group=world.shard_group)
    return joined(held, cut)


def _styles(module: pl.LightningModule, size: int) -> Iterator[tuple[str, Style]]:
    """Of the modules that are cut, by their names.

    Raises:
        ConfigurationError: nobody has a plan.
    """
    planned: list[str] = []
    names = [name for name, _ in module.named_modules()]
    for prefix, part in module.named_modules():
        if any(prefix.startswith(f"{done}.") or not done for done in planned):
            continue
        plan = getattr(part, "tensor_parallel_plan", None)
        if plan is None:
            continue
        planned.append(prefix)
        for pattern, style in plan().items():
            wanted = re.compile(
                (f"{prefix}.{pattern}" if prefix else pattern).replace(".", r"\.").replace("*", r"[^.]+")
            )
            yield from ((name, style) for name in names if wanted.fullmatch(name))
    if not planned:
        raise ConfigurationError(
            f"mesh.tp={size} cuts layers, and {type(module).__name__} does not say which: give it a method "
            "tensor_parallel_plan (docs/expert-parallelism.md), or use dense=fsdp to share memory"
        )


def _cuts(module: nn.Module, styles: Mapping[str, Style], size: int) -> dict[nn.Parameter, TensorCut]:
    """How parameters are cut.

    Raises:
        ConfigurationError: they cannot be dealt out equally, or one is to be cut in two ways.
    """
    found: dict[nn.Parameter, TensorCut] = {}
    for name, style in styles.items():
        part = module.get_submodule(name)
        for own_name, share in style.shares(part).items():
            parameter = part.get_parameter(own_name)
            _require_equal(name, share, size)
            cut = TensorCut(dim=share.dim, sections=tuple(share.sections))
            if found.setdefault(parameter, cut) != cut or cut.size != parameter.shape[cut.dim]:
                raise ConfigurationError(f"{name}.{own_name} cannot be cut as the plan says: give it one way to be cut")
    return found


def _require_equal(name: str, share: Shares, size: int) -> None:
    for section in share.sections:
        units, rest = divmod(section, share.unit)
        if units % size or rest:
            raise ConfigurationError(
                f"mesh.tp={size} does not divide the {units} {share.of} of {name}: use a divisor, or another model"
            )
