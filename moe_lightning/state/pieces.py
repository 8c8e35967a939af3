"""The vocabulary of checkpointed state: pieces of tensors under keys, and their description as JSON.

Keys (see the design of the checkpoint): `expert/{layer}/{expert}/{weight|master|exp_avg|exp_avg_sq}/{name}` for
experts, which partial checkpoints may carry over from an older version, and any other key (`dense/...`, `trainer`,
`rng/{rank}`, ...) for state that every checkpoint holds anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

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


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of a tensor.

    Attributes:
        offsets: where it begins in the whole tensor, in each dimension.
        sizes: of the part.
        whole: shape of the whole tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of_rows(cls, sizes: Iterable[int], first_row: int, num_rows: int) -> Self:
        """Rows of a tensor of `num_rows`; of a scalar all there is."""
        sizes = tuple(sizes)
        rest = (0,) * (len(sizes) - 1)
        return cls(
            offsets=(first_row, *rest) if sizes else (), sizes=sizes, whole=(num_rows, *sizes[1:]) if sizes else ()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePiece:
    """A live tensor of a run's state, or part of one.

    Attributes:
        key: see the top of the file.
        tensor: a view of the live values.
        block: what of the whole tensor it is.
        holders: the ranks that have the same values.
    """

    key: str
    tensor: torch.Tensor
    block: Block
    holders: tuple[int, ...] = ()

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor, holders: tuple[int, ...] = ()) -> Self:
        """A whole tensor."""
        return cls(key=key, tensor=tensor, block=_whole(tensor), holders=holders)

    @property
    def is_replaceable(self) -> bool:
        """Whether an older version may stand in for it in a checkpoint."""
        return is_partial(self.key)

    @property
    def is_moment(self) -> bool:
        """Whether it is a state of an optimizer, not a value of the module."""
        scope = self.key.split("/", 4)[3] if is_partial(self.key) else self.key.rpartition("/")[2]
        return scope not in WEIGHTS

    def rows(self, first_row: int, last_row: int) -> Self:
        """Some rows of a whole tensor."""
        part = self.tensor[first_row:last_row]
        return replace(self, tensor=part, block=Block.of_rows(part.shape, first_row, self.tensor.shape[0]))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is stored under a key by one rank.

    Attributes:
        key: see the top of the file.
        dtype: name in `DTYPES`, or `OBJECT`.
        shape: of this piece; () for an object.
        first_row: row of the whole tensor at which the piece starts; 0 where it is whole.
        num_rows: rows of the whole tensor; 0 for scalars and objects.
        version: the step after which this state was taken.
        group: pieces of a rank with the same group are written into one file.
        nbytes: payload bytes.
        xxh3: hexadecimal digest of the payload.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    version: int
    group: str
    nbytes: int
    xxh3: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{name: data[name] for name in _PLAIN}, shape=tuple(data["shape"]))

    @property
    def global_shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.shape[1:]) if self.shape else ()

    @property
    def start(self) -> tuple[int, ...]:
        """Offsets of the piece in the whole tensor."""
        return (self.first_row, *[0] * (len(self.shape) - 1)) if self.shape else ()


_PLAIN = tuple(field.name for field in fields(Piece) if field.name != "shape")


def dtype_name(tensor: torch.Tensor) -> str:
    """As in `DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


def _whole(tensor: torch.Tensor) -> Block:
    shape = tuple(tensor.shape)
    return Block(offsets=(0,) * len(shape), sizes=shape, whole=shape)


def describe(live: StatePiece, *, version: int, group: str) -> Piece:
    """What a live piece will be stored as.

    Raises:
        ConfigurationError: a dtype that cannot be stored.
    """
    dtype = dtype_name(live.tensor)
    if dtype not in DTYPES:
        raise ConfigurationError(
            f"{live.key} has dtype {dtype}, which checkpoints cannot hold: use one of {sorted(DTYPES)}"
        )
    block = live.block
    return Piece(
        key=live.key,
        dtype=dtype,
        shape=block.sizes,
        first_row=block.offsets[0] if block.sizes else 0,
        num_rows=block.whole[0] if block.sizes else 0,
        version=version,
        group=group,
        nbytes=live.tensor.numel() * live.tensor.element_size(),
    )


def is_partial(key: str) -> bool:
    """Whether a checkpoint may carry the key over from an older one."""
    return key.startswith("expert/")


def parse_expert_key(key: str) -> tuple[int, int, str, str]:
    """(layer, expert, scope, name) of an expert's key.

    Raises:
        ConfigurationError: the key is not of the form expert/{layer}/{expert}/{scope}/{name}.
    """
    parts = key.split("/", 4)
    if len(parts) != 5 or parts[0] != "expert" or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise ConfigurationError(f"{key!r} is no expert's key: use expert/LAYER/EXPERT/SCOPE/NAME")
    return int(parts[1]), int(parts[2]), parts[3], parts[4]
