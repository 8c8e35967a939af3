"""Forced routing: choices that follow a given popularity of experts, for experiments under known skew.

Popularity is given or read from recorded routing on disk: an .npz of `counts` [samples, layers, ranks, experts] and
`iteration` [samples]. All readers of such files use this module, so that errors have the same text everywhere.

The choice of a token is a function of its position in the global stream, so forced routing keeps law L1. Weights still
come from the learned scores, so that the router trains.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from moe_lightning.arrays import FloatArray
from moe_lightning.config import PositiveInt, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import MOST_BYTES, open_text

if TYPE_CHECKING:
    from torch import Tensor

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
            f"{iterations.shape}: record it again"
        )
    for name, array in (("counts", counts), ("iteration", iterations)):
        if array.dtype.kind not in "iuf" or not array.min() >= 0 or not array.max() <= 2**53:  # of a nan neither holds
            raise ConfigurationError(f"{path} holds {name} that are not numbers of 0 or more: record it again")
        if array.dtype.kind == "f" and (array != np.floor(array)).any():
            raise ConfigurationError(f"{path} holds {name} that are not integers: record it again")
    if not counts.any():
        raise ConfigurationError(f"{path} holds counts of 0 only: record it again")
    if (np.diff(iterations.astype(np.int64)) <= 0).any():
        raise ConfigurationError(f"{path} has an iteration that does not ascend: record it again")
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
    """Steps [samples] and shares [layers, samples, experts] of the CSV that Telemetry writes.

    Raises:
        ConfigurationError: no such file, or a file that holds something else.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a routing trace (.npz) or an expert_load.csv")
    by_layer: dict[int, dict[int, list[float]]] = {}
    try:
        with open_text(path) as file:
            head, *rows_of_file = csv.reader(file)
            if head[:2] != ["step", "layer"]:
                raise ValueError("no head")
            for step, layer, *row in rows_of_file:
                by_layer.setdefault(int(layer), {})[int(step)] = [float(share) for share in row]
        layers = [by_layer[layer] for layer in range(len(by_layer))]
        # A step that is being written, or was when the run was killed, is not whole.
        num_experts = len(next(iter(layers[0].values()))) if layers else 0
        steps = [step for step in by_layer.get(0, ()) if all(len(rows.get(step, ())) == num_experts for rows in layers)]
        shares: NDArray[np.float64] = np.array([[rows[step] for step in steps] for rows in layers], dtype=np.float64)
        if shares.ndim != 3 or not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError("no shares")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}): give an expert_load.csv") from error
    except (ValueError, KeyError, csv.Error) as error:
        raise ConfigurationError(f"{path} has no lines of step, layer, shares: give an expert_load.csv") from error
    return steps, shares


@validated
@dataclass(frozen=True, kw_only=True)
class ForcedRouting:
    """Popularity of experts that the routing is forced to follow.

    Attributes:
        kind: "uniform"; "zipf" (the i-th most popular expert gets a share proportional to i ** -exponent, another
            order in each layer); "drift" (zipf whose order turns into another one every `period` steps, little by
            little); "trace" (the shares recorded in a file, at the running step).
        exponent: of zipf and drift.
        period: steps of drift from one order to the next.
        path: .npz of a trace with `counts` [samples, layers, ranks, experts] and `iteration` [samples], ascending.

    Raises:
        ConfigurationError: an unknown kind, a negative exponent, a period below one step, or a trace without a path.
    """

    kind: Literal["uniform", "zipf", "drift", "trace"] = "uniform"
    exponent: Annotated[float, Interval(ge=0, le=100)] = 1.0
    period: PositiveInt = 200
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "trace" and not self.path:
            raise ConfigurationError("forced routing kind='trace' needs path=, the .npz file of the recorded routing")


class Popularity:
    """Share of each expert of one layer at a step.

    Args:
        forced: what to follow.
        num_experts: E.
        layer: ordinal of the MoE layer; picks the order of zipf and the layer of a trace (modulo its number of layers).
    """

    def __init__(self, forced: ForcedRouting, num_experts: int, layer: int) -> None:
        self.layer = layer
        self._period = forced.period if forced.kind == "drift" else None
        self._iterations = np.zeros(1, dtype=np.int64)
        if forced.kind == "trace":
            assert forced.path is not None
            self._iterations, self._shares = _read_trace(Path(forced.path), num_experts, layer)
        else:
            shares = (1.0 + np.arange(num_experts)) ** -(0.0 if forced.kind == "uniform" else forced.exponent)
            self._shares = (shares / shares.sum())[None]
            if forced.kind == "zipf":
                self._shares = self._shares[:, np.random.default_rng(layer).permutation(num_experts)]

    def at(self, step: int) -> FloatArray:
        """[E], sums to one; a trace's last sample holds after its end."""
        if self._period is not None:
            turn, done = divmod(step, self._period)
            return self._turned(turn) + (self._turned(turn + 1) - self._turned(turn)) * (done / self._period)
        index = int(np.searchsorted(self._iterations, step + 1, side="right")) - 1
        shares: FloatArray = self._shares[max(index, 0)]
        return shares

    def _turned(self, turn: int) -> FloatArray:
        """The shares in the order of one turn of the drift."""
        shares: FloatArray = self._shares[0]
        return np.random.default_rng((self.layer, turn)).permutation(shares)


def sample_experts(shares_E: FloatArray, uniform_T: Tensor, top_k: int) -> Tensor:
    """K distinct experts for each token, expert e with probability K * share (systematic sampling).

    Shares above 1/K, which no choice of distinct experts can reach, are cut to it and the rest is spread over the
    others in proportion.

    Args:
        shares_E: sums to one.
        uniform_T: one number in (0, 1) for each token.

    Returns:
        int64 [T, K].
    """
    import torch  # the readers of files need none of it, and are used by commands that start at once

    inclusion = _inclusion(shares_E, top_k)
    ends = torch.from_numpy(np.cumsum(inclusion)).to(uniform_T.device)
    points = uniform_T.double()[:, None] + torch.arange(top_k, device=uniform_T.device)
    return torch.searchsorted(ends, points.contiguous(), right=True).clamp_max(len(shares_E) - 1)


def _inclusion(shares: FloatArray, top_k: int) -> FloatArray:
    """Probabilities in [0, 1] that sum to K, proportional to the shares where these allow it."""
    inclusion = np.zeros_like(shares)
    free = np.ones(len(shares), dtype=bool)
    weights = np.maximum(shares, 1e-12)
    while True:
        inclusion[free] = weights[free] / weights[free].sum() * (top_k - (~free).sum())
        over = free & (inclusion > 1.0)
        if not over.any():
            return inclusion
        inclusion[over] = 1.0
        free &= ~over


def _read_trace(path: Path, num_experts: int, layer: int) -> tuple[NDArray[np.int64], FloatArray]:
    """Iterations [samples] and shares [samples, E] of one layer; of more experts than E the most used ones are kept."""
    counts, iterations = read_routing_trace(path)
    loads = counts[:, layer % counts.shape[1]].sum(axis=1, dtype=np.float64)
    if loads.shape[1] < num_experts:
        raise ConfigurationError(
            f"{path} records {loads.shape[1]} experts, fewer than the model's {num_experts}: use fewer experts"
        )
    kept = np.sort(np.argsort(-loads.sum(axis=0), kind="stable")[:num_experts])
    loads = loads[:, kept]
    totals = loads.sum(axis=1, keepdims=True)
    return iterations, np.where(totals > 0, loads / np.maximum(totals, 1), 1.0 / num_experts)
