"""The elastic launcher: dead workers are told of at once and started again, and no process is left however it ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.elastic.launcher import ElasticLauncher, RanksFailed
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.worker import RankFailure
from moe_lightning.errors import ConfigurationError
from tests.commands import ForkedProgram
from tests.parameters import slow, soak
from tests.programs import ROOT, Program, run_program
from tests.races import LOST_WAKE_UP

LAUNCHED = "tests.distributed.launched"
SCRIPT = Path(__file__).with_name("elastic_script.py")
RUN = ("-m", "moe_lightning.elastic.run")
QUICK = tuple(
    word
    for setting in (
        *("heartbeat_timeout_s=0.4", "silence_timeout_s=1", "build_timeout_s=2", "hang_timeout_s=4"),
        *("join_window_s=0.3", "start_timeout_s=30"),
    )
    for word in ("--set", setting)
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and takes the launcher's terminal over")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def launcher(folder: Path, **options: Any) -> ElasticLauncher:
    defaults: dict[str, Any] = {"num_ranks": 2, "module": LAUNCHED, "cool_down_s": 0.0, "grace_s": 2.0}
    return ElasticLauncher(**{**defaults, "log_dir": folder / "logs", **options})


def failure(folder: Path, behaviour: str, **options: Any) -> RankFailure:
    with pytest.raises(RanksFailed) as raised:
        launcher(folder, **options).run([behaviour, str(folder)])
    return raised.value.failure


@pytest.mark.slow
def test_environment_of_the_workers(tmp_path: Path) -> None:
    launcher(tmp_path, num_ranks=3, settings=ElasticSettings(min_ranks=2)).run(["environment", str(tmp_path)])
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    tasks = [json.loads(e["MOE_LIGHTNING_ELASTIC"]) for e in seen]
    assert [e["LOCAL_RANK"] for e in seen] == ["0", "1", "2"]
    assert [t["slot"] for t in tasks] == [0, 1, 2]
    assert {t["expected"] for t in tasks} == {3}
    assert {t["settings"]["min_ranks"] for t in tasks} == {2}
    assert len({t["token"] for t in tasks}) == 3
    assert all(t["address"].startswith("unix:") for t in tasks), "no port"
    assert all("MOE_LIGHTNING_STORE" not in e for e in seen), "that one is for worlds that do not change"


@pytest.mark.parametrize(
    ("options", "nodes"),
    [slow({}, {"local-0", "local-1"}), ({"ranks_are_nodes": False}, {"local"}), ({"node": "a"}, {"a-0", "a-1"})],
)
def test_the_ranks_of_one_machine_count_as_nodes(options: dict[str, Any], nodes: set[str], tmp_path: Path) -> None:
    launcher(tmp_path, **options).run(["environment", str(tmp_path)])
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert {json.loads(e["MOE_LIGHTNING_ELASTIC"])["node"] for e in seen} == nodes


def test_the_ranks_of_several_machines_share_their_node(tmp_path: Path) -> None:
    several = {"num_nodes": 2, "rdzv_endpoint": "localhost:1", "secret_file": "secret"}
    assert not launcher(tmp_path, **several).splits_node
    assert launcher(tmp_path, **several, ranks_are_nodes=True).splits_node


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    told = failure(tmp_path, "mistake")
    assert (told.kind, told.message) == ("mistake", "a value is wrong")


def test_what_cannot_go_on_without_a_rank_elsewhere_is_not_started_again(tmp_path: Path) -> None:
    told = failure(tmp_path, "peer")
    assert (told.kind, told.message) == ("peer", "rank 7 on node far was killed by SIGKILL")


def test_the_same_death_again_and_again_ends_the_run(tmp_path: Path) -> None:
    told = failure(tmp_path, "killed", max_restarts=2)
    assert (told.rank, told.message) == (1, "worker 1 was killed by SIGKILL, after 2 restarts (max_restarts)")
    assert (tmp_path / "logs" / "rank1.3.err").is_file()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "logs").iterdir())


@pytest.mark.slow
def test_the_same_crash_three_times_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another one before counts for itself; each traceback is shown once."""
    told = failure(tmp_path, "crashes")
    assert told.message == "ValueError: no, 3 times in the same way: see its traceback above"
    assert told.details == ""
    assert not (tmp_path / "logs" / "rank1.6.err").exists()
    shown = capfd.readouterr().err
    assert [shown.count(f"Traceback: train.py:{line}") for line in (1, 2)] == [1, 1]


