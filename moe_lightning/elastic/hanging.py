"""The end of a process whose main thread does not come back from a world that broke: everybody waits for it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from typing import NoReturn

from moe_lightning.elastic.failure import report_failure

EXIT_HANGING = 75  # EX_TEMPFAIL: start me again

logger = logging.getLogger(__name__)


def end_hanging_process(limit_s: float, reason: str | None) -> NoReturn:
    """Tell where the main thread is, and end this process.

    Args:
        limit_s: how long it had.
        reason: why its world broke.
    """
    message = f"the main thread did not come back within {limit_s:g} s after its world broke ({reason})"
    stack = _stack_of_main_thread()
    logger.error("%s: ending this process, which is at\n%s", message, stack)
    report_failure("death", message, stack)
    os._exit(EXIT_HANGING)


def _stack_of_main_thread() -> str:
    """Where the main thread is, as in a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
