"""Full state in the layout of a single process, and the live state that joining ranks receive.

In full checkpoints experts are stacked [E, ...] under any placement. Rank 0 collects what other ranks own, so the file
is the one that stock Lightning would write for the same module on one device; it loads there, and on any number of
ranks under any placement.

A process that joins a running world has built the same model and optimizers, with initial values and without optimizer
states. It receives the names and shapes of these states, creates them, and then gets every dense tensor from the ranks
that have it; experts come by migration. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import CheckpointError
from moe_lightning.parallel.collectives import broadcast_object
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import Part, TensorCut
from moe_lightning.state.averages import AVERAGE
from moe_lightning.state.pieces import StatePiece
from moe_lightning.state.table import State, numbers_among, require_row_each, require_same_order
from moe_lightning.state.tensors import cut_of, loading, local, part_of_whole, pieces_of, rows_like, rows_of
from moe_lightning.state.transfer import gather

_NO_CUTS: Mapping[str, TensorCut] = {}
_NAMES = "parameter_names"
"""Key of the names of an optimizer's parameters by group, beside the keys of stock optimizers."""


def full_model_state(
    state: Mapping[str, Any],
    experts: Mapping[str, ExpertStack],
    world: World,
    *,
    cuts: Mapping[str, TensorCut] = _NO_CUTS,
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """A module's state_dict with full expert stacks and whole dense tensors, on rank 0; empty on the other ranks.
    Collective.

    Args:
        state: the local state_dict.
        experts: which of its keys, or of those of other ranks, are expert stacks.
        cuts: of the dense tensors of which this rank, or one of another stage, holds a part, by key.
        elsewhere: keys of whole tensors that rank 0 lacks, and for which this rank has the values.
    """
    pieces = [StatePiece.of(key, state[key]) for key in elsewhere]
    for key, value in state.items():
        if key in experts:
            pieces += rows_of(key, value, experts[key])
        elif key in cuts:
            pieces += pieces_of(key, local(value), cuts[key], world.row_cut.part)
    whole = gather(pieces, world, lambda _: (0,))
    return {} if world.rank else dict(state) | whole


def local_model_state(
    full: Mapping[str, Any],
    here: Mapping[str, Any],
    experts: Mapping[str, ExpertStack],
    part: Part,
    *,
    cuts: Mapping[str, TensorCut] = _NO_CUTS,
    strict: bool = True,
) -> dict[str, Any]:
    """This rank's state_dict cut from a full one; without `strict` only the tensors that both have.

    Args:
        here: what it is to be like.
        experts: which keys are expert stacks.
        part: of dense tensors that this rank has.
        cuts: how they are cut, by key.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    missing = sorted(set(here) - set(full))
    unknown = sorted(set(full) - set(here))
    if strict and (missing or unknown):
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the model lacks"
        raise CheckpointError(
            f"the checkpoint {what} ({len(missing)} missing, {len(unknown)} unknown tensors): "
            "it was written by another model configuration"
        )
    result = {}
    for key in full.keys() & here.keys():
        tensor = full[key]
        if not isinstance(tensor, Tensor) or not isinstance(here[key], Tensor):
            result[key] = tensor  # a module's extra state, whose shape is its own affair
            continue
        expected = here[key].shape
        if key in experts:
            expected = torch.Size((experts[key].num_experts, *expected[1:]))
        elif key in cuts:
            expected = torch.Size(cuts[key].shape)
        if tensor.shape != expected:
            raise CheckpointError(
                f"the checkpoint's {key!r} has shape {list(tensor.shape)}, the model's {list(expected)}: "
                "use the model configuration it was written with"
            )
        if key in experts:
            tensor = experts[key].select(tensor)
        elif key in cuts:
            tensor = rows_like(here[key], part_of_whole(tensor, cuts[key], part))
        result[key] = tensor
    return result


def full_optimizer_state(state: State, index: int, world: World) -> dict[str, Any]:
    """The state_dict of an optimizer as a single process would have it, on rank 0; empty on the other ranks.
    Collective.

    Raises:
        ConfigurationError: a state of experts that are on several ranks has no row for each of them.
    """
    optimizer, _ = state.optimizers[index]
    pieces: list[StatePiece] = []
    names = {parameter: name for name, parameter in state.module.named_parameters()}
    for number, parameter in enumerate(state.numbered(index)):
        stack, cut = state.stack_of.get(parameter), cut_of(parameter)
        state_rank = state.state_ranks.get(parameter, state.holders(names.get(parameter, ""))[0])
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or name == AVERAGE:  # which is in the model's state
                continue
            key = f"{number}/{name}"
            if stack is not None and value.ndim and world.size > 1:
                require_row_each(name, value, names.get(parameter, str(number)), parameter)
            if stack is not None and value.shape[:1] == parameter.shape[:1]:
                pieces += rows_of(key, value, stack)
            elif cut is not None and value.ndim:
                pieces += pieces_of(key, value, cut, state.cut.part)
            elif state_rank == world.rank:
                pieces.append(StatePiece.of(key, value))
    whole = gather(pieces, world, lambda _: (0,))
    if world.rank:
        return {}
    entries: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(state.numbered(index)):
        own = optimizer.state.get(parameter, {})
        if others := {name: value for name, value in own.items() if not isinstance(value, Tensor)}:
            entries[number] = others
    common = numbers_among(optimizer)  # of parameters whose states other ranks have
    for key in sorted(whole):
        at, _, name = key.partition("/")
        entries.setdefault(int(at), dict(common))
        entries[int(at)][name] = whole[key]
    return {
        "state": dict(sorted(entries.items())),
        "param_groups": _numbered_groups(state, index),
        _NAMES: state.names_in_groups(index),
    }


def load_local_optimizer_state(state: State, index: int, full: Mapping[str, Any]) -> None:
    """Give an optimizer its part of a full state_dict.

    Raises:
        CheckpointError: the groups do not match the optimizer's.
    """
    optimizer, own_groups = state.optimizers[index]
    sizes, saved = [len(g) for g in own_groups], [len(g["params"]) for g in full["param_groups"]]
    if sizes != saved:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {saved} tensors, this one of {sizes}: "
            "use the configuration it was written with"
        )
    require_same_order(full.get(_NAMES), state.names_in_groups(index))
    number_of = {parameter: number for number, parameter in enumerate(state.numbered(index))}
    entries: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for group, saved_group in zip(optimizer.param_groups, full["param_groups"], strict=True):
        numbers = []
        for parameter in group["params"]:
            entry = full["state"].get(number_of[parameter])
            if entry is not None:
                entries[position] = _cut_entry(entry, parameter, state)
            numbers.append(position)
            position += 1
        groups.append({**saved_group, "params": numbers})
    with loading(optimizer, state.stack_of) if state.on_host else nullcontext():
        optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _numbered_groups(state: State, index: int) -> list[dict[str, Any]]:
    optimizer, own_groups = state.optimizers[index]
    groups, start = [], 0
    for group, parameters in zip(optimizer.param_groups, own_groups, strict=True):
        groups.append({**group, "params": list(range(start, start + len(parameters)))})
        start += len(parameters)
    return groups


def _cut_entry(entry: Mapping[str, Any], parameter: nn.Parameter, state: State) -> dict[str, Any]:
    stack, cut = state.stack_of.get(parameter), cut_of(parameter)
    if cut is not None:
        is_like = {name: isinstance(v, Tensor) and tuple(v.shape) == cut.shape for name, v in entry.items()}
        return {name: part_of_whole(v, cut, state.cut.part) if is_like[name] else v for name, v in entry.items()}
    if stack is None:
        return dict(entry)
    return {
        name: stack.select(value) if isinstance(value, Tensor) and stack.is_full(value) else value
        for name, value in entry.items()
    }


def broadcast_optimizers(state: State, receivers: Collection[int], world: World, source: int) -> None:
    """Broadcast the source rank's hyperparameters and scalars to the receivers' optimizers, and which parameters are
    frozen; collective.

    States that a receiver lacks are created, filled with zeros.
    """
    broadcast_frozen(state.module, receivers, world, source)
    objects, shapes = broadcast_object((state.objects(), state.moment_shapes()), source, world)
    if world.rank in receivers:
        state.adopt(objects, shapes)


def broadcast_frozen(module: nn.Module, receivers: Collection[int], world: World, source: int) -> None:
    """Broadcast which parameters are frozen on the source rank to the receivers; collective."""
    own = dict(module.named_parameters())
    trained = broadcast_object({name: parameter.requires_grad for name, parameter in own.items()}, source, world)
    if world.rank in receivers:
        for name in own.keys() & trained.keys():
            own[name].requires_grad_(trained[name])
