"""Exceptions that leave the Trainer, where other ranks have ended."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, FileStore, PrefixStore  # type: ignore[attr-defined]

from moe_lightning.parallel import context
from moe_lightning.parallel.context import World
from moe_lightning.strategies import failures
from moe_lightning.strategies.failures import Failure


@pytest.mark.timeout(60)
def test_a_rank_does_not_wait_for_the_store_of_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "world"
    folder.mkdir()
    store = PrefixStore("default", FileStore(str(folder / "store")))
    store.set("a", "b")
    store.set_timeout(timedelta(minutes=30))
    monkeypatch.setattr(failures, "common_store", lambda: store)
    monkeypatch.setattr(context, "_SOON", timedelta(seconds=0.1))
    lost = DistBackendError("Connection closed by peer")
    shutil.rmtree(folder)  # rank 0's
    world = World(rank=1, size=2, device=torch.device("cpu"))
    failure = Failure(lost, world, 0)
    assert failure.is_network_fault
    assert failure.explained(lost) is lost
    own = Failure(ValueError("an error of the user's"), world, 0)
    own.publish(ValueError("an error of the user's"), world)
    assert not own.is_common
    assert store.timeout == timedelta(minutes=30), "for another training of these processes"
