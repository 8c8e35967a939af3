"""Pieces of tensors under keys, as checkpoints hold them.

Keys: `expert/{layer}/{expert}/{weight|master|exp_avg|exp_avg_sq}/{name}` for experts, which partial checkpoints may
carry over from an older version; `replay/{layer}/{expert}/{step}/{name}` for the weights that an expert computes with
after a step of a window (`checkpoint/schedule.py`); any other key (`dense/...`, `trainer`, `rng/{rank}`, ...) for state
that every checkpoint holds anew. Checkpoints list pieces as JSON, and the annotations of the fields limit what is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Self

import torch
from annotated_types import Interval, MaxLen

from moe_lightning.arrays import cut
from moe_lightning.errors import ConfigurationError

WEIGHTS = ("weight", "master", "buffer")
"""Scopes that are no state of an optimizer."""

OBJECT = "object"
"""The dtype of a piece that is a serialised object instead of a tensor."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


Shapes = Mapping[str, tuple[str, Sequence[int]]]
"""Dtype and shape of tensors, by key or scope."""

LARGEST = 2**63 - 1
Count = Annotated[int, Interval(ge=1, le=LARGEST)]
Size = Annotated[int, Interval(ge=0, le=LARGEST)]
Step = Annotated[int, Interval(ge=-1, le=LARGEST)]
Text = Annotated[str, MaxLen(4096)]
Sizes = Annotated[tuple[Size, ...], MaxLen(64)]
"""One number for each dimension."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of a tensor.

    Attributes:
        offsets: where it begins in the whole tensor, in each dimension.
        sizes: of the part.
        whole: shape of the whole tensor.
    """

    offsets: Sizes
    sizes: Sizes
    whole: Sizes

    @classmethod
    def of(cls, shape: Iterable[int]) -> Self:
        """All of a tensor."""
        shape = tuple(shape)
        return cls(offsets=(0,) * len(shape), sizes=shape, whole=shape)

    @classmethod
    def of_rows(cls, sizes: Iterable[int], first_row: int, num_rows: int) -> Self:
        """Rows of a tensor of `num_rows`; of a scalar all there is."""
        sizes = tuple(sizes)
        if not sizes:
            return cls.of(())
        return cls(offsets=(first_row, *[0] * (len(sizes) - 1)), sizes=sizes, whole=(num_rows, *sizes[1:]))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the whole tensor."""
        return tuple(slice(begin, end) for begin, end in zip(self.offsets, self._ends, strict=True))

    @property
    def is_inside(self) -> bool:
        """True if it lies inside of the whole tensor."""
        return all(0 <= at <= end <= size for at, end, size in zip(self.offsets, self._ends, self.whole, strict=True))

    def within(self, outer: Block) -> tuple[slice, ...]:
        """Return its slices in the tensor that holds another block, which contains it."""
        ends = zip(self.offsets, self._ends, outer.offsets, strict=True)
        return tuple(slice(begin - at, end - at) for begin, end, at in ends)

    def intersection(self, other: Block) -> Self | None:
        """Return what two blocks of a tensor have in common; None where that is empty."""
        low = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(ends) - at for *ends, at in zip(self._ends, other._ends, low, strict=True))
        return replace(self, offsets=low, sizes=sizes) if all(size > 0 for size in sizes) else None

    def without(self, other: Block) -> Iterator[Self]:
        """Yield disjoint blocks of everything that another block, which lies in this one, leaves."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (at, size) in enumerate(zip(other.offsets, other.sizes, strict=True)):
            end = offsets[dim] + sizes[dim]
            for begin, stop in ((offsets[dim], at), (at + size, end)):
                if begin < stop:
                    yield replace(
                        self,
                        offsets=(*offsets[:dim], begin, *offsets[dim + 1 :]),
                        sizes=(*sizes[:dim], stop - begin, *sizes[dim + 1 :]),
                    )
            offsets[dim], sizes[dim] = at, size

    @property
    def _ends(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePiece:
    """A live tensor of a run's state, or part of one.

    Attributes:
        key: see the top of the file.
        tensor: a view of the live values.
        block: what of the whole tensor it is.
        holders: the ranks that have the same values.
        stored_as: what it is stored in; None: as it is.
    """

    key: str
    tensor: torch.Tensor
    block: Block
    holders: tuple[int, ...] = ()
    stored_as: torch.dtype | None = None

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor, holders: tuple[int, ...] = ()) -> Self:
        """A whole tensor."""
        return cls(key=key, tensor=tensor, block=Block.of(tensor.shape), holders=holders)

    @property
    def first_row(self) -> int:
        """First row in the whole tensor; 0 for a scalar."""
        return sum(self.block.offsets[:1])

    def rows(self, first_row: int, last_row: int) -> Self:
        """Some of its rows, counted from its own first one."""
        part, block = self.tensor[first_row:last_row], self.block
        offsets = (self.first_row + first_row, *block.offsets[1:])
        return replace(self, tensor=part, block=replace(block, offsets=offsets, sizes=tuple(part.shape)))

    def share(self, rank: int) -> Self | None:
        """Return the rows of a block that this holder writes, an equal number for each holder; None: nothing. A whole
        tensor is written by its first holder.
        """
        if self.block.sizes == self.block.whole:
            return self if self.holders[0] == rank else None
        bounds = cut(len(self.tensor), len(self.holders))
        first, last = bounds[self.holders.index(rank)], bounds[self.holders.index(rank) + 1]
        return self.rows(first, last) if first < last else None


