"""Whether communicators of a device can be aborted under way and made again in the same process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import exchange_rows


def exchanged_after_abort(rank: int, size: int, folder: Path, device: torch.device, timeout: timedelta) -> bool:
    """Exchange rows among ranks that meet in a folder, abort the groups, meet again, exchange; whether rows arrived.

    On CUDA rank 0 waits for an exchange that nobody joins when it aborts; gloo cannot abort, and is only made again.
    """
    arrived = []
    for attempt in range(2):
        store = FileStore(str(folder / f"meeting-{attempt}"), size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        world = World.connect(device, timeout)
        rows = torch.full((size, 4), float(rank), device=device)
        got = exchange_rows(rows, [1] * size, [1] * size, world)
        arrived.append(got[:, 0].tolist() == [float(peer) for peer in range(size)])
        if device.type == "cuda" and not attempt:
            if rank == 0:
                dist.all_reduce(rows, group=world.compute, async_op=True)
            for group in world.groups:
                group.abort()
        dist.destroy_process_group()
    return all(arrived)
