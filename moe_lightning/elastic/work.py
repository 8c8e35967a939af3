"""How a worker does its part of a run and ends, whatever it runs: its launcher is told how it failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from moe_lightning.elastic.failure import (
    FailureKind,
    PeerFailed,
    Preempted,
    RunFinished,
    report_failure,
    signature_of,
)
from moe_lightning.elastic.lifeline import end_with_launcher, leave_process_groups
from moe_lightning.elastic.preemption import EXIT_PREEMPTED
from moe_lightning.user_errors import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_MISTAKE, sentence_of


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
