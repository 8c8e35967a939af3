"""Names of checkpoint directories, also for commands that spare themselves the seconds of importing the rest."""

from __future__ import annotations

import re

MANIFEST = "MANIFEST.json"
"""File that makes a directory a whole checkpoint."""

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+)|-w(\d+)-[\w-]+)?")


def order_of(name: str) -> tuple[int, int] | None:
    """Return the step of a checkpoint directory, and a number that is higher for a later one of the same step; None if
    no checkpoint has such a name. File systems add a number to names that are there already, object stores the world
    and the session.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or match[3] or 1))
