"""A process that outlives many worlds holds no more open than after the first of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference


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
def test_nothing_leaks_over_8_recoveries(tmp_path: Path) -> None:
    run_recoveries(tmp_path, 4)  # asserts what stays


@pytest.mark.slow
def test_nothing_leaks_over_50_recoveries(tmp_path: Path) -> None:
    run_recoveries(tmp_path, 25)  # asserts what stays
