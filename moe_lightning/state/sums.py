"""Sums over the bits of a rank's state: does it differ between ranks, and has it changed without being written?

Every tensor is summed by its bits, as integers modulo 2^64, so one flipped bit always changes its sum.

Between ranks all sums become one number: of a tensor with h holders the first one adds (h - 1) times the sum and every
other one subtracts it, each times an odd number of the tensor's name. Over all ranks that is zero modulo 2^64 if all
replicas are alike, and not if one bit differs. One number is sent a comparison; names and sums follow if it is not
zero. Differences that cancel in the sum of a tensor stay unseen.

Between two moments of a rank sums are compared where nothing has written the tensors: torch counts the writes to a
tensor, except those through `tensor.data`. So memory that changes by itself is found on the rank that holds it, be it
the only one, and where two ranks hold a tensor it is known whose is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_lightning.compat import private_torch
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.parallel.collectives import all_gather_json, fingerprint
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.state.pieces import parse_dense_key
from moe_lightning.state.table import State
from moe_lightning.state.tensors import local
from moe_lightning.state.transfer import install, transfer

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes."""

_WIDE = 8  # bytes of the integers that are summed where a row is a multiple of them

GRADIENT = "the gradient of "
"""Beginning of the names of gradients."""


@dataclass(frozen=True, kw_only=True)
class StateUnit:
    """Tensors of this rank that are compared as one.

    Attributes:
        name: of a dense tensor, or "expert {e} of MoE layer {l}"; the same on all holders, and of nothing else.
        holders: the ranks that hold it, alike.
        sum: int64 scalar, of its bits.
        tensors: its live tensors, in an order that all holders share.
        writes: address of each tensor's memory, and how often that was written.
    """

    name: str
    holders: tuple[int, ...]
    sum: Tensor
    tensors: Callable[[], Sequence[Tensor]]
    writes: tuple[tuple[int, int], ...]

    @cached_property
    def factor(self) -> int:
        """Factor of the sum on any rank but the first holder, modulo 2^64."""
        return -(fingerprint(self.name) | 1)


