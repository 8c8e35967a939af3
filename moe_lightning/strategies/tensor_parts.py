"""Dense parameters of which each rank of a tensor group keeps, updates and computes with a part (mesh.tp).

A model says by `tensor_parallel_plan` how its layers are cut. Parameters stay the objects that they are, with a part of
their values, so that optimizers and other code see plain tensors. What is not cut is on every rank, sees some positions
of each sequence or everything, and gets the sum of the gradients of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
from moe_lightning.modules.tensor_parallel import Embedding, Parted, PartedForward, Shares, Style, undo_parts
from moe_lightning.state.row_blocks import cut_of, hold, is_cut, joined, keep_part
from moe_lightning.state.table import State
from moe_lightning.strategies.module_checks import cut_parameters
from moe_lightning.strategies.row_moves import RowMoves, Rows
from moe_lightning.strategies.stage_state import StageState
from moe_lightning.strategies.worlds import Worlds


class Holder(Protocol):
    """The state of a rank, `RankState`, as far as parts of layers concern it."""

    @property
    def module(self) -> pl.LightningModule: ...

    @property
    def stages(self) -> StageState | None: ...

    def training_state(self) -> State: ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]: ...


def check_parts(axes: MeshShape, dense: str) -> None:
    """
    Raises:
        ConfigurationError: what tensor parallelism does not go with.
    """
    if axes.tp > 1 and dense != "ddp":
        raise ConfigurationError(f"mesh.tp={axes.tp} deals dense parameters out itself: use dense=ddp, not {dense}")


class TensorParts:
    """Cuts the layers of a rank's module, and makes them whole again.

    Args:
        state: of the rank.
        worlds: with the axes of their meshes.

    Attributes:
        stream: of keyed randomness, which is drawn for this rank's positions while layers are cut.
    """

    def __init__(self, state: Holder, worlds: Worlds) -> None:
        self._state, self._worlds = state, worlds
        self._cut: list[nn.Parameter] = []
        self.stream = SampleStream()

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds parts of layers only."""
        return bool(self._cut)

    def _all_layers(self) -> AbstractContextManager[None]:
        """Inside, the module has the layers of all stages, because plans are of whole models."""
        return nullcontext() if self._state.stages is None else self._state.stages.cut.whole()

    # ------------------------------------------------------------------ a world that stays

    def begin(self, world: World) -> None:
        """Leave this rank its part of what rank 0 has; collective. A module that an earlier training has left in parts
        keeps its own.

        Raises:
            ConfigurationError: a module without a plan, or layers that cannot be dealt out equally.
        """
        module, own = self._state.module, world.row_cut
        if not cut_parameters(module):
            for parameter, cut in self._cuts().items():
                if parameter.is_meta:  # another stage's
                    hold(parameter, parameter.data, cut)
                    continue
                broadcast_(parameter.data, 0, world)
                keep_part(parameter, cut, own.part, own.parts)
        self._enter(world)

    def _enter(self, world: World) -> None:
        """Compute the parts that this rank has, with the ranks of a world; or everything, where it has that."""
        module, own = self._state.module, world.row_cut
        self.leave()
        self._cut = [parameter for parameter in module.parameters() if is_cut(parameter)]
        if not self._cut:
            return
        ranks = TensorRanks(world.axis_groups["tp"], own.part, own.parts)
        with self._all_layers():
            for name, style in _styles(module, own.parts):
                self._cut_layer(module.get_submodule(name), style, ranks)
        self.draw_noise(world)

    def _cut_layer(self, part: nn.Module, style: Style, ranks: TensorRanks) -> None:
        stages = self._state.stages
        block = None if stages is None else stages.cut.number_of(part)
        if block is not None and style == Parted():  # the hidden states that come to other stages are parts, too
            assert stages is not None
            stages.cut.entering[block] = partial(ranks.own, dim=1)
        elif not (isinstance(style, Embedding) and part.weight.is_meta):  # else zeros, of which there is no sum to make
            PartedForward(part, style, ranks)

    def draw_noise(self, world: World) -> None:
        """Where layers are cut, keyed noise is that of this rank's positions."""
        if self.is_cut:
            self.stream.part, self.stream.parts = world.row_cut.part, world.row_cut.parts

    def _cuts(self) -> dict[nn.Parameter, TensorCut]:
        """How the parameters are cut, or will be."""
        module, size = self._state.module, self._worlds.axes.tp
        with self._all_layers():
            known = {parameter: cut for parameter in module.parameters() if (cut := cut_of(parameter)) is not None}
            return known or _cuts(module, dict(_styles(module, size)), size)

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
            hold(parameter, _whole(parameter.data, cut, world), None)
        for parameter in self._cuts():
            hold(parameter, parameter.data, None)  # of other stages
        self._enter(world)

    # ------------------------------------------------------------------ from world to world

    def leave(self) -> None:
        """The world has ended: parts stay, and layers compute by themselves."""
        with self._all_layers():
            undo_parts(self._state.module)
        self.stream.part, self.stream.parts = 0, 1

    def ways(self) -> dict[str, TensorCut]:
        """How parameters are cut, or will be, by name."""
        cuts = self._cuts()
        return {name: cuts[parameter] for name, parameter in self._state.module.named_parameters() if parameter in cuts}

    def fetch(self, sources: Sequence[tuple[str, int]], world: World) -> Rows:
        """What this rank will hold in a world, from those that have it; collective there.

        Args:
            sources: (name of a part, its rank in the new world); of a rank -1 nothing comes.
        """
        return RowMoves(self._state.training_state(), self.ways(), sources, world.row_cut.of_all(), world).exchange()

    @torch.no_grad()
    def install(self, rows: Rows | None, world: World) -> None:
        """Hold the parts that a world asks for, with these values; None: whoever restores them next gives them.

        Not collective.
        """
        state, own = self._state.training_state(), world.row_cut

        def part_of(tensor: Tensor, key: str, cut: TensorCut) -> Tensor:
            if rows is not None:
                return rows[key].to(tensor.device, memory_format=torch.contiguous_format)
            size = sum(last - first for first, last in cut.ranges(own.part, own.parts))
            return tensor.new_empty((*tensor.shape[: cut.dim], size, *tensor.shape[cut.dim + 1 :]))

        for name, cut in self.ways().items():
            parameter = state.dense[name]
            for scope, tensor in state.moments(parameter).items():
                self._state.state_of(parameter)[scope] = part_of(tensor, f"dense/{name}/{scope}", cut)
            values = part_of(parameter.data, f"dense/{name}/weight", cut)
            hold(parameter, values, cut if own.parts > 1 else None)
        self._enter(world)


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
