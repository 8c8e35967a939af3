"""Elastic trainings of small models on real processes that a test may kill: one worker of such a run, and its host."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.callbacks.fault_recovery import FaultRecovery
from moe_lightning.elastic.rendezvous_host import RendezvousHost
from moe_lightning.elastic.settings import ElasticSettings, ElasticTask
from tests.distributed.training import TINY, RandomTokens, make_trainer

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["lightning.pytorch", "moe_lightning.strategies", "torch.distributed"])

SETTINGS = ElasticSettings(
    heartbeat_timeout_s=0.5, silence_timeout_s=2.0, hang_timeout_s=10.0, join_timeout_s=60.0, join_window_s=0.1
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill a worker the first time it comes to a place of a step.

    Attributes:
        worker: which one.
        step: optimizer steps done before.
        place: "forward", "backward", "prepare", "update", "batch_end" or "recovery".
        signal: what it gets.
    """

    worker: int
    step: int
    place: str
    signal: int = signal.SIGKILL


class Diary(pl.Callback):
    """Writes the loss of every step to a file as it comes, so that it survives the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loss = float(trainer.callback_metrics["train/loss"])
        self._file.write(json.dumps([trainer.global_step, loss, trainer.world_size, time.time()]) + "\n")


class Killer(pl.Callback):
    """Ends its own process where it is told to."""

    def __init__(self, kills: Sequence[Kill], folder: Path, worker: int) -> None:
        self._kills = [kill for kill in kills if kill.worker == worker]
        self._folder = folder

    def at(self, place: str, step: int) -> None:
        for index, kill in enumerate(self._kills):
            mark = self._folder / f"kill-{kill.worker}-{kill.step}-{kill.place}-{index}"
            if (kill.place, kill.step) == (place, step) and not mark.exists():
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), kill.signal)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        elastic = trainer.strategy.elastic  # type: ignore[attr-defined]
        prepare, commit, settle = elastic.prepare, elastic.commit, elastic._settle_in

        def prepared(optimizer: Any) -> None:
            self.at("prepare", trainer.global_step)
            prepare(optimizer)
            self.at("update", trainer.global_step)

        def committed() -> None:
            commit()
            self.at("committed", trainer.global_step)

        def settled(watch: Any) -> Any:
            self.at("recovery", elastic.version)
            return settle(watch)

        elastic.prepare, elastic.commit, elastic._settle_in = prepared, committed, settled

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("forward", trainer.global_step)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("backward", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("batch_end", trainer.global_step)


@dataclass
class ElasticRun:
    """A host and its workers.

    Attributes:
        folder: diaries and results.
        expected: workers of the first world.
        steps: of the training.
        options: for `worker`.
    """

    folder: Path
    expected: int
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    settings: ElasticSettings = SETTINGS
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    _starts: dict[int, int] = field(default_factory=dict)

    def start(self, worker: int, host: RendezvousHost) -> BaseProcess:
        self._starts[worker] = self._starts.get(worker, 0) + 1
        task = ElasticTask(
            lighthouse=host.lighthouse,
            store_host=host.store_host,
            store_port=host.store_port,
            node=f"node{worker}",
            slot=worker,
            expected=self.expected,
            starts=self._starts[worker],
            settings=self.settings,
        )
        process = _FORKS.Process(
            target=_worker_main,
            args=(worker, self.expected, task.to_environment(), str(self.folder), self.steps, self.options),
            daemon=True,
        )
        process.start()
        self.processes[worker] = process
        return process

    def losses(self) -> dict[int, float]:
        """The loss of every step, from all diaries; those of one step must agree."""
        found: dict[int, float] = {}
        for path in sorted(self.folder.glob("diary-*.jsonl")):
            for line in path.read_text().splitlines():
                step, loss, _, _ = json.loads(line)
                assert abs(found.setdefault(step, loss) - loss) < 1e-5, (step, path.name)
        return found

    def result(self, worker: int) -> dict[str, Any]:
        return json.loads((self.folder / f"result-{worker}.json").read_text())  # type: ignore[no-any-return]


@contextlib.contextmanager
def elastic_run(folder: Path, *, workers: int, steps: int, **options: Any) -> Iterator[ElasticRun]:
    """Start the workers of a run; whatever lives at the end is killed."""
    run = ElasticRun(folder=folder, expected=workers, steps=steps, options=options)
    with RendezvousHost(heartbeat_timeout_s=run.settings.heartbeat_timeout_s) as host:
        run.host = host  # type: ignore[attr-defined]
        try:
            for worker in range(workers):
                run.start(worker, host)
            yield run
        finally:
            for process in run.processes.values():
                if process.is_alive():
                    process.kill()
                process.join()


def finish(run: ElasticRun, workers: Sequence[int], timeout_s: float = 90.0) -> None:
    """Wait until these workers have ended well."""
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        run.processes[worker].join(timeout=max(0.0, deadline - time.monotonic()))
        code = run.processes[worker].exitcode
        error = run.folder / f"error-{worker}.txt"
        assert code == 0, f"worker {worker} ended with {code}: {error.read_text() if error.exists() else 'no word'}"


def _worker_main(
    worker: int, expected: int, environment: dict[str, str], folder: str, steps: int, options: dict[str, Any]
) -> None:
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RUST_LOG"] = "off"
    import torch

    torch.set_num_threads(1)
    try:
        train_elastically(worker, expected, Path(folder), steps, **options)
    except BaseException:
        import traceback

        (Path(folder) / f"error-{worker}.txt").write_text(traceback.format_exc())
        raise


def train_elastically(
    worker: int,
    expected: int,
    folder: Path,
    steps: int,
    *,
    kills: Sequence[Kill] = (),
    strategy: dict[str, Any] | None = None,
    recovery: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    callbacks: Callable[[Path], list[Any]] | None = None,
    global_batch: int = 12,
    trainer_options: dict[str, Any] | None = None,
) -> None:
    """One worker: train the tiny model, leave losses and recoveries in files."""
    fault_recovery = FaultRecovery(**(recovery or {}))
    extra = callbacks(folder) if callbacks is not None else []
    trainer = make_trainer(
        worker,
        expected,
        strategy,
        max_steps=steps,
        max_epochs=1000,
        callbacks=[Killer(kills, folder, worker), Diary(folder / f"diary-{worker}.jsonl"), *extra, fault_recovery],
        **(trainer_options or {}),
    )
    module = GPTModule({**TINY, **(model or {})}, optimizer=OptimizerConfig(lr=3e-3))
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=global_batch, shuffle=True))
    reports = [vars(report) for report in fault_recovery.reports]
    result = {"steps": trainer.global_step, "reports": reports, "world_size": trainer.world_size}
    (folder / f"result-{worker}.json").write_text(json.dumps(result))
    trainer.strategy.elastic.engine.close()  # type: ignore[attr-defined]
