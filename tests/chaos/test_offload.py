"""Ranks that are lost while optimizer states of dense parameters lie on the host and parameters elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Kill, elastic_run, finish
from tests.distributed.test_offload import Pretended

STEPS = 8


def pretend(folder: Path) -> list[Any]:
    return [Pretended()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "recovery"),
    [
        ("ddp", {}),
        ("hsdp", {}),
        ("zero1", {"optimizer_replay": True, "verify_replay_every": 2}),
        ("zero1", {"protection": "arc"}),
    ],
)
@pytest.mark.parametrize("place", ["backward", "prepare"])
def test_losses_are_those_of_a_calm_run_on_devices(
    tmp_path: Path, dense: str, recovery: dict[str, Any], place: str
) -> None:
    workers, losses = 4 if dense == "hsdp" else 3, []
    options: dict[str, Any] = {"workers": workers, "steps": STEPS, "recovery": recovery, "saving": {"every_n_steps": 1}}
    strategies = {"calm": {"dense": dense}, "killed": {"dense": dense, "offload_optimizer": True}}
    for name, strategy in strategies.items():
        folder = tmp_path / name
        folder.mkdir()
        kills = [Kill(worker=1, step=4, place=place)] if name == "killed" else []
        with elastic_run(folder, strategy=strategy, kills=kills, callbacks=pretend, **options) as run:
            finish(run, [worker for worker in range(workers) if worker != 1 or not kills])
            losses.append(run.losses())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
