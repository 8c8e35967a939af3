"""Commands, their ranks and scripts in forked processes: what a user's command does, without its imports.

The tests of launchers and signals, and some test of every kind of command, start interpreters of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from lightning.pytorch.strategies.launchers import subprocess_script

from moe_lightning.elastic import launcher
from moe_lightning.elastic.worker import TERMINAL_VARIABLE
from tests.forks import fork
from tests.programs import Program, users_environment

WORDS = ("data.source=words.txt", "data.cache_dir=cache")
"""What `write_words` leaves in the folder of the run."""
TINY = (
    *("model=llama_moe_tiny", "run_name=tiny", *WORDS, "data.global_batch_size=8", "data.val_samples=4", "logger=csv"),
    "optimizer.warmup_steps=0",
)
"""A run of seconds."""
SMALL_MODEL = (
    "model.context_length=16", "model.num_layers=2", "model.d_model=16", "model.num_heads=2", "model.d_hidden=24",
    "model.d_expert=16",
)  # fmt: skip
"""Sizes that make any recipe of text quick."""


def write_words(folder: Path = Path(), lines: int = 300) -> None:
    """A text to train on."""
    (folder / "words.txt").write_text("".join(f"line {i} of {i * i} words of text\n" for i in range(lines)))


def moe_train(
    folder: Path, *arguments: str, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `moe-train ARGUMENTS` in a folder: its exit code, and what it and its first rank wrote.

    Args:
        before: called in the command's process first.
    """
    with ForkedProgram("moe_lightning.cli.train", *arguments, folder=folder, before=before) as program:
        return program.end()


def run_script(script: Path, *arguments: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS` in the script's folder with these variables besides a user's."""
    with ForkedProgram(str(script), *arguments, folder=script.parent, variables=variables) as program:
        return program.end()


class ForkedProgram(Program):
    """A running script or `python -m MODULE ARGUMENTS`, and its ranks, forked from the tests' server process.

    Args:
        name: of the module, or the path of the script.
        forks_ranks: fork the ranks that it launches, too.
    """

    def __init__(
        self,
        name: str,
        *arguments: str,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
        forks_ranks: bool = True,
    ) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="program-")
        self._out, self._err = Path(self._files.name, "out"), Path(self._files.name, "err")
        for path in (self._out, self._err):
            path.touch(mode=0o600)
        environment = users_environment() | dict(variables or {})
        files = (self._out, self._err)
        self.process = _Forked(_main, name, arguments, str(folder), environment, files, before, forks_ranks)


class _Forked:
    """The part of subprocess.Popen that `Program` uses."""

    def __init__(self, target: Callable[..., object], *args: Any) -> None:
        self._process = fork(target, *args)
        self.args = args
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.args), timeout or 0.0)
        return self._process.exitcode


class ForkedRank:
    """A rank as its launcher sees it: the part of subprocess.Popen that launchers use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class RankStarter:
    """Child that forks the ranks of this process, in place of `launcher.start`.

    A launcher may have threads, whose locks a rank that it forks would wait for; this child has none. Its forks become
    the launcher's children, as ranks are, because their parents end at once.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._pipe, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            self._pipe.close()
            _serve_ranks(theirs)
        theirs.close()

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> ForkedRank:
        """Do what subprocess.Popen does in Lightning's launcher: start the script again."""
        return self._fork(command[1], command[2:], env)

    def start(self, program: Sequence[str], environment: Mapping[str, str], logs: launcher.WorkerLogs) -> ForkedRank:
        """Do what `launcher.start` does."""
        option, module, *arguments = program
        assert option == "-m"
        variables = {**os.environ, **environment, **logs.begin()}
        return self._fork(module, arguments, variables, [logs.path("out"), logs.path("err")])

    def _fork(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Path] = ()
    ) -> ForkedRank:
        self._pipe.send((name, arguments, environment, outputs))
        return ForkedRank(self._pipe.recv())


def _serve_ranks(pipe: Connection) -> NoReturn:
    """Fork a rank for each request, until the launcher has ended."""
    while True:
        try:
            name, arguments, environment, outputs = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        waiting, ready = os.pipe()
        parent = os.fork()
        if parent == 0:
            if os.fork():
                os._exit(0)
            os.close(ready)
            os.read(waiting, 1)  # it is the launcher's child now
            os.close(waiting)
            os.setsid()
            pipe.send(os.getpid())
            pipe.close()
            os.environ.clear()
            os.environ.update(environment)
            if outputs:
                os.environ[TERMINAL_VARIABLE] = " ".join(str(os.dup(number)) for number in (1, 2))
            if outputs and outputs[0].exists():  # else it writes to the terminal
                _write_to(*outputs)
            _run(name, arguments)
        os.waitpid(parent, 0)
        os.close(waiting)
        os.close(ready)


def _main(
    name: str,
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    outputs: tuple[Path, Path],
    before: Callable[[], object] | None,
    forks_ranks: bool,
) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the environment
    _write_to(*outputs)
    if before is not None:
        before()
    if forks_ranks:
        starter = RankStarter()
        launcher.start = starter.start  # type: ignore[assignment]
        subprocess_script.subprocess = SimpleNamespace(Popen=starter.popen)  # type: ignore[assignment]
    _run(name, arguments)


def _run(name: str, arguments: Sequence[str]) -> NoReturn:
    """Do what `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS` does, in this process and to its end."""
    sys.argv = [name, *arguments]
    if not name.endswith(".py"):
        _end(importlib.import_module(name).main)
    sys.path.insert(0, str(Path(name).parent))
    atexit._clear()  # what the server's imports have left
    _end(lambda: runpy.run_path(name, run_name="__main__") and None, atexit._run_exitfuncs)  # names are no exit code


def _end(main: Callable[[], Any], leave: Callable[[], object] = bool) -> NoReturn:
    """Run it and end this process, after `leave`, with the code that it returns or exits with."""
    code: Any = 1
    try:
        code = main()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _write_to(out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
