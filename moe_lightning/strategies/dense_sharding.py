"""Sharding policies of dense parameters and their optimizer states.

A policy of `DENSE_SHARDINGS` gives every rank all states (DDP); the states of each parameter to one rank, which updates
it and broadcasts the new values (ZeRO-1); or rows of everything over the ranks (FSDP), or over each of several groups
of ranks (hybrid FSDP).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from moe_lightning.checkpoint.sharding import longest_processing_time
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World, broadcast_, in_buckets
from moe_lightning.parallel.mesh import Groups, hybrid_shard_size, shard_groups
from moe_lightning.registry import Registry
from moe_lightning.state.tensors import is_sharded


class DenseSharding(Protocol):
    """Assignment of optimizer states of dense parameters to ranks; built anew for every world. `DenseOptimizerShards`
    implements all of it: a class with another assignment sets `owners`.

    Attributes:
        owners: the rank that has the state of each parameter, the same on all ranks that hold the same values of it;
            empty if all ranks have all. Optimizers of the other ranks do not get the parameter.
    """

    owners: Mapping[nn.Parameter, int]

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Broadcast the values that a step gave to these parameters to every rank; collective."""


class DenseFactory(Protocol):
    """Factory of a `DenseSharding`. With `cut_size(nodes, wanted)`, as FullySharded has, it also shards the rows of
    parameters over groups of so many ranks, whatever it does with optimizers. It has `has_owners = True`, as
    DenseOptimizerShards has, if its `owners` may not be empty.
    """

    def __call__(self, parameters: Sequence[nn.Parameter], world: World, /) -> DenseSharding:
        """Build the sharding of dense parameters, given in an order that all ranks share."""


def dense_sharding_name(dense: str, shard_size: int | None) -> str:
    """Return the name of the chosen sharding.

    Raises:
        ConfigurationError: an unknown one, or a `shard_size` that it does not use.
    """
    size_of = getattr(DENSE_SHARDINGS.find(dense), "cut_size", FullySharded.cut_size)
    if shard_size is not None and size_of is FullySharded.cut_size:
        raise ConfigurationError(f"shard_size={shard_size} is for dense=hsdp, not dense={dense}: drop one of them")
    return dense


def has_owners(dense: str) -> bool:
    """True if a sharding, a name of DENSE_SHARDINGS, may give the optimizer state of a parameter to one rank."""
    return bool(getattr(DENSE_SHARDINGS.find(dense), "has_owners", False))


def cuts_rows(dense: str) -> bool:
    """True if a sharding, a name of DENSE_SHARDINGS, gives each rank some rows of every parameter."""
    return hasattr(DENSE_SHARDINGS.find(dense), "cut_size")


def is_replicated(dense: str) -> bool:
    """True if under a sharding, a name of DENSE_SHARDINGS, every rank has all dense parameters and their states."""
    return not (has_owners(dense) or cuts_rows(dense))


class ReplicatedDense:
    """Sharding under which every rank has every state and makes every update (DDP)."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self.owners: Mapping[nn.Parameter, int] = {}

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Do nothing: nothing is shared."""


class FullySharded(ReplicatedDense):
    """Sharding under which each rank has some rows of every parameter, with their gradients and states; one copy in all
    (FSDP).
    """

    @staticmethod
    def cut_size(nodes: Sequence[object], wanted: int | None) -> int:
        """Return the number of ranks that share one copy."""
        return len(nodes)


class HybridSharded(ReplicatedDense):
    """Sharding as FullySharded, in several copies, so that a lost rank's rows are elsewhere (hybrid FSDP)."""

    cut_size = staticmethod(hybrid_shard_size)


class DenseOptimizerShards:
    """Sharding under which each optimizer has only the dense parameters that this rank owns (ZeRO-1); expert parameters
    stay with their holders.

    Args:
        parameters: dense parameters in an order that all ranks share.
        world: the ranks.

    Attributes:
        owners: rank of each parameter, one of those that hold the same values; the largest parameters are assigned
            first (LPT over elements).
    """

    has_owners = True

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self._world = world
        self._twins = world.row_cut.holders[world.row_cut.index]  # of the same parts
        self.owners: Mapping[nn.Parameter, int] = {}
        for is_part in (False, True):
            chosen = [p for p in parameters if is_sharded(p) == is_part]
            holders = self._twins if is_part else range(world.size)
            places = longest_processing_time([p.numel() for p in chosen], len(holders))
            self.owners |= {p: holders[place] for p, place in zip(chosen, places, strict=True)}

    @torch.no_grad()
    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Broadcast the owner's values to every rank after a step of these parameters; drop gradients that no optimizer
        of this rank will clear.
        """
        chosen = set(updated) if self._world.is_connected else set()
        for is_part in (False, True):
            parameters = [p for p in self.owners if p in chosen and is_sharded(p) == is_part]
            if is_part and "copy" not in self._world.groups:
                continue  # no other rank has them
            for owner in range(self._world.size):
                owned = [p for p in parameters if self.owners[p] == owner]
                source, group = owner, None
                if is_part and owned:
                    source, group = sorted(self._twins).index(owner), self._world.group("copy")
                in_buckets(
                    [p.detach() for p in owned], partial(broadcast_, source=source, world=self._world, group=group)
                )
                for parameter in owned if owner != self._world.rank else ():
                    parameter.grad = None


DENSE_SHARDINGS: Registry[DenseFactory] = Registry(
    "dense",
    DenseFactory,
    {"ddp": ReplicatedDense, "zero1": DenseOptimizerShards, "fsdp": FullySharded, "hsdp": HybridSharded},
    makes=DenseSharding,
)


def cut_groups(dense: str, nodes: Sequence[object], wanted: int | None, tensors: int = 1) -> Groups:
    """Return the ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side;
    empty if each rank has a copy of its own.

    Args:
        dense: a name of DENSE_SHARDINGS.
        nodes: of each rank.
        wanted: the user's `shard_size`.
        tensors: neighbouring ranks that compute parts of layers together.
    """
    size_of = getattr(DENSE_SHARDINGS.find(dense), "cut_size", None)
    firsts = nodes[::tensors]
    least = None if wanted is None else -(-wanted // tensors)
    size = 1 if size_of is None or len(firsts) == 1 else size_of(firsts, least)
    if size * tensors == 1:
        return ()
    groups = shard_groups(firsts, size)
    return tuple(tuple(first * tensors + t for t in range(tensors) for first in group) for group in groups)
