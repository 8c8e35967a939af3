"""Settings and tasks of elastic runs, notices of preemption, and the host that workers meet at."""

from __future__ import annotations

import errno
import http.server
import logging
import os
import re
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import OmegaConf

from moe_lightning import files
from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.elastic import rendezvous_host
from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.membership import (
    ELASTIC_VARIABLE,
    MEMBERSHIPS,
    ElasticSettings,
    ElasticTask,
    membership_from_environment,
)
from moe_lightning.elastic.preemption import PreemptionWatch
from moe_lightning.elastic.protocol import Address, create_secret, read_secret
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.run import main as run_main
from moe_lightning.elastic.server import ServerThread, listen
from moe_lightning.elastic.worker import Preempted, RunFinished
from moe_lightning.errors import ConfigurationError
from tests.commands import ForkedProgram
from tests.distributed.harness import run_ranks
from tests.forks import wait_until
from tests.leftovers import listening


def test_a_task_survives_the_environment() -> None:
    task = ElasticTask(
        address="127.0.0.1:1", secret_file="/secret", node="a.b", expected=3, starts=2,
        settings=ElasticSettings(min_ranks=2, notice_file="/x"),
    )  # fmt: skip
    assert ElasticTask.from_environment(task.to_environment()) == task
    assert ElasticTask.from_environment({}) is None


def test_the_command_has_every_setting_with_its_default() -> None:
    stored = OmegaConf.load(CONFIG_DIR / "train.yaml").elastic.settings
    assert OmegaConf.to_container(stored) == asdict(ElasticSettings())


def test_a_second_membership_of_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a second strategy in a script: the host would take each for the other's successor, for ever."""
    monkeypatch.setattr(MEMBERSHIPS, "make", lambda *_: "membership")
    for _ in range(2):
        task = ElasticTask(address="none", secret_file="none", node="a")
        monkeypatch.setenv(ELASTIC_VARIABLE, task.to_environment()[ELASTIC_VARIABLE])
        assert str(membership_from_environment()) == "membership"
        with pytest.raises(ConfigurationError, match="an elastic script trains with one strategy: give the same"):
            membership_from_environment()


def test_a_process_that_waits_to_join_leaves_at_once_on_a_notice() -> None:
    with RendezvousServer() as host:
        patience, secret = ElasticSettings(start_timeout_s=3.0), str(host.secret_file)
        task = ElasticTask(address=str(host.address), secret_file=secret, node="a", expected=2, settings=patience)
        with closing(RendezvousClient(task)) as client:
            client._preemption._record("taken away")
            with pytest.raises(Preempted, match="taken away"):
                client.join()


@pytest.mark.parametrize("text", ["", "[]", "3", '{"node": "a"}', '{"settings": {"no_such": 1}}'])
def test_a_malformed_task_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{ELASTIC_VARIABLE} is malformed"):
        ElasticTask.from_environment({ELASTIC_VARIABLE: text})


def test_no_engine_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ELASTIC_VARIABLE, raising=False)
    assert membership_from_environment() is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such.py"], "no_such.py is not there"),
        (["--set", "no_such=1", __file__], "--set has no 'no_such': use one of heartbeat_timeout_s"),
        (["--set", "min_ranks=x", __file__], "--set.min_ranks='x' must be an integer of at least 1"),
        (["--set", "notice_on_sigterm=maybe", __file__], "--set.notice_on_sigterm='maybe' must be true or false"),
    ],
)
def test_wrong_options_of_run(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_no_ranks_are_refused_by_their_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_main(["--ranks", "0", __file__])
    assert "--ranks: 0 must be an integer of at least 1" in capsys.readouterr().err


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    watch = PreemptionWatch(ElasticSettings(notice_file=str(tmp_path / "notice"), notice_poll_s=0.02))
    assert watch.notice is None
    (tmp_path / "new").write_text("maintenance at noon\nmore")
    (tmp_path / "new").rename(tmp_path / "notice")
    wait_until(lambda: watch.notice)
    assert watch.notice == f"{tmp_path}/notice appeared: maintenance at noon"
    watch.close()


def test_sigterm_is_a_notice_only_where_enabled() -> None:
    former = signal.getsignal(signal.SIGTERM)
    PreemptionWatch(ElasticSettings()).close()
    assert signal.getsignal(signal.SIGTERM) is former
    watch = PreemptionWatch(ElasticSettings(notice_on_sigterm=True))
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: watch.notice)
    assert watch.notice == "SIGTERM asks this process to leave"
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is former


def test_an_address_is_a_notice_once_it_says_so() -> None:
    answers = [(404, b""), (200, b"FALSE"), (200, b"TRUE")]
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            code, body = answers[min(len(seen), len(answers)) - 1]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/preempted"
        watch = PreemptionWatch(ElasticSettings(notice_url=url, notice_poll_s=0.01))
        wait_until(lambda: watch.notice)
        watch.close()
        server.shutdown()
    assert watch.notice == f"{url} answers: TRUE"
    assert len(seen) == 3


