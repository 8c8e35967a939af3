"""Expert placement: replicas of experts on ranks, and the groups of ranks that dispatch among themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from moe_lightning.arrays import IntArray, Pairs, cut
from moe_lightning.errors import ConfigurationError


class Placement:
    """Replicas of each expert on each rank of one MoE layer; never changes.

    Args:
        replicas: int64 [E, N]; entry (e, n) is how many replicas of expert e rank n holds. Several replicas on one
            rank are one slot with that multiplicity: it is entitled to as many shares of the expert's tokens.

    Attributes:
        pairs: the same as a list.

    Raises:
        ConfigurationError: the table is not two-dimensional, has a negative entry, or an expert that no rank holds.
    """

    def __init__(self, *, replicas: IntArray) -> None:
        table = np.array(replicas)
        if table.ndim != 2 or 0 in table.shape:
            raise ConfigurationError(f"a placement is a table [experts, ranks], not an array of shape {table.shape}")
        if not np.issubdtype(table.dtype, np.integer):
            raise ConfigurationError(f"a placement counts replicas in integers, not in {table.dtype}")
        if table.min() < 0:
            raise ConfigurationError(f"a placement cannot hold {table.min()} replicas: use 0 or more")
        self._take(Pairs.of_table(table))

    @classmethod
    def of_pairs(cls, pairs: Pairs) -> Placement:
        """A placement whose table is made only where somebody asks for it.

        Raises:
            ConfigurationError: an expert that no rank holds.
        """
        placement = cls.__new__(cls)
        placement._take(pairs)
        return placement

    def _take(self, pairs: Pairs) -> None:
        missing = np.flatnonzero(pairs.num_holders == 0)
        if missing.size:
            raise ConfigurationError(
                f"no rank holds expert {missing[0]} ({missing.size} of {pairs.shape[0]} experts have no replica): "
                "give every expert at least one"
            )
        for array in (pairs.experts, pairs.ranks, pairs.replicas):
            array.setflags(write=False)
        self.pairs = pairs

    @cached_property
    def replicas(self) -> IntArray:
        """int64 [E, N], read-only."""
        table = self.pairs.table()
        table.setflags(write=False)
        return table

    def over(self, ranks: Sequence[int], num_ranks: int) -> Placement:
        """The same on these ranks, ascending, of so many: the others hold nothing."""
        pairs, among = self.pairs, np.array(ranks, dtype=np.int64)
        shape = self.num_experts, num_ranks
        return Placement.of_pairs(
            Pairs(experts=pairs.experts, ranks=among[pairs.ranks], replicas=pairs.replicas, shape=shape)
        )

    def among(self, ranks: Sequence[int]) -> Placement:
        """The same for these ranks, ascending, which hold everything."""
        return Placement(replicas=self.replicas[:, list(ranks)])

    @property
    def is_replicated(self) -> bool:
        """True if an expert is on several ranks."""
        return bool(self.pairs.num_holders.max() > 1)

    @property
    def _key(self) -> tuple[object, ...]:
        pairs = self.pairs
        return pairs.shape, pairs.experts.tobytes(), pairs.ranks.tobytes(), pairs.replicas.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Placement(replicas={self.replicas.tolist()})"

    @property
    def num_experts(self) -> int:
        return self.pairs.shape[0]

    @property
    def num_ranks(self) -> int:
        return self.pairs.shape[1]

    def renamed(self, rank_of: IntArray) -> Placement:
        """The placement in which rank n holds what rank_of[n] holds here; a permutation int64 [N]."""
        pairs, now = self.pairs, np.argsort(rank_of)
        ranks = now[pairs.ranks]
        order = np.argsort(pairs.experts * self.num_ranks + ranks)
        columns = {"ranks": ranks[order], "replicas": pairs.replicas[order]}
        return Placement.of_pairs(Pairs(experts=pairs.experts, shape=pairs.shape, **columns))

    def experts_on(self, rank: int) -> tuple[int, ...]:
        """The distinct experts that a rank holds, ascending: one slot each."""
        return tuple(self.pairs.experts[self.pairs.ranks == rank].tolist())

    def holders(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold an expert, ascending."""
        first, last = self.pairs.starts[expert : expert + 2]
        return tuple(self.pairs.ranks[first:last].tolist())

    def owners(self) -> IntArray:
        """int64 [E]: the lowest rank that holds each expert; it speaks for the expert where one rank must (norms,
        saving).
        """
        return self.pairs.ranks[self.pairs.starts[:-1]]

    def check_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Raise ConfigurationError unless every dispatch group holds every expert."""
        for group in groups:
            inside = np.zeros(self.num_ranks, dtype=np.bool_)
            inside[list(group)] = True
            held = np.bincount(self.pairs.experts[inside[self.pairs.ranks]], minlength=self.num_experts)
            missing = np.flatnonzero(held == 0)
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


def uniform_placement(num_experts: int, num_ranks: int, replicas: int = 1) -> Placement:
    """Every expert `replicas` times: the ranks are cut into that many blocks, each of which holds all experts once.

    Inside a block of n ranks the experts lie in contiguous runs, as even as E allows; with more ranks than experts
    the ranks share
    experts, so that no rank stays empty.

    Raises:
        ConfigurationError: fewer than one expert, rank or replica, or more replicas than ranks.
    """
    if num_experts < 1 or num_ranks < 1:
        raise ConfigurationError(
            f"{num_experts} experts on {num_ranks} ranks cannot be placed: both must be at least 1"
        )
    if not 1 <= replicas <= num_ranks:
        raise ConfigurationError(
            f"replicas={replicas} of each expert need between 1 and {num_ranks} (the number of ranks): "
            f"{'lower replicas, or start more ranks' if replicas > num_ranks else 'raise replicas'}"
        )
    experts, ranks = [], []
    for first, last in itertools.pairwise(cut(num_ranks, replicas)):
        here = np.arange(first, last)
        if len(here) <= num_experts:
            experts.append(np.arange(num_experts))
            ranks.append(np.repeat(here, np.diff(cut(num_experts, len(here)))))
        else:
            experts.append((here - first) * num_experts // len(here))
            ranks.append(here)
    shape = (num_experts, num_ranks)
    return Placement.of_pairs(Pairs.of_replicas(np.concatenate(experts), np.concatenate(ranks), shape))


def uniform_slots(num_experts: int, num_ranks: int, replicas: int = 1) -> int:
    """Return the slots of a rank that the uniform placement needs, or that of one replica on each rank if more are
    asked for.
    """
    smallest_block = num_ranks // min(replicas, num_ranks)
    return -(-num_experts // smallest_block)


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
