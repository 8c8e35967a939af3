"""Dense parameters cut over ranks in an elastic run: a lost part comes from another copy or from snapshots, in the same
process and with the same losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, elastic_run, finish
from tests.parameters import slow

STEPS = 10
EVERY_STEP = {"every_n_steps": 1}
STORED = Hold(step=3, stored=1)
IN_PAIRS = {"dense": "hsdp", "shard_size": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    with elastic_run(tmp_path_factory.mktemp("undisturbed"), workers=2, steps=STEPS) as run:
        finish(run, range(2))
        return run.losses()


@pytest.mark.parametrize(
    "place", [slow("exchange"), "update", *map(slow, ["forward", "backward", "prepare", "committed", "batch_end"])]
)
def test_another_copy_replaces_a_lost_part(tmp_path: Path, undisturbed: dict[int, float], place: str) -> None:
    """Four ranks in two copies go on as three in one."""
    kills = [Kill(worker=1, step=5, place=place)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=IN_PAIRS, kills=kills) as run:
        finish(run, [0, 2, 3])
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        report = run.result(0)["reports"][0]
        assert (report["ranks_after"], report["steps_lost"]) == (3, 0)
        assert run.assert_replicas_equal() > 0
        assert {"dense rows 1 of 2", "dense rows 2 of 3"} <= run.units()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [IN_PAIRS, slow({"dense": "hsdp"})])
def test_ranks_leave_and_come_back(tmp_path: Path, undisturbed: dict[int, float], strategy: dict[str, Any]) -> None:
    """From two copies of two parts to one copy of three, or three whole copies, and back."""
    options: dict[str, Any] = {
        "kills": [Kill(worker=0, step=3, place="backward"), Kill(worker=2, step=7, place="forward")],
        "holds": [Hold(step=5, ranks=4), Hold(step=9, ranks=4)],
    }
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=strategy, **options) as run:
        run.supervise(restart=range(4), after=5)
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.kills_done() == 2
        assert {3, 4} <= set(run.world_sizes().values())
        assert all(report["steps_lost"] == 0 for report in run.reports())


@pytest.mark.parametrize("place", [slow("backward"), slow("batch_end"), "movement"])
def test_snapshots_replace_the_only_copy(tmp_path: Path, undisturbed: dict[int, float], place: str) -> None:
    kills = [Kill(worker=1, step=5, place="backward" if place == "movement" else place)]
    if place == "movement":
        kills.append(Kill(worker=2, step=5, place=place))
    with elastic_run(
        tmp_path, workers=4, steps=STEPS, strategy={"dense": "fsdp"}, kills=kills, holds=[STORED], saving=EVERY_STEP,
        recovery={"failures": len(kills), "min_replicas": 3},
    ) as run:  # fmt: skip
        run.supervise()
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.result(0)["world_size"] == 4 - len(kills)


@pytest.mark.slow
def test_two_ranks_go_on_as_one_and_two_again(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    options: dict[str, Any] = {
        "kills": [Kill(worker=1, step=4, place="backward")],
        "holds": [STORED, Hold(step=7, ranks=2)],
    }
    with elastic_run(tmp_path, workers=2, steps=STEPS, strategy={"dense": "fsdp"}, saving=EVERY_STEP, **options) as run:
        run.supervise(restart=[1], after=7)
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert set(run.world_sizes().values()) == {1, 2}
        assert {"dense", "dense rows 1 of 2"} <= run.units()
