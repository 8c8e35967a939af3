"""Private parts of torch that this library uses, apart from those of `fully_shard` in `compat.fsdp`.

Each function says why it is needed. `tests/unit/test_compat.py` has a canary for each private name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import CodeType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed import ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from typing_extensions import override

__all__ = ["AnyDropout", "tree_leaves", "tree_map"]
# AnyDropout: base class of all dropout modules; no public class is common to them.
# tree_leaves, tree_map: torch has no public pytree as of 2.13.

# ---------------------------------------------------------------------- process groups


def reset_group_names() -> None:
    """Restart the counter by which torch names groups: a failed attempt leaves it different on different ranks."""
    distributed_c10d._world.group_count = 0


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives. For devices other than CPU and CUDA torch's function only warns."""
    if {"cpu", "cuda"} & {device.type for device in group._device_types}:
        distributed_c10d._set_pg_timeout(timeout, group)
    else:
        group.set_timeout(timeout)


def set_nccl_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in `ProcessGroupNCCL.Options`: torch warns if it differs from the group's."""
    options._timeout = timeout


def default_store() -> Store:
    """Return the store of the default group. No public name gives it."""
    return distributed_c10d._get_default_store()


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for tensors of a device. The public name is that of all backends of a group."""
    return group._get_backend(device).name()


def backend_error(group: ProcessGroup, device: torch.device) -> str | None:
    """Return the error state that a backend records instead of raising; None if it has none. Only NCCL reports it."""
    state = getattr(group._get_backend(device), "get_error", None)
    return None if state is None else str(state().name)


@contextmanager
def bracket(group: ProcessGroup, device: torch.device) -> Generator[None, None, None]:
    """Run NCCL calls of several communicators as one: ncclGroupStart and ncclGroupEnd have no public name."""
    backend: Any = group._get_backend(device)
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


def is_collective(code: CodeType) -> bool:
    """Return True for the code of a collective of torch, which waits for other ranks while it runs: it has a local
    `work`, and functions that build or destroy groups have none. No public name tells them apart.
    """
    return code.co_filename == distributed_c10d.__file__ and "work" in code.co_varnames


def num_collectives(group: ProcessGroup) -> int:
    """Return the number of collectives that this rank has begun on a group. No public name gives it."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def recorded_collectives(since_ns: int) -> list[dict[str, Any]]:
    """Return the last collectives of this process from torch's flight recorders, in the order of their begin: NCCL has
    one of its own. No public name gives them.

    Args:
        since_ns: nanoseconds since the epoch; earlier ones are left out.
    """
    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # the second one in builds with NCCL only
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            found += json.loads(dump(True, False)).get("entries", ())
    key = "time_created_ns"
    return sorted((entry for entry in found if entry[key] >= since_ns), key=lambda entry: entry[key])


def replace_pickler(pickler: type, unpickler: type) -> None:
    """Serialize objects of all collectives of this process by other classes. torch has no option for it."""
    assert hasattr(distributed_c10d, "_pickler"), "torch serializes objects in another way"
    assert hasattr(distributed_c10d, "_unpickler"), "torch serializes objects in another way"
    distributed_c10d._pickler, distributed_c10d._unpickler = pickler, unpickler  # type: ignore[assignment]


# ---------------------------------------------------------------------- checkpoints


def storage_info(path: str, offset: int, length: int) -> Any:
    """Return a record of the stock format: the file, offset and length in bytes of one item."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


# ---------------------------------------------------------------------- tensors


@contextmanager
def without_memory() -> Generator[None, None, None]:
    """Let tensors created inside have shapes, strides and storages, but no memory; those that exist may be used, too.
    The class has no public name. Imported on first use, since it imports much else.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place in one launch by a scalar tensor. The public name would synchronize with the host."""
    torch._foreach_mul_(tensors, factor)


stock_norm: Callable[..., Tensor] = torch.no_grad()(clip_grad._get_total_norm.__wrapped__)  # type: ignore[attr-defined]
"""`torch.nn.utils.get_total_norm`, which `clip_norms_by` leaves as it is."""


def clip_norms_by(
    counted: Callable[[list[Tensor], float], list[Tensor]],
    scale: Callable[[list[nn.Parameter], Tensor, float], None],
) -> None:
    """Let `clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_` of `torch.nn.utils` clip by another norm
    until `clip_norms_as_usual`, in this process and under whatever name they were imported. torch has no public hook.

    Args:
        counted: returns the tensors whose norm replaces that of given ones, for an order of the norm.
        scale: scales the gradients of parameters, given their norm and the largest one, where some are DTensors.
    """
    stock_scale: Any = _clipping_functions[1].__wrapped__

    def total_norm(tensors: Any, norm_type: float = 2.0, *options: Any, **named: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return stock_norm(counted(tensors, float(norm_type)), norm_type, *options, **named)

    def clip(parameters: Any, max_norm: float, total_norm: Tensor, *options: Any, **named: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(isinstance(p.grad, DTensor) for p in parameters):
            scale(parameters, total_norm, float(max_norm))
        else:
            stock_scale(parameters, max_norm, total_norm, *options, **named)

    _let_clipping_call(total_norm, clip)


def clip_norms_as_usual() -> None:
    """Undo `clip_norms_by`."""
    _let_clipping_call(*(function.__wrapped__ for function in _clipping_functions))


_clipping_functions: Any = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_


def _let_clipping_call(*bodies: Callable[..., object]) -> None:
    """Replace what torch's functions call inside of `no_grad`: modules may have imported the functions by name."""
    for function, body in zip(_clipping_functions, bodies, strict=True):
        (cell,) = function.__closure__
        cell.cell_contents = body


