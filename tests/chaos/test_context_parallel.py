"""Sequences cut over ranks in an elastic run: those that are left over wait until they are a multiple again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference

STEPS = 10
IN_PARTS: dict[str, Any] = {"strategy": {"mesh": {"cp": 2}, "copies": 2}, "validate": True}


@pytest.mark.parametrize(
    ("place", "dense"),
    [
        ("sequence exchange", "ddp"),
        ("backward", "hsdp"),
        ("prepare", "ddp"),
        ("update", "hsdp"),
    ],
)
def test_the_third_rank_waits_for_a_fourth(tmp_path: Path, place: str, dense: str) -> None:
    kills, holds = [Kill(worker=1, step=3, place=place)], [Hold(step=6, ranks=4)]
    strategy = {**IN_PARTS["strategy"], "dense": dense}
    with elastic_run(
        tmp_path, workers=4, steps=STEPS, kills=kills, holds=holds, **{**IN_PARTS, "strategy": strategy}
    ) as run:
        run.supervise(restart=[1])
        assert_same_losses(run, reference(STEPS, validate=True))
        sizes = run.world_sizes()
        assert [sizes[step] for step in (3, 5, STEPS)] == [4, 2, 4]
        assert all(report["steps_lost"] == 0 for report in run.reports())
        assert run.assert_replicas_equal() > 0
