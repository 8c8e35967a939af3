"""What one rank notes of its steps for `algorithms.step_record`: digests of inputs, outputs of modules, gradients
and updates, and counts of assignments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from moe_lightning import seams
from moe_lightning.algorithms.run_comparison import NOISE
from moe_lightning.algorithms.step_record import tensors_of
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.world import World
from moe_lightning.modules.experts import Experts
from moe_lightning.modules.moe_layer import MoELayer
from moe_lightning.state.expert_stacks import ExpertStack
from moe_lightning.state.row_blocks import blocks_of, cut_of, local
from moe_lightning.state.table import State

Note = list[Any]
"""Of a block of a tensor: name, offsets, projection, squared norm, size, slack."""

_ULP = 1e-7


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a parameter that is on this rank.

    Attributes:
        name: of the tensor; of an expert's by itself.
        offsets: where the block begins in it.
        of: the block's values in a tensor that is laid out as the parameter on this rank.
    """

    name: str
    parameter: nn.Parameter
    offsets: tuple[int, ...]
    of: Callable[[Tensor], Tensor]


@dataclass
class _Micro:
    """A micro-batch: what `step_record.merged` reads, while it grows."""

    rows: list[tuple[str, list[Any]]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)


class Recorder(Callback):
    """Notes the steps of a training.

    Args:
        tolerance: see `run_comparison.compare`.

    Attributes:
        notes: of the steps that have ended: of every rank, in rank order.
        world: whose ranks gather them.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.notes: list[list[dict[str, Any]]] = []
        self.world = World.single()
        self._handles: list[RemovableHandle] = []
        self._note: dict[str, Any] = {}
        self._micro: _Micro | None = None
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._batch_rows = 0

    # ------------------------------------------------------------------ hooks of modules

    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to the modules whose outputs are whole on a rank."""
        names = {id(part): name for name, part in pl_module.named_modules()}
        inside = {id(p) for m in pl_module.modules() if isinstance(m, Experts) for p in m.modules()}
        if places_of(trainer).sees_activations:
            for part in pl_module.modules():
                if part is not pl_module and id(part) not in inside:
                    self._handles.append(part.register_forward_hook(partial(self._saw, names[id(part)])))

    def end(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _saw(self, name: str, part: nn.Module, arguments: Any, output: Any) -> None:
        if self._micro is None:
            return
        for suffix, tensor in _tensors_in(output):
            self._add(f"{name}{suffix}", tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        micro = self._micro
        assert micro is not None
        calls = micro.names[name] = micro.names.get(name, -1) + 1
        name = f"{name} (call {calls + 1})" if calls else name
        place = self._place
        count = self._batch_rows if place.knows_samples else 1
        digests = rows_of(tensor, count, place.part, place.parts, whole=not place.knows_samples)
        if digests is not None:
            micro.rows.append((name, list(digests)))

    # ------------------------------------------------------------------ hooks of the trainer

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._place = places_of(trainer)
        if not self._note:
            self._note = {"rank": self.world.rank, "micros": [], "gradients": [], "clipped": [], "updates": []}
            self._note["weights"] = [note_of(b, b.of(local(b.parameter.detach()))) for b in blocks(trainer, pl_module)]
        leaves = [leaf for leaf in seams.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        self._batch_rows = len(leaves[0]) if leaves else 1
        self._micro = _Micro()
        for number, leaf in enumerate(leaves):
            self._add(f"input {number}", leaf)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        micro, self._micro = self._micro, None
        if micro is None:
            return
        place, samples = self._place, samples_of(trainer, self._place, len(self._note["micros"]))
        names = {id(part): name for name, part in pl_module.named_modules()}
        counts = [
            [names[id(m)], m.statistics.tokens_NE.sum(0).tolist(), m.statistics.computed_NE.sum(0).tolist()]
            for m in pl_module.modules()
            if isinstance(m, MoELayer) and m.statistics is not None
        ]
        real = {row: sample for row, sample in enumerate(samples) if sample is not None}
        rows = [[name, shape, [found[row] for row in real]] for name, (shape, found) in micro.rows]
        self._note["micros"].append(
            {
                "samples": list(real.values()),
                "loss": float(loss.detach()) / place.ranks if place.has_loss and real else None,
                "rows": rows if place.speaks else [],
                "counts": counts,
                "is_of_rank": not place.knows_samples,
            }
        )

    @override
    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._note:
            return
        here = list(blocks(trainer, pl_module))
        self._note["gradients"] = _of_gradients(here)
        gathered = all_gather_json({k: self._note[k] for k in ("rank", "gradients")}, self.world)
        whole = tensors_of(gathered, "gradients")
        for block in here:
            if block.parameter.grad is None:
                continue
            value = block.of(local(block.parameter.detach()))
            gradient = block.of(local(block.parameter.grad)).abs().float()
            digest = whole[block.name]
            limit = max(NOISE, 10 * self.tolerance) * digest.norm / math.sqrt(max(1, digest.size))
            certain = (gradient / limit).clamp_(max=1.0) if limit > 0 else torch.zeros_like(gradient)
            self._before[_key(block)] = value.clone(), certain

    @override
    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._micro = None
        if seams.is_accumulating(trainer) or not self._note:
            return
        here = list(blocks(trainer, pl_module))
        self._note["clipped"] = _of_gradients(here)
        for block in here:
            if _key(block) in self._before:
                before, certain = self._before[_key(block)]
                value = block.of(local(block.parameter.detach()))
                moved = (value.float() - before.float()) * certain.to(value.device)
                slack = _ULP * float(torch.linalg.vector_norm(before.double()))
                self._note["updates"].append(note_of(block, moved, slack))
        self.notes.append(all_gather_json(self._note, self.world))
        self._note, self._before = {}, {}


def _key(block: Block) -> str:
    return f"{block.name} {block.offsets}"


def _of_gradients(here: Sequence[Block]) -> list[Note]:
    with_gradients = [block for block in here if block.parameter.grad is not None]
    return [note_of(block, block.of(local(block.parameter.grad))) for block in with_gradients]  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a rank's place


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which samples a rank's batch holds.

    Attributes:
        knows_samples: the strategy tells of each sample where it is in the global batch; else a rank's batch is one.
        sees_activations: outputs of modules are whole on a rank, but for their positions.
        speaks: no other rank notes the same of these samples.
        part, parts: of each sample's positions.
        rank, ranks: among those with other batches, where the strategy tells nothing.
        has_loss: what is differentiated is this rank's part of the loss of the step.
    """

    knows_samples: bool = False
    sees_activations: bool = True
    speaks: bool = True
    part: int = 0
    parts: int = 1
    rank: int = 0
    ranks: int = 1
    has_loss: bool = True


def samples_of(trainer: pl.Trainer, place: Place, micro: int) -> list[int | None]:
    """The position in the step of every sample of the running micro-batch; None of a stand-in.

    Args:
        micro: its number in the step, where the strategy tells nothing: then its batch is one sample.
    """
    if not place.knows_samples:
        return [micro * place.ranks + place.rank]
    batch = trainer.strategy.steps.batch  # type: ignore[attr-defined]
    found: list[int | None] = []
    for piece in batch.pieces or (batch,):
        found += [*range(piece.offset, piece.offset + piece.count), *[None] * (piece.rows - piece.count)]
    return found


def places_of(trainer: pl.Trainer) -> Place:
    """Of a rank of any strategy."""
    worlds = getattr(trainer.strategy, "worlds", None)
    if worlds is None:
        return Place(rank=trainer.global_rank, ranks=trainer.world_size)
    mesh = worlds.mesh
    part, parts = mesh.shape.place(mesh.whole.rank, {"cp"})
    return Place(
        knows_samples=True,
        sees_activations=mesh.shape.tp == mesh.shape.pp == 1,
        speaks=mesh.shape.index(mesh.whole.rank, "tp") == mesh.shape.index(mesh.whole.rank, "pp") == 0,
        part=part,
        parts=parts,
        has_loss=mesh.shape.pp == 1,
    )


def blocks(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[Block]:
    """The trained parameters on this rank in the module's order, experts each by itself."""
    state: State | None = None
    if hasattr(trainer.strategy, "worlds"):
        state = trainer.strategy.state.training_state()  # type: ignore[attr-defined]
    stack_of: Mapping[nn.Parameter, ExpertStack] = {} if state is None else state.stack_of
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not parameter.requires_grad:
            continue
        stack = stack_of.get(parameter)
        if stack is not None:
            for slot, expert in stack.held():
                offsets = (0,) * (parameter.ndim - 1)
                yield Block(
                    name=f"{name} of expert {expert}", parameter=parameter, offsets=offsets, of=partial(_row, slot)
                )
        elif state is not None and (cut := cut_of(parameter)) is not None:
            for here, block in blocks_of(cut, state.cut.part):
                yield Block(name=name, parameter=parameter, offsets=block.offsets, of=partial(_slices, here))
        else:
            yield Block(name=name, parameter=parameter, offsets=(0,) * parameter.ndim, of=lambda tensor: tensor)


def _row(slot: int, tensor: Tensor) -> Tensor:
    return tensor[slot]


def _slices(here: tuple[slice, ...], tensor: Tensor) -> Tensor:
    return tensor[here]


# ---------------------------------------------------------------------- digests


def note_of(block: Block, values: Tensor, slack: float = 0.0) -> Note:
    """The digest of a block."""
    values = values.detach()
    return [block.name, list(block.offsets), _projected(values, block.offsets), _square(values), values.numel(), slack]


def rows_of(
    tensor: Tensor, count: int, part: int, parts: int, *, whole: bool
) -> tuple[list[int], list[list[float]]] | None:
    """The shape of a sample, and (projection, squared norm) of each; None where the first dimension is not samples.

    Args:
        tensor: of `count` samples, or of tokens one sample after the other.
        part, parts: of the positions of each sample, which are its first dimension.
        whole: the tensor is one sample.
    """
    if not tensor.ndim and not whole:
        return None
    values = tensor.detach()
    values = values.double() if not values.is_floating_point() else values.float()
    if whole:
        values = values[None]
    elif not count or len(values) % count or not len(values):
        return None
    elif len(values) != count:
        values = values.reshape(count, len(values) // count, *values.shape[1:])
    positions = values.shape[1] if values.ndim > 1 else 1
    squares = values.double().square().flatten(1).sum(1) if values.ndim > 1 else values.double().square()
    projected = values
    for dim in range(values.ndim - 1, 0, -1):
        first = part * positions if dim == 1 else 0
        projected = projected @ _wave(first, values.shape[dim], dim).to(projected)
    shape = [positions * parts, *values.shape[2:]] if values.ndim > 1 else []
    return shape, torch.stack([projected.double(), squares], dim=1).tolist()


def _projected(values: Tensor, offsets: Sequence[int]) -> float:
    values = values.float() if values.element_size() < 4 else values
    for dim in range(values.ndim - 1, -1, -1):
        values = values @ _wave(offsets[dim], values.shape[dim], dim).to(values)
    return float(values)


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.double())) ** 2


@lru_cache(maxsize=1024)
def _wave(first: int, size: int, dim: int) -> Tensor:
    """Fixed numbers in [-1, 1] for places along a dimension, float64."""
    places = torch.arange(first, first + size, dtype=torch.float64)
    return 2.0 * torch.frac((torch.sin((places + 1.0) * 12.9898 * (dim + 1)) * 43758.5453).abs()) - 1.0


def _tensors_in(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's output that have as many rows as the first one."""
    named: list[tuple[str, Any]] = []
    if isinstance(output, Tensor):
        named = [("", output)]
    elif isinstance(output, tuple | list):
        named = [(f"[{number}]", item) for number, item in enumerate(output)]
    elif isinstance(output, Mapping):
        named = [(f"[{key}]", value) for key, value in output.items()]
    elif dataclasses.is_dataclass(output):
        named = [(f".{item.name}", getattr(output, item.name)) for item in dataclasses.fields(output)]
    tensors = [(suffix, value) for suffix, value in named if isinstance(value, Tensor)]
    return ((suffix, value) for suffix, value in tensors if value.shape[:1] == tensors[0][1].shape[:1])
