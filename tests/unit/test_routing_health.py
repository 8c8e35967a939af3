"""Health of routing against counts by hand: dead experts, entropy, drift, and when warnings come."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_lightning.callbacks.routing_health import WINDOW, RoutingHealth

EVEN = np.full(8, 1 / 8)
NEARLY_EVEN = np.array([0.2, 0.15, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1])
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
