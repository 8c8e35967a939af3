"""Who keeps dense parameters and their optimizer states: every rank all of them (DDP); the states one rank each, which
updates the parameter and hands the new values to the others (ZeRO-1); or all of it in rows over the ranks (FSDP), and
over each of several groups of ranks (hybrid FSDP).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from moe_lightning.checkpoint.sharding import longest_processing_time
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World, broadcast_
from moe_lightning.parallel.mesh import Groups, hybrid_shard_size, shard_groups
from moe_lightning.registry import Registry
from moe_lightning.state.tensors import is_cut


class DenseSharding(Protocol):
    """Shares the optimizer states of dense parameters out; made anew for every world. `DenseOptimizerShards` has all of
    it: one that deals the parameters out otherwise sets `owners`.

    Attributes:
        owners: the rank that keeps the state of each parameter, alike on all ranks that hold the same values of it;
            empty where all keep all.
    """

    owners: Mapping[nn.Parameter, int]

    def shard(self, optimizer: Optimizer) -> None:
        """Take the parameters of other ranks out of the optimizer's groups."""

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Bring the values that a step gave to these parameters to every rank; collective."""


class DenseFactory(Protocol):
    """Makes a `DenseSharding`. One that has `cut_size(nodes, wanted)`, as FullySharded has, also cuts the parameters by
    rows over groups of so many ranks, whatever it does with optimizers.
    """

    def __call__(self, parameters: Sequence[nn.Parameter], world: World, /) -> DenseSharding:
        """Of dense parameters, in an order that all ranks share."""


def dense_sharding_name(dense: str, *, zero1: bool, shard_size: int | None) -> str:
    """What a user chose: `zero1` is short for dense="zero1".

    Raises:
        ConfigurationError: two choices, or an unknown one, or a `shard_size` that it has no use for.
    """
    if zero1 and dense not in ("ddp", "zero1"):
        raise ConfigurationError(f"zero1=true is short for dense=zero1, but dense={dense!r}: give one of them")
    chosen = "zero1" if zero1 else dense
    factory = DENSE_SHARDINGS.find(chosen)
    if shard_size is not None and not hasattr(factory, "cut_size"):
        raise ConfigurationError(f"shard_size={shard_size} is for dense=hsdp, not dense={chosen}: drop one of them")
    return chosen


class ReplicatedDense:
    """Every rank keeps every state, and makes every update (DDP)."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self.owners: Mapping[nn.Parameter, int] = {}

    def shard(self, optimizer: Optimizer) -> None:
        """Nothing to do."""

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Nothing to do."""


class FullySharded(ReplicatedDense):
    """Each rank keeps some rows of every parameter, with their gradients and states; one copy in all (FSDP)."""

    @staticmethod
    def cut_size(nodes: Sequence[object], wanted: int | None) -> int:
        """Ranks that share one copy.

        Args:
            nodes: of each rank.
            wanted: the user's `shard_size`.

        Raises:
            ConfigurationError: a wish that only hsdp can fulfil.
        """
        if wanted is not None and wanted < len(nodes):
            raise ConfigurationError(
                f"shard_size={wanted} asks for several copies, and dense=fsdp keeps one over all {len(nodes)} ranks: "
                "use dense=hsdp"
            )
        return len(nodes)


class HybridSharded(ReplicatedDense):
    """As FullySharded, in several copies, so that a lost rank's rows are elsewhere (hybrid FSDP)."""

    cut_size = staticmethod(hybrid_shard_size)


class DenseOptimizerShards:
    """Leaves each optimizer only the dense parameters that this rank owns; expert parameters stay with their holders.

    Args:
        parameters: dense parameters in an order that all ranks share.
        world: the ranks.

    Attributes:
        owners: rank of each parameter, one of those that hold the same values; the largest parameters are dealt first
            (LPT over elements).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self._world = world
        self._twins = world.row_cut.holders[world.row_cut.index]  # of the same parts
        self.owners: Mapping[nn.Parameter, int] = {}
        for is_part in (False, True):
            chosen = [p for p in parameters if is_cut(p) == is_part]
            holders = self._twins if is_part else range(world.size)
            places = longest_processing_time([p.numel() for p in chosen], len(holders))
            self.owners |= {p: holders[place] for p, place in zip(chosen, places, strict=True)}

    def shard(self, optimizer: Optimizer) -> None:
        """Take the parameters of other ranks out of the optimizer's groups."""
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if self.owners.get(p, self._world.rank) == self._world.rank]

    @torch.no_grad()
    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """After a step of these parameters: every rank gets the owner's values; gradients that no optimizer of this
        rank will clear are dropped.
        """
        chosen = set(updated) if self._world.is_connected else set()
        for is_part in (False, True):
            parameters = [p for p in self.owners if p in chosen and is_cut(p) == is_part]
            if is_part and self._world.copy_group is None:
                continue  # nobody else has them
            for dtype, owner in product(sorted({p.dtype for p in parameters}, key=str), range(self._world.size)):
                mine = [p for p in parameters if self.owners[p] == owner and p.dtype == dtype]
                if not mine:
                    continue
                flat = torch.cat([p.detach().reshape(-1) for p in mine])
                source, group = (sorted(self._twins).index(owner), self._world.copy_group) if is_part else (owner, None)
                broadcast_(flat, source, self._world, group)
                if owner != self._world.rank:
                    for parameter, values in zip(mine, torch.split(flat, [p.numel() for p in mine]), strict=True):
                        parameter.copy_(values.view_as(parameter))
                        parameter.grad = None


DENSE_SHARDINGS: Registry[DenseFactory] = Registry(
    "dense",
    DenseFactory,
    {"ddp": ReplicatedDense, "zero1": DenseOptimizerShards, "fsdp": FullySharded, "hsdp": HybridSharded},
    makes=DenseSharding,
)


def cut_groups(dense: str, nodes: Sequence[object], wanted: int | None, tensors: int = 1) -> Groups:
    """The ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side; empty where
    each has a copy of its own.

    Args:
        dense: a name of DENSE_SHARDINGS.
        nodes: of each rank.
        wanted: the user's `shard_size`.
        tensors: neighbouring ranks that compute parts of layers together.

    Raises:
        ConfigurationError: a `shard_size` that does not fit the ranks.
    """
    size_of = getattr(DENSE_SHARDINGS.find(dense), "cut_size", None)
    firsts = nodes[::tensors]
    least = None if wanted is None else -(-wanted // tensors)
    size = 1 if size_of is None or len(firsts) == 1 else size_of(firsts, least)
    if size * tensors == 1:
        return ()
    groups = shard_groups(firsts, size)
    return tuple(tuple(first * tensors + t for t in range(tensors) for first in group) for group in groups)