class Sums:
    """Sums of the units of a rank at one moment.

    Args:
        units: of this rank.
        world: the ranks.

    Attributes:
        units: as given, those on one device together.
        values: int64 [units], on the device of the world.
    """

    def __init__(self, units: Sequence[StateUnit], world: World) -> None:
        self.units = sorted(units, key=_device)
        stacks = [torch.stack([unit.sum for unit in group]) for _, group in groupby(self.units, _device)]
        none = torch.empty(0, dtype=torch.int64, device=world.device)
        self.values = torch.cat([none, *(stack.to(world.device) for stack in stacks)])  # one upload for the host's

    def changed(self, before: Sums) -> Tensor:
        """bool [units]: True for those whose bits are others than before although nothing has written them."""
        known = {unit.name: (number, unit.writes) for number, unit in enumerate(before.units)}
        pairs = [known.get(unit.name) for unit in self.units]
        same = [pair is not None and pair[1] == unit.writes for pair, unit in zip(pairs, self.units, strict=True)]
        is_found = torch.zeros(len(self.units), dtype=torch.bool, device=self.values.device)
        if any(same):
            numbers = torch.tensor([pair[0] if pair is not None else 0 for pair in pairs], device=self.values.device)
            is_found = (self.values != before.values[numbers]) & torch.tensor(same, device=self.values.device)
        return is_found

    def weighted(self, world: World) -> Tensor:
        """int64 [1], whose sum over all ranks is zero if no replicas differ."""
        factors = [u.factor * (1 - len(u.holders) if u.holders[0] == world.rank else 1) for u in self.units]
        signed = torch.tensor([_signed(factor) for factor in factors], dtype=torch.int64, device=world.device)
        return (self.values * signed).sum()[None]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A unit that is not the same on all of its holders, or has changed by itself on one.

    Attributes:
        name: see `StateUnit`.
        groups: the ranks that hold it, those with equal bits together.
        changed: those on which it has changed although nothing has written it.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    changed: tuple[int, ...] = ()

    @property
    def healthy(self) -> tuple[int, ...]:
        """The ranks whose values are taken for intact: of those on which it has not changed, or of all if it has on
        none or on all, more than any other number of equal ones; none where no two are equal, or as many are equal
        otherwise.
        """
        kept = [tuple(rank for rank in group if rank not in self.changed) for group in self.groups]
        kept = sorted(filter(None, kept), key=len)
        if self.changed and len(kept) == 1:
            return kept[0]
        *others, most = kept or sorted(self.groups, key=len)
        return most if others and len(most) > len(others[-1]) else ()

    @property
    def damaged(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(sorted(rank for group in self.groups for rank in group if rank not in self.healthy))

    @property
    def place(self) -> str:
        """The damaged ranks in words; all in groups where no one is taken for healthy."""
        groups = [self.damaged] if self.healthy else self.groups
        return " and ".join(f"ranks {list(group)}" for group in groups)


@torch.no_grad()
def state_units(state: State, buffers: Collection[str]) -> list[StateUnit]:
    """Return everything that this rank holds.

    Args:
        buffers: names of those that are the same on all their holders; others are left out.
    """
    found: list[StateUnit] = []
    for layer, stack in enumerate(state.stacks):
        found += _experts(layer, stack, stack.tensors([optimizer for optimizer, _ in state.optimizers]))
    for piece in state.dense_pieces(transient=True):
        name, scope = parse_dense_key(piece.key)
        if name in state.dense or name in buffers:
            scope = "" if scope in ("weight", "buffer") else f" ({scope})"
            place = "" if piece.block.sizes == piece.block.whole else f" at {list(piece.block.offsets)}"
            found.append(_unit(f"{name}{scope}{place}", piece.tensor, piece.holders))
    return found


@torch.no_grad()
def gradient_units(state: State, parameters: Collection[nn.Parameter]) -> list[StateUnit]:
    """Return the summed gradients of parameters that other ranks hold as well."""
    found = []
    for layer, stack in enumerate(state.stacks):
        tensors = [p.grad if p in parameters else None for p in stack.parameters.values()]
        found += [unit for unit in _experts(layer, stack, tensors, GRADIENT) if len(unit.holders) > 1]
    for piece in state.dense_pieces():
        name, scope = parse_dense_key(piece.key)
        parameter = state.dense.get(name)
        if scope != "weight" or parameter not in parameters or len(piece.holders) == 1:
            continue
        gradient = local(parameter.grad) if parameter is not None and parameter.grad is not None else None
        if gradient is not None and gradient.layout is torch.strided and gradient.shape == piece.tensor.shape:
            found.append(_unit(f"{GRADIENT}{name} at {list(piece.block.offsets)}", gradient, piece.holders))
    return found


def _unit(name: str, tensor: Tensor, holders: tuple[int, ...]) -> StateUnit:
    return StateUnit(
        name=name,
        holders=holders,
        sum=sum_of_rows(tensor.unsqueeze(0))[0],
        tensors=lambda: [tensor],
        writes=(_writes(tensor),),
    )


def _experts(layer: int, stack: ExpertStack, tensors: Sequence[Tensor | None], prefix: str = "") -> Iterable[StateUnit]:
    """Yield the experts of a stack, with these tensors of it; one that is None counts as zeros."""
    numbered = [(2 * number + 1, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    sums_S = sum(factor * sum_of_rows(tensor) for factor, tensor in numbered)
    writes = tuple(_writes(tensor) for _, tensor in numbered)
    for slot, expert in stack.held() if numbered else ():
        yield StateUnit(
            name=f"{prefix}expert {expert} of MoE layer {layer}",
            holders=stack.placement.holders(expert),
            sum=sums_S[slot],  # type: ignore[index]
            tensors=lambda slot=slot: [tensor[slot] for _, tensor in numbered],  # type: ignore[misc]
            writes=writes,
        )


@torch.no_grad()
def differing(sums: Sums, world: World, changed: Tensor | None = None, measured: Tensor | None = None) -> list[Damage]:
    """Return the units that differ between ranks in a bit, or have changed, by name, the same on every rank;
    collective.

    Args:
        changed: of `Sums.changed`; None: nothing has.
        measured: int64 [m], which are summed over the ranks in place.
    """
    changed = torch.zeros_like(sums.values, dtype=torch.bool) if changed is None else changed
    measured = sums.values[:0] if measured is None else measured
    found = torch.cat([sums.weighted(world), changed.sum()[None], measured.to(world.device)])
    all_reduce_(found, world)
    total, count, *others = world.read(found).tolist()
    measured.copy_(torch.tensor(others, dtype=torch.int64))
    return _named(sums, world, changed) if total or count else []


def _named(sums: Sums, world: World, changed: Tensor) -> list[Damage]:
    values, flags = sums.values.tolist(), changed.tolist()
    own = {unit.name: [value, flag] for unit, value, flag in zip(sums.units, values, flags, strict=True)}
    ranks: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    changed_on: dict[str, list[int]] = defaultdict(list)
    for rank, listed in enumerate(all_gather_json(own, world)):
        for name, (value, flag) in listed.items():
            ranks[name][value].append(rank)
            if flag:
                changed_on[name].append(rank)
    return [
        Damage(name=name, groups=tuple(map(tuple, groups.values())), changed=tuple(changed_on[name]))
        for name, groups in sorted(ranks.items())
        if len(groups) > 1 or changed_on[name]
    ]


class _Repair(NamedTuple):
    """A unit that one rank sends another."""

    name: str
    source: int
    target: int


@torch.no_grad()
def overwrite(damages: Iterable[Damage], units: Sequence[StateUnit], world: World) -> None:
    """Overwrite units with those of a healthy rank, which each must have; collective."""
    held = {unit.name: unit for unit in units}
    repairs = [_Repair(d.name, d.healthy[0], target) for d in damages for target in d.damaged]
    arrived = {r.name: list(map(torch.empty_like, held[r.name].tensors())) for r in repairs if r.target == world.rank}
    transfer(repairs, lambda repair: held[repair.name].tensors(), lambda repair: arrived[repair.name], world)
    for name, values in arrived.items():
        install(zip(held[name].tensors(), values, strict=True))


def sum_of_rows(tensor: Tensor) -> Tensor:
    """int64 [S], of the bits of each row."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = real.detach().contiguous().unsqueeze(-1).flatten(1)
    if rows.shape[1] * rows.element_size() % _WIDE == 0 and rows.numel():
        if rows.data_ptr() % _WIDE or rows.storage_offset() * rows.element_size() % _WIDE:
            rows = rows.clone()
        return rows.view(torch.int64).sum(dim=1)
    return rows.view(BITS[rows.element_size()]).sum(dim=1, dtype=torch.int64)


def _device(unit: StateUnit) -> str:
    return str(unit.sum.device)


def _writes(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor, and the number of writes to it that torch has counted."""
    return tensor.data_ptr(), private_torch.version_of(tensor)


def _signed(number: int) -> int:
    """The int64 of the same bits as an integer modulo 2^64."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number