def version_of(tensor: Tensor) -> int:
    """Return the count of operations in place on a tensor, which detects changes."""
    return tensor._version


def is_in_backward() -> bool:
    """Return True inside of a backward pass, where activation checkpointing runs forward passes again."""
    return torch._C._current_graph_task_id() != -1


def has_hooks(tensor: Tensor) -> bool:
    """Return True if `register_hook` or `register_post_accumulate_grad_hook` was called on a tensor, other than by
    `watch` of wandb, whose hooks only read. No public name says so.
    """
    hooks = (tensor._backward_hooks or {}) | (tensor._post_accumulate_grad_hooks or {})
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] != "wandb" for hook in hooks.values())


def is_view(tensor: Tensor) -> bool:
    """Return True if a tensor is a view. No public name says so."""
    return tensor._base is not None


GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
"""The operation of `torch.nn.functional.grouped_mm`. No public name gives it."""


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which each operation of torch on plain tensors, in this thread and in backward passes begun there,
    passes through `during`; inside of that it does not. What is compiled stays so. The base class has no public name.
    """

    supports_higher_order_operators = True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if types else self.during(func, args, kwargs or {})

    def during(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what func(*args, **kwargs) returns."""
        raise NotImplementedError


# ---------------------------------------------------------------------- loss scaling


class SharedScaler(GradScaler):
    """Gradient scaler that divides gradients in another way: torch's divides those in the optimizer's groups, of which
    a rank may have a share only, and knows the overflows of one process. torch has no public hook for either.
    """

    def unscaled(self, optimizer: Optimizer, inverse: Tensor) -> Tensor:
        """Divide the gradients of an optimizer, given one over the scale, and return 1.0 if any has overflowed."""
        raise NotImplementedError

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() was called before on this optimizer since the last update().")
        assert self._scale is not None, "a loss was scaled"
        found = self.unscaled(optimizer, self._scale.double().reciprocal().float())
        state["found_inf_per_device"], state["stage"] = {found.device: found}, OptState.UNSCALED

    @staticmethod
    def divide(gradients: list[Tensor], inverse: Tensor, found: Tensor) -> None:
        """Multiply gradients in place, and set `found` to 1.0 if any is not finite, in one launch for each dtype.

        Raises:
            ValueError: gradients in float16.
        """
        # in place, as torch: `coalesce` would make a copy
        values = [g._values() if g.is_sparse else g for g in gradients]
        if any(value.dtype is torch.float16 for value in values):
            raise ValueError("Attempting to unscale FP16 gradients.")  # as torch
        for dtype in sorted({value.dtype for value in values}, key=str):
            same = [value for value in values if value.dtype is dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """True after `unscale_`, until the scale is updated."""
        return self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """True if a gradient has overflowed, after `unscale_`; False before. Waits for the device."""
        return any(bool(found) for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())

    def forget_step(self) -> None:
        """Forget an aborted step, which will be repeated."""
        self._per_optimizer_states.clear()


# ---------------------------------------------------------------------- modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters, to be changed in place. Public names give copies of the dictionary."""
    return module._parameters


def replace_parameters(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Give a shallow copy of a module a dictionary of its own: assignment by name would change the original too."""
    module._parameters = parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers, to be changed in place. Public names give copies of the dictionary."""
    return module._buffers


class Float32Module(nn.Module):
    """Module some of whose tensors stay in float32, bit by bit, when it is converted as by `half()`, `to(dtype)` or a
    precision plugin, and when `load_state_dict(assign=True)` gives others. torch has no public hook for conversions.

    Attributes:
        in_float32: names of these tensors, which may be missing.
    """

    in_float32: ClassVar[tuple[str, ...]] = ()

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {
            name: t.data for t_of in (self._parameters, self._buffers) for name, t in t_of.items() if t is not None
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in before.keys() & set(self.in_float32):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != before[name].dtype:
                tensor.data = before[name].to(tensor.device)
        return self

    def before_loading(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Called before `load_state_dict` gives this module its tensors; torch's public hook cannot be pickled."""

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.before_loading(state_dict, prefix)
        before = {name: getattr(self, name).dtype for name in self.in_float32 if hasattr(self, name)}
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, dtype in before.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype:
                values = tensor.detach().to(dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                setattr(self, name, nn.Parameter(values, tensor.requires_grad) if is_parameter else values)


def is_compiled(module: nn.Module) -> bool:
    """Return True if `module.compile()` was called, or it came from torch.compile. No public name says so."""
    wrapper = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())  # its import takes seconds
    return module._compiled_call_impl is not None or isinstance(module, wrapper)


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Exclude parameters and buffers from DDP's broadcasts and sums. torch documents no other way."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))  # type: ignore[no-untyped-call]


ITERATION = ("__iter__", "_get_iterator")
"""Methods of a DataLoader that make its iterator; a loader that overrides one yields batches of its own. The second one
is not public, but torch_geometric's loaders override it.
"""


def drop_workers(loader: DataLoader[Any]) -> None:
    """Make a loader with persistent workers start new ones at its next iterator. torch has no public way as of 2.13."""
    loader._iterator = None
