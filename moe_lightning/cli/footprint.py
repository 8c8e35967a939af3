"""Memory of a model in training, counted on its modules without allocating anything.

The model runs on tensors without memory, and the bytes that autograd saves for a further sequence are counted. MoE
layers are left out of it, since their shapes depend on the routing: they keep for each assignment the row that comes
in, both sides of the activation, and the row that goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_lightning.cli.capacity import MOMENTS
from moe_lightning.compat import private_torch
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.moe.randomness import SampleStream, attach_stream
from moe_lightning.simulate.workload import Footprint, StateBytes

PRECISIONS: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "64-true": (torch.float64, None),
}
"""Dtype of the parameters, and of the products where that differs, by the precision of Lightning's Trainer."""

_LOSS_BYTES = 4  # of a logit in the loss
_INDEX_BYTES = 40  # of an assignment: orders of rows and their inverses
_UPDATE_COPIES = 2  # of a tensor, while AdamW updates it
_SENT_ROWS = 4  # of an assignment on its way to other ranks and back, in one layer at a time
_UNEVEN = 0.3
"""Measured on two ranks: of the rows of experts, what the pool of CPU buffers keeps in blocks of other sizes."""


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """Settings of a training on which its memory depends.

    Attributes:
        context_length: tokens of a sequence.
        vocab_size: logits of a token.
        precision: of the Trainer, a key of PRECISIONS.
        optimizer: a key of MOMENTS.
        recomputes: dense parts keep their inputs only, as with callbacks=recompute.
        averages: the average of each trained parameter is one more state of the optimizer.
        on_cpu: freed results of experts' kernels stay with the process.
        num_ranks: of the world.
    """

    context_length: int
    vocab_size: int
    precision: str = "32-true"
    optimizer: str = "adamw"
    recomputes: bool = False
    averages: bool = False
    on_cpu: bool = True
    num_ranks: int = 1


class _States(NamedTuple):
    """Numbers beside the weight that an optimizer has of an element of a matrix, and of other parameters."""

    of_matrices: int
    of_others: int


def count_footprint(model: nn.Module, training: TrainingShape) -> Footprint:
    """Count the footprint of a transformer with MoE layers.

    Args:
        model: on the meta device; it is used up. Called with token ids [B, L].
    """
    dtype, computed = PRECISIONS[training.precision]
    model, number = model.to(dtype), (computed or dtype).itemsize
    layers, moments = moe_layers(model), MOMENTS[training.optimizer]
    states = _States(moments + training.averages, 2 + training.averages)
    experts, top_k = layers[0].experts, layers[0].router.config.top_k
    stacks = list(experts.parameters())
    inside = {p for layer in layers for p in layer.experts.parameters()}
    dense = [p for p in model.parameters() if p not in inside]
    linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    up, down = experts.shapes["w_up"], experts.shapes["w_down"]
    row = float(number * (up[0] + up[1] + down[0] + down[1]) + _INDEX_BYTES)
    kept = _SavedBytes(model, recomputes=training.recomputes)
    kept.count(training.context_length, computed)
    router = 2 * _LOSS_BYTES * layers[0].num_experts * len(layers) / len(kept.blocks)
    sent = float(_SENT_ROWS * top_k * number * down[1]) if training.num_ranks > 1 else 0.0
    logits = float(training.vocab_size * _LOSS_BYTES)
    whole = sum(shape.numel() for shape in experts.shapes.values())  # of an expert without adapters, not quantised
    return Footprint(
        dense=_mean_bytes({p: p.numel() for p in dense}, states, computed, linear),
        expert=_mean_bytes({p: p.shape[1:].numel() for p in stacks}, states, computed, stacks, whole),
        block=kept.in_blocks / len(kept.blocks) / training.context_length + router,
        row=row,
        ends=kept.outside / training.context_length,
        loss_forward=2 * logits + (training.vocab_size * number if number < _LOSS_BYTES else 0),
        loss_backward=3 * logits,
        working=max(0.0 if training.on_cpu else top_k * row, kept.largest_part / training.context_length) + sent,
        dense_update=_update_bytes([p.nbytes for p in dense if p.requires_grad], moments),
        expert_update=_update_bytes([p.nbytes / len(p) for p in stacks if p.requires_grad], moments),
        buckets=training.num_ranks > 1,
        keeps_freed=training.on_cpu,
        uneven=_UNEVEN if training.on_cpu and training.num_ranks > 1 else 0.0,
    )


