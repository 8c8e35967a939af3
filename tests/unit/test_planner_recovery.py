"""The rows of the planner's benchmark that belong to recoveries."""

from __future__ import annotations

import pytest

from benchmarks.planner import recovery_rows


def test_every_plan_of_a_recovery_has_a_row() -> None:
    rows = list(recovery_rows(32, 16, 3))
    assert [row.name.split(",")[0] for row in rows] == [
        "repair",
        "repair",
        "plan_recovery",
        "plan_recovery",
        "sampled_recovery",
        "sampled_recovery",
    ]
    assert all((row.ranks, row.experts, row.layers) == (32, 16, 3) for row in rows)
    assert all(row.seconds > 0 and row.peak_mib > 0 for row in rows)


@pytest.mark.slow
def test_recoveries_of_4096_ranks_are_planned_in_seconds() -> None:
    """One second each on a free core; the bound leaves room for a machine that is shared."""
    for row in recovery_rows(4096, 512, 1):
        assert row.processor_s < 3, row
