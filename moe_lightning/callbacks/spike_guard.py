"""Spikes of the loss: return to a copy of the state in memory, and go on without the samples that came since."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import lightning.pytorch as pl
import torch
from annotated_types import Interval
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import ConfigurationError, LossSpikeError
from moe_lightning.files import append_rows
from moe_lightning.parallel.context import all_reduce_
from moe_lightning.state.tensors import frozen_base, local
from moe_lightning.state.transfer import install
from moe_lightning.strategies.checks import require_automatic_optimization
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.step_data import first_sampler, joined_slice
from moe_lightning.strategies.watch import FEWEST_LOSSES, limit_of
from moe_lightning.strategies.worlds import ExpertParallelCallback

_MOST_SHOWN = 12
_COLUMNS = ("step", "loss", "limit", "restored_step", "samples")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCopy:
    """Copy on the host of what this rank trains.

    Attributes:
        step: whose update is the last in it.
        position: samples of the data that were consumed by then; None where the loader has no position.
        tensors: values of this rank's part of weights and buffers, by name.
        states: for each optimizer the values of its state by parameter.
    """

    step: int
    position: int | None
    tensors: Mapping[str, Tensor]
    states: Sequence[tuple[Optimizer, Mapping[Any, Mapping[str, Any]]]]

    @classmethod
    @torch.no_grad()
    def of(cls, strategy: ExpertParallelStrategy, step: int, position: int | None) -> StateCopy:
        """Return a copy of the present state."""
        strategy.state.before_reading()
        return cls(
            step=step,
            position=position,
            tensors={name: _copied(tensor) for name, tensor in _live(strategy.state.module).items()},
            states=[
                (optimizer, {p: {k: _copied(v) for k, v in values.items()} for p, values in optimizer.state.items()})
                for optimizer, _ in strategy.state.training_state().optimizers
            ],
        )

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        """Write the values back, but for buffers that have another shape now.

        Raises:
            ConfigurationError: a weight has another shape.
        """
        present, buffers = _live(module), dict(module.named_buffers())
        for name, kept in self.tensors.items():
            if name not in present:
                continue
            tensor = local(present[name].detach())
            if tensor.shape == kept.shape:
                install([(tensor, kept)])
            elif name not in buffers:
                raise ConfigurationError(
                    f"{name} had the shape {tuple(kept.shape)} in step {self.step}, which SpikeGuard would restore, "
                    f"and has {tuple(tensor.shape)} now: keep the shapes of weights, or drop the callback"
                )
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


def _live(module: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name, but for weights that adapters leave as they are."""
    base = frozen_base(module)
    return {name: p for name, p in module.named_parameters() if p not in base} | dict(module.named_buffers())


def _copied(value: Any) -> Any:
    return local(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


class _Spike(NamedTuple):
    """A rollback in words and for the table.

    Attributes:
        step, loss, limit: of the spike.
        restored: step whose state is restored.
        samples: that are left out.
    """

    step: int
    loss: float
    limit: float
    restored: int
    samples: Sequence[int]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.samples[:_MOST_SHOWN])) + (" ..." if len(self.samples) > _MOST_SHOWN else "")
        return (
            f"{_sentence(self.step, self.loss, self.limit)}: the state of step {self.restored} is restored, and "
            f"training goes on without the {len(self.samples)} samples since: {shown}"
        )


def _sentence(step: int, loss: float, limit: float) -> str:
    return f"the loss of step {step} is {loss:.4g}, above the limit of {limit:.4g}"


