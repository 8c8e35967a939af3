"""torch's own object collectives without pickle.

Users' modules, metrics (mean average precision in torchmetrics) and compilers call
`torch.distributed.all_gather_object` and its relatives, which unpickle what peers send, and ask no strategy. So in a
process that trains with others these collectives carry what the codec carries, and refuse the rest in a sentence.
"""

from __future__ import annotations

from typing import IO, Any

from torch.distributed import distributed_c10d as c10d

from moe_lightning.comm.codec import decode, encode


class _Encoder:
    """In the place of `pickle.Pickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(encode(value))


class _Decoder:
    """In the place of `pickle.Unpickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def load(self) -> Any:
        return decode(self._file.read())


def carry_objects_without_pickle() -> None:
    """Let every object collective of this process, whoever calls it, use the codec; for the rest of its life."""
    assert hasattr(c10d, "_pickler"), "torch serialises objects in another way"
    assert hasattr(c10d, "_unpickler"), "torch serialises objects in another way"
    c10d._pickler, c10d._unpickler = _Encoder, _Decoder  # type: ignore[assignment]
