"""A training run's state as keys: which tensors this rank writes into a checkpoint, and how they come back.

Keys are `expert/{layer}/{expert}/{scope}/{name}` and `dense/{name}/{scope}` with scope "weight", "buffer" or the name
of an optimizer state
("exp_avg", ...), and the object keys `optimizer/{index}` for what is no tensor. A replicated expert is written by one
of its holders,
a dense tensor in row shards by all ranks, for the whole session by the same rank: shards are balanced on top of the
mean bytes of experts per checkpoint, because an arena reserves room for the keys of its rank once. When experts move,
only who has lost an expert stops writing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.algorithms.selection import full_selection
from moe_lightning.algorithms.sharding import Module, balanced_expert_writers, shard_checkpoint
from moe_lightning.checkpoint.checkpoint_ledger import CheckpointLedger
from moe_lightning.checkpoint.full_state import OptimizerLayout
from moe_lightning.checkpoint.pieces import Rows
from moe_lightning.checkpoint.plan import Order
from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.state.expert_stacks import ExpertStack

_WEIGHT_SCOPES = ("weight", "master")

Writers = Mapping[tuple[int, int], int]
"""(layer, expert) -> the rank that writes it."""


@dataclass(frozen=True, kw_only=True)
class WrittenState:
    """What one rank writes.

    Attributes:
        tensors: every key of this rank; experts one key a scope and name, dense tensors whole or as rows.
        rank_bytes: predicted bytes of every rank when the selected share of the experts is written.
    """

    tensors: Mapping[str, Tensor | Rows]
    rank_bytes: tuple[int, ...]


class TrainingState:
    """The live tensors of a module and its optimizers under their keys.

    Args:
        module: the model.
        layers: its MoE layers in order.
        optimizers: with their layouts.
        rank, world_size: of this process.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[ExpertStack],
        optimizers: Sequence[tuple[Optimizer, OptimizerLayout]],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._module, self._layers, self._optimizers = module, list(layers), list(optimizers)
        self._rank, self._world_size = rank, world_size
        stacked = {id(p) for layer in layers for p in layer.parameters.values()}
        self._dense = {name: p for name, p in module.named_parameters() if id(p) not in stacked}
        persistent = set(module.state_dict(keep_vars=True))
        self._buffers = {name: b for name, b in module.named_buffers() if name in persistent}

    @property
    def num_experts(self) -> int:
        """E of every layer; 0 for a dense model."""
        counts = {layer.num_experts for layer in self._layers}
        if len(counts) > 1:
            raise ConfigurationError(
                f"partial checkpoints need the same number of experts in every layer, not {sorted(counts)}"
            )
        return counts.pop() if counts else 0

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def checkpoint_ledger(
        self, planned_assignments: IntArray, *, scopes: frozenset[str], order: Order
    ) -> CheckpointLedger:
        """CheckpointLedger for this model; `planned_assignments` is int64 [L]."""
        return CheckpointLedger(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            planned_assignments=planned_assignments,
            owners=self.owners(),
            num_ranks=self._world_size,
            scopes=scopes,
            order=order,
        )

    def owners(self, writers: Writers | None = None) -> IntArray:
        """int64 [L, E]: the rank that writes each expert (None: as `expert_writers` says)."""
        writers = self.expert_writers() if writers is None else writers
        return np.array([[writers[la, e] for e in range(self.num_experts)] for la in range(self.num_layers)])

    def written(self, experts_per_checkpoint: int) -> WrittenState:
        """The tensors that this rank writes in a session that saves so many experts of each layer at a time."""
        writers = self.expert_writers()
        tensors: dict[str, Tensor | Rows] = {**self.experts_of(writers)}
        share = experts_per_checkpoint / max(1, self.num_experts)
        expert_bytes = self._expert_bytes()
        dense = self._dense_pieces()
        plan = shard_checkpoint(
            writers,
            expert_bytes=int(expert_bytes * share),
            modules=[Module(name=name, nbytes=piece.nbytes, rows=piece.rows) for name, piece in dense.items()],
            num_ranks=self._world_size,
        )
        load = list(plan.rank_bytes)
        for piece in plan.pieces:
            if piece.rank == self._rank:
                tensors |= dense[piece.module].cut(piece.first_row, piece.last_row)
        for name, owner, state in self._owned_states():
            load[owner] += sum(t.nbytes for t in state.values())
            if owner == self._rank:
                tensors |= {f"dense/{name}/{scope}": t for scope, t in state.items()}
        if self._rank == 0:
            tensors |= {f"dense/{name}/buffer": buffer for name, buffer in self._buffers.items()}
        return WrittenState(tensors=tensors, rank_bytes=tuple(load))

    def expert_writers(self, before: Writers | None = None) -> dict[tuple[int, int], int]:
        """(layer, expert) -> the rank that writes it, one of its holders, the same on every rank; who wrote it before
        goes on where it can."""
        if not self._layers:
            return {}
        holders = [[layer.placement.holders(e) for e in range(self.num_experts)] for layer in self._layers]
        everything = full_selection(self.num_layers, self.num_experts)
        return balanced_expert_writers(everything, holders, self._world_size, before)

    def experts_of(self, writers: Writers) -> dict[str, Tensor]:
        """The tensors of the experts that this rank writes."""
        return {
            key: stack[slot]
            for index, layer in enumerate(self._layers)
            for slot, expert in enumerate(layer.slot_experts)
            if expert >= 0 and writers[index, expert] == self._rank
            for key, stack in self._expert_stacks(index, expert)
        }

    def all_rows(self) -> dict[str, Tensor]:
        """One entry for every tensor of every slot of this rank, vacant ones too: more experts it never writes."""
        return {
            key: stack[slot]
            for index, layer in enumerate(self._layers)
            for slot in range(len(layer.slot_experts))
            for key, stack in self._expert_stacks(index, slot)
        }

    def load_of(self, writers: Writers) -> Counter[tuple[int, tuple[int, ...]]]:
        """How many experts of each size, by the bytes of their tensors, every rank writes."""
        sizes = [tuple(t[0].nbytes for _, t in self._expert_stacks(i, 0)) for i in range(self.num_layers)]
        return Counter((rank, sizes[layer]) for (layer, _), rank in writers.items())

    def objects(self) -> dict[str, Any]:
        """What is no tensor: hyperparameters of the groups and scalar states by parameter index; rank 0 writes it."""
        if self._rank:
            return {}
        result = {}
        for index, (optimizer, layout) in enumerate(self._optimizers):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            scalars = {
                number: _scalars(optimizer, p) for number, p in enumerate(layout.numbered()) if p in optimizer.state
            }
            result[f"optimizer/{index}"] = {"param_groups": groups, "scalars": scalars}
        return result

    # ------------------------------------------------------------------ restoring

    @torch.no_grad()
    def restore_model(self, checkpoint: CheckpointSource) -> None:
        """Fill parameters and buffers in place.

        Raises:
            CheckpointError: a tensor is missing or of another shape: the checkpoint is of another model.
        """
        for index, layer in enumerate(self._layers):
            for name, parameter in layer.parameters.items():
                scope = "master" if checkpoint.keys(f"expert/{index}/0/master/") else "weight"
                self._read_stack(checkpoint, index, scope, name, parameter.data)
        for name, parameter in self._dense.items():
            checkpoint.read_into(f"dense/{name}/weight", parameter.data)
        for name, buffer in self._buffers.items():
            checkpoint.read_into(f"dense/{name}/buffer", buffer)

    @torch.no_grad()
    def restore_optimizers(self, checkpoint: CheckpointSource) -> None:
        """Give every optimizer the state of the parameters it keeps.

        Raises:
            CheckpointError: the checkpoint has no such optimizer, or its groups differ.
        """
        dense_names = {id(p): name for name, p in self._dense.items()}
        stacks = {id(p): (i, name) for i, layer in enumerate(self._layers) for name, p in layer.parameters.items()}
        keys = set(checkpoint.keys())
        for index, (optimizer, layout) in enumerate(self._optimizers):
            saved = checkpoint.read_object(f"optimizer/{index}")
            if len(saved["param_groups"]) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"{checkpoint.path.name} has {len(saved['param_groups'])} parameter groups in optimizer {index}, "
                    f"this run has {len(optimizer.param_groups)}: use the configuration it was written with"
                )
            for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update(values)
            common: dict[str, Any] = next(iter(saved["scalars"].values()), {})
            kept = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for number, parameter in enumerate(layout.numbered()):
                if id(parameter) not in kept:
                    continue
                scalars = saved["scalars"].get(number, common)
                state = {name: v.clone() if isinstance(v, Tensor) else v for name, v in scalars.items()}
                if id(parameter) in stacks:
                    layer, name = stacks[id(parameter)]
                    state |= self._read_stack_states(checkpoint, keys, layer, name, parameter)
                else:
                    state |= _read_dense_states(checkpoint, keys, dense_names[id(parameter)], parameter)
                if state:
                    optimizer.state[parameter] = state

    @torch.no_grad()
    def restore_experts(self, checkpoint: CheckpointSource, experts: Collection[tuple[int, int]]) -> None:
        """Fill the rows of some (layer, expert) pairs that live here, weights and optimizer states, in place; the
        optimizers must have made their states.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        for index, layer in enumerate(self._layers):
            for slot, expert in enumerate(layer.slot_experts):
                if (index, expert) in experts:
                    for key, stack in self._expert_stacks(index, expert):
                        checkpoint.read_into(key, stack[slot])

    def _read_stack(self, checkpoint: CheckpointSource, layer: int, scope: str, name: str, out_SX: Tensor) -> None:
        for slot, expert in enumerate(self._layers[layer].slot_experts):
            if expert >= 0:
                checkpoint.read_into(f"expert/{layer}/{expert}/{scope}/{name}", out_SX[slot])

    def _read_stack_states(
        self, checkpoint: CheckpointSource, keys: set[str], layer: int, name: str, parameter: nn.Parameter
    ) -> dict[str, Tensor]:
        first = next((e for e in self._layers[layer].slot_experts if e >= 0), 0)
        prefix, suffix = f"expert/{layer}/{first}/", f"/{name}"
        scopes = [k[len(prefix) : -len(suffix)] for k in keys if k.startswith(prefix) and k.endswith(suffix)]
        result = {}
        for scope in sorted(set(scopes) - set(_WEIGHT_SCOPES)):
            example = checkpoint.read(f"{prefix}{scope}{suffix}")
            stack = torch.zeros(parameter.shape[0], *example.shape, dtype=example.dtype, device=parameter.device)
            self._read_stack(checkpoint, layer, scope, name, stack)
            result[scope] = stack
        return result

    # ------------------------------------------------------------------ the live tensors

    def _expert_stacks(self, index: int, expert: int) -> Iterator[tuple[str, Tensor]]:
        """Keys of one expert with the stacks whose rows they are."""
        for name, parameter in self._layers[index].parameters.items():
            yield f"expert/{index}/{expert}/{_weight_scope(parameter)}/{name}", parameter.detach()
            for scope, value in self._states(parameter).items():
                if value.shape[0] != parameter.shape[0]:
                    raise ConfigurationError(
                        f"the optimizer's {scope!r} of {name} has shape {list(value.shape)}, which cannot be cut by "
                        "expert: use an optimizer whose states have a row for each row of the parameter, such as AdamW"
                    )
                yield f"expert/{index}/{expert}/{scope}/{name}", value

    def _expert_bytes(self) -> int:
        if not self._layers:
            return 0
        layer = self._layers[0]
        tensors = [t for p in layer.parameters.values() for t in (p, *self._states(p).values())]
        return sum(t.nbytes // max(1, t.shape[0]) for t in tensors)

    def _dense_pieces(self) -> dict[str, _DenseUnit]:
        """Dense parameters with those optimizer states that every rank has, as units that may be cut by rows."""
        sharded = {id(p) for _, layout in self._optimizers for p in layout.owners}
        units = {}
        for name, parameter in self._dense.items():
            states = {} if id(parameter) in sharded else self._states(parameter)
            aligned = all(t.shape == parameter.shape for t in states.values())
            tensors = {f"dense/{name}/weight": parameter.detach()} | {f"dense/{name}/{k}": t for k, t in states.items()}
            units[name] = _DenseUnit(tensors=tensors, rows=parameter.shape[0] if aligned and parameter.ndim else 1)
        return units

    def _owned_states(self) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """(name, owner, states) of dense parameters whose states one rank keeps; states are empty on the others."""
        names = {id(p): name for name, p in self._dense.items()}
        for _, layout in self._optimizers:
            for parameter, owner in layout.owners.items():
                yield names[id(parameter)], owner, self._states(parameter) if owner == self._rank else {}

    def _states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's tensors for a parameter, scalars left out."""
        for optimizer, _ in self._optimizers:
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                return {name: t for name, t in sorted(state.items()) if isinstance(t, Tensor) and t.ndim > 0}
        return {}


