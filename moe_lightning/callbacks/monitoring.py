"""Loggers for those who watch a run from outside: Prometheus, OpenTelemetry, JSON lines, and messages to a webhook.

All are off by default (`logger=[default,prometheus]` turns one on beside the default), and only the process of rank 0
logs. Of a metric `moe/layer03/dead_experts_count` the layer becomes a label, so that one query draws all layers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

from annotated_types import Interval
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import ALARMS, missing_for_logger, one_line

WEBHOOK_VARIABLE = "MOE_LIGHTNING_WEBHOOK"
"""Environment variable of the webhook's address, which is a secret and therefore in no configuration."""

Port = Annotated[int, Interval(ge=1, le=65535)]
_LAYER = re.compile(r"/layer(\d+)/")
_TIMEOUT_S = 5.0


def metric_name(name: str) -> tuple[str, str]:
    """Return the name of a metric as Prometheus and OpenTelemetry take it, and its layer, "" if it has none.

    >>> metric_name("moe/layer03/dead_experts_count"), metric_name("train/loss")
    (('moe_lightning_moe_layer_dead_experts_count', '3'), ('moe_lightning_train_loss', ''))
    """
    layer = _LAYER.search(name)
    plain = _LAYER.sub("/layer/", name)
    return "moe_lightning_" + re.sub(r"\W", "_", plain, flags=re.ASCII), str(int(layer[1])) if layer else ""


def _values(metrics: Mapping[str, float], step: int | None) -> Iterator[tuple[str, str, str, float]]:
    """Yield our name of each metric, its name and layer as in `metric_name`, and its value; the step is one of them."""
    steps = {} if step is None else {"step": step}
    for name, value in {**steps, **metrics}.items():
        yield name, *metric_name(name), float(value)


class MonitoringLogger(Logger):
    """Base of loggers without an experiment and without hyperparameters. A process that a recovery has given another
    rank than 0 closes what it has open: others would take its last values for present ones.
    """

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    @property
    @override
    def name(self) -> str:
        return type(self).__name__

    @property
    @override
    def version(self) -> str:
        return self._run

    @override
    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        """Hyperparameters are in the run directory."""

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Pass the values on where this process is rank 0."""
        if getattr(rank_zero_only, "rank", 0) == 0:
            self._pass_on(metrics, step)
        else:
            self._close()

    @override
    def finalize(self, status: str) -> None:
        """Close what is open."""
        self._close()

    @abstractmethod
    def _pass_on(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Take the values of a logging step."""

    def _close(self) -> None:
        """Close what `_pass_on` has opened."""


@validated
class Prometheus(MonitoringLogger):
    """Serves the last value of every metric to Prometheus; `docs/grafana.json` is a dashboard of them.

    Args:
        run: value of the label `run`.
        port: of the HTTP server, which listens from the first metrics to the end of the training.
        host: interface that it listens on. There is no authentication: keep it to the loopback interface, or to a
            network that only Prometheus reaches.

    Raises:
        ConfigurationError: the package prometheus_client is not installed; when training starts: the port is taken.
            Later on, as after a recovery that made another process rank 0, that is a warning.
    """

    def __init__(self, run: str = "run", port: Port = 9464, host: str = "127.0.0.1") -> None:
        super().__init__(run)
        if find_spec("prometheus_client") is None:
            raise missing_for_logger("prometheus", "prometheus_client")
        self._address = (host, port)
        self._server: Any = None
        self._gauges: dict[str, Any] = {}

    @override
    @rank_zero_only
    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        """Begin to serve: Lightning and `Telemetry` log hyperparameters before the first step."""
        if self._server is None:
            self._serve()

    @override
    def _pass_on(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Replace the values that are served."""
        if self._server is None:
            try:
                self._serve()
            except ConfigurationError as error:
                rank_zero_warn(f"no metrics for Prometheus at step {step}: {error}")
                return
        for name, key, layer, value in _values(metrics, step):
            labels = {"run": self._run} | ({"layer": layer} if layer else {})
            if key not in self._gauges:
                from prometheus_client import Gauge

                self._gauges[key] = Gauge(key, name, [*labels], registry=self._registry)
            self._gauges[key].labels(**labels).set(value)

    def _serve(self) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        host, port = self._address
        self._registry, self._gauges = CollectorRegistry(), {}
        try:
            self._server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ConfigurationError(
                f"logger.prometheus cannot listen on {host}:{port} ({error.strerror}): choose another "
                "logger.prometheus.port, or an interface of this machine as logger.prometheus.host"
            ) from error

    @override
    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


_OPENTELEMETRY = ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http.metric_exporter")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


@validated
class OpenTelemetry(MonitoringLogger):
    """Sends every metric as a gauge to an OpenTelemetry collector, by OTLP over HTTP, in a thread of the SDK.

    Args:
        run: value of the resource attribute `run`.
        endpoint: of the collector.
        interval_s: between two sendings; a value that is replaced in between is not sent.

    Raises:
        ConfigurationError: the packages of OpenTelemetry are not installed.
    """

    def __init__(
        self,
        run: str = "run",
        endpoint: str = "http://127.0.0.1:4318/v1/metrics",
        interval_s: Annotated[float, Interval(ge=0.1, le=3600)] = 10.0,
    ) -> None:
        super().__init__(run)
        if not all(map(_is_installed, _OPENTELEMETRY)):
            raise missing_for_logger("opentelemetry", "opentelemetry-sdk")
        self._endpoint, self._interval_s = endpoint, interval_s
        self._provider: Any = None
        self._gauges: dict[str, Any] = {}

    @override
    def _pass_on(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Record the values; does not wait for the collector."""
        if self._provider is None:
            self._open()
        for name, key, layer, value in _values(metrics, step):
            if key not in self._gauges:
                self._gauges[key] = self._provider.get_meter("moe_lightning").create_gauge(key, description=name)
            self._gauges[key].set(value, {"layer": layer} if layer else {})

    def _open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=self._endpoint, timeout=_TIMEOUT_S),
            export_interval_millis=1e3 * self._interval_s,
        )
        resource = Resource.create({"service.name": "moe-lightning", "run": self._run})
        self._provider, self._gauges = MeterProvider([reader], resource), {}

    @override
    def _close(self) -> None:
        """Send the last values."""
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=1e3 * _TIMEOUT_S)
            self._provider = None


