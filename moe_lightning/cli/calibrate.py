"""`moe-bench calibrate`: hardware numbers of this machine for the simulator, and its errors on real trainings.

Experts and exchanges are timed alone; short reference trainings then fix what each part of the simulator's step costs
in a running step (its scale), and what a snapshot costs. Other trainings, of other sizes, routing and features, are
predicted and measured. Times are those of the quietest third of the steps; on a machine with other work even these are
too long by chance.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray

from moe_lightning.arguments import Count, InputFile, OutputFile, option
from moe_lightning.balancing.rules import STRATEGIES
from moe_lightning.callbacks.calibration import measure_exchange, measure_experts
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.cli.capacity import RANK_BYTES, check_processes
from moe_lightning.cli.short_training import (
    WARMUP_STEPS,
    ModelOptions,
    StepClock,
    balancer_of,
    machine,
    most_skewed,
    on_ranks,
    trace_gpt,
    train,
    write_trace,
)
from moe_lightning.cores import available_memory
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.forced_routing import read_routing_trace
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.hardware import Hardware, save_hardware
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.simulate.workload import RoutingScenario, gpt_workload
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.text_table import table as text_table

SAVE_EVERY = 4
"""Steps between snapshots where there are any; times are of so many steps together."""

Shares = Mapping[tuple[str, int], NDArray[np.float64]]
"""Of the experts, by routing and number."""


@dataclass(frozen=True, kw_only=True)
class Training(ModelOptions):
    """One training: its sizes, the routing of its experts, the way of balancing, whether snapshots are taken."""

    batch: int = 4
    routing: Literal["uniform", "trace"] = "uniform"
    strategy: str = "plain"
    snapshots: bool = False
    steps: int = 0
    slots: int = 0


BASE = Training()
_MIDDLE = replace(BASE, batch=6, d_model=160, d_expert=640, layers=3)
REFERENCES = {
    "base": BASE,
    "twice the batch": replace(BASE, batch=8),
    "wide experts": replace(BASE, d_expert=1536),
    "many experts": replace(BASE, experts=16),
    "deep": replace(BASE, layers=4),
    "small": replace(BASE, batch=2, d_model=128, d_expert=512),
    "snapshots": replace(BASE, snapshots=True),
}
CHECKS = {
    "uniform": _MIDDLE,
    "trace": replace(_MIDDLE, routing="trace"),
    "wide": replace(BASE, batch=3, d_model=256, d_expert=512, experts=16),
    "uniform, snapshots": replace(_MIDDLE, snapshots=True),
    "trace, snapshots": replace(BASE, batch=6, d_expert=512, layers=3, routing="trace", snapshots=True),
    "trace, shadows": replace(_MIDDLE, layers=2, routing="trace", strategy="search"),
}
_SNAPSHOTS = "snapshots"
_GOAL = 0.15
_PULL = 0.05
_SCALES = (0.2, 5.0)
_QUIET_SHARE = 0.34


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One training: its seconds a step, measured and predicted."""

    ranks: int
    name: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `moe-bench calibrate`."""

    ranks: list[Count] = option("numbers of ranks", [1, 2, 4])
    trace: InputFile | None = option("routing trace (.npz) for the skewed trainings (default: Zipf)", None)
    steps: Annotated[int, Interval(ge=2 * SAVE_EVERY, le=1e6)] = option("measured steps of a training", 36)
    out: OutputFile = option("file for hardware.preset of moe-sim", Path("machine.json"))
    no_check: bool = option("only calibrate, predict nothing", False)


def run(options: Options) -> int:
    """Measure, write the file, print predictions beside measurements; 0 on success."""
    for ranks in options.ranks:
        check_processes(ranks)
    if options.trace is not None:
        read_routing_trace(options.trace)  # what is wrong with it is told before the measurements
    machines: dict[int, Hardware] = {}
    predictions: list[Prediction] = []
    with tempfile.TemporaryDirectory(prefix="moe-calibrate-") as folder:
        for ranks in options.ranks:
            machines[ranks], found = _one_world(Path(folder) / str(ranks), ranks, options)
            predictions += found
    save_hardware(options.out, machines, machine())
    print(f"{machine()}; written to {options.out}")
    if predictions:
        print(table(predictions))
    return 0


def _one_world(folder: Path, ranks: int, options: Options) -> tuple[Hardware, list[Prediction]]:
    """Measure with so many ranks: references, then checks, in one launch."""
    folder.mkdir()
    checks = {} if options.no_check else {n: c for n, c in CHECKS.items() if ranks > 1 or c.strategy == "plain"}
    named = {**REFERENCES, **{f"check {name}": choice for name, choice in checks.items()}}
    shares: Shares = {key: _shares(*key, options.trace) for key in {(c.routing, c.experts) for c in named.values()}}
    jobs = []
    for index, (name, choice) in enumerate(named.items()):
        trace = write_trace(folder / f"{index}.npz", shares[choice.routing, choice.experts])
        training = replace(choice, steps=options.steps, slots=-(-choice.experts // ranks))
        jobs.append({"name": name, "trace": str(trace), "folder": str(folder / name), "training": asdict(training)})
    [found, *_] = on_ranks("moe_lightning.cli.calibrate:measure_all", {"jobs": jobs}, num_ranks=ranks, folder=folder)
    measured = dict(zip(named, found["seconds"], strict=True))
    hardware = fit_hardware(ranks, found["parts"], {name: measured[name] for name in REFERENCES}, shares)
    predictions = [
        Prediction(
            ranks=ranks,
            name=name,
            measured_s=measured[f"check {name}"],
            predicted_s=predict_s(hardware, choice, shares),
        )
        for name, choice in checks.items()
    ]
    return hardware, predictions


def _shares(routing: str, experts: int, trace: Path | None) -> NDArray[np.float64]:
    if routing == "uniform":
        return np.full(experts, 1.0 / experts)
    if trace is not None:
        return most_skewed(trace, experts)
    weights = 1.0 / (1.0 + np.arange(experts)) ** 1.5
    return np.asarray(weights / weights.sum(), dtype=np.float64)


# --- a rank ---------------------------------------------------------------------------------------------------------


def measure_all(settings: dict[str, Any]) -> dict[str, Any]:
    """Short trainings of several sizes, then experts and exchanges alone. Collective."""
    jobs, seconds = settings["jobs"], []
    for job in jobs:
        seconds.append(_train(Training(**job["training"]), job["trace"], job["folder"]))
        print(f"{job['name']}: {1e3 * seconds[-1]:.1f} ms a step", flush=True)
    world = World.connect(torch.device("cpu"), timedelta(seconds=60))  # the trainings have made the default group
    found = parts(world, Training(**jobs[0]["training"]))
    world.close()
    return {"seconds": seconds, "parts": found}


def _train(training: Training, trace: str, folder: str) -> float:
    """Seconds of a step."""
    saving = PartialExpertsCheckpoint(folder, every_n_steps=SAVE_EVERY, save_on_train_end=False)
    ways = STRATEGIES[training.strategy]
    callbacks: list[pl.Callback] = [saving] if training.snapshots else []
    if training.strategy != "plain":
        callbacks.append(balancer_of(ways))
    strategy = ExpertParallelStrategy(slots=training.slots, quota="balanced" if ways.balanced else "equal")
    clock = StepClock()
    try:
        train(strategy, clock, callbacks, trace, training)
        seconds: list[float] = all_gather_json(quiet_mean(clock.step_s[WARMUP_STEPS:]), strategy.world)
        strategy.world.close()
        return max(seconds)
    finally:
        if os.environ["RANK"] == "0":
            shutil.rmtree(folder, ignore_errors=True)


def quiet_mean(seconds: Sequence[float]) -> float:
    """Mean over the quickest third of the windows of SAVE_EVERY steps: other work on the machine only adds to a time,
    and every window holds one snapshot where there are any."""
    starts = range(0, len(seconds) - SAVE_EVERY + 1, SAVE_EVERY)
    windows = sorted(sum(seconds[start : start + SAVE_EVERY]) / SAVE_EVERY for start in starts)
    kept = windows[: max(1, round(_QUIET_SHARE * len(windows)))]
    return sum(kept) / len(kept)


def parts(world: World, training: Training) -> dict[str, float]:
    """Constants measured alone: the experts' rate and fixed cost, an exchange's bandwidth and latency. Collective."""
    experts = Experts(1, training.d_model, training.d_expert)
    times = measure_experts(experts, world, torch.float32)
    found = {
        "expert_row_s": times.forward.per_unit_s,
        "expert_s": times.forward.fixed_s,
        "backward_ratio": times.backward_ratio,
        "expert_params": float(sum(p.numel() for p in experts.parameters())),
    }
    if world.size > 1:
        line = measure_exchange(world)
        found |= {"exchange_byte_s": line.per_unit_s, "latency_s": line.fixed_s}
    return found


# --- model ----------------------------------------------------------------------------------------------------------


def step_cost(hardware: Hardware, choice: Training, shares: Shares) -> tuple[StepCost, float]:
    """The simulator's view of one training: its step, and the seconds of one snapshot."""
    workload = gpt_workload(trace_gpt(choice), rank_batch=choice.batch, activation_bytes=4)
    counts = np.round(shares[choice.routing, choice.experts] * 1e6).astype(np.int64)
    routing = RoutingScenario(shares_SLE=np.maximum(1, counts)[None, None], steps=np.zeros(1, dtype=np.int64))
    slots = -(-choice.experts // hardware.ranks_per_node)
    plan = policy("ours", strategy=choice.strategy, slots=slots, min_replicas=1)
    cost = StepModel(workload, hardware, plan, routing, 1).cost(1, 0, 0)
    experts = choice.experts
    return cost, save_cost(workload, hardware, plan, hardware.ranks_per_node, experts, experts).snapshot_s


def predict_s(hardware: Hardware, choice: Training, shares: Shares) -> float:
    """Seconds of a step, snapshots included."""
    cost, snapshot_s = step_cost(hardware, choice, shares)
    stall_s = max(0.0, snapshot_s - cost.overlap_s) / SAVE_EVERY
    return cost.step_s + (stall_s if choice.snapshots else 0.0)


def fit_hardware(ranks: int, parts: Mapping[str, float], references: Mapping[str, float], shares: Shares) -> Hardware:
    """Scale each part of the simulator's step so that the reference trainings take as long as they did. The memory is
    what this machine has available.

    Args:
        ranks: of the world.
        parts: measured alone (`parts`).
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
        memory_bytes=max(1.0, available_memory() / ranks - RANK_BYTES),
        host_memory_bytes=float(available_memory()),
    )
    plain = [name for name in references if name != _SNAPSHOTS]
    costs = [step_cost(alone, REFERENCES[name], shares)[0] for name in plain]
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
    cost, snapshot_s = step_cost(fitted, REFERENCES[_SNAPSHOTS], shares)
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


# --- words ----------------------------------------------------------------------------------------------------------


def table(predictions: Sequence[Prediction]) -> str:
    """Measured beside predicted, and whether the goal is met."""
    cells = [
        (p.ranks, p.name, f"{1e3 * p.measured_s:.1f}", f"{1e3 * p.predicted_s:.1f}", f"{p.error:.1%}")
        for p in predictions
    ]
    lines = text_table(("ranks", "training", "measured ms", "predicted ms", "error"), cells)
    median = statistics.median(prediction.error for prediction in predictions)
    verdict = "met" if median < _GOAL else "missed"
    return f"{lines}\nmedian error {median:.1%} over {len(predictions)} trainings; goal below {_GOAL:.0%}: {verdict}"
