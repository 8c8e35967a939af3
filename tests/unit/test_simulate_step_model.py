"""The time of a step: its parts add up, sizes and rates move it the right way, samples of ranks stand for all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.rules import STRATEGIES
from moe_lightning.cli import calibrate, capacity
from moe_lightning.cli.bench import main
from moe_lightning.cli.calibrate import SAVE_EVERY, quiet_mean
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.moe.router import RouterConfig
from moe_lightning.simulate import step_model
from moe_lightning.simulate.checkpoint_cost import bottleneck_bytes, save_cost
from moe_lightning.simulate.hardware import PRESETS, Hardware, load_hardware, preset, save_hardware
from moe_lightning.simulate.policy import POLICIES, policy
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.simulate.workload import RoutingScenario, Workload, gpt_workload, hottest, make_routing
from tests.unit.gpt_size import count_parameters
from tests.unit.simulated import NODES, small_hardware, small_workload


def _cost(
    name: str = "ours", *, nodes: int = NODES, work: Workload | None = None, hardware: Hardware | None = None,
    kind: str = "zipf", **changes: object,
) -> StepCost:  # fmt: skip
    work = work or small_workload()
    routing = make_routing(kind, num_experts=work.num_experts, num_layers=4)  # type: ignore[arg-type]
    plan = policy(name, **({"slots": 4} | changes))
    return StepModel(work, hardware or small_hardware(), plan, routing, nodes).cost(nodes, 0, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_parts_add_up(name: str) -> None:
    cost = _cost(name)
    parts = cost.dense_s + cost.experts_s + cost.exchange_s + cost.copies_s + cost.gradients_s + cost.update_s
    assert cost.step_s == pytest.approx(parts)
    assert min(cost.dense_s, cost.experts_s, cost.exchange_s, cost.update_s) > 0
    assert cost.imbalance >= 1


def test_replicas_even_out_what_plain_placement_leaves() -> None:
    assert _cost("ours").imbalance < 1.05 < _cost("blocking").imbalance
    assert _cost("ours", kind="uniform").imbalance == pytest.approx(1.0, abs=0.01)
    assert _cost("ds").exchange_s > _cost("blocking").exchange_s  # padding


@pytest.mark.parametrize(
    ("part", "rate"),
    [
        ("dense_s", "utilization"),
        ("experts_s", "expert_utilization"),
        ("exchange_s", "link_bytes_per_s"),
        ("update_s", "memory_bytes_per_s"),
    ],
)
def test_each_rate_moves_its_part(part: str, rate: str) -> None:
    slow = small_hardware(latency_s=0.0, expert_s=0.0)
    fast = replace(slow, **{rate: 2 * getattr(slow, rate)})
    before, after = (_cost("blocking", hardware=hardware) for hardware in (slow, fast))
    assert getattr(after, part) == pytest.approx(getattr(before, part) / 2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_shadows_travel_as_in_training_but_for_the_systems_of_papers(name: str) -> None:
    of_papers = {"top2", "top3", "fastermoe", "fastermoe+", "prophet"}
    routing = make_routing("zipf", num_experts=8, num_layers=4)
    model = StepModel(small_workload(), small_hardware(), policy("ours", strategy=name, slots=4), routing, NODES)
    assert model.block_costs(NODES).transfer == ("average" if name in of_papers else "direct")


def test_a_home_that_sends_every_copy_takes_longer_than_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies_s(transfer: str) -> float:
        monkeypatch.setitem(STRATEGIES, "top2", replace(STRATEGIES["top2"], transfer=transfer))
        work, hardware = small_workload(num_experts=16), small_hardware(overlap=0.0, latency_s=0.0)
        return _cost("moc", nodes=16, work=work, hardware=hardware, strategy="top2", slots=1).copies_s

    # Two homes send 15 copies each at once; together all ranks have two of 16 to send.
    assert copies_s("direct") == pytest.approx(15 / 2 * copies_s("average"), rel=1e-3)


def test_few_ranks_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    work = small_workload(num_experts=32, rank_batch=4)
    whole = _cost(nodes=256, work=work, slots=3)
    monkeypatch.setattr(step_model, "REPRESENTATIVE_RANKS", 64)
    sampled = _cost(nodes=256, work=work, slots=3)
    assert sampled.step_s == pytest.approx(whole.step_s, rel=0.03)


def test_global_batch_is_shared_out() -> None:
    work = small_workload(rank_batch=None, global_batch=48)
    assert work.samples_per_step(6) == work.samples_per_step(3) == 48
    assert _cost(nodes=3, work=work).dense_s == pytest.approx(2 * _cost(nodes=6, work=work).dense_s)
    with pytest.raises(ConfigurationError, match="give exactly one of them"):
        small_workload(global_batch=48)


def test_models_are_counted_on_their_own_modules() -> None:
    config = GPTConfig(num_layers=4, d_model=64, num_heads=4, num_experts=6, router=RouterConfig(top_k=2))
    work = gpt_workload(config, rank_batch=1)
    assert work.parameters == count_parameters(config)
    assert (work.num_layers, work.num_experts, work.top_k) == (2, 6, 2)
    assert work.expert_params == 2 * 64 * 256 + 256 + 64
    with pytest.raises(ConfigurationError, match="num_experts=0 is a dense model"):
        gpt_workload(GPTConfig(num_layers=1, d_model=64, num_heads=4, num_experts=0), rank_batch=1)


def test_bytes_of_a_checkpoint() -> None:
    work, hardware = small_workload(), small_hardware()
    state = work.parameters * 14
    ours = save_cost(work, hardware, policy("ours"), NODES, 8, 8)
    assert ours.persist_bytes == state
    assert ours.snapshot_bytes == pytest.approx(state / NODES, rel=0.2)
    assert bottleneck_bytes(work, policy("ds"), NODES, 8) > ours.snapshot_bytes  # rank 0 writes all dense weights
    partial = save_cost(work, hardware, policy("ours"), NODES, 2, 2)
    assert partial.persist_bytes == work.dense_params * 14 + (state - work.dense_params * 14) / 4
    assert save_cost(work, hardware, policy("gemini"), NODES, 8, 8).protect_s > 0


def test_routing_follows_its_trace() -> None:
    counts = np.arange(2 * 1 * 4).reshape(2, 1, 4)
    assert hottest(counts, 2).tolist() == [[[2, 3]], [[6, 7]]]
    routing = RoutingScenario(shares_SLE=counts + 1, steps=np.array([0, 100]))
    assert [routing.sample(step) for step in (0, 99, 100, 5000)] == [0, 0, 1, 1]
    assert (routing.next_change(0), routing.next_change(100)) == (100, None)
    tokens = routing.tokens(1, 0, 1000, 3)
    assert tokens.shape == (4, 3)
    assert (tokens.sum(axis=0) == 1000).all()


def test_experts_must_fit() -> None:
    with pytest.raises(ConfigurationError, match="add nodes or raise policy"):
        _cost(nodes=1, slots=2)
    with pytest.raises(ConfigurationError, match="nodes=0 is not a cluster"):
        StepModel(small_workload(), small_hardware(), policy("ours"),
                  make_routing("uniform", num_experts=8, num_layers=4), 0)  # fmt: skip
    with pytest.raises(ConfigurationError, match="the routing has 4 experts, the model 8"):
        StepModel(small_workload(), small_hardware(), policy("ours"),
                  make_routing("uniform", num_experts=4, num_layers=4), 2)  # fmt: skip


# ----------------------------------------------------------------------
# Measured machines: the fit finds what made the times, the file keeps it, and predictions follow the sizes.


SHARES = {(kind, experts): np.full(experts, 1.0 / experts) for kind in ("uniform", "trace") for experts in (8, 16)}
PARTS = {"expert_row_s": 1e-5, "expert_s": 1e-5, "backward_ratio": 2.0, "expert_params": 3e5, "exchange_byte_s": 1e-9}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.3, 4.0), min_size=3, max_size=3))
def test_scales_are_found(factors: list[float]) -> None:
    columns = np.random.default_rng(0).random((8, 3)) + 0.1
    found = calibrate.fit_scales(columns, columns @ np.array(factors))
    assert found == pytest.approx(factors, rel=0.25)
    assert columns @ found == pytest.approx(columns @ np.array(factors), rel=0.05)


def test_scales_are_never_negative() -> None:
    columns = np.array([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    found = calibrate.fit_scales(columns, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all()
    assert found[2] == 0  # a part that no training has


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainings_of_a_known_machine_are_predicted(ranks: int) -> None:
    """Times made by the model itself, of a machine unlike the one that the parts were measured on."""
    first = calibrate.fit_hardware(ranks, PARTS, dict.fromkeys(calibrate.REFERENCES, 0.1), SHARES)
    true = replace(
        first,
        step_s=0.004,
        flops_per_s=8e10,
        utilization=1.0,
        expert_utilization=0.7,
        memory_bytes_per_s=6e9,
        host_copy_bytes_per_s=2e9,
    )
    references = {n: calibrate.predict_s(true, c, SHARES) for n, c in calibrate.REFERENCES.items()}
    found = calibrate.fit_hardware(ranks, PARTS, references, SHARES)
    for name, choice in calibrate.CHECKS.items():
        expected = calibrate.predict_s(true, choice, SHARES)
        assert calibrate.predict_s(found, choice, SHARES) == pytest.approx(expected, rel=0.1), name


def test_a_calibrated_machine_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "available_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(capacity, "available_memory", lambda: 64 * 2**30)
    found = calibrate.fit_hardware(4, PARTS, dict.fromkeys(calibrate.REFERENCES, 0.1), SHARES)
    assert found.memory_bytes == 16 * 2**30 - capacity.RANK_BYTES
    assert found.host_memory_bytes == 64 * 2**30


def test_trainings_are_predicted_with_shadows_that_travel_as_in_training() -> None:
    assert {STRATEGIES[choice.strategy].transfer for choice in calibrate.CHECKS.values()} == {"direct"}


def test_quiet_windows_hold_a_snapshot_each() -> None:
    calm, disturbed = [1.0] * SAVE_EVERY, [5.0] * SAVE_EVERY
    assert quiet_mean(calm + disturbed + disturbed) == 1.0
    assert quiet_mean([2.0, *[1.0] * (SAVE_EVERY - 1)]) == pytest.approx(1 + 1 / SAVE_EVERY)


def test_file_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machines = {1: PRESETS["rtx3090"], 4: preset("h100", overlap=0.0)}
    save_hardware(path, machines, "a test")
    assert load_hardware(path, 4) == machines[4]
    assert load_hardware(path, 1) == machines[1]
    assert json.loads(path.read_text())["machine"] == "a test"
    with pytest.raises(ConfigurationError, match=r"was measured with \[1, 4\] ranks, not 2"):
        load_hardware(path, 2)
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="is not a calibration"):
        load_hardware(path, 4)
    path.write_text(json.dumps({"ranks": {"1": {"flops": 1}}}))
    with pytest.raises(ConfigurationError, match=r"machine\.json has no 'flops'"):
        load_hardware(path, 1)


@pytest.mark.parametrize("name", ["link_bytes_per_s", "flops_per_s", "host_copy_bytes_per_s", "storage_bytes_per_s"])
def test_nothing_is_infinitely_slow(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"hardware.{name}=0 must be a number above 0"):
        preset("a30", **{name: 0})


@pytest.mark.parametrize(("predicted_s", "verdict"), [(0.11, "10.0% .*: met"), (0.2, "100.0% .*: missed")])
def test_table_says_whether_the_goal_is_met(predicted_s: float, verdict: str) -> None:
    row = calibrate.Prediction(ranks=1, name="a", measured_s=0.1, predicted_s=predicted_s)
    assert re.search(f"median error {verdict}$", calibrate.table([row]))


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.json"
    assert main(["calibrate", "--ranks", "1", "2", "--steps", "8", "--no-check", "--out", str(out)]) == 0
    assert "written to" in capsys.readouterr().out
    for ranks in (1, 2):
        found = load_hardware(out, ranks)
        assert found.ranks_per_node == ranks
        assert found.overlap == 0


def test_wrong_options_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for options, sentence in (
        (["--ranks", "0"], "--ranks: 0 must be an integer of at least 1"),
        (["--steps", "2"], "--steps: 2 must be an integer of at least 8"),
        (
            ["--out", "no/where.json"],
            "'no/where.json' cannot be written (No such file or directory)",
        ),
    ):
        with pytest.raises(SystemExit):
            main(["calibrate", *options])
        assert sentence in capsys.readouterr().err
