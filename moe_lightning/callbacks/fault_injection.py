"""Fault injection, to see a run recover: faults as text, their effects, and the callback that applies them.

parse_faults("kill", "rank=1,step=30")
parse_faults("stop", "rank=0,step=40,seconds=5,place=backward; rank=2,step=60,seconds=5")

Every fault strikes once in a run: its mark in the run directory outlives the process that it kills, and the step that
is repeated afterwards passes it by.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import lightning.pytorch as pl
from annotated_types import Interval
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.arena import Arena, arena_path
from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, PositiveInt, Seconds, build_config, validated
from moe_lightning.elastic.membership import ElasticTask
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.simulate.failures import Event, cap_nodes, read_trace
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.worlds import ExpertParallelCallback

Kind = Literal["kill", "stop", "slow", "drop_node", "corrupt_arena", "fill_disk"]
Place = Literal["forward", "backward", "gradients", "update", "step_end", "validation", "recovery"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PLACES: tuple[Place, ...] = get_args(Place)

_PASSED_AT_ANY_STEP = ("validation", "recovery")
"""Places that not every step has: the first one from the step on counts."""

_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "kill": ("place",),
    "stop": ("place", "seconds"),
    "slow": ("factor", "steps"),
    "drop_node": ("place",),
    "corrupt_arena": ("place",),
    "fill_disk": ("folder", "megabytes", "seconds"),
}
"""Options of each kind, beside rank and step."""

_EXAMPLES = {"fill_disk": ",folder=FOLDER,megabytes=100", "stop": ",seconds=10", "slow": ",factor=2"}


@validated
@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: "kill" (SIGKILL), "stop" (SIGSTOP, and SIGCONT after `seconds`), "slow" (forward and backward take
            `factor` times as long for `steps` steps), "drop_node" (all ranks of the rank's node are killed and their
            snapshots deleted), "corrupt_arena" (every snapshot of the rank is damaged), "fill_disk" (at most
            `megabytes` of a `folder` are taken for `seconds`).
        rank: of the world in which the step is trained.
        step: optimizer steps done before.
        place: before the "forward" or "backward" pass; with the step's "gradients" summed; in the "update", when this
            rank has applied it and others may not have; at "step_end"; in a "validation" or at the end of a
            "recovery", the first from the step on.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    kind: Kind
    rank: NonNegativeInt
    step: NonNegativeInt
    place: Place = "forward"
    seconds: Seconds = 10.0
    factor: Annotated[float, Interval(gt=1, le=1e6)] = 2.0
    steps: PositiveInt = 10
    folder: str = ""
    megabytes: Annotated[float, Interval(gt=0, le=1e9)] = 100.0

    @property
    def name(self) -> str:
        """Tells it from all other faults of a run."""
        return f"{self.kind}.rank{self.rank}.step{self.step}.{self.place}"

    def is_due(self, *, step: int, place: Place) -> bool:
        """True if the fault strikes here, on its rank."""
        if place != self.place:
            return False
        return step >= self.step if place in _PASSED_AT_ANY_STEP else step == self.step

    def slows(self, step: int) -> bool:
        """True if the fault slows this step."""
        return self.kind == "slow" and self.step <= step < self.step + self.steps


def parse_faults(kind: Kind, texts: str | Sequence[str] | None) -> tuple[Fault, ...]:
    """Faults of one kind from "rank=1,step=30" and its like, several separated by semicolons or in a list.

    Raises:
        ConfigurationError: a name that the kind does not take, one that is missing or comes twice, a value of another
            type or out of range, the same fault twice.
    """
    lines = [] if texts is None else [texts] if isinstance(texts, str) else list(texts)
    faults = [_parsed(kind, part.strip()) for line in lines for part in str(line).split(";") if part.strip()]
    if lines and not faults:
        raise ConfigurationError(f"{kind}={lines[0]!r} names no fault: write {_example(kind)}, or null for none")
    return distinct(faults)


def distinct(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults in the order of their steps.

    Raises:
        ConfigurationError: one comes twice; as each strikes once in a run, the second never would.
    """
    known: dict[str, Fault] = {}
    for fault in sorted(faults, key=lambda f: (f.step, f.name)):
        if fault.name in known:
            raise ConfigurationError(
                f"{fault.kind} strikes rank {fault.rank} twice at step {fault.step}, {fault.place}: change one"
            )
        known[fault.name] = fault
    return tuple(known.values())


