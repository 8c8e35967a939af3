"""Published and own figures on a recorded routing trace: a sample of it by default, all of it with -m slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import balance_trace
from benchmarks.balance_trace import RoutingTrace, load_trace
from benchmarks.recovery_probability import recovery_probabilities
from moe_lightning.balancing import shadow_search
from moe_lightning.balancing.cluster import Cluster, allocate_replicas, imbalance
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.migration import align_placements, held_states, plan_migration
from moe_lightning.balancing.replica_placement import NODE_RULES
from moe_lightning.balancing.rules import SHADOW_POLICIES, PlacementPolicy, plan_placement, replan_placement
from moe_lightning.balancing.shadow_search import no_shadows, predict_plan, search_shadows
from moe_lightning.callbacks.routing_health import WINDOW, RoutingHealth
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan, balanced_quota
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity, read_routing_trace
from moe_lightning.simulate.workload import make_routing
from tests.options import options_of
from tests.parameters import slow
from tests.traces import recorded

STRIDES = [pytest.param(60, id="sample"), slow(2, id="whole")]
"""Samples between two that are looked at."""

NODES, SLOTS = 10, 6
SIXTEEN = uniform_placement(16, 16)
COSTS = replace(balance_trace.reference_costs(), transfer="average", scheduled=False)


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return load_trace(recorded())


def hottest(trace: RoutingTrace, sample: int, layer: int, experts: int) -> np.ndarray:
    """int64 [experts]: loads of a layer's hottest experts, descending."""
    return np.sort(trace.counts[sample, layer].sum(axis=0))[::-1][:experts]


def sixteen(trace: RoutingTrace, sample: int, layer: int) -> np.ndarray:
    """int64 [16, 16]: tokens [expert, rank] with neighbouring experts merged, one expert per rank as in Pro-Prophet."""
    counts: np.ndarray = trace.counts[sample, layer].T
    return counts.reshape(16, 2, 16).sum(axis=1)


@pytest.mark.parametrize("stride", [10, slow(1)])
@pytest.mark.parametrize(("experts", "eq1", "waterfill"), [(8, 1.28, 1.08), (16, 1.64, 1.40)])
def test_water_filling_lowers_the_busiest_replica(
    trace: RoutingTrace, stride: int, experts: int, eq1: float, waterfill: float
) -> None:
    for policy, expected in (("eq1", eq1), ("waterfill", waterfill)):
        busiest = []
        for sample in range(0, len(trace.counts), stride):
            for layer in range(trace.counts.shape[1]):
                load = hottest(trace, sample, layer, experts)
                replicas = allocate_replicas(load, slots=NODES * SLOTS, num_nodes=NODES, policy=policy)  # type: ignore[arg-type]
                busiest.append((load / replicas).max() * NODES * SLOTS / load.sum())
        assert np.mean(busiest) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("layers", [range(12), range(0, 24, 2)], ids=["first", "every-second"])
def test_recovery_of_sixteen_experts_matches_lazarus(trace: RoutingTrace, layers: range) -> None:
    """Iteration 201: 40.5 percent against 12.7 for spread with five failures; the paper prints 41 and 12 (for four)."""
    sample = int(np.flatnonzero(trace.iteration == 201)[0])
    loads = [hottest(trace, sample, layer, 16) for layer in layers]
    replicas = [allocate_replicas(load, slots=NODES * SLOTS, num_nodes=NODES, policy="eq1") for load in loads]
    recovery = {
        name: recovery_probabilities([NODE_RULES[name](counts, np.full(NODES, SLOTS)) for counts in replicas])
        for name in ("mro", "mro+", "spread", "compact")
    }
    assert recovery["mro"][[4, 5]] * [210, 252] == pytest.approx([129, 102])
    assert recovery["spread"][[4, 5]] * [210, 252] == pytest.approx([80, 32])
    assert recovery["compact"][3] == 0
    assert (recovery["mro+"] >= recovery["mro"]).all()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(("slots", "limit"), [(4, 1.02), (3, 1.16)])
def test_quotas_are_balanced_with_plans_fifty_iterations_old(
    trace: RoutingTrace, stride: int, slots: int, limit: float
) -> None:
    packed, plain = (
        balance_trace.judge(trace, name, slots_per_rank=slots, step=stride) for name in ("packed", "plain")
    )
    assert packed.imbalance <= limit
    assert packed.imbalance < 0.25 * plain.imbalance
    assert packed.plan_s < 0.1


