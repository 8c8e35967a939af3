"""`moe-bench pictures`: heat maps of the experts' loads over time, from a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_lightning.arguments import InputFile, OutputFolder, option
from moe_lightning.moe.forced_routing import read_loads
from moe_lightning.plots import heat_map, svg


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `moe-bench pictures`."""

    source: InputFile = option("a routing trace (.npz), or the expert_load.csv of a run")
    out: OutputFolder = option("folder for layerNN.svg (default: here)", Path())


def run(options: Options) -> int:
    """Write one picture for each MoE layer; 0 on success."""
    steps, shares_LSE = read_loads(options.source)
    options.out.mkdir(parents=True, exist_ok=True)
    for layer, shares_SE in enumerate(shares_LSE):
        path = options.out / f"layer{layer:02d}.svg"
        path.write_text(svg(heat_map(shares_SE, steps, f"load of the experts of MoE layer {layer}")))
        print(path)
    return 0
