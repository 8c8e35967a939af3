"""Users' own `torch.distributed.checkpoint` saves and loads beside a strategy, whose ranks unpickle nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe_lightning.parallel.collectives import carry_objects_without_pickle
from tests.distributed.harness import run_ranks
from tests.unit.test_codec import Weapon


def state(factor: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(factor * torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    return {"model": {"sharded": sharded, "whole": torch.full((3,), factor)}, "step": int(7 * factor), "lrs": [factor]}


def saved_and_loaded(rank: int, world_size: int, folder: Path, is_async: bool) -> Any:
    carry_objects_without_pickle()
    if is_async:
        dcp.async_save(state(1.0), checkpoint_id=folder).result()  # type: ignore[union-attr]
    else:
        dcp.save(state(1.0), checkpoint_id=folder)
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id=folder)
    sharded: DTensor = loaded["model"]["sharded"]
    return sharded.full_tensor().tolist(), loaded["model"]["whole"].tolist(), loaded["step"], loaded["lrs"]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_saved_is_loaded(tmp_path: Path, is_async: bool) -> None:
    expected = (torch.arange(12.0).reshape(6, 2).tolist(), [1.0] * 3, 7, [1.0])
    assert run_ranks(2, saved_and_loaded, tmp_path, is_async) == [expected] * 2


def failed(rank: int, world_size: int, folder: Path) -> str:
    carry_objects_without_pickle()
    try:
        dcp.load({"missing": torch.zeros(rank + 1)}, checkpoint_id=folder)
    except CheckpointException as error:
        return str(error)
    return "loaded"


def test_all_ranks_hear_what_failed_on_one(tmp_path: Path) -> None:
    run_ranks(2, saved_and_loaded, tmp_path, False)
    for said in run_ranks(2, failed, tmp_path):
        assert "Missing key in checkpoint state_dict: missing" in said


def behind_a_stranger(rank: int, world_size: int, folder: Path) -> str:
    if rank == 1:
        assert c10d._pickler is pickle.Pickler
        dist.gather_object(Weapon(folder / "made"), dst=0)  # in the place of its plan
        return ""
    carry_objects_without_pickle()
    try:
        dcp.save({"weight": torch.zeros(3)}, checkpoint_id=folder / "saved")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_stranger_in_a_ranks_place_runs_no_code(tmp_path: Path) -> None:
    said, _ = run_ranks(2, behind_a_stranger, tmp_path)
    assert said.startswith("ForeignMessageError: ")
    assert not (tmp_path / "made").exists()
