"""Programs in interpreters of their own, as a user starts them: `python ARGUMENTS`.

For what a fresh start, signals and ends are about; everything else is forked (tests/forks.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.forks import PATIENCE_S

ROOT = Path(__file__).parents[1]
TESTS = {"PYTHONPATH": str(ROOT)}
"""Variables for a program that imports the tests."""

_OURS = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "PL_GLOBAL_SEED", "WANDB_API_KEY", "WANDB_MODE", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
"""Variables of the tests' own environment that a user's command would not see."""
_POLL_S = 0.02


def exit_code(main: Callable[..., object], *arguments: object) -> object:
    """The code with which the function of a command ends its process."""
    with pytest.raises(SystemExit) as ended:
        main(*arguments)
    return ended.value.code


def users_environment() -> dict[str, str]:
    """What a user's command finds in its environment."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return kept | {"OMP_NUM_THREADS": "1"}


class Program:
    """A running `python ARGUMENTS`; it ends with the block, and with it all of its session.

    It writes to files, so that nobody waits for others that it leaves and that have its outputs open.
    """

    def __init__(
        self, *arguments: str | Path, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="program-")
        self._out, self._err = Path(self._files.name, "out"), Path(self._files.name, "err")
        command = [sys.executable, *map(str, arguments)]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=users_environment() | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """What it has written so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait for something that it does while it runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.out}{self.err}"
            assert time.monotonic() < deadline, f"nothing in {timeout_s:g} s: {self.out}{self.err}"
            time.sleep(_POLL_S)

    def end(self, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Its exit code and outputs, once it has ended by itself."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {timeout_s:g} s: {self.out}{self.err}") from None
        return subprocess.CompletedProcess(self.process.args, code, self.out, self.err)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # one that has not made its session yet
        self.process.wait()
        self._files.cleanup()


def run_program(
    *arguments: str | Path,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end: its exit code and outputs.

    Args:
        folder: where it runs; the tests' own.
        variables: besides a user's.
    """
    with Program(*arguments, folder=folder, variables=variables) as program:
        return program.end(timeout_s)


class Watched(contextlib.ExitStack):
    """Processes of somebody else, by descriptors that no other process can take over as it may their numbers."""

    def __init__(self, pids: Iterable[int]) -> None:
        super().__init__()
        self._descriptors = []
        for pid in pids:
            self._descriptors.append(os.pidfd_open(pid))
            self.callback(os.close, self._descriptors[-1])

    def __len__(self) -> int:
        return len(self._descriptors)

    def all_end(self, timeout_s: float) -> bool:
        """Whether they have all ended in time."""
        waiting, deadline = set(self._descriptors), time.monotonic() + timeout_s
        while waiting:
            ended, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                return False
            waiting -= set(ended)
        return True


def children_of(parent: int) -> list[int]:
    """The numbers of a process's children."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
