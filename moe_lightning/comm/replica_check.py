"""Compares the replicas of experts over the ranks that hold them: one sum of bits for each, one collective for all.

Shapes: S slots of this rank, E experts of a layer, T experts of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import all_gather_counts
from moe_lightning.state.expert_stacks import ExpertStack

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Replicas of an expert that are not alike.

    Attributes:
        layer, expert: which one.
        groups: the ranks that hold it, those with equal rows together.
    """

    layer: int
    expert: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def healthy(self) -> tuple[int, ...]:
        """The ranks whose rows are taken for whole: more than any other number of equal ones; none where no two are
        equal, or as many are equal otherwise.
        """
        *others, most = sorted(self.groups, key=len)
        return most if len(most) > max(len(group) for group in others) else ()


@torch.no_grad()
def differing_replicas(stacks: Sequence[ExpertStack], world: World) -> list[Difference]:
    """The experts whose replicas differ in a bit, in order, the same on every rank; collective.

    Two differences that cancel in the sum of all bits of an expert would go unseen until the next step.
    """
    sums_T = _sums(stacks, world.device)
    bounds_2T = torch.stack([sums_T, torch.where(sums_T == _ABSENT, _ABSENT, ~sums_T)])  # least, and not of greatest
    dist.all_reduce(bounds_2T, op=dist.ReduceOp.MIN, group=world.dense)
    bounds_2T = world.read(bounds_2T)
    differs_T = bounds_2T[0] != ~bounds_2T[1]
    differs_T &= bounds_2T[0] != _ABSENT
    if not differs_T.any():
        return []
    places = [(index, expert) for index, stack in enumerate(stacks) for expert in range(stack.num_experts)]
    found = torch.nonzero(differs_T).flatten()
    told_NF = all_gather_counts(sums_T[found.to(sums_T.device)], world)
    return [
        Difference(layer=places[place][0], expert=places[place][1], groups=_groups(told_NF[:, column].tolist()))
        for column, place in enumerate(found.tolist())
    ]


def _sums(stacks: Sequence[ExpertStack], device: torch.device) -> Tensor:
    """int64 [T]: a sum over the bits of each expert's rows, `_ABSENT` where this rank does not hold it."""
    tables = []
    for stack in stacks:
        sums_S = torch.zeros(len(stack.slot_experts), dtype=torch.int64, device=device)
        for number, parameter in enumerate(stack.parameters.values()):
            rows = parameter.detach().contiguous().view(_BITS[parameter.element_size()]).flatten(1)
            sums_S += (2 * number + 1) * rows.sum(dim=1, dtype=torch.int64)
        table_E = torch.full((stack.num_experts,), _ABSENT, dtype=torch.int64, device=device)
        held = list(stack.held())
        table_E[[expert for _, expert in held]] = sums_S[[slot for slot, _ in held]]
        tables.append(table_E)
    return torch.cat(tables)


def _groups(sums: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(sums):
        if value != _ABSENT:
            ranks.setdefault(value, []).append(rank)
    return tuple(tuple(group) for group in ranks.values())
