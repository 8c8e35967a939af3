"""The peak of this process's resident memory in a part of its life, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD = -3  # of malloc.h
_LEAST_BYTES = 256 << 10


class PeakMemory:
    """Resident memory over what it is now, when everything unused has been given back to the system.

    Args:
        counts_files: True if files that are mapped count, although their memory makes room for others.

    Attributes:
        before: bytes at the beginning.
    """

    def __init__(self, *, counts_files: bool = True) -> None:
        self._is_known = False
        self.before = self._files = 0
        self._counts_files = counts_files
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            self.before, self._files = _resident("VmRSS"), _resident("RssFile")
        except (AttributeError, OSError):
            return  # another system, or another C library
        self._is_known = True

    def restart(self) -> None:
        """Forget the peaks so far."""
        try:
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        except OSError:
            self._is_known = False

    def bytes(self) -> int | None:
        """The peak since `restart`; None where the system does not tell."""
        if not self._is_known:
            return None
        files = 0 if self._counts_files else _resident("RssFile") - self._files
        return _resident("VmHWM") - self.before - files


def give_back_at_once() -> None:
    """Blocks of at least 256 KiB go back to the system when they are freed. Otherwise glibc keeps more and more of
    those that it has seen, up to 32 MiB each, in a heap with holes, so that what is resident tells nothing of what is
    used. It costs page faults.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LEAST_BYTES)


def _resident(name: str) -> int:
    """A line of the process's status, in bytes."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
