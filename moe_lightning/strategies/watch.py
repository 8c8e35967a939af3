"""Watch of losses and gradients that are not finite: it warns once with rank, step and samples, ends the run, or skips
the update. A spike of the loss is warned of, too.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from moe_lightning.dispatch.transports import read_later
from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.errors import NonFiniteLossError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, any_says, common_store
from moe_lightning.state.tensors import local
from moe_lightning.strategies.checks import identical_buffers

StopOnNan = Literal["end", "skip"]

_MOST_SKIPPED = 10
"""Steps in a row; the weights are then beyond repair."""

FEWEST_LOSSES = 10
"""Losses that a spike is compared with."""

_MAD_TO_STD = 1.4826  # of normally distributed numbers
LEAST_SPREAD = 0.01  # of the median
_SPIKE, _LOSSES = 20.0, 100
"""Spreads above the median of so many losses from which one of a micro-batch is reported."""

_KEPT = 64
"""Numbers of a rank that are kept for a comparison with others."""

NORM_STEPS = 8
"""Steps of which one has the norm of its gradients kept."""

_trainings = itertools.count()
"""Numbers of the trainings of this process. They tell the keys of one training from those of the next in a store that
outlives both. A newcomer has made fewer, so a second rank may warn, too.
"""

_WARNED = "warned of a number"
_WARNED_OF_SPIKE = "warned of a spike"
_NORM = "the norm of the gradients"

logger = logging.getLogger(__name__)


def median_and_deviation(numbers: Collection[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation that normally distributed numbers with this median absolute
    deviation would have.

    >>> median_and_deviation([1.0, 2.0, 3.0])
    (2.0, 1.4826)
    """
    median = statistics.median(numbers)
    return median, _MAD_TO_STD * statistics.median(abs(number - median) for number in numbers)


def limit_of(losses: Sequence[float], threshold: float) -> float:
    """Return the loss above which one is a spike, infinity while there are few losses.

    >>> limit_of([2.0] * 10, 5.0)
    2.1
    """
    if len(losses) < FEWEST_LOSSES:
        return math.inf
    median, deviation = median_and_deviation(losses)
    return median + threshold * max(deviation, LEAST_SPREAD * abs(median))


class UpdateSkipped(Exception):
    """Leaves an optimizer's step before it changes anything."""


@dataclass(frozen=True)
class _Finding:
    """A number that is not finite.

    Attributes:
        what: it is, in words.
        place: rank, step and samples in words.
        is_cause: the samples of this place have caused it; else they may be those of another rank.
    """

    what: str
    place: str
    is_cause: bool


class OwnNumbers:
    """Recent losses and gradient norms of this rank.

    Attributes:
        losses: of micro-batches, scalars.
        norms: of dense gradients before they are summed over the ranks, scalars, of every eighth step.
        count: samples of this rank in a micro-batch. Norms with more or fewer ones differ, and are not kept.
    """

    def __init__(self) -> None:
        self.losses: deque[Tensor] = deque(maxlen=_KEPT)
        self.norms: deque[Tensor] = deque(maxlen=_KEPT)
        self.count = 0
        # Of the running step's gradients, bucket by bucket. A step that is repeated adds to them: one wrong number in a
        # median of many.
        self._squares: list[Tensor] = []

    def add_loss(self, loss: Tensor, count: int) -> None:
        """Keep the loss of a micro-batch with so many samples of this rank."""
        self.losses.append(loss.detach().float().mean())
        if count != self.count:
            self.norms.clear()
            self.count = count

    def add_norm(self, norm: Tensor) -> None:
        """Add the norm of some dense gradients of the running step."""
        self._squares.append(norm.square())

    def end_step(self) -> None:
        """The gradients of the running step are complete."""
        squares, self._squares = self._squares, []
        if squares:
            self.norms.append(torch.stack(squares).sum().sqrt())


