"""Checkpoints between meshes: whatever one wrote, another reads to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.harness import run_ranks

Meshes = Mapping[str, tuple[int, dict[str, Any]]]
"""Ranks and options of the strategy, by name."""


def tensors(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint in one file."""
    checkpoint = torch.load(path, weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    moments = {f"{n}/{k}": v for n, state in optimizer["state"].items() for k, v in state.items()}
    return {**checkpoint["state_dict"], **moments}


def write(meshes: Meshes, writer: str, save: Callable[..., None], folder: Path) -> dict[str, Tensor]:
    """What a mesh saves in `folder/one.ckpt`, and in a directory under `folder/steps`.

    Args:
        save: (rank, ranks, strategy=, folder=).
    """
    ranks, strategy = meshes[writer]
    run_ranks(ranks, partial(save, strategy=strategy, folder=str(folder)))
    return tensors(folder / "one.ckpt")


def assert_read_to_the_bit(
    meshes: Meshes, readers: Sequence[str], load: Callable[..., None], folder: Path, written: Mapping[str, Tensor]
) -> None:
    """Other meshes load both forms, and save what was written.

    Args:
        load: (rank, ranks, strategy=, source=, target=).
    """
    for reader in readers:
        for source in ("one.ckpt", "steps"):
            ranks, strategy = meshes[reader]
            target = folder / f"{reader}.ckpt"
            run_ranks(ranks, partial(load, strategy=strategy, source=str(folder / source), target=str(target)))
            read = tensors(target)
            assert read.keys() == written.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in written.items()), (reader, source)
