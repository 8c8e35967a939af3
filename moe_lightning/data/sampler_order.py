"""The order of a sampler of the user's own, made the same on every rank and in every run."""

from __future__ import annotations

from collections.abc import Generator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from moe_lightning.data.own_generators import OwnGenerators
from moe_lightning.data.step_sampler import mixed_seed
from moe_lightning.errors import ConfigurationError


class NoCommonOrderError(ConfigurationError):
    """A sampler whose indices cannot be made the same on every rank; one rank alone may use it as it is."""


class SamplerOrder:
    """The indices that a sampler yields in epoch e, as a function of e alone.

    The sampler is read to its end with every global generator, and its own `generator` where it has one, seeded by
    (seed, e); the generators are left as they were. So ranks agree, and a resumed run goes on with the same indices.

    Args:
        sampler: finite; one with `set_epoch` is told the epoch.
        seed: of the run; a generator of the sampler's own is seeded by its initial seed instead.

    Raises:
        NoCommonOrderError: the sampler has no length, yields no indices, or another order when it is read again.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._name = type(sampler).__name__
        if not isinstance(sampler, Sized):
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} has no length, so nobody knows where an epoch ends; "
                "give it a __len__."
            )
        self.num_samples = len(sampler)
        if not torch.equal(self(0), self(0)):
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} keeps random numbers of its own, so ranks would see different "
                "orders; draw them from torch's global generator, or from one in its attribute `generator`."
            )

    def __call__(self, epoch: int) -> torch.Tensor:
        """int64 [num_samples]."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with _seeded_generators(self._sampler, self._seed, epoch):
            indices = list(self._sampler)
        if not all(isinstance(index, int | np.integer) for index in indices):
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} yields {indices[:1]} where an index is expected; "
                "yield integers."
            )
        if len(indices) != self.num_samples:
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} yields {len(indices)} indices in epoch {epoch}, but its length "
                f"is {self.num_samples}; make both equal in all epochs."
            )
        return torch.tensor(indices, dtype=torch.int64)


@contextmanager
def _seeded_generators(sampler: Any, seed: int, epoch: int) -> Generator[None, None, None]:
    """Seed what a sampler may draw from, and restore it."""
    own = getattr(sampler, "generator", None)
    own = own if isinstance(own, torch.Generator) else None
    with OwnGenerators(mixed_seed(seed, epoch)):
        if own is not None:
            sampler.generator = torch.Generator().manual_seed(mixed_seed(own.initial_seed(), epoch))
        try:
            yield
        finally:
            if own is not None:
                sampler.generator = own
