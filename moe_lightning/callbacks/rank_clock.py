"""Clock of a rank: the seconds of its experts' rows, and of its samples between the MoE layers.

Hooks of the running model stamp the times. Waits for other ranks are inside the MoE layers but outside their experts,
and so in neither. On a GPU the stamps are events in the stream, read when the device has passed them, so nothing ever
waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import has_passed, seconds_between, stamp


@dataclass(kw_only=True)
class _Step:
    """Intervals (began, ended) of one step, and how much was done in them."""

    experts: list[tuple[Any, Any]] = field(default_factory=list)
    between: list[tuple[Any, Any]] = field(default_factory=list)
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
        self._left_at: Any = None  # when the pass left a layer
        self._is_backward = False
        self._handles: list[RemovableHandle] = []
        for layer in layers:
            self._watch(layer, self._before_layer, self._after_layer)
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
        self._is_backward, self._left_at = True, stamp(self._device)

    def end_micro_batch(self, samples: int) -> None:
        """Both passes have ended, over so many samples."""
        self._is_backward, self._left_at = False, None
        self._step.samples += samples

    def end_step(self) -> None:
        """All micro-batches of the step have ended."""
        self._done.append(self._step)
        self._step = _Step()

    def rates(self) -> Iterator[tuple[float, float]]:
        """Yield the rates of ended steps not yet reported, as far as the device has come: the seconds of a row in the
        experts, and of a sample between the MoE layers and in the head's backward; 0 where there was none.
        """
        while self._done and all(has_passed(ended) for _, ended in (*self._done[0].experts, *self._done[0].between)):
            step = self._done.popleft()
            row_s = sum(starmap(seconds_between, step.experts)) / step.rows if step.rows else 0.0
            sample_s = sum(starmap(seconds_between, step.between)) / step.samples if step.samples else 0.0
            yield row_s, sample_s

    # ------------------------------------------------------------------ stamps

    def _before_layer(self, x: Tensor) -> None:
        if self._is_backward:
            self._left_at = None  # a forward pass that is computed again, with its exchanges
            return
        self._arrive()
        if x.requires_grad:
            x.register_hook(lambda _: self._leave())  # type: ignore[no-untyped-call]

    def _after_layer(self, _: None, x: Tensor, out: Tensor) -> None:
        if self._is_backward:
            return
        self._leave()
        if out.requires_grad:
            out.register_hook(lambda _: self._arrive())  # type: ignore[no-untyped-call]

    def _arrive(self) -> None:
        """A pass has come to a layer."""
        if self._left_at is not None:
            self._step.between.append((self._left_at, stamp(self._device)))
        self._left_at = None

    def _leave(self) -> None:
        """A pass has gone through a layer."""
        self._left_at = stamp(self._device)

    def _before_experts(self, x: Tensor) -> Any:
        return stamp(self._device)

    def _after_experts(self, began: Any, x: Tensor, out: Tensor) -> None:
        self._step.experts.append((began, stamp(self._device)))
        if not self._is_backward:
            self._step.rows += len(x)
        if not (x.requires_grad and out.requires_grad):
            return
        backward: list[Any] = []
        out.register_hook(lambda _: backward.append(stamp(self._device)))  # type: ignore[no-untyped-call]

        def end(_: Tensor) -> None:
            if backward:
                self._step.experts.append((backward.pop(), stamp(self._device)))

        x.register_hook(end)  # type: ignore[no-untyped-call]
