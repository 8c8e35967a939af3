"""The vocabulary of checkpointed state: pieces of tensors under keys, and their description as JSON.

Keys (see the design of the checkpoint): `expert/{layer}/{expert}/{weight|master|exp_avg|exp_avg_sq}/{name}` for
experts, which partial checkpoints may carry over from an older version, and any other key (`dense/...`, `trainer`,
`rng/{rank}`, ...) for state that every checkpoint holds anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from moe_lightning.errors import ConfigurationError

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


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a tensor whose other rows belong to other ranks.

    Attributes:
        tensor: [rows here, ...].
        first_row: where they start in the whole tensor.
        num_rows: rows of the whole tensor.
    """

    tensor: torch.Tensor
    first_row: int
    num_rows: int


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


def describe(key: str, value: torch.Tensor | Rows, *, version: int, group: str) -> Piece:
    """The piece that a tensor, or some rows of one, will be stored as.

    Raises:
        ConfigurationError: a dtype that cannot be stored.
    """
    tensor = value.tensor if isinstance(value, Rows) else value
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigurationError(f"{key} has dtype {dtype}, which checkpoints cannot hold: use one of {sorted(DTYPES)}")
    shape = tuple(tensor.shape)
    return Piece(
        key=key,
        dtype=dtype,
        shape=shape,
        first_row=value.first_row if isinstance(value, Rows) else 0,
        num_rows=value.num_rows if isinstance(value, Rows) else (shape[0] if shape else 0),
        version=version,
        group=group,
        nbytes=tensor.numel() * tensor.element_size(),
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
