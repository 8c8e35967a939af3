"""Persist agents forked from the tests' server process: a fresh one imports torch for seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from functools import partial
from multiprocessing import process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from moe_lightning.checkpoint import agent_handle
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.agent import main as agent_main
from moe_lightning.checkpoint.agent_handle import LOG, STOP, agent_alive
from moe_lightning.checkpoint.arena import arenas_name
from moe_lightning.checkpoint.directory import claim, run_of
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place
from tests.forks import FORKS, fork, wait_until

START_AGENT = agent_handle.start_agent
"""Starts an agent as the process of a user does, in a new interpreter."""


def fork_agent(
    arenas: Path, root: Path, *, gate: Path | None = None, keep_last: int | None = 2, poll_s: float = 0.01
) -> BaseProcess:
    """Start the agent of a node.

    Args:
        gate: a file that must exist before it does anything; None: nothing holds it back.
        keep_last: checkpoints; None: what the agent keeps where nobody says how many.
    """
    gate_name = str(gate) if gate is not None else None
    options = [f"--poll-s={poll_s}", *([] if keep_last is None else [f"--keep-last={keep_last}"])]
    return fork(_agent_main, str(arenas), str(root), gate_name, options, daemon=True)


def agent_ahead(root: Path, *, poll_s: float = 0.01) -> BaseProcess:
    """Start the agent that the first rank of a run would start, before the run: the rank finds it at work.

    Args:
        root: of the checkpoints; the run has the name of the folder that it lies in.
    """
    run = run_of(root) or uuid.uuid4().hex
    claim(root, run)
    arenas = Path("/dev/shm") / ("moe-lightning-" + arenas_name(root.parent.name, run, "", root))
    arenas.mkdir(mode=0o700, exist_ok=True)
    (arenas / STOP).unlink(missing_ok=True)
    agent = fork_agent(arenas, root, poll_s=poll_s)
    wait_until(partial(agent_alive, arenas))  # else a rank that is faster starts another one
    return agent


class ForkedAgent:
    """In place of `start_agent`, in every process that tests fork and in tests that set it: the part of
    subprocess.Popen that sessions use. It outlives the process that starts it."""

    def __init__(self, arenas: Path, root: Place, **options: float) -> None:
        named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        if storage_of(root).is_dir(root):
            named.append(f"--identity={storage_of(root).identity(root)}")
        self._process = FORKS.Process(
            target=_started_main, args=(str(arenas), str(root), named, dict(os.environ), _umask())
        )
        # The new process imports __main__ unless that has neither name nor file: a script would run once more.
        with patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
            self._process.start()
        process._children.discard(self._process)  # type: ignore[attr-defined]  # who ends does not wait for it

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("agent", timeout)
        return self._process.exitcode


def _umask() -> int:
    os.umask(umask := os.umask(0o077))
    return umask


def _started_main(arenas: str, root: str, options: list[str], environment: dict[str, str], umask: int) -> None:
    """The agent with what a child inherits."""
    os.environ.clear()
    os.environ.update(environment)
    os.umask(umask)
    os.setsid()
    os.chdir("/")
    log = os.open(Path(arenas) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(agent_main(["--arenas", arenas, "--checkpoints", root, *options]))


def _agent_main(arenas: str, root: str, gate: str | None, options: list[str]) -> None:
    if gate is not None:
        serve = Agent.serve_once
        Agent.serve_once = lambda agent: os.path.exists(gate) and serve(agent)  # type: ignore[method-assign]
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.exit(agent_main(["--arenas", arenas, "--checkpoints", root, *options]))
