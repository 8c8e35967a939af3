"""Recovery from what was saved: arenas, copies and parities of lost nodes, storage; with tokens counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_lightning.callbacks.lost_tokens import DynamicK
from tests.chaos.elastic_runs import ElasticRun, Hold, Kill, assert_same_losses, elastic_run, reference
from tests.parameters import slow

STEPS = 16
EVERY_STEP = {"every_n_steps": 1}


def origins(run: ElasticRun) -> str:
    return "; ".join(report["restored"] for report in run.reports())


@pytest.mark.slow
def test_experts_of_a_lost_rank_come_from_its_arena(tmp_path: Path) -> None:
    """One replica of each expert, so that a lost rank takes experts with it; the other rank of its node reads them."""
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": "none"},
        "kills": [Kill(worker=1, step=6, place="backward"), Kill(worker=2, step=11, place="snapshot")],
        "holds": [Hold(step=8, ranks=4)],
    }
    with elastic_run(tmp_path, workers=4, workers_a_node=2, steps=STEPS, saving=EVERY_STEP, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == 2
        assert "arenas" in origins(run)
        assert "storage" not in origins(run)
        assert all(report["stale_experts"] == 0 for report in run.reports())
        assert_same_losses(run, reference(STEPS), has_replicas=True)


@pytest.mark.slow
@pytest.mark.parametrize(("protection", "word"), [slow("arc", "copies"), ("aec", "parity")])
def test_experts_of_a_lost_node_come_from_what_protects_them(tmp_path: Path, protection: str, word: str) -> None:
    """The node's arena goes with the node."""
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": protection},
        "kills": [Kill(worker=1, step=6, place="backward"), Kill(worker=2, step=11, place="forward")],
        "holds": [Hold(step=8, ranks=3)],
    }
    with elastic_run(tmp_path, workers=3, steps=STEPS, saving=EVERY_STEP, stores_late=True, **options) as run:
        run.supervise(restart=range(3), lose=range(3))
        assert run.kills_done() == 2
        assert word in origins(run), origins(run)
        assert "storage" not in origins(run)
        assert all(report["stale_experts"] == 0 for report in run.reports())
        assert_same_losses(run, reference(STEPS), has_replicas=True)


@pytest.mark.slow
def test_all_workers_die_and_go_on_from_their_arenas(tmp_path: Path) -> None:
    kills = [Kill(worker=worker, step=7, place="backward") for worker in range(3)]
    with elastic_run(tmp_path, workers=3, steps=STEPS, kills=kills, saving=EVERY_STEP) as run:
        run.supervise(restart=range(3), together=True)
        assert_same_losses(run, reference(STEPS))
        assert {report["step"] for report in run.reports()} <= {6, 7}
        assert len(run.reports()) == 3


def recounted(run: ElasticRun, history: dict[int, Any], upto: int, versions: list[list[int]]) -> np.ndarray[Any, Any]:
    """int64 [L]: the assignments of steps up to `upto` that experts of these versions have not seen, by brute force."""
    lost = np.zeros(len(versions), dtype=np.int64)
    for step, counts in history.items():
        if step <= upto:
            for layer, row in enumerate(versions):
                lost[layer] += sum(int(counts[layer][e]) for e, version in enumerate(row) if version < step)
    return lost


@pytest.mark.parametrize("all_die", [False, slow(True)])
def test_beyond_the_protection_storage_is_read_and_lost_tokens_are_counted(tmp_path: Path, all_die: bool) -> None:
    """A node is lost with the only replicas of its experts, of which storage has old versions."""
    victims, steps = range(3) if all_die else [1], 9
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": "none"},
        "saving": {"every_n_steps": 1, "k_snapshot": 2, "k_persist": 1},
        "callbacks": with_dynamic_k,
        "kills": [Kill(worker=worker, step=6, place="backward") for worker in victims],
        "holds": [Hold(step=step, stored=step - 1) for step in range(2, 6)],  # a writer that is slow passes over some
    }
    with elastic_run(tmp_path, workers=3, steps=steps, **options) as run:
        run.supervise(restart=range(3) if all_die else (), lose=range(3), together=all_die)
        recovery = next(r for worker in range(3) for r in run.recoveries(worker) if r["report"]["stale_experts"])
        assert "storage" in recovery["report"]["restored"]
        history = run.counts()
        lost = recounted(run, history, recovery["report"]["step"], recovery["versions"])
        assert lost.sum() > 0
        planned = 12 * 16 * 2 * steps
        results = [run.result(worker) for worker in range(3) if (tmp_path / f"result-{worker}.json").exists()]
        for result in results:
            assert result["plt"] == pytest.approx(float((lost / planned).mean()), rel=1e-9)
        assert run.losses().keys() == set(range(1, steps + 1))
        assert run.assert_replicas_equal() > 0


def with_dynamic_k(folder: Path) -> list[Any]:
    return [DynamicK(threshold=0.35)]
