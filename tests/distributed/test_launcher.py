"""The launcher: the ranks' environment, one report of a failure, and no process left behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_lightning.cores import usable_cores
from moe_lightning.elastic import launcher as processes
from moe_lightning.elastic.launcher import LocalLauncher, RanksFailed, WorkerLogs
from moe_lightning.elastic.worker import RankFailure
from tests.commands import ForkedProgram
from tests.parameters import slow
from tests.programs import ROOT, Program, Watched

LAUNCHED = "tests.distributed.launched"
GRACE_S = 120.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and waits on process descriptors")


def _launch(behaviour: str, folder: Path, ranks: int = 2) -> None:
    LocalLauncher(num_ranks=ranks, log_dir=folder / "logs", module=LAUNCHED).run([behaviour, str(folder)])


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_environment_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    _launch("environment", tmp_path, ranks=3)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert [e["RANK"] for e in seen] == [e["LOCAL_RANK"] for e in seen] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in seen} == {"3"}
    assert {e["NODE_RANK"] for e in seen} == {"0"}
    assert len({e["MOE_LIGHTNING_STORE"] for e in seen}) == 1
    assert {e["OMP_NUM_THREADS"] for e in seen} == {str(max(1, usable_cores() // 3))}
    assert seen[0]["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_ranks_meet_in_a_folder_of_this_user_alone(tmp_path: Path) -> None:
    launcher = LocalLauncher(num_ranks=1, log_dir=tmp_path / "logs", module=LAUNCHED)
    folders = []
    for _ in range(2):
        launcher.run(["folder", str(tmp_path)])
        told = json.loads((tmp_path / "rank0.json").read_text())
        assert (told["mode"], told["owner"]) == (0o700, os.geteuid())
        folders.append(Path(told["folder"]))
    assert folders[0] != folders[1]
    assert not any(folder.exists() for folder in folders)


def test_variables_that_the_user_set_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _launch("environment", tmp_path, ranks=1)
    assert json.loads((tmp_path / "rank0.json").read_text())["OMP_NUM_THREADS"] == "7"


def _failure(behaviour: str, folder: Path) -> RankFailure:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(RanksFailed) as raised:
        _launch(behaviour, folder)
    assert signal.getsignal(signal.SIGINT) is handler
    return raised.value.failure


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    failure = _failure("mistake", tmp_path)
    assert (failure.kind, failure.message) == ("mistake", "a value is wrong")


def test_a_crash_brings_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    failure = _failure("crash", tmp_path)
    assert (failure.rank, failure.kind, failure.details) == (1, "crash", "Traceback: ...")


def test_a_rank_without_a_word_is_told_by_its_code_and_log_which_is_private(tmp_path: Path) -> None:
    failure = _failure("silent", tmp_path)
    assert (failure.rank, failure.message, failure.details) == (1, "rank 1 exited with code 3", "last words")
    assert (tmp_path / "logs").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "logs").iterdir())


def test_a_killed_rank_is_told_by_its_signal(tmp_path: Path) -> None:
    failure = _failure("killed", tmp_path)
    assert (failure.rank, failure.message) == (1, "rank 1 was killed by SIGKILL")


def test_a_log_is_read_from_its_end(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path, "rank0")
    with logs.path("err").open("wb") as file:
        file.truncate(256 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast words\n")
    tracemalloc.start()
    failure = logs.failure(-40, "rank", 0)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert failure.message == "rank 0 was killed by signal 40"
    assert failure.details.endswith("\nlast words")


@dataclass
class Command:
    """A launcher in a process of its own, and its two ranks."""

    program: Program
    ranks: Watched


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Command]:
    with _launched(request.param, tmp_path) as command:
        yield command


@contextmanager
def _launched(behaviour: str, folder: Path, *, first: str = "") -> Iterator[Command]:
    """A launcher whose two ranks wait, in a forked process, which imports nothing.

    Args:
        first: code that is run before.
    """
    os.mkfifo(folder / "ready")
    options = f"num_ranks=2, log_dir=Path({str(folder)!r}), module={LAUNCHED!r}, grace_s={GRACE_S}"
    code = (
        "import signal\n"
        "from pathlib import Path\n"
        "from moe_lightning.elastic.worker import Interrupted\n"
        "from moe_lightning.elastic.launcher import LocalLauncher\n"
        f"{first}\n"
        f"try:\n    LocalLauncher({options}).run([{behaviour!r}, {str(folder)!r}])\n"
        "except Interrupted as stop:\n    raise SystemExit(128 + stop.signal)\n"
    )
    (folder / "launch.py").write_text(code)
    with ForkedProgram(str(folder / "launch.py"), folder=ROOT, forks_ranks=False) as program:
        pids: list[int] = []
        with (folder / "ready").open() as pipe:
            while len(pids) < 2:
                pids += [int(line) for line in pipe]
        with Watched(pids) as ranks:
            yield Command(program, ranks)


@linux
@pytest.mark.parametrize("command", ["waiting"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_ends_everything(command: Command, number: signal.Signals) -> None:
    os.kill(command.program.process.pid, number)
    assert command.program.end().returncode == 128 + number
    assert command.ranks.all_end(timeout_s=0)


@linux
def test_a_closed_terminal_does_not_end_what_nohup_protects(tmp_path: Path) -> None:
    """nohup makes its command ignore SIGHUP."""
    with _launched("waiting", tmp_path, first="signal.signal(signal.SIGHUP, signal.SIG_IGN)") as command:
        os.kill(command.program.process.pid, signal.SIGHUP)
        assert not command.ranks.all_end(timeout_s=0.5)
        os.kill(command.program.process.pid, signal.SIGINT)
        assert command.program.end().returncode == 128 + signal.SIGINT


@linux
@pytest.mark.parametrize("outputs", [(1,), (1, 2)])
def test_ranks_save_where_ctrl_c_has_ended_the_reader_of_their_output(outputs: tuple[int, ...], tmp_path: Path) -> None:
    """As in `moe-train | tee log` and `moe-train 2>&1 | tee log`."""
    broken = "import os; reader, writer = os.pipe(); os.close(reader)"
    broken += "".join(f"; os.dup2(writer, {output})" for output in outputs)
    with _launched("saving", tmp_path, first=broken) as command:
        os.kill(command.program.process.pid, signal.SIGINT)
        assert command.program.end().returncode == 128 + signal.SIGINT
    assert [(tmp_path / f"saved{rank}").exists() for rank in range(2)] == [True, True]


def test_a_new_rank_0_writes_to_a_launchers_socket(tmp_path: Path) -> None:
    """The output of a service: a socket cannot be opened by its path."""
    worker = "from moe_lightning.elastic.worker import *; write_to_terminal('a'); take_over_terminal(); print('b')"
    code = (
        "import os, pathlib, socket\n"
        "from moe_lightning.elastic.launcher import WorkerLogs, start\n"
        "ours, theirs = socket.socketpair()\n"
        "shown = os.dup(1)\n"
        "os.dup2(theirs.fileno(), 1), os.dup2(theirs.fileno(), 2)\n"
        f"logs = WorkerLogs(pathlib.Path({str(tmp_path)!r}), 'rank1')\n"
        f"start(('-c', {worker!r}), {{}}, logs).wait()\n"
        "os.write(shown, ours.recv(100, socket.MSG_DONTWAIT))\n"
    )
    with Program("-c", code, folder=ROOT) as program:
        assert program.end().stdout == "a\nb\n"
    assert (tmp_path / "rank1.err").read_text() == "a\n"


@linux
@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_full_disk_of_the_log_ends_nothing(options: tuple[str, ...]) -> None:
    code = (
        "import os\n"
        "from moe_lightning.elastic.worker import outlive_readers\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "outlive_readers()\n"
        "print('lost', flush=True)\n"
    )
    with Program(*options, "-c", code, folder=ROOT) as program:
        assert program.end().returncode == 0


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_output_that_is_read_arrives_in_its_order(options: tuple[str, ...]) -> None:
    code = (
        "import os, sys\n"
        "from moe_lightning.elastic.worker import outlive_readers\n"
        "print('one')\n"
        "outlive_readers(), outlive_readers()\n"
        "print('two \u00e9', flush=True)\n"
        "os.write(1, b'three\\n')\n"
        "print('four')\n"
    )
    with Program(*options, "-c", code, folder=ROOT) as program:
        assert program.end().stdout == "one\ntwo \u00e9\nthree\nfour\n"


@linux
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, 7), (signal.SIGHUP, -signal.SIGKILL)]
)
def test_ranks_may_save_when_a_user_or_a_scheduler_ends_them(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long that takes; there is no other grace here."""
    saving = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "print(flush=True)\n"
        "while True:\n    time.sleep(0.05)"  # a signal just before `signal.pause` would not end it
    )
    with Program("-c", saving) as rank:
        rank.wait_for(lambda: bool(rank.out))
        processes.end_on_signal([rank.process], number, grace_s=0.0)
        assert rank.process.returncode == code
    assert ("save; another signal ends them at once" in capsys.readouterr().err) == (code == 7)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("command", ["stubborn"], indirect=True)
def test_a_second_signal_ends_stubborn_ranks_at_once(command: Command) -> None:
    os.kill(command.program.process.pid, signal.SIGINT)
    assert not command.ranks.all_end(timeout_s=0.5)
    os.kill(command.program.process.pid, signal.SIGINT)
    assert command.program.end(GRACE_S / 2).returncode == 128 + signal.SIGINT
    assert command.ranks.all_end(timeout_s=0)


@linux
@pytest.mark.parametrize("command", ["stubborn"], indirect=True)
def test_no_rank_outlives_a_killed_launcher(command: Command) -> None:
    command.program.process.kill()
    assert command.ranks.all_end(timeout_s=60)
