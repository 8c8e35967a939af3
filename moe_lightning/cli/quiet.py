"""Keeps other libraries' irrelevant notes off the terminal, each by its text or its logger; our own warnings are
sentences without a place in the code.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

_IRRELEVANT_WARNINGS = (
    r".*does not have many workers.*",  # slices of a memory map need none
    r".*`_get_pg_default_device` will be deprecated.*",
    r".*is smaller than the logging interval.*",  # short runs
    r".*Checkpoint directory .* exists and is not empty.*",  # a resumed run
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*The dirpath has changed from .*",  # a run directory that was moved
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
)


def quiet_libraries() -> None:
    """Silence Lightning's notes of what hardware it looked for and the warnings above; all else stays visible."""
    import lightning.fabric.utilities.warnings  # noqa: F401  # sets a format of its own when it is imported

    warnings.formatwarning = _formatted
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _IRRELEVANT_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if PACKAGE in Path(filename).parents:
        return f"moe-train: {message}\n"
    return f"{filename}:{lineno}: {message}\n"
