"""moe-bench pictures: heat maps of the experts' loads over time, from what a run recorded."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arguments import InputFile, OutputFolder, option
from moe_lightning.bench.balance_trace import load_trace
from moe_lightning.errors import ConfigurationError
from moe_lightning.svg_pictures import heat_map


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of this benchmark."""

    source: InputFile = option("a routing trace (.npz), or the expert_load.csv of a run")
    out: OutputFolder = option("folder for layerNN.svg (default: here)", Path())


def run(options: Options) -> int:
    """Write one picture for each MoE layer; 0 on success."""
    steps, shares_LSE = read_loads(options.source)
    options.out.mkdir(parents=True, exist_ok=True)
    for layer, shares_SE in enumerate(shares_LSE):
        path = options.out / f"layer{layer:02d}.svg"
        path.write_text(heat_map(shares_SE, steps, f"load of the experts of MoE layer {layer}"))
        print(path)
    return 0


def read_loads(path: Path) -> tuple[list[int], NDArray[np.float64]]:
    """Steps [samples] and shares [layers, samples, experts] of a trace or of the CSV that Telemetry writes.

    Raises:
        ConfigurationError: no such file, or a file that holds something else.
    """
    if path.suffix == ".npz":
        trace = load_trace(path)
        loads_LSE = trace.counts.sum(axis=2).transpose(1, 0, 2)
        shares: NDArray[np.float64] = loads_LSE / np.maximum(loads_LSE.sum(axis=2, keepdims=True), 1)
        return trace.iteration.tolist(), shares
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a routing trace (.npz) or an expert_load.csv")
    by_layer: dict[int, dict[int, list[float]]] = {}
    try:
        with path.open(newline="") as file:
            for step, layer, *row in csv.reader(file):
                by_layer.setdefault(int(layer), {})[int(step)] = [float(share) for share in row]
        layers = [by_layer[layer] for layer in range(len(by_layer))]
        shares = np.array([list(rows.values()) for rows in layers], dtype=np.float64)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"{path} has no lines of step, layer, shares: give an expert_load.csv") from error
    if shares.ndim != 3:
        raise ConfigurationError(f"{path} has no lines of step, layer, shares: give an expert_load.csv")
    return list(layers[0]), shares
