"""Pictures of runs and benchmarks, drawn with matplotlib: lines, bars, heat maps, time lines, as SVG text.

Each function returns a matplotlib Figure, `svg` its text: the same input gives the same bytes. Labels stay text, so
that a page can color them for its light and dark mode.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_lightning.balancing.cost_model import Timeline
from moe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

_WIDTH_IN, _HEIGHT_IN = 5.2, 3.4
"""At this width letters of 10 points can be read on a phone, and two pictures stand beside each other on a desk."""
_TITLE_CHARACTERS = 52
_LEGEND_CHARACTERS = 56
_LANE_IN, _LEGEND_ROW_IN = 0.28, 0.2
_COLORS = ("#3b6fb6", "#d08c2f", "#2e9e6b", "#c0504d", "#9b59b6", "#8a8f98", "#17a2b8", "#7a5c3e", "#e377c2", "#a3a629")
_GRAY = "#8a8f98"  # can be seen on white and on black
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GRAY,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.alpha": 0.35,
    "grid.color": _GRAY,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "moe-lightning",
    "xtick.color": _GRAY,
    "xtick.labelcolor": "black",
    "ytick.color": _GRAY,
    "ytick.labelcolor": "black",
    "text.parse_math": False,  # names may hold dollar signs
    "ytick.left": False,
}
_OPERATIONS = {
    "exchange": "#d08c2f",
    "experts": "#3b6fb6",
    "dense": "#8a8f98",
    "trans": "#2e9e6b",
    "agg": "#c0504d",
}
_IN_THE_BACKGROUND = {"trans", "agg"}
_MAX_NUMBERS = 12
"""Bars or columns that there is room beside for their numbers."""
_MAX_GROUPS = 16
"""Groups of bars whose names fit below them."""
_LABELLED = 0.12
"""Part of the width from which on a phase carries its duration."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LARGEST, _SMALLEST = 1e300, 1e-300
"""Beyond the one numbers are drawn as it, below the other as nothing: scales of more overflow."""


def require() -> None:
    """Import matplotlib.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            'pictures are drawn with matplotlib, which is not installed: pip install "moe-lightning[plots]"'
        ) from error


@contextmanager
def _style() -> Iterator[None]:
    """Our style, whatever matplotlibrc says; settings of the process stay as they are."""
    require()
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def svg(figure: Figure) -> str:
    """A figure as the text of one SVG element. What matplotlib numbers in it are classes, not ids: several pictures can
    stand in one page."""
    file = io.StringIO()
    with _style():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    return re.sub(r' id="(paper|[A-Za-z][\w.]*(?=_\d+"))(_\d+)?"', r' class="\1"', text[text.index("<svg") :])


@_style()
def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x_label: str,
    y_label: str,
    *,
    steps: bool = False,
    marks: Sequence[float] = (),
) -> Figure:
    """Lines through points (x, y); with `steps` a value holds until the next point; a dotted line at each of `marks`.

    Raises:
        ConfigurationError: no points, or one that is not finite.
    """
    points = [point for line in lines.values() for point in line]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise ConfigurationError(f"the chart {title!r} needs finite points: there are {len(points)}")
    figure, axes = _axes(title, x_label, y_label)
    heights = [_drawn(y) for _, y in points]
    low, high = min(0.0, *heights), max(0.0, *heights)
    axes.set_ylim(1.05 * low, 1.05 * high if high > low else 1.0)
    for index, (name, line) in enumerate(lines.items()):
        xs, ys = [x for x, _ in line], [_drawn(y) for _, y in line]
        axes.plot(
            xs,
            ys,
            label=name,
            color=_COLORS[index % len(_COLORS)],
            linewidth=1.8,
            marker="o" if len(line) == 1 else "",
            drawstyle="steps-post" if steps else "default",
        )
    for x in marks:
        axes.axvline(x, color="gray", linewidth=1.0, linestyle="dotted", zorder=0)
    if all(float(x).is_integer() for x, _ in points):
        axes.xaxis.set_major_locator(_whole())
    axes.xaxis.set_major_formatter("{x:,.7g}")
    axes.margins(x=0.02)
    _legend(figure, axes)
    return figure


@_style()
def bar_chart(groups: Mapping[str, Mapping[str, float]], title: str, y_label: str) -> Figure:
    """Bars {group: {name: value}}, names in the same color in every group.

    Raises:
        ConfigurationError: no bars, or a value that is negative or not finite.
    """
    values = [value for bars in groups.values() for value in bars.values()]
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ConfigurationError(f"the chart {title!r} needs finite values of 0 or more: there are {len(values)}")
    figure, axes = _axes(title, "", y_label)
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / len(names)
    for order, name in enumerate(names):
        places = [index for index, bars in enumerate(groups.values()) if name in bars]
        heights = [_drawn(bars[name]) for bars in groups.values() if name in bars]
        xs = [place + width * (order - (len(names) - 1) / 2) for place in places]
        boxes = axes.bar(xs, heights, width, label=name, color=_COLORS[order % len(_COLORS)])
        if len(names) * len(groups) <= _MAX_NUMBERS:
            axes.bar_label(boxes, [_number(height) for height in heights], padding=2, fontsize=9)
    is_crowded = sum(len(group) + 2 for group in groups) > _LEGEND_CHARACTERS
    every = -(-len(groups) // _MAX_GROUPS)
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor", "fontsize": 9}
    names_shown = [_plain(group) for group in groups][::every]
    axes.set_xticks(range(0, len(groups), every), names_shown, **(turned if is_crowded else {}))
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.1)
    axes.set_ylim(0, axes.get_ylim()[1] if any(values) else 1.0)
    _legend(figure, axes)
    return figure


@_style()
def heat_map(
    values: NDArray[np.float64], title: str, rows: str, columns: str, unit: str, *, names: Sequence[str] = ()
) -> Figure:
    """A table of numbers of 0 or more as shades, with the numbers where they fit.

    Args:
        values: [rows, columns].
        title: above the picture.
        rows: what a row is, such as "layer".
        columns: what a column is.
        unit: of the values.
        names: of the columns, of which some are shown; none: their numbers.

    Raises:
        ConfigurationError: no values.
    """
    if not values.size:
        raise ConfigurationError(f"the picture {title!r} has no values: record first")
    figure, axes = _axes(title, columns, rows)
    _shades(figure, axes, values, unit)
    if names:
        marks = np.unique(np.linspace(0, len(names) - 1, 5).round().astype(int))
        axes.set_xticks(marks, [names[mark] for mark in marks])
    if max(values.shape) <= _MAX_NUMBERS:
        for (row, column), value in np.ndenumerate(values):
            color = "#ffffff" if value > 0.5 * values.max() else "#010101"  # not of the page's mode: cells have none
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=color, fontsize=8)
    return figure


@_style()
def time_line(line: Timeline, title: str) -> Figure:
    """A step as the performance model sees it: computations and exchanges above, transfers of shadows below.

    Raises:
        ConfigurationError: a time line without any span.
    """
    if not line.spans:
        raise ConfigurationError("a time line without spans cannot be drawn: plan a step first")
    title = f"{title}; {1e3 * line.total_s:.2f} ms, {1e3 * line.exposed_s:.2f} ms of it copies"
    figure, axes = _lanes(["compute", "copies"], title, "ms", width_in=2 * _WIDTH_IN)
    for name, color in _OPERATIONS.items():
        spans = [span for span in line.spans if span.operation == name]
        bars = [(1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)) for span in spans]
        axes.broken_barh(bars, (int(name in _IN_THE_BACKGROUND) - 0.4, 0.8), color=color, label=name)
    axes.set_xlim(0, 1e3 * max(span.end_s for span in line.spans))
    _legend(figure, axes, width=2)
    return figure


@_style()
def phase_lines(lanes: Mapping[str, Mapping[str, float]], title: str, *, end_s: float | None = None) -> Figure:
    """Phases one after the other, in a lane for each case, on one scale.

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
    names = list(dict.fromkeys(name for phases in lanes.values() for name in phases))
    colors = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
    figure, axes = _lanes(list(lanes), title, "seconds")
    for name, color in colors.items():
        axes.barh(0, 0, color=color, label=name)
    for lane, phases in enumerate(lanes.values()):
        at_s = 0.0
        for name, seconds in phases.items():
            shown_s = min(at_s + seconds, end_s) - at_s
            if shown_s > 0:
                axes.barh(lane, shown_s, 0.8, at_s, color=colors[name])
            if shown_s > _LABELLED * end_s:
                middle_s = at_s + shown_s / 2
                axes.text(middle_s, lane, _duration(seconds), ha="center", va="center", color="#ffffff", fontsize=8)
            at_s += seconds
        words = ("> " if at_s > 1.001 * end_s else "") + _duration(at_s)
        axes.text(min(at_s, end_s), lane, f" {words}", va="center", fontsize=9)
    axes.set_xlim(0, 1.18 * end_s)
    _legend(figure, axes)
    return figure


