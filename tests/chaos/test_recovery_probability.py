"""The share of failed sets that a small world really survives without storage is what the placement code computes."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recovery_probability import recovery_probabilities
from tests.chaos.elastic_runs import Kill, elastic_run
from tests.forks import PATIENCE_S

NODES = 4
PAIRS = ((0, 1), (2, 3), (0, 2), (0, 1), (2, 3), (0, 2))
"""The nodes of each expert."""


def survives(folder: Path, lost: tuple[int, ...]) -> bool:
    """Whether a run goes on when these nodes are killed at once."""
    folder.mkdir()
    table = [[int(node in pair) for node in range(NODES)] for pair in PAIRS]
    kills = [Kill(worker=worker, step=2, place="forward") for worker in lost]
    with elastic_run(folder, workers=NODES, steps=4, kills=kills, strategy={"placement": table}) as run:
        deadline = time.monotonic() + PATIENCE_S
        while len(codes := run.reap(range(NODES))) < NODES:
            assert time.monotonic() < deadline, (lost, codes)
            time.sleep(0.02)
        assert all(codes[worker] < 0 for worker in lost)
        codes_left = {codes[worker] for worker in range(NODES) if worker not in lost}
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