def _weight_scope(parameter: Tensor) -> str:
    """A float32 parameter is its own master copy."""
    return "master" if parameter.element_size() >= 4 else "weight"


@dataclass(frozen=True, kw_only=True)
class _DenseUnit:
    """Tensors that are cut alike; `rows` is 1 where they may not be cut."""

    tensors: Mapping[str, Tensor]
    rows: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def cut(self, first_row: int, last_row: int) -> dict[str, Tensor | Rows]:
        if (first_row, last_row) == (0, self.rows):
            return dict(self.tensors)
        part = slice(first_row, last_row)
        return {key: Rows(tensor=t[part], first_row=first_row, num_rows=self.rows) for key, t in self.tensors.items()}


def _scalars(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    state = optimizer.state[parameter]
    return {
        name: v.cpu() if isinstance(v, Tensor) else v
        for name, v in state.items()
        if not isinstance(v, Tensor) or v.ndim == 0
    }


def _read_dense_states(
    checkpoint: CheckpointSource, keys: set[str], name: str, parameter: nn.Parameter
) -> dict[str, Tensor]:
    prefix = f"dense/{name}/"
    scopes = {key[len(prefix) :] for key in keys if key.startswith(prefix)} - {"weight", "buffer"}
    return {scope: checkpoint.read(prefix + scope).to(parameter.device) for scope in sorted(scopes) if "/" not in scope}
