"""How many ranks stand along each axis of a run, and who stands where.

Axes from the outermost to the innermost, as their traffic grows: pp (pipeline stages), dp (data), cp (context: parts of
a sequence), tp (tensor: parts of a layer). rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index, so the
ranks of a stage are consecutive, and those of a tensor group are neighbours, who share a node where it is large enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from moe_lightning.algorithms.dense_shards import Groups
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError

Axis = Literal["pp", "dp", "cp", "tp"]

AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


STAGE: frozenset[Axis] = frozenset({"dp", "cp", "tp"})
"""The axes that fold into the ranks among which a stage's experts are dispatched."""


@validated
@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The numbers of ranks along the axes; they multiply to all ranks of the run."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if size < 1:
                raise ConfigurationError(f"mesh.{axis}={size} must be at least 1")

    @classmethod
    def over(cls, num_ranks: int, *, pp: int = 1, cp: int = 1, tp: int = 1) -> MeshShape:
        """The shape in which data parallelism takes what the other axes leave.

        Raises:
            ConfigurationError: the other axes do not divide the ranks.
        """
        others = cls(pp=pp, cp=cp, tp=tp)
        data, rest = divmod(num_ranks, others.num_ranks)
        if rest or not data:
            raise ConfigurationError(
                f"a mesh of pp={pp}, cp={cp}, tp={tp} needs a multiple of {others.num_ranks} ranks, not {num_ranks}: "
                "change the axes or the number of ranks"
            )
        return cls(pp=pp, dp=data, cp=cp, tp=tp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each of AXES."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    def index(self, rank: int, axis: Axis) -> int:
        """Where a rank stands along one axis."""
        return self._indices(rank)[AXES.index(axis)]

    def peers(self, rank: int, axes: Collection[Axis]) -> tuple[int, ...]:
        """The ranks, ascending, that stand where this one does along all other axes; itself among them."""
        indices = self._indices(rank)
        ranges = [
            range(size) if axis in axes else (index,)
            for axis, size, index in zip(AXES, self.sizes, indices, strict=True)
        ]
        return tuple(self._rank(chosen) for chosen in product(*ranges))

    def place(self, rank: int, axes: Collection[Axis]) -> tuple[int, int]:
        """(which of its `peers` a rank is, how many they are)."""
        peers = self.peers(rank, axes)
        return peers.index(rank), len(peers)

    def groups(self, axes: Collection[Axis]) -> tuple[tuple[int, ...], ...]:
        """All ranks, cut into the groups that `peers` tells of each, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.peers(rank, axes) for rank in range(self.num_ranks)))

    def _indices(self, rank: int) -> tuple[int, ...]:
        assert 0 <= rank < self.num_ranks
        indices = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            indices.append(index)
        return tuple(reversed(indices))

    def _rank(self, indices: tuple[int, ...]) -> int:
        rank = 0
        for size, index in zip(self.sizes, indices, strict=True):
            rank = rank * size + index
        return rank


def stage_ranks(stage: int, num_ranks: int, axes: MeshShape) -> range:
    """The ranks that hold a stage in a world of so many. Those that the axes leave over come last and hold none; where
    they are too few, each of them holds all stages.

    Args:
        axes: with dp=1.
    """
    size = num_ranks // axes.num_ranks * (axes.num_ranks // axes.pp)
    first = stage % axes.pp * size
    return range(first, first + size) if size else range(num_ranks)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a world are grouped; the same on all of them.

    Attributes:
        shape: ranks along the axes.
        shards: ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side; empty
            where every rank has a copy of its own.
    """

    shape: MeshShape
    shards: Groups = ()


def chosen_axes(mesh: Mapping[str, int] | None) -> MeshShape:
    """The axes as a user chose them; dp is left at 1.

    Raises:
        ConfigurationError: an unknown axis, a number of ranks that is not positive.
    """
    chosen = dict(mesh or {})
    for axis, size in chosen.items():
        if axis not in ("pp", "cp", "tp"):
            cure = "it follows from the number of ranks: drop it" if axis == "dp" else "use pp, cp or tp"
            raise ConfigurationError(f"mesh.{axis}={size!r} is no axis to choose: {cure}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigurationError(f"mesh.{axis}={size!r} is not an integer of at least 1: set it to one")
    return MeshShape(**chosen)
