"""What is recorded is what was routed, replays as it was, and continues after a restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_lightning.callbacks.routing import RoutingRecorder
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.training import train

SKEWED = {"router": {"forced": {"kind": "drift", "exponent": 2.0, "period": 8}}}
TOKENS = 12 * 16 * 2
"""Assignments of a step: sequences, positions, choices."""


def record(path: Path, world_size: int, every: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    callbacks = [RoutingRecorder(str(path), every_n_steps=every)]
    run_ranks(world_size, partial(train, callbacks=callbacks, model=SKEWED, **options))
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


def test_micro_batches_are_summed(tmp_path: Path) -> None:
    trainer = {"accumulate_grad_batches": 3}
    counts, iterations = record(tmp_path / "b.npz", 2, steps=2, batch_size=4, trainer=trainer)
    assert iterations.tolist() == [1, 2]
    assert (counts.sum(axis=(2, 3)) == TOKENS).all()


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
