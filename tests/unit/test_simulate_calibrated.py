"""Measured machines: the fit finds what made the times, the file keeps it, and predictions follow the sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.cli import calibrate
from moe_lightning.cli.bench import main
from moe_lightning.cli.calibrate import SAVE_EVERY, quiet_mean
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.hardware import PRESETS, load_hardware, preset, save_hardware

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


def test_quiet_windows_hold_a_snapshot_each() -> None:
    calm, disturbed = [1.0] * SAVE_EVERY, [5.0] * SAVE_EVERY
    assert quiet_mean(calm + disturbed + disturbed) == 1.0
    assert quiet_mean([2.0, *[1.0] * (SAVE_EVERY - 1)]) == pytest.approx(1 + 1 / SAVE_EVERY)


def test_file_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machines = {1: PRESETS["rtx3090"], 4: preset("h100", overlap=0.0)}
    save_hardware(path, machines, "a test")
    assert load_hardware(path) == machines[4]
    assert load_hardware(path, 1) == machines[1]
    assert json.loads(path.read_text())["machine"] == "a test"
    with pytest.raises(ConfigurationError, match=r"was measured with \[1, 4\] ranks, not 2"):
        load_hardware(path, 2)
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="is not a calibration"):
        load_hardware(path)
    path.write_text(json.dumps({"ranks": {"1": {"flops": 1}}}))
    with pytest.raises(ConfigurationError, match=r"machine\.json has no 'flops'"):
        load_hardware(path)


@pytest.mark.parametrize("name", ["link_bytes_per_s", "flops_per_s", "host_copy_bytes_per_s", "storage_bytes_per_s"])
def test_nothing_is_infinitely_slow(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"hardware.{name}=0 must be a number above 0"):
        preset("a30", **{name: 0})


def test_table_says_whether_the_goal_is_met() -> None:
    rows = [
        calibrate.Prediction(ranks=1, name="a", clock=clock, measured_s=0.1, predicted_s=predicted)
        for clock, predicted in (("step_s", 0.11), ("cpu_s", 0.2))
    ]
    text = calibrate.table({1: PRESETS["a30"]}, rows)
    assert "median error 10.0% over 1 trainings; goal below 15%: met" in text
    assert "median error 100.0% over 1 trainings; goal below 15%: missed" in text


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
        (["--out", "no/where.json"], "is in a folder that does not exist: create 'no'"),
    ):
        with pytest.raises(SystemExit):
            main(["calibrate", *options])
        assert sentence in capsys.readouterr().err
