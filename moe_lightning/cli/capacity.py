"""Capacity check of a configuration against the machines, before anything is built.

Estimates are lower bounds: a refused configuration cannot fit; an accepted one may still be too large.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moe_lightning.errors import ConfigurationError

GIB = 2**30

_RANK_BYTES = GIB // 4  # of an interpreter that has imported torch and Lightning
_TRAINING_BYTES = {"adamw": 16, "muon": 12, "adafactor": 8}
"""Of a float32 parameter: weight, gradient and moments."""

_TOKEN_BYTES = 8


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_processes(ranks: int, num_workers: int = 0) -> None:
    """Refuse more processes than this machine has memory for.

    Args:
        ranks: of this machine.
        num_workers: data-loading processes of each of them.

    Raises:
        ConfigurationError: too many, and how many there may be.
    """
    most = machine_memory() // _RANK_BYTES
    if ranks > most:
        raise ConfigurationError(
            f"ranks={ranks} is more than the {most} processes that fit into this machine's "
            f"{machine_memory() / GIB:.0f} GiB of memory: lower it"
        )
    if ranks * (1 + num_workers) > most:
        raise ConfigurationError(
            f"data.num_workers={num_workers} for each of {ranks} ranks is more than the {most} processes that fit into "
            f"this machine's {machine_memory() / GIB:.0f} GiB of memory: use at most {most // ranks - 1}"
        )


def check_model(sizes: Mapping[str, int], parameters: int, memory_bytes: int, optimizer: str = "adamw") -> None:
    """Refuse a model whose training state exceeds all the memory there is.

    Args:
        sizes: what the number of parameters depends on, by key.
        parameters: at least so many, each expert once.
        memory_bytes: of all ranks together.
        optimizer: its name in an OptimizerConfig.

    Raises:
        ConfigurationError: the size that stands out most.
    """
    needed = parameters * _TRAINING_BYTES[optimizer]
    if needed > memory_bytes:
        key = max(sizes, key=lambda name: sizes[name])
        raise ConfigurationError(
            f"{key}={sizes[key]} makes a model of {parameters:.3g} parameters, whose weights, gradients and moments "
            f"take {needed / GIB:.3g} GiB: more than the {memory_bytes / GIB:.0f} GiB of memory there are; lower it"
        )


def check_sample(key: str, value: int, elements: int, memory_bytes: int) -> None:
    """Refuse a sample, or a list of samples, that alone exceeds a machine's memory.

    Raises:
        ConfigurationError: the key, and how much it may be.
    """
    if elements * _TOKEN_BYTES > memory_bytes:
        most = value * memory_bytes // (elements * _TOKEN_BYTES)
        raise ConfigurationError(
            f"{key}={value} needs {elements * _TOKEN_BYTES / GIB:.3g} GiB for it alone, of {memory_bytes / GIB:.0f} "
            f"GiB of memory: use less than {most}"
        )


def whole_memory(trainer: Mapping[str, Any], nodes: int) -> int:
    """Bytes of all ranks together, where every node is like this one."""
    if trainer.get("accelerator") not in ("gpu", "cuda"):
        return machine_memory() * nodes
    import torch

    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.get_device_properties(index).total_memory for index in devices) * nodes
