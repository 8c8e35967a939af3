"""The keys that one world's groups are built on, at the rendezvous host: dropped when the next world forms."""

from __future__ import annotations

from collections import deque
from typing import Any

from moe_lightning.elastic.wire import Message, WireError

_LONGEST_KEY = 1024
_MOST_BYTES = 64 << 20
_MOST_WAITS = 256  # of one connection


class WorldStore:
    """Answers requests; those that ask for keys which are not there yet are answered when they are.

    Attributes:
        outbox: (connection, answer) to be sent, in order.
    """

    def __init__(self) -> None:
        self._number = 0
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._waits: dict[int, deque[Message]] = {}
        self.outbox: list[tuple[int, Message]] = []

    def begin(self, number: int) -> None:
        """Another world: the keys of the former one are gone, and nobody waits for them."""
        if number == self._number:
            return
        self._number, self._bytes = number, 0
        self._values.clear()
        for connection, waits in self._waits.items():
            for request in waits:
                self._refuse(connection, request)
        self._waits.clear()

    def forget(self, connection: int) -> None:
        """A connection has ended."""
        self._waits.pop(connection, None)

    def receive(self, connection: int, request: Message) -> None:
        """Take in a request `{"t": "store", "n": int, "number": world, "op": name, "keys": [...], "value": text}`.

        Raises:
            WireError: it is malformed, or above a limit.
        """
        match request:
            case {"n": int(), "number": int(number), "op": str(op), "keys": list(keys), "value": str(value)} if (
                keys and all(isinstance(key, str) and len(key) <= _LONGEST_KEY for key in keys)
            ):
                pass
            case _:
                raise WireError("a malformed request of the store")
        if number != self._number:
            self._refuse(connection, request)
        elif op in ("get", "wait"):
            if not self._answer_read(connection, request):
                waits = self._waits.setdefault(connection, deque())
                if len(waits) >= _MOST_WAITS:
                    raise WireError(f"more than {_MOST_WAITS} waits at once")
                waits.append(request)
        else:
            self._answer(connection, request, self._apply(op, keys, value))
            if op != "check":
                self._serve_waits()

    def _apply(self, op: str, keys: list[str], value: str) -> Any:
        key = keys[0]
        match op:
            case "set":
                return self._set(key, value)
            case "add":
                try:
                    total = int(self._values.get(key, "0")) + int(value)
                except ValueError:
                    raise WireError("an addition to what is no number") from None
                self._set(key, str(total))
                return total
            case "compare_set":
                wanted, _, new = value.partition("\0")
                if self._values.get(key, "") == wanted:
                    self._set(key, new)
                return self._values.get(key, wanted)
            case "check":
                return all(key in self._values for key in keys)
            case "delete":
                self._bytes -= len(key) + len(self._values.get(key, ""))
                return self._values.pop(key, None) is not None
            case "count":
                return len(self._values)
        raise WireError("an unknown operation of the store")

    def _set(self, key: str, value: str) -> None:
        self._bytes += len(value) - len(self._values.get(key, "")) + (0 if key in self._values else len(key))
        if self._bytes > _MOST_BYTES:
            raise WireError(f"more than {_MOST_BYTES} bytes in the store")
        self._values[key] = value

    def _serve_waits(self) -> None:
        for connection, waits in list(self._waits.items()):
            left = deque(request for request in waits if not self._answer_read(connection, request))
            self._waits[connection] = left

    def _answer_read(self, connection: int, request: Message) -> bool:
        """Answer a get or a wait whose keys are all there; whether they are."""
        keys = request["keys"]
        if not all(key in self._values for key in keys):
            return False
        self._answer(connection, request, self._values[keys[0]] if request["op"] == "get" else True)
        return True

    def _answer(self, connection: int, request: Message, value: Any) -> None:
        self.outbox.append((connection, {"t": "stored", "n": request["n"], "value": value}))

    def _refuse(self, connection: int, request: Message) -> None:
        self.outbox.append((connection, {"t": "stored", "n": request["n"], "error": "this world is over"}))