def test_replanning_keeps_the_balance_with_a_fraction_of_the_migrations(trace: RoutingTrace) -> None:
    cluster, policy = Cluster.of(16, 4), PlacementPolicy(min_replicas=1)
    samples = range(60, len(trace.counts), 60)
    current = kept = plan_placement(trace.counts[samples[0]].sum(axis=1), cluster, policy)
    moved_always = moved = 0
    for sample in samples[1:]:
        loads = trace.counts[sample].sum(axis=1)
        fresh = align_placements(held_states(current), plan_placement(loads, cluster, policy), cluster)
        moved_always += len(plan_migration(held_states(current), fresh))
        current = fresh
        again = replan_placement(loads, cluster, [policy], kept)
        moved += len(plan_migration(held_states(kept), again))
        kept = again
        busiest = [imbalance(balanced_quota(load, p.replicas).sum(axis=0)) for load, p in zip(loads, kept, strict=True)]
        assert np.mean(busiest) <= 1.02
    assert moved < 0.3 * moved_always


@pytest.mark.parametrize("stride", [60, slow(5)])
def test_predicted_speedups_of_shadow_policies(
    trace: RoutingTrace, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order of Pro-Prophet's comparison: searched n, FasterMoE, top-3, top-2, a wrong fixed n; plain is far behind."""
    seconds: dict[str, list[float]] = {}
    for sample in range(30, len(trace.counts), stride):
        for layer in range(0, 24, 3):
            tokens = sixteen(trace, sample, layer)
            plans = {name: choose(tokens, SIXTEEN, COSTS) for name, choose in SHADOW_POLICIES.items()}
            with monkeypatch.context() as patch:
                patch.setattr(shadow_search, "_values", lambda _: np.array([8]))
                wrong = search_shadows(tokens, SIXTEEN, COSTS)
            plans["n=8"] = replace(wrong, quota_rule="local")
            for name, plan in plans.items():
                seconds.setdefault(name, []).append(predicted_s(tokens, plan))
    speedup = {name: float(np.mean(np.array(seconds["none"]) / values)) for name, values in seconds.items()}
    assert speedup["search"] == pytest.approx(4.87, rel=0.05)
    assert speedup["fastermoe"] == pytest.approx(4.1, rel=0.05)
    assert speedup["top3"] == pytest.approx(3.37, rel=0.05)
    assert speedup["n=8"] == pytest.approx(1.75, rel=0.05)
    assert speedup["search"] > speedup["fastermoe"] > speedup["top3"] > speedup["top2"] > speedup["n=8"] > 1.5


def predicted_s(tokens: np.ndarray, plan: ShadowPlan, costs: BlockCosts = COSTS) -> float:
    return float(predict_plan(tokens, SIXTEEN, plan, costs).total_s)


def kept_speedup(trace: RoutingTrace, samples: range, age: int) -> float:
    """Speed-up with plans `age` samples old over that with fresh ones."""
    stale, fresh = [], []
    for sample in samples:
        for layer in range(0, 24, 4):
            tokens = sixteen(trace, sample, layer)
            plain_s = predicted_s(tokens, no_shadows(tokens, SIXTEEN))
            for when, speedups in ((sample - age, stale), (sample, fresh)):
                plan = search_shadows(sixteen(trace, when, layer), SIXTEEN, COSTS)
                speedups.append(plain_s / predicted_s(tokens, plan))
    return float(np.mean(stale) / np.mean(fresh))


def test_settled_routing_keeps_plans_good_and_early_routing_does_not(trace: RoutingTrace) -> None:
    assert kept_speedup(trace, range(201, 501, 60), age=20) > 0.97
    assert kept_speedup(trace, range(1, 60, 12), age=1) < 0.92


def test_the_benchmark_prints_a_row_per_strategy(trace: RoutingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(recorded()), "--slots", "4", "--strategies", "plain", "packed", "--step", "200"]
    arguments += ["--protection-slots", "4"]
    assert balance_trace.run(options_of(balance_trace.Options, *arguments)) == 0
    printed = capsys.readouterr().out
    table, protection = printed.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["strategy", "plain", "packed"]
    one_node, two_nodes = ([float(number) for number in line.split()] for line in protection.splitlines()[2:])
    assert (one_node[:2], two_nodes[:2]) == ([4, 1], [4, 2])
    assert one_node[2] <= two_nodes[2]  # protection takes slots from balance
    assert two_nodes[4] < 1.1 < two_nodes[2]  # shadows give most of it back


def test_traces_that_cannot_be_judged_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a file"):
        load_trace(tmp_path / "absent.npz")
    counts = np.ones((3, 2, 4, 8), dtype=np.uint16)
    np.savez(tmp_path / "bare.npz", counts=counts)
    with pytest.raises(ConfigurationError, match="iteration is not a file in the archive"):
        load_trace(tmp_path / "bare.npz")
    np.savez(tmp_path / "short.npz", counts=counts, iteration=np.arange(2))
    with pytest.raises(ConfigurationError, match=r"needs counts \[samples, layers, ranks, experts\]"):
        load_trace(tmp_path / "short.npz")
    np.savez(tmp_path / "small.npz", counts=counts, iteration=np.array([1, 101, 201]))
    small = load_trace(tmp_path / "small.npz")
    with pytest.raises(ConfigurationError, match="no sample from --first=600 on"):
        balance_trace.judge(small, "packed", slots_per_rank=4)
    assert balance_trace.judge(small, "packed", slots_per_rank=4, first=0, step=1).imbalance == 1.0


# ----------------------------------------------------------------------
# Routing traces from disk: whole ones, damaged ones, and files that hold something else.


COUNTS = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
READERS: list[Callable[[Path], object]] = [
    read_routing_trace,
    load_trace,
    lambda path: make_routing("trace", num_experts=4, num_layers=3, path=str(path)),
    lambda path: Popularity(ForcedRouting(kind="trace", path=str(path)), 4, 0),
]


def _saved(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **({"counts": COUNTS, "iteration": [1, 5]} | arrays))
    return path


def test_a_whole_trace(tmp_path: Path) -> None:
    counts, iterations = read_routing_trace(_saved(tmp_path / "trace.npz", counts=COUNTS.astype(np.float32)))
    assert np.array_equal(counts, COUNTS)
    assert counts.dtype == iterations.dtype == np.int64
    assert iterations.tolist() == [1, 5]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "arrays",
    [
        {"counts": COUNTS[0]},
        {"counts": COUNTS[:0], "iteration": []},
        {"counts": COUNTS - 5},
        {"counts": COUNTS * np.nan},
        {"counts": COUNTS.astype(str)},
        {"counts": COUNTS.astype(float) * 1e30},
        {"iteration": [1, 1]},
        {"iteration": [1, np.inf]},
        {"iteration": [[1], [2]]},
        {"iteration": ["a", "b"]},
        {"counts": np.array({"pickled": 1}, dtype=object)},
    ],
    ids=str,
)
def test_arrays_of_something_else(tmp_path: Path, read: Callable[[Path], object], arrays: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"trace\.npz") as caught:
        read(_saved(tmp_path / "trace.npz", **arrays))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty", "npy", "folder", "missing"])