class FiniteWatch:
    """Check of the loss of every micro-batch and of the gradients of every update.

    Without `stop` nothing waits for a device: a number is copied to the host behind the work that is queued, and read
    when a later check finds that it has arrived. With it the host reads every number before the update, and the ranks
    agree, in one small collective for each step.

    Args:
        stop: "end" the run before the update, or "skip" it; None: warn once.
    """

    def __init__(self, stop: StopOnNan | None) -> None:
        self.stop = stop
        self._pending: deque[tuple[Tensor, Any, Callable[[float], _Finding | None], Callable[[], str] | None]] = deque()
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._watches_spikes = True
        self._found: _Finding | None = None
        self._places: list[Callable[[], str]] = []
        self._own: list[Tensor] = []
        self._buffers: dict[str, Tensor] | None = None
        self._is_new_step = True
        self._has_warned = False
        self._training = next(_trainings)
        self._skipped = 0

    def begin_batch(self, module: nn.Module) -> None:
        """Remember the user's buffers at the begin of a step that may be skipped; those of this library's layers change
        with updates only.
        """
        if self.stop == "skip" and self._buffers is None:
            ours = set(identical_buffers(module))
            self._buffers = {name: b.detach().clone() for name, b in module.named_buffers() if name not in ours}

    def check_loss(self, loss: Tensor, place: Callable[[], str]) -> None:
        """Check the loss of a micro-batch.

        Args:
            place: rank, step and samples in words.
        """
        if self._is_new_step:
            self._places, self._is_new_step = [], False
        self._places.append(place)
        self._enqueue(loss.detach(), lambda value: _Finding(f"the loss is {value}", place(), is_cause=True), place)

    def ignore_spikes(self) -> None:
        """Warn of no spike from now on."""
        self._watches_spikes = False

    def check_own_norm(self, norm: Tensor) -> None:
        """Check the norm of gradients of this rank, before they are summed over ranks: it tells whose samples are the
        cause.
        """
        self._own.append(norm)

    def check_gradients(
        self, norm: Tensor, named: Callable[[], Mapping[str, nn.Parameter]], place: str, world: World, *, is_used: bool
    ) -> None:
        """Check the gradients that an optimizer is about to use.

        Args:
            norm: of them, of this rank or of all.
            named: returns the parameters of this rank.
            place: step in words.
            is_used: gradients are scaled by the norm; else one that overflows changes nothing.
        """
        own, is_read_now = self._own, self.stop is not None or norm.device.type == "cpu"
        places = self._places if world.size == 1 or own else []

        def find(value: float) -> _Finding | None:
            is_cause = world.size == 1 or any(not math.isfinite(float(value)) for value in own)
            where = " and ".join(place() for place in places) if is_cause else ""
            what = _named_gradients(named()) if is_read_now else ""
            if is_read_now and not what and not is_used:
                return None
            return _Finding(what or f"{_NORM} is {value}", where or place, is_cause)

        self._enqueue(norm.detach(), find)

    def forget_step(self) -> None:
        """Forget the running step, which will be repeated."""
        self._pending.clear()
        self._places, self._own, self._found, self._buffers = [], [], None, None
        self._is_new_step, self._skipped = True, 0

    def end(self) -> None:
        """Forget a training."""
        self.forget_step()
        self._losses.clear()
        self._watches_spikes, self._has_warned = True, False
        self._training = next(_trainings)

    def finish(self) -> None:
        """Read the numbers that have not been read yet, at the end of training."""
        self._read(waits=True)

    def is_skipped(self, module: pl.LightningModule, world: World) -> bool:
        """End the run, or return True if the update is left out, if a rank has found a number that is not finite.
        Buffers are then as before the step. Collective with `stop` only.

        Raises:
            NonFiniteLossError: on every rank.
        """
        found, self._found, self._own, self._is_new_step = self._found, None, [], True
        before, self._buffers = self._buffers, None
        if self.stop is None:
            return False
        (is_bad,) = any_says([found is not None], world)
        if not is_bad:
            self._skipped = 0
            self._begin_next(module)
            return False
        findings = [_Finding(*each) for each in all_gather_json(found and astuple(found), world) if each is not None]
        # The ranks that have samples that are the cause know most, then those whose gradients are not finite.
        first = min(findings, key=lambda each: (not each.is_cause, each.what.startswith(_NORM)))
        message = f"{first.what} {first.place}"
        self._skipped += 1
        if self.stop == "end" or self._skipped > _MOST_SKIPPED:
            times = f" ({_MOST_SKIPPED} steps before it were left out)" if self.stop == "skip" else ""
            raise NonFiniteLossError(
                f"{message}{times}: the run ends before this update; look at these samples, lower the learning rate, "
                "or use stop_on_nan=skip"
            )
        if world.rank == 0:
            logger.warning("%s: this step changes nothing", message)
        _restore(module, before or {})
        self._begin_next(module)
        return True

    def _begin_next(self, module: pl.LightningModule) -> None:
        """Under manual optimization another update may follow in the same batch."""
        if not module.automatic_optimization:
            self.begin_batch(module)

    def _enqueue(
        self, value: Tensor, find: Callable[[float], _Finding | None], place: Callable[[], str] | None = None
    ) -> None:
        """Read a number as soon as it has arrived.

        Args:
            find: called if it is not finite.
            place: of a loss.
        """
        arriving = (value, None) if value.device.type == "cpu" else read_later(value)
        self._pending.append((*arriving, find, place))
        self._read(waits=self.stop is not None)

    def _read(self, *, waits: bool) -> None:
        while self._pending:
            value, arrived, find, place = self._pending[0]
            if arrived is not None and not arrived.query():
                if not waits:
                    return
                arrived.synchronize()
            self._pending.popleft()
            number = float(value.float().mean())
            if not math.isfinite(number) and (self.stop is not None or not self._has_warned):
                self._found = self._found or find(number)
                if self._found is not None:
                    self._warn(self._found)
            elif place is not None and self._watches_spikes and math.isfinite(number):
                self._check_spike(number, place)

    def _check_spike(self, loss: float, place: Callable[[], str]) -> None:
        limit, known = limit_of(self._losses, _SPIKE), len(self._losses)
        self._losses.append(loss)
        if loss <= limit:
            return
        self._watches_spikes = False  # one line a run
        if _is_first(f"{_WARNED_OF_SPIKE} in training {self._training}"):
            write_to_terminal(
                f"warning: the loss is {loss:.4g} {place()}, and was below {limit:.4g} in the {known} micro-batches "
                "before; training continues: callbacks=spike_guard would return to the state before it"
            )

    def _warn(self, finding: _Finding) -> None:
        if self.stop is not None or self._has_warned:
            return
        self._has_warned = True
        if _is_first(f"{_WARNED} in training {self._training}"):  # with the next update all ranks have such losses
            message = f"{finding.what} {finding.place}"
            write_to_terminal(f"warning: {message}; training continues: stop_on_nan=end or skip would stop it")


def _is_first(key: str) -> bool:
    """Return True on the first rank that asks for a key."""
    store = common_store()
    return store is None or store.add(key, 1) == 1


def _named_gradients(named: Mapping[str, nn.Parameter]) -> str:
    """Return the parameters whose gradients are not finite, in words; empty if all are."""
    gradients = {name: local(p.grad) for name, p in named.items() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(dense_values(gradient).isfinite().all())]
    if not bad:
        return ""
    others = f" (nor those of {len(bad) - 1} other parameters)" if len(bad) > 1 else ""
    return f"the gradient of {bad[-1]} is not finite{others}"  # of the last one, which the backward pass met first


def dense_values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@torch.no_grad()
def _restore(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in before and before[name].shape == buffer.shape:
            buffer.copy_(before[name])
