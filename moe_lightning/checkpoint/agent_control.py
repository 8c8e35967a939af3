"""The workers' side of the persist agent: start it, read what it reports, tell it to stop."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

STATUS = "status.json"
STOP = "stop"
LOCK = "agent.lock"
LOG = "agent.log"


@dataclass(frozen=True, kw_only=True)
class AgentStatus:
    """What the agent last reported.

    Attributes:
        committed_step: step of the newest checkpoint it saw committed, or None.
        committed_session: the session of that step.
        committed_path: its directory.
        persist_s: from taking that snapshot up to its commit.
        persist_bytes: bytes that this node wrote for it.
        error: why the last attempt failed, one sentence; None once an attempt succeeded again.
        errors: failed attempts so far.
    """

    committed_step: int | None = None
    committed_session: str | None = None
    committed_path: str | None = None
    persist_s: float = 0.0
    persist_bytes: int = 0
    error: str | None = None
    errors: int = 0


def read_status(arenas: Path) -> AgentStatus:
    """The agent's last report; an empty one before the first."""
    try:
        return AgentStatus(**json.loads((arenas / STATUS).read_bytes()))
    except FileNotFoundError:
        return AgentStatus()


def agent_alive(arenas: Path) -> bool:
    """Whether an agent serves the directory."""
    with open(arenas / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def request_stop(arenas: Path) -> None:
    """Ask the agent to persist what waits, to release the arenas, and to exit."""
    (arenas / STOP).touch(mode=0o600)


def start_agent(arenas: Path, root: Path, **options: float) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own, so that signals to the workers do not reach it. It writes to a log beside
    the arenas.

    Args:
        options: `keep_last`, `poll_s`, `grace_s`, `retry_s`, `commit_timeout_s` of `Agent`.
    """
    command = [
        sys.executable,
        "-m",
        "moe_lightning.checkpoint.agent",
        "--arenas",
        str(arenas),
        "--checkpoints",
        str(root),
    ]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    # Not in the worker's directory, which may be gone before the agent is, nor with its output: readers of that would
    # wait until the agent ends.
    descriptor = os.open(arenas / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        return subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
        )
