"""Side of the workers: start a node's persist agent, ask it to stop, and read its reports."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.errors import CheckpointError, ConfigurationError

STATUS = "status.json"
STOP = "stop"
LOCK = "agent.lock"
LOG = "agent.log"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Schedulers send them to all processes of a job, of which the workers still train up to a last checkpoint."""

_POLL_S = 0.01
_RECORD_S = 1.0
LEAVE_S = 30.0
"""An agent that has nothing to write may still be reading carried files or deleting old checkpoints."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentStatus:
    """Last report of the agent.

    Attributes:
        committed_step: step of the newest checkpoint it saw committed, or None.
        committed_session: the session of that step.
        committed_path: its directory.
        persist_s: from taking that snapshot up to its commit.
        persist_bytes: bytes that this node wrote for it.
        error: why the last attempt failed, one sentence; None once an attempt succeeded again.
        error_session: the session of that attempt; empty if it is not known.
        errors: failed attempts so far.
        damaged: carried files that were found damaged so far.
        damage: the last one of them, one sentence.
    """

    committed_step: int | None = None
    committed_session: str | None = None
    committed_path: str | None = None
    persist_s: float = 0.0
    persist_bytes: int = 0
    error: str | None = None
    error_session: str = ""
    errors: int = 0
    damaged: int = 0
    damage: str | None = None


def read_status(arenas: Path) -> AgentStatus:
    """The agent's last report; an empty one before the first."""
    try:
        return AgentStatus(**json.loads((arenas / STATUS).read_bytes()))
    except FileNotFoundError:
        return AgentStatus()


def warnings_of(status: AgentStatus) -> list[str]:
    """Return warnings about an agent's failures and damage.

    The counts make each text unique, as Python shows equal warnings once.
    """
    found = []
    if status.error is not None:
        often = f"checkpoints could not be written {status.errors} times so far: " if status.errors else ""
        found.append(f"{often}{status.error}")
    if status.damage is not None:
        found.append(f"{status.damaged} damaged files of checkpoints were found so far: {status.damage}")
    return found


def agent_alive(arenas: Path) -> bool:
    """Return True if an agent serves the directory."""
    try:
        with open(arenas / LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the directory was deleted, which ends an agent
        return False
    return False


def served_root(arenas: Path) -> Place | None:
    """Return the directory of checkpoints of the agent that served the arenas last.

    None if it is not recorded, or its path leads to another directory by now.
    """
    record = lock_record(arenas)
    try:
        root = place_of(record["root"])
        return root if storage_of(root).identity(root) == record["identity"] else None
    except (OSError, ConfigurationError, KeyError):
        return None


def lock_record(arenas: Path) -> dict[str, Any]:
    """Return what the agent that served the arenas last has recorded; empty if that cannot be read."""
    try:
        record = json.loads((arenas / LOCK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(record, dict) and isinstance(record.get("root"), str)
    return record if is_ours else {}


def request_stop(arenas: Path) -> None:
    """Ask the agent to persist what waits, to release the arenas, and to exit."""
    with contextlib.suppress(FileNotFoundError):  # the directory was deleted, which ends an agent
        (arenas / STOP).touch(mode=0o600)


class AgentHandle:
    """A node's agent, as the rank that keeps it sees it: one that this process started, or found at work.

    Args:
        arenas: directory that it serves.
        root: of the checkpoints.
        options: numbers of `Agent` and its `run`: `keep_last`, `poll_s`, `grace_s`, `retry_s`, `commit_timeout_s`, ...
    """

    def __init__(self, arenas: Path, root: Place, **options: float) -> None:
        self._arenas, self._root, self._options = arenas, root, options
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Ask for an agent; one that was asked to stop goes on.

        Raises:
            ConfigurationError: one serves that writes elsewhere, and it does not leave.
        """
        if not self._has_own and agent_alive(self._arenas) and not self._serves_root() and not self._stop(LEAVE_S):
            # the directory of checkpoints has moved, and the agent still writes to its old place
            raise ConfigurationError(
                f"an agent serves {self._arenas} that does not write to {self._root}, and has not left within "
                f"{LEAVE_S:g} s: end the process that {self._arenas / LOCK} names"
            )
        (self._arenas / STOP).unlink(missing_ok=True)
        self.ensure()

    def ensure(self) -> None:
        """Start an agent where none serves, with a warning if the one that was started here has failed. Where
        the arenas were deleted this instant, the next save makes them anew.
        """
        if not self.runs and self._arenas.is_dir():
            if self._process is not None and (code := self._process.poll()):
                message = "the agent of %s has failed (exit code %d): another one is started; see %s there"
                logger.warning(message, self._arenas, code, LOG)
            self._process = start_agent(self._arenas, self._root, **self._options)

    def wait_for_end(self) -> None:
        """Wait, but not for long, until the agent that was started here has left, where its directory was deleted."""
        deadline = time.monotonic() + LEAVE_S
        while self._has_own and not agent_alive(self._arenas) and time.monotonic() <= deadline:
            time.sleep(_POLL_S)

    @property
    def runs(self) -> bool:
        """True if an agent serves these arenas; one that was started here may still be importing."""
        return self._has_own or agent_alive(self._arenas)

    def leave(self, timeout_s: float) -> None:
        """Let the agent persist what waits and exit, whoever started it, and wait until it has.

        Raises:
            CheckpointError: it has not in time.
        """
        if not self._stop(timeout_s):
            raise CheckpointError(f"the agent of {self._arenas} has not left within {timeout_s:.0f} s: see {LOG} there")

    @property
    def _has_own(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _serves_root(self) -> bool:
        deadline = time.monotonic() + _RECORD_S
        while (root := served_root(self._arenas)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # it may have begun this instant
        return root is not None and storage_of(root).identity(root) == storage_of(self._root).identity(self._root)

    def _stop(self, timeout_s: float) -> bool:
        """Ask the agent to exit, and return True once it has, False if it has not in time."""
        request_stop(self._arenas)
        deadline = time.monotonic() + timeout_s
        while (runs := self.runs) and time.monotonic() <= deadline:
            time.sleep(_POLL_S)
        return not runs


def start_agent(arenas: Path, root: Place, **options: float) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own, so that signals to the workers do not reach it. It writes to a log beside
    the arenas.

    Args:
        options: `keep_last`, `poll_s`, `grace_s`, `retry_s`, `commit_timeout_s` of `Agent` and its `run`.
    """
    command = [sys.executable, "-m", "moe_lightning.checkpoint.agent"]
    command += ["--arenas", str(arenas), "--checkpoints", str(root)]
    if storage_of(root).is_dir(root):
        command += ["--identity", storage_of(root).identity(root)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    # Not in the worker's directory, which may be gone before the agent is, nor with its output: readers of that would
    # wait until the agent ends.
    descriptor = os.open(arenas / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for the agent, until it handles them
    try:
        with os.fdopen(descriptor, "ab") as log:
            return subprocess.Popen(
                command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
