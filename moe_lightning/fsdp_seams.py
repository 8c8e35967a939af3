"""Undoing torch's fully_shard, for which torch has no public name as of 2.13: what it keeps private stands here alone.

`tests/unit/test_seams.py` says which name changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def can_be_undone() -> bool:
    """Whether this torch keeps what undoing needs."""
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
    """Let a module whose forward pass will not be called as a whole be the root of its parts."""
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def end_backward(module: nn.Module) -> None:
    """What ends the backward pass of a root: gradients that were left for later are summed over ranks, and everything
    is cut again; collective.
    """
    module._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]


def sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """The parts that fully_shard was called on."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


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