def test_messages_have_the_commands_name_and_the_process_ids(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failure(tmp_path, "killed", max_restarts=1, program="elastic")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("elastic: ")]
    assert re.fullmatch(r"elastic: process ids: worker 0: \d+, worker 1: \d+", lines[0])
    assert lines[1] == "elastic: worker 1 was killed by SIGKILL; started again in 0 s (1 of 1)"
    assert re.fullmatch(r"elastic: process ids: worker 1: \d+", lines[2])


@pytest.mark.slow
def test_messages_stand_in_the_place_of_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal("step 3"))
    failure(tmp_path, "killed", max_restarts=1, program="elastic")
    assert "\r\x1b[2Kelastic: worker 1 was killed by SIGKILL" in sys.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"num_nodes": 2}, "num_nodes=2 needs rdzv_endpoint"),
        ({"settings": ElasticSettings(min_ranks=3)}, "min_ranks=3 is above the 2 ranks"),
        ({"rdzv_endpoint": "host:1"}, "rdzv_endpoint=host:1 needs secret_file=FILE"),
        ({"rdzv_endpoint": "host", "secret_file": Path("secret")}, "'host' must be HOST:PORT"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        launcher(tmp_path, **options).run(["environment", str(tmp_path)])


class Command:
    """`python -m moe_lightning.elastic.run` on the script.

    Args:
        is_forked: start it, and its workers, without imports.
        script: in place of the usual one.
    """

    def __init__(self, folder: Path, *options: str, is_forked: bool = False, script: Path = SCRIPT) -> None:
        quick = ("--set", "heartbeat_timeout_s=3", "--set", "join_window_s=0.3")
        arguments = ("--log-dir", str(folder / "logs"), *quick, *options, str(script), str(folder))
        self.folder = folder
        self.program = (
            ForkedProgram(RUN[1], *arguments, folder=folder) if is_forked else Program(*RUN, *arguments, folder=folder)
        )
        self.process = self.program.process

    def worlds(self) -> list[dict[str, Any]]:
        path = self.folder / "worlds"
        lines = path.read_text().split("\n") if path.exists() else []
        return [json.loads(line) for line in lines[:-1]]

    def wait_for_world(self, size: int, *, after: int = 0) -> list[dict[str, Any]]:
        """The lines of a whole world of that size, beyond the first `after` lines."""
        self.program.wait_for(lambda: sum(w["size"] == size for w in self.worlds()[after:]) >= size)
        return sorted((w for w in self.worlds()[after:] if w["size"] == size), key=lambda w: int(w["rank"]))

    def wait_for_all(self, size: int) -> None:
        """Wait until workers that live make up the newest world, of that size, and have done a step in it."""

        def are_together() -> bool:
            worlds = self.worlds()
            newest = [w for w in worlds if w["number"] == max(w["number"] for w in worlds)]
            return len(newest) == size == newest[0]["size"] and not any(is_gone(w["pid"]) for w in newest)

        self.program.wait_for(are_together)

    def end_well(self) -> tuple[str, str]:
        """Let it end; what it printed."""
        (self.folder / "stop").touch()
        done = self.program.end()
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    with contextlib.ExitStack() as stack:

        def start(*options: str, **how: bool) -> Command:
            command = Command(tmp_path, *options, **how)
            stack.enter_context(command.program)
            return command

        yield start


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_rank_0_is_killed_and_comes_back(commands: Callable[..., Command]) -> None:
    command = commands("--ranks", "3", is_forked=True)
    first = command.wait_for_world(3)
    victim = first[0]
    os.kill(victim["pid"], signal.SIGKILL)
    survivors = command.wait_for_world(2, after=3)
    assert {w["pid"] for w in survivors} == {first[1]["pid"], first[2]["pid"]}
    assert {w["reason"] for w in survivors} == {"rank 0 on node local-0 was killed by SIGKILL"}
    again = command.wait_for_world(3, after=5)
    assert again[2]["slot"] == victim["slot"], "the fresh process is the youngest"
    assert again[2]["starts"] == 2
    out, err = command.end_well()
    assert "a world of 2" in out, "the new rank 0 writes to the terminal"
    assert f"worker {victim['slot']} was killed by SIGKILL; started again in 1 s (1 of 20)" in err
    assert all(is_gone(w["pid"]) for w in command.worlds())


@pytest.mark.slow
def test_a_signal_ends_everything(commands: Callable[..., Command]) -> None:
    command = commands("--ranks", "2")
    command.wait_for_world(2)
    command.process.send_signal(signal.SIGINT)
    assert command.program.end().returncode == 128 + signal.SIGINT
    assert all(is_gone(w["pid"]) for w in command.worlds())


@pytest.mark.slow
def test_a_preempted_worker_leaves_and_is_not_replaced(commands: Callable[..., Command]) -> None:
    command = commands("--ranks", "2", "--set", "notice_on_sigterm=true")
    first = command.wait_for_world(2)
    os.kill(first[1]["pid"], signal.SIGTERM)
    (alone,) = command.wait_for_world(1, after=2)
    assert alone["pid"] == first[0]["pid"]
    assert alone["reason"] is None, "nothing broke"
    _, err = command.end_well()
    assert "started again" not in err


@pytest.mark.slow
def test_a_node_is_lost_with_its_launcher(commands: Callable[..., Command], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with RendezvousServer(bind="127.0.0.1:0", secret_file=secret) as host:
        where = ("--rdzv-endpoint", str(host.address), "--secret-file", str(secret))
        options = ("--ranks", "1", "--num-nodes", "2", *where)
        nodes = [commands(*options, "--node", name, is_forked=True) for name in "ab"]
        first = nodes[0].wait_for_world(2)
        assert sorted(first[0]["nodes"]) == ["a", "b"]
        lost = first[0]["nodes"].index("b")
        nodes[1].process.kill()
        (alone,) = nodes[0].wait_for_world(1, after=2)
        assert alone["nodes"] == ["a"]
        assert alone["pid"] == first[1 - lost]["pid"]
        nodes[0].end_well()


@pytest.mark.slow
def test_a_frozen_worker_is_killed_by_its_launcher(commands: Callable[..., Command]) -> None:
    timeouts = ("silence_timeout_s=1.5", "build_timeout_s=2", "hang_timeout_s=2.5")
    command = commands("--ranks", "2", *(word for timeout in timeouts for word in ("--set", timeout)))
    first = command.wait_for_world(2)
    (command.folder / f"freeze-{first[1]['slot']}").touch()
    (alone,) = command.wait_for_world(1, after=2)
    assert alone["pid"] == first[0]["pid"]
    again = command.wait_for_world(2, after=3)  # its place is taken once its launcher has killed it
    assert again[1]["starts"] == 2
    assert is_gone(first[1]["pid"])
    command.end_well()


@pytest.mark.slow
def test_a_worker_that_hangs_ends_itself(commands: Callable[..., Command]) -> None:
    command = commands("--ranks", "3", *QUICK, is_forked=True)
    first = command.wait_for_world(3)
    (command.folder / f"hang-{first[1]['slot']}").touch()
    os.kill(first[2]["pid"], signal.SIGKILL)
    again = command.wait_for_world(3, after=3)
    assert again[0]["pid"] == first[0]["pid"]
    _, err = command.end_well()
    assert "the main thread did not come back within 4 s after its world broke" in err


@pytest.mark.parametrize("moment", ["", slow(" 0.0"), slow(" 0.002"), slow(" 0.008")])
@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_a_worker_is_lost_while_groups_are_built(
    fate: str, moment: str, commands: Callable[..., Command], tmp_path: Path
) -> None:
    """The others meet without a stopped one, and with the process that replaces a killed one, perhaps before."""
    (tmp_path / "fate-1").write_text(fate + moment)
    command = commands("--ranks", "3", *QUICK, is_forked=True)
    lives = {(w["slot"], w["starts"]) for w in command.wait_for_world(3 if fate == "SIGKILL" else 2)}
    assert lives == {(0, 1), (2, 1)} | ({(1, 2)} if fate == "SIGKILL" else set())
    command.end_well()


@pytest.mark.slow
@pytest.mark.known_race(LOST_WAKE_UP)
@pytest.mark.parametrize("seed", [*range(3), *range(1000, 1010), *map(soak, range(1010, 1200))])
def test_random_kills_stops_and_continuations(seed: int, commands: Callable[..., Command]) -> None:
    """Whoever lives ends up in one world, without a hang. A seed is a schedule, so a failure can be repeated."""
    rng = random.Random(seed)
    command = commands("--ranks", "4", *QUICK, "--set", "start_timeout_s=5", is_forked=True)
    stopped: dict[int, int] = {}  # slot -> process
    command.wait_for_all(4)
    for _ in range(4):
        pids = {w["slot"]: w["pid"] for w in command.worlds()}
        alive = sorted(pids.keys() - stopped.keys())
        for victim in rng.sample(alive, min(len(alive) - 1, rng.randint(1, 2))):
            time.sleep(rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.8)]))  # the schedule itself
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            if is_gone(pids[victim]):
                continue  # and its successor is in no world yet
            os.kill(pids[victim], number)
            if number == signal.SIGSTOP:
                stopped[victim] = pids[victim]
        if stopped and rng.random() < 0.5:
            os.kill(stopped.popitem()[1], signal.SIGCONT)
        if rng.random() < 0.5:
            command.wait_for_all(4 - len(stopped))  # else the next faults fall into the recovery
    for pid in stopped.values():
        os.kill(pid, signal.SIGCONT)
    command.wait_for_all(4)
    command.end_well()


