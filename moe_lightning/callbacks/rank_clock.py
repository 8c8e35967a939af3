"""Clock of a rank: the seconds of its experts' rows, of its samples between the MoE layers, and of the dense layers.

Hooks of the running model stamp the times. Waits for other ranks are inside the MoE layers but outside their experts,
and so in none of them. On a GPU the stamps are events in the stream, read when the device has passed them, so nothing
ever waits for the device.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import has_passed, seconds_between, stamp

_DENSE_STEPS = range(2, 6)
"""Steps whose dense layers are timed: the first ones warm the machine up."""


class _Interval(NamedTuple):
    """Stamps of a pass through a rank's own work.

    Attributes:
        block: number of the MoE layer that the pass leaves last in its forward direction; -1: before the first one.
        is_backward: direction.
        is_own: else it ends with the loss, whose mean other ranks may be waited for.
    """

    began: Any
    ended: Any
    block: int = -1
    is_backward: bool = False
    is_own: bool = True


@dataclass(kw_only=True)
class _Step:
    """Intervals of one step, and how much was done in them."""

    experts: list[_Interval] = field(default_factory=list)
    dense: list[_Interval] = field(default_factory=list)
    rows: int = 0
    samples: int = 0


class RankClock:
    """Stamps the layers of a model from its construction to `close`.

    Where a forward pass is computed again in the backward pass, only what can still be told apart is counted, on all
    ranks alike.

    Args:
        layers: the MoE layers in the order of the forward pass.
        device: where they compute.
    """

    def __init__(self, layers: Sequence[MoELayer], device: torch.device) -> None:
        self._device = device
        self._step = _Step()
        self._done: deque[_Step] = deque()
        self._left: tuple[Any, int] | None = None  # when the pass left a layer, and the block that it is in since
        self._is_backward = False
        self._num_layers, self._num_read = len(layers), 0
        self._dense_s: dict[tuple[bool, int], list[float]] = {}  # by direction and block
        self._handles: list[RemovableHandle] = []
        for block, layer in enumerate(layers):
            self._watch(layer, partial(self._before_layer, block), partial(self._after_layer, block))
            self._watch(layer.experts, self._before_experts, self._after_experts)

    def _watch(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        began: list[Any] = []

        # Functions and not methods: a copy of the model shares them, and is not listened to.
        def enter(entered: nn.Module, inputs: tuple[Any, ...]) -> None:
            if entered is module and module.training and torch.is_grad_enabled():
                began[:] = [before(inputs[0])]

        def leave(left: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
            if began:
                after(began.pop(), inputs[0], out)

        self._handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------ the passes

    def turn(self) -> None:
        """The forward pass has ended and the backward pass begins."""
        self._arrive(is_own=False)
        self._is_backward = True
        self._leave(self._num_layers - 1)

    def end_micro_batch(self, samples: int) -> None:
        """Both passes have ended, over so many samples."""
        self._is_backward, self._left = False, None
        self._step.samples += samples

    def end_step(self) -> None:
        """All micro-batches of the step have ended."""
        self._done.append(self._step)
        self._step = _Step()

    def rates(self) -> Iterator[tuple[float, float]]:
        """Yield the rates of ended steps not yet reported, as far as the device has come: the seconds of a row in the
        experts, and of a sample between the MoE layers and in the head's backward; 0 where there was none.
        """
        while self._done and all(has_passed(each.ended) for each in (*self._done[0].experts, *self._done[0].dense)):
            step = self._done.popleft()
            experts_s = sum(seconds_between(each.began, each.ended) for each in step.experts)
            own_s = 0.0
            for each in step.dense:
                seconds = seconds_between(each.began, each.ended)
                own_s += seconds if each.is_own else 0.0
                if self._num_read in _DENSE_STEPS:
                    self._dense_s.setdefault((each.is_backward, each.block), []).append(seconds)
            self._num_read += 1
            yield experts_s / step.rows if step.rows else 0.0, own_s / step.samples if step.samples else 0.0

    def dense_times(self) -> tuple[list[float], list[float]]:
        """Return the seconds of a micro-batch in the dense layers behind each MoE layer, forward and backward: medians
        of the first steps, 0 where none is known.
        """
        forward, backward = (
            [statistics.median(self._dense_s.get((is_backward, block), [0.0])) for block in range(self._num_layers)]
            for is_backward in (False, True)
        )
        return forward, backward

    # ------------------------------------------------------------------ stamps

    def _before_layer(self, block: int, x: Tensor) -> None:
        if self._is_backward:
            self._left = None  # a forward pass that is computed again, with its exchanges
            return
        self._arrive()
        if x.requires_grad:
            x.register_hook(lambda _: self._leave(block - 1))  # type: ignore[no-untyped-call]

    def _after_layer(self, block: int, _: None, x: Tensor, out: Tensor) -> None:
        if self._is_backward:
            return
        self._leave(block)
        if out.requires_grad:
            out.register_hook(lambda _: self._arrive())  # type: ignore[no-untyped-call]

    def _arrive(self, *, is_own: bool = True) -> None:
        """A pass has come to a layer, or to the loss."""
        if self._left is not None:
            began, block = self._left
            self._step.dense.append(_Interval(began, stamp(self._device), block, self._is_backward, is_own))
        self._left = None

    def _leave(self, block: int) -> None:
        """A pass has gone through a layer, or begins at the loss."""
        self._left = stamp(self._device), block

    def _before_experts(self, x: Tensor) -> Any:
        return stamp(self._device)

    def _after_experts(self, began: Any, x: Tensor, out: Tensor) -> None:
        self._step.experts.append(_Interval(began, stamp(self._device)))
        if not self._is_backward:
            self._step.rows += len(x)
        if not (x.requires_grad and out.requires_grad):
            return
        backward: list[Any] = []
        out.register_hook(lambda _: backward.append(stamp(self._device)))  # type: ignore[no-untyped-call]

        def end(_: Tensor) -> None:
            if backward:
                self._step.experts.append(_Interval(backward.pop(), stamp(self._device)))

        x.register_hook(end)  # type: ignore[no-untyped-call]
