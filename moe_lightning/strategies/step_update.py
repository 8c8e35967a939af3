"""Update of an optimizer step: checks of losses and gradients, scaling for float16, clipping, and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.state.tensors import local
from moe_lightning.strategies.arithmetic_check import ArithmeticCheck
from moe_lightning.strategies.dense_sharding import has_owners, is_replicated
from moe_lightning.strategies.gradients import Gradients, norm_of, scale_gradients
from moe_lightning.strategies.optimizer_checks import (
    require_no_exchanged_weights,
    require_updates_by_expert,
    require_updates_by_parameter,
    require_updates_by_row,
)
from moe_lightning.strategies.options import RunOptions
from moe_lightning.strategies.precision import AgreedScaler, own_scale, share_scale
from moe_lightning.strategies.state_check import StateCheck
from moe_lightning.strategies.step_data import samples_of
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.watch import NORM_STEPS, FiniteWatch, OwnNumbers, UpdateSkipped, dense_values
from moe_lightning.strategies.worlds import FixedWorld, Worlds

if TYPE_CHECKING:
    from moe_lightning.data.sampler import StepSlice
    from moe_lightning.strategies.elastic_worlds import ElasticWorlds


class StepUpdate:
    """Update of the present step, and of those that follow.

    Args:
        worlds: the present world.
        state: parameters, gradients and optimizers of this rank.
        options: of the run.

    Attributes:
        gradients: clipping of gradients, and their comparison between ranks.
        state_check: check of the state in memory.
        arithmetic_check: check of matrix products.
        finite: check of losses and gradients.
        own: recent losses and gradients of this rank.
        is_skipped: the last update was left out or replaced.
        is_replaced: it was replaced.
        losses: of the micro-batches of the running step that have samples of this rank, divided by their number.
    """

    def __init__(self, worlds: Worlds, state: TrainState, options: RunOptions) -> None:
        self._worlds, self._state = worlds, state
        self.gradients = Gradients(worlds, state)
        self.state_check = StateCheck(worlds, state, every=options.check_state_every)
        self.arithmetic_check = ArithmeticCheck(worlds, state, every=options.check_arithmetic_every)
        self.finite = FiniteWatch(options.stop_on_nan)
        self.own = OwnNumbers()
        self.is_skipped = self.is_replaced = False
        self.losses: list[Tensor] = []
        self._replacement: Callable[[], None] | None = None
        self._scaler: AgreedScaler | None = None
        self._num_groups = -1
        self._clipped: int | None = None  # the optimizer whose gradients clipping has checked

    def begin(self, precision: Precision) -> None:
        """Scale losses and clip gradients for all ranks, and look for updates past the strategy, until `end`."""
        self._scaler = share_scale(precision, self._worlds, self._state.parameters_of)
        private_lightning.clip_with(precision, self._clip, self.gradients.clip_by_value)
        private_torch.clip_norms_by(self.gradients.norms_for_clipping, scale_gradients)
        self.gradients.watch_updates()

    def end(self, precision: Precision) -> None:
        """Give the precision plugin its own scaler back, and torch's clipping its own functions."""
        own_scale(precision)
        private_torch.clip_norms_as_usual()
        self.gradients.end_watch()
        self.finite.end()
        self._scaler, self._num_groups = None, -1

    def check_optimizers(self, optimizers: Sequence[Optimizer], *, are_new: bool = False) -> None:
        """Check that every row of a stack is updated by itself, each time that parameter groups are added.

        Args:
            are_new: others had been checked.

        Raises:
            ConfigurationError: an optimizer under which replicas of an expert, or the models of ranks, would diverge.
        """
        num_groups = sum(len(optimizer.param_groups) for optimizer in optimizers)
        if (are_new or num_groups != self._num_groups) and self._worlds.may_have_peers:
            require_updates_by_expert(optimizers, self._state.experts.stack_of)
            require_updates_by_row(optimizers)
            if not is_replicated(self._state.shards.kind):
                require_no_exchanged_weights(optimizers, self._state.shards.kind)
            if has_owners(self._state.shards.kind):
                require_updates_by_parameter(optimizers, f"dense={self._state.shards.kind}")
            if self._worlds.axes.pp > 1:
                require_updates_by_parameter(optimizers, "mesh.pp")
        self._num_groups = num_groups

    def begin_training(self) -> None:
        """Begin a training, or go on after a recovery."""
        self.state_check.schedule.begin_training()
        self.arithmetic_check.schedule.begin_training()

    def before_step(self) -> None:
        """Begin the checks that are due in the step of this micro-batch; collective then."""
        step = self._state.trainer.global_step
        self.state_check.before_step(step)
        self.arithmetic_check.before_step(step)

    def screened(self) -> AbstractContextManager[object]:
        """Return the context of a forward or backward pass: in a step that is checked products are screened."""
        return self.arithmetic_check.products or nullcontext()

    def forget_step(self) -> None:
        """Forget the running step, which will be repeated."""
        self.gradients.forget_writers()
        self.finite.forget_step()
        self.losses.clear()
        self._replacement = None
        if self._scaler is not None:
            self._scaler.forget_step()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss multiplied by the scale of float16, where there is one."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def check_loss(self, loss: Tensor, batch: StepSlice | None) -> None:
        """Check that the loss of a micro-batch is finite, and keep it until the update."""
        trainer, rank = self._state.trainer, self._worlds.present.rank
        step = trainer.global_step
        self.losses.append(loss.detach())
        self.own.add_loss(loss, 0 if batch is None else batch.count)
        self.finite.check_loss(
            loss, lambda: f"on rank {rank} in the step after step {step}{samples_of(batch, trainer.train_dataloader)}"
        )

    def check_own_norm(self, gradients: Tensor) -> None:
        """Look at dense gradients of this rank, before they are summed over ranks."""
        is_kept = self._state.trainer.global_step % NORM_STEPS == 0
        if not is_kept and self.finite.stop is None:
            return
        norm = norm_of(dense_values(gradients))
        if is_kept:
            self.own.add_norm(norm)
        if self.finite.stop is not None:
            self.finite.check_own_norm(norm)

    def replace(self, replacement: Callable[[], None]) -> None:
        """Let the running step end with this instead of the optimizer's update. Called on every rank, in a hook before
        the update.

        Args:
            replacement: changes values of this rank by itself, the same if it is called twice.
        """
        self._replacement = replacement

    def prepare(self, optimizer: Optimizer, elastic: ElasticWorlds | FixedWorld, begin: Callable[[], None]) -> None:
        """Agree with all ranks on the update that follows; no rank changes a value before all are prepared. Collective.

        Args:
            begin: called last, before values change.

        Raises:
            UpdateSkipped: the update is left out or replaced, on every rank.
        """
        state, scaler = self._state, self._scaler
        state.before_reading()
        replacement, self._replacement = self._replacement, None
        self.losses.clear()
        self.own.end_step()
        overflows = scaler is not None and scaler.overflows(optimizer)
        if not overflows:
            self._check_update(optimizer)
        is_bad = self.finite.is_skipped(state.module, self._worlds.present)
        if not (is_bad or overflows):
            self.gradients.require_same_gradients(optimizer)
            if damage := self._damage(optimizer):
                elastic.repeat_step(damage)
                is_bad = True
        self.is_replaced = replacement is not None
        self.is_skipped = is_bad or overflows or self.is_replaced
        if is_bad or self.is_replaced or (overflows and self._worlds.is_elastic):
            state.forget_update()  # a recovery would apply it
        elif overflows:
            state.forget_counts()
        # Where ranks may be lost, a barrier: the last collective before the update.
        elastic.prepare(replacement or partial(state.apply_update, optimizer))
        if self.is_skipped:
            if scaler is not None:
                scaler.update()
            if replacement is not None:
                elastic.begin_update()
                replacement()
            raise UpdateSkipped
        state.shards.replay_update(optimizer)
        elastic.begin_update()
        begin()

    def _damage(self, optimizer: Optimizer) -> str:
        """Check the state, gradients and arithmetic before an update, in steps in which that is due; collective then.

        Returns:
            What was found, in words: the gradients are not to be used. Empty: nothing, or it is repaired.

        Raises:
            StateDamagedError: on every rank, damage that no rank can repair.
        """
        damage = self.state_check.before_update(optimizer)
        wrong = self.arithmetic_check.before_update() if self.arithmetic_check.products is not None else ""
        return damage or wrong

    def _clip(self, optimizer: Optimizer, most: float) -> None:
        """Clip by the norm of the whole model, and check that it is finite before gradients are scaled by it.

        Under manual optimization that may be before they are divided by the scale of float16: they are checked later.
        """
        if self._scaler is None or self._scaler.is_unscaled(optimizer):
            self._clipped = self._state.number_of(optimizer)
        self.gradients.clip(optimizer, most, partial(self._check_norm, optimizer, is_used=True))

    def _check_update(self, optimizer: Optimizer) -> None:
        """Check the gradients of an update, unless clipping has."""
        clipped, self._clipped = self._clipped, None
        if clipped == self._state.number_of(optimizer):
            return
        found = [p.grad for p in self._state.parameters_of(optimizer) if p.grad is not None]
        gradients = [values for gradient in found if (values := dense_values(local(gradient))).numel()]
        if gradients:
            self._check_norm(optimizer, private_torch.stock_norm(gradients), is_used=False)

    def _check_norm(self, optimizer: Optimizer, norm: Tensor, *, is_used: bool) -> None:
        scaler = self._scaler
        if scaler is not None and (not scaler.is_unscaled(optimizer) or scaler.has_overflowed(optimizer)):
            return  # the scale is, or may be, too large: no update follows then

        def named() -> dict[str, nn.Parameter]:
            updated = set(self._state.parameters_of(optimizer))
            return {name: p for name, p in self._state.module.named_parameters() if p in updated}

        step, world = self._state.trainer.global_step, self._worlds.present
        ranks = "" if world.size == 1 else f"summed over {world.size} ranks, "
        where = f"{ranks}in the step after step {step}"
        self.finite.check_gradients(norm, named, where, world, is_used=is_used)
