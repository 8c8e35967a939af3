"""The same steps in one process: a copy of the module, the same weights before each step, the same samples."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchmetrics import Metric
from typing_extensions import override

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.data.loader import StepLoader
from moe_lightning.doctor.recorder import Recorder
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

_DROPPING = (((private_torch.AnyDropout,), "p"), ((nn.MultiheadAttention, nn.RNNBase), "dropout"))
"""torch's modules that drop values, and their option that says how many."""

States = Sequence[Mapping[str, Tensor]]
"""The whole model before each step, on the host."""


class Batches:
    """Batches that the ranks of a stock strategy computed, one rank's after the other's."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class _Follower(Recorder):
    """Notes the steps of the reference, each of which begins with the weights that the run had."""

    def __init__(self, tolerance: float, states: States) -> None:
        super().__init__(tolerance)
        self._states = states

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._note:
            pl_module.load_state_dict(self._states[len(self.notes)])
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        trainer.should_stop = len(self.notes) == len(self._states)


class _Trainer(pl.Trainer):
    """Learning rates are scheduled over the steps of the run that it follows."""

    steps_of_run: int | float = 0

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        return self.steps_of_run


def pristine_copy(module: pl.LightningModule) -> pl.LightningModule:
    """Copy a module that no strategy has sharded yet."""
    trainer = private_lightning.trainer_of(module)
    module.trainer = None  # it would be copied, too
    try:
        return copy.deepcopy(module)
    finally:
        module.trainer = trainer


def without_dropout(module: nn.Module) -> dict[str, Callable[[], None]]:
    """Turn off dropout of torch's own, whose masks depend on the rank that draws them.

    Returns:
        By name of a module that has drawn masks, what turns its dropout on again.
    """
    found = dict[str, Callable[[], None]]()
    for name, part in module.named_modules():
        option = next((option for kinds, option in _DROPPING if isinstance(part, kinds)), None)
        if option is not None and getattr(part, option) > 0:
            found[name] = partial(setattr, part, option, getattr(part, option))
            setattr(part, option, 0.0)
    return found


def one_process_loader(trainer: pl.Trainer) -> Any:
    """All samples of a run whose strategy cuts its loaders, from the first on.

    Raises:
        ConfigurationError: a loader that is not cut.
    """

    def whole(loader: object) -> object:
        if not isinstance(loader, StepLoader) or isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                f"ParityDoctor reads every sample in one process, too, and a {type(loader).__name__} does not let it: "
                "give a torch DataLoader of a map-style data set"
            )
        sampler = copy.copy(loader.step_sampler)
        sampler.load_state_dict({"consumed": 0})
        cut, pieces = sampler.cut, sampler.cut.num_pieces
        if cut.num_micros > 1 and cut.pieces > 1 and cut.global_batch_size % pieces:
            raise ConfigurationError(
                f"ParityDoctor cannot cut {cut.global_batch_size} samples into {pieces} micro-batches as mesh.pp: "
                f"give a multiple of {pieces}, or accumulate_grad_batches=1"
            )
        sampler.keep_global_batch()  # it takes the pieces of a step as micro-batches
        sampler.bind(rank=0, world_size=1, pieces=1)
        return StepLoader(loader.dataset, sampler, collate_fn=loader.collate_fn)

    return private_torch.tree_map(whole, trainer.train_dataloader)


def follow(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    states: States,
    data: Any,
    tolerance: float,
) -> list[list[dict[str, Any]]]:
    """The notes of one process that takes the steps of a run.

    Args:
        trainer: of the run.
        module: a pristine copy of its module.
        data: loaders of what all ranks have computed.
    """
    follower = _Follower(tolerance, states)
    strategy, micros = _strategy(trainer)
    module.configure_callbacks = list  # type: ignore[method-assign]
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.distributed_available_fn = lambda: False
    device = trainer.strategy.root_device.type
    with _alone():
        alone = _Trainer(
            strategy=strategy,
            accelerator=device,
            devices=1,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            accumulate_grad_batches=micros,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[follower],
            logger=False,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            precision=trainer.precision,
            plugins=[LightningEnvironment()],
        )
        alone.steps_of_run = trainer.estimated_stepping_batches
        alone.fit(module, train_dataloaders=data)
    follower.end()
    return follower.notes


def _strategy(trainer: pl.Trainer) -> tuple[Strategy, int]:
    """Return the strategy of the reference, and the number of micro-batches of its step."""
    theirs = trainer.strategy
    if isinstance(theirs, ExpertParallelStrategy):
        samplers = [loader.step_sampler for loader in private_torch.tree_leaves(trainer.train_dataloader)]
        pieces = max(sampler.cut.pieces for sampler in samplers)
        alone = ExpertParallelStrategy(seed=theirs.steps.stream.seed, stop_on_nan=theirs.options.stop_on_nan)
        return alone, trainer.accumulate_grad_batches * pieces
    return SingleDeviceStrategy(theirs.root_device), trainer.accumulate_grad_batches * trainer.world_size


@contextmanager
def _alone() -> Generator[None, None, None]:
    """A training inside of another one leaves neither words nor traces."""
    logger, environment = logging.getLogger("lightning.pytorch"), dict(os.environ)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
