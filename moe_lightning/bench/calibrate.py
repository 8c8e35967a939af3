"""moe-bench calibrate: this machine as the simulator sees it, and how well it then predicts real trainings.

Experts and exchanges are timed alone; short reference trainings then fix what each part of the simulator's step costs
in a running step (its scale), and what a snapshot costs. Other trainings, of other sizes, routing and features, are
predicted and measured. Times are those of the quietest third of the steps; on a machine with other work even these are
too long by chance. So all is done twice: by the clock, and by the processor time of the busiest rank, which is what the
step would take on a machine of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arguments import Count, input_file, output_file, value
from moe_lightning.bench.balance import most_skewed
from moe_lightning.bench.balance_trace import load_trace
from moe_lightning.bench.balance_worker import model_config
from moe_lightning.bench.calibrate_worker import CLOCKS, SAVE_EVERY
from moe_lightning.bench.measure import machine
from moe_lightning.bench.ranks import launch
from moe_lightning.cli.capacity import check_processes
from moe_lightning.elastic.failure import Interrupted
from moe_lightning.simulate.calibrated import save_hardware
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.routing import RoutingScenario
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.simulate.workload import gpt_workload
from moe_lightning.values import Range

_SKEWED = "trace"
_BASE: dict[str, Any] = {
    "batch": 4, "context": 128, "d_model": 192, "d_expert": 768, "layers": 2, "experts": 8,
    "routing": "uniform", "strategy": "plain", "snapshots": False,
}  # fmt: skip
_REFERENCES: dict[str, dict[str, Any]] = {
    "base": {},
    "twice the batch": {"batch": 8},
    "wide experts": {"d_expert": 1536},
    "many experts": {"experts": 16},
    "deep": {"layers": 4},
    "small": {"batch": 2, "d_model": 128, "d_expert": 512},
    "snapshots": {"snapshots": True},
}
_CHECKS: dict[str, dict[str, Any]] = {
    "uniform": {"batch": 6, "d_model": 160, "d_expert": 640, "layers": 3},
    "trace": {"batch": 6, "d_model": 160, "d_expert": 640, "layers": 3, "routing": _SKEWED},
    "wide": {"batch": 3, "d_model": 256, "d_expert": 512, "experts": 16},
    "uniform, snapshots": {"batch": 6, "d_model": 160, "d_expert": 640, "layers": 3, "snapshots": True},
    "trace, snapshots": {"batch": 6, "d_expert": 512, "layers": 3, "routing": _SKEWED, "snapshots": True},
    "trace, shadows": {"batch": 6, "d_model": 160, "d_expert": 640, "routing": _SKEWED, "strategy": "prophet"},
}
_SNAPSHOTS = "snapshots"
_GOAL = 0.15
_PULL = 0.05
_SCALES = (0.2, 5.0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One training: its seconds a step by one of `CLOCKS`, measured and predicted."""

    ranks: int
    name: str
    clock: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument(
        "--ranks", type=value(Count), nargs="+", default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)"
    )
    parser.add_argument("--trace", type=input_file, help="routing trace (.npz) for the skewed trainings; default: Zipf")
    parser.add_argument(
        "--steps",
        type=value(Annotated[int, Range(least=2 * SAVE_EVERY, most=1e6)]),
        default=36,
        help="measured steps of a training (default: %(default)s)",
    )
    parser.add_argument("--out", type=output_file, default="machine.json", help="file for hardware.preset of moe-sim")
    parser.add_argument("--clock", choices=CLOCKS, default=CLOCKS[0], help="by which the file is (default: step_s)")
    parser.add_argument("--no-check", action="store_true", help="only calibrate, predict nothing")


def run(options: argparse.Namespace) -> int:
    """Measure, write the file, print predictions beside measurements; 0 on success."""
    for ranks in options.ranks:
        check_processes(ranks)
    if options.trace is not None:
        load_trace(options.trace)  # what is wrong with it is told before the measurements
    machines: dict[int, Hardware] = {}
    predictions: list[Prediction] = []
    try:
        with tempfile.TemporaryDirectory(prefix="moe-calibrate-") as folder:
            for ranks in options.ranks:
                machines[ranks], found = _one_world(Path(folder), ranks, options)
                predictions += found
    except Interrupted as stop:
        print(f"moe-bench: {stop}", file=sys.stderr)
        return 128 + stop.signal
    save_hardware(options.out, machines, machine())
    print(f"{machine()}; written to {options.out}")
    print(table(machines, predictions))
    return 0


