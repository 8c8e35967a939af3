"""moe-bench balance: the skews are those that it states, the goals judge what was measured, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import balance
from moe_lightning.balancing.cluster import imbalance
from moe_lightning.cli.short_training import most_skewed
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.errors import ConfigurationError
from tests.options import options_of

ROW = {
    "step_s": 0.1,
    "cpu_s": 0.1,
    "imbalance_before": 1.0,
    "imbalance_after": 1.0,
    "balance_ratio": 1.0,
    "exchange_bytes": 0.0,
    "copy_bytes": 0.0,
    "exposed_trans_s": 0.0,
    "exposed_agg_s": 0.0,
    "expected_copy_s": 0.0,
    "expected_exposed_s": 0.0,
}


def parse(*arguments: str) -> balance.Options:
    return options_of(balance.Options, *arguments)


@pytest.mark.parametrize("num_experts", [2, 8, 32])
def test_skews_load_two_ranks_as_they_say(num_experts: int) -> None:
    skews = balance.skews(num_experts, [2, 4, 8])
    assert list(skews) == ["uniform", "2:1", "4:1", "8:1"]
    for name, shares in skews.items():
        rows = shares @ uniform_placement(num_experts, 2).replicas
        ratio = 1 if name == "uniform" else int(name.partition(":")[0])
        assert rows[0] / rows[1] == pytest.approx(ratio)
        assert shares.sum() == pytest.approx(1)


def test_the_most_skewed_settled_layer_is_found(tmp_path: Path) -> None:
    counts = np.full((3, 2, 2, 4), 10, dtype=np.uint16)
    counts[0, 0, :, 0] = 1000  # most skewed, but before routing has settled
    counts[2, 1, :, :2] = 50
    path = tmp_path / "trace.npz"
    np.savez(path, counts=counts, iteration=np.array([1, 700, 800], dtype=np.int32))
    shares = most_skewed(path, 4)
    assert shares.tolist() == pytest.approx([5 / 12, 5 / 12, 1 / 12, 1 / 12])
    assert imbalance(np.round(1000 * shares).astype(int) @ uniform_placement(4, 2).replicas) > 1.6
    with pytest.raises(ConfigurationError, match="holds no 6 experts after iteration 600"):
        most_skewed(path, 6)


def test_goals_judge_what_was_measured() -> None:
    medians = {
        ("uniform", "plain"): ROW,
        ("uniform", "ours"): ROW | {"step_s": 0.101, "cpu_s": 0.103},
        ("8:1", "plain"): ROW | {"step_s": 0.18},
        ("8:1", "ours"): ROW | {"step_s": 0.12},
        ("8:1", "top2"): ROW | {"expected_copy_s": 0.01, "expected_exposed_s": 0.001, "exposed_agg_s": 0.004},
    }
    own, skewed, hidden = balance.goals(medians)
    assert own == "met     own cost under uniform routing: 0.010 (processor time 0.030), goal at most 0.02"
    assert skewed.startswith("missed  step under 8:1 over uniform: 1.188 (processor time 0.971)")
    assert skewed.endswith("goal at most 1.10; plain: 1.80")
    assert hidden == "missed  copies hidden, top2 under 8:1: 0.60 (the model says 0.90)"


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    small = "--batch 1 --context 16 --d-model 16 --d-expert 16 --layers 1 --experts 4 --slots 3 --steps 2 --ratios 8"
    options = parse(*small.split(), "--strategies", "plain", "top2", "--json", str(path))
    assert balance.run(options) == 0
    rows = {(row["skew"], row["strategy"]): row for row in json.loads(path.read_text())}
    assert set(rows) == {(skew, name) for skew in ("uniform", "8:1") for name in ("plain", "top2")}
    assert rows["8:1", "plain"]["imbalance_after"] > 1.5
    assert rows["8:1", "plain"]["copy_bytes"] == 0
    assert rows["8:1", "top2"]["copy_bytes"] > 0
    assert rows["8:1", "top2"]["imbalance_after"] < rows["8:1", "plain"]["imbalance_after"]
    assert all(row["step_s"] > 0 and row["cpu_s"] > 0 for row in rows.values())
    assert "copies hidden, top2 under 8:1" in capfd.readouterr().out
