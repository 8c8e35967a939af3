"""State of a training run in checkpoints: the pieces this rank writes, their restore, replayed windows.

A replicated expert is written by one of its holders, a dense tensor in row shards by all ranks, for the whole session
by the same rank: shards are balanced on top of the mean bytes of experts per checkpoint, because an arena reserves
memory for the keys of its rank once. When experts move, only a rank that has lost an expert stops writing it.

After a restore to a window, training runs the window's steps again from the same samples, until the state of every
expert is whole. After each update, experts whose turn is yet to come are set to the weights of the step, and those
whose turn it is get their whole state. Their updates are discarded; their gradients count in the norm, as before.
Source: MoEvement (arXiv 2412.15411) 3.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.loader import CheckpointSource
from moe_lightning.checkpoint.memory import MemoryCheckpoint
from moe_lightning.checkpoint.schedule import window_bytes
from moe_lightning.checkpoint.sharding import Module, ShardPlan, balanced_expert_writers, shard_checkpoint
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.state.averages import AVERAGE, OBJECT_KEY
from moe_lightning.state.pieces import Block, StatePiece, is_expert_key, is_moment, parse_dense_key, parse_expert_key
from moe_lightning.state.table import State, require_same_order
from moe_lightning.state.tensors import is_digest, require_same_base


def preserved_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restore the global generators, and that of this rank's device, after the block.

    By default torch would save those of all GPUs of the machine, and warn of it.

    """
    return torch.random.fork_rng([] if device.type == "cpu" else [device.index], device_type=device.type)


def random_state(device: torch.device) -> dict[str, Any]:
    """The global random generators of this process, and that of its device, as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if device.type == "cuda":  # a training on CPUs leaves GPUs alone
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(checkpoint: CheckpointSource, world: World) -> None:
    """Continue this rank's generators; a rank that is not in the checkpoint keeps its own."""
    key = f"rng/{world.rank}"
    if key not in checkpoint.keys("rng/"):
        return
    state = checkpoint.read_object(key)
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)


def scalars_key(rank: int | str) -> str:
    """Return the key of the scalar states that a rank has of optimizers, where rank 0 does not have them all."""
    return f"scalars/{rank}"


SCOPES_OF_A_MODEL = (AVERAGE, "master", "weight")
"""Scopes of a parameter as a model that does not train on is read, the first that a checkpoint has."""

Writers = Mapping[tuple[int, int], int]
"""(layer, expert) -> the rank that writes it."""

RowPlan = Mapping[str, tuple[int, int] | None]
"""Parameter `dense/{name}` -> the rows of it, and of its optimizer states, that a rank writes; None: all."""


