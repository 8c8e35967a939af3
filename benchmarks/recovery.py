"""moe-bench recovery: what a killed rank costs, what readiness for it costs, what a run gets done under a spot trace.

Ranks are killed with SIGKILL from outside at random moments. In-process recovery stands beside a restart of all ranks
by our launcher and by stock torchrun with plain DDP and Lightning's ModelCheckpoint, all with the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from benchmarks.measuring import goal, medians_of
from benchmarks.recovery_runs import (
    KILL_PHASES,
    drop_snapshots,
    kills_in_process,
    kills_of_all,
    run_elastic,
    run_plain,
    run_torchrun,
)
from benchmarks.recovery_trace import Replay, format_table, replay_all
from benchmarks.recovery_worker import Task
from moe_lightning.arguments import Count, InputFile, OutputFile, option
from moe_lightning.cli.short_training import machine, rank_failures_as_user_errors
from moe_lightning.config import NonNegativeInt, Seconds
from moe_lightning.elastic.etcd import EtcdAccess
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import phase_lines, require, svg
from moe_lightning.simulate.failures import read_trace
from moe_lightning.text_table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]

PARTS = ("kill", "restart", "cost", "trace")
_GOAL_S = 1.0
_GOAL_COST = 1.03
_WARMUP_STEPS = 10
_EVERY_N_STEPS = 5  # between the checkpoints that a restart goes on from


def _endpoints(text: str) -> str:
    """Addresses of an etcd cluster, as argparse's `type`."""
    try:
        EtcdAccess.parse(text, {})
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    parts: list[str] = option("what to measure", PARTS, choices=PARTS)
    ranks: Count = option("workers", 4)
    rounds: Count = option("kills of each kind", 10)
    cost_rounds: Count = option("trainings of each kind, in turns, without a fault", 3)
    cost_steps: Count = option("measured steps of each", 60)
    trace: InputFile | None = option("spot trace: milliseconds,add|remove,node", None)
    trace_start: Annotated[float, Interval(ge=0, le=1e9)] = option("where it begins, in its seconds", 1980.0)
    trace_speed: Seconds = option("its seconds that pass in one", 30.0)
    trace_seconds: Seconds = option("how long it is replayed, in real seconds", 120.0)
    batch: Count = option("sequences of all ranks", 12)
    d_model: Count = option("model width", 64)
    d_expert: Count = option("expert width", 128)
    dense: Literal["ddp", "hsdp"] = option("how the ranks of in-process kills share dense parameters", "ddp")
    pp: Count = option("pipeline stages of in-process kills", 1)
    etcd: Annotated[str, _endpoints] | None = option(
        "endpoints of an etcd in which in-process kills elect their host", None
    )
    seed: NonNegativeInt = option("of the moments of the kills", 0)
    quick: bool = option("one round of everything, of few steps: only to try it", False)
    json: OutputFile | None = option("where to leave all measurements", None)
    svg: OutputFile | None = option("where to leave a picture of the recoveries", None)


