"""What elastic runs have together: pipelines beside other axes, a balancer, one fault after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, elastic_run, finish
from tests.chaos.test_pipeline_recovery import BESIDE, EVERY_STEP, MODEL, PP2, STEPS, STORED, balancer, lose, moved
from tests.distributed.same_training import SKEWED

pytestmark = pytest.mark.slow
LAYERS = {**MODEL, **SKEWED}
INTERLEAVED = {"schedule": "interleaved"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {**BESIDE, "cp_tp": (8, {"mesh": {"cp": 2, "tp": 2}})}
ONE = [lose(2, "exchange")]
TWO = [lose(1, "exchange", step=3), lose(0, "backward", step=5)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    options = {**PP2, "model": LAYERS}
    with elastic_run(tmp_path_factory.mktemp("undisturbed"), workers=2, steps=STEPS, **options) as run:
        finish(run, range(2))
        return run.losses()


@pytest.mark.parametrize(
    ("beside", "extra", "kills", "balances"),
    [
        ("zero1", {}, ONE, True),
        ("fsdp", {}, ONE, True),
        ("tp4", {}, ONE, True),
        ("hsdp", {}, ONE, True),
        ("tp", {}, ONE, True),
        ("cp", {}, ONE, True),
        ("zero1", INTERLEAVED, ONE, True),
        ("fsdp", INTERLEAVED, ONE, False),
        ("tp4", INTERLEAVED, ONE, False),
        ("cp4", INTERLEAVED, ONE, False),
        ("hsdp", INTERLEAVED, ONE, True),
        ("zero1", {}, TWO, True),
        ("fsdp", {}, TWO, False),
        ("hsdp", {}, TWO, True),
        ("cp_tp", {}, ONE, False),  # seven ranks, for which a micro-batch has no samples, wait for the eighth
        ("cp_tp", {}, TWO, True),
    ],
)
def test_stages_beside_another_axis_lose_ranks(
    tmp_path: Path,
    undisturbed: dict[int, float],
    beside: str,
    extra: dict[str, Any],
    kills: list[Kill],
    balances: bool,
) -> None:
    """Ranks come again, and the losses are those of a calm run; experts of a balanced one have moved before."""
    ranks, strategy = MESHES[beside]
    mesh = {"pp": 2, **strategy.get("mesh", {})}
    is_copied = beside in ("hsdp", "cp", "tp") and kills is ONE
    holds = [] if is_copied else [STORED]
    holds += [Hold(step=kill.step + 1, ranks=ranks) for kill in kills]
    options: dict[str, Any] = {"kills": kills, "holds": holds}
    options |= {"strategy": {**strategy, "mesh": mesh, "micro_batches": 2, "slots": 6, **extra}, "model": LAYERS}
    options |= {} if is_copied else {"saving": EVERY_STEP, "recovery": {"min_replicas": 1}}
    options |= {"callbacks": balancer} if balances else {}
    with elastic_run(tmp_path, workers=ranks, steps=STEPS, **options) as run:
        run.supervise(restart=range(ranks))
        assert run.kills_done() == len(kills)
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.world_sizes()[STEPS] == ranks
        assert not balances or any(moved(run, worker) for worker in range(ranks))
        has_none = not (balances or is_copied)
        assert beside == "zero1" or run.assert_replicas_equal() > 0 or has_none
        assert not (is_copied and any(report["steps_lost"] for report in run.reports()))


def test_a_balancer_goes_on_with_ranks_of_less_room(tmp_path: Path) -> None:
    """Nobody set slots: the one that was left made room for all experts, which the one that comes has not."""
    options: dict[str, Any] = {"model": SKEWED, "callbacks": balancer, "saving": EVERY_STEP}
    options |= {"recovery": {"min_replicas": 1}, "holds": [Hold(step=6, ranks=2)], "kills": [lose(1, "exchange")]}
    with elastic_run(tmp_path, workers=2, steps=STEPS + 4, **options) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == 1
        assert run.world_sizes()[STEPS + 4] == 2
