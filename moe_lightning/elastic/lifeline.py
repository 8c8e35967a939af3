"""Ties a worker's life to its launcher's: whatever ends the launcher, no worker stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER_PID_VARIABLE = "MOE_LIGHTNING_LAUNCHER_PID"
"""Set by the launcher for its workers: its process id."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_CHECK_S = 0.5


def end_with_launcher() -> None:
    """Let this process be killed when its launcher dies; a no-op for a process without one.

    On Linux the kernel does it, which also works while the process hangs in a library call; elsewhere a thread looks
    after its parent.
    """
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(int(launcher),), daemon=True, name="launcher-watch").start()
    if os.getppid() != int(launcher):  # it died before the call above
        os._exit(1)


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_CHECK_S)
    os._exit(1)
