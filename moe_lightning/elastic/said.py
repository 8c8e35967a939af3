"""Whether what others say of themselves is what it should be."""

from __future__ import annotations

import math
from typing import Any

from moe_lightning.elastic.formation import Patience
from moe_lightning.elastic.wire import WireError

LONGEST_WORD = 200


def is_text(value: object) -> bool:
    """A name of a length that names have."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD


def is_member_id(value: object) -> bool:
    """A name that `new_member_id` may have made."""
    return is_text(value) and str(value).count(".") >= 2


def parse_patience(values: list[Any]) -> Patience:
    """Times that a member tells.

    Raises:
        WireError: they are none.
    """
    if len(values) != 4 or not all(type(v) in (int, float) and math.isfinite(v) and v > 0 for v in values):
        raise WireError("malformed timeouts")
    return Patience(**dict(zip(("heartbeat_s", "silence_s", "hang_s", "start_s"), map(float, values), strict=True)))


def parse_multiple(said: object) -> int:
    """Of how many members worlds are multiples, as a member tells.

    Raises:
        WireError: it is no such number.
    """
    if type(said) is not int or not 0 < said < 2**20:
        raise WireError("a malformed multiple")
    return said


def parse_endpoint(said: Any) -> tuple[str, int] | None:
    """Where a member can be probed; None where it cannot.

    Raises:
        WireError: it is no address.
    """
    match said:
        case None:
            return None
        case [str(host), int(port)] if len(host) <= LONGEST_WORD and 0 < port < 65536:
            return host, port
    raise WireError("a malformed address")
