"""Sixty steps on four ranks with kills at random places, for every source of what is lost: the losses of a quiet run.

A seed is a schedule. Repeat a failed one with `pytest tests/chaos/test_long_run.py -k "SEED" -m ""`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference

STEPS = 60
_PLACES = ("forward", "exchange", "backward", "prepare", "update", "committed", "batch_end", "recovery", "movement")
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
    for step in range(4, STEPS - 6, 8):
        victims = rng.sample(range(4), rng.choice([1, 2]) if source == "replicas" else 1)
        places = _PLACES if source == "replicas" else ("forward", "exchange", "backward")
        kills += [Kill(worker=worker, step=step, place=rng.choice(places)) for worker in victims]
        holds.append(Hold(step=step + 3, ranks=4))
    loses_node = source in ("copies", "parity")
    options = {**_SOURCES[source], "kills": kills, "holds": holds}
    with elastic_run(tmp_path, workers=4, steps=STEPS, **options) as run:
        run.supervise(restart=range(4), lose=range(4) if loses_node else (), timeout_s=240.0)
        assert run.kills_done() >= len(kills) // 2
        assert_same_losses(run, reference(STEPS))
        assert run.assert_replicas_equal() > 0
        if source != "replicas":
            assert any(source in report["restored"] for report in run.reports())
            assert all(report["stale_experts"] == 0 for report in run.reports())
            assert all("storage" not in report["restored"] for report in run.reports())
