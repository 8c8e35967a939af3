"""Pictures as SVG text, without a plotting library: a heat map of loads over time, the time line of a step, what
follows what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.overlap import Timeline
from moe_lightning.charts import nice_ticks
from moe_lightning.errors import ConfigurationError

_CELL_PX = 10
_MARGIN_PX = 70
_MAX_COLUMNS = 120
_MIN_MAP_PX = 600
_SCALE_PX = 200
_SHADES = 20
_LANE_PX = 26
_WIDTH_PX = 1000
_LABELLED_PX = 52

_COLORS = {
    "exchange": "#d08c2f",
    "experts": "#3b6fb6",
    "dense": "#8a8f98",
    "plan": "#9b59b6",
    "trans": "#2e9e6b",
    "agg": "#c0504d",
}


def heat_map(shares_SE: NDArray[np.float64], steps: Sequence[int], title: str) -> str:
    """Share of every expert over time: steps to the right, experts downwards, with a scale from white to blue.

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
    width_px = max(_CELL_PX, _MIN_MAP_PX / len(columns))
    cells = []
    for x, column in enumerate(columns):
        for y, share in enumerate(column.tolist()):
            cells.append(
                _box(_MARGIN_PX + x * width_px, 30 + y * _CELL_PX, width_px, _CELL_PX, _shade(share / largest))
            )
    bottom, right = 30 + _CELL_PX * shares_SE.shape[1], _MARGIN_PX + width_px * len(columns)
    labels = [
        _text(_MARGIN_PX, 18, title),
        _text(4, 42, "expert 0"),
        _text(4, bottom, f"expert {shares_SE.shape[1] - 1}"),
        _text(_MARGIN_PX, bottom + 16, f"step {steps[0]}"),
        _text(right, bottom + 16, f"step {steps[-1]}", anchor="end"),
    ]
    marks = [f"{100 * part * largest:.3g} %" for part in (0.0, 0.5, 1.0)]
    scale = _scale(_MARGIN_PX, bottom + 30, marks, "of the layer's assignments")
    return _svg(right + 10, bottom + 56, cells + labels + scale)


def grid(values: NDArray[np.float64], title: str, rows: str, columns: str, unit: str) -> str:
    """A table of numbers of 0 or more as shades, each told where the pointer rests.

    Args:
        values: [rows, columns].
        title: above the picture.
        rows: what a row is, such as "layer".
        columns: what a column is.
        unit: of the values.

    Raises:
        ConfigurationError: no values.
    """
    if not values.size:
        raise ConfigurationError(f"the picture {title!r} has no values: record first")
    largest = float(values.max()) or 1.0
    width_px = min(_LABELLED_PX, max(_CELL_PX, _MIN_MAP_PX / values.shape[1]))
    height_px = 2 * _CELL_PX
    bottom, right = 30 + height_px * values.shape[0], _MARGIN_PX + width_px * values.shape[1]
    cells = [
        _box(
            _MARGIN_PX + x * width_px, 30 + y * height_px, width_px, height_px, _shade(value / largest),
            f"{rows} {y}, {columns} {x}: {value:.4g} {unit}",
        )
        for y, row in enumerate(values.tolist())
        for x, value in enumerate(row)
    ]  # fmt: skip
    labels = [_text(4, 45 + y * height_px, f"{rows} {y}") for y in range(values.shape[0])]
    labels += [_text(_MARGIN_PX, 18, title), _text(_MARGIN_PX, bottom + 16, f"{columns} 0")]
    labels += [_text(right, bottom + 16, f"{values.shape[1] - 1}", anchor="end")] if values.shape[1] > 1 else []
    scale = _scale(_MARGIN_PX, bottom + 30, [f"{part * largest:.3g}" for part in (0.0, 0.5, 1.0)], unit)
    return _svg(max(right, _MARGIN_PX + _MIN_MAP_PX) + 10, bottom + 56, cells + labels + scale)


