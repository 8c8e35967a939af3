"""Optimizer states that one rank keeps for all that hold the same values (ZeRO-1), as they travel: in units, each the
state of a parameter, or where layers are cut by tensor index, of one of its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from moe_lightning.checkpoint.optimizer_shards import States
from moe_lightning.parallel.mesh import Part, RowCut, TensorCut
from moe_lightning.state.tensors import joined, part_of_whole

_OF = ": "  # no parameter has it in its name


def keepers_of_units(owners: Mapping[str, int], parted: Collection[str], cut: RowCut) -> dict[str, int]:
    """The rank that keeps each unit of a world.

    Args:
        owners: of each parameter, or of this rank's part of it, by name.
        parted: names of those that are cut by tensor index there.
        cut: of that world.
    """
    found: dict[str, int] = {}
    for name, owner in owners.items():
        if name not in parted:
            found[name] = owner
            continue
        for tensor in range(cut.tensors):
            part = Part(tensor=tensor, tensors=cut.tensors)
            found[f"{name}{_OF}{part.name}"] = cut.twin(owner, tensor)
    return found


def is_of_states(name: str) -> bool:
    """Whether the name of an inventory is a unit's, not that of parameters' values."""
    return not name.startswith("dense ")


def name_of(unit: str) -> str:
    """Of the parameter."""
    return unit.partition(_OF)[0]


def takers_of(unit: str, keepers: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks of another world that make their units of this one, or of this and others."""
    name = name_of(unit)
    if unit in keepers:
        return (keepers[unit],)
    if name in keepers:
        return (keepers[name],)
    return tuple(keeper for other, keeper in keepers.items() if name_of(other) == name)


def made_of(arrived: Mapping[str, States], wanted: str, cut: TensorCut | None) -> States:
    """The state of a unit from those that have arrived of its parameter; empty where some are lacking.

    Args:
        cut: of the parameter; None: it is never cut by tensor index.
    """
    if wanted in arrived or cut is None:
        return arrived.get(wanted, {})
    name, part = name_of(wanted), _part_of(wanted)
    if name in arrived:  # a whole one, of which this is a part
        return {k: part_of_whole(v, cut, part).clone() if v.ndim else v for k, v in arrived[name].items()}
    found = {_part_of(unit): states for unit, states in arrived.items() if name_of(unit) == name}
    if not found or len(found) < next(iter(found)).tensors:
        return {}

    def whole(scope: str, of_first: Tensor) -> Tensor:
        return joined({part: states[scope] for part, states in found.items()}, cut) if of_first.ndim else of_first

    return {scope: whole(scope, value) for scope, value in next(iter(found.values())).items()}


def _part_of(unit: str) -> Part:
    _, is_part, part = unit.partition(_OF)
    return Part.named(part) if is_part else Part()
