"""Files that a token, a gradient, a snapshot with its restore and a fault pass through, and the functions of a step and
a recovery in the order of their calls, recorded in small real runs.

Usage: python -m tests.walks prints the files of each walk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.utils.data import DataLoader

from moe_lightning import FaultRecovery, MoELayer, PartialExpertsCheckpoint
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.elastic import launcher
from moe_lightning.strategies.committed_step import CommittedStep
from moe_lightning.strategies.elastic_worlds import ElasticWorlds, RecoveryPolicy
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.train_state import StateTransfer
from tests import agents
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, train
from tests.documented import ROOT
from tests.forks import PATIENCE_S, fork

NOT_ON_THE_WAY = {
    "moe_lightning/checkpoint/names.py": "reads names of directories",
    "moe_lightning/config.py": "checks arguments of constructors",
    "moe_lightning/cores.py": "counts the cores that a process may use",
    "moe_lightning/errors.py": "exception classes",
    "moe_lightning/files.py": "opens and replaces small files",
    "moe_lightning/registry.py": "finds a part by its name",
    "moe_lightning/strategies/checks.py": "checks a Trainer and its module before training",
    "moe_lightning/strategies/optimizer_checks.py": "tries optimizers on small parameters before training",
    "moe_lightning/strategies/hangs.py": "reports hangs, from a thread beside training",
    "moe_lightning/strategies/launchers.py": "starts the other ranks before training",
    "moe_lightning/strategies/process_stacks.py": "stacks for reports of hangs",
    "moe_lightning/strategies/slow_ranks.py": "names slow ranks, from a thread beside training",
}
"""Files that serve configuration, validation, errors, their reports, small files, names or the start of processes
alone, with the reason; no walk counts them.
"""

_CO_OPTIMIZED = 1  # functions; bodies of modules and classes run at import
_STEPS, _KILLED_AT = 6, 3


class Trace:
    """Record the files of the package and of its kernels whose functions are called, and these functions.

    In the main thread calls count while a stretch of the walk is open, in threads of the given names always.

    Args:
        threads: beginnings of names of threads that belong to the walk.
    """

    def __init__(self, *threads: str) -> None:
        self.files: dict[str, None] = {}  # in the order in which they are entered first
        self.functions: dict[str, None] = {}
        self.is_enabled = True
        self._threads = threads
        self._depth = 0

    def __enter__(self) -> Self:
        threading.setprofile(self._in_thread)
        sys.setprofile(self._in_main)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _in_main(self, frame: FrameType, event: str, argument: object) -> None:
        if self._depth and event == "call":
            self._record(frame)

    def _in_thread(self, frame: FrameType, event: str, argument: object) -> None:
        if not threading.current_thread().name.startswith(self._threads):
            sys.setprofile(None)
        elif event == "call":
            self._record(frame)

    def _record(self, frame: FrameType) -> None:
        name = file_of(frame.f_code.co_filename)
        if name and frame.f_code.co_flags & _CO_OPTIMIZED:
            self.files.setdefault(name)
            self.functions.setdefault(frame.f_code.co_qualname)

    def open(self) -> None:
        """Begin a stretch of the walk; stretches may contain each other."""
        self._depth += 1

    def close(self) -> None:
        """End a stretch of the walk."""
        self._depth -= 1

    def during(self, owner: Any, *names: str) -> None:
        """Let each call of these methods be a stretch of the walk, while the trace is enabled."""
        for name in names:
            setattr(owner, name, self._stretch(getattr(owner, name)))

    def _stretch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if not self.is_enabled:
                return function(*args, **kwargs)
            self.open()
            try:
                return function(*args, **kwargs)
            finally:
                self.close()

        return traced


@cache
def file_of(path: str) -> str | None:
    """Return the name of a file of the package or its kernels, below the root of the repository; None of others."""
    if "moe_lightning" not in path and "kernels" not in path:
        return None
    found = Path(path).resolve()
    if not any(found.is_relative_to(ROOT / folder) for folder in ("moe_lightning", "kernels")):
        return None
    name = str(found.relative_to(ROOT))
    return None if name in NOT_ON_THE_WAY else name


def in_order(*files: Iterable[str]) -> list[str]:
    """Return each file once, where it is met first."""
    return list(dict.fromkeys(name for some in files for name in some))


class Enabled(pl.Callback):
    """Enables traces from the second step on: the first one builds what later ones use."""

    def __init__(self, *traces: Trace) -> None:
        self._traces = traces

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for trace in self._traces:
            trace.is_enabled = trainer.global_step > 0


# ---------------------------------------------------------------------- a token, a gradient


@cache
def step_walks() -> dict[str, list[str]]:
    """The walks of a token and of a gradient, and the functions of a step, of two ranks and every expert on both."""
    results = run_ranks(2, _trace_steps)
    return {walk: in_order(*(result[walk] for result in results)) for walk in ("token", "gradient", "step")}


def _trace_steps(rank: int, world_size: int) -> dict[str, list[str]]:
    found = {}
    for walk, prepare in (("token", _trace_token), ("gradient", _trace_gradient)):
        with Trace() as trace:
            prepare(trace)
            strategy = {"replicas": 2, "check_state_every": 0}
            train(rank, world_size, own_module=True, steps=3, strategy=strategy, callbacks=[Enabled(trace)])
        found[walk] = list(trace.files)
    with Trace() as trace:
        trace.during(ExpertParallelStrategy, "batch_to_device", "optimizer_step")
        train(rank, world_size, own_module=True, steps=3, strategy={"replicas": 2}, callbacks=[Enabled(trace)])
    return found | {"step": list(trace.functions)}


def _trace_token(trace: Trace) -> None:
    trace.during(MoELayer, "forward")


def _trace_gradient(trace: Trace) -> None:
    """From the beginning of the backward pass, which lies inside the optimizer's step, to the end of that step."""
    backward, step = ExpertParallelStrategy.backward, ExpertParallelStrategy.optimizer_step

    def traced_backward(*args: Any, **kwargs: Any) -> Any:
        if trace.is_enabled:
            trace.open()
        return backward(*args, **kwargs)

    def traced_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if trace.is_enabled:
            trace.close()
        return result

    ExpertParallelStrategy.backward, ExpertParallelStrategy.optimizer_step = traced_backward, traced_step