def _parsed(kind: Kind, text: str) -> Fault:
    pairs = [tuple(map(str.strip, part.partition("="))) for part in text.split(",")]
    given = {name: value for name, _, value in pairs}
    taken = ("rank", "step", *_OPTIONS[kind])
    needed = ("rank", "step", *(("folder", "megabytes") if kind == "fill_disk" else ()))
    problems = [
        *(f"cannot be read at {''.join(pair)!r}" for pair in pairs if not all(pair)),
        *(f"has {name}, which is not one of {', '.join(taken)}" for name in given if name not in taken),
        *(f"lacks {name}" for name in needed if name not in given),
        *(f"sets {name} twice" for name in given if [pair[0] for pair in pairs].count(name) > 1),
    ]
    if problems:
        raise ConfigurationError(f"{kind}={text!r} {problems[0]}: write {_example(kind)}")
    values = {name: value if name in ("place", "folder") else _number(value) for name, value in given.items()}
    return build_config(Fault, {"kind": kind, **values}, key=kind)


def _number(text: str) -> int | float | str:
    """Return a text as a number if it is one."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _example(kind: Kind) -> str:
    return f"rank=1,step=30{_EXAMPLES.get(kind, '')}"


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A slot has no node from `from_s` on, until `to_s`."""

    from_s: float
    to_s: float = math.inf

    def covers(self, time_s: float) -> bool:
        """True if the slot is empty then."""
        return self.from_s <= time_s < self.to_s


def slot_absences(events: Iterable[Event], num_slots: int, *, speed: float = 1.0) -> list[tuple[Absence, ...]]:
    """Return the absences of each slot as nodes come and go; a new node takes the lowest free slot.

    Args:
        events: of `cap_nodes`, for so many nodes; the first one fills the slots at the start.
        num_slots: workers of the run.
        speed: above 0; seconds of the events that pass in one second.
    """
    slot_of: dict[int, int] = {}
    empty_since = dict.fromkeys(range(num_slots), 0.0)
    absences: list[list[Absence]] = [[] for _ in range(num_slots)]
    for event in events:
        time_s = event.time_ns / 1e9 / speed
        for node in event.failed:
            empty_since[slot_of.pop(node)] = time_s
        for node in event.joined:
            slot = slot_of[node] = min(empty_since)
            since_s = empty_since.pop(slot)
            if time_s > 0:  # at the same moment another node has left: its process ends all the same
                absences[slot].append(Absence(from_s=since_s, to_s=time_s))
    for slot, since_s in empty_since.items():
        absences[slot].append(Absence(from_s=since_s))
    return [tuple(found) for found in absences]


def trace_absences(path: Path, num_slots: int, *, start_s: float, speed: float) -> list[tuple[Absence, ...]]:
    """Return the absences of each slot by a trace of nodes, of which as many as there are slots are followed.

    Args:
        path: of the trace.
        num_slots: workers of the run.
        start_s: where in the trace the run begins.
        speed: above 0; seconds of the trace that pass in one second.

    Raises:
        ConfigurationError: no such trace.
    """
    events = cap_nodes(read_trace(path, start_ms=round(1000 * start_s)), num_slots)
    return slot_absences(events, num_slots, speed=speed)


