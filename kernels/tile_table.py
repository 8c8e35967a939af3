"""Tiles of the grouped matmuls by device, dtype and number of rows: tables that are read, never tuned in a step.

The package ships one (`tiles.json`); one in the user's cache, which `moe-bench tiles --measure` writes, goes before it.
A table is data: JSON whose every entry is checked.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

Rows = Literal["few", "many"]


class Tile(NamedTuple):
    """Block sizes of one matmul, warps of a program, and stages of its pipeline."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


FEW_ROWS = 96
"""Most rows of a slot, on average, that count as few."""

CANDIDATES: Mapping[Rows, tuple[Tile, ...]] = {
    "few": (Tile(64, 128, 64, 4, 4), Tile(64, 128, 32, 4, 3)),
    "many": (Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 3)),
}
"""For operands of 16 bits, whose machine code is held to budgets; deep pipelines first."""

SHIPPED = Path(__file__).with_name("tiles.json")

_KEY = re.compile(r"sm_\d{2,3} 2 (few|many)")
_SIZES = (16, 32, 64, 128, 256)
_MOST_BYTES = 1 << 16
_log = logging.getLogger(__name__)


def key(capability: int, element_bytes: int, rows: Rows) -> str:
    """Return the key of an entry: compute capability times ten, bytes of an element, class of the number of rows."""
    return f"sm_{capability} {element_bytes} {rows}"


def rows_class(rows_per_slot: int) -> Rows:
    """Return the class of a number of rows: few or many."""
    return "few" if rows_per_slot <= FEW_ROWS else "many"


def candidates(capability: int, rows: Rows) -> tuple[Tile, ...]:
    """Return the tiles for a device, if they fit its shared memory: a wide tile's sums need many registers."""
    return tuple(tile for tile in CANDIDATES[rows] if tile.n <= 128 or capability in (90, 100, 103))


def shared_bytes(tile: Tile, element_bytes: int) -> int:
    """Shared memory of a product: operands of all stages, a result on its way out whole, and a quarter of another."""
    return element_bytes * (tile.stages * (tile.m + tile.n) * tile.k + 5 * tile.m * tile.n // 4)


def user_file() -> Path:
    """Return the path of this user's own table."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-lightning" / "tiles.json"


def chosen(capability: int, element_bytes: int, rows: Rows) -> Tile | None:
    """The entry of the user's table, else of the shipped one; None: neither has one."""
    try:
        own = user_file()
    except RuntimeError:  # a container's user may have no home
        own = None
    return _tables(own).get(key(capability, element_bytes, rows))


def write(path: Path, how: str, tiles: Mapping[str, Tile]) -> None:
    """Write a table that only this user may change, whole or not at all.

    Args:
        how: origin of its entries, in words.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = ",\n".join(f'    "{name}": {json.dumps(tile)}' for name, tile in sorted(tiles.items()))
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(f'{{\n  "how": {json.dumps(how)},\n  "tiles": {{\n{lines}\n  }}\n}}\n')
    fresh.chmod(0o644)
    fresh.replace(path)


@functools.cache
def _tables(own: Path | None) -> dict[str, Tile]:
    """Both, read once."""
    return read(SHIPPED) | ({} if own is None else of_user(own))


def of_user(path: Path) -> dict[str, Tile]:
    """The entries of a user's table; none, and a warning, where anything in it is wrong."""
    try:
        return read(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        cure = "delete it, or write it anew with moe-bench tiles --measure"
        _log.warning("the table of tiles %s is left out (%s): %s", path, error, cure)
        return {}


def read(path: Path) -> dict[str, Tile]:
    """The entries of a table.

    Raises:
        ValueError: anything in it that is no such entry.
    """
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    try:
        table = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    tiles = table.get("tiles") if isinstance(table, dict) else None
    if not isinstance(tiles, dict):
        raise ValueError("it has no tiles")
    return {name: _checked(name, tile) for name, tile in tiles.items()}


def _checked(name: str, tile: Any) -> Tile:
    is_tile = isinstance(tile, list) and len(tile) == 5 and all(type(number) is int for number in tile)
    if not _KEY.fullmatch(name) or not is_tile:
        raise ValueError(f"{name!r}: {str(tile)[:60]} is no entry")
    found = Tile(*tile)
    if not ({*found[:3]} <= {*_SIZES} and found.warps in (4, 8) and 1 <= found.stages <= 8):
        raise ValueError(f"{name!r}: {tile} are no sizes of a tile")
    return found
