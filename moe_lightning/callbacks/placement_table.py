"""Which ranks hold which expert, as a CSV that grows where it changes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from moe_lightning.moe.layer import MoELayer


class PlacementTable:
    """A CSV of `step,layer,ranks`, then for each expert the ranks that hold it, with spaces between them; a rank that
    holds several replicas stands as often. A layer gets a line where its placement is another than the last written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: dict[int, list[str]] = {}

    def write(self, step: int, layers: Sequence[MoELayer]) -> None:
        """Add the placements after a step where they have changed."""
        changed = {}
        for index, layer in enumerate(layers):
            replicas_EN = layer.dispatcher.placement.replicas
            holders = [" ".join(str(n) for n, count in enumerate(row) for _ in range(count)) for row in replicas_EN]
            line = [str(replicas_EN.shape[1]), *holders]
            if self._written.get(index) != line:
                self._written[index] = changed[index] = line
        if changed:
            with self._path.open("a", newline="") as file:
                csv.writer(file).writerows([step, index, *line] for index, line in changed.items())
