"""Worker process: its failures, its end, and its report to the launcher, a small private JSON file.

A worker ends with its launcher at the latest, and without threads that outlive the interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import gc
import io
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

from typing_extensions import Buffer, override

from moe_lightning.elastic.membership import ELASTIC_VARIABLE
from moe_lightning.elastic.preemption import EXIT_PREEMPTED, EXIT_STOPPED
from moe_lightning.user_errors import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_MISTAKE, sentence_of

FAILURE_FILE_VARIABLE = "MOE_LIGHTNING_FAILURE_FILE"
"""Path of the file for a worker's failure; set by the launcher."""

KILLED = "was killed by"
"""Words that describe the end of a process by a signal."""

FailureKind = Literal["mistake", "crash", "death", "peer"]


class Interrupted(KeyboardInterrupt):
    """End of a run by a signal (SIGINT, SIGTERM, SIGHUP, SIGQUIT), after all its processes have ended.

    A KeyboardInterrupt, so that nothing that goes on after errors (a multirun's next job) goes on after it.

    Attributes:
        signal: what was received.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"interrupted by {received.name}")
        self.signal = received


class Preempted(Exception):
    """End of a process on a notice of preemption, after the state that only it held was transferred or saved."""


class PeerFailed(Exception):
    """End of a rank because another one ended outside the training loop, or because a step fails again and again.

    Attributes:
        kind: "death" if starting all ranks again may help, else "peer".
        details: the traceback, if it says more than the sentence; else "".
    """

    def __init__(self, sentence: str, kind: FailureKind = "peer", details: str = "") -> None:
        super().__init__(sentence)
        self.kind: FailureKind = kind
        self.details = details


class RunFinished(Exception):
    """End of a process because the others finished the run before it could join."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Failure of a rank.

    Attributes:
        rank: of the process that failed; under the elastic launcher the number of its worker.
        kind: "mistake": user error; "crash": exception; "death": signal or exit without a report; "peer": another rank
            failed.
        message: one sentence.
        details: the traceback, or the last lines of its log.
        time_s: time of detection, in seconds since the epoch.
        signature: equal for failures of the same type at the same place in the same step; "" if unknown.
    """

    rank: int
    kind: FailureKind
    message: str
    details: str
    time_s: float
    signature: str = ""


def signature_of(error: BaseException) -> str:
    """Return type, place and notes of an exception: equal for failures of the same cause."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = f"{frames[0].filename}:{frames[0].lineno}" if frames else "nowhere"
    return "; ".join([type(error).__qualname__, place, *getattr(error, "__notes__", ())])


def report_failure(kind: FailureKind, message: str, details: str, signature: str = "") -> bool:
    """Write the failure of this worker for its launcher; return False without one, or if that fails."""
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
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(failure), file)
    except OSError as error:
        logger.warning("the failure of this worker cannot be written to %s (%s)", path, error.strerror)
        return False
    return True


def read_failure(path: Path) -> RankFailure | None:
    """Return the failure that a worker wrote; None if the file is missing or incomplete."""
    try:
        return RankFailure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


LAUNCHER_PID_VARIABLE = "MOE_LIGHTNING_LAUNCHER_PID"
"""Set by the launcher for its workers: its process id."""

EXIT_HANGING = 75  # EX_TEMPFAIL: start me again

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

logger = logging.getLogger(__name__)


def end_with_launcher() -> None:
    """Make this process end when its launcher dies; a no-op without a launcher.

    The kernel kills it, also while it hangs in a library call.
    """
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the call above
        os._exit(1)


_NO_SINK = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT)


class _LastingFile(io.FileIO):
    """Output that is dropped once its reader has ended or its terminal is closed, and while its disk or quota is full:
    the run does not need it.
    """

    @override
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_SINK:
                raise
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Let this process go on where the reader of its output ends, as Ctrl-C ends `| tee`, or its disk is full: ranks
    still save.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # of a test or a notebook
        stream.flush()
        file = _LastingFile(stream.fileno(), "w", closefd=False)
        lasting = io.TextIOWrapper(
            file if stream.write_through else io.BufferedWriter(file),
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)


