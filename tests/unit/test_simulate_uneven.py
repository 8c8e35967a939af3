"""Simulated clusters whose nodes differ in speed, jitter, or become slow for a while."""

from __future__ import annotations

import pytest

from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.recommend import mixture_of, recommend
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.simulate.workload import make_routing
from tests.unit.simulated import HOUR_S, NODES, scenario, small_hardware, small_workload

BATCH = {"rank_batch": None, "global_batch": 960}


def cost(hardware: Hardware, name: str = "ours", **changes: object) -> StepCost:
    work = small_workload(**BATCH)
    routing = make_routing("zipf", num_experts=work.num_experts, num_layers=4)
    plan = policy(name, **({"slots": 4} | changes))
    return StepModel(work, hardware, plan, routing, NODES).cost(NODES, 0, 0)


def slow_hardware(**changes: object) -> Hardware:
    return small_hardware(latency_s=0.0, expert_s=0.0, **changes)


def test_equal_speeds_are_no_speeds() -> None:
    assert cost(small_hardware(speeds=[1.0, 1.0])) == cost(small_hardware())


@pytest.mark.parametrize("speeds", [[0.5, 1, 1, 1, 1, 1], [1.0, 0.5], [0.8, 1.0, 1.0]])
def test_work_that_follows_speed_takes_its_mean_and_even_work_the_slowest(speeds: list[float]) -> None:
    calm, mean = cost(slow_hardware()), sum(speeds) / len(speeds)
    followed = cost(slow_hardware(speeds=speeds))
    even = cost(slow_hardware(speeds=speeds), by_speed=False)
    for part in ("dense_s", "experts_s"):
        assert getattr(followed, part) == pytest.approx(getattr(calm, part) / mean, rel=0.03)
        assert getattr(even, part) == pytest.approx(getattr(calm, part) / min(speeds), rel=0.03)
    assert followed.imbalance < 1.02 < even.imbalance


def test_baselines_divide_evenly() -> None:
    assert cost(slow_hardware(speeds=[1.0, 0.5]), "lazarus").dense_s == pytest.approx(
        2 * cost(slow_hardware(), "lazarus").dense_s
    )


def test_jitter_makes_others_wait_for_the_slowest() -> None:
    hardware = small_hardware(jitter=0.2)
    assert hardware.waiting(1) == 1
    assert 1.1 < hardware.waiting(8) < hardware.waiting(64) < 1.7
    assert cost(hardware).dense_s == pytest.approx(hardware.waiting(NODES) * cost(small_hardware()).dense_s)


def test_a_rank_is_slow_for_a_while() -> None:
    work = small_workload(**BATCH)
    calm = simulate(scenario(workload=work, events=None, failures=None)).samples
    hardware = small_hardware(slow_speed=0.5, slow_from_s=HOUR_S / 4, slow_until_s=HOUR_S / 2)
    for by_speed, expected in ((True, 1 / (5.5 / 6)), (False, 2.0)):
        run = simulate(scenario(workload=work, hardware=hardware, by_speed=by_speed))
        spans = [span for span in run.spans if span.state == "train"]
        assert len({round(span.samples_per_s) for span in spans}) >= 2
        part = 1 - run.samples / calm
        assert 0 < part < (1 - 1 / expected) / 4 + 0.05
    forever = simulate(scenario(workload=work, hardware=small_hardware(slow_speed=0.5, slow_from_s=HOUR_S / 2)))
    assert forever.samples < calm
    later = simulate(scenario(workload=work, hardware=small_hardware(slow_speed=0.5, slow_from_s=2 * HOUR_S)))
    assert later.samples == calm


def test_recommend_says_what_mixing_costs() -> None:
    run = scenario(workload=small_workload(**BATCH), hardware=small_hardware(speeds=[1.0, 0.5]))
    mixture = mixture_of(run)
    assert mixture is not None
    assert mixture.even < mixture.mixed <= 1.01 * mixture.alike
    assert mixture.fastest < mixture.mixed
    table = recommend(run).table()
    assert "speeds       mixing costs" in table
    assert "the 3 fastest nodes alone would train at" in table
    assert mixture_of(scenario()) is None


@pytest.mark.parametrize(("changes", "said"), [({"speeds": []}, "names no node"), ({"speeds": [1.0, 0.0]}, "speeds")])
def test_wrong_speeds_are_one_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        small_hardware(**changes)
