"""Axes of the mesh with each other and with shared dense parameters in an elastic run: a lost part comes from the ranks
of another slice or copy, or from snapshots, in the same process and with the same losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference
from tests.parameters import slow

STEPS = 8
CPTP: dict[str, Any] = {"mesh": {"cp": 2, "tp": 2}}
NOISY = {"dropout": 0.1, "router": {"noisy_top_k": True, "jitter": 0.1}}
PLACES = ["forward", "exchange", "prepare", "update", "committed"]


@pytest.mark.parametrize("place", [slow("backward"), *map(slow, PLACES)])
def test_three_of_four_keep_what_a_fourth_takes_up(tmp_path: Path, place: str) -> None:
    """Sequences and layers in two parts each: three ranks have all of it, and wait."""
    kills = [Kill(worker=1, step=4, place=place)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=CPTP, kills=kills, model=NOISY) as run:
        run.supervise(restart=[1])
        assert_same_losses(run, reference(STEPS, model=NOISY))
        assert set(run.world_sizes().values()) == {4}
        assert all(report["steps_lost"] == 0 for report in run.reports())
        assert run.assert_replicas_equal() > 0


@pytest.mark.parametrize(
    ("dense", "place"),
    [("fsdp", "backward"), *(slow("fsdp", place) for place in PLACES)]
    + [slow("zero1", place) for place in ("backward", *PLACES)],
)
def test_what_one_rank_had_comes_from_snapshots_and_is_dealt_anew(tmp_path: Path, dense: str, place: str) -> None:
    """One copy in rows of two, for each of two parts of the layers, or the optimizer states of those; three ranks go on
    as two with a whole row each, or hold whole layers and wait for a fourth.
    """
    kills, holds = [Kill(worker=1, step=4, place=place)], [Hold(step=3, stored=1), Hold(step=6, ranks=4)]
    strategy: dict[str, Any] = {"mesh": {"tp": 2}, "dense": dense}
    with elastic_run(
        tmp_path, workers=4, steps=STEPS, strategy=strategy, kills=kills, holds=holds, saving={"every_n_steps": 1}
    ) as run:
        run.supervise(restart=[1])
        assert_same_losses(run, reference(STEPS))
        assert run.world_sizes()[STEPS] == 4
        if dense == "fsdp":
            assert {"dense rows 1 of 2 in part 0 of 2", "dense rows 1 of 2 in part 1 of 2"} <= run.units()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["backward", *PLACES])
def test_another_copy_has_the_rows_of_a_lost_part(tmp_path: Path, place: str) -> None:
    """Eight ranks in two copies of four go on as six in one or three."""
    kills = [Kill(worker=5, step=4, place=place)]
    strategy: dict[str, Any] = {"mesh": {"tp": 2}, "dense": "hsdp"}
    with elastic_run(tmp_path, workers=8, steps=STEPS, strategy=strategy, kills=kills, model=NOISY) as run:
        run.supervise()
        assert_same_losses(run, reference(STEPS, model=NOISY))
        assert [run.world_sizes()[step] for step in (3, STEPS)] == [8, 6]
        assert all(report["steps_lost"] == 0 for report in run.reports())
        assert "dense rows 1 of 2 in part 1 of 2" in run.units()
        assert run.assert_replicas_equal() > 0


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["ddp", "hsdp"])
def test_all_axes_but_pipelines(tmp_path: Path, dense: str) -> None:
    """Two slices of four ranks; of seven, three wait for an eighth."""
    kills, holds = [Kill(worker=6, step=3, place="backward")], [Hold(step=6, ranks=8)]
    strategy = {**CPTP, "dense": dense}
    with elastic_run(
        tmp_path, workers=8, steps=STEPS, strategy=strategy, kills=kills, holds=holds, model=NOISY, validate=True
    ) as run:
        run.supervise(restart=[6])
        assert_same_losses(run, reference(STEPS, model=NOISY, validate=True))
        sizes = run.world_sizes()
        assert (sizes[2], sizes[STEPS]) == (8, 8)
        assert set(sizes.values()) <= {4, 8}
        assert all(report["steps_lost"] == 0 for report in run.reports())