def _mean_bytes(
    numels: Mapping[nn.Parameter, int], states: _States, computed: torch.dtype | None, products: Any, numbers: int = 0
) -> StateBytes:
    """Return the bytes of a parameter, the mean of these.

    Args:
        numels: elements of each that count.
        computed: dtype of the products, where it is another.
        products: parameters that are cast to it.
        numbers: over which the mean is taken; 0: all elements.
    """
    weight = gradient = optimizer = cast = 0.0
    for p, numel in numels.items():
        weight += numel * p.element_size()
        if p.requires_grad:
            gradient += numel * p.element_size()
            optimizer += numel * p.element_size() * (states.of_matrices if p.ndim > 1 else states.of_others)
        if computed is not None and p.is_floating_point() and any(p is other for other in products):
            cast += numel * computed.itemsize
    whole = numbers or sum(numels.values())
    return StateBytes(weight / whole, gradient / whole, optimizer / whole, cast / whole)


def _update_bytes(sizes: list[float], moments: int) -> float:
    return float(_UPDATE_COPIES * max(sizes, default=0.0)) if moments else 0.0


class _Skip(torch.autograd.Function):
    """An MoE layer without its experts: its input is kept, for the router, and its output depends on what trains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trained: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SavedBytes:
    """Bytes that autograd saves for one sequence in a forward pass on tensors without memory.

    Attributes:
        blocks: the transformer layers.
        in_blocks, outside: of them, and of what stands outside.
        largest_part: of the dense part that takes most to compute again; 0 where nothing is.
    """

    def __init__(self, model: nn.Module, *, recomputes: bool) -> None:
        self.model, self.blocks = model, list(_blocks(model))
        self.in_blocks = self.outside = self.largest_part = 0
        self._parts = [part for block in self.blocks for part in _dense_parts(block)] if recomputes else []
        self._depth, self._part_bytes = 0, -1
        self._seen: dict[int, object] = {}  # storages by id, which is not used again while they are here

    def count(self, context_length: int, computed: torch.dtype | None) -> None:
        """Count what two sequences need more than one: copies of weights are those of both."""
        for layer in moe_layers(self.model):
            layer.forward = _skipped(layer)  # type: ignore[method-assign]
        for block in self.blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)
        for part in self._parts:
            part.register_forward_pre_hook(self._enter_part)
            part.register_forward_hook(self._leave_part)
        autocast = torch.autocast("cpu", dtype=computed or torch.bfloat16, enabled=computed is not None)
        attach_stream(self.model, stream := SampleStream())
        stream.advance(step=0, first_sample=0, num_samples=1)  # else noise asks a generator, which has no values here
        with private_torch.without_memory(), autocast:
            self.model.to_empty(device="cpu")
            one, two = (self._run(sequences, context_length) for sequences in (1, 2))
        self.in_blocks, self.outside, self.largest_part = (more - less for less, more in zip(one, two, strict=True))

    def _run(self, sequences: int, context_length: int) -> tuple[int, int, int]:
        held = [tensor.untyped_storage() for tensor in (*self.model.parameters(), *self.model.buffers())]
        self._seen = {id(storage): storage for storage in held}
        self.in_blocks = self.outside = self.largest_part = 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            self.model(torch.zeros(sequences, context_length, dtype=torch.int64))
        return self.in_blocks, self.outside, self.largest_part

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _enter_part(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            if isinstance(value, Tensor):
                self._pack(value)
        self._part_bytes = 0

    def _leave_part(self, *_: Any) -> None:
        self.largest_part = max(self.largest_part, self._part_bytes)
        self._part_bytes = -1

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) in self._seen:
            return tensor
        self._seen[id(storage)] = storage
        if self._part_bytes >= 0:
            self._part_bytes += storage.nbytes()
        elif self._depth:
            self.in_blocks += storage.nbytes()
        else:
            self.outside += storage.nbytes()
        return tensor


def _skipped(layer: MoELayer) -> Callable[..., Tensor]:
    def forward(x: Tensor, is_token: Tensor | None = None) -> Tensor:
        out: Tensor = _Skip.apply(x, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        return out if layer.shared_expert is None else out + layer.shared_expert(x)

    return forward


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists of modules that have MoE layers."""
    for child in model.children():
        if isinstance(child, nn.ModuleList) and moe_layers(child):
            yield from child
        else:
            yield from _blocks(child)


def _dense_parts(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a transformer layer with several layers of their own and no experts."""
    for child in block.children():
        if isinstance(child, MoELayer):
            if child.shared_expert is not None:
                yield child.shared_expert
        elif moe_layers(child):
            yield from _dense_parts(child)
        elif next(child.children(), None) is not None:
            yield child