class TrainingState(State):
    """The state table, written and restored."""

    @property
    def num_experts(self) -> int:
        """E of every layer; 0 for a dense model."""
        counts = {stack.num_experts for stack in self.stacks}
        if len(counts) > 1:
            raise ConfigurationError(
                f"partial checkpoints need the same number of experts in every layer, not {sorted(counts)}"
            )
        return counts.pop() if counts else 0

    @property
    def num_layers(self) -> int:
        return len(self.stacks)

    def owners(self, writers: Writers | None = None) -> IntArray:
        """int64 [L, E]: the rank that writes each expert (None: as `expert_writers` says)."""
        writers = self.expert_writers() if writers is None else writers
        return np.array([[writers[la, e] for e in range(self.num_experts)] for la in range(self.num_layers)])

    # ------------------------------------------------------------------ writing

    def dense_plan(self, experts_per_checkpoint: int) -> RowPlan:
        """Plan the rows of parameters that this rank writes in a session that saves so many experts of each layer at a
        time.
        """
        shared = self._dense_pieces()[1]
        plan: dict[str, tuple[int, int] | None] = {}
        for part in self._plan(experts_per_checkpoint, shared).pieces:
            if part.rank == self.rank:
                rows = part.first_row, part.last_row
                plan[part.module] = rows if rows != (0, _rows(shared[part.module])) else None
        return plan

    def dense_of(self, plan: RowPlan) -> dict[str, StatePiece]:
        """Return what this rank writes besides experts, as it is bound now: the rows of a plan, and its share of what
        not every rank has. Further blocks of a tensor have names that no other piece has.

        Buffers are copies, because the next forward pass may change them, which waits for no snapshot.
        """
        whole, shared = self._dense_pieces()
        found: dict[str, StatePiece] = {}
        for module, rows in plan.items():
            found |= {p.key: p if rows is None else p.rows(*rows) for p in shared[module]}
        for piece in filter(None, (piece.share(self.rank) for piece in whole)):
            own = replace(piece, tensor=piece.tensor.clone()) if piece.key.endswith("/buffer") else piece
            found[f"{piece.key} at {piece.block.offsets}" if piece.key in found else piece.key] = own
        return found

    def expert_addresses(self) -> list[int]:
        """Addresses of the tensors that hold experts and their optimizer states: others once one is bound anew."""
        stacks = (p for stack in self.stacks for p in stack.saved.values())
        return [tensor.data_ptr() for p in stacks for tensor in (p, *self.moments(p).values())]

    def rank_bytes(self, experts_per_checkpoint: int) -> tuple[int, ...]:
        """Predicted bytes of every rank when the selected share of the experts is written."""
        whole, shared = self._dense_pieces()
        load = list(self._plan(experts_per_checkpoint, shared).rank_bytes)
        for piece in whole:
            if piece.block.sizes != piece.block.whole:
                own = piece.share(self.rank)
                load[self.rank] += own.tensor.nbytes if own is not None else 0
            elif not self.is_of_buffer(piece.key):
                load[piece.holders[0]] += piece.tensor.nbytes
        return tuple(load)

    def window_bytes(self, k: int, computed_in: torch.dtype | None) -> tuple[float, ...]:
        """Bytes of each snapshot of a lossless window of k experts a turn, of all ranks together.

        Args:
            computed_in: what experts compute in, where that is less than their weights.
        """
        layers, experts = range(self.num_layers), self.num_layers * self.num_experts
        whole = sum(map(self._expert_bytes, layers)) / len(layers)
        weights = [p for stack in self.stacks for p in stack.saved.values()]
        weight = sum(p.shape[1:].numel() * (computed_in or p.dtype).itemsize for p in weights) / len(layers)
        dense = sum(self.rank_bytes(self.num_experts)) - experts * whole
        shape = {"num_layers": self.num_layers, "num_experts": self.num_experts, "k": k}
        return window_bytes(**shape, dense_bytes=dense, expert_bytes=whole, weight_bytes=weight)

    def _dense_pieces(self) -> tuple[list[StatePiece], dict[str, list[StatePiece]]]:
        """Pieces that not every rank has, and those of buffers; and those of each parameter that every rank has, which
        are cut alike.
        """
        whole: list[StatePiece] = []
        shared: dict[str, list[StatePiece]] = defaultdict(list)
        for piece in self.dense_pieces():
            if self.is_of_buffer(piece.key) or len(piece.holders) < self.world_size:
                whole.append(piece)
            else:
                shared[piece.key.rpartition("/")[0]].append(piece)
        return whole, shared

    def _plan(self, experts_per_checkpoint: int, shared: Mapping[str, Sequence[StatePiece]]) -> ShardPlan:
        share = experts_per_checkpoint / max(1, self.num_experts)
        return shard_checkpoint(
            self.expert_writers(),
            expert_bytes=int(self._expert_bytes(0) * share) if self.stacks else 0,
            modules=[
                Module(name=name, nbytes=sum(p.tensor.nbytes for p in pieces), rows=_rows(pieces))
                for name, pieces in shared.items()
            ],
            num_ranks=self.world_size,
        )

    def _expert_bytes(self, layer: int) -> int:
        """Bytes of the tensors of an expert."""
        stacks = [t for p in self.stacks[layer].saved.values() for t in (p, *self.moments(p).values())]
        return sum(stack.shape[1:].numel() * stack.element_size() for stack in stacks)

    def expert_writers(self, before: Writers | None = None) -> dict[tuple[int, int], int]:
        """(layer, expert) -> the rank that writes it, one of its holders, the same on every rank; who wrote it before
        goes on where it can."""
        if not self.stacks:
            return {}
        holders = [[stack.placement.holders(e) for e in range(self.num_experts)] for stack in self.stacks]
        return balanced_expert_writers(holders, before)

    def experts_of(self, writers: Writers) -> dict[str, StatePiece]:
        """The pieces of the experts that this rank writes."""
        return {
            piece.key: piece
            for layer, stack in enumerate(self.stacks)
            for slot, expert in stack.held()
            if writers[layer, expert] == self.rank
            for piece in self.rows(layer, slot, expert)
        }

    def all_rows(self) -> dict[str, StatePiece]:
        """One piece for every tensor of every slot of this rank, vacant ones too: more experts it never writes."""
        return {
            piece.key: piece
            for layer, stack in enumerate(self.stacks)
            for slot in range(len(stack.slot_experts))
            for piece in self.rows(layer, slot, slot)
        }

    # ------------------------------------------------------------------ restoring

    def require_no_others(self, checkpoint: CheckpointSource) -> None:
        """Refuse a checkpoint of which a restore would leave weights or buffers out.

        Raises:
            CheckpointError: it has some that the model lacks.
        """
        dense = {name for name, _ in chain(self.module.named_parameters(), self.module.named_buffers())}
        experts = {(n, name): stack.num_experts for n, stack in enumerate(self.stacks) for name in stack.saved}

        def is_known(key: str) -> bool:
            if not is_expert_key(key):
                return parse_dense_key(key)[0] in dense
            layer, expert, _, name = parse_expert_key(key)
            return expert < experts.get((layer, name), 0)

        keys = chain(checkpoint.keys("dense/"), checkpoint.keys("expert/"))
        unknown = [key for key in keys if not is_moment(key) and not is_known(key)]
        if unknown:
            raise CheckpointError(
                f"{checkpoint.path.name} has {unknown[0]!r}, which the model lacks ({len(unknown)} unknown tensors): "
                "use the configuration it was written with"
            )

    @torch.no_grad()
    def restore_model(self, checkpoint: CheckpointSource, *, strict: bool = True) -> None:
        """Fill parameters and buffers in place; with their averages, if the checkpoint has some and this run does not
        average.

        Args:
            strict: False leaves what the checkpoint lacks as it is.

        Raises:
            CheckpointError: a tensor is missing or of another shape: the checkpoint is of another model.
        """
        scopes, saved = SCOPES_OF_A_MODEL[self.averages is not None :], {*checkpoint.keys()}
        for layer, stack in enumerate(self.stacks):
            prefix = f"expert/{layer}/0/"
            for name, parameter in stack.saved.items():
                # As it was written; parameters of an expert may differ in precision, and in having an average.
                scope = next((s for s in scopes if f"{prefix}{s}/{name}" in saved), "weight")
                if not strict and f"{prefix}{scope}/{name}" not in saved:
                    continue
                for slot, expert in stack.held():
                    key = checkpoint.key_at(f"expert/{layer}/{expert}/{scope}/{name}", checkpoint.first_step)
                    _restore(checkpoint, key, parameter.data[slot])
        for piece in self.pieces():
            if not is_expert_key(piece.key) and not is_moment(piece.key):
                average = f"{piece.key.rpartition('/')[0]}/{AVERAGE}"
                key = average if AVERAGE in scopes and average in saved else piece.key
                if strict or key in saved:
                    _restore(checkpoint, key, piece.tensor, piece.block)

    @torch.no_grad()
    def restore_dense(self, checkpoint: CheckpointSource) -> None:
        """Fill everything but experts in place, optimizer states included, which are made where they are missing.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        self.adopt(self._objects_in(checkpoint), checkpoint.shapes())
        for piece in self.pieces():
            if not is_expert_key(piece.key):
                _restore(checkpoint, piece.key, piece.tensor, piece.block)

    @torch.no_grad()
    def restore_optimizers(self, checkpoint: CheckpointSource) -> None:
        """Give every optimizer the state of the parameters it keeps.

        Raises:
            CheckpointError: the checkpoint has no such optimizer, or its groups differ.
        """
        objects = self._objects_in(checkpoint)
        for index in range(len(self.optimizers)):
            own, names = self.names_in_groups(index), objects[f"optimizer/{index}"]["names"]
            if (sizes := [*map(len, names)]) != (own_sizes := [*map(len, own)]):
                raise CheckpointError(
                    f"{checkpoint.path.name} has parameter groups of {sizes} tensors in optimizer {index}, this run of "
                    f"{own_sizes}: use the configuration it was written with"
                )
            require_same_order(names, own)
        for optimizer, _ in self.optimizers:
            optimizer.state.clear()
        self.adopt(objects, checkpoint.shapes())
        for piece in self.pieces():
            if is_moment(piece.key):
                _restore(checkpoint, piece.key, piece.tensor, piece.block)

    def _objects_in(self, checkpoint: CheckpointSource) -> dict[str, Any]:
        """Return what `State.objects` of one process would be; scalars come from all ranks that saved theirs."""
        names = [f"optimizer/{index}" for index in range(len(self.optimizers))]
        found: dict[str, Any] = {name: checkpoint.read_object(name) for name in names}
        for key in checkpoint.keys(scalars_key("")):
            for name, scalars in checkpoint.read_object(key).items():
                if name in found:
                    found[name]["scalars"] = scalars | found[name]["scalars"]
        if OBJECT_KEY in checkpoint.keys(OBJECT_KEY):
            found[OBJECT_KEY] = checkpoint.read_object(OBJECT_KEY)
        return found

    @torch.no_grad()
    def restore_experts(self, checkpoint: CheckpointSource, experts: Collection[tuple[int, int]]) -> None:
        """Fill the rows of some (layer, expert) pairs that live here, weights and optimizer states, in place; the
        optimizers must have made their states.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        for layer, stack in enumerate(self.stacks):
            for slot, expert in stack.held():
                if (layer, expert) in experts:
                    for piece in self.rows(layer, slot, expert):
                        _restore(checkpoint, piece.key, piece.tensor)


