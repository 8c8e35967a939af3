"""What concerns everybody, as an append-only list of JSON lines in the store: who arrived, died, left, which world
broke.

Appending is atomic in the store, so writers need no order among themselves. Readers poll a counter and fetch the list
when it has grown. Lines that are not understood are passed over: whoever reaches the store may write to it.
"""

from __future__ import annotations

import json
from typing import Literal

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_LINES, _COUNT = "lines", "count"

NewsKind = Literal["arrived", "ready", "formed", "broken", "died", "left", "finished"]


class News:
    """The list, seen through one client of the store; not to be shared by threads that wait."""

    def __init__(self, store: TCPStore) -> None:
        self._store = PrefixStore("news", store)
        self._read = 0
        self._count = 0

    def tell(self, kind: NewsKind, **facts: str | list[str]) -> None:
        """Append one line."""
        self._store.append(_LINES, json.dumps({"kind": kind, **facts}) + "\n")  # type: ignore[attr-defined]
        self._store.add(_COUNT, 1)

    def read(self) -> list[dict[str, str | list[str]]]:
        """The lines since the last call, oldest first."""
        count = self._store.add(_COUNT, 0)
        if count == self._count:
            return []
        lines = self._store.get(_LINES)[self._read :]
        end = lines.rfind(b"\n") + 1
        self._read += end
        self._count = count
        return [line for text in lines[:end].splitlines() if (line := _parse(text)) is not None]


def _parse(text: bytes) -> dict[str, str | list[str]] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    return {k: v for k, v in line.items() if isinstance(v, str) or (isinstance(v, list) and all(map(_is_text, v)))}


def _is_text(value: object) -> bool:
    return isinstance(value, str)
