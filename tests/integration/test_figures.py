"""Figures of the benchmarks against those that were recorded last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare_contenders import SAVINGS, TRAININGS
from tests.figures import BARE, RECORD, SNAPSHOTS, STOCK, measure, of_recovery, of_saving, worse


def test_a_figure_that_got_worse_is_named() -> None:
    recorded = {"stall": 0.4, "step": 1.1, "gone": 2.0}
    assert worse({"stall": 0.59, "step": 1.64, "new": 9.0}, recorded) == ["gone is not measured any more, it was 2.0"]
    assert worse({"stall": 0.61, "step": 1.1, "gone": 1.0}, recorded) == [
        "stall is 0.61, it was 0.4: more than 1.5 times as much"
    ]


def test_figures_are_ratios_of_medians() -> None:
    stalls = dict(zip((STOCK, BARE, *SNAPSHOTS), (0.3, 0.0, 0.1, 0.06), strict=True))
    assert stalls.keys() <= SAVINGS.keys() | TRAININGS.keys(), "what the benchmark measures"
    rows = [
        {"contender": name, "round": index, "stall_s": stall, "mean_step_s": 0.1 + stall}
        for name, stall in stalls.items()
        for index in range(3)
    ]
    found = of_saving(rows) | of_recovery({"kill": {"in process": [{"total": 0.2, "repeated step": 0.1}]}})
    assert list(found.values()) == [0.333, 2.0, 0.2, 1.6, 2.0]
    assert json.loads(RECORD.read_text()).keys() == found.keys()


@pytest.mark.slow
def test_no_figure_got_worse(tmp_path: Path) -> None:
    assert worse(measure(tmp_path), json.loads(RECORD.read_text())) == []
