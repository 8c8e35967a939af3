"""Pictures as SVG text, without a plotting library: a heat map of loads over time, the time line of a step."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.overlap import Timeline
from moe_lightning.errors import ConfigurationError

_CELL_PX = 10
_MARGIN_PX = 70
_MAX_COLUMNS = 120
_LANE_PX = 26
_WIDTH_PX = 1000

_COLORS = {
    "exchange": "#d08c2f",
    "experts": "#3b6fb6",
    "dense": "#8a8f98",
    "plan": "#9b59b6",
    "trans": "#2e9e6b",
    "agg": "#c0504d",
}


def heat_map(shares_SE: NDArray[np.float64], steps: Sequence[int], title: str) -> str:
    """Share of every expert over time: steps to the right, experts downwards, white is none and blue is the largest.

    Args:
        shares_SE: [samples, experts]; of more samples than fit, neighbours are averaged.
        steps: of the samples, for the axis.
        title: above the picture.

    Raises:
        ConfigurationError: no samples, or another number of steps.
    """
    if not shares_SE.size or len(steps) != len(shares_SE):
        raise ConfigurationError(f"a heat map needs samples and a step for each, not {len(shares_SE)} and {len(steps)}")
    groups = np.array_split(np.arange(len(shares_SE)), min(len(shares_SE), _MAX_COLUMNS))
    columns = [shares_SE[group].mean(axis=0) for group in groups]
    largest = max(float(column.max()) for column in columns) or 1.0
    cells = []
    for x, column in enumerate(columns):
        for y, share in enumerate(column.tolist()):
            strength = share / largest
            color = f"rgb({round(255 - 225 * strength)},{round(255 - 165 * strength)},{round(255 - 80 * strength)})"
            cells.append(_box(_MARGIN_PX + x * _CELL_PX, 30 + y * _CELL_PX, _CELL_PX, _CELL_PX, color))
    bottom = 30 + _CELL_PX * shares_SE.shape[1]
    labels = [
        _text(_MARGIN_PX, 18, f"{title}; darkest {100 * largest:.0f} % of all assignments"),
        _text(4, 42, "expert 0"),
        _text(4, bottom, f"expert {shares_SE.shape[1] - 1}"),
        _text(_MARGIN_PX, bottom + 16, f"step {steps[0]}"),
        _text(_MARGIN_PX + _CELL_PX * len(columns) - 60, bottom + 16, f"step {steps[-1]}"),
    ]
    return _svg(_MARGIN_PX + _CELL_PX * max(len(columns), 60) + 10, bottom + 26, cells + labels)


def time_line(line: Timeline, title: str) -> str:
    """A step as the performance model sees it: computations and exchanges above, transfers of shadows below.

    Raises:
        ConfigurationError: a time line without any span.
    """
    if not line.spans:
        raise ConfigurationError("a time line without spans cannot be drawn: plan a step first")
    scale = _WIDTH_PX / max(span.end_s for span in line.spans)
    parts = [_text(_MARGIN_PX, 18, f"{title}; {1e3 * line.total_s:.2f} ms, {1e3 * line.exposed_s:.2f} ms of it copies")]
    parts += [_text(4, 30 + 18, "compute"), _text(4, 30 + _LANE_PX + 18, "copies")]
    for span in line.spans:
        name = span.operation.kind.value
        color = next(color for key, color in _COLORS.items() if key in name.split("_"))
        lane = 1 if color in (_COLORS["trans"], _COLORS["agg"], _COLORS["plan"]) else 0
        label = f"{name} of block {span.operation.block}: {1e3 * (span.end_s - span.start_s):.3f} ms"
        x, width = _MARGIN_PX + scale * span.start_s, max(0.5, scale * (span.end_s - span.start_s))
        parts.append(_box(x, 32 + lane * _LANE_PX, width, _LANE_PX - 4, color, label))
    for index, (name, color) in enumerate(_COLORS.items()):
        x = _MARGIN_PX + 110 * index
        parts += [_box(x, 40 + 2 * _LANE_PX, 12, 12, color), _text(x + 16, 51 + 2 * _LANE_PX, name)]
    return _svg(_MARGIN_PX + _WIDTH_PX + 10, 60 + 2 * _LANE_PX, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif">'
    )
    return "\n".join([head, _box(0, 0, width, height, "white"), *parts, "</svg>\n"])


def _box(x: float, y: float, width: float, height: float, color: str, label: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}"'
    return f"{box}><title>{escape(label)}</title></rect>" if label else f"{box}/>"


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="12">{escape(words)}</text>'