@validated
class SpikeGuard(ExpertParallelCallback):
    """Returns to an earlier state when the loss spikes or is not finite, and goes on without the samples since.

    Every `every_n_steps` steps each rank copies its weights, frozen ones too, buffers and optimizer states to host
    memory, and keeps two copies. A loss of a step, over all ranks, is a spike above the median of the last `window`
    ones plus `threshold` times their spread: 1.4826 times the median absolute deviation, at least 1 % of the median.
    Instead of the update of that step all ranks then restore the older copy, which at least `every_n_steps` calm steps
    have followed, and the state is checked in the next step. Positions in the data, the count of steps and schedules go
    on, so the result is that of a run that has left these updates out. Numbers that optimizers keep in their parameter
    groups go on, too, as learning rates do. The line of a rollback, and a CSV, name the samples.

    In an elastic run a rollback is committed as an update is: if a rank is lost meanwhile, the others make it all, or
    repeat the step and find the spike again.

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
        self._window = window
        # By step. One more than is looked at: a step that is repeated has left its own on some ranks.
        self._losses: deque[tuple[int, float]] = deque(maxlen=window + 1)
        self._copies: deque[StateCopy] = deque(maxlen=2)
        self._began: int | None = None  # position in the data before the running step
        self._position: int | None = None  # and after it
        self._spike: _Spike | None = None  # whose rollback rank 0 may not have reported
        self.rollbacks = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"losses": [list(entry) for entry in self._losses], "rollbacks": self.rollbacks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend((step, loss) for step, loss in state_dict["losses"])
        self.rollbacks = state_dict["rollbacks"]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        own_strategy(trainer, "SpikeGuard").update.finite.ignore_spikes()
        if stage == "fit":  # what was saved is loaded after this
            self._losses.clear()
            self.rollbacks, self._spike = 0, None
        require_automatic_optimization(pl_module, "SpikeGuard returns to the end of a step", cure="drop the callback")
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, WeightAveraging) or getattr(other, "replays", False):
                raise ConfigurationError(
                    f"SpikeGuard cannot take {type(other).__name__}'s own copies of the state back: drop one of the "
                    "callbacks, or optimizer_replay=true"
                )

    def _drop_copies(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """They are of another training, of other rows of experts or of another world."""
        self._copies.clear()

    on_train_start = on_before_experts_move = on_world_changed = _drop_copies

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        here, sampler = joined_slice(trainer.train_dataloader), first_sampler(trainer.train_dataloader)
        self._report_left(trainer)
        self._began = began = None if here is None or sampler is None else sampler.begin_of(here)
        self._position = None if here is None or began is None else began + here.step_total
        if not self._copies:
            self._copy(own_strategy(trainer, "SpikeGuard"), trainer.global_step, began)

    def _copy(self, strategy: ExpertParallelStrategy, step: int, position: int | None) -> None:
        if strategy.state.window_replay is None:  # else experts lack what brings their state back
            self._copies.append(StateCopy.of(strategy, step, position))

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy, step = own_strategy(trainer, "SpikeGuard"), trainer.global_step + 1
        while self._losses and self._losses[-1][0] >= step:
            self._losses.pop()
        known = [known for _, known in self._losses][-self._window :]
        loss, limit = _mean_loss(strategy), limit_of(known, self._threshold)
        if loss is None:
            return
        if math.isfinite(loss) and loss <= limit:
            self._losses.append((step, loss))
            return
        if self.rollbacks >= self._max_rollbacks:
            raise LossSpikeError(
                f"{_sentence(step, loss, limit)}, after {self.rollbacks} rollbacks: look at the samples that were left "
                "out, lower the learning rate, or raise callbacks.spike_guard.max_rollbacks"
            )
        source = self._copies[0] if self._copies else None  # none where experts have moved just now
        sampler, first = first_sampler(trainer.train_dataloader), self._began if source is None else source.position
        spike = _Spike(
            step=step,
            loss=loss,
            limit=limit,
            restored=step - 1 if source is None else source.step,
            samples=_samples(sampler, first, self._position),
        )
        strategy.update.replace(partial(self._roll_back, strategy, source, spike, self.rollbacks + 1))

    def _roll_back(
        self, strategy: ExpertParallelStrategy, source: StateCopy | None, spike: _Spike, rollbacks: int
    ) -> None:
        self.rollbacks, self._spike = rollbacks, spike
        self._copies.clear()
        if source is not None:
            source.restore(strategy.state.module)
            strategy.state.after_writing()
            strategy.update.state_check.schedule.check_next()  # memory may have been damaged before it was copied
            self._copies.append(replace(source, position=self._position))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if private_lightning.is_accumulating(trainer):
            return
        if self._spike is not None:
            if trainer.is_global_zero:
                self._report()
        elif trainer.global_step % self._every == 0:
            self._copy(own_strategy(trainer, "SpikeGuard"), trainer.global_step, self._position)

    def _report(self) -> None:
        spike, self._spike = self._spike, None
        assert spike is not None
        logger.warning("%s", spike)
        if self._path is not None:
            append_rows(self._path, _COLUMNS, [[*spike[:-1], " ".join(map(str, spike.samples))]])

    def _report_left(self, trainer: pl.Trainer) -> None:
        """Report a rollback whose hook a fault has left, or whose rank 0 was lost, unless the run has returned to a
        step before it.
        """
        if self._spike is not None and trainer.is_global_zero and trainer.global_step >= self._spike.step:
            self._report()
        self._spike = None  # rank 0 has ended the last batch

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report_left(trainer)


def _mean_loss(strategy: ExpertParallelStrategy) -> float | None:
    """Return the mean over the running step's micro-batches of all ranks, None if they have no samples; collective."""
    losses = [loss.double().mean() for loss in strategy.update.losses]
    sums = torch.tensor([0.0, len(losses)], dtype=torch.float64, device=strategy.world.device)
    if losses:
        sums[0] = torch.stack(losses).sum()
    all_reduce_(sums, strategy.world)
    total, count = strategy.world.read(sums).tolist()
    return total * strategy.state.trainer.accumulate_grad_batches / count if count else None


def _samples(sampler: StepSampler | None, first: int | None, last: int | None) -> list[int]:
    if sampler is None or first is None or last is None:
        return []
    return sampler.samples_between(first, last)