@validated
class JSONLines(MonitoringLogger):
    """Appends one JSON object for each logging step to a file: `step`, `time` (Unix seconds) and the metrics.

    A number that is not finite is null. A resumed run appends: of two lines of a step the later one counts.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path).stem)
        self._path = Path(path)

    @override
    def _pass_on(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Append one line."""
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3)} | finite) + "\n")


class _Alarms(logging.Handler):
    def __init__(self, send: Callable[[str], None]) -> None:
        super().__init__()
        self._send = send

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._send(record.getMessage())


@validated
class Webhook(MonitoringLogger):
    """Posts `{"text": ...}`, as Slack, Mattermost and Teams take it, when somebody may want to look at the run: at a
    hang, after a recovery, at the first loss that is not finite of each training (after a recovery, at the next one),
    and when the training ends or fails.

    The address is the value of `MOE_LIGHTNING_WEBHOOK`. Messages are sent by a thread; one that cannot be sent is a
    warning.

    Args:
        run: name of the run in the messages.

    Raises:
        ConfigurationError: no address, or one that is neither https nor of this machine.
    """

    def __init__(self, run: str = "run") -> None:
        super().__init__(run)
        self._url = os.environ.get(WEBHOOK_VARIABLE, "").strip()
        if not _is_safe(self._url):
            raise ConfigurationError(
                f"logger=webhook needs the environment variable {WEBHOOK_VARIABLE} with an address that begins with "
                "https://, or http:// on this machine, without a space or a password: export the address that your "
                "chat gives for incoming webhooks"
            )
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhook")
        self._sent: list[Future[None]] = []
        self._step: int | None = None  # None: no training to report an end of
        self._is_finite = True
        self._alarms = _Alarms(lambda text: self._send(f": {text}"))

    @override
    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        """Begin to pass on alarms of this rank, before the first step: any rank may report a hang. A loss that was not
        finite is of a former training, or a recovery may have undone it.
        """
        ALARMS.addHandler(self._alarms)
        self._is_finite = True

    @override
    def _pass_on(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Send what these metrics say; does not wait."""
        if self._step is not None or any(not name.startswith(("val/", "test/", "epoch")) for name in metrics):
            self._step = step if step is not None else self._step or 0  # not of a validation after training
        if "recovery/total_ms" in metrics:
            is_loss = "recovery/lost_rank" in metrics  # ranks may also have joined, or a step is repeated
            what = "recovered from the loss of ranks" if is_loss else "continued after a change"
            self._report(f"{what} in {float(metrics['recovery/total_ms']):,.0f} ms")
        losses = {name: float(value) for name, value in metrics.items() if name.endswith("loss")}
        wrong = [name for name, value in losses.items() if not math.isfinite(value)]
        if wrong and self._is_finite:
            self._report(f"{wrong[0]} is {losses[wrong[0]]}")
        self._is_finite = self._is_finite and not wrong

    @override
    def finalize(self, status: str) -> None:
        """Send how the training has ended, and wait for the messages that are on their way."""
        ALARMS.removeHandler(self._alarms)
        if self._step is not None:
            self._report("training has ended" if status == "success" else f"training has ended: {status}")
        self._close()
        wait(self._sent, timeout=2 * _TIMEOUT_S)
        self._sent.clear()

    @override
    def _close(self) -> None:
        self._step = None

    def _report(self, text: str) -> None:
        self._send(f", step {self._step or 0:,}: {text}")

    def _send(self, text: str) -> None:
        message = {"text": f"{self._run}{text}"}
        self._sent.append(self._sender.submit(self._post, json.dumps(message).encode()))

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                pass
        except (OSError, HTTPException, ValueError) as error:
            rank_zero_warn(f"a message about the run could not be sent to the webhook: {one_line(error)}")


def _is_safe(address: str) -> bool:
    """True if an address keeps its path secret on its way, and urllib has no reason to quote it in an error."""
    try:
        parsed = urlparse(address)
        has_port = parsed.port is None or parsed.port > 0
    except ValueError:
        return False
    is_plain = address.isascii() and address.isprintable() and " " not in address and "@" not in parsed.netloc
    is_local = parsed.scheme == "http" and parsed.hostname in ("127.0.0.1", "::1", "localhost")
    return has_port and is_plain and (is_local or (parsed.scheme == "https" and bool(parsed.hostname)))
