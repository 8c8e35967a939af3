"""Capacity check of a configuration against the machines, before anything is built.

Estimates are lower bounds: a refused configuration cannot fit; an accepted one may still be too large.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe_lightning.cores import available_memory, machine_memory
from moe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from moe_lightning.models.gpt import GPTConfig
    from moe_lightning.models.swin import SwinConfig

GIB = 2**30

RANK_BYTES = GIB // 4
"""Memory of an interpreter that has imported torch and Lightning."""

MOMENTS: Mapping[str, int] = {"adamw": 2, "muon": 1, "adafactor": 0}
"""Numbers that an optimizer keeps for an element of a matrix, by its name in an OptimizerConfig."""

_LEAST_BYTES = 2
"""Size of a parameter in the narrowest precision."""


def ranks_of(trainer: Mapping[str, Any]) -> int:
    """Return the ranks of a machine: their number, or that of the devices that are listed."""
    devices = trainer["devices"]
    return len(devices) if isinstance(devices, list) else int(devices)


def nodes_of(config: Mapping[str, Any]) -> int:
    """Return the machines of a run, under either launcher."""
    nodes: int = config["trainer"].get("num_nodes", 1) * config["elastic"].get("num_nodes", 1)
    return nodes


def is_on_cpu(trainer: Mapping[str, Any]) -> bool:
    """True if the ranks compute on this machine's CPU."""
    return trainer.get("accelerator") not in ("gpu", "cuda")


def free_bytes(trainer: Mapping[str, Any]) -> float:
    """Bytes that are free for a rank: its share of this machine's memory, or the memory of its GPU, on which asking
    leaves a context of this process.
    """
    if is_on_cpu(trainer):
        return available_memory() / ranks_of(trainer)
    import torch

    devices = trainer["devices"]
    local = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    return float(torch.cuda.mem_get_info(devices[local] if isinstance(devices, list) else local)[0])


def check_processes(ranks: int, num_workers: int = 0) -> None:
    """Refuse more processes than this machine has memory for.

    Args:
        ranks: of this machine.
        num_workers: data-loading processes of each of them.

    Raises:
        ConfigurationError: too many, and how many there may be.
    """
    most = machine_memory() // RANK_BYTES
    if ranks * (1 + num_workers) > most:
        workers = f", each with data.num_workers={num_workers}," if num_workers else ""
        raise ConfigurationError(
            f"ranks={ranks}{workers} is more than the {most} processes that fit into this machine's "
            f"{machine_memory() / GIB:.0f} GiB of memory: lower it"
        )


def check_model(config: GPTConfig | SwinConfig, parameters: int, memory_bytes: int) -> None:
    """Refuse a model whose weights exceed all the memory there is, before anything of that size is built.

    Args:
        parameters: at least so many.
        memory_bytes: of all ranks together.

    Raises:
        ConfigurationError: the size that stands out most.
    """
    needed = parameters * _LEAST_BYTES
    if needed > memory_bytes:
        sizes = {name: value for name, value in vars(config).items() if type(value) is int}
        name = max(sizes, key=lambda name: sizes[name])
        raise ConfigurationError(
            f"model.{name}={sizes[name]} makes a model of {parameters:.3g} parameters, which take {needed / GIB:.3g} "
            f"GiB at {_LEAST_BYTES} bytes each: more than the {memory_bytes / GIB:.0f} GiB of memory; lower it"
        )


def check_image(image_size: int) -> None:
    """Refuse images of which a single one exceeds this machine's memory.

    Raises:
        ConfigurationError: the key.
    """
    needed = 4 * 3 * image_size**2
    if needed > machine_memory():
        raise ConfigurationError(
            f"model.image_size={image_size} makes images of {needed / GIB:.3g} GiB each: more than the "
            f"{machine_memory() / GIB:.0f} GiB of memory; lower it"
        )


def whole_memory(trainer: Mapping[str, Any], nodes: int) -> int:
    """Bytes of all ranks together, where every node is like this one."""
    if is_on_cpu(trainer):
        return machine_memory() * nodes
    import torch

    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.get_device_properties(index).total_memory for index in devices) * nodes
