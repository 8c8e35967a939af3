"""Charts: every value is drawn, where it belongs, impossible ones are refused, and equal input gives equal bytes."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import bar_chart, grid, heat_map, line_chart, phase_lines, svg

SVG = "{http://www.w3.org/2000/svg}"


def words(figure: Figure) -> set[str]:
    return {element.text or "" for element in ElementTree.fromstring(svg(figure)).iter(f"{SVG}text")}


def test_lines_go_through_their_points() -> None:
    figure = line_chart({"a & b": [(0.0, 0.0), (10.0, 4.0)], "$flat$": [(0.0, 2.0), (10.0, 2.0)]}, "t", "x", "y")
    rising, flat = figure.axes[0].lines
    assert rising.get_xydata().tolist() == [[0, 0], [10, 4]]
    assert flat.get_xydata().tolist() == [[0, 2], [10, 2]]
    assert {"a & b", "$flat$", "t", "x", "y"} <= words(figure)


def test_steps_hold_until_the_next_point() -> None:
    (line,) = line_chart({"a": [(0.0, 1.0), (1.0, 2.0)]}, "t", "x", "y", steps=True).axes[0].lines
    assert line.get_drawstyle() == "steps-post"


def test_a_line_through_one_point_is_a_mark() -> None:
    one, _ = line_chart({"a": [(3.0, 1.0)], "b": [(0.0, 1.0), (1.0, 2.0)]}, "t", "x", "y").axes[0].lines
    assert one.get_marker() == "o"


def test_steps_are_whole_numbers_on_an_axis() -> None:
    figure = line_chart({"a": [(1, 0.0), (2, 10.0)]}, "t", "x", "y")
    assert not {"1.2", "1.4", "1.5"} & words(figure)


def test_bars_are_as_high_as_their_values() -> None:
    figure = bar_chart({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 4.0}}, "t", "ms")
    bars = {round(bar.get_x() + bar.get_width() / 2, 6): bar.get_height() for bar in figure.axes[0].patches}
    assert bars == {-0.2: 1.0, 0.2: 2.0, 0.8: 4.0}
    assert {"one", "two", "a", "b", "ms"} <= words(figure)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("extreme", [1e308, -1e308, 1.79e308, 5e-324, -3.0])
def test_every_finite_number_lies_in_the_picture(extreme: float) -> None:
    figure = line_chart({"a": [(0.0, 2.0), (1.0, extreme)], "b": [(0.0, -extreme), (1.0, 0.0)]}, "t", "x", "y")
    low, high = figure.axes[0].get_ylim()
    assert all(low <= y <= high for line in figure.axes[0].lines for y in line.get_ydata())
    assert not {"inf", "nan"} & words(figure)
    assert "nan" not in svg(bar_chart({"a": {"b": abs(extreme), "c": 1.0}}, "t", "y"))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({"a": [(0.0, float("nan"))]}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite values"):
        bar_chart({"a": {"b": -1.0}}, "t", "y")
    with pytest.raises(ConfigurationError, match="no phase that lasts"):
        phase_lines({"a": {"b": 0.0}}, "t")
    with pytest.raises(ConfigurationError, match="has no values"):
        grid(np.zeros((0, 2)), "t", "layer", "expert", "steps")


def test_a_line_that_hides_another_has_gaps() -> None:
    below = [(1.0, 8.0), (50.0, 8.0), (99.0, 8.0)]
    near, far = [(x, y - 0.02) for x, y in below], [(x, y - 0.5) for x, y in below]
    figure = line_chart({"below": below, "same": below, "near": near, "far": far}, "t", "x", "y")
    assert [line.is_dashed() for line in figure.axes[0].lines] == [False, True, True, False]


def test_few_bars_carry_their_values() -> None:
    assert {"0.0162", "3,590"} <= words(bar_chart({"one": {"a": 0.0162, "b": 3590.0}}, "t", "ms"))
    assert "1.23" not in words(bar_chart({str(i): {"a": 1.234} for i in range(40)}, "t", "ms"))


def test_lanes_that_last_longer_than_the_axis_say_so() -> None:
    figure = phase_lines({"short": {"a": 0.2, "b": 0.1}, "long": {"b": 4.0}}, "t", end_s=1.0)
    assert {" 300 ms", " > 4.0 s", "200 ms"} <= {text.get_text() for text in figure.axes[0].texts}
    assert max(bar.get_x() + bar.get_width() for bar in figure.axes[0].patches) == 1.0


def test_names_keep_out_of_the_axes_and_of_each_other() -> None:
    lines = {f"moe/layer{layer:02d}/dropped_fraction": [(0.0, 1.0), (9.0, 2.0 + layer)] for layer in range(9)}
    figure = line_chart(lines, "a title that is much longer than the picture is wide, so that it breaks", "step", "y")
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    assert figure.bbox.x1 >= axes.title.get_window_extent().x1
    assert axes.get_window_extent().height > 0.5 * 3.4 * figure.dpi, "the picture grows with its legend"


def test_equal_input_gives_equal_bytes_whatever_the_user_set() -> None:
    def text() -> str:
        return svg(heat_map(np.array([[0.5, 0.5], [0.1, 0.9]]), [1, 11], "loads"))

    expected = text()
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert text() == expected
    assert expected.startswith("<svg")
    assert "<metadata" not in expected
    assert not re.search(r' id="\w+_\d+"', expected), "two pictures in one page would share it"
    assert '<g class="paper">' in expected


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r'pip install "moe-lightning\[plots\]"$'):
        line_chart({"a": [(0.0, 1.0)]}, "t", "x", "y")
