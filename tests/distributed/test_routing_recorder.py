"""What is recorded is what was routed, replays as it was, and continues after a restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig, RoutingReplay
from moe_lightning.callbacks.routing import RoutingRecorder
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity
from moe_lightning.moe.replayed_routing import TokenRange, read_samples
from tests.distributed.harness import RankFailure, run_pooled, run_refused
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer, train

SKEWED = {"router": {"forced": {"kind": "drift", "exponent": 2.0, "period": 8}}}
TOKENS = 12 * 16 * 2
"""Assignments of a step: sequences, positions, choices."""


def record(path: Path, world_size: int, every: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    callbacks = [RoutingRecorder(str(path), every_n_steps=every)]
    run_pooled(world_size, partial(train, callbacks=callbacks, model=SKEWED, **options))
    with np.load(path, allow_pickle=False) as archive:
        return archive["counts"], archive["iteration"]


def test_a_recording_holds_every_assignment_and_replays(tmp_path: Path) -> None:
    counts, iterations = record(tmp_path / "a.npz", 2, every=3, steps=8)
    assert iterations.tolist() == [1, 4, 7]
    assert counts.shape == (3, 2, 2, 6)
    assert counts.dtype == np.uint16
    assert (counts.sum(axis=(2, 3)) == TOKENS).all()
    truth = Popularity(ForcedRouting(kind="drift", exponent=2.0, period=8), 6, 1)
    replay = Popularity(ForcedRouting(kind="trace", path=str(tmp_path / "a.npz")), 6, 1)
    capped = np.minimum(truth.at(6), 0.5)  # of two choices a token gives one at most to the hottest expert
    np.testing.assert_allclose(replay.at(6), capped / capped.sum(), atol=0.06)
    (other := tmp_path / "other").touch()
    assert (tmp_path / "a.npz").stat().st_mode == other.stat().st_mode, "others of the project may read no trace"


def test_micro_batches_are_summed(tmp_path: Path) -> None:
    trainer = {"accumulate_grad_batches": 3}
    counts, iterations = record(tmp_path / "b.npz", 2, steps=2, batch_size=4, trainer=trainer)
    assert iterations.tolist() == [1, 2]
    assert (counts.sum(axis=(2, 3)) == TOKENS).all()


@pytest.mark.slow
def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "c.npz", str(tmp_path / "c.ckpt")
    whole, _ = record(tmp_path / "whole.npz", 2, steps=6)
    record(path, 2, steps=4, save_to=checkpoint)
    counts, iterations = record(path, 2, steps=6, ckpt_path=checkpoint)
    assert iterations.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(counts, whole)
    with pytest.raises(RankFailure, match=r"recorded with \(2, 2, 6\) \(layers, ranks, experts\), but this run has"):
        record(path, 3, steps=6, ckpt_path=checkpoint)
    assert list(tmp_path.glob(".*")) == []


# ----------------------------------------------------------------------
# A training that takes the routing of another one, on other numbers of ranks.


STEPS, BATCH = 4, 6


def fit(rank: int, world_size: int, replays: list[tuple[str, Any]], lr: float) -> list[float]:
    recorder = Recorder()
    callbacks = [recorder, *(RoutingReplay(path, mode) for path, mode in replays)]
    trainer = make_trainer(
        rank, world_size, {"seed": 1}, max_steps=STEPS, callbacks=callbacks, accumulate_grad_batches=2
    )
    module = GPTModule({**TINY, "router": {"top_k": 2, "jitter": 0.2}}, OptimizerConfig(lr=lr, warmup_steps=2))
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=BATCH, shuffle=True))
    return recorder.losses


@pytest.mark.slow
def test_the_same_tokens_take_the_same_experts_on_any_ranks(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    (plain,) = run_pooled(1, fit, [(first, "record")], 3e-3)
    one = run_pooled(1, fit, [(first, "replay")], 3e-3)[0]
    two = run_pooled(2, fit, [(first, "replay")], 3e-3)[0]
    assert one == plain
    assert two == pytest.approx(plain, abs=1e-5)
    run_pooled(2, fit, [(second, "record")], 3e-2)
    for step in range(STEPS):
        at = TokenRange(step=step, first_sample=0)
        ours, theirs = (read_samples(tmp_path / name, at, 2 * BATCH) for name in ("first", "second"))
        assert ours.shape == (12, 16, 2, 2)
        if step == STEPS - 1:
            assert not (ours == theirs).all(), "another learning rate would have routed otherwise"
    (forced,) = run_pooled(1, fit, [(first, "replay")], 3e-2)
    assert run_pooled(3, fit, [(first, "replay")], 3e-2)[0] == pytest.approx(forced, abs=1e-5)


def test_steps_that_are_recorded_again_on_fewer_ranks_hold_nothing_of_the_first_attempt(tmp_path: Path) -> None:
    again, alone = tmp_path / "again", tmp_path / "alone"
    again.mkdir()
    (other := again / "notes.txt").touch()
    run_pooled(2, fit, [(str(again), "record")], 3e-3)
    run_pooled(1, fit, [(str(again), "record"), (str(alone), "record")], 3e-2)
    assert other.exists()
    for step in range(STEPS):
        at = TokenRange(step=step, first_sample=0)
        assert (read_samples(again, at, 2 * BATCH) == read_samples(alone, at, 2 * BATCH)).all(), step


def test_the_end_of_a_recording_is_a_sentence(tmp_path: Path) -> None:
    folder = str(tmp_path / "routing")
    run_pooled(1, fit, [(folder, "record")], 3e-3)
    for path in (tmp_path / "routing").glob("step-00000003*"):
        path.unlink()
    (said,) = run_refused(1, fit, [(folder, "replay")], 3e-3)
    assert "no routing of sample 0 of step 3 in whole" in said
