"""moe-bench recovery: what a killed rank costs, what readiness for it costs, what a run gets done under a spot trace.

Ranks are killed with SIGKILL from outside at random moments. In-process recovery stands beside a restart of all ranks
by our launcher and by stock torchrun with plain DDP and Lightning's ModelCheckpoint, all with the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from moe_lightning.arguments import Count, input_file, output_file, value
from moe_lightning.bench.measure import machine
from moe_lightning.bench.recovery_runs import (
    KILL_PHASES,
    drop_snapshots,
    kills_in_process,
    kills_of_all,
    run_elastic,
    run_plain,
    run_torchrun,
)
from moe_lightning.bench.recovery_trace import Replay, format_table, replay_all
from moe_lightning.bench.recovery_worker import Task
from moe_lightning.elastic.failure import Interrupted
from moe_lightning.elastic.launcher import RanksFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.failures import read_trace
from moe_lightning.svg_pictures import phase_lines
from moe_lightning.values import NonNegativeInt, Range, Seconds

Rows = Sequence[Mapping[str, float]]

PARTS = ("kill", "restart", "cost", "trace")
_GOAL_S = 1.0
_GOAL_COST = 1.03
_WARMUP_STEPS = 10
_EVERY_N_STEPS = 5  # between the checkpoints that a restart goes on from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help="what to measure: kill restart cost trace")
    parser.add_argument("--ranks", type=value(Count), default=4, help="workers (default: %(default)s)")
    parser.add_argument("--rounds", type=value(Count), default=10, help="kills of each kind (default: %(default)s)")
    parser.add_argument(
        "--cost-rounds", type=value(Count), default=3, help="trainings of each kind, in turns, without a fault"
    )
    parser.add_argument(
        "--cost-steps", type=value(Count), default=60, help="measured steps of each (default: %(default)s)"
    )
    parser.add_argument("--trace", type=input_file, help="spot trace: milliseconds,add|remove,node")
    parser.add_argument(
        "--trace-start",
        type=value(Annotated[float, Range(least=0, most=1e9)]),
        default=1980.0,
        help="where it begins, in its seconds",
    )
    parser.add_argument("--trace-speed", type=value(Seconds), default=30.0, help="its seconds that pass in one")
    parser.add_argument(
        "--trace-seconds", type=value(Seconds), default=120.0, help="how long it is replayed, in real seconds"
    )
    parser.add_argument("--batch", type=value(Count), default=12, help="sequences of all ranks (default: %(default)s)")
    parser.add_argument("--d-model", type=value(Count), default=64, help="model width (default: %(default)s)")
    parser.add_argument("--d-expert", type=value(Count), default=128, help="expert width (default: %(default)s)")
    parser.add_argument(
        "--seed", type=value(NonNegativeInt), default=0, help="of the moments of the kills (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of everything, of few steps: only to try it")
    parser.add_argument("--json", type=output_file, help="where to leave all measurements")
    parser.add_argument("--svg", type=output_file, help="where to leave a picture of the recoveries")


def run(options: argparse.Namespace) -> int:
    """Measure, print tables and the goals beside what was reached; 0 on success."""
    _check(options)
    if options.quick:
        options.rounds, options.cost_rounds, options.cost_steps, options.trace_seconds = 1, 1, 5, 20.0
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    print(
        f"{machine()}; {options.ranks} ranks share cores {list(cores)}; load average {_load()} at the start", flush=True
    )
    results: dict[str, Any] = {}
    try:
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
    except Interrupted as stop:
        print(f"moe-bench: {stop}", file=sys.stderr)
        return 128 + stop.signal
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    if options.svg is not None:
        options.svg.write_text(picture({**results.get("kill", {}), **results.get("restart", {})}))
    return 0


def _check(options: argparse.Namespace) -> None:
    for part in options.parts:
        if part not in PARTS:
            raise ConfigurationError(f"--parts {part!r} is unknown: use some of {', '.join(PARTS)}")
    if options.ranks < 2 or options.batch % options.ranks:
        raise ConfigurationError(
            f"--ranks {options.ranks} must be at least 2 and divide --batch {options.batch}: plain DDP knows no uneven "
            "batches"
        )
    if "trace" in options.parts and options.trace is None:
        options.parts = [part for part in options.parts if part != "trace"]
        print("no --trace is given: that part is left out")
    if "trace" in options.parts:
        read_trace(options.trace)  # what is wrong with it is told before anything is measured
    if options.svg is not None and not {"kill", "restart"} & set(options.parts):
        raise ConfigurationError("--svg shows recoveries: measure kill or restart with it")


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


# --- kills ----------------------------------------------------------------------------------------------------------


def _kills(task: Task, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """In-process: one rank is killed, the others go on."""
    mine = replace(task, folder=f"{task.folder}-live", recovery={"min_replicas": 2})
    act, rows = kills_in_process(task.ranks, options.rounds, options.seed)
    run_elastic(mine, act)
    print(f"SIGKILL to the next finished step, in process: medians of {len(rows)}, ms")
    medians = _medians(rows)
    print("  ".join(f"{name} {1e3 * medians[name]:.0f}" for name in (*KILL_PHASES, "total")))
    spread = sorted(row["total"] for row in rows)
    print(f"total from {spread[0]:.2f} to {spread[-1]:.2f} s; steps lost: {medians['steps_lost']:.0f}")
    print(_goal("in-process recovery", medians["total"], _GOAL_S, "s"))
    return {"in process": rows}


def _restarts(task: Task, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All ranks end and start anew: from snapshots in memory, from a checkpoint, and under stock torchrun."""
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
    print(f"SIGKILL to the next finished step, all ranks start anew: medians of {options.rounds}, s")
    print(f"{'':<18}{'processes':>11}{'recovery':>10}{'total':>8}{'steps lost':>12}")
    for name, rows in found.items():
        row = _medians(rows)
        print(f"{name:<18}{row['start']:>11.2f}{row['recovery']:>10.2f}{row['total']:>8.2f}{row['steps_lost']:>12.0f}")
    print(f"checkpoints on storage every {_EVERY_N_STEPS} steps, snapshots in memory every step")
    return found


