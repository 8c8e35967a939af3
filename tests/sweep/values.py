"""What is tried in place of every value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

VALUES: dict[str, Any] = {
    "null": None,
    "empty": "",
    "abc": "abc",
    "-1": -1,
    "0": 0,
    "nan": math.nan,
    "inf": math.inf,
    "1e30": 1e30,
    "1e14": 10**14,
    "[]": [],
    "{}": {},
}
"""By its name in a report, the value as Hydra reads it."""

TEXTS: dict[str, str] = {
    "empty": "",
    "abc": "abc",
    "-1": "-1",
    "0": "0",
    "1.5": "1.5",
    "nan": "nan",
    "inf": "inf",
    "1e30": "1e30",
    "1e14": "100000000000000",
    "huge": "9" * 5000,
    "[]": "[]",
    "nul": "\udc80",
}
"""The same for options of a command line: "huge" is more digits than Python reads, "nul" is no Unicode."""


def keys_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a configuration and their values: mappings before what is in them; `_target_` is a key as others
    are.
    """
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield f"{prefix}{name}", child
            yield from keys_of(child, f"{prefix}{name}.")
