"""Live recoveries on a fake device whose aborted collectives end as NCCL's do: survivors go on in the same process, the
killed come back, and losses are those of the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference
from tests.gpu.fake_elastic import options
from tests.parameters import slow


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
