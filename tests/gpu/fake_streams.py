"""Streams and events of the fake device, and races between them.

Work is done at once and in the host's order, but each stream and the host keep a vector clock: of every stream, the
last operation that they know to have ended. Who reads what a stream wrote that it has not waited for, writes what
another may still be reading, or frees what another may still be using, fails with a `Race`.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_numbers = itertools.count()
_lock = threading.RLock()
streams: WeakSet[Stream] = WeakSet()
races: list[str] = []
"""All that were found; those of freed memory are raised nowhere."""


class Race(AssertionError):
    """On a device, this would be a matter of luck."""


def assert_no_races() -> None:
    """At the end of a program: those of freed memory are known here only.

    Raises:
        Race: there were some.
    """
    gc.collect()
    if races:
        raise Race("; ".join(sorted(set(races))))


class Clock:
    """Of a stream or of the host: the number of each stream's last operation that has certainly ended."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def join(self, known: dict[int, int]) -> None:
        with _lock:
            for stream, operation in known.items():
                self.known[stream] = max(operation, self.known.get(stream, 0))

    def knows(self, use: _Use) -> bool:
        return self.known.get(use.stream, 0) >= use.operation


class _Use:
    """By an operation of a stream."""

    def __init__(self, stream: Stream, what: str) -> None:
        self.stream, self.operation, self.what = stream.number, stream.known.get(stream.number, 0), what


host = Clock()


class Stream(Clock):
    """In the place of `torch.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__()
        self.number, self.device, self.priority = next(_numbers), device, priority
        self.stream_id, self.device_index, self.device_type = self.number, 0, 0
        streams.add(self)

    def begin(self) -> None:
        """An operation, which comes after all that the host has waited for."""
        with _lock:
            self.join(host.known)
            self.known[self.number] = self.known.get(self.number, 0) + 1

    def wait_stream(self, other: Stream) -> None:
        self.join(other.known)

    def wait_event(self, event: Event) -> None:
        self.join(event.known)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        host.join(self.known)

    def query(self) -> bool:
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        _entered().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert _entered().pop() is self


class Event(Clock):
    """In the place of `torch.Event`."""

    def __init__(self, device: Any = None, enable_timing: bool = False, blocking: bool = False) -> None:
        super().__init__()
        self._is_timed, self._at, self._device = enable_timing, 0.0, torch.device(device or "fake")

    def record(self, stream: Stream | None = None) -> None:
        if self._device.type == "cpu":
            raise RuntimeError("cpu backend doesn't support events.")
        self.known, self._at = dict((stream or current_stream()).known), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        host.join(self.known)

    def elapsed_time(self, end: Event) -> float:
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1e3 * (end._at - self._at)


_default = Stream()
_of_thread = threading.local()


def _entered() -> list[Stream]:
    if not hasattr(_of_thread, "entered"):
        _of_thread.entered = [_default]
    entered: list[Stream] = _of_thread.entered
    return entered


def current_stream(device: Any = None) -> Stream:
    """Of this thread."""
    return _entered()[-1]


def set_stream(stream: Stream) -> None:
    _entered()[-1] = stream


class Memory:
    """Who uses a storage.

    Args:
        owner: the stream on which it was allocated, which may use it for something else once it is freed; None: it is
            the host's, and page-locked memory is not given away before copies have ended.
    """

    def __init__(self, owner: Stream | None) -> None:
        self._owner = owner
        self.forget()

    def forget(self) -> None:
        self._writer: _Use | None = None
        self._readers: dict[int, _Use] = {}
        self._recorded: set[int] = set()

    def is_shared(self, stream: Stream) -> bool:
        """Whether other streams have used it."""
        return any(use is not None and use.stream != stream.number for use in (self._writer, *self._readers.values()))

    def used(self, by: Stream, what: str, *, writes: bool) -> None:
        """By the stream's present operation."""
        self.require(by, what, writes=writes)
        if writes:
            self._writer, self._readers = _Use(by, what), {}
        else:
            self._readers[by.number] = _Use(by, what)

    def require(self, by: Clock, what: str, *, writes: bool) -> None:
        """
        Raises:
            Race: who uses it now has not waited for who did before.
        """
        if self._writer is not None and not by.knows(self._writer):
            self._tell(by, what, f"what {self._writer.what} of stream {self._writer.stream} may not have written yet")
        for reader in self._readers.values() if writes else ():
            if not by.knows(reader):
                self._tell(by, f"{what} overwrites", f"what {reader.what} of stream {reader.stream} may still read")

    def _tell(self, by: Clock, what: str, of: str) -> None:
        who = f"stream {by.number}" if isinstance(by, Stream) else "the host"
        races.append(f"{what} of {who} uses {of}")
        raise Race(races[-1])

    def recorded(self, stream: Stream) -> None:
        self._recorded.add(stream.number)

    def freed(self) -> None:
        """Its owner's next allocation may be this one."""
        for use in (self._writer, *self._readers.values()) if self._owner is not None else ():
            if use is None or use.stream in self._recorded or use.stream == self._owner.number:
                continue
            if not (self._owner.knows(use) or host.knows(use)):
                races.append(f"freed on stream {self._owner.number} while {use.what} of stream {use.stream} may use it")

    def __del__(self) -> None:
        self.freed()


