"""Tensors of which a rank holds a part: sharded parameters, frozen base weights, optimizer states in host memory.

Sharded parameters are DTensors (rows over a shard group) or carry their sharding by tensor index (tensor parallelism);
here they are seen as the plain tensors of this rank. Of weights that adapters leave frozen, checkpoints hold a digest,
which a restore compares with that of the present weights.

Optimizer states of dense parameters may lie in host memory, where their updates run (ZeRO-Offload, Ren et al. 2021,
4.1); those of experts stay on their device, where placements move them. In a step gradients and weights are copied down
to page-locked memory and new weights up. Weights are copied down each time because restores, broadcasts and users
change those on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.mesh import Part, TensorCut
from moe_lightning.state.pieces import Block, StatePiece

_CUT = "moe_lightning_cut"


def cut_of(tensor: object) -> TensorCut | None:
    """Return the sharding of a tensor; None if it is whole."""
    known: TensorCut | None = getattr(tensor, _CUT, None)
    if known is None and isinstance(tensor, DTensor):
        return TensorCut(shape=tuple(tensor.shape))
    return known


def is_sharded(tensor: object) -> bool:
    """Return True if this rank holds only a part of it."""
    return isinstance(tensor, DTensor) or hasattr(tensor, _CUT)


def cuts_of(module: nn.Module) -> dict[str, TensorCut]:
    """Return the sharding of a module's parameters, under all of their names."""
    found = {name: cut_of(p) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: cut for name, cut in found.items() if cut is not None}


@contextmanager
def preserved_marks(module: nn.Module) -> Iterator[None]:
    """Mark the parameters that take the places of others in a module as those were, and set their attributes."""
    cuts, before = cuts_of(module), {name: dict(vars(p)) for name, p in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        _set_attributes(parameter, before.get(name, {}))
        mark(parameter, cuts.get(name))


def replacement(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter with these values to take the place of another one: frozen as that is, and with the attributes
    that users set to choose groups of optimizers; without a mark.
    """
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    _set_attributes(other, vars(parameter))
    return other


def _set_attributes(parameter: nn.Parameter, attributes: Mapping[str, object]) -> None:
    kept = {_CUT, "_is_param", *vars(parameter)}  # torch has _is_param in DTensors
    vars(parameter).update({name: value for name, value in attributes.items() if name not in kept})


def mark(parameter: nn.Parameter, cut: TensorCut | None) -> None:
    """Note that a parameter is cut by tensor index, or one of another stage in any way; or that it is not."""
    parameter.__dict__.pop(_CUT, None)
    if cut is not None and (cut.sections or parameter.is_meta):
        setattr(parameter, _CUT, cut)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the tensor of which this rank may hold a part."""
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
    """Yield the blocks of a part of a tensor: their slices in the tensor that holds the part, and in the whole one."""
    at = 0
    for offsets, sizes in cut.blocks(part):
        begins = (at if dim == cut.dim else 0 for dim in range(len(sizes)))
        yield (
            tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)),
            Block(offsets=offsets, sizes=sizes, whole=cut.shape),
        )
        at += sizes[cut.dim]


def pieces_of(key: str, tensor: Tensor, cut: TensorCut, part: Part) -> Iterator[StatePiece]:
    """Yield the pieces of a tensor that holds a part of another one."""
    for here, block in blocks_of(cut, part):
        yield StatePiece(key=key, tensor=tensor[here], block=block)


def rows_of(key: str, tensor: Tensor, stack: ExpertStack) -> Iterator[StatePiece]:
    """Yield the experts that a tensor with a row for each slot holds, as rows of one with a row for each expert."""
    for slot, expert in stack.held():
        row = tensor[slot : slot + 1]
        yield StatePiece(key=key, tensor=row, block=Block.of_rows(row.shape, expert, stack.num_experts))


def home_of_moments(parameter: nn.Parameter, experts: Container[nn.Parameter], *, on_host: bool) -> torch.device:
    """Return the device of the optimizer's states of a parameter.

    Args:
        experts: parameters whose states stay beside them.
        on_host: those of the others lie on the host, wherever the parameters are.
    """
    return torch.device("cpu") if on_host and parameter not in experts else parameter.device


def part_of_whole(whole: Tensor, cut: TensorCut, part: Part) -> Tensor:
    """Return the elements of a part of a tensor."""
    found = [whole[block.slices] for _, block in blocks_of(cut, part)]
    if not found:
        return whole.new_empty(cut.shape_of(part))
    return found[0] if len(found) == 1 else torch.cat(found, dim=cut.dim)