# ---------------------------------------------------------------------- a snapshot and its restore


def snapshot_walk() -> list[str]:
    """The walk of a snapshot to its committed checkpoint and back into a run: two ranks, half of the experts saved."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        root, files = Path(name) / uuid.uuid4().hex / "checkpoints", Path(name) / "agent.json"
        with patch.object(agents, "_agent_main", partial(_traced_agent, str(files))):
            agent = agents.agent_ahead(root)
        saved = run_ranks(2, _trace_saving, str(root))
        agent.join(PATIENCE_S)
        assert agent.exitcode == 0
        agent = agents.agent_ahead(root)
        restored = run_ranks(2, _trace_restoring, str(root))
        agent.join(PATIENCE_S)
        return in_order(*saved, json.loads(files.read_text()), *restored)


def _traced_agent(files: str, *arguments: Any) -> None:
    with Trace() as trace:
        trace.during(Agent, "serve_once")
        try:
            _AGENT_MAIN(*arguments)
        finally:
            Path(files).write_text(json.dumps(list(trace.files)))


_AGENT_MAIN = agents._agent_main


def _saver(root: str) -> PartialExpertsCheckpoint:
    return PartialExpertsCheckpoint(root, every_n_steps=1, k_snapshot=3, timeout_s=PATIENCE_S)


def _trace_saving(rank: int, world_size: int, root: str) -> list[str]:
    """Hooks of the callback and the thread that copies, from the second step on: the first one opens the session."""
    with Trace("snapshot") as trace:
        trace.during(PartialExpertsCheckpoint, "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
        _train_and_save(rank, world_size, root, steps=_STEPS, callbacks=[Enabled(trace)])
    return list(trace.files)


def _trace_restoring(rank: int, world_size: int, root: str) -> list[str]:
    """Everything that Lightning's resume calls."""
    with Trace() as trace:
        trace.during(
            _CheckpointConnector,
            *(name for name, member in vars(_CheckpointConnector).items() if callable(member) and name[:2] != "__"),
        )
        _train_and_save(rank, world_size, root, steps=_STEPS + 1, ckpt_path="last", callbacks=[Dump(trace)])
    return list(trace.files)


