"""The elastic launcher's loop over its workers, which are shells here, without a rendezvous host."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from moe_lightning.elastic import launcher, worker
from moe_lightning.elastic.etcd import EtcdError
from moe_lightning.elastic.etcd_rendezvous import EtcdRendezvous, Leader
from moe_lightning.elastic.launcher import (
    ElasticLauncher,
    LocalLauncher,
    RanksFailed,
    WorkerLogs,
    restored_signal_handlers,
)
from moe_lightning.elastic.membership import ELASTIC_VARIABLE, ElasticSettings, ElasticTask
from moe_lightning.elastic.protocol import Address, interface_towards
from moe_lightning.elastic.worker import Interrupted
from moe_lightning.errors import ConfigurationError

PATIENCE_S = 20.0


class Link:
    """Connection to a host that says nothing but these messages. When they are read it makes a file."""

    token, is_connected, error = "launcher", True, ""

    def __init__(self, file: Path) -> None:
        self.file, self.address = file, Address(host="127.0.0.1", port=1)
        self.deaths: list[tuple[str, str]] = []
        self.messages: list[Any] = []

    def report_death(self, token: str, how: str) -> None:
        self.deaths.append((token, how))

    def read(self) -> list[Any]:
        messages, self.messages = self.messages, []
        if messages:
            self.file.touch()
        return messages


READ = "until test -e read; do sleep 0.02; done; sleep 0.1"
"""Script that waits until the launcher has read messages."""


class Machine:
    """A machine whose workers are shell scripts.

    Attributes:
        script: of the next worker; a function of its slot and its number of starts.
        started: logs of the workers, in order.
        recorded: calls that record the end of the run in etcd.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.link = folder, Link(folder / "read")
        self.script: Callable[[int, int], str] = lambda slot, starts: "exit 0"
        self.started: list[WorkerLogs] = []
        self.recorded: list[None] = []
        monkeypatch.setattr(launcher, "start", self._start)

        @contextmanager
        def rendezvous(of: ElasticLauncher) -> Iterator[tuple[ElasticTask, Any, Any]]:
            etcd = SimpleNamespace(record_end=lambda: self.recorded.append(None))
            yield ElasticTask(address="unix:relay", secret_file="secret", node=of.node or "a"), self.link, etcd

        monkeypatch.setattr(ElasticLauncher, "_open_rendezvous", rendezvous)

    def run(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"num_ranks": 2, "log_dir": self.folder / "logs", "cool_down_s": 0.0, "grace_s": 0.2}
        ElasticLauncher(**{**defaults, **options}).run([])

    def _start(
        self, program: Sequence[str], environment: Mapping[str, str], logs: WorkerLogs
    ) -> subprocess.Popen[bytes]:
        logs.begin()
        task = ElasticTask.from_environment(environment)
        script = self.script(task.slot, task.starts)
        self.started.append(logs)
        return subprocess.Popen(["sh", "-c", script], cwd=self.folder, start_new_session=True)

    @contextmanager
    def signalled(self, *numbers: signal.Signals, gap_s: float = 0.3) -> Iterator[None]:
        """Send signals to this process as soon as all workers have made their files `ready-SLOT`."""

        def send() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while len(list(self.folder.glob("ready-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(gap_s)

        thread = threading.Thread(target=send)
        with restored_signal_handlers():
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)  # once the launcher has ended
            thread.start()
            try:
                yield
            finally:
                thread.join()


def _waiting(term: str, interrupt: str) -> Callable[[int, int], str]:
    loop = "while :; do sleep 0.05; done"
    return lambda slot, starts: f"trap '{term}' TERM; trap '{interrupt}' INT; touch ready-{slot}; {loop}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


ON_NOTICE = ElasticSettings(notice_on_sigterm=True)


def test_workers_may_finish_a_long_step_before_they_leave_on_a_notice(machine: Machine) -> None:
    machine.script = _waiting("sleep 1; exit 76", "touch interrupted; exit 1")
    with machine.signalled(signal.SIGTERM), pytest.raises(Interrupted) as stop:
        machine.run(settings=ON_NOTICE)
    assert stop.value.signal == signal.SIGTERM
    assert not (machine.folder / "interrupted").exists()


def test_a_worker_that_cannot_be_killed_does_not_hold_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver or a file system holds it in the kernel, as a process that nobody kills here."""
    stuck = subprocess.Popen(["sleep", "30"], start_new_session=True)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(launcher, "_KILLED_S", 0.1, raising=False)
            patched.setattr(os, "killpg", lambda *_: None)
            launcher.end([stuck], 0.0)
            launcher.end([stuck], 0.0)
        assert capsys.readouterr().err.count(f"process {stuck.pid} still runs 0.1 s after SIGKILL") == 1
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        os.waitpid(stuck.pid, 0)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_workers_that_do_not_leave(machine: Machine, second: signal.Signals) -> None:
    machine.script, began = _waiting("", ""), time.monotonic()
    with machine.signalled(signal.SIGTERM, second), pytest.raises(Interrupted) as stop:
        machine.run(settings=ON_NOTICE)
    assert stop.value.signal == signal.SIGTERM
    assert time.monotonic() - began < 5.0


def test_a_worker_that_cannot_be_started_again_is_tried_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system has no process to spare for a moment; the other worker trains on."""
    start, calls = machine._start, list[int]()
    machine.script = lambda slot, starts: (
        ("exit 1" if starts == 1 else "touch done") if slot else ("while ! test -e done; do sleep 0.05; done")
    )

    def start_late(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*arguments)

    monkeypatch.setattr(launcher, "start", start_late)
    monkeypatch.setattr(launcher, "_RETRY_S", 0.1)
    machine.run(program="elastic")
    assert "elastic: worker 1 cannot be started (Resource temporarily unavailable): " in capsys.readouterr().err
    assert len(calls) == 4


def formed(*workers: str) -> dict[str, Any]:
    return {"t": "formed", "tokens": [f"launcher-{worker}" for worker in workers]}


def failing(kind: str, name: str, message: str = "no file") -> str:
    """Return a script that reports a failure under its name of logs and ends."""
    report = {"rank": 0, "kind": kind, "message": message, "details": "Traceback", "time_s": 1.0}
    return f"echo '{json.dumps(report)}' > logs/{name}.failure.json; exit {2 if kind == 'mistake' else 1}"


def test_a_mistake_of_a_worker_that_starts_again_does_not_end_those_that_train(machine: Machine) -> None:
    """A folder is away for a moment, or the world did not admit it in time."""
    machine.link.messages = [formed("0", "1")]
    again = {1: "sleep 0.2; exit 1", 2: failing("mistake", "rank1.2"), 3: "touch done"}
    machine.script = lambda slot, starts: again[starts] if slot else "while ! test -e done; do sleep 0.05; done"
    machine.run()
    assert len(machine.started) == 4
    assert machine.link.deaths[1] == ("launcher-1-2", "exited with code 2 (no file)")


def test_a_mistake_in_training_ends_the_run(machine: Machine) -> None:
    machine.link.messages = [formed("0", "1")]
    machine.script = lambda slot, starts: f"sleep 0.2; {failing('mistake', 'rank1')}" if slot else "sleep 20"
    with pytest.raises(RanksFailed, match="no file"):
        machine.run()


@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_crash_after_training_fails_the_command_whoever_ends_first(machine: Machine, ends_first: int) -> None:
    """An export on rank 0 alone; the others return at once, or have to wait for a third worker."""
    machine.link.messages = [formed("0", "1", "2")]
    crash = f"sleep {0.2 + 0.6 * ends_first}; {failing('crash', 'rank0', 'ValueError: no')}"
    machine.script = lambda slot, starts: "sleep 1.2" if slot == 2 else "sleep 0.5" if slot else crash
    with pytest.raises(RanksFailed, match="ValueError: no"):
        machine.run(num_ranks=3, cool_down_s=5)


def test_a_crash_that_the_others_recover_from_does_not_fail_the_command(machine: Machine) -> None:
    machine.link.messages = [formed("0", "1")]

    def script(slot: int, starts: int) -> str:
        if slot == 0:
            return "sleep 1"
        if starts == 2:
            machine.link.messages = [formed("0", "1-2")]
        return f"{READ}; {failing('crash', 'rank1')}" if starts == 1 else "exit 0"

    machine.script = script
    machine.run()
    assert len(machine.started) == 3


def test_nohup_still_protects_after_a_worker_that_could_not_be_started() -> None:
    with restored_signal_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.raises(BlockingIOError), launcher.deferred_signals():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("endpoint", "cure"),
    [
        ({}, "end this command and give it again"),
        ({"rdzv_endpoint": "127.0.0.1:1", "secret_file": "secret"}, "see that it runs"),
    ],
    ids=["embedded", "elsewhere"],
)
def test_a_launcher_says_once_that_the_host_does_not_answer(
    machine: Machine, endpoint: dict[str, Any], cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that it embeds may have ended for a defect: the others could not go on after a fault."""
    machine.link.is_connected, machine.link.error = False, "connection refused"
    machine.script = lambda slot, starts: "sleep 1"
    settings = ElasticSettings(rendezvous_timeout_s=0.2)
    machine.run(program="elastic", settings=settings, check_health=False, **endpoint)
    said = [line for line in capsys.readouterr().err.splitlines() if "has not answered" in line]
    assert len(said) == 1
    assert said[0].startswith("elastic: the rendezvous host at 127.0.0.1:1 has not answered for 0.2 s")
    assert cure in said[0]


@pytest.mark.parametrize("is_elastic", [False, True], ids=["local", "elastic"])
def test_a_signal_during_the_start_of_a_worker_leaves_none_behind(
    is_elastic: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_and_signal(*_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "30"], start_new_session=True))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(launcher, "start", start_and_signal)
    local = LocalLauncher(num_ranks=2, log_dir=machine.folder)
    try:
        with pytest.raises(Interrupted):
            machine.run() if is_elastic else local.run([])
        assert [process.poll() for process in started] == [-signal.SIGINT]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_signal_while_late_workers_are_ended_leaves_none_behind(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, calls = launcher.end, list[int]()

    def end_late(processes: Any, *arguments: Any, **options: Any) -> None:
        calls.append(len(processes))
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        end(processes, *arguments, **options)

    monkeypatch.setattr(launcher, "end", end_late)
    machine.link.messages = [formed("0")]
    machine.script = lambda slot, starts: "exec sleep 30" if slot else READ
    with pytest.raises(Interrupted):
        machine.run()
    assert calls[1:] == [1, 1]


def test_workers_that_stopped_with_all_others_are_not_started_again(machine: Machine) -> None:
    """After a signal to another machine; a worker that had died before does not train on alone."""
    machine.script = lambda slot, starts: f"exit {1 if slot else 77}"
    with pytest.raises(Interrupted) as stop:
        machine.run(cool_down_s=0.5)
    assert stop.value.signal == signal.SIGTERM
    assert len(machine.started) == 2
    assert [how for _, how in machine.link.deaths] == ["exited with code 1"]


def test_a_late_worker_that_ends_well_does_not_hide_that_the_others_stopped(machine: Machine) -> None:
    """It was started again, and finds the others gone."""
    machine.script = lambda slot, starts: f"exit {0 if slot else 77}"
    with pytest.raises(Interrupted):
        machine.run()
    machine.script = lambda slot, starts: f"exit {0 if slot else 76}"
    machine.run()  # the other left on a notice
    machine.link.messages = [formed("0")]  # without the late one
    machine.script = lambda slot, starts: f"{READ}; exit {0 if slot else 76}"
    with pytest.raises(Interrupted):
        machine.run()


@pytest.mark.parametrize("tokens", [["0"], []], ids=["one in the world", "none in the world"])
def test_a_worker_that_comes_too_late_for_one_training_does_not_end_restarts_in_the_next(
    machine: Machine, tokens: list[str]
) -> None:
    machine.link.messages = [formed(*tokens)]
    machine.script = lambda slot, starts: READ if slot else f"{READ}; sleep 0.4; exit {2 - starts}"
    machine.run()
    assert len(machine.started) == 3


@pytest.mark.parametrize(("members", "calls"), [((), 0), (("1",), 1)], ids=["all too late", "a member"])
def test_only_a_machine_with_a_member_records_the_end_in_etcd(
    machine: Machine, members: tuple[str, ...], calls: int
) -> None:
    """Workers that came too late for one training of a script end well, while the others begin the next."""
    machine.link.messages = [formed("elsewhere", *members)]
    machine.script = lambda slot, starts: READ
    machine.run()
    assert len(machine.recorded) == calls


@pytest.mark.parametrize(("variable", "code"), [("{}", 77), (None, 130)])
def test_who_stopped_by_agreement_says_so_to_an_elastic_launcher(
    variable: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> NoReturn:
        raise Interrupted(signal.SIGINT)

    monkeypatch.delenv(ELASTIC_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(ELASTIC_VARIABLE, variable)
    assert worker.work("moe-train", stop) == code


def test_machines_that_share_a_folder_have_logs_of_their_own(machine: Machine) -> None:
    several = {"num_nodes": 2, "rdzv_endpoint": "127.0.0.1:1", "secret_file": "secret"}
    for node in "ab":
        machine.run(node=node, check_health=False, **several)
    machine.run(node="c")
    logs = machine.folder / "logs"
    paths = [str(each.path("err").relative_to(logs)) for each in machine.started]
    assert [path for path in paths if "rank1" in path] == ["a/rank1.err", "b/rank1.err", "rank1.err"]
    assert all((logs / node / "rank1.err").exists() for node in ("a", "b", "."))


def test_several_machines_never_connect_over_the_loopback_by_silence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interface that is not found, as for a second address of one, is named by the user."""
    several = {"num_nodes": 2, "rdzv_endpoint": "127.0.0.1:1", "secret_file": "secret", "check_health": False}
    monkeypatch.setattr(launcher, "interface_towards", lambda address: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(ConfigurationError, match=r"interface towards .* set GLOO_SOCKET_IFNAME"):
        machine.run(**several)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    machine.run(**several)
    assert len(machine.started) == 2


def test_a_host_whose_name_is_a_loopback_address_here_is_not_joined_by_several_machines(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host itself, which listens on all addresses: its ranks would connect over the loopback."""
    several = {"num_nodes": 2, "secret_file": "secret", "check_health": False}
    kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*kind, ("127.0.1.1", 1))])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    machine.link.address = Address(host="localhost", port=1)
    machine.run(rdzv_endpoint="localhost:1", **several)
    machine.link.address = Address(host="node1", port=1)
    with pytest.raises(ConfigurationError, match=r"node1 is 127\.0\.1\.1 on this machine .* address in rdzv_endpoint"):
        machine.run(rdzv_endpoint="node1:1", **several)
    machine.run(rdzv_endpoint="node1:1", **{**several, "num_nodes": 1})


def test_etcd_whose_name_is_a_loopback_address_here_is_not_used_by_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On etcd's own machine: as the leader it would publish an address that no other one reaches."""

    def reached(*_: object) -> NoReturn:
        raise TimeoutError

    kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
    found = {"10.0.0.1": "10.0.0.1", "node1": "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(*kind, (found[host], 1))])
    monkeypatch.setattr(launcher, "EtcdRendezvous", reached)
    options: dict[str, Any] = {"num_ranks": 1, "log_dir": tmp_path, "settings": ElasticSettings(membership="etcd")}
    options |= {"rdzv_endpoint": "http://10.0.0.1:2379,http://node1:2379", "rdzv_id": "run"}
    with pytest.raises(ConfigurationError, match=r"node1 is 127\.0\.1\.1 on this machine"):
        ElasticLauncher(num_nodes=2, **options).run([])
    with pytest.raises(TimeoutError):
        ElasticLauncher(num_nodes=1, **options).run([])


def test_a_leader_publishes_no_address_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(_: Address) -> NoReturn:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    rendezvous = EtcdRendezvous("https://node1:2379", "run", ElasticSettings(membership="etcd"))
    monkeypatch.setattr(Address, "resolve", resolve)
    with pytest.raises(EtcdError, match="no way to node1:2379: Temporary"):
        rendezvous._host()


def test_a_leader_is_dead_only_where_its_own_host_was_reached() -> None:
    """A new leader behind a firewall that refuses may live, though this launcher was connected to the former host."""
    rendezvous = EtcdRendezvous("https://10.0.0.1:2379", "run", ElasticSettings(membership="etcd"))
    with socket.socket() as unused:  # bound, so that no other test listens there
        unused.bind(("127.0.0.1", 0))
        address = Address(host="127.0.0.1", port=unused.getsockname()[1])
        leader = Leader(address=address, launcher="other", revision=7)
        found = []
        for reached in (Address(host="127.0.0.1", port=1), None, address, None):
            rendezvous.attend(lambda reached=reached: reached)  # type: ignore[misc]
            found.append(rendezvous._is_dead(leader))
    assert found == [False, False, False, True]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="has no IPv6")
def test_the_interface_of_an_ipv6_address_is_found() -> None:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    if not any(int(row[0], 16) == 1 for row in rows):
        pytest.skip("no IPv6 loopback")
    assert interface_towards(Address(host="::1", port=1)) == "lo"
