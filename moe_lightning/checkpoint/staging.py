"""The way of a GPU's bytes into an arena: through two small page-locked buffers, chunk by chunk.

An arena itself is not page-locked: that takes as long as a step, again after every recovery, and containers allow
little locked memory. One buffer is filled by the device while the other is emptied by this thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moe_lightning.state.tensors import page_locked

CHUNK_BYTES = 8 << 20


class Staging:
    """Copies of device tensors to host memory, asynchronous and in chunks, of one thread.

    Raises:
        ConfigurationError: the system lets this process lock less memory than two chunks.
    """

    def __init__(self) -> None:
        self._buffers = [page_locked((CHUNK_BYTES,), torch.uint8) for _ in range(2)]
        self._arriving: tuple[Any, Tensor, int, int] | None = None  # event, buffer, address, bytes

    def copy(self, address: int, source: Tensor, stream: Any, admit: Callable[[int], None]) -> None:
        """Bring bytes to a place in host memory; the last of them are there after `finish`.

        Args:
            address: of the place.
            source: uint8, contiguous, on the device.
            stream: on which the device copies.
            admit: returns when so many bytes may be copied.
        """
        for start in range(0, source.numel(), CHUNK_BYTES):
            part = source[start : start + CHUNK_BYTES]
            admit(part.numel())
            buffer = self._buffers[0]
            event = self.fill(buffer[: part.numel()], part, stream)
            before, self._arriving = self._arriving, (event, buffer, address + start, part.numel())
            self._buffers.reverse()
            _put(before)

    def fill(self, buffer: Tensor, part: Tensor, stream: Any) -> Any:
        """Let the device copy a chunk; an event that tells when it is there."""
        with stream:
            buffer.copy_(part, non_blocking=True)
            event = torch.Event(device=part.device)
            event.record(stream)
        return event

    def finish(self) -> None:
        """Wait for the chunk that is under way, and put it into its place."""
        arriving, self._arriving = self._arriving, None
        _put(arriving)

    def forget(self) -> None:
        """A copy was given up: what is under way goes nowhere. Its buffer and its source are in use until it is there,
        or until the device has failed.
        """
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            with suppress(RuntimeError):
                arriving[0].synchronize()


def _put(arriving: tuple[Any, Tensor, int, int] | None) -> None:
    if arriving is not None:
        event, buffer, address, num_bytes = arriving
        event.synchronize()
        ctypes.memmove(address, buffer.data_ptr(), num_bytes)


def side_stream(device: torch.device) -> torch.Stream:
    """A stream of the device that starts after the work queued so far (the optimizer step whose result is copied)."""
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream
