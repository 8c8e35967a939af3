"""Pipelines in an elastic run: a lost stage comes from another slice's ranks or from snapshots, in the same process and
with the losses of a calm run; ranks may come to hold another stage.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.checkpoint.loader import find_newest
from tests.chaos.elastic_runs import SETTINGS, ElasticRun, Hold, Kill, elastic_run, finish
from tests.chaos.elastic_worker import checkpoints_of
from tests.chaos.test_min_ranks import wait_for_recovery
from tests.distributed.same_training import SKEWED
from tests.forks import PATIENCE_S
from tests.parameters import slow

STEPS = 8
MODEL = {"num_layers": 4, "tie_embeddings": False}
PP2: dict[str, Any] = {"strategy": {"mesh": {"pp": 2}, "micro_batches": 2}, "model": MODEL}
INTERLEAVED: dict[str, Any] = {"strategy": {**PP2["strategy"], "schedule": "interleaved"}, "model": MODEL}
EVERY_STEP = {"every_n_steps": 1}
STORED = Hold(step=3, stored=1)
"""Before a fault that takes the only copy of something: agents that come late may not have written it by then."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    with elastic_run(tmp_path_factory.mktemp("undisturbed"), workers=2, steps=STEPS, **PP2) as run:
        finish(run, range(2))
        return run.losses()


def lose(rank: int, place: str, step: int = 4, **options: Any) -> Kill:
    """Kill who had a rank in the first world."""
    return Kill(worker=-1, rank=rank, step=step, place=place, **options)


def assert_undisturbed(run: ElasticRun, expected: dict[int, float]) -> None:
    assert run.losses() == pytest.approx(expected, abs=1e-5)
    assert all(report["steps_lost"] == 0 for report in run.reports())
    assert run.assert_replicas_equal() > 0