def start_timer(began_s: float, absences: Sequence[Absence], lose: Callable[[], None]) -> threading.Timer | None:
    """Call a function when the slot loses its node the next time; None if it never does.

    Args:
        began_s: start of the trace, seconds since the epoch.
        absences: of the slot.
        lose: takes the node away.
    """
    now_s = time.time() - began_s
    losses = [absence.from_s for absence in absences if absence.from_s > now_s]
    if not losses:
        return None
    timer = threading.Timer(min(losses) - now_s, lose)
    timer.daemon = True
    timer.start()
    return timer


_PIECE_BYTES = 1 << 20


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to processes, this one last; those that are gone already are passed over."""
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def stop_self(seconds: float) -> None:
    """SIGSTOP to this process; a shell continues it after a while."""
    command = f"sleep {seconds}; kill -CONT {os.getpid()} 2> /dev/null"
    subprocess.Popen(  # outlives a rank that is killed meanwhile: readers of its output must not wait for it
        ["sh", "-c", command], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.kill(os.getpid(), signal.SIGSTOP)


def drop_arenas(arenas: Path | None) -> None:
    """Delete a node's snapshots, as if its memory were gone; an agent may still finish what it is writing."""
    if arenas is not None:
        shutil.rmtree(arenas, ignore_errors=True)


