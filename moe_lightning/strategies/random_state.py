"""The global random generators of a rank, in checkpoints."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.parallel.context import World


def kept_generators(device: torch.device) -> AbstractContextManager[None]:
    """After the block the global generators, and that of this rank's device, are where they were before it. Left to
    itself torch would keep those of all GPUs of the machine, and warn of it.
    """
    return torch.random.fork_rng([] if device.type == "cpu" else [device.index], device_type=device.type)


def random_state(device: torch.device) -> dict[str, Any]:
    """The global random generators of this process, and that of its device, as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if device.type == "cuda":  # a training on CPUs leaves GPUs alone
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(checkpoint: CheckpointSource, world: World) -> None:
    """Continue this rank's generators; a rank that the checkpoint does not know keeps its own."""
    key = f"rng/{world.rank}"
    if key not in checkpoint.keys("rng/"):
        return
    state = checkpoint.read_object(key)
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)
