"""Recorded routing as it lies on disk: an .npz of `counts` [samples, layers, ranks, experts] and `iteration` [samples].

Whatever reads one reads it here, so that a damaged file is told in the same words everywhere.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import MOST_BYTES, open_text

_DAMAGE = (ValueError, KeyError, TypeError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


def read_routing_trace(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """counts [samples, layers, ranks, experts], none negative, and iteration [samples], ascending.

    Raises:
        ConfigurationError: no such file, a damaged one, or one that holds something else.
    """
    if not path.is_file():
        raise ConfigurationError(f"the routing trace {path} is not a file: give the path of an .npz")
    try:
        _check_unpacked(path)
        with np.load(path, allow_pickle=False) as archive:
            counts, iterations = archive["counts"], archive["iteration"]
    except _DAMAGE as error:
        raise ConfigurationError(
            f"{path} is not a routing trace (.npz with counts and iteration), or damaged "
            f"({' '.join(str(error).split())}): record one with RoutingRecorder"
        ) from error
    if counts.ndim != 4 or iterations.shape != counts.shape[:1] or 0 in counts.shape:
        raise ConfigurationError(
            f"{path} needs counts [samples, layers, ranks, experts] and iteration [samples], not {counts.shape} and "
            f"{iterations.shape}: record it anew"
        )
    for name, array in (("counts", counts), ("iteration", iterations)):
        if array.dtype.kind not in "iuf" or not array.min() >= 0 or not array.max() <= 2**53:  # of a nan neither holds
            raise ConfigurationError(f"{path} holds {name} that are no numbers of 0 or more: record it anew")
        if array.dtype.kind == "f" and (array != np.floor(array)).any():
            raise ConfigurationError(f"{path} holds {name} that are no whole numbers: record it anew")
    if not counts.any():
        raise ConfigurationError(f"{path} holds counts of 0 only: record it anew")
    if (np.diff(iterations.astype(np.int64)) <= 0).any():
        raise ConfigurationError(f"{path} has an iteration that does not ascend: record it anew")
    return counts.astype(np.int64, copy=False), iterations.astype(np.int64, copy=False)


def _check_unpacked(path: Path) -> None:
    """Refuse an archive by the size of its arrays before one is read.

    Raises:
        ValueError: they have more than `MOST_BYTES` in all.
    """
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MOST_BYTES:
        raise ValueError(f"it unpacks to {unpacked:,} bytes, and at most {MOST_BYTES:,} are read")


def read_loads(path: Path) -> tuple[list[int], NDArray[np.float64]]:
    """Steps [samples] and shares [layers, samples, experts] of a trace or of the CSV that Telemetry writes.

    Raises:
        ConfigurationError: no such file, or a file that holds something else.
    """
    if path.suffix == ".npz":
        counts, iterations = read_routing_trace(path)
        loads_LSE = counts.sum(axis=2).transpose(1, 0, 2)
        shares: NDArray[np.float64] = loads_LSE / np.maximum(loads_LSE.sum(axis=2, keepdims=True), 1)
        return iterations.tolist(), shares
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a routing trace (.npz) or an expert_load.csv")
    by_layer: dict[int, dict[int, list[float]]] = {}
    try:
        with open_text(path) as file:
            for step, layer, *row in csv.reader(file):
                by_layer.setdefault(int(layer), {})[int(step)] = [float(share) for share in row]
        layers = [by_layer[layer] for layer in range(len(by_layer))]
        # A step that is being written, or was when the run was killed, is not whole.
        num_experts = len(next(iter(layers[0].values()))) if layers else 0
        steps = [step for step in by_layer.get(0, ()) if all(len(rows.get(step, ())) == num_experts for rows in layers)]
        shares = np.array([[rows[step] for step in steps] for rows in layers], dtype=np.float64)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}): give an expert_load.csv") from error
    except (ValueError, KeyError, csv.Error) as error:
        raise ConfigurationError(f"{path} has no lines of step, layer, shares: give an expert_load.csv") from error
    if shares.ndim != 3 or not ((shares >= 0) & (shares <= 1)).all():
        raise ConfigurationError(f"{path} has no lines of step, layer, shares: give an expert_load.csv")
    return steps, shares
