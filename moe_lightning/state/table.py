"""State table: every piece of a run's state under its key, with the ranks that hold it.

Snapshots, checkpoints in one file and in directories, broadcasts to new ranks, sharded optimizers and inventories read
it. Keys are those of `pieces.py` and do not depend on ranks: a scope is "weight", "master", "buffer" or the name of an
optimizer state ("exp_avg", ...).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.mesh import RowCut, TensorCut
from moe_lightning.state.averages import AVERAGE, OBJECT_KEY, Averages
from moe_lightning.state.pieces import (
    DTYPES,
    WEIGHTS,
    Shapes,
    StatePiece,
    dtype_name,
    is_expert_key,
    parse_dense_key,
    parse_expert_key,
)
from moe_lightning.state.tensors import blocks_of, cut_of, frozen_base, home_of_moments, is_sharded, local, whole_shape

Groups = Sequence[Sequence[nn.Parameter]]
"""The parameters of an optimizer's param_groups before any sharding."""


class State:
    """The live tensors of a module and its optimizers under their keys.

    Args:
        module: the model.
        stacks: the experts of its MoE layers in order.
        optimizers: with their groups.
        state_ranks: rank that keeps the optimizer state of a dense parameter (ZeRO-1); that of others is on every rank.
        cut: which parts of the dense parameters that are cut a rank holds, with their optimizer states; None: no
            parameter is cut.
        rank, world_size: of this process.
        holders: of the module's parameters and buffers that are not cut, by name; None: every rank.
        on_host: whether optimizer states of dense parameters lie on the host, wherever those are.
        averages: of the weights, if they are averaged.

    Attributes:
        dense: parameters by name that every rank has.
        stack_of: the stack that each other parameter is in.
        base: the parameters that adapters leave as they are, of which checkpoints hold digests only.
    """

    def __init__(
        self,
        module: nn.Module,
        stacks: Sequence[ExpertStack],
        optimizers: Sequence[tuple[Optimizer, Groups]],
        *,
        state_ranks: Mapping[nn.Parameter, int],
        rank: int,
        world_size: int,
        cut: RowCut | None = None,
        holders: Callable[[str], tuple[int, ...]] | None = None,
        on_host: bool = False,
        averages: Averages | None = None,
    ) -> None:
        self.averages = averages
        self.module, self.stacks, self.optimizers, self.state_ranks = module, stacks, optimizers, state_ranks
        self.rank, self.world_size, self.on_host = rank, world_size, on_host
        self.cut = cut or RowCut.whole(world_size)
        self.holders = holders or (lambda _: tuple(range(world_size)))
        self.stack_of = {parameter: stack for stack in stacks for parameter in stack.parameters.values()}
        self.base = frozen_base(module)
        self.dense = {name: p for name, p in module.named_parameters() if p not in self.stack_of}

    @property
    def averaged_buffers(self) -> Mapping[str, Tensor]:
        """Averages of buffers by their names; none if weights are not averaged."""
        return {} if self.averages is None else self.averages.buffers

    def is_of_buffer(self, key: str) -> bool:
        """True if the key of a piece outside of experts is that of a buffer or of its average."""
        return parse_dense_key(key)[0] not in self.dense

    def numbered(self, index: int) -> list[nn.Parameter]:
        """The parameters of an optimizer, numbered as in a run of one process."""
        return [parameter for group in self.optimizers[index][1] for parameter in group]

    def names_in_groups(self, index: int) -> list[list[str]]:
        """Names of the parameters in the groups of an optimizer; empty where a parameter is not the module's."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [[names.get(parameter, "") for parameter in group] for group in self.optimizers[index][1]]

    # ------------------------------------------------------------------ the table

    def pieces(self) -> Iterator[StatePiece]:
        """Every tensor of this rank that checkpoints keep.

        Raises:
            ConfigurationError: an optimizer state of experts that has no row for each of them.
        """
        for index, stack in enumerate(self.stacks):
            for slot, expert in stack.held():
                yield from self.rows(index, slot, expert, stack.placement.holders(expert))
        yield from self.dense_pieces()

    def dense_pieces(self, *, transient: bool = False) -> Iterator[StatePiece]:
        """Those of them outside of experts.

        Args:
            transient: also buffers, and weights beside adapters, that no checkpoint keeps.
        """
        for name, parameter in self.dense.items():
            if parameter in self.base and not transient:
                continue
            if (cut := cut_of(parameter)) is not None:
                yield from self._blocks(name, parameter, cut)
                continue
            everyone = self.holders(name)
            yield StatePiece.of(f"dense/{name}/weight", parameter.detach(), everyone)
            holders = (self.state_ranks[parameter],) if parameter in self.state_ranks else everyone
            for scope, tensor in self.moments(parameter).items():
                yield StatePiece.of(f"dense/{name}/{scope}", tensor, holders)
        for name, buffer in self.module.named_buffers():
            if transient or name in self._names_in_state_dict:
                yield StatePiece.of(f"dense/{name}/buffer", buffer, self.holders(name))
                if name in self.averaged_buffers:
                    yield StatePiece.of(f"dense/{name}/{AVERAGE}", self.averaged_buffers[name], self.holders(name))

    @cached_property
    def _names_in_state_dict(self) -> frozenset[str]:
        """Found once, because hooks of the module may make it slow."""
        return frozenset(self.module.state_dict(keep_vars=True))

    def _blocks(self, name: str, parameter: nn.Parameter, cut: TensorCut) -> Iterator[StatePiece]:
        """The pieces of a parameter that is cut; none where this rank has nothing of it."""
        own, everyone = local(parameter.detach()), self.cut.holders_of(cut)
        state_ranks = (self.state_ranks[parameter],) if parameter in self.state_ranks else everyone
        for scope, tensor in ({"weight": own} | self.moments(parameter)).items():
            if tensor.shape != own.shape:
                raise ConfigurationError(
                    f"the optimizer's {scope!r} of {name} has shape {list(tensor.shape)}, which cannot be cut by rows: "
                    "use an optimizer whose states have the shape of the parameter, such as AdamW, or dense=zero1"
                )
            holders = everyone if tensor is own else state_ranks
            for here, block in blocks_of(cut, self.cut.part):
                yield StatePiece(key=f"dense/{name}/{scope}", tensor=tensor[here], block=block, holders=holders)

    def rows(self, layer: int, slot: int, expert: int, holders: tuple[int, ...] = ()) -> Iterator[StatePiece]:
        """The pieces of the expert in a slot."""
        for name, parameter in self.stacks[layer].saved.items():
            scopes = {_weight_scope(parameter): parameter.detach()} | self.moments(parameter)
            for scope, stack in scopes.items():
                require_row_each(scope, stack, name, parameter)
                yield StatePiece.of(f"expert/{layer}/{expert}/{scope}/{name}", stack[slot], holders)

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's tensors for a parameter, scalars left out, and the parameter's average."""
        return {name: t for name, t in sorted(self._state_of(parameter).items()) if _is_moment(name, t)}

    def _state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return next((o.state[parameter] for o, _ in self.optimizers if parameter in o.state), {})

    def objects(self) -> dict[str, Any]:
        """Non-tensor state: hyperparameters of the groups, names of their parameters and scalar states by parameter
        number, and the number of updates of averages.
        """
        result: dict[str, Any] = {} if self.averages is None else {OBJECT_KEY: self.averages.count}
        scalars = self.scalars()
        for index, (optimizer, _) in enumerate(self.optimizers):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            result[f"optimizer/{index}"] = {
                "param_groups": groups,
                "scalars": scalars[f"optimizer/{index}"],
                "names": self.names_in_groups(index),
            }
        return result

    def scalars(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Scalar states of the parameters that have states on this rank, by optimizer and parameter number."""
        return {
            f"optimizer/{index}": {
                number: {
                    name: v.cpu() if isinstance(v, Tensor) else v
                    for name, v in optimizer.state[parameter].items()
                    if not _is_moment(name, v)
                }
                for number, parameter in enumerate(self.numbered(index))
                if parameter in optimizer.state
            }
            for index, (optimizer, _) in enumerate(self.optimizers)
        }

    # ------------------------------------------------------------------ optimizers that have made no states yet

    def moment_shapes(self) -> Shapes:
        """The optimizer states and averages that this rank has."""
        found = {
            f"dense/{name}/{scope}": (
                dtype_name(tensor),
                tuple(whole_shape(parameter) if is_sharded(parameter) else tensor.shape),
            )
            for name, parameter in self.dense.items()
            for scope, tensor in self.moments(parameter).items()
        }
        here = {name for name, _ in self.module.named_buffers()}
        found |= {
            f"dense/{name}/{AVERAGE}": (dtype_name(tensor), tuple(tensor.shape))
            for name, tensor in self.averaged_buffers.items()
            if name in here
        }
        return found | {
            f"expert/{layer}/0/{scope}/{name}": (dtype_name(tensor), tuple(tensor.shape[1:]))
            for layer, stack in enumerate(self.stacks)
            for name, parameter in stack.parameters.items()
            for scope, tensor in self.moments(parameter).items()
        }

    @torch.no_grad()
    def adopt(self, objects: Mapping[str, Any], shapes: Shapes) -> None:
        """Load hyperparameters and scalars, and create missing states, filled with zeros.

        Args:
            objects, shapes: of who has made them. What neither tells of stays as it is.
        """
        moments = self._by_parameter(shapes)
        if self.averages is not None and OBJECT_KEY in objects:
            self.averages.set_count(objects[OBJECT_KEY])
            dense = (parse_dense_key(key) for key in shapes if not is_expert_key(key))
            self.averages.make_buffers(self.module, {name for name, scope in dense if scope == AVERAGE})
        for index, (optimizer, _) in enumerate(self.optimizers):
            told = objects[f"optimizer/{index}"]
            for group, values in zip(optimizer.param_groups, told["param_groups"], strict=True):
                group.update(values)
            kept = {p for group in optimizer.param_groups for p in group["params"]}
            common: Mapping[str, Any] = next(iter(told["scalars"].values()), {})  # of a shard that others keep
            for number, parameter in enumerate(self.numbered(index)):
                described = moments.get(parameter, {})
                scalars = told["scalars"].get(number, common if described else {})
                if parameter in kept and (scalars or described):
                    known, home = optimizer.state[parameter], self.home_of(parameter)
                    optimizer.state[parameter] = (
                        self.moments(parameter)
                        | self.placed(optimizer, parameter, copy.deepcopy(scalars))
                        | {scope: _made(known.get(scope), *entry, home) for scope, entry in described.items()}
                    )

    def home_of(self, parameter: nn.Parameter) -> torch.device:
        """Return the device of the moments of a parameter."""
        return home_of_moments(parameter, self.stack_of, on_host=self.on_host)

    def placed(self, optimizer: Optimizer, parameter: nn.Parameter, states: Mapping[str, Any]) -> dict[str, Any]:
        """States of a parameter that have come from elsewhere, where the optimizer looks for them, as in torch."""
        home = self.home_of(parameter)
        # Fused kernels read step counts beside the parameters.
        is_fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        return {
            scope: value.to(home) if isinstance(value, Tensor) and (is_fused or scope != "step") else value
            for scope, value in states.items()
        }

    def _by_parameter(self, shapes: Shapes) -> Mapping[nn.Parameter, dict[str, tuple[str, tuple[int, ...]]]]:
        """Scope -> (dtype, shape) of the states that belong to parameters of this rank, whose stacks may be longer.

        As in torch, states in the dtype of saved weights get that of the parameter, which may be another now.
        """
        found: dict[nn.Parameter, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
        for key, (dtype, shape) in shapes.items():
            if is_expert_key(key):
                layer, expert, scope, name = parse_expert_key(key)
                weights = [f"expert/{layer}/{expert}/{weight}/{name}" for weight in WEIGHTS]
                parameter = self.stacks[layer].parameters.get(name) if layer < len(self.stacks) else None
                shape = shape if parameter is None else (parameter.shape[0], *shape)
            else:
                name, scope = parse_dense_key(key)
                weights = [f"dense/{name}/{weight}" for weight in WEIGHTS]
                parameter = self.dense.get(name)
                shape = shape if parameter is None or not is_sharded(parameter) else local(parameter).shape
            if scope == AVERAGE and self.averages is None:
                continue
            if parameter is not None and scope not in WEIGHTS:
                if any(shapes[weight][0] == dtype for weight in weights if weight in shapes):
                    dtype = dtype_name(parameter)
                found[parameter][scope] = dtype, tuple(shape)
        return found


def numbers_among(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states of an optimizer that are not tensors, such as counts of updates, which parameters share."""
    found = ({name: v for name, v in own.items() if not isinstance(v, Tensor)} for own in optimizer.state.values())
    return next(filter(None, found), {})


def _weight_scope(parameter: Tensor) -> str:
    """A float32 parameter is its own master copy."""
    return "master" if parameter.element_size() >= 4 else "weight"


def require_row_each(scope: str, value: Tensor, name: str, parameter: Tensor) -> None:
    """
    Args:
        value: the optimizer's state of this scope for a parameter whose rows are experts.

    Raises:
        ConfigurationError: it has no row for each of them, such as the scales of eight-bit states.
    """
    if value.shape[0] != parameter.shape[0]:
        raise ConfigurationError(
            f"the optimizer's {scope!r} of {name} has shape {list(value.shape)}, which cannot be cut by expert: use an "
            "optimizer whose states have a row for each row of the parameter, such as AdamW"
        )


def _is_moment(name: str, value: object) -> bool:
    return isinstance(value, Tensor) and (value.ndim > 0 or name == AVERAGE)  # a value of the model, of any shape


def _made(known: object, dtype: str, shape: tuple[int, ...], home: torch.device) -> Tensor:
    if isinstance(known, Tensor) and (known.shape, known.dtype, known.device) == (shape, DTYPES[dtype], home):
        return known
    return torch.zeros(shape, dtype=DTYPES[dtype], device=home)


def require_same_order(saved: Sequence[Sequence[str]] | None, own: Sequence[Sequence[str]]) -> None:
    """Refuse groups in which moments would be those of other parameters, as they are stored by number.

    Args:
        saved: None in a checkpoint of another program.

    Raises:
        CheckpointError: a parameter has another number than in the checkpoint.
    """
    for number, pair in enumerate(zip(*map(chain.from_iterable, (saved or (), own)), strict=False)):
        if all(pair) and pair[0] != pair[1]:
            raise CheckpointError(
                f"parameter {number} of the checkpoint's optimizer is {pair[0]}, and of this one {pair[1]}, which "
                "would get the moments of another: give the optimizer its parameters in the order of the run that "
                "wrote it"
            )
