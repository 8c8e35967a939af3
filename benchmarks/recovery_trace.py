"""A spot trace replayed on a few ranks: what is trained in the same time by ours, by restarts from checkpoints (as with
DeepSpeed), and by restarts from whatever full set of experts is left (Lazarus 6.4: DS and DS(FT)).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recovery_runs import DiaryReader, run_elastic, run_plain
from benchmarks.recovery_worker import Task
from moe_lightning.callbacks.fault_injection import Absence, trace_absences
from moe_lightning.elastic.launcher import RanksFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

_EP_SIZE = 2
"""Ranks that hold a full set of experts together in the two baselines: they train on a multiple of them."""

_POLL_S = 0.02
_CHECKPOINT_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A part of a trace.

    Attributes:
        path: milliseconds, add or remove, node.
        start_s: where it begins, in the trace's time.
        speed: seconds of the trace that pass in one second.
        seconds: how long it is replayed, in real time.
    """

    path: Path
    start_s: float
    speed: float
    seconds: float

    def absences(self, num_slots: int) -> list[tuple[Absence, ...]]:
        """When each slot has no node.

        Raises:
            ConfigurationError: no such trace.
        """
        return trace_absences(self.path, num_slots, start_s=self.start_s, speed=self.speed)


def replay_all(task: Task, replay: Replay) -> dict[str, dict[str, float]]:
    """Train under the trace in each way; see `score` for what is returned of each."""
    trace = {
        "trace": str(replay.path),
        "trace_speed": replay.speed,
        "trace_start_s": replay.start_s,
    }
    ours = replace(task, folder=f"{task.folder}-ours", recovery={"min_replicas": 2}, every_n_steps=10, faults=trace)
    full_set = replace(
        task,
        folder=f"{task.folder}-dsft",
        recovery={"min_replicas": 1, "protection": "none"},
        strategy={"replicas": task.ranks // _EP_SIZE},
        every_n_steps=_CHECKPOINT_STEPS,
        faults=trace,
    )
    restarts = replace(task, folder=f"{task.folder}-ds", every_n_steps=_CHECKPOINT_STEPS)
    return {
        "ours": _in_process(ours, replay),
        "DS(FT)-like": _in_process(full_set, replay),
        "DS-like": _restarting(restarts, replay),
    }


def _in_process(task: Task, replay: Replay) -> dict[str, float]:
    """Workers die and come by themselves, as FaultInjection replays the trace in each of them."""
    found: dict[str, float] = {}

    def act(watch: DiaryReader) -> None:
        began_s = _first_step_s(watch)
        time.sleep(max(0.0, began_s + replay.seconds - time.time()))
        found.update(score(watch.read(), began_s, replay.seconds, task))

    run_elastic(task, act)
    return found


def _restarting(task: Task, replay: Replay) -> dict[str, float]:
    """All ranks end at every change and start over from the last checkpoint, as many as make whole groups."""
    absences, watch = replay.absences(task.ranks), DiaryReader(Path(task.folder))
    ended, is_training = threading.Event(), threading.Event()
    began_s: list[float] = []
    size = task.ranks

    def live() -> int:
        now_s = time.time() - began_s[0] if began_s else 0.0
        there = sum(not any(a.covers(now_s) for a in slot) for slot in absences)
        return there // _EP_SIZE * _EP_SIZE

    def end_ranks_at_changes() -> None:
        began_s.append(_first_step_s(watch))
        moments = _moments(absences)
        while not ended.wait(_POLL_S):
            now_s = time.time()
            is_over = now_s >= began_s[0] + replay.seconds
            if is_over or any(started_s < began_s[0] + moment <= now_s for moment in moments):
                _kill_ranks(watch, since_s=started_s)  # again and again: some may not have started yet
            if is_over and not is_training.is_set():
                ended.set()

    started_s = time.time()
    director = threading.Thread(target=end_ranks_at_changes, daemon=True, name="bench-trace")
    director.start()
    while not began_s or time.time() < began_s[0] + replay.seconds:
        if size:
            is_training.set()
            started_s = time.time()
            with contextlib.suppress(RanksFailed):
                run_plain(replace(task, ranks=size))
            is_training.clear()
        time.sleep(_POLL_S)
        size = live()
    director.join()
    return score(watch.read(), began_s[0], replay.seconds, task)


def _kill_ranks(watch: DiaryReader, since_s: float) -> None:
    """End the processes that were started since then."""
    for entry in watch.read():
        if entry["kind"] == "start" and entry["time_s"] >= since_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry["pid"], signal.SIGKILL)


def _first_step_s(watch: DiaryReader) -> float:
    """Waits for the first step; when it began."""

    def first(entries: Iterable[Mapping[str, Any]]) -> float:
        return next((float(e["time_s"]) - float(e["step_s"]) for e in entries if e["kind"] == "step"), 0.0)

    began_s: float = watch.wait(first, "the first step")
    return began_s


def _moments(absences: Iterable[Sequence[Absence]]) -> list[float]:
    """All changes, ascending."""
    return sorted({moment for slot in absences for a in slot for moment in (a.from_s, a.to_s)})


def score(entries: Sequence[Mapping[str, Any]], began_s: float, seconds: float, task: Task) -> dict[str, float]:
    """What a run got done in a time.

    Args:
        entries: of the diaries, in the order of time.

    Returns:
        steps: done at the end; samples_per_s: those that count; steps_lost: done and then done again; longest_gap_s:
        between two finished steps.

    Raises:
        ConfigurationError: no step in that time.
    """
    mine = [e for e in entries if e["kind"] == "step" and e["time_s"] <= began_s + seconds]
    if not mine:
        raise ConfigurationError(f"no step was done in {seconds:g} s: replay the trace for longer")
    started_s = {e["pid"]: e["time_s"] for e in entries if e["kind"] == "start"}
    reached, reached_s, lost = 0, 0.0, 0
    reporters: set[int] = set()  # of the step that is reached: who reports it twice has done it again
    for entry in mine:
        step, pid = entry["step"], entry["pid"]
        again = pid in reporters or started_s.get(pid, 0.0) > reached_s
        if step != reached or again:
            lost += max(0, reached - step + 1)
            reached, reached_s, reporters = step, entry["time_s"], set()
        reporters.add(pid)
    ends_s = [began_s, *(entry["time_s"] for entry in mine), began_s + seconds]
    return {
        "steps": reached,
        "samples_per_s": reached * task.batch / seconds,
        "steps_lost": lost,
        "longest_gap_s": max(later - earlier for earlier, later in pairwise(ends_s)),
    }


def format_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """One line for each way."""
    base = scores["DS-like"]["samples_per_s"]
    rows = [
        (
            name,
            f"{row['steps']:.0f}",
            f"{row['samples_per_s']:.1f}",
            f"{row['samples_per_s'] / base:.1f}" if base else "-",
            f"{row['steps_lost']:.0f}",
            f"{row['longest_gap_s']:.1f}",
        )
        for name, row in scores.items()
    ]
    return table(("", "steps", "samples/s", "times DS-like", "steps lost", "longest gap s"), rows)