class Metadata(http.server.BaseHTTPRequestHandler):
    """AWS' service with IMDSv2: tokens for a PUT with their life, 401 without a token that still lives."""

    seen: list[str]
    gives_tokens = True

    def do_PUT(self) -> None:
        life = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.seen.append(f"PUT {self.path} {life}")
        good = self.gives_tokens and self.path == "/latest/api/token" and 1 <= int(life) <= 21600
        self._say(200 if good else 403, f"token{self._tokens()}==".encode())

    def do_GET(self) -> None:
        token = self.headers["X-aws-ec2-metadata-token"]
        self.seen.append(f"GET {token}")
        reads = self.seen.count("GET token1==")
        if token is None or token != f"token{self._tokens()}==" or (token == "token1==" and reads > 2):
            self._say(401, b"")
        else:  # the first token lives for two reads, and the second finds the notice
            self._say(*((404, b"") if token == "token1==" else (200, b'{"action": "terminate"}')))

    def _tokens(self) -> int:
        return sum(line.startswith("PUT") for line in self.seen)

    def _say(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def metadata(*, gives_tokens: bool) -> Iterator[tuple[str, list[str]]]:
    """Address of notices, and the requests that came."""
    handler = type("Handler", (Metadata,), {"seen": [], "gives_tokens": gives_tokens})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot/instance-action", handler.seen
        server.shutdown()


def test_a_server_that_talks_nonsense_does_not_end_the_watch(tmp_path: Path) -> None:
    asked: list[bytes] = []

    class Nonsense(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(4096))
            self.request.sendall(b"nonsense\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Nonsense) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url, file = f"http://127.0.0.1:{server.server_address[1]}/", tmp_path / "notice"
        watch = PreemptionWatch(ElasticSettings(notice_url=url, notice_file=str(file), notice_poll_s=0.01))
        wait_until(lambda: len(asked) > 2)
        file.touch()
        wait_until(lambda: watch.notice)
        watch.close()
        server.shutdown()
    assert watch.notice == f"{file} appeared"


def test_aws_gives_notices_for_a_token(caplog: pytest.LogCaptureFixture) -> None:
    with metadata(gives_tokens=True) as (url, seen):
        watch = PreemptionWatch(ElasticSettings(notice_url=url, notice_poll_s=0.01))
        wait_until(lambda: watch.notice)
        watch.close()
    assert watch.notice == f'{url} answers: {{"action": "terminate"}}'
    assert seen == [
        "GET None", "PUT /latest/api/token 21600", "GET token1==", "GET token1==",
        "GET token1==", "PUT /latest/api/token 21600", "GET token2==",
    ]  # fmt: skip
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_refused_notice_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with metadata(gives_tokens=False) as (url, seen):
        watch = PreemptionWatch(ElasticSettings(notice_url=url, notice_poll_s=0.01))
        wait_until(lambda: len(seen) > 6)
        watch.close()
    assert watch.notice is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"notice_url={url} refuses to answer (HTTP Error 401: Unauthorized)" in warning
    assert "or set notice_file" in warning


def test_an_address_of_notices_that_never_answers_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
    watch = PreemptionWatch(ElasticSettings(notice_url=url, notice_poll_s=0.01))
    wait_until(lambda: any(record.levelno >= logging.WARNING for record in caplog.records))
    watch.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"notice_url={url} does not answer (<urlopen error [Errno")
    assert "or set notice_file" in warning


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_on_one_machine_nothing_listens_on_a_port() -> None:
    before = listening()
    with RendezvousServer() as host:
        assert listening() == before
        folder = host.secret_file.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert host.secret_file.stat().st_mode & 0o777 == 0o600
    assert not folder.exists()


def test_what_a_killed_launcher_left_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_UNLOCKED_S", -1.0)
    [folder] = run_ranks(1, leave_a_host)
    assert folder.exists()
    with RendezvousServer() as host:
        assert not folder.exists()
        with RendezvousServer():
            assert host.secret_file.exists(), "one that is served stays"


def leave_a_host(*_: int) -> Path:
    """As a launcher that is killed does."""
    host = RendezvousServer()
    HOSTS.append(host)
    return host.secret_file.parent


HOSTS: list[RendezvousServer] = []


def test_between_machines_it_listens_where_it_is_told_only(tmp_path: Path) -> None:
    before = listening()
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host:
        assert listening() - before == {("0100007F", host.address.port)}
        assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert listening() == before


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with (
        RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host,
        pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:\d+ .*choose another"),
    ):
        RendezvousServer(bind=str(host.address), secret_file=tmp_path / "secret")


def test_the_command_says_where_it_listens_and_ends_on_a_signal(tmp_path: Path) -> None:
    where = ("--bind", "127.0.0.1:0", "--secret-file", str(tmp_path / "a" / "secret"))
    with ForkedProgram("moe_lightning.elastic.rendezvous_host", *where, folder=tmp_path) as program:
        program.wait_for(lambda: program.out.endswith("\n"))
        os.kill(program.process.pid, signal.SIGTERM)
        done = program.end()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"listening on 127\.0\.0\.1:\d+, secret in {tmp_path}/a/secret\n", done.stdout)


