"""A torch store over the control plane: what groups of one world are built on, cut when that world breaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]
from typing_extensions import override

from moe_lightning.elastic.wire import Message

_TIMEOUT = timedelta(seconds=60)


class StoreRequests:
    """Requests of any thread that wait for their answers.

    Args:
        send: to the rendezvous host; False where it cannot be.
    """

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._answers: dict[int, Message] = {}
        self._open: dict[int, int] = {}  # request -> world
        self._over = 0  # worlds up to this number are broken

    def ask(self, world: int, op: str, keys: Sequence[str], value: str, timeout_s: float) -> Any:
        """The answer to one request.

        Raises:
            DistNetworkError: the world broke, or the connection to the rendezvous host did.
            DistStoreError: there was no answer in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if world <= self._over:
                raise DistNetworkError("the store of a world that broke")
            number = next(self._numbers)
            self._open[number] = world
        request = {"t": "store", "n": number, "number": world, "op": op, "keys": list(keys), "value": value}
        is_sent = self._send(request)
        with self._changed:
            try:
                while is_sent and number in self._open and number not in self._answers:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise DistStoreError(f"{op} of {', '.join(keys)} timed out after {timeout_s:g} s")
                    self._changed.wait(remaining)
                answer = self._answers.pop(number, None)
            finally:
                self._open.pop(number, None)
        if answer is None or "value" not in answer:
            raise DistNetworkError("the connection to the store was cut")
        return answer["value"]

    def answer(self, message: Message) -> None:
        """An answer has come."""
        with self._changed:
            if message.get("n") in self._open:
                self._answers[message["n"]] = message
                self._changed.notify_all()

    def end(self, world: int | None = None) -> None:
        """Let requests fail: all up to a world's, now and later; without one those that wait on a lost connection."""
        with self._changed:
            if world is not None:
                self._over = max(self._over, world)
            for number in [n for n, of in self._open.items() if world is None or of <= world]:
                del self._open[number]
            self._changed.notify_all()


class ControlStore(Store):
    """The keys of one world.

    Args:
        requests: of this process.
        world: the world's number.
    """

    def __init__(self, requests: StoreRequests, world: int) -> None:
        super().__init__()
        self._requests, self._world, self._limit = requests, world, _TIMEOUT

    @override
    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], _text(value))

    @override
    def get(self, key: str) -> bytes:
        return str(self._ask("get", [key])).encode("latin-1")

    @override
    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], str(amount)))

    @override
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return str(self._ask("compare_set", [key], f"{_text(expected)}\0{_text(desired)}")).encode("latin-1")

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys))

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, limit=timeout)

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    @override
    def num_keys(self) -> int:
        return int(self._ask("count", ["any"]))

    def _ask(self, op: str, keys: Sequence[str], value: str = "", *, limit: timedelta | None = None) -> Any:
        seconds = (self._limit if limit is None else limit).total_seconds()
        return self._requests.ask(self._world, op, keys, value, seconds)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
