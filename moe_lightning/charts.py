"""Charts as SVG text, without a plotting library: lines over a numeric axis, bars in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from moe_lightning.errors import ConfigurationError

_WIDTH_PX, _HEIGHT_PX = 860, 420
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 80, 20, 40, 80
_LABELLED_BAR_PX = 36
_LINE_PX = 2
_LARGEST, _SMALLEST = 1e300, 1e-300
"""Beyond the one numbers are drawn as it, below the other as nothing: scales of more overflow."""
_COLORS = ("#3b6fb6", "#d08c2f", "#2e9e6b", "#c0504d", "#9b59b6", "#8a8f98", "#17a2b8", "#7a5c3e", "#e377c2")


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str, x_label: str, y_label: str, *, steps: bool = False
) -> str:
    """Lines through points (x, y); with `steps` a value holds until the next point.

    Raises:
        ConfigurationError: no points, or one that is not finite.
    """
    points = [point for line in lines.values() for point in line]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise ConfigurationError(f"the chart {title!r} needs finite points: there are {len(points)}")
    lines = {name: [(x, _drawn(y)) for x, y in line] for name, line in lines.items()}
    heights = [y for line in lines.values() for _, y in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    marks = nice_ticks(min(0.0, *heights), max(0.0, *heights) or float(not any(heights)), above=True)
    least, span = marks[0], marks[-1] - marks[0]
    width, height = _WIDTH_PX - _LEFT_PX - _RIGHT_PX, _HEIGHT_PX - _TOP_PX - _BOTTOM_PX

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low) if high > low else 0.5
        return _LEFT_PX + width * across, _TOP_PX + height * (1 - (y - least) / span)

    parts = _frame(title, x_label, y_label, marks)
    are_whole = all(float(x).is_integer() for x, _ in points)
    for x in (mark for mark in nice_ticks(low, high) if float(mark).is_integer() or not are_whole):
        parts.append(_text(place(x, least)[0], _HEIGHT_PX - _BOTTOM_PX + 16, f"{x:,.6g}", anchor="middle"))
    for index, (name, line) in enumerate(lines.items()):
        path: list[tuple[float, float]] = []
        for x, y in line:
            if steps and path:
                path.append((place(x, least)[0], path[-1][1]))
            path.append(place(x, y))
        color = line_color(index)
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        # What lies under another line shows through its gaps.
        hides = index and _hides_another(line, list(lines.values())[:index], within=_LINE_PX * span / height)
        dashes = f' stroke-dasharray="9 {5 * index}"' if hides else ""
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="{_LINE_PX}"{dashes}/>')
        if len(path) == 1:  # a line through one point is none
            parts.append(f'<circle cx="{path[0][0]:.1f}" cy="{path[0][1]:.1f}" r="{2 * _LINE_PX}" fill="{color}"/>')
        parts += _legend(index, name, color)
    return _svg(parts)


def bar_chart(groups: Mapping[str, Mapping[str, float]], title: str, y_label: str) -> str:
    """Bars {group: {name: value}}, names in the same colour in every group.

    Raises:
        ConfigurationError: no bars, or a value that is negative or not finite.
    """
    values = [value for bars in groups.values() for value in bars.values()]
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ConfigurationError(f"the chart {title!r} needs finite values of 0 or more: there are {len(values)}")
    marks = nice_ticks(0.0, max(map(_drawn, values)) or 1.0, above=True)
    top = marks[-1]
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width, height = _WIDTH_PX - _LEFT_PX - _RIGHT_PX, _HEIGHT_PX - _TOP_PX - _BOTTOM_PX
    slot = width / len(groups)
    bar = 0.8 * slot / len(names)
    parts = _frame(title, "", y_label, marks)
    for index, (group, bars) in enumerate(groups.items()):
        left = _LEFT_PX + slot * (index + 0.1)
        parts.append(_text(left + 0.4 * slot, _HEIGHT_PX - _BOTTOM_PX + 16, group, anchor="middle"))
        for name, value in bars.items():
            order = names.index(name)
            size = height * (_drawn(value) / top)
            box = (
                f'<rect x="{left + bar * order:.1f}" y="{_TOP_PX + height - size:.1f}" width="{bar:.1f}" '
                f'height="{size:.1f}" fill="{_COLORS[order % len(_COLORS)]}">'
            )
            parts.append(f"{box}<title>{escape(f'{group}, {name}: {value:.4g}')}</title></rect>")
            if bar >= _LABELLED_BAR_PX:
                middle = left + bar * (order + 0.5)
                words = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
                parts.append(_text(middle, _TOP_PX + height - size - 4, words, anchor="middle"))
    for order, name in enumerate(names):
        parts += _legend(order, name, _COLORS[order % len(_COLORS)])
    return _svg(parts)


def nice_ticks(low: float, high: float, *, above: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about five; with `above` the last one is not below `high`, and the first not
    above `low`."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9) if above else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if above else math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _drawn(value: float) -> float:
    return 0.0 if abs(value) < _SMALLEST else max(-_LARGEST, min(value, _LARGEST))


def _hides_another(
    line: Sequence[tuple[float, float]], others: Sequence[Sequence[tuple[float, float]]], *, within: float
) -> bool:
    """Whether most points of a line lie on one drawn before it, or so near that the two cannot be told apart."""
    for other in others:
        there = dict(other)
        near = [abs(y - there[x]) <= within for x, y in line if x in there]
        if 2 * sum(near) > len(line):
            return True
    return False


def _frame(title: str, x_label: str, y_label: str, marks: Sequence[float]) -> list[str]:
    bottom = _HEIGHT_PX - _BOTTOM_PX
    middle = (_TOP_PX + bottom) / 2
    parts = [_text(_LEFT_PX, 18, title)]
    parts.append(f'<g class="unit">{_text(18, middle, y_label, anchor="middle", upwards=True)}</g>')
    parts.append(_text((_LEFT_PX + _WIDTH_PX - _RIGHT_PX) / 2, bottom + 34, x_label, anchor="middle"))
    for mark in marks:
        y = bottom - (bottom - _TOP_PX) * ((mark - marks[0]) / (marks[-1] - marks[0]))
        parts.append(f'<line x1="{_LEFT_PX}" y1="{y:.1f}" x2="{_WIDTH_PX - _RIGHT_PX}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT_PX - 8, y + 4, f"{mark:,.6g}", anchor="end"))
    return parts


def _legend(index: int, name: str, color: str) -> list[str]:
    x, y = _LEFT_PX + 150 * (index % 5), _HEIGHT_PX - 30 + 16 * (index // 5)
    box = f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
    return [f'<g class="legend">{box}{_text(x + 14, y, name)}</g>']


def line_color(index: int) -> str:
    """Return the color of a chart's line by its place."""
    return _COLORS[index % len(_COLORS)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", upwards: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upwards else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}"{turned}>{escape(words)}</text>'


def _svg(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{_HEIGHT_PX}" '
        f'viewBox="0 0 {_WIDTH_PX} {_HEIGHT_PX}" font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH_PX}" height="{_HEIGHT_PX}" fill="white"/>', *parts, "</svg>\n"])
