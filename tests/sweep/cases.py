"""One case: what is run, what comes of it, and what is wrong with that.

Each case runs in a forked child that has imported everything and done nothing, so that a crash, a hang or a hundred
gigabytes end the case alone.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["clear", "accepted", "vague", "traceback", "hang", "nonsense"]
PROBLEMS: tuple[Kind, ...] = ("vague", "traceback", "hang", "nonsense")

_MOST_BYTES = 24 * 2**30  # of address space: torch maps several without touching them
_LONGEST = 600  # characters of a sentence


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command with one wrong thing in it.

    Attributes:
        label: what a report calls it.
        run: the command; its exit code, None for 0. It writes to the streams as a user sees them.
        subjects: words of which a sentence must hold one: the key or option as typed, the file.
        sensible: whether accepting it is right; None: it must be refused.
        timeout_s: after which it hangs.
    """

    label: str
    run: Callable[[], int | None]
    subjects: tuple[str, ...]
    sensible: bool = False
    timeout_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a case did: its exit code, None where it had to be killed, and all that it wrote."""

    code: int | None
    text: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What an answer is worth, and the words that say why."""

    kind: Kind
    text: str


def answer(case: Case) -> Answer:
    """Run a case in a child of its own, which is killed with all that it started when it takes too long."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = os.memfd_create("words")
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reader)
        _run(case, words, writer)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], case.timeout_s)
        told = os.read(reader, 16) if ready else b""
    finally:
        os.close(reader)
        _kill_session(child)
        _, status = os.waitpid(child, 0)
    text = os.pread(words, 1 << 20, 0).decode(errors="replace")
    os.close(words)
    if ready and not told:  # it died, or ended without a return
        code = os.waitstatus_to_exitcode(status)
        return Answer(code=code, text=text or f"ended by signal {-code}", seconds=time.monotonic() - start)
    return Answer(code=int(told) if told else None, text=text, seconds=time.monotonic() - start)


def _run(case: Case, words: int, writer: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    os.dup2(words, 1)
    os.dup2(words, 2)
    # As the interpreter opens them; pytest's are elsewhere.
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
    code: object = 1
    try:
        code = case.run()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, str(code if isinstance(code, int) else 1 if code else 0).encode())
    finally:
        os._exit(0)  # nothing of the sweep itself may be taken down by the child


def _kill_session(leader: int) -> None:
    """The child and what it started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # it never got as far as its own session
        os.kill(leader, signal.SIGKILL)


_PYTHON_WORDS = re.compile(
    r"NoneType|has no attribute|not supported between|unsupported operand|object is not|too large to|invalid literal"
    r"|could not convert|Errno|Exception|Error\b|<class|<module|at 0x"
)
_CURE = re.compile(
    r"must (be|have|name|hold)|--help|did you mean|"
    r"\b(use|give|set|choose|name|lower|raise|write|drop|leave|create|empty|add|record|run|"
    r"start|train|make|mend|see|sort|take|copy|put|free|install|repeat|try|chmod|expected one)\b"
)


def judged(case: Case, found: Answer) -> Verdict:
    """What an answer is worth."""
    lines = [line for line in found.text.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else "no word"
    if found.code is None:
        return Verdict(kind="hang", text=f"not done after {case.timeout_s:g} s: {last}")
    if "Traceback (most recent call last)" in found.text or found.code not in (0, 1, 2):
        return Verdict(kind="traceback", text=last)
    if found.code == 0:
        return Verdict(kind="accepted" if case.sensible else "nonsense", text=last)
    faults = [
        fault
        for fault, holds in (
            (f"not about {' or '.join(case.subjects)}", not any(subject in last for subject in case.subjects)),
            ("in Python's words", bool(_PYTHON_WORDS.search(last.removeprefix("error: ")))),
            ("no cure", not _CURE.search(last)),
            ("too long", len(last) > _LONGEST),
        )
        if holds
    ]
    return Verdict(kind="vague", text=f"{', '.join(faults)}: {last}") if faults else Verdict(kind="clear", text=last)
