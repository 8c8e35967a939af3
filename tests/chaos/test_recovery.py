"""Recovery from live replicas: workers are killed at every place of a step, and the losses are those of a quiet run."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference

STEPS = 24


def test_kills_at_every_place_of_a_step(tmp_path: Path) -> None:
    places = ("forward", "exchange", "backward", "prepare", "update", "committed", "batch_end")
    kills = [Kill(worker=1 + index % 3, step=2 + 3 * index, place=place) for index, place in enumerate(places)]
    holds = [Hold(step=4, ranks=4)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, holds=holds) as run:
        run.supervise(restart=range(4))
        assert_same_losses(run, reference(STEPS))
        assert run.assert_replicas_equal() > 0
        assert len({r["began_at"] for r in run.reports()}) >= len(kills)


def test_at_the_borders_of_a_run(tmp_path: Path) -> None:
    """The first step, epochs' ends (8 steps each), the last step and the end of training, rank 0 among the victims."""
    places = ((0, 0, "backward"), (1, 7, "committed"), (2, 8, "forward"), (0, 16, "update"), (3, STEPS - 1, "committed"))
    kills = [Kill(worker=w, step=s, place=p) for w, s, p in places] + [Kill(worker=1, step=STEPS, place="train_end")]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, holds=[Hold(step=9, ranks=4)], validate=True) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(STEPS))
        assert run.assert_replicas_equal() > 0


def test_during_validation_and_recovery_and_two_at_once(tmp_path: Path) -> None:
    """Two of four nodes at once are within what three replicas survive."""
    kills = [
        Kill(worker=0, step=3, place="backward"),
        Kill(worker=3, step=3, place="recovery"),
        Kill(worker=1, step=8, place="validation"),
        Kill(worker=1, step=12, place="prepare"),
        Kill(worker=2, step=12, place="prepare"),
        Kill(worker=3, step=14, place="forward"),
        Kill(worker=0, step=14, place="movement"),
    ]
    options = {"recovery": {"min_replicas": 3}, "holds": [Hold(step=6, ranks=4)], "validate": True, "kills": kills}
    with elastic_run(tmp_path, workers=4, steps=STEPS, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(STEPS))
        assert run.assert_replicas_equal() > 0
