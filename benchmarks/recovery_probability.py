"""Probability that a model survives failed nodes (Lazarus 6.3): exact, by the closed form of MRO, or by sampling.

A model survives when all of its layers do, from the same failed set: the supports of all layers are judged together.

Shapes: E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.replica_placement import fatal_counts, fatal_sets, supports
from moe_lightning.errors import ConfigurationError

MAX_EXACT_NODES = 20
"""Beyond this the table of all failed sets is too large; use `sampled_recovery`."""

_BATCH_SAMPLES = 1 << 12
_BATCH_PAIRS = 1 << 13
"""Failed sets drawn and pairs of experts and nodes judged at once: 16 and 4 MiB at 4,096 nodes."""


def recovery_probabilities(tables: Sequence[IntArray]) -> NDArray[np.float64]:
    """float64 [N + 1]: chance that all layers survive k failures, every set of k nodes being equally likely.

    Raises:
        ConfigurationError: more nodes than can be enumerated.
    """
    num_nodes = tables[0].shape[1]
    if num_nodes > MAX_EXACT_NODES:
        raise ConfigurationError(
            f"{num_nodes} nodes have too many failed sets to enumerate (limit {MAX_EXACT_NODES}): use sampled_recovery"
        )
    fatal = fatal_counts(fatal_sets(supports(tables), num_nodes))
    possible = np.array([comb(num_nodes, k) for k in range(num_nodes + 1)])
    return np.asarray(1.0 - fatal / possible, dtype=np.float64)


def block_recovery(block_sizes: Sequence[int], num_nodes: int, failures: int) -> float:
    """Chance that each of several disjoint blocks of nodes keeps a live node: the closed form of MRO."""
    survivable = 0
    for chosen in range(len(block_sizes) + 1):
        for lost in combinations(block_sizes, chosen):
            if sum(lost) <= failures:
                survivable += (-1) ** chosen * comb(num_nodes - sum(lost), failures - sum(lost))
    return survivable / comb(num_nodes, failures)


def sampled_recovery(tables: Sequence[IntArray], failures: int, *, samples: int = 10_000, seed: int = 0) -> float:
    """Monte Carlo estimate for clusters of any size; the standard error is at most 0.5 / sqrt(samples).

    Args:
        tables: int64 [E, N] of every layer.
        failures: k, nodes that fail at once.
        samples: failed sets to draw; each is one bit of every word, so that one operation judges 64 of them.
        seed: of the draws.

    Raises:
        ConfigurationError: more failures than nodes, or no samples.
    """
    num_nodes = tables[0].shape[1]
    if not 0 <= failures <= num_nodes or samples < 1:
        raise ConfigurationError(f"cannot sample {samples} sets of {failures} failed nodes out of {num_nodes}")
    cells = [np.flatnonzero(table > 0) for table in tables]
    sizes = [np.bincount(found // num_nodes, minlength=len(table)) for found, table in zip(cells, tables, strict=True)]
    nodes, size = np.concatenate(cells) % num_nodes, np.concatenate(sizes)
    if not size.all():
        return 0.0  # an expert that nobody holds
    nodes, size = nodes[np.repeat(size <= failures, size)], size[size <= failures]  # larger supports always survive
    rng = np.random.default_rng(seed)
    survived = 0
    for start in range(0, samples, _BATCH_SAMPLES):
        count = min(_BATCH_SAMPLES, samples - start)
        drawn = _failed_sets(rng, num_nodes, failures, -(-count // 64) * 64)  # whole words
        failed = np.packbits(drawn, axis=1).view(np.uint64)
        survived += count - int(np.unpackbits(_fatal(failed, nodes, size).view(np.uint8), count=count).sum())
    return survived / samples


def _failed_sets(rng: np.random.Generator, num_nodes: int, failures: int, samples: int) -> NDArray[np.bool_]:
    """bool [N, samples]: uniformly drawn sets of failed nodes.

    Every node fails with chance failures / N at first. Of the sets of any one size all are then equally likely, and
    stay so while nodes drawn at random join those that are too small and leave those that are too large.
    """
    chosen = rng.integers(0, 1 << 16, (num_nodes, samples), dtype=np.uint16) < (failures << 16) // num_nodes
    missing = failures - chosen.sum(axis=0)
    for joins, short in ((True, missing), (False, -missing)):
        column = np.flatnonzero(short > 0)
        while column.size:
            node = rng.integers(0, num_nodes, len(column))
            changes = chosen[node, column] != joins
            chosen[node[changes], column[changes]] = joins
            short[column[changes]] -= 1
            column = column[short[column] > 0]
    return chosen


def _fatal(failed: NDArray[np.uint64], nodes: IntArray, size: IntArray) -> NDArray[np.uint64]:
    """uint64 [words]: the samples in which all nodes of some support failed.

    Args:
        failed: uint64 [N, words], a bit per sample.
        nodes: int64 [pairs], the nodes of the supports, one after the other.
        size: int64 [supports], nodes of each.
    """
    fatal = np.zeros(failed.shape[1], dtype=np.uint64)
    ends = np.cumsum(size)
    first = 0
    while first < len(size):
        begin = int(ends[first] - size[first])
        last = max(first + 1, int(np.searchsorted(ends, begin + _BATCH_PAIRS, side="right")))
        rows = failed[nodes[begin : ends[last - 1]]]
        lost = np.bitwise_and.reduceat(rows, ends[first:last] - size[first:last] - begin, axis=0)
        fatal |= np.bitwise_or.reduce(lost, axis=0)
        first = last
    return fatal
