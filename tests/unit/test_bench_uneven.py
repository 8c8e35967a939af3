"""moe-bench uneven: the figures follow from what was measured, wrong options are sentences, and it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import uneven
from tests.options import options_of


def parse(*arguments: str) -> uneven.Options:
    return options_of(uneven.Options, *arguments)


def row(scenario: str, contender: str, step_s: float, **changes: Any) -> dict[str, Any]:
    steps = {"step_s": [[9.0] * 8 + [step_s] * 8] * 2, "own_s": [[step_s / 2] * 16, [step_s] * 16]}
    return {"round": 0, "scenario": scenario, "contender": contender, "samples": [[8] * 16, [4] * 16]} | steps | changes


def test_the_ideal_divides_the_calm_step_by_the_speeds() -> None:
    rows = [row("calm", "even", 0.3), row("calm", "both", 0.303), row("half", "even", 0.6), row("half", "both", 0.42)]
    found = uneven.summaries(rows)
    assert found["half", "even"]["over_ideal"] == pytest.approx(1.5)
    assert found["half", "both"]["over_ideal"] == pytest.approx(1.05)
    assert found["half", "both"]["own_s_0"] == pytest.approx(0.21)
    assert found["half", "both"]["samples"] == 4
    assert uneven.goals(found) == [
        "met     step over the ideal, one rank at half speed: 1.050, goal at most 1.10; even: 1.500",
        "met     step over that of even speeds, calm: 1.010, goal at most 1.01; even: 1.000",
    ]
    assert len(uneven.format_table(found).splitlines()) == 5
    bars = [bar for bar in uneven.picture(found).axes[0].patches if bar.get_height() > 0]
    assert len(bars) == 4 * 2
    episode = row("episode", "both", 0.5)
    assert len(uneven.episode_picture([*rows, episode]).axes[0].lines) >= 1
    assert uneven.counted("episode", 64) == slice(32, 40)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, drawn = tmp_path / "rows.json", tmp_path / "own.svg"
    small = "--batch 2 --context 16 --d-model 16 --d-expert 16 --layers 1 --experts 4 --slots 3 --steps 24"
    some = ("--scenarios", "calm", "episode", "--contenders", "even", "both")
    assert uneven.run(parse(*small.split(), *some, "--json", str(path), "--picture", str(drawn))) == 0
    rows = json.loads(path.read_text())
    assert [(row["scenario"], row["contender"]) for row in rows] == [
        (scenario, contender) for scenario in ("calm", "episode") for contender in ("even", "both")
    ]
    assert all(sum(counts) == 4 for row in rows for counts in zip(*row["samples"], strict=True))
    assert "step over that of even speeds, calm" in capfd.readouterr().out
    assert drawn.read_text().startswith("<svg")