def run(options: Options) -> int:
    """Measure, print tables and the goals beside what was reached; 0 on success."""
    options = _checked(options)
    if options.quick:
        options = replace(options, rounds=1, cost_rounds=1, cost_steps=5, trace_seconds=20.0)
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    print(
        f"{machine()}; {options.ranks} ranks share cores {list(cores)}; load average {_load()} at the start", flush=True
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="moe-recovery-", ignore_cleanup_errors=True) as folder:
        task = Task(
            folder=str(Path(folder) / Path(folder).name),  # runs are named by their folders: one of its own
            ranks=options.ranks,
            batch=options.batch,
            d_model=options.d_model,
            d_expert=options.d_expert,
            cores=cores,
        )
        for part in PARTS:
            if part in options.parts:
                results[part] = _MEASURE[part](task, options)
                print(f"({part} measured at a load average of {_load()})\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    if options.svg is not None:
        options.svg.write_text(svg(picture({**results.get("kill", {}), **results.get("restart", {})})))
    return 0


def _checked(options: Options) -> Options:
    """With the parts that can be measured."""
    if options.ranks < 2 or options.batch % options.ranks:
        raise ConfigurationError(
            f"--ranks {options.ranks} must be at least 2 and divide --batch {options.batch}: plain DDP does not "
            "support uneven batches"
        )
    if options.ranks < 2 * options.pp or options.ranks % options.pp:
        raise ConfigurationError(
            f"--pp {options.pp} must divide --ranks {options.ranks} and leave each stage two of them: else a kill "
            "takes what nobody else has"
        )
    if "trace" in options.parts and options.trace is None:
        options = replace(options, parts=[part for part in options.parts if part != "trace"])
        print("no --trace is given: that part is left out")
    elif "trace" in options.parts and options.trace is not None:
        # What is wrong with it is told before anything is measured.
        replay_s = options.trace_speed * options.trace_seconds
        events = read_trace(options.trace, start_ms=round(1000 * options.trace_start))
        if not any(event.joined for event in events if event.time_ns < replay_s * 1e9):
            raise ConfigurationError(
                f"--trace {options.trace} has no node in the {replay_s:g} s from --trace-start "
                f"{options.trace_start:g} on: choose another part of it"
            )
    if options.svg is not None and not {"kill", "restart"} & set(options.parts):
        raise ConfigurationError("--svg shows recoveries: measure kill or restart with it")
    if options.svg is not None:
        require()
    return options


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


# --- kills ----------------------------------------------------------------------------------------------------------


def _kills(task: Task, options: Options) -> dict[str, list[dict[str, float]]]:
    """In-process: one rank is killed, the others go on."""
    strategy = {"dense": options.dense, "mesh": {"pp": options.pp}}
    mine = replace(task, folder=f"{task.folder}-live", recovery={"min_replicas": 2}, strategy=strategy)
    left = (task.ranks - 1) // options.pp * options.pp
    act, rows = kills_in_process(task.ranks, left, options.rounds, options.seed)
    run_elastic(mine, act, etcd=options.etcd)
    print(f"SIGKILL to the next finished step, in process: medians of {len(rows)}, ms")
    medians = medians_of(rows)
    print("  ".join(f"{name} {1e3 * medians[name]:.0f}" for name in (*KILL_PHASES, "total")))
    spread = sorted(row["total"] for row in rows)
    print(f"total from {spread[0]:.2f} to {spread[-1]:.2f} s; steps lost: {medians['steps_lost']:.0f}")
    print(goal("in-process recovery", medians["total"], _GOAL_S, "{:.2f} s"))
    return {"in process": rows}


def _restarts(task: Task, options: Options) -> dict[str, list[dict[str, float]]]:
    """All ranks end and start over: from snapshots in memory, from a checkpoint, and under stock torchrun."""
    found: dict[str, list[dict[str, float]]] = {}
    arenas = replace(task, folder=f"{task.folder}-arenas", recovery={"min_replicas": 2}, every_n_steps=1)
    act, found["restart, memory"] = kills_of_all(task.ranks, options.rounds, options.seed)
    run_elastic(arenas, act)
    storage = replace(arenas, folder=f"{task.folder}-storage", every_n_steps=_EVERY_N_STEPS)
    act, found["restart, storage"] = kills_of_all(
        task.ranks, options.rounds, options.seed, lambda: drop_snapshots(storage), saved=storage.checkpoints
    )
    run_elastic(storage, act)
    stock = replace(task, folder=f"{task.folder}-stock", stock=True, every_n_steps=_EVERY_N_STEPS)
    act, found["torchrun, DDP"] = kills_of_all(
        task.ranks, options.rounds, options.seed, only_one=True, saved=stock.checkpoints
    )
    run_torchrun(stock, act)
    print(f"SIGKILL to the next finished step, all ranks start over: medians of {options.rounds}, s")
    lines = []
    for name, rows in found.items():
        row = medians_of(rows)
        times = (f"{row[kind]:.2f}" for kind in ("start", "recovery", "total"))
        lines.append((name, *times, f"{row['steps_lost']:.0f}"))
    print(table(("", "processes", "recovery", "total", "steps lost"), lines))
    print(f"checkpoints on storage every {_EVERY_N_STEPS} steps, snapshots in memory every step")
    return found


# --- cost without faults --------------------------------------------------------------------------------------------


def _contenders(task: Task) -> dict[str, Task]:
    """The same training with more and more readiness."""
    none = {"min_replicas": 1, "protection": "none"}
    return {
        "bare": task,
        "recovery": replace(task, recovery=none),
        "+ snapshots": replace(task, recovery=none, every_n_steps=1),
        "scheduled": replace(task, recovery=none, every_n_steps=1, windows="scheduled"),
        "+ ARC": replace(task, recovery={**none, "protection": "arc"}, every_n_steps=1),
        "+ AEC": replace(task, recovery={**none, "protection": "aec"}, every_n_steps=1),
    }


def _costs(task: Task, options: Options) -> dict[str, dict[str, list[float]]]:
    """Step times without a fault, of every contender in turns."""
    times: dict[str, dict[str, list[float]]] = {}
    for index in range(options.cost_rounds):
        for name, contender in _contenders(replace(task, steps=_WARMUP_STEPS + options.cost_steps)).items():
            mine = replace(contender, folder=f"{task.folder}-cost{index}-{name.strip('+ ')}")
            with rank_failures_as_user_errors():
                (run_plain if mine.recovery is None else run_elastic)(mine)
            for kind, values in _step_times(Path(mine.folder)).items():
                times.setdefault(name, {}).setdefault(kind, []).extend(values)
    print(f"a step without faults: medians of {options.cost_rounds} x {options.cost_steps} steps, pinned; over bare")
    medians = {name: {kind: statistics.median(s) for kind, s in of.items()} for name, of in times.items()}
    base = medians["bare"]
    rows = [
        (name, *(cell for kind in base for cell in (f"{1e3 * row[kind]:.1f}", f"{row[kind] / base[kind]:.2f}")))
        for name, row in medians.items()
    ]
    print(table(("", "step ms", "ratio", "cpu ms", "ratio"), rows))
    for name in list(medians)[1:]:
        ratio = medians[name]["step_s"] / base["step_s"]
        print(goal(f"step with {name}", ratio, _GOAL_COST, "{:.2f} times bare"))
    print("the goal is for a GPU, whose copies hide; here ranks, copies and persisting share the cores")
    return times


def _step_times(folder: Path) -> dict[str, list[float]]:
    """Wall and processor seconds of every rank's steps after the warm-up."""
    found: dict[str, list[float]] = {"step_s": [], "cpu_s": []}
    for path in folder.glob("diary-*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["kind"] == "step" and entry["step"] > _WARMUP_STEPS:
                for kind, values in found.items():
                    values.append(entry[kind])
    return found


# --- a trace --------------------------------------------------------------------------------------------------------


def _trace(task: Task, options: Options) -> dict[str, dict[str, float]]:
    assert options.trace is not None
    replay = Replay(
        path=options.trace, start_s=options.trace_start, speed=options.trace_speed, seconds=options.trace_seconds
    )
    losses = sum(absence.from_s < replay.seconds for slot in replay.absences(task.ranks) for absence in slot)
    scores = replay_all(replace(task, folder=f"{task.folder}-trace"), replay)
    print(
        f"{options.trace.name} from {options.trace_start:g} s, {options.trace_speed:g} times as fast, for "
        f"{options.trace_seconds:g} s: {losses} losses of a node, at most {task.ranks} ranks"
    )
    print(format_table(scores))
    print("starting a process is not made faster with the trace, so restarts weigh more here than on a cluster")
    return scores


_MEASURE = {"kill": _kills, "restart": _restarts, "cost": _costs, "trace": _trace}


def picture(rows: Mapping[str, Rows]) -> Figure:
    """Medians of the phases, a lane for each way to recover."""
    lanes = {}
    for name, measured in rows.items():
        medians = medians_of(measured)
        phases = KILL_PHASES if KILL_PHASES[0] in medians else ("start", "recovery")
        lanes[name] = {phase: medians[phase] for phase in phases}
    end_s = 3 * sum(lanes["in process"].values()) if "in process" in lanes and len(lanes) > 1 else None
    return phase_lines(lanes, "SIGKILL to the next finished step, medians", end_s=end_s)
