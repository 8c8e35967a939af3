"""Random fault schedules: a seed says who dies where, who comes back, and who is told; no schedule hangs.

Repeat a failed one with `pytest tests/chaos/test_recovery_schedules.py -k "SEED" -m ""`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference

STEPS = 14
SAMPLES = 96  # of an epoch, whose end is a validation
_PLACES = (
    "forward", "exchange", "backward", "prepare", "update", "committed", "batch_end", "recovery", "movement",
)  # fmt: skip


def schedule(seed: int) -> dict[str, Any]:
    """One kill every few steps, at times of two workers at once; four workers with three replicas of each expert."""
    rng = random.Random(seed)
    kills = []
    for step in range(rng.randint(0, 3), STEPS, rng.randint(3, 6)):
        victims = rng.sample(range(4), rng.choice([1, 1, 2]))
        kills += [Kill(worker=worker, step=step, place=rng.choice(_PLACES)) for worker in victims]
    saving = {"every_n_steps": rng.randint(1, 3)} if rng.random() < 0.3 else None
    if saving is not None:
        kills.append(Kill(worker=rng.randrange(4), step=rng.randint(4, STEPS - 2), place="snapshot"))
    hold, tells, global_batch = rng.randint(2, 10), rng.random() < 0.5, rng.choice([12, 10])
    validate = rng.random() < 0.5
    if validate and rng.random() < 0.5:
        kills.append(Kill(worker=rng.randrange(4), step=SAMPLES // global_batch, place="validation"))
    return {
        "kills": kills,
        "holds": [Hold(step=hold, ranks=4)],
        "recovery": {"min_replicas": 3},
        "saving": saving,
        "tells": tells,
        "global_batch": global_batch,
        "validate": validate,
    }


def shared(chosen: dict[str, Any], seed: int, dense: str) -> dict[str, Any]:
    """The same schedule with dense state that ranks share: it needs snapshots, and nobody dies before there is one."""
    rng = random.Random(seed)
    return chosen | {
        "strategy": {"dense": dense},
        "kills": [kill for kill in chosen["kills"] if kill.step >= 4],
        "saving": {"every_n_steps": rng.randint(1, 3)},
        "recovery": {"min_replicas": 3, "failures": 2},
    }


def assert_losses_survive(folder: Path, seed: int, dense: str = "ddp") -> None:
    chosen = schedule(seed) if dense == "ddp" else shared(schedule(seed), seed, dense)
    print(f"fault schedule {seed}: {chosen}")
    with elastic_run(folder, workers=4, steps=STEPS, **chosen) as run:
        run.supervise(restart=range(4))
        assert_same_losses(run, reference(STEPS, global_batch=chosen["global_batch"], validate=chosen["validate"]))
        assert run.assert_replicas_equal() > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [59, 1013])  # these come to every place, with and without a launcher that tells
def test_random_faults(tmp_path: Path, seed: int) -> None:
    assert_losses_survive(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "dense"), [(102, "hsdp")])  # from two copies to one and back, and from snapshots
def test_random_faults_of_ranks_that_share_dense_state(tmp_path: Path, seed: int, dense: str) -> None:
    assert_losses_survive(tmp_path, seed, dense)


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["fsdp", "hsdp"])
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_40_schedules_of_ranks_that_share_dense_state(tmp_path: Path, seed: int, dense: str) -> None:
    assert_losses_survive(tmp_path, seed, dense)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 6, 7, *range(1000, 1195)])
def test_200_schedules_of_random_faults(tmp_path: Path, seed: int) -> None:
    assert_losses_survive(tmp_path, seed)