class Dump(pl.Callback):
    """Ends a trace when training starts."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def on_train_start(self, *_: Any) -> None:
        self._trace.is_enabled = False


def _train_and_save(rank: int, world_size: int, root: str, *, callbacks: Sequence[pl.Callback], **options: Any) -> None:
    train(
        rank,
        world_size,
        own_module=True,
        callbacks=[*callbacks, _saver(root)],
        trainer={"enable_checkpointing": True},
        strategy={"check_state_every": 0},
        **options,
    )


# ---------------------------------------------------------------------- a fault


@cache
def fault_walks() -> dict[str, list[str]]:
    """The walk of a killed rank of three: its launcher, the rendezvous host, and the two that go on; the functions of
    the recovery on one of these; and all calls of its `CommittedStep` and `StateTransfer`.
    """
    with tempfile.TemporaryDirectory(prefix="walk-") as name, Trace("elastic") as trace:
        run = launcher.ElasticLauncher(num_ranks=3, log_dir=Path(name), cool_down_s=60.0, grace_s=1.0)
        workers: list[ForkedWorker] = []
        started = partial(_start, workers, name)
        with patch.object(launcher, "start", started), _restored(launcher._Workers, "_handle_exit"):
            trace.during(launcher._Workers, "_handle_exit")
            run.run([])
        left = [json.loads(path.read_text()) for path in Path(name).glob("walk-*.json")]
        assert len(left) == 2, "two of three survive"
        assert left[0]["calls"] == left[1]["calls"]
        return {
            "fault": in_order(trace.files, *(each["files"] for each in left)),
            "recovery": left[0]["functions"],
            "calls": left[0]["calls"],
        }


@contextlib.contextmanager
def _restored(owner: Any, name: str) -> Iterator[None]:
    former = getattr(owner, name)
    yield
    setattr(owner, name, former)


class ForkedWorker:
    """In place of a worker in a fresh interpreter: the part of subprocess.Popen that launchers use."""

    def __init__(self, *arguments: Any) -> None:
        self._process = fork(_worker, *arguments)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start(
    workers: list[ForkedWorker],
    folder: str,
    program: Sequence[str],
    environment: Mapping[str, str],
    logs: Any,
) -> ForkedWorker:
    workers.append(ForkedWorker(len(workers), {**environment, **logs.begin()}, folder))
    return workers[-1]


def _worker(number: int, environment: dict[str, str], folder: str) -> None:
    os.setsid()
    os.environ.update(environment)
    torch.set_num_threads(1)
    calls: list[str] = []
    _record_calls(calls, CommittedStep, StateTransfer)
    with Trace("elastic") as trace:
        _trace_recovery(trace)
        trainer = make_trainer(
            number, 3, max_steps=_STEPS, callbacks=[FaultRecovery(), Victim(number == 2)], enable_checkpointing=False
        )
        trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12, shuffle=True))
        Path(folder, f"walk-{number}.json").write_text(
            json.dumps({"files": list(trace.files), "functions": list(trace.functions), "calls": calls})
        )
    trainer.strategy.elastic.engine.close()


def _record_calls(calls: list[str], *owners: type) -> None:
    """Append each call of these classes' public methods to `calls`, as "Class.method"."""

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__qualname__)
            return function(*args, **kwargs)

        return record

    for owner in owners:
        for name, member in list(vars(owner).items()):
            if callable(member) and name[0] != "_":
                setattr(owner, name, recorded(member))


class Victim(pl.Callback):
    """Kills its process before a step."""

    def __init__(self, is_victim: bool) -> None:
        self._is_victim = is_victim

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._is_victim and trainer.global_step == _KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def _trace_recovery(trace: Trace) -> None:
    """From the exception that ends the fit loop in a broken world to where the loop runs again."""
    run = ElasticWorlds.run

    def traced_run(elastic: ElasticWorlds, policy: RecoveryPolicy, fit: Callable[[], None]) -> None:
        is_open = False

        def traced_fit() -> None:
            nonlocal is_open
            if is_open:
                trace.close()
            is_open = False
            try:
                fit()
            except Exception:
                is_open = True
                trace.open()
                raise

        run(elastic, policy, traced_fit)

    ElasticWorlds.run = traced_run  # type: ignore[method-assign]


WALKS: dict[str, Callable[[], list[str]]] = {
    "A token": lambda: step_walks()["token"],
    "A gradient": lambda: step_walks()["gradient"],
    "A snapshot and its restore": snapshot_walk,
    "A fault": lambda: fault_walks()["fault"],
}
ORDERS: dict[str, Callable[[], list[str]]] = {
    "A step in one screen": lambda: step_walks()["step"],
    "A recovery in one screen": lambda: fault_walks()["recovery"],
}


def main() -> None:
    """Print the files of each walk, and the functions in the order of their calls."""
    for title, walk in (WALKS | ORDERS).items():
        names = walk()
        print(f"{title}: {len(names)}", *names, sep="\n    ")


if __name__ == "__main__":
    main()
