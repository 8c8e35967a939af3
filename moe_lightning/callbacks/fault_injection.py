"""Faults on purpose, to see a run recover: the callback over `algorithms.faults` and `elastic.fault_effects`.

Every fault strikes once in a run: its mark in the run directory outlives the process that it kills, and the step that
is repeated afterwards passes it by.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import lightning.pytorch as pl
from annotated_types import Interval
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from moe_lightning.algorithms.faults import (
    Absence,
    Change,
    Fault,
    Kind,
    Place,
    distinct,
    next_loss_s,
    parse_faults,
    returns_at_s,
    slot_absences,
)
from moe_lightning.callbacks.partial_experts_checkpoint import PartialExpertsCheckpoint
from moe_lightning.config import validated
from moe_lightning.elastic import fault_effects
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.simulate.failures import cap_nodes, read_trace
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy

_Texts = str | Sequence[str] | None

_FOREVER_S = 1e8  # a node that never comes: the launcher ends who waits for it


@validated
class FaultInjection(Callback):
    """Kills, stops, slows ranks and takes nodes, snapshots and disks away, where and when it is told to.

    Faults are texts such as "rank=1,step=30", several separated by semicolons or in a list; `algorithms.faults.Fault`
    says what each takes. Ranks are those of the world in which the step is trained.

    Args:
        dirpath: a private folder of the run, for the marks of what has struck.
        kill, stop, slow, drop_node, corrupt_arena, fill_disk: faults of each kind.
        trace: availability of nodes (milliseconds, add or remove, node), of which as many as the run has workers are
            followed: a worker whose node leaves is killed and its snapshots are deleted; the process that the launcher
            starts in its place waits until a node comes.
        trace_speed: seconds of the trace that pass in one second.
        trace_start_s: where in the trace the run begins.

    Raises:
        ConfigurationError: a fault that cannot be read or cannot be, another strategy, or a trace in a run whose
            workers are not started again or share nodes.
    """

    def __init__(
        self,
        dirpath: str,
        *,
        kill: _Texts = None,
        stop: _Texts = None,
        slow: _Texts = None,
        drop_node: _Texts = None,
        corrupt_arena: _Texts = None,
        fill_disk: _Texts = None,
        trace: str | None = None,
        trace_speed: Annotated[float, Interval(gt=0, le=1e9)] = 60.0,
        trace_start_s: Annotated[float, Interval(ge=0, le=1e9)] = 0.0,
    ) -> None:
        given: dict[Kind, _Texts] = {
            "kill": kill,
            "stop": stop,
            "slow": slow,
            "drop_node": drop_node,
            "corrupt_arena": corrupt_arena,
            "fill_disk": fill_disk,
        }
        self.faults = distinct(fault for kind, texts in given.items() for fault in parse_faults(kind, texts))
        self._trace, self._speed = trace, trace_speed
        if trace is not None:
            read_trace(Path(trace))  # a mistake in it is told before anything starts
            slot_absences([], 1, speed=trace_speed)
        self._trace_start_s = trace_start_s
        self._marks = Path(dirpath)
        self._step = 0
        self._began = 0.0
        self._peers: tuple[int, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._trainer: pl.Trainer | None = None
        self._clock: _Clock | None = None

    # ------------------------------------------------------------------ places

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = _strategy(trainer)
        if stage != "fit":
            return
        self._marks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._trainer = trainer
        strategy.worlds.listeners.append(self)
        if self._trace is not None:
            absences = self._own_absences(strategy)
            self._wait_for_node(absences)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy(trainer)
        if any(fault.kind == "drop_node" for fault in self.faults):
            pids = all_gather_json(os.getpid(), strategy.world)
            self._peers = tuple(pids[rank] for rank in strategy.worlds.mesh.node_peers)
        if not self._hooks:
            updated = partial(self._updated, trainer)
            self._hooks = [optimizer.register_step_post_hook(updated) for optimizer in trainer.optimizers]
        if self._trace is not None and self._clock is None:
            if len(set(strategy.node_of)) < len(strategy.node_of):
                raise ConfigurationError(
                    "a trace takes nodes away, and these ranks share theirs: use elastic.ranks_are_nodes=true"
                )
            self._clock = _Clock(self._origin(), self._own_absences(strategy), partial(self._lose_node, trainer))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step, self._began = trainer.global_step, time.perf_counter()
        self._strike(trainer, "forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._strike(trainer, "backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for fault in self.faults:
            if fault.rank == _strategy(trainer).world.rank and fault.slows(self._step):
                time.sleep((fault.factor - 1) * (time.perf_counter() - self._began))

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._strike(trainer, "gradients")

    def _updated(self, trainer: pl.Trainer, optimizer: Optimizer, *_: Any) -> None:
        self._strike(trainer, "update")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step:
            self._strike(trainer, "step_end")

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.training or trainer.validating:
            self._strike(trainer, "validation")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        strategy = _strategy(trainer)
        if self in strategy.worlds.listeners:
            strategy.worlds.listeners.remove(self)

    def leave(self) -> None:
        """Nothing is struck between worlds."""

    def enter(self, world: World) -> None:
        """Another world has begun."""
        assert self._trainer is not None, "only a fit has listeners"
        self._strike(self._trainer, "recovery")

    # ------------------------------------------------------------------ faults

    def _strike(self, trainer: pl.Trainer, place: Place) -> None:
        strategy = _strategy(trainer)
        for fault in self.faults:
            is_due = fault.rank == strategy.world.rank and fault.is_due(step=self._step, place=place)
            if is_due and self._mark(fault.name, step=self._step):
                print(f"fault on purpose: {fault.name}", file=sys.stderr, flush=True)
                self._apply(fault, trainer)

    def _apply(self, fault: Fault, trainer: pl.Trainer) -> None:
        if fault.kind == "kill":
            fault_effects.kill([os.getpid()])
        elif fault.kind == "stop":
            fault_effects.stop_self(fault.seconds)
        elif fault.kind == "drop_node":
            fault_effects.kill(pid for pid in self._peers if pid != os.getpid())
            self._lose_node(trainer)
        elif fault.kind == "corrupt_arena":
            fault_effects.damage_snapshots(_arenas(trainer), fault.rank)
        elif fault.kind == "fill_disk":
            fault_effects.fill_disk(Path(fault.folder), fault.megabytes, fault.seconds)

    def _lose_node(self, trainer: pl.Trainer) -> None:
        fault_effects.drop_arenas(_arenas(trainer))
        fault_effects.kill([os.getpid()])

    def _mark(self, name: str, **facts: float) -> bool:
        """Note that something has happened; False where it had before."""
        staged = self._marks / f".{name}.{os.getpid()}"
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"time_s": time.time(), **facts}, file)
        try:
            os.link(staged, self._marks / name)  # whole or not at all, and by one process only
        except FileExistsError:
            return False
        finally:
            staged.unlink()
        return True

    # ------------------------------------------------------------------ a trace

    def _own_absences(self, strategy: ExpertParallelStrategy) -> tuple[Absence, ...]:
        if strategy.elastic is None:
            raise ConfigurationError("a trace needs workers that are started again: use elastic.enabled=true")
        task = strategy.elastic.engine.task
        assert self._trace is not None
        events = read_trace(Path(self._trace), start_ms=round(1000 * self._trace_start_s))
        changes = [
            Change(time_s=event.time_ns / 1e9, failed=event.failed, joined=event.joined)
            for event in cap_nodes(events, task.expected)
        ]
        return slot_absences(changes, task.expected, speed=self._speed)[task.slot]

    def _origin(self) -> float:
        """When the trace began, in seconds since the epoch: with the first training of the run."""
        self._mark("trace")
        return float(json.loads((self._marks / "trace").read_text())["time_s"])

    def _wait_for_node(self, absences: Sequence[Absence]) -> None:
        """A process that was started in an empty slot waits until a node comes."""
        if not (self._marks / "trace").exists():
            return  # the run begins
        elapsed_s = time.time() - self._origin()
        returns_s = returns_at_s(absences, elapsed_s)
        time.sleep(min(max(0.0, returns_s - elapsed_s), _FOREVER_S))


class _Clock:
    """A thread that takes this process's node away when its time has come."""

    def __init__(self, origin: float, absences: Sequence[Absence], lose: Callable[[], None]) -> None:
        self._closed = threading.Event()
        loss_s = next_loss_s(absences, time.time() - origin)
        self._thread: threading.Thread | None = None
        if loss_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(origin + loss_s, lose), daemon=True, name="fault-injection"
            )
            self._thread.start()

    def _run(self, at: float, lose: Callable[[], None]) -> None:
        if not self._closed.wait(max(0.0, at - time.time())):
            lose()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    return own_strategy(trainer, "FaultInjection")


def _arenas(trainer: pl.Trainer) -> Path | None:
    """Where this node's snapshots lie."""
    checkpoint = next((c for c in trainer.callbacks if isinstance(c, PartialExpertsCheckpoint)), None)  # type: ignore[attr-defined]
    return checkpoint.recovery_sources(_strategy(trainer)).arenas if checkpoint is not None else None