TERMINAL_VARIABLE = "MOE_LIGHTNING_TERMINAL"
"""Set by the launcher for its workers: their descriptors of its stdout and stderr."""


@functools.cache
def _terminal() -> tuple[int, ...]:
    """Descriptors of the launcher's stdout and stderr, which programs that this worker starts do not get; empty without
    a launcher.
    """
    numbers = tuple(map(int, os.environ.pop(TERMINAL_VARIABLE, "").split()))
    for number in numbers:
        os.set_inheritable(number, False)
    return numbers


def take_over_terminal() -> None:
    """Redirect the output of this worker to that of its launcher, if there is one: for the new rank 0 after rank 0 was
    lost.
    """
    for stream, number, terminal in zip((sys.stdout, sys.stderr), (1, 2), _terminal(), strict=False):
        stream.flush()
        os.dup2(terminal, number)


def write_to_terminal(line: str) -> None:
    """Write a line to this process's stderr, and to that of its launcher if it is another file: the output of most
    ranks goes to files that users rarely read.
    """
    print(line, file=sys.stderr, flush=True)
    for terminal in _terminal()[1:]:
        with suppress(OSError):
            if not os.path.sameopenfile(2, terminal):
                os.write(terminal, f"{line}\n".encode(errors="replace"))


def leave_process_groups() -> None:
    """End the threads of torch's process groups; call it before the interpreter ends.

    A thread of theirs that frees a Python object while the interpreter ends aborts the process.
    """
    import torch.distributed as dist

    gc.collect()  # references to a group keep its threads alive
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def leave_process_groups_at_exit() -> None:
    """Call `leave_process_groups` when a script ends well; after an error its threads may wait for peers."""
    atexit.register(lambda: None if hasattr(sys, "last_value") else leave_process_groups())


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, without finalizing it: objects of native libraries are neither
    reported as leaks nor freed under their threads.

    Args:
        code: the exit code; with 0 threads that are no daemons are waited for.
    """
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]
    else:
        sys.last_value = SystemExit(code)  # exit handlers read it to detect an error
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def end_hanging_process(limit_s: float, reason: str | None) -> NoReturn:
    """Report the stack of the main thread, and end this process.

    Args:
        limit_s: time that it had.
        reason: reason why its world broke.
    """
    message = f"the main thread did not come back within {limit_s:g} s after its world broke ({reason})"
    stack = _stack_of_main_thread()
    try:
        logger.error("%s: ending this process, which is at\n%s", message, stack)
        report_failure("death", message, stack)
    finally:
        os._exit(EXIT_HANGING)


def _stack_of_main_thread() -> str:
    """Return the stack of the main thread, formatted as a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


AT_FAILURE: list[Callable[[BaseException], object]] = []
"""Functions that get the error that ends this process, before exit handlers run, which may upload for minutes."""


def _run(run: Callable[[], object]) -> None:
    try:
        run()
    except (Exception, SystemExit) as end:
        if not isinstance(end, SystemExit) or end.code not in (None, 0):
            # The script may have handled the error, as Hydra does.
            is_handled = isinstance(end, SystemExit) and isinstance(end.__context__, Exception)
            for call in [*AT_FAILURE]:  # each may remove itself
                call(end.__context__ or end if is_handled else end)
        raise


def work(program: str, run: Callable[[], object]) -> int:
    """Run a worker's part, which ends with its launcher at the latest, and return the exit code.

    Args:
        program: name of the user's command, for messages.
    """
    _terminal()  # before there are children
    outlive_readers()
    end_with_launcher()
    try:
        _run(run)
    except KeyboardInterrupt as stop:
        is_agreed = isinstance(stop, Interrupted) and ELASTIC_VARIABLE in os.environ
        return EXIT_STOPPED if is_agreed else EXIT_INTERRUPTED
    except SystemExit as stop:  # of a script
        if stop.code not in (None, 0):
            sys.last_value = stop  # exit handlers read it to detect an error
            raise
    except Preempted as notice:
        print(f"{program}: this rank leaves: {notice}; what only it held is handed over or saved", file=sys.stderr)
        leave_process_groups()
        return EXIT_PREEMPTED
    except RunFinished as end:  # before this process could join
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
