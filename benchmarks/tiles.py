"""moe-bench tiles: which tiles the grouped matmuls take, by the model of `moe-bench roofline`, or as a GPU says.

What the package ships comes from the model; nothing of it has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measuring import timed
from benchmarks.race import race
from benchmarks.roofline_model import DEVICES, Matmul, Tile, matmul_cost
from moe_lightning.arguments import Count, OutputFile, option
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import tile_table
from moe_lightning.kernels.tile_table import CANDIDATES, Rows, candidates, key, shared_bytes
from moe_lightning.text_table import table

CAPABILITIES = {"a100": 80, "h100": 90, "b200": 100, "rtx5090": 120}
"""A device of the model for each compute capability times ten."""

MODELLED = "modelled, not measured: moe-bench tiles --write-table"
_SLOTS, _INNER, _WIDTH, _HALF = 64, 2048, 4096, 2
_ROWS: Mapping[Rows, int] = {"few": 48, "many": 1024}
"""Of a slot."""

Measure = Callable[[int, tile_table.Tile], float]
"""Seconds of a product of so many rows in each slot, of this tile."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    measure: bool = option("on this machine's GPU, for this user's own table", False)
    write_table: OutputFile | None = option("where to: a JSON file; with --measure the user's cache if none", None)
    rounds: Count = option("measurements of each", 7)


def run(options: Options) -> int:
    """Print the table, and write it where that is asked for.

    Raises:
        ConfigurationError: there is no GPU to measure.
    """
    target = options.write_table
    if options.measure:
        if not torch.cuda.is_available():
            raise ConfigurationError("no GPU here to measure: leave --measure out for the modelled table")
        major, minor = torch.cuda.get_device_capability()
        how, target = f"measured on {torch.cuda.get_device_name()}", target or tile_table.user_file()
        tiles = tile_table.of_user(target) | measured(10 * major + minor, options.rounds, _seconds)
    else:
        how, tiles = MODELLED, modelled()
    rows = [(name, *tile) for name, tile in sorted(tiles.items())]
    print(table(("device, bytes, rows", "m", "n", "k", "warps", "stages"), rows, f"tiles, {how}"))
    if target is not None:
        tile_table.write(target, how, tiles)
        print(f"written to {target}")
    return 0


def modelled() -> dict[str, tile_table.Tile]:
    """For each device the candidate that the model finds fastest, of those for which it has the shared memory."""
    found = {}
    for name, capability in CAPABILITIES.items():
        for rows in CANDIDATES:
            fitting = [
                tile for tile in candidates(capability, rows) if shared_bytes(tile, _HALF) <= DEVICES[name].shared
            ]
            found[key(capability, _HALF, rows)] = min(fitting, key=partial(_modelled_seconds, name, _ROWS[rows]))
    return found


def measured(capability: int, rounds: int, seconds: Measure) -> dict[str, tile_table.Tile]:
    """Of one device, as its clock says; a candidate that it cannot launch is out.

    Args:
        seconds: measures once.
    """
    found = {}
    for rows in CANDIDATES:
        name, tiles = key(capability, _HALF, rows), {str(tile): tile for tile in candidates(capability, rows)}
        turns = {text: {"s": partial(seconds, _ROWS[rows], tile)} for text, tile in tiles.items()}
        medians = race(turns, rounds).medians
        if medians:
            found[name] = tiles[min(medians, key=lambda text, of=medians: of[text]["s"])]  # type: ignore[misc]
    return found


def _modelled_seconds(device: str, rows: int, tile: tile_table.Tile) -> float:
    m, n, k, *_ = tile
    sizes = Matmul(
        rows=rows * _SLOTS, width=_WIDTH, inner=_INNER, groups=_SLOTS, tile=Tile(m=m, n=n, k=k), is_persistent=True
    )
    return matmul_cost(sizes, DEVICES[device]).seconds


def _seconds(rows: int, tile: tile_table.Tile) -> float:
    from moe_lightning.kernels.triton import matmul as triton_matmul  # Triton is absent on most machines
    from moe_lightning.kernels.triton.tiles import row_tiles

    device = torch.device("cuda")
    x = torch.zeros(rows * _SLOTS, _INNER, device=device, dtype=torch.bfloat16)
    weight = torch.zeros(_SLOTS, _INNER, _WIDTH, device=device, dtype=torch.bfloat16)
    counts = torch.full((_SLOTS,), rows, device=device)
    cut = row_tiles(counts, len(x), tile)
    return timed(lambda: triton_matmul.grouped_mm(x, weight, cut))
