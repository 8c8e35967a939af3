"""Order of the samples of several sources, as a pure function of (seed, epoch, index).

An epoch has as many samples as all sources together. Each source gives its share of them, spread evenly over the epoch,
so every batch has the sources in about the ratio of their weights. A source is read in passes, each a permutation of
all its samples: a small one begins its next pass, and a large one goes on in the next epoch where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moe_lightning.arrays import IntArray
from moe_lightning.data.sampler import mixed_seed
from moe_lightning.errors import ConfigurationError


class Mixture:
    """Indices of an epoch, for samples of several sources that stand one source after the other.

    Args:
        sizes: samples of each source.
        weights: share of each source, relative to the others; None: in proportion to its size, so an epoch has every
            sample once.
        seed: of the permutations.

    Attributes:
        counts: samples of each source in an epoch.
        name: of the order, which changes with weights and seed.

    Raises:
        ConfigurationError: a source gets no sample of an epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> None:
        self.sizes = list(sizes)
        self.weights = [float(size) for size in sizes] if weights is None else list(weights)
        self.seed = seed
        self.name = f"mixed {' : '.join(f'{weight:g}' for weight in self.weights)} with seed {seed}"
        self.counts = apportion(sum(sizes), self.weights)
        if 0 in self.counts:
            weight = self.weights[self.counts.index(0)]
            raise ConfigurationError(
                f"weight={weight:g} of the {sum(self.weights):g} of all sources gives one of them no sample among the "
                f"{sum(sizes):,} of an epoch: raise it, or leave the source out"
            )
        self._begins = np.cumsum([0, *sizes[:-1]])
        self._slots = np.repeat(np.arange(len(sizes), dtype=np.int16), self.counts)[spread(self.counts)]

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self._slots)

    def __call__(self, epoch: int) -> torch.Tensor:
        """int64 [samples of an epoch]: the order of an epoch."""
        indices = np.empty(len(self._slots), dtype=np.int64)
        for source, (begin, count) in enumerate(zip(self._begins, self.counts, strict=True)):
            indices[self._slots == source] = begin + self._drawn(source, epoch * count, count)
        return torch.from_numpy(indices)

    def _drawn(self, source: int, first: int, count: int) -> IntArray:
        """Samples [first, first + count) of the endless passes over a source."""
        size = self.sizes[source]
        passes = range(first // size, -(-(first + count) // size))
        drawn = np.concatenate([self._permutation(source, number) for number in passes])
        return drawn[first % size :][:count]

    def _permutation(self, source: int, number: int) -> IntArray:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, source, number))
        permutation: IntArray = torch.randperm(self.sizes[source], generator=generator, device="cpu").numpy()
        return permutation


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers in the ratio of weights, each less than one from its share, that sum to `total`; what rounding
    down leaves goes to the largest remainders, the first ones first.
    """
    shares = [total * (weight / sum(weights)) for weight in weights]
    counts = [int(share) for share in shares]
    most = sorted(range(len(shares)), key=lambda source: (counts[source] - shares[source], source))
    for source in most[: total - sum(counts)]:
        counts[source] += 1
    return counts


def spread(counts: Sequence[int] | IntArray) -> IntArray:
    """Return the order in which samples of sources, one source after another, are each spread evenly: the k-th of n
    samples of a source stands at (2k + 1) / 2n of all."""
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.argsort(places, kind="stable")
