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
