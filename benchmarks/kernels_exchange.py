"""The exchange row of moe-bench kernels: rows between the ranks of one machine, each of which has a GPU.

Shapes: M rows of each rank, D model width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch

from benchmarks.measuring import interleaved_medians
from moe_lightning.parallel.context import STORE_VARIABLE, World, join_local_world
from moe_lightning.parallel.exchange import exchange_rows
from moe_lightning.text_table import table

_TIMEOUT = timedelta(seconds=100)
SIZES = ((32768, 2048), (131072, 4096))


def exchange_table(num_ranks: int, rounds: int) -> str:
    """Of all GPUs of this machine; a sentence where it cannot be measured."""
    command = (sys.executable, "-m", "benchmarks.kernels_exchange")
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, STORE_VARIABLE: folder}
        ranks = [
            subprocess.Popen([*command, str(rank), str(num_ranks), str(rounds)], env=variables, stdout=subprocess.PIPE)
            for rank in range(num_ranks)
        ]
        try:
            said = ranks[0].communicate(timeout=2 * _TIMEOUT.total_seconds())[0]
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if not said:
        return f"exchange over {num_ranks} GPUs left out: its ranks failed, see above"
    title = f"{num_ranks} ranks, bf16, what leaves a rank"
    return table(("exchange", "M", "D", "ms", "GB/s a rank"), json.loads(said), title)


def main(rank: int, size: int, rounds: int) -> None:
    """One rank; the first prints all rows as JSON."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    join_local_world(rank=rank, size=size, backend="nccl", device=device, timeout=_TIMEOUT)
    world = World.connect(device, _TIMEOUT)
    rows = [row for num_rows, width in SIZES for row in measure(world, num_rows, width, rounds)]
    if rank == 0:
        print(json.dumps(rows), flush=True)
    world.close()


def measure(world: World, num_rows: int, width: int, rounds: int) -> list[tuple[str, int, int, str, str]]:
    """Rows of the table for even exchanges; collective."""
    each = num_rows // world.size
    counts, x_MD = [each] * world.size, torch.randn(each * world.size, width).to(world.device, torch.bfloat16)
    calls = {"all-to-all": lambda: exchange_rows(x_MD, counts, counts, world)}
    sent_bytes = (world.size - 1) * each * width * x_MD.element_size()
    return [
        (name, len(x_MD), width, f"{seconds * 1e3:.3f}", f"{sent_bytes / seconds / 1e9:.1f}")
        for name, seconds in interleaved_medians(calls, rounds).items()
    ]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
