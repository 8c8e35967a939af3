"""What the strategy knows about data: every loader is cut over the ranks, and every batch has its place in the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from moe_lightning.data.step_loader import StepLoader
from moe_lightning.data.step_sampler import StepSlice
from moe_lightning.errors import ConfigurationError


class StepData:
    """Cuts loaders over the ranks and follows the running batch.

    Args:
        rank, world_size: whose slices.
        seed: of the order of stock loaders.
    """

    def __init__(self, *, rank: int, world_size: int, seed: int) -> None:
        self._world = {"rank": rank, "world_size": world_size}
        self._seed = seed
        self._restored: list[dict[str, Any]] = []

    def cut(self, loader: object, trainer: pl.Trainer) -> object:
        """The loader's part for this rank; its batch_size is the global batch.

        Raises:
            ConfigurationError: a loader that cannot be cut exactly.
        """
        cut = self._cut(loader, trainer)
        if isinstance(cut, StepLoader) and trainer.training:
            cut.bind_to(trainer)
            if self._restored:
                cut.load_state_dict(self._restored.pop(0))
        return cut

    def _cut(self, loader: object, trainer: pl.Trainer) -> object:
        if isinstance(loader, StepLoader):
            loader.bind(**self._world)
            return loader
        if isinstance(loader, DataLoader):
            micros = trainer.accumulate_grad_batches if trainer.training else 1
            return StepLoader.from_dataloader(
                loader, **self._world, num_micros=micros, seed=self._seed, training=trainer.training
            )
        if self._world["world_size"] == 1:
            return loader
        raise ConfigurationError(
            f"a loader of type {type(loader).__name__} cannot be cut over {self._world['world_size']} ranks: "
            "return a torch DataLoader or a StepLoader"
        )

    def enter_world(self, *, rank: int, world_size: int, loaders: object) -> None:
        """Cut for other ranks from now on, also what is under way."""
        self._world = {"rank": rank, "world_size": world_size}
        for loader in pytree.tree_leaves(loaders):
            if isinstance(loader, StepLoader):
                loader.bind(**self._world)

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Positions for the training loaders that will be cut next."""
        self._restored = list(states)


def loader_states(loaders: object) -> list[dict[str, Any]]:
    """The positions of the StepLoaders in a collection of loaders."""
    return [loader.state_dict() for loader in pytree.tree_leaves(loaders) if isinstance(loader, StepLoader)]


def training_slice(loaders: object) -> StepSlice | None:
    """Which samples a training batch holds: those of the first loader, where a batch joins several.

    Raises:
        ConfigurationError: ranks and micro-batches take unlike shares of the loaders, so that no weight fits them all.
    """
    stepping = [loader for loader in pytree.tree_leaves(loaders) if isinstance(loader, StepLoader)]
    sizes = {loader.step_sampler.global_batch_size for loader in stepping}
    parts = max((loader.step_sampler.world_size * loader.step_sampler.num_micros for loader in stepping), default=1)
    if len(sizes) > 1 and any(size % parts for size in sizes):
        raise ConfigurationError(
            f"training loaders of {sorted(sizes)} samples a step cannot be cut into {parts} parts alike, so their "
            f"losses have no common weight: use one batch size, or multiples of {parts}"
        )
    return stepping[0].current if stepping else None


def running_slice(loaders: object, index: int) -> StepSlice | None:
    """Which samples the batch holds that a loader yielded last; None where the loader does not know."""
    flat = pytree.tree_leaves(loaders)
    loader = flat[index] if index < len(flat) else None
    return loader.current if isinstance(loader, StepLoader) else None
