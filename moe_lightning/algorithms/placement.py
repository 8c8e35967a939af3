"""Which rank holds which experts: the placement and the groups of ranks that dispatch among themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.parts import cut
from moe_lightning.errors import ConfigurationError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Replicas of each expert on each rank of one MoE layer.

    Attributes:
        replicas: int64 [E, N]; entry (e, n) is how many replicas of expert e rank n holds. Several replicas on one
            rank are one slot
            with that multiplicity: it is entitled to as many shares of the expert's tokens.

    Raises:
        ConfigurationError: the table is not two-dimensional, has a negative entry, or an expert that no rank holds.
    """

    replicas: IntArray

    def __post_init__(self) -> None:
        table = np.array(self.replicas)
        if table.ndim != 2 or 0 in table.shape:
            raise ConfigurationError(f"a placement is a table [experts, ranks], not an array of shape {table.shape}")
        if not np.issubdtype(table.dtype, np.integer):
            raise ConfigurationError(f"a placement counts replicas in integers, not in {table.dtype}")
        if table.min() < 0:
            raise ConfigurationError(f"a placement cannot hold {table.min()} replicas: use 0 or more")
        missing = np.flatnonzero(table.sum(axis=1) == 0)
        if missing.size:
            raise ConfigurationError(
                f"no rank holds expert {missing[0]} ({missing.size} of {len(table)} experts have no replica): "
                "give every expert at least one"
            )
        table = table.astype(np.int64, copy=False)
        table.setflags(write=False)
        object.__setattr__(self, "replicas", table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and np.array_equal(self.replicas, other.replicas)

    def __hash__(self) -> int:
        return hash((self.replicas.shape, self.replicas.tobytes()))

    @property
    def num_experts(self) -> int:
        return int(self.replicas.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.replicas.shape[1])

    def experts_on(self, rank: int) -> tuple[int, ...]:
        """The distinct experts that a rank holds, ascending: one slot each."""
        return tuple(int(e) for e in np.flatnonzero(self.replicas[:, rank]))

    def holders(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold an expert, ascending."""
        return tuple(int(n) for n in np.flatnonzero(self.replicas[expert]))

    def owners(self) -> IntArray:
        """int64 [E]: the lowest rank that holds each expert; it speaks for the expert where one rank must (norms,
        saving).
        """
        lowest: IntArray = (self.replicas > 0).argmax(axis=1).astype(np.int64)
        return lowest

    def check_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Raise ConfigurationError unless every dispatch group holds every expert."""
        for group in groups:
            missing = np.flatnonzero(self.replicas[:, list(group)].sum(axis=1) == 0)
            if missing.size:
                raise ConfigurationError(
                    f"dispatch group of ranks {list(group)} holds no replica of expert {missing[0]}: "
                    "place every expert in every group, or raise ep_size"
                )


def dispatch_groups(num_ranks: int, ep_size: int) -> tuple[tuple[int, ...], ...]:
    """Blocks of ep_size consecutive ranks; tokens travel only inside a block.

    Raises:
        ConfigurationError: ep_size does not divide the number of ranks.
    """
    if ep_size < 1 or num_ranks % ep_size:
        divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ConfigurationError(f"ep_size={ep_size} does not divide the {num_ranks} ranks: use one of {divisors}")
    return tuple(tuple(range(start, start + ep_size)) for start in range(0, num_ranks, ep_size))


def uniform_placement(num_experts: int, num_ranks: int, copies: int = 1) -> Placement:
    """Every expert `copies` times: the ranks are cut into that many blocks, each of which holds all experts once.

    Inside a block of n ranks the experts lie in contiguous runs, as even as E allows; with more ranks than experts
    the ranks share
    experts, so that no rank stays empty.

    Raises:
        ConfigurationError: fewer than one expert, rank or copy, or more copies than ranks.
    """
    if num_experts < 1 or num_ranks < 1:
        raise ConfigurationError(
            f"{num_experts} experts on {num_ranks} ranks cannot be placed: both must be at least 1"
        )
    if not 1 <= copies <= num_ranks:
        raise ConfigurationError(f"copies={copies} of each expert need between 1 and {num_ranks} (the number of ranks)")
    table = np.zeros((num_experts, num_ranks), dtype=np.int64)
    blocks = cut(num_ranks, copies)
    for first, last in itertools.pairwise(blocks):
        ranks = last - first
        if ranks <= num_experts:
            bounds = cut(num_experts, ranks)
            for i in range(ranks):
                table[bounds[i] : bounds[i + 1], first + i] = 1
        else:
            for i in range(ranks):
                table[i * num_experts // ranks, first + i] = 1
    return Placement(replicas=table)


def parse_placements(
    table: object, *, num_layers: int, num_experts: int, num_ranks: int, origin: str
) -> list[Placement]:
    """Placements of all layers from a nested list or array [E, N] (the same for every layer) or [L, E, N].

    Raises:
        ConfigurationError: the table is ragged, not integer, or made for another number of layers, experts or ranks.
    """
    try:
        array = np.array(table)
    except ValueError as error:
        raise ConfigurationError(f"{origin} is not a rectangular table of replicas: {error}") from error
    if array.dtype == object or not np.issubdtype(array.dtype, np.integer):
        raise ConfigurationError(f"{origin} must hold integers [experts, ranks] or [layers, experts, ranks]")
    if array.ndim == 2:
        array = np.broadcast_to(array, (num_layers, *array.shape))
    expected = (num_layers, num_experts, num_ranks)
    if array.shape != expected:
        raise ConfigurationError(
            f"{origin} has shape {list(array.shape)}, but this run needs {list(expected)} (layers, experts, ranks)"
        )
    return [Placement(replicas=layer) for layer in array]
