"""The least time of uneven ranks, and the table of what unlike speeds cost on a trace."""

import argparse
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.least_time import least_time
from benchmarks.uneven_trace import listed_speeds, speeds_argument
from moe_lightning.cli import bench
from moe_lightning.errors import ConfigurationError
from tests.traces import recorded


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_the_least_time_is_that_of_the_set_of_experts_that_most_fills_its_holders(seed, num_experts, num_ranks):
    generator = np.random.default_rng(seed)
    tokens, speeds = generator.integers(0, 100, num_experts), generator.integers(1, 9, num_ranks)
    replicas = generator.integers(0, 2, (num_experts, num_ranks))
    replicas[np.arange(num_experts), generator.integers(0, num_ranks, num_experts)] = 1
    worst = Fraction(0)
    for mask in range(1, 1 << num_experts):
        experts = [e for e in range(num_experts) if mask >> e & 1]
        holders = (replicas[experts] > 0).any(axis=0)
        worst = max(worst, Fraction(int(tokens[experts].sum()), int(speeds[holders].sum())))
    assert least_time(tokens, replicas, speeds) == worst


def test_speeds_of_the_first_ranks_are_listed():
    assert listed_speeds(speeds_argument("0.5x2,0.8"), 5) == [0.5, 0.5, 0.8, 1.0, 1.0]
    assert listed_speeds(speeds_argument("1:0.5"), 3) == [1.0, 0.75, 0.5]
    with pytest.raises(ConfigurationError, match="gives 4 speeds, but the trace has 3 ranks: give at most 3"):
        listed_speeds("0.5x4", 3)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", "0.5x0", "1e30", "1:0", "1:1e30", "a:b", "1:2,3", ""])
def test_what_is_no_speed_is_one_sentence(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be positive speeds of the first ranks"):
        speeds_argument(text)


def test_uneven_ranks_cost_a_percent_on_the_recorded_trace(capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"0.5": 1.01, "0.8": 1.01, "1:0.723": 1.01, "0.5x8": 1.06}
    assert bench.main(["balance-trace", str(recorded()), "--slots", "4", "--step", "100", "--speeds", *limits]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    for speeds, limit in limits.items():
        even, *_, both, bound = map(float, lines[speeds][1:])
        assert even > 1.15
        assert bound <= both <= limit
