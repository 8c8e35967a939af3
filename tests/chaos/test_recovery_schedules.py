"""Random fault schedules: a seed says who dies where, who comes back, and who is told; no schedule hangs.

Repeat a failed one with `pytest tests/chaos/test_recovery_schedules.py -k "SEED" -m ""`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference
from tests.parameters import soak

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
@pytest.mark.parametrize(
    ("dense", "seed"),
    [
        *(("ddp", seed) for seed in (*range(8), 59, 1013)),  # 59 and 1013 come to every place
        *((dense, seed) for dense in ("fsdp", "hsdp") for seed in range(2000, 2005)),
        ("hsdp", 102),  # from two copies to one and back, and from snapshots
        *(soak("ddp", seed) for seed in range(1000, 1195) if seed != 1013),
        *(soak(dense, seed) for dense in ("fsdp", "hsdp") for seed in range(2005, 2020)),
    ],
)
def test_random_faults(tmp_path: Path, dense: str, seed: int) -> None:
    assert_losses_survive(tmp_path, seed, dense)


# ----------------------------------------------------------------------
# Sixty steps on four ranks with kills at random places, for every source of what is lost: the losses of a quiet run.
# A seed is a schedule.


LONG_RUN = 60

_MEMORY = {"saving": {"every_n_steps": 1}, "stores_late": True}
_SOURCES: dict[str, dict[str, Any]] = {
    "replicas": {"recovery": {"min_replicas": 3}},
    "arenas": {"recovery": {"min_replicas": 1, "protection": "none"}, "workers_a_node": 2, **_MEMORY},
    "copies": {"recovery": {"min_replicas": 1, "protection": "arc"}, **_MEMORY},
    "parity": {"recovery": {"min_replicas": 1, "protection": "aec"}, **_MEMORY},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("source", _SOURCES)
def test_sixty_steps(tmp_path: Path, source: str, seed: int) -> None:
    """Replicas survive two deaths at once; what protects snapshots survives one, and needs a step to be ready again."""
    rng = random.Random(f"{source}-{seed}")
    kills, holds = [], []
    for step in range(4, LONG_RUN - 6, 8):
        victims = rng.sample(range(4), rng.choice([1, 2]) if source == "replicas" else 1)
        places = _PLACES if source == "replicas" else ("forward", "exchange", "backward")
        kills += [Kill(worker=worker, step=step, place=rng.choice(places)) for worker in victims]
        holds.append(Hold(step=step + 3, ranks=4))
    loses_node = source in ("copies", "parity")
    options = {**_SOURCES[source], "kills": kills, "holds": holds}
    with elastic_run(tmp_path, workers=4, steps=LONG_RUN, **options) as run:
        run.supervise(restart=range(4), lose=range(4) if loses_node else (), timeout_s=240.0)
        assert run.kills_done() >= len(kills) // 2
        assert_same_losses(run, reference(LONG_RUN), has_replicas=True)
        if source != "replicas":
            assert any(source in report["restored"] for report in run.reports())
            assert all(report["stale_experts"] == 0 for report in run.reports())
            assert all("storage" not in report["restored"] for report in run.reports())