@dataclass(frozen=True, kw_only=True)
class Location:
    """Location of the bytes of a stored piece.

    Attributes:
        data_offset: of the payload, in an arena's memory or in a file.
        file: its name; "" in an arena.
        offset, length: of what torch reads in the file, the payload in its frame.
    """

    data_offset: Size
    file: Text = ""
    offset: Size = 0
    length: Size = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tensor data stored under a key by one rank.

    Attributes:
        key: see the top of the file.
        dtype: name in `DTYPES`, or `OBJECT`.
        block: what of the whole tensor it is; () for an object.
        version: the step after which this state was taken.
        group: pieces of a rank with the same group are written into one file.
        nbytes: payload bytes.
        xxh3: hexadecimal digest of the payload.
        location: None where it lies nowhere yet, or with another rank.
        due: of a piece in an arena, the last step at which it was its turn to be written; a checkpoint is to have what
            was due since the one before it, so that a snapshot which is never written costs no turn.
    """

    key: Text
    dtype: Text
    block: Block
    version: Step
    group: Text
    nbytes: Size
    xxh3: Text = ""
    location: Location | None = None
    due: Step = -1

    @property
    def at(self) -> Location:
        """Its location, which it must have."""
        assert self.location is not None
        return self.location


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a dtype in `DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


def describe(live: StatePiece, *, version: int, group: str) -> Piece:
    """Return the description under which a live piece will be stored.

    Raises:
        ConfigurationError: a dtype that cannot be stored.
    """
    stored_as = live.stored_as or live.tensor.dtype
    dtype, nbytes = str(stored_as).removeprefix("torch."), live.tensor.numel() * stored_as.itemsize
    if dtype not in DTYPES:
        raise ConfigurationError(
            f"{live.key} has dtype {dtype}, which checkpoints cannot hold: use one of {sorted(DTYPES)}"
        )
    return Piece(key=live.key, dtype=dtype, block=live.block, version=version, group=group, nbytes=nbytes)


def by_key(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The pieces of each key, by their offsets."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.block.offsets):
        found[piece.key].append(piece)
    return dict(found)


def is_expert_key(key: str) -> bool:
    """True for `expert/{layer}/{expert}/{scope}/{name}`, which a checkpoint may carry over from an older one."""
    return key.startswith("expert/")


def replay_key(layer: int, expert: int, step: int, name: str) -> str:
    """Return the key of the weights that an expert computes with after a step."""
    return f"replay/{layer}/{expert}/{step}/{name}"


def is_replayed(key: str) -> bool:
    """Return True for the weights of a step that a restore runs again."""
    return key.startswith("replay/")


def expert_of(key: str) -> tuple[int, int] | None:
    """(layer, expert) of what comes and goes with an expert; None of everything else."""
    return parse_expert_key(key)[:2] if is_expert_key(key) or is_replayed(key) else None


def is_moment(key: str) -> bool:
    """True unless the scope of the key is one of `WEIGHTS`: for the optimizer's states under any name, and for every
    key without a scope, such as that of an object, since states have the names that the optimizer chooses.
    """
    scope = key.split("/", 4)[3] if is_expert_key(key) else key.rpartition("/")[2]
    return scope not in WEIGHTS


def parse_dense_key(key: str) -> tuple[str, str]:
    """(name, scope) of a key `dense/{name}/{scope}`."""
    name, _, scope = key.removeprefix("dense/").rpartition("/")
    return name, scope


def parse_expert_key(key: str) -> tuple[int, int, str, str]:
    """(layer, expert, scope, name) of an expert's key; the scope of replayed weights is the step.

    Raises:
        ConfigurationError: the key is not of the form expert/{layer}/{expert}/{scope}/{name}.
    """
    parts = key.split("/", 4)
    is_expert = len(parts) == 5 and parts[0] in ("expert", "replay") and parts[1].isdecimal() and parts[2].isdecimal()
    if not is_expert or (parts[0] == "replay" and not parts[3].isdecimal()):
        raise ConfigurationError(f"{key!r} is not the key of an expert: use expert/LAYER/EXPERT/SCOPE/NAME")
    return int(parts[1]), int(parts[2]), parts[3], parts[4]
