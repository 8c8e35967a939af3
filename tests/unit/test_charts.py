"""Charts: every value is drawn, where it belongs, and impossible ones are refused."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from moe_lightning.charts import bar_chart, line_chart, nice_ticks
from moe_lightning.errors import ConfigurationError


def test_lines_rise_to_the_top() -> None:
    picture = line_chart({"a & b": [(0.0, 0.0), (10.0, 4.0)], "flat": [(0.0, 2.0), (10.0, 2.0)]}, "t", "x", "y")
    ET.fromstring(picture)
    paths = re.findall(r'points="([^"]+)"', picture)
    points = [[tuple(map(float, point.split(","))) for point in path.split()] for path in paths]
    assert points[0] == [(80.0, 340.0), (840.0, 40.0)]
    assert {y for _, y in points[1]} == {190.0}
    assert "a &amp; b" in picture


def test_steps_hold_until_the_next_point() -> None:
    picture = line_chart({"a": [(0.0, 1.0), (1.0, 2.0)]}, "t", "x", "y", steps=True)
    (path,) = re.findall(r'points="([^"]+)"', picture)
    assert path.split() == ["80.0,190.0", "840.0,190.0", "840.0,40.0"]


def test_steps_are_whole_numbers_on_an_axis() -> None:
    picture = line_chart({"a": [(1, 1.0), (12, 2.0)]}, "t", "x", "y")
    assert re.findall(r'text-anchor="middle"[^>]*>([\d.]+)<', picture) == ["5", "10"]
    assert ">0.5<" in line_chart({"a": [(0.0, 1.0), (1.0, 2.0), (0.5, 1.0)]}, "t", "x", "y")


def test_bars_are_as_high_as_their_values() -> None:
    picture = bar_chart({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 4.0}}, "t", "y")
    ET.fromstring(picture)
    heights = dict(re.findall(r'height="([\d.]+)" fill="#\w+"><title>([^<]+)<', picture))
    assert {title: float(height) for height, title in heights.items()} == {
        "one, a: 1": 75.0,
        "one, b: 2": 150.0,
        "two, a: 4": 300.0,
    }


@pytest.mark.parametrize("extreme", [1e308, -1e308, 1.79e308, 5e-324, -3.0])
def test_every_finite_number_lies_in_the_picture(extreme: float) -> None:
    picture = line_chart({"a": [(0.0, 2.0), (1.0, extreme)], "b": [(0.0, -extreme), (1.0, 0.0)]}, "t", "x", "y")
    heights = [
        float(pair.partition(",")[2]) for line in re.findall(r'points="([^"]*)"', picture) for pair in line.split()
    ]
    assert all(40 <= height <= 340 for height in heights), heights
    assert not re.search(r"\b(inf|nan)\b", picture)
    bars = bar_chart({"a": {"b": abs(extreme), "c": 1.0}}, "t", "y")
    assert all(0 <= float(height) <= 300 for height in re.findall(r'height="([0-9.infa-]+)" fill="#', bars))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({"a": [(0.0, float("nan"))]}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite values"):
        bar_chart({"a": {"b": -1.0}}, "t", "y")


@pytest.mark.parametrize(
    ("low", "high", "above", "expected"),
    [
        (0.0, 3.086, True, [0, 1, 2, 3, 4]),
        (4.0, 99.0, False, [20, 40, 60, 80]),
        (0.0, 0.65, False, [0, 0.2, 0.4, 0.6]),
        (0.0, 1.0, True, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7.0, 7.0, False, [7.0]),
        (0.0, 3.59e9, True, [0, 1e9, 2e9, 3e9, 4e9]),
    ],
)
def test_ticks_are_round(low: float, high: float, above: bool, expected: list[float]) -> None:
    assert nice_ticks(low, high, above=above) == expected


def test_a_hidden_line_shows_through_the_one_above_it() -> None:
    same = [(1.0, 8.0), (50.0, 8.0), (99.0, 8.0)]
    picture = line_chart({"copied": same, "written": same, "other": [(1.0, 2.0), (99.0, 3.0)]}, "t", "x", "y")
    lines = re.findall(r"<polyline[^>]*>", picture)
    assert ["stroke-dasharray" in line for line in lines] == [False, True, False]


def test_wide_bars_carry_their_values() -> None:
    texts = re.findall(r">([^<]+)</text>", bar_chart({"one": {"a": 0.0162, "b": 3590.0}}, "t", "ms"))
    assert {"0.0162", "3,590"} <= set(texts)
    crowded = bar_chart({str(i): {"a": 1.234} for i in range(40)}, "t", "ms")
    assert "1.23</text>" not in crowded


def test_a_line_that_nearly_hides_another_has_gaps_too() -> None:
    below = [(1.0, 8.0), (50.0, 8.0), (99.0, 8.0)]
    near, far = [(x, y - 0.02) for x, y in below], [(x, y - 0.5) for x, y in below]
    picture = line_chart({"below": below, "near": near, "far": far}, "t", "x", "y")
    lines = re.findall(r"<polyline[^>]*>", picture)
    assert ["stroke-dasharray" in line for line in lines] == [False, True, False]


def test_the_label_of_an_axis_keeps_out_of_the_title() -> None:
    texts = ET.fromstring(line_chart({"a": [(0.0, 1.0)]}, "a title", "x", "a rather long label of y")).iter(
        "{http://www.w3.org/2000/svg}text"
    )
    label = next(text for text in texts if text.text == "a rather long label of y")
    assert "rotate(-90" in label.get("transform", "")
    assert label.get("text-anchor") == "middle"