def damage_snapshots(arenas: Path | None, rank: int) -> int:
    """Turn round one byte in every piece of a rank's snapshots; how many pieces.

    Raises:
        ConfigurationError: the rank has no snapshots.
    """
    if arenas is None or not arena_path(arenas, rank).exists():
        raise ConfigurationError(
            f"corrupt_arena: rank {rank} has no snapshots at this step: use callbacks=partial_experts, or a later step"
        )
    arena = Arena(arena_path(arenas, rank))
    blocks = {piece.at.data_offset: piece for table in arena.tables() for piece in table.placed if piece.nbytes}
    for piece in blocks.values():
        arena.payload(piece)[piece.nbytes // 2] ^= 0xFF
    arena.close()
    return len(blocks)


def fill_disk(folder: Path, megabytes: float, seconds: float) -> int:
    """Take at most so much space of a folder's file system for a while, or until this process ends; bytes taken.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"fill_disk: folder={folder} is not a folder that can be written to")
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the timer closes it)
    wanted, taken = round(megabytes * 1e6), 0
    with suppress(OSError):  # full, which is what was asked for
        while taken < wanted:
            piece = min(_PIECE_BYTES, wanted - taken)
            os.posix_fallocate(file.fileno(), taken, piece)
            taken += piece
    timer = threading.Timer(seconds, file.close)
    timer.daemon = True
    timer.start()
    return taken


_Texts = str | Sequence[str] | None

_FOREVER_S = 1e8  # a node that never comes: the launcher ends who waits for it


@validated
class FaultInjection(ExpertParallelCallback):
    """Kills, stops, slows ranks and takes nodes, snapshots and disks away, where and when it is told to.

    Faults are texts such as "rank=1,step=30", several separated by semicolons or in a list; `Fault` lists their keys.
    Ranks are those of the world in which the step is trained.

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
        texts = (kill, stop, slow, drop_node, corrupt_arena, fill_disk)
        self.faults = distinct(
            fault for kind, given in zip(KINDS, texts, strict=True) for fault in parse_faults(kind, given)
        )
        self._trace, self._speed, self._trace_start_s = trace, trace_speed, trace_start_s
        if trace is not None:
            read_trace(Path(trace))  # a mistake in it is told before anything starts
        self._marks = Path(dirpath)
        self._step = 0
        self._began = 0.0
        self._peers: tuple[int, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._timer: threading.Timer | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _strategy(trainer)  # refuses others
        if stage != "fit":
            return
        self._marks.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._trace is not None:
            self._wait_for_node(self._own_absences())

    @override
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = _strategy(trainer)
        if any(fault.kind == "drop_node" for fault in self.faults):
            pids = all_gather_json(os.getpid(), strategy.world)
            self._peers = tuple(pids[rank] for rank in strategy.world.node_peers)
        if not self._hooks:
            updated = partial(self._updated, trainer)
            self._hooks = [optimizer.register_step_post_hook(updated) for optimizer in trainer.optimizers]
        if self._trace is not None and self._timer is None:
            if len(set(strategy.world.nodes)) < strategy.world.size:
                raise ConfigurationError(
                    "a trace takes nodes away, and these ranks share theirs: use elastic.ranks_are_nodes=true"
                )
            self._mark("trace")  # it begins with the first training of the run
            self._timer = start_timer(self._began_s(), self._own_absences(), partial(self._lose_node, trainer))

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._step, self._began = trainer.global_step, time.perf_counter()
        self._strike(trainer, "forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike(trainer, "backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        for fault in self.faults:
            if fault.rank == _strategy(trainer).world.rank and fault.slows(self._step):
                time.sleep((fault.factor - 1) * (time.perf_counter() - self._began))

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike(trainer, "gradients")

    def _updated(self, trainer: pl.Trainer, optimizer: Optimizer, *_: Any) -> None:
        self._strike(trainer, "update")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > self._step:
            self._strike(trainer, "step_end")

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.training or trainer.validating:
            self._strike(trainer, "validation")

    @override
    def on_world_changed(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike(trainer, "recovery")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning calls no teardown then

    def _strike(self, trainer: pl.Trainer, place: Place) -> None:
        strategy = _strategy(trainer)
        for fault in self.faults:
            is_due = fault.rank == strategy.world.rank and fault.is_due(step=self._step, place=place)
            if is_due and self._mark(fault.name):
                print(f"fault on purpose: {fault.name}", file=sys.stderr, flush=True)
                self._apply(fault, trainer)

    def _apply(self, fault: Fault, trainer: pl.Trainer) -> None:
        if fault.kind == "kill":
            kill([os.getpid()])
        elif fault.kind == "stop":
            stop_self(fault.seconds)
        elif fault.kind == "drop_node":
            kill(pid for pid in self._peers if pid != os.getpid())
            self._lose_node(trainer)
        elif fault.kind == "corrupt_arena":
            damage_snapshots(_arenas(trainer), fault.rank)
        elif fault.kind == "fill_disk":
            fill_disk(Path(fault.folder), fault.megabytes, fault.seconds)

    def _lose_node(self, trainer: pl.Trainer) -> None:
        drop_arenas(_arenas(trainer))
        kill([os.getpid()])

    def _mark(self, name: str) -> bool:
        """Note that something has happened; False where it had before."""
        try:
            (self._marks / name).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _own_absences(self) -> tuple[Absence, ...]:
        if (task := ElasticTask.from_environment()) is None:
            raise ConfigurationError("a trace needs workers that are started again: use elastic.enabled=true")
        assert self._trace is not None
        slots = trace_absences(Path(self._trace), task.expected, start_s=self._trace_start_s, speed=self._speed)
        return slots[task.slot]

    def _began_s(self) -> float:
        """Start of the trace in seconds since the epoch."""
        return (self._marks / "trace").stat().st_mtime

    def _wait_for_node(self, absences: Sequence[Absence]) -> None:
        """A process that was started in an empty slot waits until a node comes."""
        if not (self._marks / "trace").exists():
            return  # the run begins
        now_s = time.time() - self._began_s()
        absence = next((absence for absence in absences if absence.covers(now_s)), None)
        if absence is not None:
            time.sleep(min(absence.to_s - now_s, _FOREVER_S))


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    return own_strategy(trainer, "FaultInjection")


def _arenas(trainer: pl.Trainer) -> Path | None:
    """Folder of this node's snapshots."""
    checkpoint = private_lightning.callback_of(trainer, PartialExpertsCheckpoint)
    return checkpoint.recovery_sources(_strategy(trainer)).arenas if checkpoint is not None else None
