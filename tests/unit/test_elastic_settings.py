"""Settings and tasks of elastic runs, notices of preemption, and the host that workers meet at."""

from __future__ import annotations

import http.server
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_lightning.elastic.engine import ElasticEngine
from moe_lightning.elastic.preemption import PreemptionWatch
from moe_lightning.elastic.rendezvous_host import RendezvousHost
from moe_lightning.elastic.run import main as run_main
from moe_lightning.elastic.settings import ELASTIC_VARIABLE, ElasticSettings, ElasticTask
from moe_lightning.errors import ConfigurationError


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"heartbeat_timeout_s": 0.05}, "heartbeat_timeout_s=0.05 of ElasticSettings must be a number"),
        ({"silence_timeout_s": 0}, "silence_timeout_s=0 of ElasticSettings must be a number above 0"),
        ({"join_timeout_s": "long"}, "join_timeout_s='long' of ElasticSettings must be"),
        ({"join_window_s": True}, "join_window_s=true of ElasticSettings must be"),
        ({"build_timeout_s": 20.0}, "must be below hang_timeout_s=10.0"),
        ({"min_ranks": 0}, "min_ranks=0 of ElasticSettings must be an integer of at least 1"),
        ({"notice_url": "file:///etc/passwd"}, "must begin with http"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        ElasticSettings(**changes)


def test_a_task_survives_the_environment() -> None:
    task = ElasticTask(
        lighthouse="http://127.0.0.1:1", store_host="127.0.0.1", store_port=2, node="a.b", expected=3, starts=2,
        settings=ElasticSettings(min_ranks=2, notice_file="/x"),
    )  # fmt: skip
    assert ElasticTask.from_environment(task.to_environment()) == task
    assert ElasticTask.from_environment({}) is None


@pytest.mark.parametrize("text", ["", "[]", "3", '{"node": "a"}', '{"settings": {"no_such": 1}}'])
def test_a_malformed_task_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{ELASTIC_VARIABLE} is malformed"):
        ElasticTask.from_environment({ELASTIC_VARIABLE: text})


def test_no_engine_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ELASTIC_VARIABLE, raising=False)
    assert ElasticEngine.from_environment() is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such.py"], "no_such.py is not there"),
        (["--set", "no_such=1", __file__], "'no_such' is not a setting: use one of heartbeat_timeout_s"),
        (["--set", "min_ranks=x", __file__], "'x' is not a int"),
        (["--set", "notice_on_sigterm=maybe", __file__], "'maybe' is not a bool"),
        (["--ranks", "0", __file__], "num_ranks=0"),
    ],
)
def test_wrong_options_of_run(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(arguments) == 2
    assert sentence in capsys.readouterr().err


def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    watch = PreemptionWatch(ElasticSettings(notice_file=str(tmp_path / "notice"), notice_poll_s=0.02))
    assert watch.notice is None
    (tmp_path / "new").write_text("maintenance at noon\nmore")
    (tmp_path / "new").rename(tmp_path / "notice")
    assert soon(lambda: watch.notice)
    assert watch.notice == f"{tmp_path}/notice appeared: maintenance at noon"
    watch.close()


def test_sigterm_is_a_notice_only_where_enabled() -> None:
    former = signal.getsignal(signal.SIGTERM)
    PreemptionWatch(ElasticSettings()).close()
    assert signal.getsignal(signal.SIGTERM) is former
    watch = PreemptionWatch(ElasticSettings(notice_on_sigterm=True))
    os.kill(os.getpid(), signal.SIGTERM)
    assert soon(lambda: watch.notice)
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
        assert soon(lambda: watch.notice)
        watch.close()
        server.shutdown()
    assert watch.notice == f"{url} answers: TRUE"
    assert len(seen) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_host_listens_on_loopback_only() -> None:
    before = listening()
    with RendezvousHost() as host:
        new = listening() - before
        ports = {host.store_port} | ({int(host.lighthouse.rpartition(":")[2])} if host.lighthouse else set())
        ours = {(address, port) for address, port in new if port in ports}
        assert ours == {("0100007F", port) for port in ports}
    with pytest.raises(RuntimeError):
        dist.TCPStore(host.store_host, host.store_port, is_master=False, timeout=timedelta(seconds=0.2))


def listening() -> set[tuple[str, int]]:
    """(address in hexadecimal, port) of all listening sockets."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {
        (address, int(port, 16)) for fields in lines if fields[3] == "0A" for address, port in [fields[1].split(":")]
    }


def test_a_taken_port_is_one_sentence() -> None:
    with RendezvousHost() as host:
        taken = host.store_port
        with pytest.raises(ConfigurationError, match="choose another"):
            RendezvousHost(port=taken - 1)


def test_the_command_says_where_it_listens_and_ends_on_a_signal() -> None:
    command = [sys.executable, "-m", "moe_lightning.elastic.rendezvous_host", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    assert re.fullmatch(r"lighthouse (http://127\.0\.0\.1:\d+|None), store 127\.0\.0\.1:\d+\n", line)
