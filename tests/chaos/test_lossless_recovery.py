"""Lossless windows in runs that recover in memory: their steps are run again, also where ranks die meanwhile, and no
token is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.callbacks.load_balancer import LoadBalancer
from tests.chaos.elastic_runs import ElasticRun, Hold, Kill, assert_same_losses, elastic_run, reference
from tests.parameters import slow

STEPS = 18
WINDOWS = {"every_n_steps": 1, "k_snapshot": 1, "lossless": True}
"""Of six experts: after the first step everything, then the windows of steps 2 to 7, 8 to 13, ..."""


def assert_nothing_is_lost(run: ElasticRun, kills: int) -> None:
    assert run.kills_done() == kills
    assert all(report["stale_experts"] == 0 for report in run.reports())
    assert all(line["plt"] in (None, 0.0) for worker in run.processes for line in run.recoveries(worker))
    assert_same_losses(run, reference(run.steps), has_replicas=True)


def restored(run: ElasticRun) -> list[str]:
    return [f"step {report['step']}: {report['restored']}" for report in run.reports()]


def last_state(run: ElasticRun) -> dict[str, str]:
    """unit -> digest after the last step, whoever held it."""
    lines = [json.loads(line) for path in run.folder.glob("states-*.jsonl") for line in path.read_text().splitlines()]
    return {unit: digest for line in lines if line["step"] == STEPS for unit, digest in line["digests"].items()}


@pytest.mark.slow
def test_ranks_die_with_their_experts_and_again_while_steps_are_run_again(tmp_path: Path) -> None:
    """The second one falls into the replay of steps 2 to 7, the third into the recovery from that."""
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": "none"},
        "kills": [
            Kill(worker=1, step=10, place="backward"),
            Kill(worker=2, step=5, place="backward", visit=2),
            Kill(worker=3, step=5, place="recovery"),
        ],
        "holds": [Hold(step=15, ranks=4)],
    }
    with elastic_run(
        tmp_path, workers=4, workers_a_node=4, steps=STEPS, stores_late=True, saving=WINDOWS, **options
    ) as run:
        run.supervise(restart=range(4))
        assert sum("step 2: 12 experts from arenas" in said for said in restored(run)) >= 2, restored(run)
        assert_nothing_is_lost(run, kills=3)


@pytest.mark.parametrize("place", [slow("prepare"), slow("committed"), slow("update"), slow("batch_end")])
def test_all_workers_die_and_their_arenas_give_every_bit_back(tmp_path: Path, place: str) -> None:
    """Both ranks hold all experts before and after, so that all sums are in the same order."""
    kills = [Kill(worker=worker, step=9, place=place) for worker in range(2)]
    options: dict[str, Any] = {"workers": 2, "steps": STEPS, "recovery": {"min_replicas": 2, "protection": "none"}}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    with elastic_run(tmp_path / "calm", **options) as undisturbed:
        undisturbed.supervise()
        wanted = last_state(undisturbed)
    with elastic_run(tmp_path / "killed", kills=kills, saving=WINDOWS, stores_late=True, **options) as run:
        run.supervise(restart=range(2), together=True)
        assert any("step 2: 12 experts from arenas" in said for said in restored(run)), restored(run)
        assert_nothing_is_lost(run, kills=run.kills_done())
        assert run.losses() == undisturbed.losses()
        assert last_state(run) == wanted


@pytest.mark.parametrize(("protection", "word"), [slow("arc", "copies"), slow("aec", "parity")])
def test_a_window_outlives_its_node(tmp_path: Path, protection: str, word: str) -> None:
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": protection},
        "kills": [Kill(worker=1, step=10, place="backward"), Kill(worker=2, step=17, place="forward")],
        "holds": [Hold(step=8, ranks=3), Hold(step=16, ranks=3)],
    }
    with elastic_run(tmp_path, workers=3, steps=STEPS, saving=WINDOWS, stores_late=True, **options) as run:
        run.supervise(restart=range(3), lose=range(3))
        assert any(f"step 2: 8 experts from arenas, 4 from {word}" in said for said in restored(run)), restored(run)
        assert_nothing_is_lost(run, kills=2)


@pytest.mark.slow
def test_all_nodes_are_lost_and_storage_gives_the_window_back(tmp_path: Path) -> None:
    """Agents of two nodes agree on windows; steps that are run again end an epoch and are validated."""
    options: dict[str, Any] = {
        "kills": [Kill(worker=worker, step=16, place="backward") for worker in range(2)],
        "holds": [Hold(step=15, stored=1)],
        "validate": True,
    }
    with elastic_run(tmp_path, workers=2, steps=STEPS, saving=WINDOWS, **options) as run:
        run.supervise(restart=range(2), lose=range(2), together=True)
        assert any("12 experts from storage" in said for said in restored(run)), restored(run)
        assert all(report["stale_experts"] == 0 for report in run.reports())
        assert_same_losses(run, reference(STEPS, validate=True))


@pytest.mark.parametrize("place", [slow("update"), slow("committed")])
def test_a_rank_dies_while_others_end_the_replay(tmp_path: Path, place: str) -> None:
    """After the last update of a replay the state of some ranks is whole, that of others is not."""
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": "none"},
        "kills": [Kill(worker=1, step=10, place="backward"), Kill(worker=2, step=6, place=place, visit=2)],
    }
    with elastic_run(
        tmp_path, workers=3, workers_a_node=3, steps=STEPS, stores_late=True, saving=WINDOWS, **options
    ) as run:
        run.supervise(restart=range(3))
        assert sum("step 2: 12 experts from arenas" in said for said in restored(run)) >= 2, restored(run)
        assert_nothing_is_lost(run, kills=2)


def balancer(folder: Path) -> list[Any]:
    return [LoadBalancer(rebalance_every=3, min_replicas=1)]


@pytest.mark.slow
def test_experts_stay_while_steps_are_run_again_from_memory(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "recovery": {"min_replicas": 1, "protection": "none"},
        "kills": [Kill(worker=1, step=10, place="backward")],
        "strategy": {"slots": 4},
        "callbacks": balancer,
    }
    saving = {**WINDOWS, "k_snapshot": 3}
    with elastic_run(
        tmp_path, workers=3, workers_a_node=3, steps=STEPS, stores_late=True, saving=saving, **options
    ) as run:
        run.supervise(restart=range(3))
        assert_nothing_is_lost(run, kills=1)


@pytest.mark.parametrize("every", ["auto", slow(2)])
def test_ranks_that_join_save_with_those_that_had_adapted(tmp_path: Path, every: int | str) -> None:
    """The length of windows and the interval come from times that only survivors have measured."""
    options: dict[str, Any] = {
        "saving": {"every_n_steps": every, "k_snapshot": None, "lossless": True},
        "kills": [Kill(worker=1, step=7, place="backward")],
        "holds": [Hold(step=5, stored=1), Hold(step=9, ranks=2)],
    }
    with elastic_run(tmp_path, workers=2, steps=14, **options) as run:
        run.supervise(restart=range(2))
        assert_nothing_is_lost(run, kills=1)
        assert len(run.recoveries(0)) == 2, "a death and a return"
