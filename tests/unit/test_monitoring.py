"""Loggers for those who watch from outside, against real servers on the loopback interface."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from moe_lightning.callbacks import monitoring
from moe_lightning.callbacks.monitoring import (
    WEBHOOK_VARIABLE,
    JSONLines,
    OpenTelemetry,
    Prometheus,
    Webhook,
    metric_name,
)
from moe_lightning.callbacks.routing_health import RoutingHealth
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import ALARMS

ROOT = Path(__file__).parents[2]


class Received(BaseHTTPRequestHandler):
    """Keeps the bodies of requests in the list `bodies` of its server."""

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    made = HTTPServer(("127.0.0.1", 0), Received)
    made.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def bodies(server: HTTPServer) -> list[bytes]:
    found: list[bytes] = server.bodies  # type: ignore[attr-defined]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_layers_become_a_label() -> None:
    assert metric_name("moe/layer03/load_entropy_ratio") == ("moe_lightning_moe_layer_load_entropy_ratio", "3")
    assert metric_name("moe/load_entropy_ratio") == ("moe_lightning_moe_load_entropy_ratio", "")
    assert metric_name("my loss (é)") == ("moe_lightning_my_loss____", "")


def test_prometheus_reads_the_last_values_until_the_end() -> None:
    port = free_port()
    logger = Prometheus(run="a", port=port)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"train/loss": 3.0, "moe/layer01/x": 1.0}, step=1)
    logger.log_metrics({"train/loss": 2.0}, step=2)
    assert served(port) == {
        'moe_lightning_step{run="a"}': 2,
        'moe_lightning_train_loss{run="a"}': 2,
        'moe_lightning_moe_layer_x{layer="1",run="a"}': 1,
    }
    logger.finalize("success")
    with pytest.raises(OSError, match="refused"):
        served(port)
    logger.log_metrics({"train/loss": math.nan}, step=3)  # another fit
    assert math.isnan(served(port)['moe_lightning_train_loss{run="a"}'])
    logger.finalize("success")


def test_a_taken_port_is_an_error_before_training_and_a_warning_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        logger = Prometheus(port=port)
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127.0.0.1:{port} .* logger.prometheus.port"):
            logger.log_hyperparams({})
        with pytest.warns(UserWarning, match="no metrics for Prometheus at step 7"):
            logger.log_metrics({"train/loss": 1.0}, step=7)
    logger.log_metrics({"train/loss": 1.0}, step=8)
    assert served(port)['moe_lightning_step{run="run"}'] == 8
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # another process is rank 0 now and needs the port
    logger.log_metrics({"train/loss": 1.0}, step=9)
    with pytest.raises(OSError, match="refused"):
        served(port)


@pytest.mark.parametrize(
    ("kind", "extra"), [(Prometheus, "prometheus"), (OpenTelemetry, "opentelemetry")], ids=["prometheus", "otel"]
)
def test_a_missing_package_names_its_extra(kind: type, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'moe-lightning\[{extra}\]'"):
        kind()


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp"])
def test_a_package_around_a_module_may_be_the_missing_one(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'moe-lightning\[opentelemetry\]'"):
        OpenTelemetry()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"moe_lightning_\w+", text))
    health = RoutingHealth().observe({0: np.full(4, 0.25)})
    documented = (ROOT / "moe_lightning" / "callbacks" / "telemetry.py").read_text()
    documented += (ROOT / "moe_lightning" / "callbacks" / "fault_recovery.py").read_text()
    names = {*health, *re.findall(r"\w+(?:/\w+)+", documented.replace("layerNN", "layer00")), "step", "train/loss"}
    assert asked <= {metric_name(name)[0] for name in names}
    assert len(json.loads(text)["panels"]) == len(re.findall('"expr"', text)) == 8


def test_opentelemetry_sends_what_was_logged(server: HTTPServer) -> None:
    logger = OpenTelemetry(run="a", endpoint=f"http://127.0.0.1:{server.server_port}/v1/metrics", interval_s=3600)
    logger.log_metrics({"moe/layer02/x": 1.5}, step=4)
    logger.finalize("success")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    (body,) = bodies(server)
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    assert ("run", "a") in {(one.key, one.value.string_value) for one in resource.resource.attributes}
    points = {m.name: m.gauge.data_points[0] for m in resource.scope_metrics[0].metrics}
    assert points["moe_lightning_step"].as_double == 4
    assert points["moe_lightning_moe_layer_x"].as_double == 1.5
    assert points["moe_lightning_moe_layer_x"].attributes[0].value.string_value == "2"


def test_a_former_rank_0_sends_nothing_more(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv(WEBHOOK_VARIABLE, address)
    loggers = [OpenTelemetry(endpoint=f"{address}/v1/metrics", interval_s=3600), Webhook()]
    for logger in loggers:
        logger.log_metrics({"train/loss": 1.0}, step=4)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    for logger in loggers:
        logger.log_metrics({"train/loss": 2.0}, step=5)
    assert len(bodies(server)) == 1, "the values up to the recovery"
    for logger in loggers:
        logger.finalize("success")
    assert len(bodies(server)) == 1


def test_json_lines_are_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    JSONLines(path).log_metrics({"train/loss": 2.5}, step=1)
    JSONLines(path).log_metrics({"train/loss": math.inf}, step=2)
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 2.5), (2, None)]
    assert rows[0]["time"] <= rows[1]["time"]


def test_a_webhook_gets_what_somebody_wants_to_know(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.server_port}/secret")
    logger = Webhook(run="a")
    logger.log_metrics({"val/loss": 1.0, "epoch": 0}, step=0)
    logger.finalize("success")  # of a validation
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.log_metrics({"recovery/total_ms": 120.0}, step=1400)
    logger.log_metrics({"recovery/total_ms": 250.4, "recovery/lost_rank": 1}, step=1500)
    logger.log_metrics({"train/loss": math.nan}, step=1501)
    logger.log_metrics({"train/loss": math.nan}, step=1502)
    logger.finalize("failed")
    logger.log_metrics({"val/loss": 1.0, "epoch": 0}, step=1502)  # of the last step, after training
    logger.finalize("success")
    assert [json.loads(body)["text"] for body in bodies(server)] == [
        "a, step 1,400: continued after a change in 120 ms",
        "a, step 1,500: recovered from the loss of ranks in 250 ms",
        "a, step 1,501: train/loss is nan",
        "a, step 1,502: training has ended: failed",
    ]


def test_a_webhook_sends_the_first_wrong_loss_of_each_training(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.server_port}/secret")
    logger = Webhook(run="a")
    for _ in range(2):
        logger.log_hyperparams({})
        for step in (1, 2):
            logger.log_metrics({"train/loss": math.nan}, step=step)
        logger.finalize("success")
    said = ["a, step 1: train/loss is nan", "a, step 2: training has ended"]
    assert [json.loads(body)["text"] for body in bodies(server)] == 2 * said


def test_a_webhook_gets_alarms_from_the_start_to_the_end(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.server_port}/secret")
    webhook = Webhook(run="a")
    ALARMS.warning("too early")
    webhook.log_hyperparams({})
    ALARMS.warning("rank %d waits", 3)
    webhook.finalize("success")
    ALARMS.warning("too late")
    assert capsys.readouterr().err == ""
    assert [json.loads(body)["text"] for body in bodies(server)] == ["a: rank 3 waits"]


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://example.org/x", "file:///etc/passwd", "https://"),
        *(
            "https://example.org/SECRET  # our channel",
            "https://example.org/SECRET\nx",
            "https://example.org/SECRET\u00e9",
        ),
        *("https://me:SECRET@example.org/x", "https://example.org:SECRET/x", "https://[SECRET"),
    ],
)
def test_a_webhook_without_a_safe_address_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, url)
    with pytest.raises(ConfigurationError, match=f"environment variable {WEBHOOK_VARIABLE}") as error:
        Webhook()
    assert "SECRET" not in str(error.value)


def test_a_webhook_whose_answer_is_no_http_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{listener.getsockname()[1]}/secret")

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"nonsense\n\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.warns(UserWarning, match="could not be sent to the webhook"):
            Webhook()._post(b"{}")
        thread.join()


def test_a_webhook_that_is_gone_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{free_port()}/secret")
    logger = Webhook()
    logger.log_metrics({"train/loss": math.nan}, step=1)
    with pytest.warns(UserWarning, match="could not be sent to the webhook"):
        logger.finalize("success")
