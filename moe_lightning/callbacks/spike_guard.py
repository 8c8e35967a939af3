"""Spikes of the loss: return to a copy of the state in memory, and go on without the samples that came since."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import lightning.pytorch as pl
import torch
from annotated_types import Interval
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import ConfigurationError, LossSpikeError
from moe_lightning.files import append_rows
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import all_reduce_
from moe_lightning.state.tensors import local
from moe_lightning.state.transfer import install
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.step_data import first_sampler, training_slice
from moe_lightning.strategies.watch import FEWEST_LOSSES, limit_of
from moe_lightning.strategies.worlds import ExpertParallelCallback, call_hook

_MOST_SHOWN = 12
_COLUMNS = ("step", "loss", "limit", "restored_step", "samples")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCopy:
    """Copy on the host of what this rank trains.

    Attributes:
        step: whose update is the last in it.
        position: samples of the data that were consumed by then; None where the loader has no position.
        tensors: pairs of a live tensor and its values: weights and buffers.
        states: for each optimizer the values of its state by parameter.
    """

    step: int
    position: int | None
    tensors: Sequence[tuple[Tensor, Tensor]]
    states: Sequence[tuple[Optimizer, Mapping[Any, Mapping[str, Any]]]]

    @classmethod
    @torch.no_grad()
    def of(cls, strategy: ExpertParallelStrategy, step: int, position: int | None) -> StateCopy:
        """Return a copy of the present state."""
        module = strategy.state.module
        live = [local(p.detach()) for p in module.parameters() if p.requires_grad] + list(module.buffers())
        return cls(
            step=step,
            position=position,
            tensors=[(tensor, _copied(tensor)) for tensor in live],
            states=[
                (optimizer, {p: {k: _copied(v) for k, v in values.items()} for p, values in optimizer.state.items()})
                for optimizer, _ in strategy.state.training_state().optimizers
            ],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        install(self.tensors)
        for optimizer, states in self.states:
            for parameter in optimizer.state.keys() - states.keys():  # updated for the first time since
                del optimizer.state[parameter]
            for parameter, values in states.items():
                live = optimizer.state[parameter]
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        install([(local(live[name]), value)])
                    else:
                        live[name] = copy.deepcopy(value)


def _copied(value: Any) -> Any:
    return local(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


@validated
class SpikeGuard(ExpertParallelCallback):
    """Returns to an earlier state when the loss spikes or is not finite, and goes on without the samples since.

    Every `every_n_steps` steps each rank copies its weights, buffers and optimizer states to host memory, and keeps two
    copies. A loss of a step, over all ranks, is a spike above the median of the last `window` ones plus `threshold`
    times their spread: 1.4826 times the median absolute deviation, at least 1 % of the median. All ranks then restore
    the older copy, which at least `every_n_steps` calm steps have followed. Positions in the data, the count of steps
    and schedules go on, so the result is that of a run that has left these updates out. The line of a rollback, and a
    CSV, name the samples.

    Args:
        every_n_steps: between two copies; at most twice as many steps are lost.
        threshold: in spreads.
        window: losses of calm steps.
        max_rollbacks: after which a spike ends the run.
        path: CSV of step, loss, limit, the step whose state was restored and the samples; None: none.

    Raises:
        ConfigurationError: another strategy, manual optimization, averaged weights, or optimizer_replay.
        LossSpikeError: on every rank, a spike after `max_rollbacks` others.
    """

    def __init__(
        self,
        *,
        every_n_steps: PositiveInt = 20,
        threshold: Annotated[float, Interval(gt=0, le=1e6)] = 10.0,
        window: Annotated[int, Interval(ge=FEWEST_LOSSES, le=100_000)] = 100,
        max_rollbacks: NonNegativeInt = 3,
        path: str | None = None,
    ) -> None:
        self._every, self._threshold, self._max_rollbacks = every_n_steps, threshold, max_rollbacks
        self._path = Path(path) if path else None
        self._losses: deque[float] = deque(maxlen=window)
        self._copies: deque[StateCopy] = deque(maxlen=2)
        self._of_step: list[tuple[float, float]] = []  # loss and weight of each micro-batch
        self._position: int | None = None  # of the data after the running step
        self.rollbacks = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        own_strategy(trainer, "SpikeGuard").update.finite.ignore_spikes()
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "SpikeGuard returns to the end of a step, which manual optimization does not state: use automatic "
                "optimization, or drop the callback"
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, WeightAveraging) or getattr(other, "replays", False):
                raise ConfigurationError(
                    f"SpikeGuard cannot take {type(other).__name__}'s own copies of the state back: drop one of the "
                    "callbacks, or optimizer_replay=true"
                )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._of_step.clear()
        self._copies.clear()
        self._copies.append(StateCopy.of(own_strategy(trainer, "SpikeGuard"), trainer.global_step, None))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        here, sampler = training_slice(trainer.train_dataloader), first_sampler(trainer.train_dataloader)
        if here is None or sampler is None:
            return
        began = sampler.begin_of(here)
        self._position = began + here.step_total
        if self._copies and self._copies[-1].position is None:  # made before the first batch
            self._copies[-1] = replace(self._copies[-1], position=began)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = own_strategy(trainer, "SpikeGuard")
        self._of_step.append(_own_loss(strategy, outputs))
        if private_lightning.is_accumulating(trainer):
            return
        sums = torch.tensor(self._of_step, dtype=torch.float64, device=strategy.world.device).sum(dim=0)
        all_reduce_(sums, strategy.world)
        total, weight = strategy.world.read(sums).tolist()
        self._of_step.clear()
        loss, limit, step = total / max(weight, 1.0), limit_of(self._losses, self._threshold), trainer.global_step
        if not math.isfinite(loss) or loss > limit:
            self._roll_back(trainer, strategy, loss, limit)
            return
        self._losses.append(loss)
        if step % self._every == 0 or not self._copies:
            self._copies.append(StateCopy.of(strategy, step, self._position))

    def _roll_back(self, trainer: pl.Trainer, strategy: ExpertParallelStrategy, loss: float, limit: float) -> None:
        step = trainer.global_step
        spike = f"the loss of step {step} is {loss:.4g}, above the limit of {limit:.4g}"
        held = all_gather_json([each.step for each in self._copies], strategy.world)  # one that has joined has fewer
        common = set(held[0]).intersection(*held)
        if self.rollbacks >= self._max_rollbacks or not common:
            raise LossSpikeError(
                f"{spike}, after {self.rollbacks} rollbacks: look at the samples that were left out, lower the "
                "learning rate, or raise callbacks.spike_guard.max_rollbacks"
            )
        self.rollbacks += 1
        source = next(each for each in self._copies if each.step == min(common))
        call_hook(strategy.state.module, "on_before_experts_move")  # nobody copies rows meanwhile
        source.restore()
        strategy.state.find_twins()
        self._copies.clear()
        self._copies.append(replace(source, position=self._position))
        samples = _samples(first_sampler(trainer.train_dataloader), source.position, self._position)
        if trainer.is_global_zero:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append_rows(self._path, _COLUMNS, [[step, loss, limit, source.step, " ".join(map(str, samples))]])
            shown = ", ".join(map(str, samples[:_MOST_SHOWN])) + (" ..." if len(samples) > _MOST_SHOWN else "")
            logger.warning(
                "%s: the state of step %d is restored, and training goes on without the %d samples since: %s",
                *(spike, source.step, len(samples), shown),
            )

    @override
    def on_before_experts_move(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copies.clear()  # they are of other rows

    @override
    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copies.clear()
        self._losses.clear()  # ranks that have joined know none
        self._of_step.clear()


def _own_loss(strategy: ExpertParallelStrategy, outputs: Any) -> tuple[float, float]:
    """Return the loss of this rank's micro-batch, and 1; zeros if it has none."""
    loss, factor = outputs.get("loss") if isinstance(outputs, Mapping) else outputs, 1
    if strategy.worlds.axes.pp > 1:  # this rank's share of the mean
        loss, factor = strategy.last_stage_loss, strategy.world.shape.dp
    if strategy.is_dummy_batch or not isinstance(loss, Tensor):
        return 0.0, 0.0
    micros = strategy.state.trainer.accumulate_grad_batches  # both are divided by it
    return float(loss.detach().double().mean()) * factor * micros, 1.0


def _samples(sampler: StepSampler | None, first: int | None, last: int | None) -> list[int]:
    if sampler is None or first is None or last is None:
        return []
    return sampler.samples_between(first, last)
