"""One rank of moe-bench calibrate: times experts and exchanges alone, then short trainings of several sizes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from moe_lightning.bench.balance_worker import measure
from moe_lightning.bench.ranks import enter
from moe_lightning.callbacks.calibration import measure_exchange, measure_experts
from moe_lightning.callbacks.partial_experts_checkpoint import PartialExpertsCheckpoint
from moe_lightning.comm.world import World
from moe_lightning.elastic.lifeline import leave_process_groups
from moe_lightning.modules.experts import Experts

SAVE_EVERY = 4
"""Steps between snapshots where there are any; times are of so many steps together."""

CLOCKS = ("step_s", "cpu_s")

_QUIET_SHARE = 0.34


def quiet_mean(seconds: Sequence[float]) -> float:
    """Mean over the quickest third of the windows of SAVE_EVERY steps: other work on the machine only adds to a time,
    and every window holds one snapshot where there are any."""
    starts = range(0, len(seconds) - SAVE_EVERY + 1, SAVE_EVERY)
    windows = sorted(sum(seconds[start : start + SAVE_EVERY]) / SAVE_EVERY for start in starts)
    kept = windows[: max(1, round(_QUIET_SHARE * len(windows)))]
    return sum(kept) / len(kept)


def parts(world: World, options: dict[str, Any]) -> dict[str, float]:
    """Constants measured alone: the experts' rate and fixed cost, an exchange's bandwidth and latency. Collective."""
    experts = Experts(1, options["d_model"], options["d_expert"])
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


def train(options: dict[str, Any], folder: str) -> dict[str, float]:
    """Seconds of a step of one training: of the clock, and of the busiest rank's processor."""
    extra: list[pl.Callback] = []
    if options["snapshots"]:
        extra = [PartialExpertsCheckpoint(folder, every_n_steps=SAVE_EVERY, save_on_train_end=False)]
    try:
        found = measure(options["strategy"], options["trace"], options, extra=extra, over_steps=quiet_mean)
        return {clock: found[clock] for clock in CLOCKS}
    finally:
        if os.environ["RANK"] == "0":
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> None:
    jobs, rank = json.loads(Path(arguments[0]).read_text()), enter()
    seconds: list[dict[str, float]] = []
    for index, options in enumerate(jobs["runs"]):
        folder = str(Path(arguments[1]).parent / f"checkpoints{index}")
        seconds.append(train(options, folder))
        if rank == 0:
            wall_ms, cpu_ms = (1e3 * seconds[-1][clock] for clock in CLOCKS)
            print(f"{options['name']}: {wall_ms:.1f} ms a step, {cpu_ms:.1f} ms of a processor", flush=True)
    world = World.connect(torch.device("cpu"), timedelta(seconds=60))  # the trainings have made the default group
    found = parts(world, jobs["runs"][0])
    world.close()
    if rank == 0:
        Path(arguments[1]).write_text(json.dumps({"seconds": seconds, "parts": found}))
    leave_process_groups()


if __name__ == "__main__":
    main(sys.argv[1:])