def _axes(
    title: str, x_label: str, y_label: str, size_in: tuple[float, float] = (_WIDTH_IN, _HEIGHT_IN)
) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in)
    figure.patch.set_gid("paper")
    axes = figure.subplots()
    characters = round(_TITLE_CHARACTERS * size_in[0] / _WIDTH_IN)
    axes.set_title(textwrap.fill(_plain(title), characters))
    axes.set_xlabel(_plain(x_label))
    axes.set_ylabel(_plain(y_label))
    axes.yaxis.set_major_formatter("{x:,.7g}")
    return figure, axes


def _lanes(names: Sequence[str], title: str, x_label: str, width_in: float = _WIDTH_IN) -> tuple[Figure, Axes]:
    """Axes with a named lane for each case, the first one at the top."""
    figure, axes = _axes(title, x_label, "", (width_in, 1.3 + _LANE_IN * len(names)))
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    return figure, axes


def _shades(figure: Figure, axes: Axes, values: NDArray[np.float64], unit: str) -> None:
    """Cells from light to dark, and the scale beside them."""
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=values.max() or 1.0, aspect="auto", interpolation="none")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_whole())
    scale = figure.colorbar(image, ax=axes, label=_plain(unit), format="{x:,.3g}")
    assert scale.solids is not None
    scale.solids.set_rasterized(True)
    scale.outline.set_visible(False)


def _legend(figure: Figure, axes: Axes, width: int = 1) -> None:
    """The names below the axes, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    names = [_plain(name) for name in names]
    columns = max(1, width * _LEGEND_CHARACTERS // (max(map(len, names)) + 6))
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_IN * (-(-len(names) // columns) - 1))
    figure.legend(handles, names, loc="outside lower left", ncols=min(columns, len(names)))


def _whole() -> Locator:
    """Marks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1)


def _plain(text: str) -> str:
    """Text without what XML cannot hold."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _drawn(value: float) -> float:
    return 0.0 if abs(value) < _SMALLEST else max(-_LARGEST, min(value, _LARGEST))


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