def _shade(strength: float) -> str:
    """White for 0, blue for 1."""
    return f"rgb({round(255 - 225 * strength)},{round(255 - 165 * strength)},{round(255 - 80 * strength)})"


def _scale(x: float, y: float, marks: Sequence[str], words: str) -> list[str]:
    """What the shades stand for: a strip from none to the largest, with marks at its ends and between."""
    width = _SCALE_PX / _SHADES
    strip = [_box(x + width * i, y, width, 12, _shade(i / (_SHADES - 1))) for i in range(_SHADES)]
    anchors = ("start", "middle", "end")
    texts = [_text(x + _SCALE_PX * index / 2, y + 24, mark, anchor=anchors[index]) for index, mark in enumerate(marks)]
    return [*strip, *texts, _text(x + _SCALE_PX + 10, y + 11, words)]


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


def phase_lines(lanes: Mapping[str, Mapping[str, float]], title: str, *, end_s: float | None = None) -> str:
    """What follows what, in a lane for each case: phases and their seconds from the left to the right, on one scale.

    Args:
        lanes: {case: {phase: seconds}}, phases in their order.
        title: above the picture.
        end_s: where the axis ends; lanes that last longer are cut off. None: with the longest.

    Raises:
        ConfigurationError: no phase that lasts.
    """
    longest_s = max((sum(phases.values()) for phases in lanes.values()), default=0.0)
    if longest_s <= 0:
        raise ConfigurationError(f"the picture {title!r} has no phase that lasts: measure first")
    end_s = end_s or longest_s
    scale = _WIDTH_PX / end_s
    left = 2 * _MARGIN_PX
    colors = [*_COLORS.values(), "#17a2b8", "#7a5c3e", "#e377c2", "#2c3e50"]
    names = list(dict.fromkeys(name for phases in lanes.values() for name in phases))
    parts = [_text(left, 18, title)]
    for lane, (case, phases) in enumerate(lanes.items()):
        top, at_s = 32 + lane * _LANE_PX, 0.0
        parts.append(_text(4, top + 15, case))
        for name, seconds in phases.items():
            shown_s = min(at_s + seconds, end_s) - at_s
            if shown_s > 0:
                color = colors[names.index(name) % len(colors)]
                label = f"{case}, {name}: {1e3 * seconds:.1f} ms"
                parts.append(_box(left + scale * at_s, top, max(0.5, scale * shown_s), _LANE_PX - 4, color, label))
            if scale * shown_s >= _LABELLED_PX:
                middle = left + scale * (at_s + shown_s / 2)
                parts.append(_text(middle, top + 15, _duration(seconds), anchor="middle", color="white"))
            at_s += seconds
        is_cut = at_s > end_s * 1.001
        parts.append(_text(left + scale * min(at_s, end_s) + 6, top + 15, ("> " if is_cut else "") + _duration(at_s)))
    bottom = 40 + len(lanes) * _LANE_PX
    marks = nice_ticks(0.0, end_s)
    parts += [_text(left + scale * mark_s, bottom + 6, f"{mark_s:g} s", anchor="middle") for mark_s in marks]
    for index, name in enumerate(names):
        x, y = left + 200 * (index % 5), bottom + 18 + 18 * (index // 5)
        parts += [_box(x, y, 12, 12, colors[index % len(colors)]), _text(x + 16, y + 11, name)]
    height = bottom + 24 + 18 * -(-len(names) // 5)
    return _svg(left + _WIDTH_PX + 70, height, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">'
    )
    return "\n".join([head, _box(0, 0, width, height, "white"), *parts, "</svg>\n"])


def _box(x: float, y: float, width: float, height: float, color: str, label: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}"'
    return f"{box}><title>{escape(label)}</title></rect>" if label else f"{box}/>"


def _text(x: float, y: float, words: str, *, anchor: str = "start", color: str = "black") -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" font-size="12" text-anchor="{anchor}" fill="{color}"'
    return f"<text {place}>{escape(words)}</text>"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