def test_a_secret_that_cannot_be_linked_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigurationError, match="no links here"):
        create_secret(tmp_path / "secret")
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_a_host_that_ends_for_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ServerThread, "_round", lambda _: sys.exit())
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    assert rendezvous_host.main(["--bind", "127.0.0.1:0", f"--secret-file={tmp_path / 'secret'}"]) == 1
    assert "error: the host ended for the defect above: start it again\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.unlink(), "cannot be read .*copy it from the rendezvous host"),
        (lambda path: path.chmod(0o640), "has mode 640, so others may read it: chmod 600"),
        (lambda path: path.write_text("short"), "holds 5 bytes, not 32 to 4096"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
    ],
)
def test_a_secret_that_is_none_is_one_sentence(spoil: Callable[[Path], object], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert create_secret(path) == create_secret(path) == read_secret(path)
    spoil(path)
    with pytest.raises(ConfigurationError, match=sentence):
        read_secret(path)


def test_another_secret_is_one_sentence(tmp_path: Path) -> None:
    create_secret(tmp_path / "theirs")
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "ours") as host:
        with pytest.raises(ConfigurationError, match="refuses this machine: its secret differs"):
            LauncherClient(host.address, tmp_path / "theirs", ElasticSettings())
        engine = RendezvousClient(
            ElasticTask(address=str(host.address), secret_file=str(tmp_path / "theirs"), node="a")
        )
        with pytest.raises(ConfigurationError, match="refuses this process: its secret differs"):
            engine.world_exists()
        engine.close()


def test_a_host_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host:
        address = host.address
    settings = ElasticSettings(rendezvous_timeout_s=0.3)
    with pytest.raises(ConfigurationError, match=rf"nothing answers at {address} for 0\.3 s \(connection refused\)"):
        LauncherClient(address, tmp_path / "secret", settings)
    engine = RendezvousClient(
        ElasticTask(address=str(address), secret_file=str(tmp_path / "secret"), node="a", settings=settings)
    )
    with pytest.raises(
        ConfigurationError, match=rf"host at {address} has not answered for 0\.3 s .*same command again"
    ):
        engine.join()
    engine.close()


def test_a_death_with_a_text_longer_than_a_message_is_reported(tmp_path: Path) -> None:
    """Errors of users name their data."""
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host:
        client = LauncherClient(host.address, host.secret_file, ElasticSettings())
        client.report_death("a-0-1", "exited with code 1 (ValueError: " + "x" * 5_000_000)
        assert client.is_connected
        client.close()


def test_a_silent_name_server_does_not_stretch_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any) -> NoReturn:
        time.sleep(1.0)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(Address, "resolve", resolve)
    create_secret(tmp_path / "secret")
    settings, began = ElasticSettings(rendezvous_timeout_s=1.5), time.monotonic()
    with pytest.raises(ConfigurationError, match=r"nothing answers at far:1 for 1\.5 s \(.*(answer|yet)"):
        LauncherClient(Address(host="far", port=1), tmp_path / "secret", settings)
    assert time.monotonic() - began < 4.0


def test_every_address_of_a_name_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        targets = [closed.getsockname(), ("127.0.0.1", host.address.port)]
        kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*kind, target) for target in targets])
        settings = ElasticSettings(rendezvous_timeout_s=5.0)
        client = LauncherClient(Address(host="host", port=1), host.secret_file, settings)
        assert client.is_connected
        client.close()


def test_the_end_of_a_run_is_not_lost_with_the_host(tmp_path: Path) -> None:
    """It is restarted after the last step; another process that waits to join ends, too."""
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host:
        task = ElasticTask(address=str(host.address), secret_file=str(host.secret_file), node="a")
        one = RendezvousClient(task)
        one.join(is_ready=True)
        two = RendezvousClient(replace(task, node="b"))
        assert two.world_exists()
    one.finish()
    closing = threading.Thread(target=one.close)
    closing.start()
    with RendezvousServer(bind=str(host.address), secret_file=tmp_path / "secret"):
        with pytest.raises(RunFinished):
            two.join(is_ready=True)
        closing.join()
        two.close()


def test_a_name_that_only_its_machine_reaches_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian and images of clouds write the machine's own name to /etc/hosts in this way."""
    kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*kind, ("127.0.0.1", 0))])
    for host in ("localhost", "127.0.0.1"):
        listen(f"{host}:0").close()
    with pytest.raises(ConfigurationError, match=r"node1 is 127\.0\.0\.1 on this machine .*bind .* rdzv_endpoint"):
        listen("node1:29510")