@pytest.mark.slow
def test_a_script_that_says_nothing_of_devices_trains_on_the_ranks_of_its_launcher(tmp_path: Path) -> None:
    script = Path(__file__).with_name("plain_script.py")
    done = run_program(*RUN, "--ranks", "2", script, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"ranks-{rank}").read_text() for rank in range(2)] == ["2 2", "2 2"]
    assert "started again" not in done.stderr
    for log in (done.stderr, (tmp_path / "logs" / "rank1.err").read_text()):
        assert "nanobind" not in log
        assert "terminate called" not in log


@pytest.mark.slow
def test_rank_0_of_a_script_has_time_after_the_others_have_ended(tmp_path: Path) -> None:
    script = Path(__file__).with_name("plain_script.py")
    (tmp_path / "export").touch()
    done = run_program(*RUN, "--ranks", "2", *QUICK, script, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "exported").read_text() == "None"


@pytest.mark.slow
def test_a_rank_that_is_killed_before_training_is_started_again(tmp_path: Path) -> None:
    """With all others, which have nothing to lose yet."""
    script = Path(__file__).with_name("plain_script.py")
    (tmp_path / "die").touch()
    done = run_program(*RUN, "--ranks", "2", script, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "die").exists()
    assert [(tmp_path / f"ranks-{rank}").read_text() for rank in range(2)] == ["2 2", "2 2"]
    assert "worker 1 was killed by SIGKILL; started again" in done.stderr
    assert "was killed by SIGKILL before it trained, so all ranks start again; started again" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_who_crashes_before_training_is_named_on_every_machine(nodes: int, tmp_path: Path) -> None:
    """Two ranks, of one launcher or two, of which rank 1 fails in a hook of the user's before the training loop."""
    script = Path(__file__).with_name("plain_script.py")
    (tmp_path / "crash").touch()
    with (
        RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host,
        contextlib.ExitStack() as stack,
    ):
        where = ["--num-nodes", "2", "--rdzv-endpoint", str(host.address), "--secret-file", str(tmp_path / "secret")]
        running = [
            stack.enter_context(
                Program(
                    *(*RUN, "--ranks", str(2 // nodes), "--log-dir", tmp_path / f"logs-{node}"),
                    *([*where, "--node", node] if nodes == 2 else []),
                    *(script, tmp_path),
                    folder=tmp_path,
                )
            )
            for node in "ab"[:nodes]
        ]
        done = [each.end() for each in running]
    assert [each.returncode for each in done] == [1] * nodes
    for text in (each.stderr for each in done):
        assert "ValueError: these data are damaged" in text
        assert "closed by peer" not in text
        assert "reset by peer" not in text
