"""Sequences cut over ranks in an elastic run: those that are left over wait until they are a multiple again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, finish, reference
from tests.chaos.test_min_ranks import wait_for_recovery
from tests.parameters import slow

STEPS = 10
IN_PARTS: dict[str, Any] = {"strategy": {"mesh": {"cp": 2}, "replicas": 2}, "validate": True}


@pytest.mark.parametrize(
    ("place", "dense"),
    [
        slow("sequence exchange", "ddp"),
        ("backward", "hsdp"),
        slow("prepare", "ddp"),
        slow("update", "hsdp"),
    ],
)
def test_the_third_rank_waits_for_a_fourth(tmp_path: Path, place: str, dense: str) -> None:
    kills, holds = [Kill(worker=1, step=3, place=place)], [Hold(step=6, ranks=4)]
    strategy = {**IN_PARTS["strategy"], "dense": dense}
    with elastic_run(
        tmp_path, workers=4, steps=STEPS, kills=kills, holds=holds, **{**IN_PARTS, "strategy": strategy}
    ) as run:
        run.supervise(restart=[1], after=6)
        assert_same_losses(run, reference(STEPS, validate=True))
        sizes = run.world_sizes()
        assert [sizes[step] for step in (3, 5, STEPS)] == [4, 2, 4]
        assert all(report["steps_lost"] == 0 for report in run.reports())
        assert run.assert_replicas_equal() > 0


@pytest.mark.slow
def test_without_a_fourth_the_third_waits_to_the_end(tmp_path: Path) -> None:
    kills = [Kill(worker=1, step=3, place="forward")]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, **IN_PARTS) as run:
        finish(run, [0, 2, 3])
        assert_same_losses(run, reference(STEPS, validate=True))
        assert run.world_sizes()[STEPS] == 2


def test_one_of_two_holds_the_state_until_another_comes(tmp_path: Path) -> None:
    kills = [Kill(worker=1, step=4, place="sequence exchange")]
    with elastic_run(tmp_path, workers=2, steps=STEPS, kills=kills, **IN_PARTS) as run:
        wait_for_recovery(run, 0, ranks=1)
        assert max(run.losses()) == 4, "alone it does not train"
        run.start(1)
        run.supervise()
        assert_same_losses(run, reference(STEPS, validate=True))
        assert set(run.world_sizes().values()) == {2}


@pytest.mark.slow
def test_a_stopped_rank_is_one_that_waits(tmp_path: Path) -> None:
    """Its peers in the exchange go on within the silence timeout; continued, it makes a multiple with the third."""
    kills = [Kill(worker=1, step=4, place="sequence exchange", signal=signal.SIGSTOP)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, holds=[Hold(step=7, ranks=4)], **IN_PARTS) as run:
        wait_for_recovery(run, 0, ranks=2)
        run.wait_for_step(7)
        run.signal(1, signal.SIGCONT)
        run.supervise()
        assert_same_losses(run, reference(STEPS, validate=True))
        assert [run.world_sizes()[step] for step in (4, 6, STEPS)] == [4, 2, 4]


@pytest.mark.slow
def test_nothing_is_left_of_former_worlds(tmp_path: Path) -> None:
    kills = [Kill(worker=1, step=step, place="sequence exchange") for step in (3, 6, 9)]
    holds = [Hold(step=step, ranks=4) for step in (2, 5, 8, 11)]
    with elastic_run(tmp_path, workers=4, steps=12, kills=kills, holds=holds, **IN_PARTS) as run:
        run.supervise(restart=[1])
        assert run.kills_done() == 3
        assert_same_losses(run, reference(12, validate=True))
        assert run.assert_replicas_equal() > 0
        for worker in (0, 3):
            full = [line["open"] for line in run.recoveries(worker) if line["report"]["ranks_after"] == 4]
            assert len(full) == 3
            grown = {kind: count for kind, count in full[-1].items() if count > full[0].get(kind, 0)}
            assert not grown, grown


@pytest.mark.slow
def test_three_of_four_wait_where_all_share_a_sequence(tmp_path: Path) -> None:
    kills, options = [Kill(worker=2, step=4, place="backward")], {**IN_PARTS, "strategy": {"mesh": {"cp": 4}}}
    options["saving"] = {"every_n_steps": 1}
    with elastic_run(tmp_path, workers=4, steps=6, kills=kills, **options) as run:
        run.supervise(restart=[2])
        assert_same_losses(run, reference(6, validate=True))
        assert set(run.world_sizes().values()) == {4}
