"""`moe-train`, its local ranks and scripts in forked processes: what a user's command does, without its imports.

The tests of launchers, and some test of every kind of command, start interpreters of their own. Not for elastic runs:
their launcher hosts the rendezvous, whose threads may hold locks that a forked rank would wait for. Ranks share nothing
with the one thread of other launchers, the store's.
"""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_lightning.elastic import launcher
from tests.forks import PATIENCE_S, forked
from tests.programs import users_environment

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


def moe_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `moe-train ARGUMENTS` in a folder: its exit code, and what it and its first rank wrote."""
    return _ended(folder, _command_main, arguments, users_environment())


def run_script(script: Path, *arguments: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS` in the script's folder with these variables besides a user's."""
    return _ended(script.parent, _script_main, (str(script), *arguments), {**users_environment(), **variables})


def _ended(
    folder: Path, main: Callable[..., NoReturn], arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    out, err = folder / ".stdout", folder / ".stderr"
    with forked(_main, main, arguments, str(folder), environment, (out, err)) as process:
        process.join(PATIENCE_S)
        assert process.exitcode is not None, f"{arguments} did not end: {out.read_text()}{err.read_text()}"
    return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


class ForkedRank:
    """A rank as its launcher sees it: the part of subprocess.Popen that launchers use."""

    def __init__(self, module: str, arguments: Sequence[str], variables: Mapping[str, str], outputs: tuple[Path, Path]):
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.environ.update(variables)
            if outputs[0].exists():  # else it writes to the terminal
                _write_to(*outputs)
            _run_module(module, arguments)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _main(
    main: Callable[[Sequence[str]], NoReturn],
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    outputs: tuple[Path, Path],
) -> NoReturn:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _write_to(*outputs)
    main(arguments)


def _command_main(arguments: Sequence[str]) -> NoReturn:
    launcher.start = _fork_ranks  # type: ignore[assignment]
    _run_module("moe_lightning.cli.train", arguments)


def _script_main(arguments: Sequence[str]) -> NoReturn:
    sys.argv = list(arguments)
    _end(lambda: runpy.run_path(arguments[0], run_name="__main__") and None)  # its names are no exit code


def _fork_ranks(
    program: Sequence[str], environments: Mapping[int, dict[str, str]], logs: launcher.WorkerLogs
) -> dict[int, Any]:
    """What `processes.start` does, by forking."""
    option, module, *arguments = program
    assert option == "-m"
    logs.reify(dict(environments))
    return {
        rank: ForkedRank(module, arguments, variables, (logs.path(rank, "out"), logs.path(rank, "err")))
        for rank, variables in environments.items()
    }


def _run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """What `python -m MODULE ARGUMENTS` does, in this process and to its end."""
    sys.argv = [module, *arguments]
    _end(importlib.import_module(module).main)


def _end(main: Callable[[], Any]) -> NoReturn:
    """Run it and end this process with the code that it returns or exits with."""
    code: Any = 1
    try:
        code = main()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _write_to(out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
