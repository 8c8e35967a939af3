"""Charts: every value is drawn, where it belongs, and impossible ones are refused."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from moe_lightning.charts import bar_chart, line_chart
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


def test_bars_are_as_high_as_their_values() -> None:
    picture = bar_chart({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 4.0}}, "t", "y")
    ET.fromstring(picture)
    heights = dict(re.findall(r'height="([\d.]+)" fill="#\w+"><title>([^<]+)<', picture))
    assert {title: float(height) for height, title in heights.items()} == {
        "one, a: 1": 75.0,
        "one, b: 2": 150.0,
        "two, a: 4": 300.0,
    }


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({"a": [(0.0, float("nan"))]}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite values"):
        bar_chart({"a": {"b": -1.0}}, "t", "y")
