"""Host memory that a GPU copies into without waiting, and the stream on which it does."""

from __future__ import annotations

from typing import Any

import torch

from moe_lightning.checkpoint.arena import Arena
from moe_lightning.errors import ConfigurationError


def side_stream() -> Any:
    """A CUDA stream that starts after the work queued so far (the optimizer step whose result is copied)."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


class PageLock:
    """Page-locks an arena's memory, so that copies from a GPU are asynchronous."""

    def __init__(self, arena: Arena) -> None:
        self._address = arena.memory.data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self._address, arena.memory.numel(), 0))
        if code:
            raise ConfigurationError(
                f"CUDA could not page-lock {arena.memory.numel()} bytes of host memory (error {code}): "
                "raise the limit of locked memory"
            )

    def release(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(self._address)
