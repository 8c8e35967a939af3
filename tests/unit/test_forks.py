"""The server that tests fork from: warm, and without anything that a fork must not inherit."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import Any

from tests.distributed.harness import run_ranks


def inherited(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "is_warm": "tests.warm" in sys.modules,
        "is_frozen": gc.get_freeze_count() > 0,
        "threads": len(os.listdir("/proc/self/task")),
        "variables": sorted({"RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"} & os.environ.keys()),
        "log_is_quiet": logging.getLogger("lightning.pytorch").level > logging.INFO,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }


def test_forks_inherit_first_uses_and_nothing_else() -> None:
    """An error of an import in the server would be swallowed and cost every rank its time."""
    (found,) = run_ranks(1, inherited)
    assert found == {
        "is_warm": True,
        "is_frozen": True,
        "threads": 1,
        "variables": [],
        "log_is_quiet": False,
        "sigterm": True,
    }
