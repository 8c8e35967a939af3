"""Layers in parts over ranks in an elastic run: a lost part comes from another slice's ranks or from snapshots, in the
same process and with the same losses.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, finish, reference
from tests.chaos.test_min_ranks import wait_for_recovery
from tests.parameters import slow

STEPS = 10
TP2 = {"mesh": {"tp": 2}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    with elastic_run(tmp_path_factory.mktemp("undisturbed"), workers=2, steps=STEPS) as run:
        finish(run, range(2))
        return run.losses()


@pytest.mark.parametrize(
    "place", [slow("exchange"), "update", *map(slow, ["forward", "backward", "prepare", "committed"])]
)
def test_another_slice_replaces_a_lost_part(tmp_path: Path, undisturbed: dict[int, float], place: str) -> None:
    """Four ranks in two slices go on as two in one; the third waits."""
    kills = [Kill(worker=1, step=5, place=place)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=TP2, kills=kills) as run:
        run.supervise()
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert set(run.world_sizes().values()) == {4, 2}
        assert all(report["steps_lost"] == 0 for report in run.reports())
        assert run.assert_replicas_equal() > 0
        assert {"dense rows 0 of 1 in part 0 of 2", "dense rows 0 of 1 in part 1 of 2"} <= run.units()


@pytest.mark.slow
def test_ranks_leave_and_come_back(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    kills = [Kill(worker=0, step=3, place="backward"), Kill(worker=2, step=7, place="forward")]
    holds = [Hold(step=5, ranks=4), Hold(step=9, ranks=4)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=TP2, kills=kills, holds=holds) as run:
        run.supervise(restart=range(4))
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.kills_done() == 2
        assert 4 in set(run.world_sizes().values())
        assert all(report["steps_lost"] == 0 for report in run.reports())


@pytest.mark.slow
def test_snapshots_replace_the_only_copy(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """One slice of two ranks, of which one is lost and comes back."""
    kills = [Kill(worker=1, step=5, place="backward")]
    with elastic_run(
        tmp_path, workers=2, steps=STEPS, strategy=TP2, kills=kills, saving={"every_n_steps": 1}
    ) as run:  # fmt: skip
        run.supervise(restart=[1])
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert set(run.world_sizes().values()) == {2}


@pytest.mark.slow
def test_a_stopped_rank_is_one_that_waits(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Its peers in a layer go on within the silence timeout; continued, it makes a multiple with the third."""
    kills = [Kill(worker=1, step=4, place="exchange", signal=signal.SIGSTOP)]
    holds = [Hold(step=7, ranks=4)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=TP2, kills=kills, holds=holds) as run:
        wait_for_recovery(run, 0, ranks=2)
        run.wait_for_step(7)
        run.signal(1, signal.SIGCONT)
        run.supervise()
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert [run.world_sizes()[step] for step in (4, 6, STEPS)] == [4, 2, 4]


@pytest.mark.slow
def test_noise_follows_positions_after_a_fault(tmp_path: Path) -> None:
    model = {"dropout": 0.1, "router": {"noisy_top_k": True, "jitter": 0.1}}
    kills = [Kill(worker=3, step=4, place="backward")]
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=TP2, kills=kills, model=model) as run:
        run.supervise()
        assert_same_losses(run, reference(STEPS, model=model))
