"""How likely a placement survives node failures: exactly, by the closed form of MRO, or by sampling.

The experts of a layer survive when every expert keeps a replica on a live node, that is when no expert's *support* (the
set of nodes that hold it) lies inside the failed set. A model survives when all of its layers do, from the same failed
set: the supports of all layers are therefore judged together (Lazarus 6.3). Sets of nodes are bit masks.

Shapes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.errors import ConfigurationError

MAX_EXACT_NODES = 20
"""Beyond this the table of all failed sets is too large; use `sampled_recovery`."""


def supports(tables: Sequence[IntArray]) -> IntArray:
    """Distinct supports of all experts of all layers, ascending, from tables of replicas int64 [E, N], N <= 62."""
    bits = np.int64(1) << np.arange(tables[0].shape[1], dtype=np.int64)
    return np.unique(np.concatenate([(table > 0) @ bits for table in tables]))


def fatal_sets(masks: IntArray, num_nodes: int) -> NDArray[np.bool_]:
    """bool [..., 2^N]: whether failing exactly the nodes of an index loses an expert, for supports int64 [..., E].

    A support is fatal, and so is every superset of a fatal set: N passes over the table close it upwards.

    Raises:
        ConfigurationError: more nodes than the table of all sets allows.
    """
    if num_nodes > MAX_EXACT_NODES:
        raise ConfigurationError(
            f"{num_nodes} nodes have too many failed sets to enumerate (limit {MAX_EXACT_NODES}): use sampled_recovery"
        )
    fatal = np.zeros((*masks.shape[:-1], 1 << num_nodes), dtype=np.bool_)
    np.put_along_axis(fatal, masks, np.True_, axis=-1)
    for bit in range(num_nodes):
        halves = fatal.reshape(*masks.shape[:-1], -1, 2, 1 << bit)
        halves[..., 1, :] |= halves[..., 0, :]
    return fatal


def fatal_counts(fatal: NDArray[np.bool_]) -> IntArray:
    """int64 [..., N + 1]: how many sets of k failed nodes are fatal, k = 0..N, from bool [..., 2^N]."""
    by_size, starts = _sets_by_size(fatal.shape[-1].bit_length() - 1)
    counts: IntArray = np.add.reduceat(fatal[..., by_size], starts, axis=-1, dtype=np.int64)
    return counts


@cache
def _sets_by_size(num_nodes: int) -> tuple[IntArray, IntArray]:
    """All sets ordered by size, and where each size starts."""
    sizes = np.zeros(1, dtype=np.int64)
    for _ in range(num_nodes):
        sizes = np.concatenate((sizes, sizes + 1))
    starts = np.cumsum([0] + [comb(num_nodes, k) for k in range(num_nodes)])
    return np.argsort(sizes, kind="stable"), starts


def recovery_probabilities(tables: Sequence[IntArray]) -> NDArray[np.float64]:
    """float64 [N + 1]: chance that all layers survive k failures, every set of k nodes being equally likely.

    Raises:
        ConfigurationError: more nodes than can be enumerated.
    """
    num_nodes = tables[0].shape[1]
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
    """Monte Carlo estimate for clusters of any size; the standard error is at most 0.5 / sqrt(samples)."""
    held = np.concatenate([table > 0 for table in tables]).astype(np.int64)
    num_nodes = held.shape[1]
    if not 0 <= failures <= num_nodes or samples < 1:
        raise ConfigurationError(f"cannot sample {samples} sets of {failures} failed nodes out of {num_nodes}")
    rng = np.random.default_rng(seed)
    survived = 0
    for start in range(0, samples, 1024):
        draws = rng.random((min(1024, samples - start), num_nodes))
        alive = np.ones_like(draws, dtype=np.int64)
        np.put_along_axis(alive, np.argsort(draws, axis=1)[:, :failures], 0, axis=1)
        survived += int((alive @ held.T).all(axis=1).sum())
    return survived / samples
