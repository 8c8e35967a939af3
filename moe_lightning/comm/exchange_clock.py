"""How long a rank's token exchanges or waits for other stages take, and whether one is under way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def stamp(device: torch.device) -> Any:
    """Now: seconds of the host on the CPU, else an event on the device's present stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class ExchangeClock:
    """Adds up the seconds of this rank's exchanges on the compute group, waits for slower peers and what the process
    does meanwhile included. It counts nothing, and costs nothing, before `watch`.

    On a GPU a host call returns before its exchange begins, so the device's own events are timed.

    Attributes:
        listener: called on the host with True as an exchange begins and with False as it ends; None: nobody.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._lock = threading.Lock()
        self._under_way = 0
        self._seconds = 0.0
        self._on_device: deque[tuple[Any, Any]] = deque()  # began, ended
        self.listener: Callable[[bool], None] | None = None

    def __reduce__(self) -> tuple[type[ExchangeClock], tuple[()]]:
        """Models that know their world are copied and pickled; a copy counts for itself, from nothing."""
        return ExchangeClock, ()

    def watch(self) -> None:
        """Count from now on."""
        self._is_watched = True

    @contextmanager
    def exchange(self, device: torch.device) -> Iterator[None]:
        """Around one exchange of tensors on that device."""
        self._tell(True)
        try:
            with self._timed(device) if self._is_watched else nullcontext():
                yield
        finally:
            self._tell(False)

    def _tell(self, begins: bool) -> None:
        if self.listener is not None:
            self.listener(begins)

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        began = stamp(device)
        try:
            yield
        finally:
            ended = stamp(device)
            with self._lock:
                self._under_way -= 1
                if device.type != "cpu":
                    self._on_device.append((began, ended))
                else:
                    self._seconds += ended - began

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is under way now."""
        with self._lock:
            self._collect()
            return self._under_way > 0 or any(began.query() for began, _ in self._on_device)

    @property
    def seconds(self) -> float:
        """Of all exchanges that have ended."""
        with self._lock:
            self._collect()
            return self._seconds

    def _collect(self) -> None:
        """Move what the device has finished into the sum."""
        while self._on_device and self._on_device[0][1].query():
            began, ended = self._on_device.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3
