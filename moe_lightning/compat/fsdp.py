"""Private parts of torch's `fully_shard` that this library uses.

`tests/unit/test_compat.py` has a canary for each private name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

_MANUAL = "manual_backward_finalization_active"
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def can_be_undone() -> bool:
    """Return True if this torch has the names that `undo_fully_shard` needs."""
    return hasattr(FSDPModule, "_orig_cls_mro_index")


def undo_fully_shard(module: nn.Module) -> None:
    """Give every module its class and hooks back; parameters stay the DTensors that they are between steps."""
    for part in list(sharded_modules(module)):
        state: Any = part._get_fsdp_state()
        for group in state._fsdp_param_groups:
            _undo_group(group)
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for owner in state._modules:
            _module_state_mapping.pop(owner, None)
            for name in (STATE_KEY, REGISTRY_KEY):
                owner.__dict__.pop(name, None)
            owner.__class__ = type(owner).__mro__[type(owner)._orig_cls_mro_index]
    for owner in module.modules():
        for name in _MARKS:
            owner.__dict__.pop(name, None)


def begin_by_hand(module: nn.Module) -> None:
    """Initialize a module whose forward pass will not be called as a whole as the root of its parts."""
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def end_backward(module: nn.Module) -> None:
    """End the backward pass of a root: reduce the deferred gradients over ranks, and shard all parameters again;
    collective.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if getattr(state._state_ctx, _MANUAL, False) is None:  # torch 2.15 sets it in the backward pass of a unit alone
        setattr(state._state_ctx, _MANUAL, False)
    state._root_post_backward_final_callback()


def sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Return the modules that fully_shard was called on."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def resting_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module as they are between steps: for those that are gathered now, the rows."""
    shards = {
        getattr(parameter, "_unsharded_param", None): parameter.sharded_param
        for unit in sharded_modules(module)
        for parameter in _parameters_of(unit)
    }
    for parameter in module.parameters():
        yield shards.get(parameter, parameter)


def drop_accumulated(module: nn.Module) -> None:
    """Drop the gradients of backward passes whose sum over ranks was left to a later one."""
    for unit in sharded_modules(module):
        for parameter in _parameters_of(unit):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it was gathered before
                parameter._unsharded_param.grad = None


def keep_freezing(unit: nn.Module) -> None:
    """Freeze and unfreeze rows as a user does gathered values, which last until the end of a step only.

    Args:
        unit: that fully_shard was called on, before its first forward pass.
    """
    for parameter in _parameters_of(unit):
        _keep_freezing(parameter)


def gather_in(unit: nn.Module, dtype: torch.dtype, chosen: Callable[[Sequence[tuple[nn.Module, str]]], bool]) -> None:
    """Gather some float32 parameters of a unit in another dtype; their rows and gradients stay as they are.

    MixedPrecisionPolicy is for all parameters of a unit, those that autocast leaves alone among them; one for each
    would do.

    Args:
        unit: that fully_shard was called on, before its first forward pass.
        chosen: returns True for a parameter that is meant, given the modules that have it and its name in each.
    """
    for parameter in _parameters_of(unit):
        if chosen(_owners_of(parameter)):
            _gather_in(parameter, dtype)


def _parameters_of(unit: Any) -> Iterator[Any]:
    state = unit._get_fsdp_state()
    return (parameter for group in state._fsdp_param_groups for parameter in group.fsdp_params)


def _owners_of(parameter: Any) -> Sequence[tuple[nn.Module, str]]:
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return (info.module, info.param_name), *shared


def _gather_in(parameter: Any, dtype: torch.dtype) -> None:
    kind = type(parameter)

    def init_dtype_attrs(policy: object) -> None:
        kind.init_dtype_attrs(parameter, policy)
        if parameter.orig_dtype == torch.float32:
            parameter.param_dtype = dtype

    def init_unsharded_param() -> None:
        kind.init_unsharded_param(parameter)
        parameter.unsharded_param.grad_dtype = parameter.orig_dtype  # all gradients of a unit are summed together

    parameter.init_dtype_attrs, parameter.init_unsharded_param = init_dtype_attrs, init_unsharded_param


def _keep_freezing(parameter: Any) -> None:
    kind = type(parameter)
    was_trained: bool | None = None  # when it was gathered

    def to_unsharded() -> None:
        nonlocal was_trained
        kind.to_unsharded(parameter)
        was_trained = parameter.sharded_param.requires_grad

    def to_sharded() -> None:
        nonlocal was_trained
        if was_trained is not None and parameter.unsharded_param.requires_grad != was_trained:
            parameter.sharded_param.requires_grad_(not was_trained)
        was_trained = None
        kind.to_sharded(parameter)

    parameter.to_unsharded, parameter.to_sharded = to_unsharded, to_sharded


def _undo_group(group: Any) -> None:
    saving, loading = (
        group._module_to_pre_save_state_dict_hook_handle,
        group._module_to_pre_load_state_dict_hook_handle,
    )
    for handle in (*saving.values(), *loading.values()):
        handle.remove()
    for parameter in group.fsdp_params:
        parameter._post_load_hook_handle.remove()
        parameter.to_sharded()
