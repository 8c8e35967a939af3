"""Live recoveries on a fake device whose aborted collectives end as NCCL's do: survivors go on in the same process, the
killed come back, and losses are those of the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference
from tests.gpu.fake_elastic import options
from tests.parameters import slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "workers"),
    [
        (("backward",), 2),
        slow(("forward", "exchange", "prepare", "update"), 2),
        slow(("forward", "exchange", "backward", "prepare", "update"), 3),
    ],
)
def test_survivors_go_on_and_the_killed_come_back(tmp_path: Path, places: tuple[str, ...], workers: int) -> None:
    """A rank is killed at each place, two steps apart."""
    kills = [Kill(worker=(1 + index) % workers, step=1 + 2 * index, place=place) for index, place in enumerate(places)]
    holds = [Hold(step=2 + 2 * index, ranks=workers) for index in range(len(places))]
    steps = 2 + 2 * len(places)
    with elastic_run(tmp_path, workers=workers, steps=steps, kills=kills, holds=holds, **options()) as run:
        run.supervise(restart=range(workers))
        assert run.kills_done() == len(places)
        assert_same_losses(run, reference(steps))
        assert run.assert_replicas_equal() > 0
        lost = [report for report in run.reports() if report["lost_ranks"]]
        assert lost
        assert all(report["steps_lost"] == 0 for report in lost)


@pytest.mark.slow
def test_a_recovery_locks_no_memory_again(tmp_path: Path) -> None:
    """Buffers of snapshots, and copies of dense parameters for updates on the host."""
    chosen = {"strategy": {"offload_optimizer": True}, "saving": {"every_n_steps": 1}, "holds": [Hold(step=3, ranks=2)]}
    kill = Kill(worker=1, step=2, place="backward")
    with elastic_run(tmp_path, workers=2, steps=5, kills=[kill], **chosen, **options()) as run:
        run.supervise(restart=[1])
        assert run.kills_done() == 1
    lines = [[json.loads(line) for line in path.open()] for path in tmp_path.glob("locked-*.jsonl")]
    steps = next(found for found in lines if found[0]["step"] == 1 and found[-1]["step"] == 5)
    assert {line["ranks"] for line in steps} == {1, 2}
    assert {line["bytes"] for line in steps if line["step"] >= 2} == {steps[1]["bytes"]}, steps