def _one_world(folder: Path, ranks: int, options: argparse.Namespace) -> tuple[Hardware, list[Prediction]]:
    """Measure with so many ranks: references, then checks, in one launch."""
    checks = {} if options.no_check else {n: c for n, c in _CHECKS.items() if ranks > 1 or c.get("strategy") is None}
    named = {
        name: _BASE | changes
        for name, changes in {**_REFERENCES, **{f"check {n}": c for n, c in checks.items()}}.items()
    }
    shares = {key: _shares(*key, options.trace) for key in {(c["routing"], c["experts"]) for c in named.values()}}
    runs = []
    for index, (name, choice) in enumerate(named.items()):
        path = folder / f"{ranks}-{index}.npz"
        counts = np.round(shares[choice["routing"], choice["experts"]] * 1e6).astype(np.int64)[None, None, None]
        np.savez(path, counts=counts, iteration=np.array([1], dtype=np.int64))
        slots = -(-choice["experts"] // ranks)
        runs.append(choice | {"name": name, "trace": str(path), "ranks": ranks, "steps": options.steps, "slots": slots})
    jobs, results = folder / f"jobs{ranks}.json", folder / f"results{ranks}.json"
    jobs.write_text(json.dumps({"runs": runs}))
    launch(
        "moe_lightning.bench.calibrate_worker",
        [str(jobs), str(results)],
        num_ranks=ranks,
        log_dir=folder / f"logs{ranks}",
    )
    found = json.loads(results.read_text())
    measured = dict(zip(named, found["seconds"], strict=True))
    machines, predictions = {}, []
    for clock in CLOCKS:
        references = {name: measured[name][clock] for name in _REFERENCES}
        machines[clock] = fit_hardware(ranks, found["parts"], references, shares)
        predictions += [
            Prediction(
                ranks=ranks,
                name=name,
                clock=clock,
                measured_s=measured[f"check {name}"][clock],
                predicted_s=predict_s(machines[clock], _BASE | choice, shares),
            )
            for name, choice in checks.items()
        ]
    return machines[options.clock], predictions


def _shares(routing: str, experts: int, trace: Path | None) -> NDArray[np.float64]:
    if routing == "uniform":
        return np.full(experts, 1.0 / experts)
    if trace is not None:
        return most_skewed(trace, experts)
    weights = 1.0 / (1.0 + np.arange(experts)) ** 1.5
    return np.asarray(weights / weights.sum(), dtype=np.float64)


# ---------------------------------------------------------------------- model


Shares = Mapping[tuple[str, int], NDArray[np.float64]]


def step_cost(hardware: Hardware, choice: Mapping[str, Any], shares: Shares) -> tuple[StepCost, float]:
    """The simulator's view of one training: its step, and the seconds of one snapshot."""
    workload = gpt_workload(model_config(choice), rank_batch=choice["batch"], activation_bytes=4)
    counts = np.round(shares[choice["routing"], choice["experts"]] * 1e6).astype(np.int64)
    routing = RoutingScenario(shares_SLE=np.maximum(1, counts)[None, None], steps=np.zeros(1, dtype=np.int64))
    slots = -(-choice["experts"] // hardware.ranks_per_node)
    plan = policy("ours", strategy=choice["strategy"], slots=slots, min_replicas=1)
    cost = StepModel(workload, hardware, plan, routing, 1).cost(1, 0, 0)
    experts = choice["experts"]
    return cost, save_cost(workload, hardware, plan, hardware.ranks_per_node, experts, experts).snapshot_s


def predict_s(hardware: Hardware, choice: Mapping[str, Any], shares: Shares) -> float:
    """Seconds of a step, snapshots included."""
    cost, snapshot_s = step_cost(hardware, choice, shares)
    stall_s = max(0.0, snapshot_s - cost.overlap_s) / SAVE_EVERY
    return cost.step_s + (stall_s if choice["snapshots"] else 0.0)


def fit_hardware(ranks: int, parts: Mapping[str, float], references: Mapping[str, float], shares: Shares) -> Hardware:
    """Scale each part of the simulator's step so that the reference trainings take as long as they did.

    Args:
        ranks: of the world.
        parts: measured alone (`calibrate_worker.parts`).
        references: seconds of a step by name.
        shares: of the experts, by routing and number.
    """
    rate = 2 * parts["expert_params"] / parts["expert_row_s"]
    bytes_per_s = 1 / parts["exchange_byte_s"] if parts.get("exchange_byte_s") else 1e10
    alone = Hardware(
        ranks_per_node=ranks,
        flops_per_s=rate,
        utilization=1.0,
        expert_utilization=1.0,
        link_bytes_per_s=bytes_per_s,
        node_bytes_per_s=bytes_per_s,
        latency_s=parts.get("latency_s", 0.0),
        expert_s=parts["expert_s"],
        overlap=0.0,
        memory_bytes_per_s=5e9,
        host_copy_bytes_per_s=1e9,
        memory_bytes=4e9,
        host_memory_bytes=8e9,
    )
    plain = [name for name in references if name != _SNAPSHOTS]
    costs = [step_cost(alone, _BASE | _REFERENCES[name], shares)[0] for name in plain]
    columns = np.array(
        [[1.0, c.dense_s, c.experts_s, c.update_s, c.exchange_s + c.copies_s + c.gradients_s] for c in costs]
    )
    scales = fit_scales(columns, np.array([references[name] for name in plain]))
    dense, experts, update, travel = np.clip(scales[1:], *_SCALES).tolist()
    fastest = max(1 / dense, 1 / experts)
    fitted = replace(
        alone,
        step_s=float(scales[0]),
        flops_per_s=rate * fastest,
        utilization=1 / dense / fastest,
        expert_utilization=1 / experts / fastest,
        expert_s=alone.expert_s * experts,
        memory_bytes_per_s=alone.memory_bytes_per_s / update,
        link_bytes_per_s=bytes_per_s / travel,
        node_bytes_per_s=bytes_per_s / travel,
        latency_s=alone.latency_s * travel,
    )
    choice = _BASE | _REFERENCES[_SNAPSHOTS]
    cost, snapshot_s = step_cost(fitted, choice, shares)
    extra_s = max(references[_SNAPSHOTS] - cost.step_s, 0.01 * cost.step_s) * SAVE_EVERY
    return replace(fitted, host_copy_bytes_per_s=fitted.host_copy_bytes_per_s * snapshot_s / extra_s)


def fit_scales(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors of 0 or more that bring the weighted columns closest to the seconds, by relative error.

    Columns that would need a negative factor are left out one after the other; one that is all zeros has none.
    """
    relative = columns / seconds[:, None]
    size = np.abs(relative).max(axis=0)
    kept = list(np.flatnonzero(size > 0))
    factors = np.zeros(columns.shape[1])
    while kept:
        # A weak pull towards the times measured alone decides what these few trainings cannot tell apart.
        pull = _PULL * np.diag(size[kept])
        towards = _PULL * size[kept] * (np.array(kept) > 0)
        solved, *_ = np.linalg.lstsq(
            np.concatenate([relative[:, kept], pull]), np.concatenate([np.ones(len(seconds)), towards]), rcond=None
        )
        if (solved >= 0).all():
            factors[kept] = solved
            break
        kept.pop(int(np.argmin(solved * size[kept])))
    return factors


# ---------------------------------------------------------------------- words


def table(machines: Mapping[int, Hardware], predictions: Sequence[Prediction]) -> str:
    """The machine's numbers, and measured beside predicted."""
    lines = [
        f"{'ranks':>5}{'GFLOP/s':>10}{'dense':>7}{'experts':>9}{'GB/s':>7}{'latency us':>12}{'copy GB/s':>11}"
        f"{'fixed ms':>10}"
    ]
    for ranks, found in machines.items():
        lines.append(
            f"{ranks:>5}{found.flops_per_s / 1e9:>10.1f}{found.utilization:>7.2f}{found.expert_utilization:>9.2f}"
            f"{found.node_bytes_per_s / 1e9:>7.2f}{1e6 * found.latency_s:>12.0f}"
            f"{found.host_copy_bytes_per_s / 1e9:>11.2f}{1e3 * found.step_s:>10.2f}"
        )
    for clock in CLOCKS if predictions else ():
        mine = [prediction for prediction in predictions if prediction.clock == clock]
        lines.append(f"{'ranks':>5}  {'training':<22}{'measured ms':>12}{'predicted ms':>14}{'error':>8}   by {clock}")
        lines += [
            f"{p.ranks:>5}  {p.name:<22}{1e3 * p.measured_s:>12.1f}{1e3 * p.predicted_s:>14.1f}{p.error:>8.1%}"
            for p in mine
        ]
        median = statistics.median(prediction.error for prediction in mine)
        verdict = "met" if median < _GOAL else "missed"
        lines.append(f"median error {median:.1%} over {len(mine)} trainings; goal below {_GOAL:.0%}: {verdict}")
    return "\n".join(lines)
