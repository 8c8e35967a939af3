"""Losses that are no finite numbers: one warning that says where they came from, or an end, or a step left out."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from moe_lightning.dispatch.transports import read_later
from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.errors import NonFiniteLossError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, any_says, common_store

StopOnNan = Literal["end", "skip"]

_MOST_SKIPPED = 10
"""Steps in a row; the weights are then beyond repair."""

_WARNED = "warned of a loss"

logger = logging.getLogger(__name__)


class LossWatch:
    """Looks at the loss of every micro-batch.

    Without `stop` nothing waits for a device: a loss is copied to the host behind the work that is queued, and read
    when a later micro-batch finds that it has arrived. With it the host reads every loss before the update, and the
    ranks agree, in one small collective for each step.

    Args:
        stop: "end" the run before the update, or "skip" it; None: warn once.
    """

    def __init__(self, stop: StopOnNan | None) -> None:
        self.stop = stop
        self._flying: deque[tuple[Tensor, Any, Callable[[], str]]] = deque()
        self._found: str | None = None
        self._has_warned = False
        self._skipped = 0

    def look(self, loss: Tensor, place: Callable[[], str]) -> None:
        """Take the loss of a micro-batch in.

        Args:
            place: rank, step and samples in words.
        """
        value = loss.detach()
        arriving = (value, None) if value.device.type == "cpu" else read_later(value)
        self._flying.append((*arriving, place))
        self._read(waits=self.stop is not None)

    def forget_step(self) -> None:
        """The step that runs will be made again."""
        self._flying.clear()
        self._found = None

    def finish(self) -> None:
        """Read what has not been read yet: training is over."""
        self._read(waits=True)

    def decide(self, module: nn.Module, world: World) -> None:
        """Before an update: end, or drop the gradients, where a rank has found something; collective with `stop` only.

        Raises:
            NonFiniteLossError: on every rank.
        """
        if self.stop is None:
            return
        found, self._found = self._found, None
        (is_bad,) = any_says([found is not None], world)
        if not is_bad:
            self._skipped = 0
            return
        words = next(said for said in all_gather_json(found, world) if said is not None)
        self._skipped += 1
        if self.stop == "end" or self._skipped > _MOST_SKIPPED:
            times = f" ({_MOST_SKIPPED} steps before it were left out)" if self.stop == "skip" else ""
            raise NonFiniteLossError(
                f"{words}{times}: the run ends before this update; look at these samples, lower the learning rate, or "
                "use stop_on_nan=skip"
            )
        if world.rank == 0:
            logger.warning("%s: this step changes nothing", words)
        for parameter in module.parameters():
            parameter.grad = None

    def _read(self, *, waits: bool) -> None:
        while self._flying:
            value, arrived, place = self._flying[0]
            if arrived is not None and not arrived.query():
                if not waits:
                    return
                arrived.synchronize()
            self._flying.popleft()
            number = float(value.float().mean())
            if not math.isfinite(number):
                self._take(f"the loss is {number} {place()}")

    def _take(self, words: str) -> None:
        self._found = self._found or words
        if self.stop is not None or self._has_warned:
            return
        self._has_warned = True
        store = common_store()
        if store is None or store.add(_WARNED, 1) == 1:  # with the next update all ranks have such losses
            write_to_terminal(f"warning: {words}; training goes on: stop_on_nan=end or skip would stop it")
