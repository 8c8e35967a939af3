"""Lightning's callbacks WeightAveraging and EMAWeightAveraging for weights that ranks share.

Lightning averages in a copy of the module, made before experts and shards have their places. Here the callback works on
`state.averages`, whose tensors follow every placement as the optimizer's states do. Where ranks may be lost, averages
follow an update at once, as a part of it: ranks that a fault stops before their callbacks' hooks then agree on them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from moe_lightning.compat import private_lightning
from moe_lightning.errors import ConfigurationError
from moe_lightning.state.averages import AVERAGE, Averages, set_aside
from moe_lightning.state.sums import sum_of_rows
from moe_lightning.state.tensors import local
from moe_lightning.strategies.worlds import ExpertParallelCallback, call_hook

if TYPE_CHECKING:
    from moe_lightning.strategies.train_state import TrainState

CURRENT, REST = "current_model_state", "averaging_state"
"""Keys of Lightning's checkpoints: the weights that train on, whose averages are in `state_dict`, and the count."""


class Averaging:
    """Averages of a fit, in the place of the callback's copy of the module; of a fit without the callback, nothing.

    Args:
        state: of this rank.

    Attributes:
        averages: None without the callback.
        are_in_module: the module has the averages now, and they are where these belong.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.averages: Averages | None = None
        self.are_in_module = False
        self._callback: WeightAveraging | None = None
        self._is_elastic = False
        self._save: Callable[[], dict[str, Any]] = dict
        self._decide: Callable[..., bool] = lambda **_: False
        self._loaded: Mapping[str, Any] | None = None
        self._others: MutableMapping[nn.Parameter, int] | None = None  # sums of weights that have no average
        self._set_aside: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []  # weights that another rank updates

    def begin_fit(self, trainer: pl.Trainer, save: Callable[[], dict[str, Any]], *, is_elastic: bool) -> None:
        """Take over the callback of a run of the Trainer, if that is a fit and has one; before the callback's `setup`.

        Args:
            save: returns the averaged module's state_dict; collective.
            is_elastic: the run recovers from lost ranks.

        Raises:
            ConfigurationError: averages that cannot be kept.
        """
        found = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]
        self.averages = self._callback = self._loaded = self._others = None
        self.are_in_module, self._set_aside = False, []
        for callback in found:
            private_lightning.average_as_usual(callback)
        if not found or trainer.state.fn != TrainerFn.FITTING:
            return
        callback, name = found[0], type(found[0]).__name__
        rule, use_buffers, device = private_lightning.averaging_rule(callback)
        if len(found) > 1:
            raise ConfigurationError(f"{name} and {type(found[1]).__name__} would both be validated: give one of them")
        if isinstance(device, torch.device) and device.type != trainer.strategy.root_device.type:
            raise ConfigurationError(
                f"{name} keeps averages beside the weights on {trainer.strategy.root_device.type}, not on "
                f"{device.type}: drop device"
            )
        if is_elastic and getattr(callback, "update_starting_at_epoch", None) is not None:
            raise ConfigurationError(_BY_EPOCHS)
        self.averages, self._callback = Averages(rule, use_buffers=use_buffers), callback
        self._is_elastic, self._save, self._decide = is_elastic, save, callback.should_update
        private_lightning.average_by(
            callback,
            self,
            setup=self._set_up,
            should_update=self._should_update,
            swap=lambda _: self.swap(),
            load=self._on_load_checkpoint,
        )

    # ------------------------------------------------------------------ the callback's hooks

    def _set_up(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        """Make no copy of the module, unless the callback has come to another strategy."""
        if getattr(trainer.strategy, "state", None) is not self._state and self._callback is not None:
            private_lightning.average_as_usual(self._callback)
            self._callback.setup(trainer, module, stage)

    def _should_update(self, **at: int | None) -> bool:
        """As the callback decides, but for steps that `follow` has averaged."""
        return not (at.get("step_idx") is not None and self._follows_steps) and self._decide(**at)

    @property
    def _follows_steps(self) -> bool:
        return self._is_elastic and self._state.module.automatic_optimization

    def update_parameters(self, module: nn.Module) -> None:
        """Average the present weights in, at the end of a batch or an epoch.

        Raises:
            ConfigurationError: a recovery could not tell on which ranks that has happened.
        """
        assert self.averages is not None
        if self._is_elastic:
            raise ConfigurationError(_BY_EPOCHS)
        self._begin()
        self.averages.update(module, self._state.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged module's state_dict under AveragedModel's names, with the count; collective."""
        assert self.averages is not None
        state = {f"module.{name}": value for name, value in self._save().items()}
        return state | {"n_averaged": torch.tensor(self.averages.count)}

    def _on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the count; weights and averages are loaded with the state of the rank."""
        assert self.averages is not None
        if REST in checkpoint:
            self.averages.set_count(int(checkpoint[REST]["n_averaged"]))
            rank_zero_info(f"Found {CURRENT} in the checkpoint. This will be used to initialize the model.")
        else:
            rank_zero_warn(
                "The checkpoint was not created with WeightAveraging. Both the current and the average model will be "
                "initialized with state_dict."
            )

    # ------------------------------------------------------------------ updates

    @contextmanager
    def hidden(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Leave the averages out of the optimizer's states inside; where some are missing they begin here."""
        averages: dict[nn.Parameter, Tensor] = {}
        if self.averages is not None:
            self.averages.begin(self._state.module, optimizer, self._state.home_of)
            averages = set_aside(optimizer)
            if self._others is None:
                self._others = self._sums_of_others()
        try:
            yield
        finally:
            for parameter, average in averages.items():
                optimizer.state[parameter][AVERAGE] = average

    def follow(self) -> None:
        """Average the weights of an update in, if the callback says so; on each rank by itself."""
        if self.averages is None or self._callback is None or not self._follows_steps:
            return
        step = self._state.module.trainer.global_step
        if self._decide(step_idx=step):
            self.averages.update(self._state.module, self._state.optimizers)
            private_lightning.averaged_at(self._callback, step + 1)

    def _begin(self) -> None:
        assert self.averages is not None
        for optimizer in self._state.optimizers:
            self.averages.begin(self._state.module, optimizer, self._state.home_of)

    def _sums_of_others(self) -> MutableMapping[nn.Parameter, int]:
        """Return the sums over the bits of dense weights that no optimizer has: averages are states of optimizers."""
        self._state.before_reading()
        state = self._state.training_state()
        held = {p for optimizer in self._state.optimizers for p in self._state.parameters_of(optimizer)} | state.base
        others = [p for p in state.dense.values() if p not in held and p.is_floating_point() and not p.is_meta]
        return WeakTensorKeyDictionary({p: int(sum_of_rows(local(p.detach()).unsqueeze(0))) for p in others})

    def _warn_of_others(self) -> None:
        """Warn once of a weight that has changed although no optimizer has it."""
        if not self._others:
            return
        known, self._others = self._others, self._sums_of_others()
        names = {p: name for name, p in self._state.module.named_parameters()}
        changed = [names[p] for p, total in self._others.items() if known.get(p, total) != total]
        if changed:
            self._others = {}
            rank_zero_warn(
                f"{changed[0]} changes and has no average, because no optimizer has it: validations, files and the "
                "module after fit have its last values beside averages of others. Give it to the optimizer, which "
                "leaves parameters without gradients as they are."
            )

    # ------------------------------------------------------------------ averages in the module

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights with their averages, between steps; collective where a rank updates weights for others,
        unless these come back.
        """
        assert self.averages is not None
        call_hook(self._state.module, ExpertParallelCallback.on_before_weights_swap)
        self._state.before_reading()
        unowned = self._state.shards.unowned
        if not self.are_in_module:
            self._warn_of_others()
            self._set_aside = [(p, p.detach().clone(), p.grad) for p in unowned]
        self.averages.swap(self._state.module, self._state.optimizers)
        self.are_in_module = not self.are_in_module  # before ranks meet: a fault there must not hide it
        if not self.are_in_module:
            for parameter, weight, _ in self._set_aside:
                parameter.copy_(weight)
            self._set_aside = []
        elif self._state.shards.shares_optimizers:
            for optimizer in self._state.optimizers:
                self._state.shards.broadcast_updates(optimizer)
            for parameter, _, gradient in self._set_aside:  # accumulated so far
                parameter.grad = gradient
        self._state.after_writing()

    def withdraw(self) -> None:
        """Put the weights back into the module if the averages are there; not collective."""
        if self.are_in_module:
            self.swap()

    @contextmanager
    def weights(self, *, averaged: bool) -> Generator[bool, None, None]:
        """Let the module have the averages inside, or the weights that train on; collective. Yields True if it has
        other values outside.
        """
        differ = self.averages is not None and averaged != self.are_in_module
        if differ:
            self.swap()
        try:
            yield differ
        finally:
            if differ:
                self.swap()

    def finish(self) -> None:
        """Let the module keep the averages, at the end of training; collective as `swap`."""
        if self.averages is not None:
            if not self.are_in_module:
                self.swap()
            self.are_in_module, self._set_aside = False, []
            self.averages.reset(self._state.module, self._state.optimizers)

    # ------------------------------------------------------------------ checkpoints in one file

    def load(self, averaged: Mapping[str, Any]) -> None:
        """Keep the averages of a checkpoint, in this rank's parts, until `place_loaded`."""
        self._loaded = averaged

    def place_loaded(self) -> None:
        """Set the averages to those of the checkpoint, if it had some, when optimizers have their states."""
        loaded, self._loaded = self._loaded, None
        if self.averages is not None and loaded is not None:
            self._begin()
            self.averages.load(loaded, self._state.module, self._state.optimizers)


_BY_EPOCHS = (
    "averages are updated with the step where ranks may be lost, not at the end of an epoch or of a batch of manual "
    "optimization: drop update_starting_at_epoch, or say elastic.enabled=false"
)
