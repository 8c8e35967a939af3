"""Recorder of the steps of one rank: digests of inputs, outputs of modules, gradients and updates, and counts of
assignments, for `doctor.comparison`.

A digest is a projection on fixed numbers that belong to positions, and a squared norm; it adds up over the ranks that
hold parts of a tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.data.sampler import StepSlice
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.doctor.comparison import NOISE, TENSORS, tensors_of
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import AbsentBlock
from moe_lightning.moe.router import Router
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.tensor import Columns, PartedForward
from moe_lightning.state.table import State
from moe_lightning.state.tensors import blocks_of, cut_of, local
from moe_lightning.strategies.stages import StageCut

Spans = Sequence[tuple[int, int]]
"""Where a rank's numbers along a dimension lie in the whole: the first place and the number of each block."""


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """Position of a rank's part of a sample in the whole sample.

    Attributes:
        shape: of the whole.
        spans: by dimension.
        share: that this rank tells of its values, where others have the same.
    """

    shape: list[int]
    spans: list[Spans]
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Ranks that compute a sample together.

    Attributes:
        part, parts: of its positions, which are its first dimension, or the second after heads.
        tensor, tensors: among the ranks that compute parts of layers.
    """

    part: int = 0
    parts: int = 1
    tensor: int = 0
    tensors: int = 1

    def whole(self, here: Sequence[int], copies: int) -> SampleLayout:
        """Nothing but positions is cut.

        Args:
            here: the shape of a sample on this rank.
            copies: ranks that have the same values.
        """
        return self._cut(here, None, None, 1.0 / copies)

    def layouts(self, here: Sequence[int], columns: Spans | None = None) -> Iterator[SampleLayout]:
        """Whatever a module's output may be: whole on every rank that computes parts of layers, or cut along one of its
        dimensions; with positions first, or after heads. Their shapes differ, so that of the same output in one process
        says which it is.

        Args:
            here: the shape of a sample on this rank.
            columns: where numbers of its last dimension lie; None: those of each rank side by side.
        """
        yield self.whole(here, self.tensors)
        if self.tensors > 1:
            told_apart = here if self.parts == 1 or len(here) < 3 else here[:1]  # heads or positions, who knows
            yield from (self._cut(here, dim, columns) for dim in range(len(told_apart)))
        elif self.parts > 1 and len(here) > 1:
            yield self._cut(here, None, None, positions=1)  # heads come before them

    def _cut(
        self, here: Sequence[int], by: int | None, columns: Spans | None, share: float = 1.0, positions: int = 0
    ) -> SampleLayout:
        shape: list[int] = []
        spans: list[Spans] = []
        for dim, size in enumerate(here):
            part, parts = (self.part, self.parts) if dim == positions else (0, 1)
            if dim == by:
                part, parts = part * self.tensors + self.tensor, parts * self.tensors
            shape.append(size * parts)
            is_given = dim == by == len(here) - 1
            spans.append(columns if columns is not None and is_given else [(part * size, size)])
        return SampleLayout(shape=shape, spans=spans, share=share)


def columns_of(part: nn.Module) -> Spans | None:
    """Return the spans of the outputs of a layer that computes a part of each of several sections; None for others."""
    forward = part.__dict__.get("forward")
    if not isinstance(forward, PartedForward) or not isinstance(forward.style, Columns) or not forward.style.sections:
        return None
    rank, size, sections = forward.ranks.rank, forward.ranks.size, forward.style.sections
    starts = accumulate(sections, initial=0)
    return [(start + rank * (n // size), n // size) for start, n in zip(starts, sections, strict=False)]


def samples_in(tensor: Tensor, count: int | None) -> Tensor | None:
    """Floating-point [samples, ...]; None where the first dimension is not samples.

    Args:
        tensor: of `count` samples, or of tokens one sample after the other.
        count: None: the tensor is one sample.
    """
    values = tensor.detach()
    values = values.double() if not values.is_floating_point() else values.float()
    if count is None:
        return values[None]
    if not tensor.ndim or not count or not len(values) or len(values) % count:
        return None
    return values if len(values) == count else values.reshape(count, len(values) // count, *values.shape[1:])


def digests_of(samples: Tensor, layout: SampleLayout) -> list[list[float]]:
    """(projection, squared norm) of each sample."""
    squares = samples.double().square()
    projected = samples
    for dim in range(samples.ndim - 1, 0, -1):
        wave = torch.cat([_wave(first, size, dim) for first, size in layout.spans[dim - 1]])
        squares, projected = squares.sum(dim), projected @ wave.to(projected)
    found: list[list[float]] = (torch.stack([projected.double(), squares], dim=1) * layout.share).tolist()
    return found


def projection(values: Tensor, offsets: Sequence[int]) -> float:
    """Return the projection of a block that begins at these positions of its tensor."""
    values = values.float() if values.element_size() < 4 else values
    for dim in range(values.ndim - 1, -1, -1):
        values = values @ _wave(offsets[dim], values.shape[dim], dim).to(values)
    return float(values)


def square(values: Tensor) -> float:
    """The squared norm."""
    return float(torch.linalg.vector_norm(values.double())) ** 2


@lru_cache(maxsize=1024)
def _wave(first: int, size: int, dim: int) -> Tensor:
    """Fixed numbers in [-1, 1] for places along a dimension, float64."""
    places = torch.arange(first, first + size, dtype=torch.float64)
    return 2.0 * torch.frac((torch.sin((places + 1.0) * 12.9898 * (dim + 1)) * 43758.5453).abs()) - 1.0


def tensors_in(output: Any) -> Iterator[tuple[str, Tensor]]:
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


Note = list[Any]
"""Of a block of a tensor: name, offsets, projection, squared norm, size, slack."""

_ULP = 1e-7


@dataclass(frozen=True, kw_only=True)
class ParameterBlock:
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
    """A micro-batch: what `step_record.merged` reads, while it grows.

    Attributes:
        count: its samples, dummies among them; None: it is one.
        rows: (name, shape of the whole, digests of samples).
        calls: of each name.
    """

    count: int | None
    rows: list[tuple[str, list[int], list[list[float]]]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, tensor: Tensor, layouts: Callable[[Sequence[int]], Iterable[SampleLayout]]) -> None:
        """An input or output, in all ways in which a sample of this shape may lie in the whole of it."""
        self.calls[name] += 1
        name = f"{name} (call {self.calls[name]})" if self.calls[name] > 1 else name
        samples = samples_in(tensor, self.count)
        if samples is not None:
            self.rows += [(name, layout.shape, digests_of(samples, layout)) for layout in layouts(samples.shape[1:])]

    def record(self, samples: Sequence[int | None]) -> dict[str, Any]:
        """Without dummies.

        Args:
            samples: their positions in the step; None of a dummy.
        """
        real = {row: sample for row, sample in enumerate(samples) if sample is not None}
        rows = [[name, shape, [digests[row] for row in real]] for name, shape, digests in self.rows]
        return {"samples": list(real.values()), "rows": rows, "loss": None, "counts": [], "is_of_rank": False}


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
        self._pieces: dict[StepSlice, _Micro] = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._biases: dict[str, Tensor] = {}
        self._had_gradient: set[str] = set()
        self._running: Callable[[nn.Module], StepSlice | None] | None = None

    # ------------------------------------------------------------------ hooks of modules

    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew, and listen to the modules, but for those of experts and of other stages of a pipeline."""
        self.notes, self._note, self._before, self._had_gradient = [], {}, {}, set()
        inside = {p for m in pl_module.modules() if isinstance(m, Experts) for p in m.modules()}
        self._running = _running(trainer, pl_module) if places_of(trainer).stages > 1 else None
        for name, part in pl_module.named_modules():
            if part is not pl_module and part not in inside and not isinstance(part, AbsentBlock):
                self._handles.append(part.register_forward_hook(partial(self._saw, name)))

    def end(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _saw(self, name: str, part: nn.Module, arguments: Any, output: Any) -> None:
        micro = self._micro
        if micro is not None and self._running is not None:
            piece = self._running(part)
            micro = None if piece is None else self._pieces.setdefault(piece, _Micro(piece.rows))
        if micro is None:
            return
        layouts = partial(self._place.sharing.layouts, columns=columns_of(part))
        for suffix, tensor in tensors_in(output):
            micro.add(f"{name}{suffix}", tensor, layouts)

    # ------------------------------------------------------------------ hooks of the trainer

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        self._place = place = places_of(trainer)
        if not self._note:
            self._note = {"rank": self.world.rank, "micros": [], **{kind: [] for kind in TENSORS}}
            self._note["weights"] = [note_of(b, b.of(local(b.parameter.detach()))) for b in blocks(trainer, pl_module)]
            self._biases = {name: bias.clone() for name, bias in selection_biases(pl_module)}
        leaves = [leaf for leaf in private_torch.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        self._micro, self._pieces = _Micro(None), {}
        if place.knows_samples:
            self._micro.count = len(leaves[0]) if leaves else 1
        copies = place.sharing.tensors * place.stages
        for number, leaf in enumerate(leaves):
            self._micro.add(f"input {number}", leaf, lambda here: [place.sharing.whole(here, copies)])

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        micro, self._micro = self._micro, None
        if micro is None:
            return
        place, samples = self._place, samples_of(trainer, self._place, len(self._note["micros"]))
        of_rank = loss.detach() / place.ranks
        if place.stages > 1:
            of_rank = trainer.strategy.last_stage_loss  # type: ignore[attr-defined]
        names = {id(part): name for name, part in pl_module.named_modules()}
        counts = [
            [names[id(m)], m.statistics.tokens_NE.sum(0).tolist(), m.statistics.computed_NE.sum(0).tolist()]
            for m in pl_module.modules()
            if isinstance(m, MoELayer) and m.statistics is not None
        ]
        recorded = micro.record(samples)
        recorded |= {"counts": counts, "is_of_rank": not place.knows_samples}
        recorded["loss"] = float(of_rank) if recorded["samples"] and of_rank is not None else None
        self._note["micros"] += [recorded, *(piece.record(_samples_in(at)) for at, piece in self._pieces.items())]

    @override
    @torch.no_grad()
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Under manual optimization gradients may be clipped before any hook of an update."""
        if self._note and not pl_module.automatic_optimization and not self._before:
            self._note["gradients"] = _of_gradients(blocks(trainer, pl_module))

    @override
    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._note:
            return
        is_first = not self._before
        here = list(blocks(trainer, pl_module))
        gradients = _of_gradients(here)
        if pl_module.automatic_optimization:
            self._note["gradients"] = gradients
        if is_first:
            self._note["counted"] = [_note(name, (0,), counts, 0.0) for name, counts in _counts_for_biases(pl_module)]
        whole = tensors_of(all_gather_json({"rank": self.world.rank, "gradients": gradients}, self.world), "gradients")
        later = {p for other in trainer.optimizers if other is not optimizer for p in _parameters_of(other)}
        for block in here:
            if block.parameter in later or _key(block) in self._before:
                continue
            value = block.of(local(block.parameter.detach()))
            digest = whole.get(block.name)
            if digest is not None and digest.norm > 0 and block.parameter.grad is not None:
                gradient = block.of(local(block.parameter.grad)).abs().float()
                limit = max(NOISE, 10 * self.tolerance) * digest.norm / math.sqrt(max(1, digest.size))
                certain = (gradient / limit).clamp_(max=1.0)
            else:  # what has never had a gradient decays only, as is certain; later its moments may be noise
                certain = torch.full_like(value, float(block.name not in self._had_gradient), dtype=torch.float32)
            self._before[_key(block)] = value.clone(), certain
            if digest is not None and digest.norm != 0:
                self._had_gradient.add(block.name)

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._micro = None
        if private_lightning.is_accumulating(trainer) or not self._note:
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
        self._note["biases"] = [
            _note(name, (0,), bias - self._biases[name], _ULP * float(bias.norm()))
            for name, bias in selection_biases(pl_module)
            if name in self._biases
        ]
        self.notes.append(all_gather_json(self._note, self.world))
        self._note, self._before = {}, {}


def note_of(block: ParameterBlock, values: Tensor, slack: float = 0.0) -> Note:
    """The digest of a block."""
    return _note(block.name, block.offsets, values.detach(), slack)


def _note(name: str, offsets: Sequence[int], values: Tensor, slack: float) -> Note:
    return [name, list(offsets), projection(values, offsets), square(values), values.numel(), slack]


def selection_biases(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The selection bias of each router that has one, by the router's name."""
    for name, router in module.named_modules():
        if isinstance(router, Router) and router.has_selection_bias:
            yield name, router.expert_bias_E


def _counts_for_biases(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The counts of tokens by which each selection bias will move, by the router's name."""
    for name, router in module.named_modules():
        if isinstance(router, Router) and router.config.bias_update_rate:
            yield name, router.unbalanced_tokens_E.double()


def _key(block: ParameterBlock) -> str:
    return f"{block.name} {block.offsets}"


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _of_gradients(here: Iterable[ParameterBlock]) -> list[Note]:
    with_gradients = [block for block in here if block.parameter.grad is not None]
    return [note_of(block, block.of(local(block.parameter.grad))) for block in with_gradients]  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a rank's place


@dataclass(frozen=True, kw_only=True)
class Place:
    """Samples of a rank's batch.

    Attributes:
        knows_samples: the strategy tells of each sample where it is in the global batch; else a rank's batch is one.
        sharing: with whom it computes them.
        stages: ranks that compute them one after the other.
        rank, ranks: among those with other batches, where the strategy tells nothing.
    """

    knows_samples: bool = False
    sharing: Sharing = field(default_factory=Sharing)
    stages: int = 1
    rank: int = 0
    ranks: int = 1


def samples_of(trainer: pl.Trainer, place: Place, micro: int) -> list[int | None]:
    """The position in the step of every sample of the running micro-batch; None of a dummy.

    Args:
        micro: its number in the step, where the strategy tells nothing: then its batch is one sample.
    """
    if not place.knows_samples:
        return [micro * place.ranks + place.rank]
    batch = trainer.strategy.steps.batch  # type: ignore[attr-defined]
    return [sample for piece in batch.pieces or (batch,) for sample in _samples_in(piece)]


def _samples_in(piece: StepSlice) -> list[int | None]:
    return [*range(piece.offset, piece.offset + piece.count), *[None] * (piece.rows - piece.count)]


def places_of(trainer: pl.Trainer) -> Place:
    """Return the samples of a rank of any strategy."""
    worlds = getattr(trainer.strategy, "worlds", None)
    if worlds is None:
        return Place(rank=trainer.global_rank, ranks=trainer.world_size)
    world = worlds.present
    (part, parts), (tensor, tensors) = (world.shape.place(world.rank, {axis}) for axis in ("cp", "tp"))
    sharing = Sharing(part=part, parts=parts, tensor=tensor, tensors=tensors)
    return Place(knows_samples=True, sharing=sharing, stages=world.shape.pp)


def _running(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[nn.Module], StepSlice | None]:
    """Return a function that finds the micro-batch of a running module; None where its output is another stage's."""
    cut: StageCut = trainer.strategy.state.stages.cut  # type: ignore[attr-defined]
    stage_of: dict[nn.Module, int] = {}
    for part in module.modules():
        if not isinstance(part, AbsentBlock):
            holds_blocks = any(cut.number_of(inner) is not None for inner in part.modules() if inner is not part)
            stage_of[part] = cut.num_stages - 1 if holds_blocks else cut.stage_of(part)

    def running(part: nn.Module) -> StepSlice | None:
        return trainer.strategy.steps.batch if cut.flow.stage == stage_of[part] else None  # type: ignore[attr-defined]

    return running


def blocks(trainer: pl.Trainer, module: pl.LightningModule, *, frozen: bool = False) -> Iterator[ParameterBlock]:
    """The trained parameters on this rank, or all, in the module's order, experts each by itself."""
    state: State | None = None
    if hasattr(trainer.strategy, "worlds"):
        trainer.strategy.state.before_reading()  # type: ignore[attr-defined]
        state = trainer.strategy.state.training_state()  # type: ignore[attr-defined]
    stack_of: Mapping[nn.Parameter, ExpertStack] = {} if state is None else state.stack_of
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not (parameter.requires_grad or frozen):
            continue
        stack = stack_of.get(parameter)
        if stack is not None:
            for slot, expert in stack.held():
                offsets = (0,) * (parameter.ndim - 1)
                yield ParameterBlock(
                    name=f"{name} of expert {expert}", parameter=parameter, offsets=offsets, of=itemgetter(slot)
                )
        elif state is not None and (cut := cut_of(parameter)) is not None:
            for here, block in blocks_of(cut, state.cut.part):
                yield ParameterBlock(name=name, parameter=parameter, offsets=block.offsets, of=itemgetter(here))
        else:
            yield ParameterBlock(
                name=name, parameter=parameter, offsets=(0,) * parameter.ndim, of=lambda tensor: tensor
            )
