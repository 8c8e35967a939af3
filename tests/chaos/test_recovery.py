"""Recovery from live replicas: workers are killed at every place of a step, and the losses are those of a quiet run."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from benchmarks.recovery_probability import recovery_probabilities
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.checkpoint.loader import find_newest
from tests.chaos.elastic_runs import SETTINGS, Hold, Kill, assert_same_losses, elastic_run, reference
from tests.chaos.elastic_worker import checkpoints_of
from tests.forks import wait_until
from tests.parameters import slow

STEPS = 24


@pytest.mark.slow
def test_kills_at_every_place_of_a_step_and_at_the_borders_of_a_run(tmp_path: Path) -> None:
    """The first step, epochs' ends (8 steps each), the last step and the end of training, rank 0 among the victims."""
    places = (
        (0, 0, "backward"), (3, 3, "exchange"), (1, 7, "committed"), (2, 8, "forward"), (3, 12, "prepare"),
        (0, 16, "update"), (2, 20, "batch_end"), (1, STEPS, "train_end"),
    )  # fmt: skip
    kills = [Kill(worker=w, step=s, place=p) for w, s, p in places]
    options: dict[str, Any] = {"kills": kills, "holds": [Hold(step=9, ranks=4)], "saving": {"every_n_steps": 5}}
    with elastic_run(tmp_path, workers=4, steps=STEPS, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(STEPS), has_replicas=True)
        assert len({r["began_at"] for r in run.reports()}) >= len(kills) - 1, "nobody recovers from the last one"
        found = find_newest(checkpoints_of(tmp_path)).checkpoint
        assert found.step == STEPS, "survivors of the end save the last step"
        found.verify()


@pytest.mark.slow
def test_one_machine_gets_its_replicas_back_after_every_kill(tmp_path: Path) -> None:
    """All ranks share a node, and nothing is saved: each death finds what it takes on another rank."""
    kills = [Kill(worker=w, step=s, place="forward") for w, s in ((1, 3), (2, 7), (0, 11))]
    holds = [Hold(step=step, ranks=3) for step in (5, 9)]
    with elastic_run(tmp_path, workers=3, steps=14, workers_a_node=3, kills=kills, holds=holds) as run:
        run.supervise(restart=range(3))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(14), has_replicas=True)
        deaths = [report for report in run.reports() if report["lost_ranks"]]
        assert {(r["steps_lost"], r["stale_experts"], r["min_replicas"]) for r in deaths} == {(0, 0, 2)}


@pytest.mark.slow
def test_a_rank_that_dies_when_all_has_arrived_takes_nothing_with_it(tmp_path: Path) -> None:
    """The others are whole in a world that never trained; nothing is saved."""
    kills = [Kill(worker=3, step=5, place="forward"), Kill(worker=2, step=5, place="arrived")]
    with elastic_run(tmp_path, workers=4, steps=10, kills=kills) as run:
        run.supervise()
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(10))


@pytest.mark.slow
def test_during_validation_and_recovery_and_two_at_once(tmp_path: Path) -> None:
    """Two of four nodes at once are within what three replicas survive."""
    kills = [
        Kill(worker=0, step=3, place="backward"),
        Kill(worker=3, step=3, place="recovery"),
        Kill(worker=1, step=8, place="validation"),
        Kill(worker=1, step=12, place="prepare"),
        Kill(worker=2, step=12, place="prepare"),
        Kill(worker=3, step=15, place="forward"),  # a world that somebody asked to join at step 13 changes after 14
        Kill(worker=0, step=15, place="movement"),
    ]
    holds = [Hold(step=6, ranks=4)]
    options = {"recovery": {"min_replicas": 3}, "holds": holds, "validate": True, "kills": kills}
    with elastic_run(tmp_path, workers=4, steps=STEPS, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(STEPS, validate=True), has_replicas=True)


@pytest.mark.slow
def test_what_follows_on_an_epochs_last_step_is_not_left_out(tmp_path: Path) -> None:
    """Validations, ends of epochs and what plateaus make of them, with faults before, in and after them."""
    kills = [
        Kill(worker=3, step=3, place="forward"),
        Kill(worker=1, step=8, place="validation"),
        Kill(worker=2, step=15, place="committed"),
        Kill(worker=0, step=24, place="forward"),
        Kill(worker=3, step=32, place="batch_end"),
    ]
    holds = [Hold(step=step, ranks=4) for step in (6, 12, 20, 28, 30)]
    options = {"validate": True, "plateau": True}
    with elastic_run(tmp_path, workers=4, steps=44, kills=kills, holds=holds, **options) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(44, **options))
        assert run.epochs() == {0: 8, 1: 16, 2: 24, 3: 32, 4: 40, 5: 44}
        assert run.assert_replicas_equal() > 0