def test_a_rank_takes_the_stage_of_a_lost_one(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Four ranks in two slices go on as two in one, of whom one held the other stage; with a fourth all four go on."""
    with elastic_run(
        tmp_path, workers=4, steps=STEPS, kills=[lose(2, "exchange")], holds=[Hold(step=6, ranks=4)], **PP2
    ) as run:
        run.supervise(restart=range(4), after=6)
        assert_undisturbed(run, undisturbed)
        sizes = run.world_sizes()
        assert [sizes[step] for step in (4, 5, STEPS)] == [4, 2, 4]


@pytest.mark.slow
def test_snapshots_replace_the_only_stage(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """One slice of two ranks, of which one is lost and comes back."""
    with elastic_run(tmp_path, workers=2, steps=STEPS, kills=[lose(1, "backward")], saving=EVERY_STEP, **PP2) as run:
        run.supervise(restart=range(2))
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert set(run.world_sizes().values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize("options", [PP2, INTERLEAVED], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("place", ["forward", "exchange", "backward", "prepare", "update", "committed", "batch_end"])
def test_any_rank_may_be_lost_anywhere(
    tmp_path: Path, undisturbed: dict[int, float], place: str, rank: int, options: dict[str, Any]
) -> None:
    kills, visit = [lose(rank, place, visit=3 if place == "exchange" else 1)], {**options, "validate": True}
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, **visit) as run:
        run.supervise()
        assert_undisturbed(run, undisturbed)
        assert set(run.world_sizes().values()) == {4, 2}


@pytest.mark.slow
@pytest.mark.parametrize("options", [PP2, INTERLEAVED], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize("second", ["recovery", "movement"])
def test_a_second_rank_is_lost_while_the_state_is_brought_across(
    tmp_path: Path, undisturbed: dict[int, float], second: str, options: dict[str, Any]
) -> None:
    """Six ranks in three slices; of each stage one rank is left at least."""
    kills = [lose(2, "backward"), lose(5, second)]
    with elastic_run(tmp_path, workers=6, steps=STEPS, kills=kills, **options) as run:
        run.supervise()
        assert run.kills_done() == 2
        assert_undisturbed(run, undisturbed)
        assert run.world_sizes()[STEPS] == 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [PP2, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_ranks_are_lost_and_come_again_and_nothing_is_left_of_former_worlds(
    tmp_path: Path, undisturbed: dict[int, float], options: dict[str, Any]
) -> None:
    kills = [Kill(worker=worker, step=step, place="exchange") for worker, step in ((0, 1), (1, 3), (2, 5))]
    holds = [Hold(step=step, ranks=4) for step in (1, 3, 5, 7)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, holds=holds, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == 3
        assert_undisturbed(run, undisturbed)
        full = [line["open"] for line in run.recoveries(3) if line["report"]["ranks_after"] == 4]
        grown = {kind: count for kind, count in full[-1].items() if count > full[0].get(kind, 0)}
        assert not grown, grown


@pytest.mark.slow
def test_a_stopped_rank_is_one_that_waits(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Ranks of the other stage, which wait for it, go on within the silence timeout."""
    kills = [Kill(worker=1, step=4, place="exchange", signal=signal.SIGSTOP)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, holds=[Hold(step=6, ranks=4)], **PP2) as run:
        wait_for_recovery(run, 0, ranks=2)
        run.wait_for_step(6)
        run.signal(1, signal.SIGCONT)
        run.supervise()
        assert_undisturbed(run, undisturbed)
        assert [run.world_sizes()[step] for step in (4, 5, STEPS)] == [4, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("options", [PP2, INTERLEAVED], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize("place", ["forward", "batch_end", "movement"])
def test_snapshots_replace_all_ranks_of_a_stage(
    tmp_path: Path, undisturbed: dict[int, float], place: str, options: dict[str, Any]
) -> None:
    kills = [lose(0, "forward" if place == "movement" else place), lose(1, place)]
    recovery = {"failures": 2, "min_replicas": 1}
    with elastic_run(
        tmp_path, workers=4, steps=STEPS, kills=kills, saving=EVERY_STEP, recovery=recovery, **options
    ) as run:
        run.supervise()
        assert run.kills_done() == 2
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.world_sizes()[STEPS] == 2


@pytest.mark.slow
def test_one_rank_that_is_more_than_stages_waits_from_the_start(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with elastic_run(tmp_path, workers=5, steps=STEPS, kills=[lose(1, "backward")], **PP2) as run:
        run.supervise()
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.world_sizes()[1] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "dense"), [(3, "ddp"), (4, "ddp"), (4, "zero1"), (4, "fsdp")])
def test_a_rank_that_is_told_to_leave_hands_its_stage_over(
    tmp_path: Path, undisturbed: dict[int, float], workers: int, dense: str
) -> None:
    """Nothing was saved, and nothing is lost; of three ranks one waits already, and comes in for who leaves."""
    kills, settings = [lose(1, "forward", signal=signal.SIGTERM)], replace(SETTINGS, notice_on_sigterm=True)
    options: dict[str, Any] = {"kills": kills, "settings": settings, "recovery": {"min_replicas": 1}, **PP2}
    options["strategy"] = {**PP2["strategy"], "dense": dense}
    with elastic_run(tmp_path, workers=workers, steps=STEPS, **options) as run:
        for process in run.processes.values():
            process.join(PATIENCE_S)
        assert run.words().count("SIGTERM asks this process to leave") == 1
        assert sorted(process.exitcode or 0 for process in run.processes.values()) == [0] * (workers - 1) + [1]
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.world_sizes()[STEPS] == 2


@pytest.mark.slow
def test_one_rank_that_is_left_validates_saves_and_ends(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """What is to be done after the last step needs no pipeline: the one has the whole model by then."""
    kills, options = [lose(1, "validation", step=STEPS)], {**PP2, "validate": True, "saving": EVERY_STEP}
    with elastic_run(tmp_path, workers=2, steps=STEPS, kills=kills, **options) as run:
        run.supervise()
        assert run.kills_done() == 1
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.validations().keys() == {STEPS}
        found = find_newest(checkpoints_of(tmp_path)).checkpoint
        assert found is not None
        assert found.step == STEPS
        found.verify()


# ---------------------------------------------------------------------- experts that have moved

BALANCED: dict[str, Any] = {"calibrate": False, "flops_per_s": 1e6, "bytes_per_s": 1e12, "speeds": "even"}


def balancer(folder: Path) -> list[LoadBalancer]:
    return [LoadBalancer(**BALANCED, rebalance_every=2)]


def moved(run: ElasticRun, worker: int) -> bool:
    """Whether a worker had other experts than at first in the first world."""
    found = [json.loads(line) for line in (run.folder / f"states-{worker}.jsonl").read_text().splitlines()]
    first = [line for line in found if line["world"] == found[0]["world"]]
    held = [{unit for unit in line["digests"] if "experts" in unit} for line in first]
    return any(units != held[0] for units in held)


@pytest.mark.slow
@pytest.mark.parametrize("options", [PP2, INTERLEAVED], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize(
    ("workers", "extra"),
    [(6, {}), (4, {"saving": EVERY_STEP, "recovery": {"min_replicas": 1}})],
    ids=["live", "snapshots"],
)
def test_a_rank_is_lost_after_experts_have_moved_in_its_stage(
    tmp_path: Path, workers: int, extra: dict[str, Any], options: dict[str, Any]
) -> None:
    """The survivors know where the experts of all stages are by then; those that come back balance on."""
    model, strategy = {**MODEL, **SKEWED}, {**options["strategy"], "slots": 6}
    (calm := tmp_path / "calm").mkdir()
    with elastic_run(calm, workers=2, steps=STEPS, strategy=PP2["strategy"], model=model) as run:
        finish(run, range(2))
        expected = run.losses()
    (folder := tmp_path / "faulty").mkdir()
    case = {"strategy": strategy, "model": model, "callbacks": balancer, **extra}
    holds = [Hold(step=6, ranks=workers)]
    with elastic_run(folder, workers=workers, steps=STEPS, kills=[lose(2, "exchange")], holds=holds, **case) as run:
        run.supervise(restart=range(workers))
        assert run.kills_done() == 1
        assert run.losses() == pytest.approx(expected, abs=1e-5)
        assert any(moved(run, worker) for worker in range(workers))
        assert run.world_sizes()[STEPS] == workers
        assert run.assert_replicas_equal() > 0


BESIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (4, {"dense": "zero1"}),
    "fsdp": (4, {"dense": "fsdp"}),
    "hsdp": (8, {"dense": "hsdp"}),
    "cp": (8, {"mesh": {"cp": 2}}),
    "tp": (8, {"mesh": {"tp": 2}}),
    "cp4": (4, {"mesh": {"cp": 2}}),
    "tp4": (4, {"mesh": {"tp": 2}}),
    "tp_zero1": (8, {"mesh": {"tp": 2}, "dense": "zero1"}),
    "tp_fsdp": (8, {"mesh": {"tp": 2}, "dense": "fsdp"}),
}
"""Ranks in two stages, and what is beside them."""


PLACES = ["forward", "exchange", "backward", "prepare", "update", "committed"]


@pytest.mark.parametrize(
    ("place", "beside"),
    [("backward", "fsdp"), *(slow(place, b) for place in PLACES for b in BESIDE if (place, b) != ("backward", "fsdp"))],
)
def test_stages_beside_other_axes(tmp_path: Path, undisturbed: dict[int, float], place: str, beside: str) -> None:
    """A rank is lost and comes again; where nobody else has what it had, that comes from snapshots."""
    ranks, strategy = BESIDE[beside]
    strategy = {**strategy, "mesh": {"pp": 2, **strategy.get("mesh", {})}, "micro_batches": 2}
    is_copied = beside in ("hsdp", "cp", "tp", "cp4")
    saving, holds = (None, []) if is_copied else (EVERY_STEP, [STORED])
    holds.append(Hold(step=6, ranks=ranks))
    options = {"kills": [lose(1, place)], "holds": holds, "saving": saving, "model": MODEL}
    with elastic_run(tmp_path, workers=ranks, steps=STEPS, strategy=strategy, **options) as run:
        run.supervise(restart=range(ranks))
        assert run.kills_done() == 1
        assert run.losses() == pytest.approx(undisturbed, abs=1e-5)
        assert run.world_sizes()[STEPS] == ranks
        assert "zero1" in beside or run.assert_replicas_equal() > 0
        assert not (is_copied and any(report["steps_lost"] for report in run.reports()))
