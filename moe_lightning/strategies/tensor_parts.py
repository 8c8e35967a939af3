"""Dense parameters of which each rank of a tensor group keeps, updates and computes with a part (mesh.tp).

A model says by `tensor_parallel_plan` how its layers are cut. Parameters stay the objects that they are, with a part of
their values, so that optimizers and other code see plain tensors; fully_shard may deal the rows of these out. What is
not cut is on every rank of a tensor group, sees some positions of each sequence or everything, and gets the sum of the
gradients of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World, broadcast_
from moe_lightning.parallel.mesh import MeshShape, TensorCut
from moe_lightning.parallel.tensor import Embedding, Parted, PartedForward, Shares, Style, TensorRanks, undo_parts
from moe_lightning.state.tensors import cut_of, local, mark, part_of_whole
from moe_lightning.strategies.module_checks import cut_parameters
from moe_lightning.strategies.stage_cut import StageCut


def check_parts(axes: MeshShape, dense: str) -> None:
    """
    Raises:
        ConfigurationError: what tensor parallelism does not go with.
    """
    if axes.tp > 1 and dense not in ("ddp", "zero1", "fsdp", "hsdp"):
        raise ConfigurationError(
            f"mesh.tp={axes.tp} and dense={dense} do not go together: use dense=ddp, zero1, fsdp or hsdp"
        )


class TensorParts:
    """Cuts the layers of modules, and computes with their parts.

    Args:
        size: parts of each layer.

    Attributes:
        stages: of a pipeline, those on this rank; None without one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.stages: StageCut | None = None

    def _all_layers(self) -> AbstractContextManager[None]:
        """Inside, the module has the layers of all stages, because plans are of whole models."""
        return nullcontext() if self.stages is None else self.stages.whole()

    def begin(self, module: pl.LightningModule, world: World) -> None:
        """Leave this rank its part of what rank 0 has; collective. A module that an earlier training has left in parts
        keeps its own.

        Raises:
            ConfigurationError: a module without a plan, or layers that cannot be dealt out equally.
        """
        if not cut_parameters(module):
            for parameter, cut in self.cuts(module).items():
                if not parameter.is_meta:  # as those of other stages are
                    broadcast_(parameter.data, 0, world)
                    own = part_of_whole(parameter.data, cut, replace(world.row_cut.part, row=0, rows=1))
                    parameter.data = own.clone(memory_format=torch.contiguous_format)
                mark(parameter, cut)
        self.enter(module, world)

    def enter(self, module: pl.LightningModule, world: World) -> None:
        """Compute the parts that this rank has, with the ranks of a world; or everything, where it has that."""
        self.leave(module)
        if not any(has_index(parameter) for parameter in module.parameters()):
            return
        ranks = TensorRanks(world.axis_groups["tp"], world.row_cut.part.tensor, self._size)
        with self._all_layers():
            for name, style in _styles(module, self._size):
                self._cut_layer(module.get_submodule(name), style, ranks)

    def _cut_layer(self, part: nn.Module, style: Style, ranks: TensorRanks) -> None:
        block = None if self.stages is None else self.stages.number_of(part)
        if self.stages is not None and block is not None and style == Parted():
            self.stages.entering[block] = partial(ranks.own, dim=1)  # what comes to other stages are parts, too
        elif not (isinstance(style, Embedding) and part.weight.is_meta):  # else zeros, of which there is no sum to make
            PartedForward(part, style, ranks)

    def leave(self, module: pl.LightningModule) -> None:
        """Parts stay, and layers compute by themselves."""
        with self._all_layers():
            undo_parts(module)

    def forget(self, module: pl.LightningModule) -> None:
        """Parameters are whole again, those of other stages among them."""
        with self._all_layers():
            for parameter in module.parameters():
                mark(parameter, None)

    def cuts(self, module: pl.LightningModule) -> dict[nn.Parameter, TensorCut]:
        """How parameters are cut by tensor index, or will be.

        Raises:
            ConfigurationError: as of `begin`.
        """
        with self._all_layers():
            cuts = {parameter: cut_of(parameter) for parameter in module.parameters() if has_index(parameter)}
            known = {parameter: cut for parameter, cut in cuts.items() if cut is not None}
            return known or _cuts(module, dict(_styles(module, self._size)), self._size)

    @torch.no_grad()
    def sum_gradients(self, dense: Iterable[nn.Parameter], world: World) -> None:
        """Sum over ranks what nobody else does: gradients of parts over the ranks that hold them, or where torch's
        fully_shard does that, those of the rest over the ranks of a tensor group; collective.
        """
        in_rows = world.shard_group is not None
        group = world.axis_groups.get("tp") if in_rows else world.copy_group
        parameters = [p for p in dense if p.ndim and has_index(p) != in_rows]
        found = [local(p.grad) for p in parameters if p.grad is not None]
        for dtype in sorted({gradient.dtype for gradient in found}, key=str) if group is not None else ():
            gradients = [gradient for gradient in found if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, values in zip(gradients, parts, strict=True):
                gradient.copy_(values.view_as(gradient))


def has_index(parameter: nn.Parameter) -> bool:
    """Whether it is cut by tensor index."""
    cut = cut_of(parameter)
    return cut is not None and bool(cut.sections)


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
            cut = TensorCut(shape=tuple(parameter.shape), dim=share.dim, sections=tuple(share.sections))
            if found.setdefault(parameter, cut) != cut or sum(cut.sections) != parameter.shape[cut.dim]:
                raise ConfigurationError(f"{name}.{own_name} cannot be cut as the plan says: give it one way to be cut")
    return found


def _require_equal(name: str, share: Shares, size: int) -> None:
    for section in share.sections:
        units, rest = divmod(section, share.unit)
        if units % size or rest:
            raise ConfigurationError(
                f"mesh.tp={size} does not divide the {units} {share.of} of {name}: use a divisor, or another model"
            )
