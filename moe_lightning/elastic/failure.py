"""How runs end early: interrupted, or with a failure that a worker tells its launcher in a small private JSON file."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

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