_of_devices: WeakValueDictionary[int, Memory] = WeakValueDictionary()
_of_host: dict[int, tuple[StorageWeakRef, Memory]] = {}
_locked: dict[int, StorageWeakRef] = {}
_blocks: dict[int, list[StorageWeakRef]] = {}


def device_memory(data: Tensor) -> Memory:
    """Of a storage that is on the device, made as the present stream's where it is new."""
    with _lock:
        key = data.untyped_storage()._cdata
        known = _of_devices.get(key)
        if known is None:
            known = _of_devices[key] = Memory(current_stream())
        return known


def lock_pages(data: Tensor) -> Tensor:
    """Host memory that the device copies to and from by itself."""
    storage = data.untyped_storage()
    reference = _locked[storage._cdata] = StorageWeakRef(storage)
    users = _blocks.setdefault(1 << (max(1, storage.nbytes()) - 1).bit_length(), [])
    free = next((place for place, user in enumerate(users) if user.expired()), len(users))
    users[free : free + 1] = [reference]
    return data


def locked_bytes() -> int:
    """Page-locked so far: as torch does it, in powers of two that whoever comes later uses again."""
    return sum(size * len(users) for size, users in _blocks.items())


def is_locked(data: Tensor) -> bool:
    found = _locked.get(data.untyped_storage()._cdata)
    return found is not None and not found.expired()


def copied_by_device(data: Tensor, stream: Stream, what: str, *, writes: bool) -> None:
    """Host memory, by an operation that the host does not wait for."""
    with _lock:
        storage = data.untyped_storage()
        reference, known = _of_host.get(storage._cdata, (None, None))
        if known is None or reference is None or reference.expired():
            known = Memory(None)
            _of_host[storage._cdata] = StorageWeakRef(storage), known
        known.used(stream, what, writes=writes)


def used_by_host(data: Tensor, what: str, *, writes: bool) -> None:
    """Host memory, by the host."""
    if _of_host:
        reference, known = _of_host.get(data.untyped_storage()._cdata, (None, None))
        if known is not None and reference is not None and not reference.expired():
            known.require(host, what, writes=writes)


class DeviceStorage:
    """What fully_shard resizes: memory that is given back, and asked for again."""

    def __init__(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        self._storage, self._memory = storage, memory

    def resize_(self, num_bytes: int) -> None:
        if self._storage.size():
            self._memory.freed()
        self._memory.forget()
        self._memory._owner = current_stream()
        self._storage.resize_(num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)
