"""pytest plug-in of one rank: puts a strategy in the place of "auto", "ddp" and None on the CPU, runs the tests that it
is told to, each when all ranks are ready for it, and reports their outcomes.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

from tests.lightning_suite import OPTIONS

SWAPPED = (None, "auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")


class Reporter:
    """Talks to `run` through two pipes: "ready" before a test, its outcome after it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._told = os.fdopen(options["told"], "w")
        self._asked = os.fdopen(options["asked"])

    def tell(self, **what: Any) -> None:
        self._told.write(json.dumps(what) + "\n")
        self._told.flush()

    def wait(self) -> dict[str, Any]:
        line = self._asked.readline()
        if not line:
            os._exit(3)  # nobody reads any more
        answer: dict[str, Any] = json.loads(line)
        return answer

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = self.options["tests"]
        if wanted is not None:
            kept = set(wanted)
            items[:] = [item for item in items if item.nodeid in kept]
        self.tell(collected=[item.nodeid for item in items])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.tell(ready=item.nodeid)
        os.environ["MASTER_PORT"] = str(self.wait()["port"])
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call" or report.skipped:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr or "")
            outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
            self.tell(test=report.nodeid, outcome=outcome, text=text[:400])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tell(finished=nodeid)

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        """The same folder on all ranks."""
        path = Path(self.options["folder"]) / str(abs(hash(request.node.nodeid)))
        path.mkdir(parents=True, exist_ok=True)
        return path


def swap_strategy(make: Any, ranks: int) -> None:
    """Let Trainers on the CPU use `make()` where no other strategy is named, on `ranks` devices where one is meant."""
    connect = accelerator_connector._AcceleratorConnector.__init__

    @functools.wraps(connect)
    def connect_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        devices, accelerator = kwargs.get("devices", "auto"), kwargs.get("accelerator", "auto")
        strategy = kwargs.get("strategy", "auto")
        is_one = devices in (1, "1", "auto", None, [0]) and kwargs.get("num_nodes", 1) == 1
        is_swapped = strategy is None or (isinstance(strategy, str) and strategy in SWAPPED)
        if is_swapped and is_one and accelerator in ("auto", "cpu") and not args:
            kwargs |= {"strategy": make(), "devices": ranks, "accelerator": "cpu"}
        connect(self, *args, **kwargs)

    accelerator_connector._AcceleratorConnector.__init__ = connect_ours


def pytest_configure(config: pytest.Config) -> None:
    options = json.loads(os.environ[OPTIONS])
    if options["strategy"] == "ours":
        from moe_lightning import ExpertParallelStrategy

        swap_strategy(ExpertParallelStrategy, options["ranks"])
    elif options["ranks"] > 1:
        swap_strategy(DDPStrategy, options["ranks"])
    config.pluginmanager.register(Reporter(options))
