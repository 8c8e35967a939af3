"""Files and folders as disks, other programs and typing mistakes leave them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def trace_arrays() -> dict[str, Any]:
    """A routing trace of 40 samples, 2 layers, 2 ranks and 16 experts."""
    counts = np.random.default_rng(0).integers(1, 100, (40, 2, 2, 16))
    return {"counts": counts, "iteration": np.arange(40) * 50}


def write_trace(path: Path) -> Path:
    with path.open("wb") as file:  # under this name, not one with .npz added
        np.savez(file, **trace_arrays())
    return path


def common(folder: Path, suffix: str, content: bytes) -> Iterator[Path]:
    """What can be wrong with any file: not there, a folder, empty, half of it, noise, not permitted, a name of two
    lines.

    Args:
        content: of a good file.
    """
    for name, data in (
        ("empty", b""),
        ("noise", bytes(range(256)) * 4),
        ("half", content[: len(content) // 2]),
        ("flipped", content[: len(content) // 2] + bytes(64) + content[len(content) // 2 + 64 :]),
        ("text", b"these are words\n"),
    ):
        path = folder / f"{name}{suffix}"
        path.write_bytes(data)
        path.chmod(0o600)
        yield path
    yield folder / f"missing{suffix}"
    yield folder / "missing_folder" / f"file{suffix}"
    yield folder / f"text{suffix}" / f"below_a_file{suffix}"
    made = folder / f"folder{suffix}"
    made.mkdir(exist_ok=True)
    yield made
    yield folder / f"{'n' * 300}{suffix}"
    if os.geteuid():
        closed = folder / f"closed{suffix}"
        closed.write_bytes(content)
        closed.chmod(0)
        yield closed


def damaged_traces(folder: Path) -> Iterator[Path]:
    """Files in place of a routing trace."""
    yield from common(folder, ".npz", write_trace(folder / "whole.npz").read_bytes())
    good = trace_arrays()
    counts, iteration = good["counts"], good["iteration"]
    changes: dict[str, Mapping[str, Any]] = {
        "of_text": {"counts": counts.astype(str)},
        "of_objects": {"counts": counts.astype(object)},
        "of_complex": {"counts": counts.astype(complex)},
        "of_booleans": {"counts": counts > 50},
        "of_dates": {"counts": counts.astype("datetime64[s]")},
        "with_nan": {"counts": np.where(counts > 98, np.nan, counts)},
        "with_inf": {"counts": np.where(counts > 98, np.inf, counts)},
        "with_fractions": {"counts": counts + 0.5},
        "with_negatives": {"counts": counts - 50},
        "with_huge": {"counts": counts * 1e300},
        "of_zeros": {"counts": counts * 0},
        "flat": {"counts": counts.ravel()},
        "no_samples": {"counts": counts[:0], "iteration": iteration[:0]},
        "no_experts": {"counts": counts[..., :0]},
        "of_scalars": {"counts": np.array(3), "iteration": np.array(4)},
        "falling": {"iteration": iteration[::-1]},
        "too_few_iterations": {"iteration": iteration[:3]},
        "iteration_nan": {"iteration": iteration * np.nan},
        "iteration_of_text": {"iteration": iteration.astype(str)},
    }
    for name, change in changes.items():
        path = folder / f"{name}.npz"
        np.savez(path, **{**good, **change})
        yield path
    for name, arrays in (("other_names", {"a": counts}), ("no_iteration", {"counts": counts})):
        path = folder / f"{name}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        yield path
    for name, array in (("one_array", counts), ("one_of_objects", counts.astype(object)), ("one_nan", counts * np.nan)):
        path = folder / f"{name}.npy"
        np.save(path, array)
        yield path
    truncated = folder / "truncated.npy"
    truncated.write_bytes((folder / "one_array.npy").read_bytes()[:1000])
    yield truncated


def damaged_csv(folder: Path) -> Iterator[Path]:
    """Files in place of a trace of nodes."""
    good = "".join(f"0,add,n{i}\n" for i in range(8)) + "600000,remove,n3\n"
    yield from common(folder, ".csv", good.encode())
    for name, text in (
        ("few_columns", "0,add\n"),
        ("negative", "-5,add,a\n"),
        ("nan", "nan,add,a\n"),
        ("fraction", "0.5,add,a\n"),
        ("huge", "9" * 5000 + ",add,a\n"),
        ("superscript", "²,add,a\n"),
        ("nobody", "0,add,\n"),
        ("unsorted", "5,add,a\n1,add,b\n"),
        ("twice", "0,add,a\n1,add,a\n"),
        ("stranger", "0,add,a\n1,remove,b\n"),
        ("nul", "0,add,a\0b\n"),
        ("quote", '0,add,"a\n'),
        ("long_field", "0,add," + "a" * 200_000 + "\n"),
        ("late", "9000000000000,add,a\n"),
    ):
        path = folder / f"{name}.csv"
        path.write_text(text)
        yield path


def damaged_json(folder: Path) -> Iterator[Path]:
    """Files in place of a calibrated machine."""
    yield from common(folder, ".json", b'{"machine": "this", "ranks": {"1": {"ranks_per_node": 1}}}')
    for name, text in (
        ("list", "[]"),
        ("no_ranks", "{}"),
        ("ranks_null", '{"ranks": null}'),
        ("ranks_empty", '{"ranks": {}}'),
        ("rank_abc", '{"ranks": {"abc": {}}}'),
        ("rank_null", '{"ranks": {"1": null}}'),
        ("few_numbers", '{"ranks": {"1": {"ranks_per_node": 1}}}'),
        ("unknown", '{"ranks": {"1": {"speed": 1}}}'),
        ("nan", '{"ranks": {"1": {"ranks_per_node": 1, "flops_per_s": NaN}}}'),
        ("deep", "[" * 100_000),
        ("huge", '{"ranks": {"1": {"flops_per_s": ' + "9" * 5000 + "}}}"),
    ):
        path = folder / f"{name}.json"
        path.write_text(text)
        yield path


def unwritable(folder: Path) -> Iterator[Path]:
    """Where no file can be written."""
    below = folder / "a_file"
    below.write_text("x")
    yield folder / "no_such_folder" / "out"
    yield below / "out"
    yield folder
    yield folder / ("n" * 300)
    yield Path("/proc/out")
    if os.geteuid():
        closed = folder / "closed"
        closed.mkdir(exist_ok=True)
        closed.chmod(0o500)
        yield closed / "out"


def write_run(folder: Path) -> None:
    """A run directory as far as pictures need one."""
    metrics = folder / "csv" / "version_0"
    metrics.mkdir(parents=True)
    (metrics / "metrics.csv").write_text("step,moe/rank_imbalance_ratio\n1,1.5\n2,1.25\n")
    (folder / "expert_load.csv").write_text("1,0,0.5,0.5\n2,0,0.25,0.75\n")