def _restore(checkpoint: CheckpointSource, key: str, tensor: torch.Tensor, block: Block | None = None) -> None:
    """Fill a tensor; one that is a digest of frozen weights must be what it is.

    Raises:
        CheckpointError: the frozen weights are others, or there is no such tensor of this shape.
    """
    if not is_digest(key):
        checkpoint.read_into(key, tensor, block=block)
        return
    saved = torch.empty_like(tensor)
    checkpoint.read_into(key, saved, block=block)
    require_same_base(saved, tensor, key, checkpoint.path.name)


def _rows(pieces: Sequence[StatePiece]) -> int:
    """Rows by which pieces can be cut alike, 1 where they cannot."""
    shapes = {piece.tensor.shape for piece in pieces}
    return max(1, next(iter(shapes))[0]) if len(shapes) == 1 and pieces[0].tensor.ndim else 1


def replay_of(restored: CheckpointSource, max_steps: int) -> WindowReplay | None:
    """The replay that makes restored state whole; None if it is whole, and what was read is released.

    Args:
        max_steps: of the training; -1: no limit.

    Raises:
        ConfigurationError: training ends before the state is whole.
    """
    if restored.first_step == restored.step:
        restored.release()
        return None
    if 0 <= max_steps < restored.step:
        raise ConfigurationError(
            f"max_steps={max_steps} ends before the state of {restored.path.name} is whole, whose steps "
            f"{restored.first_step + 1} to {restored.step} are run again: raise max_steps to {restored.step}"
        )
    return WindowReplay(restored)


class WindowReplay:
    """A replay that has begun: the state is that after the window's first step.

    Args:
        source: what was restored; it must be readable until the end.

    Attributes:
        first, last: steps of the window; after the last one everything is whole.
        step: updates that the state contains.
        reaches_all: experts may move meanwhile: wherever they are, what they lack can be read.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._versions = source.expert_versions()
        self.first = self.step = source.first_step
        self.last = source.step
        self.reaches_all = not isinstance(source, MemoryCheckpoint)

    @property
    def is_over(self) -> bool:
        """True if the state is whole again."""
        return self.step >= self.last

    @torch.no_grad()
    def advance(self, state: TrainingState) -> None:
        """After an update, before anything sees the weights: set what it could not compute."""
        self.step += 1
        for layer, stack in enumerate(state.stacks):
            for slot, expert in stack.held():
                turn = int(self._versions[layer, expert])
                for piece in state.rows(layer, slot, expert) if turn >= self.step else ():
                    if turn == self.step:
                        self._source.read_into(piece.key, piece.tensor)
                    elif not is_moment(piece.key):
                        self._source.read_into(self._source.key_at(piece.key, self.step), piece.tensor)