def test_damaged_files(tmp_path: Path, read: Callable[[Path], object], damage: str) -> None:
    path = _saved(tmp_path / "trace.npz")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 4] ^= 0xFF
    contents = {"cut": whole[: len(whole) // 2], "flipped": whole, "text": b"step,layer\n", "empty": b""}
    path.unlink()
    if damage in contents:
        path.write_bytes(contents[damage])
    elif damage == "npy":
        np.save(tmp_path / "array.npy", COUNTS)
        (tmp_path / "array.npy").rename(path)
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(ConfigurationError, match=r"trace\.npz") as caught:
        read(path)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------
# Health of routing against counts by hand: dead experts, entropy, drift, and when warnings come.


EVEN = np.full(8, 1 / 8)
ONE = np.eye(8)[3]


def test_numbers_of_even_and_collapsed_layers() -> None:
    numbers = RoutingHealth().observe({0: EVEN, 1: ONE, 2: np.array([0.5, 0.5, 0, 0, 0, 0, 0, 0])})
    assert [numbers[f"moe/layer0{layer}/dead_experts_count"] for layer in range(3)] == [0, 7, 6]
    entropies = [numbers[f"moe/layer0{layer}/load_entropy_ratio"] for layer in range(3)]
    assert entropies == pytest.approx([1, 0, math.log(2) / math.log(8)])
    assert (numbers["moe/dead_experts_count"], numbers["moe/load_entropy_ratio"]) == (13, pytest.approx(0))
    found = [numbers[f"moe/expert_imbalance_{name}_ratio"] for name in ("p50", "p95", "max")]
    assert found == pytest.approx([4, 7.6, 8])


def test_drift_is_the_share_that_other_experts_got() -> None:
    health = RoutingHealth()
    assert health.observe({0: EVEN})["moe/load_drift_fraction"] == 0
    assert health.observe({0: EVEN})["moe/load_drift_fraction"] == 0
    moved = EVEN + np.array([0.1, -0.1, 0, 0, 0, 0, 0.02, -0.02])
    assert health.observe({0: moved})["moe/load_drift_fraction"] == pytest.approx(0.12)


def test_experts_are_dead_over_a_window_and_not_at_one_step() -> None:
    health = RoutingHealth()
    for step in range(3 * WINDOW):
        rare = EVEN.copy()
        rare[step % 8] = 0.0
        numbers = health.observe({0: rare / rare.sum()})
        assert not list(health.warnings(step))
    assert numbers["moe/dead_experts_count"] == 0


def test_a_collapse_is_named_once_when_the_window_is_full_and_again_when_it_has_doubled() -> None:
    health, said = RoutingHealth(), {}
    two = np.array([0.0, 0.0, 1, 1, 1, 1, 1, 1]) / 6
    for step in range(1, 6 * WINDOW):
        health.observe({5: two if step <= 3 * WINDOW else ONE})
        if sentences := list(health.warnings(step)):
            said[step] = sentences
    first, second = said
    assert first == WINDOW
    assert second > 3 * WINDOW
    assert said[first][0].startswith(
        "2 of 8 experts of MoE layer 5 (0, 1) got less than 1% of an even load over the last"
    )
    assert "collapsed" not in said[first][0]
    assert said[second][0].startswith("7 of 8 experts")
    assert "collapsed to the work of" in said[second][0]
    assert all("aux_loss_coef" in sentence for sentences in said.values() for sentence in sentences)


def test_layers_without_tokens_are_neither_dead_nor_uneven() -> None:
    health = RoutingHealth()
    for step in range(2 * WINDOW):
        numbers = health.observe({0: np.zeros(4)})
        assert not list(health.warnings(step))
    assert (numbers["moe/dead_experts_count"], numbers["moe/load_entropy_ratio"]) == (0, 1)
    assert RoutingHealth().observe({}) == {}


def test_the_only_expert_of_a_layer_is_no_collapse() -> None:
    numbers = RoutingHealth().observe({0: EVEN, 1: np.ones(1)})
    assert (numbers["moe/layer01/load_entropy_ratio"], numbers["moe/load_entropy_ratio"]) == (1, pytest.approx(1))


# ----------------------------------------------------------------------
# Synthetic drifting popularity: zipf shares whose order turns into another one, little by little.


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 500), st.integers(1, 60), st.integers(0, 3))
def test_drift_is_a_popularity_that_moves_slowly(step: int, period: int, layer: int) -> None:
    popularity = Popularity(ForcedRouting(kind="drift", exponent=1.5, period=period), 8, layer)
    now, soon = popularity.at(step), popularity.at(step + 1)
    assert now.sum() == pytest.approx(1)
    assert (now > 0).all()
    assert np.abs(soon - now).sum() <= 2 / period + 1e-12, "total variation of at most 1/period in a step"
    again = Popularity(ForcedRouting(kind="drift", exponent=1.5, period=period), 8, layer).at(step)
    assert np.array_equal(now, again), "a function of the step, so that every rank and a resumed run agree"


def test_every_turn_has_the_zipf_shares_in_another_order() -> None:
    expected = np.sort((1.0 + np.arange(8)) ** -2)
    expected /= expected.sum()
    turns = [
        [Popularity(ForcedRouting(kind="drift", exponent=2.0, period=7), 8, layer).at(7 * turn) for turn in range(4)]
        for layer in range(2)
    ]
    for turn in [shares for layer in turns for shares in layer]:
        np.testing.assert_allclose(np.sort(turn), expected)
    assert len({tuple(shares) for layer in turns for shares in layer}) > 4
