"""Fully sharded dense parameters by torch's `fully_shard`: gradients are sums, and sharding can be undone.

Units, which are gathered together, are the elements of ModuleLists (the blocks of a transformer) and the rest of the
module: embeddings, the last norm, the head. Experts are not sharded. Under precision="bf16-mixed" the parameters of
Linear layers, which autocast rounds to bfloat16 anyway, are gathered in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from moe_lightning.compat import private_torch
from moe_lightning.compat.fsdp import (
    begin_by_hand,
    can_be_undone,
    end_backward,
    gather_in,
    keep_freezing,
    sharded_modules,
    undo_fully_shard,
)
from moe_lightning.compat.private_lightning import trainer_of
from moe_lightning.compat.private_torch import tree_map
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.state.tensors import replacement
from moe_lightning.strategies.checks import require_automatic_optimization, require_dense_gradients

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_HANDLES = "_moe_lightning_handles"


def shard_dense(module: pl.LightningModule, experts: Collection[nn.Parameter], world: World) -> None:
    """Shard the dense parameters of a module, which become DTensors; those on the meta device get memory without
    values.

    Args:
        experts: parameters that are not sharded; scalars are not sharded either.

    Raises:
        ConfigurationError: manual optimization, a unit whose parameters have several dtypes, sparse gradients, hooks of
            parameters, or a torch that cannot undo it.
    """
    if not can_be_undone():
        raise ConfigurationError(f"dense=fsdp and hsdp need torch 2.13, not {torch.__version__}: use dense=zero1")
    require_automatic_optimization(
        module, "dense=fsdp and hsdp gather parameters for a step", cure="dense=ddp or zero1"
    )
    require_dense_gradients(module, "dense=fsdp or hsdp")
    require_no_hooks(module, experts)
    ignored = {*experts, *(p for p in module.parameters() if p.ndim == 0)}
    mesh = _device_mesh(world)
    parts = list(units(module, ignored))
    for unit in parts:
        _keep(unit, unit.register_forward_hook(_own_outputs))
    autocasts = _autocasts(module)
    for unit in (*parts, module):
        materialise(unit, world.device)
        _check_dtypes(unit, ignored)
        _make_contiguous(unit, ignored)
        fully_shard(unit, mesh=mesh, ignored_params=ignored)
        keep_freezing(unit)
        if autocasts:
            gather_in(unit, torch.bfloat16, _are_of_linear)
    sharded = list(sharded_modules(module))
    if _gathers_ahead(world.device):
        for part, following in pairwise(sharded[1:]):
            part.set_modules_to_forward_prefetch([following])
    for part in sharded:  # ranks have weighed their losses: nothing is divided
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sums
    for layer in module.modules() if autocasts else ():
        if type(layer) is nn.Linear:
            _keep(layer, layer.register_forward_pre_hook(_require_autocast))
    for name in _STEPS:
        setattr(module, name, GatheringStep(module, name))


def _autocasts(module: pl.LightningModule) -> bool:
    trainer = trainer_of(module)
    return trainer is not None and str(trainer.precision) == "bf16-mixed"


def _are_of_linear(owners: Sequence[tuple[nn.Module, str]]) -> bool:
    """True if a parameter is used in the products of Linear layers only; a subclass may use it otherwise, and a layer
    may have others, as of `weight_norm`.
    """
    return all(type(owner) is nn.Linear and name in ("weight", "bias") for owner, name in owners)


def _require_autocast(layer: Any, inputs: tuple[Any, ...]) -> None:
    """
    Raises:
        ConfigurationError: it computes in float32, where its weights were rounded.
    """
    if layer.weight.dtype == torch.bfloat16 and not torch.is_autocast_enabled(layer.weight.device.type):
        raise ConfigurationError(
            "a Linear layer is called outside of autocast, and under precision='bf16-mixed' dense=fsdp and hsdp gather "
            "its weights in bfloat16: call it inside of trainer.precision_plugin.forward_context(), or make it a "
            "subclass of Linear, which is gathered in float32"
        )


def _keep(part: nn.Module, handle: RemovableHandle) -> None:
    """Record the handle of a hook, which is removed when sharding is undone."""
    part.__dict__.setdefault(_HANDLES, []).append(handle)


def _gathers_ahead(device: torch.device) -> bool:
    """True if a unit is gathered while the one before it computes. torch does so by itself as long as the host runs
    ahead, but the host waits for the counts of every MoE layer; on CPUs nothing overlaps.
    """
    return device.type != "cpu"


def is_fully_sharded(module: nn.Module) -> bool:
    """True if `fully_shard` was applied to a module."""
    return isinstance(module, FSDPModule)


@contextmanager
def gathered(module: nn.Module) -> Generator[None, None, None]:
    """Keep all units gathered inside, for several forward and backward passes in any order, which may be interrupted;
    then sum the gradients that exist over ranks once. Collective.
    """
    assert isinstance(module, FSDPModule)

    def reduce(*, now: bool) -> None:
        module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now)
        module.set_is_last_backward(now)

    begin_by_hand(module)
    module.set_reshard_after_forward(False)
    reduce(now=False)
    try:
        for part in sharded_modules(module):
            part.unshard()
        yield
    finally:
        reduce(now=True)
    end_backward(module)


def require_no_hooks(module: nn.Module, experts: Collection[nn.Parameter]) -> None:
    """
    Args:
        experts: parameters that are not sharded; scalars are not sharded either.

    Raises:
        ConfigurationError: a hook of a sharded parameter, whose gradient is not one of autograd's.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim and parameter not in experts and private_torch.has_hooks(parameter):
            raise ConfigurationError(
                f"{name} has a hook of its gradient, which dense=fsdp and hsdp never call: use dense=ddp or zero1, or "
                "change the gradient in on_before_optimizer_step"
            )


