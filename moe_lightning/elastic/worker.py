"""Worker process: its failures, its end, and what it reports to its launcher.

How runs end early: interrupted, or with a failure that a worker tells its launcher in a small private JSON file.

How a worker ends: with its launcher at the latest, and without threads that outlive the interpreter.

How a worker does its part of a run and ends, whatever it runs: its launcher is told how it failed.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

from moe_lightning.elastic.preemption import EXIT_PREEMPTED
from moe_lightning.user_errors import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_MISTAKE, sentence_of

FAILURE_FILE_VARIABLE = "MOE_LIGHTNING_FAILURE_FILE"
"""Where a worker leaves its failure; set by the launcher."""

KILLED = "was killed by"
"""In the words of how a process ended: a signal did it, and not the process's own code."""

FailureKind = Literal["mistake", "crash", "death", "peer"]


class Interrupted(KeyboardInterrupt):
    """The user or the system asked the run to end (SIGINT, SIGTERM, SIGHUP, SIGQUIT); what it started has ended.

    A KeyboardInterrupt, so that nothing that goes on after errors (a multirun's next job) goes on after it.

    Attributes:
        signal: what was received.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"interrupted by {received.name}")
        self.signal = received


class Preempted(Exception):
    """This process was told to leave, and has handed over what only it held."""


class PeerFailed(Exception):
    """This rank cannot go on: another one ended outside the training loop, or a step fails again and again.

    Attributes:
        kind: "death" where starting all ranks again may help, else "peer".
        details: the traceback, where it says more than the sentence.
    """

    def __init__(self, sentence: str, kind: FailureKind = "peer", details: str = "") -> None:
        super().__init__(sentence)
        self.kind: FailureKind = kind
        self.details = details


class RunFinished(Exception):
    """The others finished the run before this process could join them: it has nothing to do."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank ended.

    Attributes:
        rank: which one.
        kind: "mistake" of the user, "crash" of ours (an exception), "death" without a word (signal, exit), or "peer":
            it could not go on without one that failed.
        message: one sentence.
        details: the traceback, or the last lines of its log.
        time_s: seconds since the epoch at which it was noticed.
        signature: equal for failures of the same type at the same place in the same step; "" where it is not known.
    """

    rank: int
    kind: FailureKind
    message: str
    details: str
    time_s: float
    signature: str = ""


def signature_of(error: BaseException) -> str:
    """Type, place and notes of an exception: equal for failures that come of the same cause."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = f"{frames[0].filename}:{frames[0].lineno}" if frames else "nowhere"
    return "; ".join([type(error).__qualname__, place, *getattr(error, "__notes__", ())])


def report_failure(kind: FailureKind, message: str, details: str, signature: str = "") -> bool:
    """Leave the failure of this worker for its launcher; False when there is none."""
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if path is None:
        return False
    failure = RankFailure(
        rank=int(os.environ["RANK"]),
        kind=kind,
        message=message,
        details=details,
        time_s=time.time(),
        signature=signature,
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(failure), file)
    return True


def read_failure(path: Path) -> RankFailure | None:
    """What a worker left, or None where it left nothing readable: it may have died while writing."""
    try:
        return RankFailure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


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


def work(program: str, run: Callable[[], object]) -> int:
    """Run a worker's part, which ends with its launcher at the latest; the exit code.

    Args:
        program: the user's command, which speaks.
    """
    end_with_launcher()
    try:
        run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Preempted as notice:
        print(f"{program}: this rank leaves: {notice}; what only it held is handed over", file=sys.stderr)
        leave_process_groups()
        return EXIT_PREEMPTED
    except RunFinished as end:  # before this process could join, or without it: there is nothing to do
        print(f"{program}: this rank ends: {end}", file=sys.stderr)
        leave_process_groups()
        return 0
    except PeerFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        report_failure(error.kind, str(error), error.details)
        return EXIT_CRASH
    except Exception as error:
        details, sentence = traceback.format_exc(), sentence_of(error)
        kind: FailureKind = "mistake" if sentence else "crash"
        message = sentence or f"{type(error).__name__}: {error}"
        if not report_failure(kind, message, details, signature_of(error)):
            raise
        return EXIT_MISTAKE if sentence else EXIT_CRASH
    leave_process_groups()
    return 0
