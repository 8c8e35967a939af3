"""On one device a run under our strategy is the run under stock Lightning: every hook in its order, every logged digit,
every attribute, warning and file. What differs has its reason here and in docs/lightning.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lightning import ExpertParallelStrategy
from tests.same_as_stock.cases import CASES
from tests.same_as_stock.recording import differences, record


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if c.slow else ()) for n, c in CASES.items()])
def test_a_run_is_the_one_of_stock_lightning(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    stock = record(case.act, lambda: "auto", tmp_path / "stock")
    ours = record(case.act, ExpertParallelStrategy, tmp_path / "ours")
    if case.differs is not None and case.ignored:
        assert differences(stock, ours), f"the same by now, so this is no reason any more: {case.differs}"
    for part in case.ignored:
        del stock[part], ours[part]
    found = differences(stock, ours, digits=case.digits or 0.0)
    assert not found, "\n".join([name, *found[:20]])


def test_most_things_are_the_same() -> None:
    assert len([case for case in CASES.values() if case.differs is None]) >= 120