@pytest.mark.slow
def test_a_fault_before_the_first_step_validates_nothing(tmp_path: Path) -> None:
    kills = [Kill(worker=1, step=0, place="opening")]
    with elastic_run(tmp_path, workers=2, steps=10, kills=kills, validate=True) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == 1
        assert_same_losses(run, reference(10, validate=True))


@pytest.mark.slow
def test_newcomers_validate_with_those_who_did_before(tmp_path: Path) -> None:
    """They make their loaders while they set up, so that no barrier of it meets the others' messages. The epoch in
    which they join ends without a validation of its own, and learning rates follow the one before.
    """
    options: dict[str, Any] = {"validate": True, "plateau": True, "trainer_options": {"check_val_every_n_epoch": 2}}
    kills, holds = [Kill(worker=1, step=18, place="forward")], [Hold(step=20, ranks=2)]
    with elastic_run(tmp_path, workers=2, steps=34, kills=kills, holds=holds, **options) as run:
        run.supervise(restart=range(2))
        assert_same_losses(run, reference(34, **options))
        assert run.validations().keys() == {16, 32}
        assert run.assert_replicas_equal() > 0


def best_and_last(folder: Path) -> list[pl.Callback]:
    saver = ModelCheckpoint(folder / "best", monitor="val/loss", every_n_train_steps=1, save_top_k=-1, save_last=True)
    return [saver]


@pytest.mark.slow
def test_newcomers_save_with_those_who_did_before(tmp_path: Path) -> None:
    """They know the loss of a validation that was before them, without which nothing is saved."""
    options: dict[str, Any] = {"validate": True, "callbacks": best_and_last}
    options["trainer_options"] = {"check_val_every_n_epoch": 2, "enable_checkpointing": True}
    kills, holds = [Kill(worker=1, step=18, place="forward")], [Hold(step=20, ranks=2)]
    with elastic_run(tmp_path, workers=2, steps=24, kills=kills, holds=holds, **options) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == 1
        assert_same_losses(run, reference(24, **options))
    steps = {int(path.stem.rpartition("=")[2]) for path in (tmp_path / "best").glob("epoch=*.ckpt")}
    assert steps >= {*range(17, 25)}


class Stopping(pl.Callback):
    """Asks for the end of training at a step, as EarlyStopping does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == self._step


def stopping(folder: Path, *, step: int) -> list[pl.Callback]:
    return [Stopping(step)]


@pytest.mark.slow
def test_newcomers_stop_with_those_who_were_asked_to_before(tmp_path: Path) -> None:
    """Training goes on up to `min_steps`, and a rank is lost and replaced meanwhile."""
    kills, holds = [Kill(worker=1, step=6, place="forward")], [Hold(step=8, ranks=2)]
    options: dict[str, Any] = {"callbacks": partial(stopping, step=4), "trainer_options": {"min_steps": 12}}
    with elastic_run(tmp_path, workers=2, steps=24, kills=kills, holds=holds, **options) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == 1
        assert_same_losses(run, reference(12))


@pytest.mark.slow
def test_a_stop_is_decided_again_after_a_snapshot(tmp_path: Path) -> None:
    """The survivor was asked to stop, and no rank validates at the snapshot's step."""
    kills, callbacks = [Kill(worker=1, step=7, place="validation")], partial(stopping, step=7)
    options: dict[str, Any] = {"callbacks": callbacks, "saving": {"every_n_steps": 5}, "validate": True}
    with elastic_run(tmp_path, workers=2, steps=24, kills=kills, recovery={"min_replicas": 1}, **options) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == 1
        assert_same_losses(run, reference(24, callbacks=callbacks, validate=True))


@pytest.mark.slow
def test_a_validation_is_made_again_from_a_snapshot(tmp_path: Path) -> None:
    """Without replicas the world goes back to the snapshot before or after the epoch's last step."""
    options: dict[str, Any] = {"validate": True, "plateau": True, "saving": {"every_n_steps": 1}}
    kills = [Kill(worker=1, step=8, place="validation"), Kill(worker=0, step=12, place="backward")]
    with elastic_run(tmp_path, workers=2, steps=18, kills=kills, recovery={"min_replicas": 1}, **options) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(18, validate=True, plateau=True))
        assert run.epochs() == {0: 8, 1: 16, 2: 18}


