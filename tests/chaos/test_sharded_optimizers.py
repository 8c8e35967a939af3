"""ZeRO-1 in an elastic run: shards of a lost rank come from a peer that repeated their updates, or from parities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, elastic_run, finish
from tests.parameters import slow

STEPS = 10


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with elastic_run(folder, workers=3, steps=STEPS, strategy={"dense": "zero1"}) as run:
        finish(run, range(3))
        return run.losses()


@pytest.mark.parametrize("place", [slow("forward"), "backward", slow("batch_end")])
def test_repeated_updates_replace_a_lost_shard(tmp_path: Path, undisturbed: dict[int, float], place: str) -> None:
    with elastic_run(
        tmp_path,
        workers=3,
        steps=STEPS,
        strategy={"dense": "zero1"},
        recovery={"optimizer_replay": True, "verify_replay_every": 3},
        kills=[Kill(worker=1, step=5, place=place)],
    ) as run:
        finish(run, [0, 2])
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        report = run.result(0)["reports"][0]
        assert (report["ranks_after"], report["steps_lost"]) == (2, 0)


def test_copied_snapshots_replace_a_lost_shard(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with elastic_run(
        tmp_path,
        workers=3,
        steps=STEPS,
        strategy={"dense": "zero1"},
        saving={"every_n_steps": 1},
        stores_late=True,
        recovery={"protection": "arc"},
        kills=[Kill(worker=1, step=5, place="prepare")],
    ) as run:
        finish(run, [0, 2])
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        report = run.result(0)["reports"][0]
        assert report["ranks_after"] == 2
        assert report["steps_lost"] <= 1


@pytest.mark.slow
def test_one_rank_keeps_all_states_until_another_takes_some(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with elastic_run(
        tmp_path,
        workers=2,
        steps=STEPS,
        strategy={"dense": "zero1"},
        saving={"every_n_steps": 1},
        kills=[Kill(worker=1, step=4, place="backward")],
        holds=[Hold(step=7, ranks=2)],
    ) as run:
        run.supervise(restart=[1], after=7)
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert set(run.world_sizes().values()) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adafactor", "lr": 0.05},
        {"name": "muon"},
        {"fused": True},
    ],
)
def test_states_of_other_optimizers_survive_a_lost_rank(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    options: dict[str, Any] = {"steps": STEPS, "strategy": {"dense": "zero1", "replicas": 2}, "optimizer": optimizer}
    losses = []
    for name, kills in (("calm", []), ("killed", [Kill(worker=1, step=5, place="backward")])):
        folder = tmp_path / name
        folder.mkdir()
        with elastic_run(
            folder, workers=3, saving={"every_n_steps": 1}, stores_late=True, recovery={"protection": "arc"},
            kills=kills, **options,
        ) as run:  # fmt: skip
            finish(run, [0, 2] if kills else range(3))
            losses.append(run.losses())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