def swap_parameters(optimizer: Optimizer, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters of an optimizer by others, which get their states."""
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


BASE_DIGEST = "base_digest"
"""Name of an int64 parameter [S, 1] of experts, and of a buffer [1] of the module with adapters."""


def digest_of(tensors: Iterable[Tensor]) -> int:
    """xxh3 of the bits of tensors in order, as a signed integer of 64 bits."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        data: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        state.update(data)
    value: int = state.intdigest()
    return value - (1 << 64) if value >= 1 << 63 else value


def frozen_base(module: nn.Module) -> frozenset[nn.Parameter]:
    """The parameters that adapters leave as they are, frozen adapters left out; none of a module without any."""
    is_adapted = any(name.rpartition(".")[2] == BASE_DIGEST for name, _ in module.named_buffers())
    named = module.named_parameters() if is_adapted else ()
    return frozenset(p for name, p in named if not (p.requires_grad or name.rpartition(".")[2].startswith("lora_")))


def is_digest(key: str) -> bool:
    """Return True if a key of the state table is that of a digest."""
    name = key.rpartition("/")[2] if key.startswith("expert/") else key.rpartition("/")[0]
    return name.rpartition("/")[2].rpartition(".")[2] == BASE_DIGEST


def require_same_base(saved: Tensor, here: Tensor, key: str, where: str) -> None:
    """
    Raises:
        CheckpointError: the adapters were trained beside other weights.
    """
    if not torch.equal(saved.cpu(), here.cpu()):
        raise CheckpointError(
            f"the adapters of {where} were trained beside other base weights ({key} differs): give the base model, the "
            "precision and the kind of adapter that they were trained with"
        )


class Updates:
    """Parameters as optimizers see them in an update: plain tensors, the blocks of those that are sharded, with plain
    gradients. Updates that work element by element are the same there, take no dispatch of DTensors, and may be fused
    or batched with those of parameters that are whole. States stay plain tensors of the block, under the parameter.

    Args:
        on_host: whether dense parameters that lie on a device are seen as copies on the host; on CPUs that changes
            nothing.

    Attributes:
        on_host: as given.
    """

    def __init__(self, *, on_host: bool) -> None:
        self.on_host = on_host
        self._copies = WeakTensorKeyDictionary()

    @contextmanager
    def around(self, optimizer: Optimizer, experts: Collection[nn.Parameter]) -> Generator[None, None, None]:
        """Let the optimizer see what it is to update, inside.

        Args:
            experts: parameters that are updated where they are.

        Raises:
            ConfigurationError: the system lets this process lock too little memory.
        """
        copies = self._host_copies(optimizer, experts) if self.on_host else {}
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        blocks = {p: _block_of(p) for p in parameters if hasattr(p, "placements") and p not in copies}
        others = copies | blocks
        swap_parameters(optimizer, others)
        try:
            yield
        finally:
            swap_parameters(optimizer, {other: p for p, other in others.items()})
        with torch.no_grad():
            for parameter, copy in copies.items():
                local(parameter.detach()).copy_(copy, non_blocking=True)

    @torch.no_grad()
    def _host_copies(self, optimizer: Optimizer, experts: Collection[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Copies, on the host and with gradients, of the dense parameters that are about to change."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in _dense(optimizer, experts):
            if parameter.grad is None or not lies_on_a_device(parameter):
                continue
            copy = copies[parameter] = self._copy_of(parameter)
            gradient = local(parameter.grad)
            assert copy.grad is not None
            copy.copy_(local(parameter.detach()), non_blocking=True)
            if gradient.is_sparse or copy.grad.is_sparse:  # of an embedding; there is no room of a known size for it
                copy.grad = gradient.cpu()
            else:
                copy.grad.copy_(gradient, non_blocking=True)
            state = optimizer.state.get(parameter, {})
            state.update({n: v.cpu() for n, v in state.items() if isinstance(v, Tensor)})  # made at once, as Adagrad's
        for device in {parameter.device for parameter in copies}:
            if device.type != "cpu":
                event = torch.Event(device=device)
                event.record()
                event.synchronize()
        return copies

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """With room for the gradient; its values are those of an earlier step, or none."""
        own, known = local(parameter.detach()), self._copies.get(parameter)  # type: ignore[no-untyped-call]
        if known is None or (known.shape, known.dtype) != (own.shape, own.dtype):
            weight, gradient = (page_locked(own.shape, own.dtype) for _ in range(2))
            known = self._copies[parameter] = nn.Parameter(weight)
            known.grad = gradient
        assert isinstance(known, nn.Parameter)
        return known


@contextmanager
def loading(optimizer: Optimizer, experts: Collection[nn.Parameter]) -> Generator[None, None, None]:
    """Inside, `load_state_dict` takes dense parameters to lie on the host, and leaves their states there."""
    here = {p: nn.Parameter(torch.empty(0, dtype=p.dtype), p.requires_grad) for p in _dense(optimizer, experts)}
    swap_parameters(optimizer, here)
    try:
        yield
    finally:
        swap_parameters(optimizer, {empty: p for p, empty in here.items()})


def lies_on_a_device(parameter: nn.Parameter) -> bool:
    """Return True if an update on the host needs copies of the parameter."""
    return parameter.device.type not in ("cpu", "meta")


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory, with no values, that a device copies to and from while the host goes on.

    Raises:
        ConfigurationError: the system lets this process lock less.
    """
    try:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise ConfigurationError(
            f"this process may not lock {math.prod(shape) * dtype.itemsize} bytes of memory for copies from and to the "
            f"GPU ({str(error).splitlines()[0]}): raise the limit of locked memory (ulimit -l)"
        ) from error


def _dense(optimizer: Optimizer, experts: Collection[nn.Parameter]) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p not in experts]
