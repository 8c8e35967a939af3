"""Experts edited in elastic runs: ranks are lost before, in and after edits, and the losses are those of a calm run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from moe_lightning.comm.world import World
from moe_lightning.strategies import expert_editing
from tests.chaos.elastic_runs import ElasticRun, Hold, Kill, assert_same_losses, elastic_run, reference
from tests.chaos.test_recovery_sources import origins, recounted, with_dynamic_k
from tests.parameters import slow

EDITS: list[dict[str, Any]] = [
    {"step": 4, "merge": [[0, 3]], "duplicate": [2, 5, 5]},
    {"step": 8, "prune_least": 1},
]
STEPS = 12


def assert_as_if_calm(run: ElasticRun) -> None:
    """Law L1, with 6 experts a layer at first, then 8, then 7."""
    assert_same_losses(run, reference(STEPS, edits=EDITS))
    if run.options.get("strategy") != {"dense": "zero1"}:  # ranks keep other parts of the moments
        assert run.assert_replicas_equal() > 0
    for step, counts in run.counts().items():
        assert {len(row) for row in counts} == {6 if step <= 4 else 8 if step <= 8 else 7}, step


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("edit ready", "edited"),
        slow("forward", "backward"),
        slow("edit", "edit ready"),
        slow("edited", "forward"),
        slow("committed", "batch_end"),
        slow("exchange", "update"),
    ],
)
@pytest.mark.parametrize("strategy", [{}, slow({"slots": 8})], ids=str)
def test_ranks_are_lost_around_edits_and_come_back(
    tmp_path: Path, first: str, second: str, strategy: dict[str, Any]
) -> None:
    before = {"committed": 1, "batch_end": 0, "update": 0}  # they come before the step counts
    kills = [
        Kill(worker=1, step=4 - before.get(first, 0), place=first),
        Kill(worker=0, step=8 - before.get(second, 0), place=second),
    ]
    holds = [Hold(step=6, ranks=3), Hold(step=10, ranks=3)]
    options: dict[str, Any] = {"kills": kills, "holds": holds, "strategy": strategy, "edits": EDITS}
    with elastic_run(tmp_path, workers=3, steps=STEPS, **options) as run:
        run.supervise(restart=range(3))
        assert run.kills_done() == 2
        assert_as_if_calm(run)


class Deaf(pl.Callback):
    """One rank does not hear that all are ready for the first edit, though they are."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        inner = expert_editing.agree

        def deaf(world: World) -> None:
            inner(world)
            expert_editing.agree = inner  # type: ignore[attr-defined]
            raise dist.DistNetworkError("connection reset by peer")

        if trainer.global_rank == 1:
            expert_editing.agree = deaf  # type: ignore[attr-defined]


def with_deaf(folder: Path) -> list[Any]:
    return [Deaf()]


def test_a_rank_that_did_not_hear_of_the_others_edit_makes_it_in_the_next_world(tmp_path: Path) -> None:
    with elastic_run(tmp_path, workers=2, steps=STEPS, callbacks=with_deaf, edits=EDITS) as run:
        run.supervise()
        assert {(report["step"], report["ranks_after"]) for report in run.reports()} == {(4, 2)}
        assert_as_if_calm(run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"dense": "zero1"}], ids=str)
@pytest.mark.parametrize("protection", ["none", "arc"])
def test_lost_without_a_snapshot_of_after_the_edit_a_run_goes_back_and_edits_again(
    tmp_path: Path, protection: str, strategy: dict[str, Any]
) -> None:
    """One replica of each expert; a lost rank takes experts with it."""
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": protection},
        "kills": [Kill(worker=1, step=4, place="backward"), Kill(worker=2, step=10, place="backward")],
        "holds": [Hold(step=6, ranks=4)],
        "saving": {"every_n_steps": 1},
        "strategy": strategy,
        "edits": EDITS,
    }
    with elastic_run(tmp_path, workers=4, workers_a_node=2, steps=STEPS, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == 2
        assert "storage" not in origins(run)
        assert all(report["stale_experts"] == 0 for report in run.reports())
        assert_as_if_calm(run)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6, 8])
def test_all_are_lost_and_go_on_with_the_experts_that_were_saved(tmp_path: Path, step: int) -> None:
    kills = [Kill(worker=worker, step=step, place="backward") for worker in range(3)]
    options: dict[str, Any] = {"kills": kills, "saving": {"every_n_steps": 1}, "edits": EDITS}
    with elastic_run(tmp_path, workers=3, steps=STEPS, **options) as run:
        run.supervise(restart=range(3), together=True)
        assert_as_if_calm(run)


@pytest.mark.slow
@pytest.mark.parametrize("all_die", [False, True])
def test_tokens_that_edited_experts_lose_are_counted(tmp_path: Path, all_die: bool) -> None:
    """A node is lost with the only replicas of its experts, of which storage has versions from after the edit."""
    edits = EDITS[:1]
    victims = range(3) if all_die else [1]
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": "none"},
        "saving": {"every_n_steps": 1, "k_snapshot": 2, "k_persist": 1},
        "callbacks": with_dynamic_k,
        "kills": [Kill(worker=worker, step=10, place="backward") for worker in victims],
        "holds": [Hold(step=step, stored=step - 1) for step in range(2, 10)],
        "edits": edits,
    }
    with elastic_run(tmp_path, workers=3, steps=STEPS, **options) as run:
        run.supervise(restart=range(3) if all_die else (), lose=range(3), together=all_die)
        recovery = next(r for worker in range(3) for r in run.recoveries(worker) if r["report"]["stale_experts"])
        assert "storage" in recovery["report"]["restored"]
        assert {len(row) for row in recovery["versions"]} == {8}
        lost = recounted(run, run.counts(), recovery["report"]["step"], recovery["versions"])
        assert lost.sum() > 0
        planned = 12 * 16 * 2 * STEPS
        results = [run.result(worker) for worker in range(3) if (tmp_path / f"result-{worker}.json").exists()]
        for result in results:
            assert result["plt"] == pytest.approx(float((lost / planned).mean()), rel=1e-9)
        assert run.losses().keys() == set(range(1, STEPS + 1))
        assert run.assert_replicas_equal() > 0