KILLS = [Kill(worker=1, step=5, place="exchange"), Kill(worker=0, step=11, place="prepare")]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        slow({"trainer_options": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}}, 1e-5),
        slow({"trainer_options": {"precision": "bf16-mixed"}}, 2e-2),
        slow({"model": {"router": {"top_k": 1}}, "global_batch": 10}, 1e-5),
        slow({"model": {"router": {"jitter": 0.1}, "num_experts": 7}, "global_batch": 10}, 1e-5),
    ],
    ids=["accumulation", "bf16", "top1-uneven-batch", "noise-7-experts"],
)
def test_ways_to_train(tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    with elastic_run(tmp_path, workers=3, steps=16, kills=KILLS, holds=[Hold(step=7, ranks=3)], **options) as run:
        run.supervise(restart=range(3))
        assert run.kills_done() == 2
        assert_same_losses(run, reference(16, **options), tolerance, has_replicas=True)


def with_schedule(folder: Path) -> list[Any]:
    return [GradientAccumulationScheduler({0: 2})]


@pytest.mark.slow
def test_a_schedule_of_accumulation_is_gone_on_with(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kills": KILLS, "holds": [Hold(step=7, ranks=3)]}
    with elastic_run(tmp_path, workers=3, steps=16, callbacks=with_schedule, **options) as run:
        run.supervise(restart=range(3))
        assert run.kills_done() == 2
        assert_same_losses(run, reference(16, trainer_options={"accumulate_grad_batches": 2}))


@pytest.mark.slow
def test_from_4_to_3_to_2_to_4_ranks(tmp_path: Path) -> None:
    """With two replicas of each of 7 experts and a global batch of 10."""
    kills = [Kill(worker=3, step=4, place="forward"), Kill(worker=2, step=8, place="forward")]
    options: dict[str, Any] = {"model": {"num_experts": 7}, "global_batch": 10}
    with elastic_run(tmp_path, workers=4, steps=18, kills=kills, holds=[Hold(step=11, ranks=4)], **options) as run:
        while run.kills_done() < 2 or any(run.processes[worker].is_alive() for worker in (2, 3)):
            time.sleep(0.02)
        run.reap([2, 3])
        for worker in (2, 3):
            run.start(worker)
        run.supervise()
        sizes = list(run.world_sizes().values())
        assert list(dict.fromkeys(sizes[:9])) == [4, 3, 2]
        assert sizes[-1] == 4
        assert_same_losses(run, reference(18, **options), has_replicas=True)


@pytest.mark.slow
def test_a_stopped_rank_is_evicted_and_comes_back(tmp_path: Path) -> None:
    """Law L6: the others go on within the silence timeout; the stopped one comes back as a new member."""
    kills = [Kill(worker=1, step=5, place="forward", signal=signal.SIGSTOP)]
    with elastic_run(tmp_path, workers=3, steps=16, kills=kills, holds=[Hold(step=9, ranks=3)]) as run:
        wait_until(lambda: run.recoveries(0))
        stopped_at = float(next(tmp_path.glob("kill-1-*")).read_text())
        report = run.recoveries(0)[0]["report"]
        assert report["ranks_after"] == 2
        went_on_at = report["began_at"] + report["seconds"]["total"]
        assert went_on_at - stopped_at < SETTINGS.silence_timeout_s + SETTINGS.heartbeat_timeout_s + 3.0
        run.signal(1, signal.SIGCONT)
        run.supervise()
        assert run.result(1)["world_size"] == 3
        assert_same_losses(run, reference(16), has_replicas=True)


@pytest.mark.slow
def test_the_only_rank_is_evicted_and_goes_on(tmp_path: Path) -> None:
    """Its connections end nothing, and nobody else has its state: it joins again with it."""
    stops = [Kill(worker=0, step=3, place="forward", signal=signal.SIGSTOP)]
    settings = replace(SETTINGS, silence_timeout_s=1.0)
    with elastic_run(tmp_path, workers=1, steps=STEPS, kills=stops, settings=settings) as run:
        wait_until(run.kills_done)
        time.sleep(settings.silence_timeout_s + 1.0)
        run.signal(0, signal.SIGCONT)
        run.supervise()
        (report,) = run.reports()
        assert "stopped answering" in report["reason"]
        assert (report["ranks_after"], report["lost_ranks"], report["steps_lost"]) == (1, [0], 0)
        assert_same_losses(run, reference(STEPS))


class WatchedBalancer(LoadBalancer):
    """Writes what it plans from after every step."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**{"shadows": "top2", "rebalance_every": 3, "min_replicas": 2, "calibrate": False, **options})
        self._file = (folder / f"planner-{os.getpid()}.jsonl").open("a", buffering=1)

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        strategy = trainer.strategy
        if self.planner is not None and strategy.elastic.members is not None:
            costs = [asdict(each.at(None)) for each in self.planner.costs]
            known = self.planner.state_dict(), self.planner.cluster.speeds, costs
            line = [strategy.elastic.members.name, trainer.global_step, known]
            self._file.write(json.dumps(line) + "\n")


def with_balancer(folder: Path) -> list[Any]:
    return [WatchedBalancer(folder)]


def assert_planners_agree(folder: Path) -> None:
    states: dict[tuple[str, int], Any] = {}
    lines = [json.loads(line) for path in folder.glob("planner-*.jsonl") for line in path.read_text().splitlines()]
    for world, step, state in lines:
        assert states.setdefault((world, step), state) == state, f"ranks would move different experts after step {step}"
    assert len(lines) > len(states) > 0


def test_while_experts_move_and_visit(tmp_path: Path) -> None:
    """A balancer plans new placements every three steps and lets experts visit other ranks in every step."""
    kills = [Kill(worker=1, step=4, place="exchange"), Kill(worker=0, step=7, place="prepare")]
    options: dict[str, Any] = {"kills": kills, "holds": [Hold(step=5, ranks=3)], "strategy": {"slots": 6}}
    with elastic_run(tmp_path, workers=3, steps=10, callbacks=with_balancer, **options) as run:
        run.supervise(restart=range(3))
        assert run.kills_done() == 2
        assert_planners_agree(tmp_path)
        assert_same_losses(run, reference(10), has_replicas=True)


def with_measured_costs(folder: Path) -> list[Any]:
    return [WatchedBalancer(folder, calibrate=True)]


@pytest.mark.slow
def test_ranks_join_while_others_time_their_dense_layers(tmp_path: Path) -> None:
    """Within the first six steps: the clocks of those that were there before end with their world."""
    kills, holds = [Kill(worker=1, step=2, place="backward")], [Hold(step=4, ranks=3)]
    options: dict[str, Any] = {"kills": kills, "holds": holds, "strategy": {"slots": 6}}
    with elastic_run(tmp_path, workers=3, steps=14, callbacks=with_measured_costs, **options) as run:
        run.supervise(restart=range(3))
        assert_planners_agree(tmp_path)
        assert_same_losses(run, reference(14))
        assert len(run.recoveries(0)) == 2, "a death and a return"


# ----------------------------------------------------------------------
# A process that outlives many worlds holds no more open than after the first of them.


def run_recoveries(folder: Path, deaths: int) -> None:
    """Each death is followed by a return: one recovery or two."""
    steps = 4 + 2 * deaths
    kills = [Kill(worker=1 + index % 2, step=2 + 2 * index, place="backward") for index in range(deaths)]
    options: dict[str, Any] = {"kills": kills, "holds": [Hold(step=1, ranks=3)], "saving": {"every_n_steps": 1}}
    with elastic_run(folder, workers=3, steps=steps, **options) as run:
        run.supervise(restart=range(3), timeout_s=60.0 + 20.0 * deaths)
        assert run.kills_done() == deaths
        assert_same_losses(run, reference(steps))
        survivor = run.recoveries(0)
        assert len({line["pid"] for line in survivor}) == 1
        assert len(survivor) >= deaths  # a quick return makes the next world together with the survivors
        full = [line["open"] for line in survivor if line["report"]["ranks_after"] == 3]
        second, last = full[1], full[-1]
        grown = {kind: (second.get(kind, 0), count) for kind, count in last.items() if count > second.get(kind, 0)}
        assert not grown, grown


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, 25])
def test_nothing_leaks_over_many_recoveries(tmp_path: Path, rounds: int) -> None:
    run_recoveries(tmp_path, rounds)  # asserts what stays


# ----------------------------------------------------------------------
# The share of failed sets that a small world really survives without storage is what the placement code computes.


NODES = 4
PAIRS = ((0, 1), (2, 3), (0, 2), (0, 1), (2, 3), (0, 2))
"""The nodes of each expert."""


def survives(folder: Path, lost: tuple[int, ...]) -> bool:
    """Return whether a run goes on when these ranks, each on a node of its own, are killed at once."""
    folder.mkdir()
    table = [[int(node in pair) for node in range(NODES)] for pair in PAIRS]
    kills = [Kill(worker=-1, rank=rank, step=2, place="forward", beside=lost) for rank in lost]
    with elastic_run(folder, workers=NODES, steps=4, kills=kills, strategy={"placement": table}) as run:
        wait_until(lambda: len(run.reap(range(NODES))) == NODES)
        codes = list(run.reap(range(NODES)).values())
        assert sum(code < 0 for code in codes) == len(lost)
        codes_left = {code for code in codes if code >= 0}
        assert len(codes_left) == 1, "survivors decide alike"
        if codes_left == {0}:
            return True
        assert "no rank, snapshot or checkpoint holds every expert" in run.words()
        return False


def check(folder: Path, failures: int) -> None:
    sets = list(combinations(range(NODES), failures))
    outcomes = [survives(folder / "-".join(map(str, lost)), lost) for lost in sets]
    table = np.array([[int(node in pair) for node in range(NODES)] for pair in PAIRS], dtype=np.int64)
    assert np.mean(outcomes) == pytest.approx(float(recovery_probabilities([table])[failures]))


@pytest.mark.slow
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_computed_recovery_probability_is_the_share_of_real_recoveries(tmp_path: Path, failures: int) -> None:
    check(tmp_path, failures)
