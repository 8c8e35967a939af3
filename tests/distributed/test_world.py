"""Meeting over the launcher's store: joined, kept by a second call, refused where the address is malformed."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_lightning.comm.world import STORE_VARIABLE, World, join_launched_world
from moe_lightning.errors import ConfigurationError
from tests.distributed.harness import connect, run_ranks

TIMEOUT = timedelta(seconds=60)


def meet_over_the_launchers_store(rank: int, world_size: int) -> tuple[list[bool], int, float]:
    dist.destroy_process_group()
    meeting = dist.FileStore("meeting", world_size)
    if rank == 0:  # in the launcher's place
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        meeting.set("port", str(server.port))
    os.environ[STORE_VARIABLE] = f"127.0.0.1:{meeting.get('port').decode()}/attempt-3/world"
    joined = [join_launched_world(rank=rank, size=world_size, backend="gloo", timeout=TIMEOUT) for _ in range(2)]
    world = connect()
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total, group=world.compute)
    return joined, world.size, float(total)


def test_ranks_meet_over_the_launchers_store() -> None:
    assert run_ranks(2, meet_over_the_launchers_store) == [([True, True], 2, 3.0)] * 2


@pytest.mark.parametrize("address", ["", "host", "host:1", "host:/world", ":1/world", "host:port/world", "host:1/"])
def test_a_malformed_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, address)
    with pytest.raises(ConfigurationError, match=f"{STORE_VARIABLE}='{address}' is not host:port/prefix: leave it"):
        join_launched_world(rank=0, size=1, backend="gloo", timeout=TIMEOUT)


def test_without_a_launcher_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    assert not join_launched_world(rank=0, size=1, backend="gloo", timeout=TIMEOUT)
    world = World.connect(torch.device("cpu"), TIMEOUT)
    assert (world.rank, world.size, world.compute, world.background) == (0, 1, None, None)
