"""Averages of weights in runs that lose ranks: those of a calm run, on every rank that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.chaos.elastic_runs import Hold, Kill, elastic_run, finish
from tests.parameters import slow

STEPS = 8


def averaged(folder: Path) -> list[Any]:
    return [EMAWeightAveraging(decay=0.5)]


@pytest.mark.parametrize(
    ("strategy", "recovery", "places", "joins"),
    [
        ({}, {}, ("committed", "validation"), False),
        slow({}, {}, ("committed",), True),
        slow({}, {}, ("update", "batch_end"), False),
        slow({"dense": "zero1"}, {"protection": "arc"}, ("validation",), False),
        slow({"dense": "zero1"}, {"protection": "arc"}, ("committed", "prepare"), False),
        slow({"dense": "fsdp"}, {"protection": "arc"}, ("validation",), True),
    ],
)
def test_validations_are_those_of_a_calm_run(
    tmp_path: Path, strategy: dict[str, Any], recovery: dict[str, Any], places: tuple[str, ...], joins: bool
) -> None:
    options: dict[str, Any] = {
        "steps": STEPS,
        "validate": True,
        "trainer_options": {"val_check_interval": 2, "num_sanity_val_steps": 0},
        "callbacks": averaged,
        "saving": {"every_n_steps": 1} if recovery else None,
    }
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    with elastic_run(tmp_path / "calm", workers=1, **options) as run:
        run.supervise()
        losses, validations = run.losses(), run.validations()
    assert sorted(validations) == [2, 4, 6, 8]
    kills = [Kill(worker=1 + number, step=2 + 2 * number, place=place) for number, place in enumerate(places)]
    holds = [Hold(step=6, ranks=3)] if joins else []
    more = {"workers": 3, "strategy": strategy, "recovery": recovery, "kills": kills, "holds": holds}
    with elastic_run(tmp_path / "killed", **more, **options) as run:
        if joins:
            run.supervise(restart={1})
        else:
            finish(run, [worker for worker in range(3) if worker not in {kill.worker for kill in kills}])
        assert run.kills_done() == len(kills)
        assert run.losses() == pytest.approx(losses, abs=1e-5)
        assert run.validations() == pytest.approx(validations, abs=1e-5)
        if strategy.get("dense") != "zero1":  # whose ranks have unlike states
            assert run.assert_replicas_equal() > 0
