"""How many ranks a run gets, and on what device."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from moe_lightning.cli.capacity import check_processes
from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError

_CPU_RANKS = 2
_RANKS_OF_A_CORE = 4
"""Beyond, a warning says that they wait for each other."""


def is_externally_launched() -> bool:
    """Whether torchrun, srun or the like started this process as one rank of several."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def with_ranks(config: Mapping[str, Any], *, external: bool) -> dict[str, Any]:
    """The configuration with accelerator and devices decided.

    Raises:
        ConfigurationError: devices that this machine lacks, or several nodes without anything that starts them.
    """
    trainer = dict(config["trainer"])
    gpus = _visible_gpus()
    accelerator = trainer.get("accelerator", "auto")
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise ConfigurationError(
            f"trainer.accelerator={shown(accelerator)} is not supported: choose one of cpu, gpu, auto"
        )
    if accelerator in ("gpu", "cuda") and not gpus:
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}, but torch sees no GPU here: use trainer.accelerator=cpu"
        )
    trainer["accelerator"] = accelerator
    if external:
        trainer |= _ranks_from_environment()
    else:
        if trainer.get("num_nodes", 1) != 1:
            raise ConfigurationError(
                f"trainer.num_nodes={trainer['num_nodes']} needs a launcher on every node: "
                "start moe-train with torchrun or srun"
            )
        trainer["devices"] = _devices(trainer.get("devices", "auto"), accelerator, gpus)
    return {**config, "trainer": trainer}


def _devices(wanted: Any, accelerator: str, gpus: int) -> int | list[int]:
    on_gpus = accelerator in ("gpu", "cuda")
    if wanted in ("auto", -1, "-1"):
        return gpus if on_gpus else _CPU_RANKS
    if isinstance(wanted, list) and on_gpus and all(isinstance(index, int) for index in wanted):
        missing = [index for index in wanted if not 0 <= index < gpus]
        if missing or not wanted:
            raise ConfigurationError(
                f"ranks={wanted} names GPUs beyond the {gpus} that torch sees: use 0 to {gpus - 1}"
            )
        return wanted
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ConfigurationError(f"ranks={shown(wanted)} must be a number of at least 1, or auto")
    if not on_gpus:
        check_processes(wanted)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if wanted > _RANKS_OF_A_CORE * cores:
            print(
                f"moe-train: ranks={wanted} share {cores} cores, so a step takes {wanted / cores:.0f} times as long: "
                f"more than {_RANKS_OF_A_CORE * cores} are for trying things out",
                file=sys.stderr,
            )
    if on_gpus and wanted > gpus:
        raise ConfigurationError(
            f"ranks={wanted} is more than the {gpus} GPUs that torch sees: lower it, or use trainer.accelerator=cpu"
        )
    return wanted


def _ranks_from_environment() -> dict[str, int]:
    """Ranks per node and nodes, as torchrun or SLURM state them."""
    if "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return {"devices": local, "num_nodes": max(1, world // local)}
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    return {"devices": int(os.environ["SLURM_STEP_NUM_TASKS"]) // nodes, "num_nodes": nodes}


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()