def _medians(rows: Rows) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


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


def _costs(task: Task, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Step times without a fault, of every contender in turns."""
    times: dict[str, dict[str, list[float]]] = {}
    for index in range(options.cost_rounds):
        for name, contender in _contenders(replace(task, steps=_WARMUP_STEPS + options.cost_steps)).items():
            mine = replace(contender, folder=f"{task.folder}-cost{index}-{name.strip('+ ')}")
            try:
                (run_plain if mine.recovery is None else run_elastic)(mine)
            except RanksFailed as error:
                raise ConfigurationError(f"a rank of the benchmark failed: {error} {error.failure.details}") from error
            for kind, values in _step_times(Path(mine.folder)).items():
                times.setdefault(name, {}).setdefault(kind, []).extend(values)
    print(f"a step without faults: medians of {options.cost_rounds} x {options.cost_steps} steps, pinned; over bare")
    base = {kind: statistics.median(values) for kind, values in times["bare"].items()}
    print(f"{'':<14}{'step ms':>9}{'ratio':>7}{'cpu ms':>9}{'ratio':>7}")
    for name, mine_s in times.items():
        step_s, cpu_s = (statistics.median(mine_s[kind]) for kind in ("step_s", "cpu_s"))
        print(
            f"{name:<14}{1e3 * step_s:>9.1f}{step_s / base['step_s']:>7.2f}"
            f"{1e3 * cpu_s:>9.1f}{cpu_s / base['cpu_s']:>7.2f}"
        )
    for name in times:
        if name != "bare":
            ratio = statistics.median(times[name]["step_s"]) / base["step_s"]
            print(_goal(f"step with {name}", ratio, _GOAL_COST, "times bare"))
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


def _trace(task: Task, options: argparse.Namespace) -> dict[str, dict[str, float]]:
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


def _goal(what: str, reached: float, most: float, unit: str) -> str:
    verdict = "met   " if reached <= most else "missed"
    return f"{verdict}  {what}: {reached:.2f} {unit}, goal at most {most:.2f}"


def picture(rows: Mapping[str, Rows]) -> str:
    """Medians of the phases, a lane for each way to recover, as SVG."""
    lanes = {}
    for name, measured in rows.items():
        medians = _medians(measured)
        phases = KILL_PHASES if KILL_PHASES[0] in medians else ("start", "recovery")
        lanes[name] = {phase: medians[phase] for phase in phases}
    end_s = 3 * sum(lanes["in process"].values()) if "in process" in lanes and len(lanes) > 1 else None
    return phase_lines(lanes, "SIGKILL to the next finished step, medians", end_s=end_s)
