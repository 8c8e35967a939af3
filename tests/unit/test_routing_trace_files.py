"""Routing traces from disk: whole ones, damaged ones, and files that hold something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.balance_trace import load_trace
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity, read_routing_trace
from moe_lightning.simulate.workload import make_routing

COUNTS = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
READERS: list[Callable[[Path], object]] = [
    read_routing_trace,
    load_trace,
    lambda path: make_routing("trace", num_experts=4, num_layers=3, path=str(path)),
    lambda path: Popularity(ForcedRouting(kind="trace", path=str(path)), 4, 0),
]


def _saved(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **({"counts": COUNTS, "iteration": [1, 5]} | arrays))
    return path


def test_a_whole_trace(tmp_path: Path) -> None:
    counts, iterations = read_routing_trace(_saved(tmp_path / "trace.npz", counts=COUNTS.astype(np.float32)))
    assert np.array_equal(counts, COUNTS)
    assert counts.dtype == iterations.dtype == np.int64
    assert iterations.tolist() == [1, 5]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "arrays",
    [
        {"counts": COUNTS[0]},
        {"counts": COUNTS[:0], "iteration": []},
        {"counts": COUNTS - 5},
        {"counts": COUNTS * np.nan},
        {"counts": COUNTS.astype(str)},
        {"counts": COUNTS.astype(float) * 1e30},
        {"iteration": [1, 1]},
        {"iteration": [1, np.inf]},
        {"iteration": [[1], [2]]},
        {"iteration": ["a", "b"]},
        {"counts": np.array({"pickled": 1}, dtype=object)},
    ],
    ids=str,
)
def test_arrays_of_something_else(tmp_path: Path, read: Callable[[Path], object], arrays: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"trace\.npz") as caught:
        read(_saved(tmp_path / "trace.npz", **arrays))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty", "npy", "folder", "missing"])
def test_damaged_files(tmp_path: Path, read: Callable[[Path], object], damage: str) -> None:
    path = _saved(tmp_path / "trace.npz")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 4] ^= 0xFF
    contents = {"cut": whole[: len(whole) // 2], "flipped": whole, "text": b"step,layer\n", "empty": b""}
    path.unlink()
    if damage in contents:
        path.write_bytes(contents[damage])
    elif damage == "npy":
        np.save(tmp_path / "array.npy", COUNTS)
        (tmp_path / "array.npy").rename(path)
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(ConfigurationError, match=r"trace\.npz") as caught:
        read(path)
    assert "\n" not in str(caught.value)
