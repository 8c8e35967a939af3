"""How a worker ends: with its launcher at the latest, and without threads that outlive the interpreter."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import NoReturn

from moe_lightning.elastic.failure import report_failure

LAUNCHER_PID_VARIABLE = "MOE_LIGHTNING_LAUNCHER_PID"
"""Set by the launcher for its workers: its process id."""

EXIT_HANGING = 75  # EX_TEMPFAIL: start me again

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_CHECK_S = 0.5

logger = logging.getLogger(__name__)


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


def take_over_terminal() -> bool:
    """Let this worker write where its launcher writes; for the one that becomes rank 0 after rank 0 was lost.

    Linux only; False where there is no launcher or its output cannot be opened.
    """
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return False
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        try:
            terminal = os.open(f"/proc/{launcher}/fd/{number}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        except OSError:
            return False
        os.dup2(terminal, number)
        os.close(terminal)
    return True


def write_to_terminal(line: str) -> None:
    """Write a line to this process's stderr, and to that of its launcher where it is another file: the output of most
    ranks goes to files that nobody reads while a run goes well.
    """
    print(line, file=sys.stderr, flush=True)
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return
    with suppress(OSError):
        terminal = os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        with os.fdopen(terminal, "w") as file:
            if not os.path.sameopenfile(2, terminal):
                file.write(f"{line}\n")


def leave_process_groups() -> None:
    """End the threads of torch's process groups; call it before the interpreter ends.

    A thread of theirs that lets go of a Python object while the interpreter is being taken down aborts the process.
    """
    import torch.distributed as dist

    gc.collect()  # what still refers to a group keeps its threads alive
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def leave_process_groups_at_exit() -> None:
    """Do so when a script ends well. One that ends with an error does not wait for threads that wait for its peers."""
    atexit.register(lambda: None if hasattr(sys, "last_value") else leave_process_groups())


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, except that nothing is taken down: what libraries in other languages
    still hold then is neither reported by them nor in the way of their threads.

    Args:
        code: the exit code; with 0 threads that are no daemons are waited for.
    """
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]
    else:
        sys.last_value = SystemExit(code)  # for those who look whether it ends well
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_CHECK_S)
    os._exit(1)


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