def reshard_units(module: nn.Module) -> None:
    """Reshard all units after a forward pass without a backward pass, also inside of a step method."""
    assert isinstance(module, FSDPModule)
    begin_by_hand(module)  # before the first forward pass
    module.reset_iter_state()


def undo_shard(module: nn.Module) -> None:
    """Restore the class and the methods of every module; parameters stay the DTensors that they are between steps."""
    for part in module.modules():
        for handle in part.__dict__.pop(_HANDLES, ()):
            handle.remove()
    undo_fully_shard(module)
    for step in _STEPS:
        if isinstance(ours := module.__dict__.get(step), GatheringStep):  # a method that the user has set since stays
            delattr(module, step)
            if getattr(ours.own, "__func__", None) is not getattr(type(module), step):
                setattr(module, step, ours.own)  # the user had set it on this object


class GatheringStep:
    """Step method of a module as `fully_shard` needs it, and the method as it was while nothing is sharded: a user may
    have wrapped it.

    Attributes:
        own: the method as it was.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.own: Callable[..., Any] = getattr(module, name)
        update_wrapper(self, self.own)
        self._module = module
        register_fsdp_forward_method(module, name)
        self._registered: Callable[..., Any] = getattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._registered if is_fully_sharded(self._module) else self.own)(*args, **kwargs)


def replace_parameters(module: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters of a module under all of their names."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in others:
                setattr(owner, name, others[parameter])


def units(module: nn.Module, ignored: Collection[nn.Parameter]) -> Iterator[nn.Module]:
    """Yield the units that are gathered together: the elements of the outermost ModuleLists that are called, have
    parameters, and share none with the rest of the module.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    chosen = list(_elements(module))
    inside = {part: unit for unit in chosen for part in unit.modules()}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(owner, module))
    for unit in dict.fromkeys(chosen):  # some are called several times
        own = [p for p in unit.parameters() if p not in ignored]
        if own and all(owners[p] == {unit} for p in own):
            yield unit


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        for element in child if isinstance(child, nn.ModuleList) else [child]:
            is_called = type(element).forward is not nn.Module.forward
            if isinstance(child, nn.ModuleList) and is_called:
                yield element
            else:
                yield from _elements(element)


def _device_mesh(world: World) -> DeviceMesh:
    kind = world.device.type
    if "copy" not in world.groups:
        return DeviceMesh.from_group(world.groups["shard"], kind, mesh_dim_names=("shard",))
    groups, part = [world.groups["copy"], world.groups["shard"]], world.row_cut.part
    mesh = torch.tensor(world.shards).view(-1, part.tensors, part.rows)[:, part.tensor]
    mesh += dist.get_rank() - world.rank  # of a stage, whose ranks are counted from 0
    return DeviceMesh.from_group(groups, kind, mesh=mesh, mesh_dim_names=("copy", "shard"))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate memory without values for parameters on the meta device."""
    plain = [p for p in module.parameters() if p.is_meta and not isinstance(p, DTensor)]
    replace_parameters(module, {p: replacement(p, torch.empty_like(p, device=device)) for p in plain})


def _own_outputs(unit: nn.Module, arguments: object, output: object) -> object:
    """Copy the views that a unit returns: an operation in place on a view would drop the hook that gathers the unit for
    the backward pass.
    """

    def own(value: object) -> object:
        return value.clone() if isinstance(value, Tensor) and private_torch.is_view(value) else value

    return tree_map(own, output)


def _make_contiguous(unit: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    for parameter in unit.parameters():
        if parameter not in ignored and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()  # fully_shard shards no other


def _check_dtypes(unit: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    dtypes = {p.dtype for p in unit.parameters() if p not in ignored and not isinstance(p, DTensor)}
    if len(dtypes) > 1:
        named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigurationError(
            f"the dense parameters of a {type(unit).__name__} are {named}, and fully_shard gathers those of one dtype "
            "together: use precision='32-true' or 'bf16-mixed', or dense=zero1"
        )
