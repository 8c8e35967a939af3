"""What the README shows works: its commands in order, its example as a user would run it, the test command of CI."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.commands import ForkedProgram
from tests.programs import ROOT, Program, run_program, users_environment

README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    match = re.search(rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert match is not None, f"README.md has no block after <!-- {marker} -->"
    return match.group(1)


SHORT = (
    "optimizer.warmup_steps=5", "trainer.max_steps=20", "trainer.log_every_n_steps=5", "trainer.val_check_interval=20",
    "trainer.limit_val_batches=2", "data.global_batch_size=8",
)  # fmt: skip
"""Settings that make the trainings of README and Start take seconds."""
SHORTER = (
    *SHORT, "optimizer.warmup_steps=1", "trainer.max_steps=2", "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2",
)  # fmt: skip
MODULES = {f"moe-{name}": f"moe_lightning.cli.{name}" for name in ("train", "bench", "generate", "ckpt")}
_ELSEWHERE = ("HOST", ".[test]", ".[docs]")
"""Words of blocks that are not run here: for several machines, for the tests, for the site."""
_PAIR = re.compile(r"```bash\n(.*?)```\n+(?:```text\n(.*?)```)?", re.DOTALL)
_NUMBER = re.compile(r"\d[\d,.]*(?:e[-+]?\d+)?[kMGB]?")


def shown() -> Iterator[tuple[str, str]]:
    """Blocks of commands in README and Start that run on one machine, in order, each with the output shown below it."""
    for page in (README, (ROOT / "docs" / "start.md").read_text()):
        for commands, transcript in _PAIR.findall(page):
            if not any(word in commands for word in _ELSEWHERE):
                yield commands, transcript


def form(text: str) -> list[str]:
    """Lines of an output without what differs between two runs: numbers and the width of columns."""
    return [_NUMBER.sub("N", " ".join(line.split())) for line in text.splitlines() if line.strip() not in ("", "...")]


Run = Callable[[str, Path, bool], str]
"""Runs a block of commands in a folder and returns all output, and may kill a worker as soon as training has begun."""


def in_bash(commands: str, folder: Path, kills: bool) -> str:
    """Run a block as a user pastes it, with the programs of this environment."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name, line in {
        "pip": "exit 0",
        **{name: f'exec {sys.executable} -m {module} "$@"' for name, module in MODULES.items()},
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    bash = "import os, sys; os.execvp('bash', ['bash', '-ec', sys.argv[1]])"
    return ended(Program("-c", bash, commands, folder=folder, variables=variables), kills)


def in_forks(commands: str, folder: Path, kills: bool, settings: Sequence[str] = SHORT) -> str:
    """Run the commands of a block, shortened, without a shell and without imports."""
    found = [shlex.split(line.removeprefix("pip install -e . && "), comments=True) for line in commands.splitlines()]
    outputs = []
    for name, *arguments in filter(None, found):
        short = settings if name == "moe-train" else ()
        program = ForkedProgram(MODULES[name], *arguments, *short, folder=folder)
        outputs.append(ended(program, kills and name == "moe-train"))
    return "".join(outputs)


def ended(program: Program, kills: bool) -> str:
    with program:
        if kills:
            program.wait_for(lambda: "\nstep" in program.out)
            workers = re.findall(r"worker \d+: (\d+)", program.err)
            os.kill(int(workers[-1]), signal.SIGKILL)
        done = program.end(timeout_s=600)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def output_as_shown(run: Run, folder: Path, commands: str, transcript: str) -> str:
    """Run a block and return its output, which has the lines of the transcript in their order."""
    output = run(commands, folder, "SIGKILL" in transcript)
    seen = iter(form(output))
    for line in form(transcript):
        assert line in seen, (
            f"README or Start shows {line!r}, but {commands}prints, in another order or form:\n{output}"
        )
    return output


def test_the_first_command_trains(tmp_path: Path) -> None:
    output = output_as_shown(partial(in_forks, settings=SHORTER), tmp_path, *next(shown()))
    assert "outputs/quickstart" in output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform != "linux", reason="elastic workers need Linux")
@pytest.mark.parametrize("run", [in_forks, in_bash])
def test_commands_run_in_order_in_one_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "fresh"
    folder.mkdir()
    outputs = [output_as_shown(run, folder, commands, transcript) for commands, transcript in shown()]
    assert len(outputs) >= 3
    assert not any("has finished its" in output for output in outputs[:2]), "README's second command must train"

    steps = [line.split("  #")[0].strip() for line in outputs[0].partition("\nnext ")[2].splitlines()]
    assert len(steps) == 5
    for step in steps:
        if not step.startswith(("the same command", "wandb")):  # no command; needs a login
            run(step, folder, False)


@pytest.mark.slow
def test_own_module_trains_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block_after("example: own module"))
    done = run_program(script, folder=tmp_path, variables={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_epochs=4" in done.stderr + done.stdout


def test_the_readme_shows_the_test_command() -> None:
    assert block_after("test command").strip() == 'pip install -e ".[test]" && pytest -n 2'


@pytest.mark.parametrize(("failing", "code"), [(None, 0), ("ruff", 1), ("mypy", 1), ("sphinx-build", 1), ("pytest", 1)])
def test_ci_checks_beside_the_test_command_of_the_readme(failing: str | None, code: int, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = Path(shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run"))
    (tmp_path / "README.md").write_text(README)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python", "pip", "ruff", "mypy", "sphinx-build", "pytest"):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*"\nexit {int(name == failing)}\n')
        tool.chmod(0o755)
    # In place of `python -m venv FOLDER`: an environment with nothing in it.
    (tools / "python").write_text('#!/bin/sh\nmkdir -p "$3/bin" && touch "$3/bin/activate"\n')
    variables = users_environment() | {"PYTHON": str(tools / "python"), "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([script], env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("+")]
    notes = [line for line in said if line.startswith("failed:")]
    assert len(notes) == (failing is not None)
    assert all(str(failing) in note for note in notes)
    assert [line for line in said if line not in notes] == [
        "pip install -e .[test]",
        "pytest -n 2",
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "sphinx-build -q -W --keep-going docs build/docs",
        "pytest -n 2",  # its summary again
    ]
