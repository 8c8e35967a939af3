"""`moe-train --advise`: what it prints, and the recipe that it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from moe_lightning.cli import advise, train
from moe_lightning.cli.capacity import RANK_BYTES
from moe_lightning.cli.composition import check_config, config_folder
from moe_lightning.cli.train import main
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.failures import NS
from moe_lightning.simulate.recommend import Advice
from moe_lightning.simulate.scenario import Scenario
from tests.programs import exit_code

LARGE = ["model=gpt_m", "model.tie_embeddings=false", "data.global_batch_size=512", "trainer.precision=bf16-mixed"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advise, "_LEAST_S", 1.0)
    monkeypatch.setattr(advise, "_MOST_STEPS", 500)
    monkeypatch.setattr(train, "_visible_gpus", lambda: 0)


def _advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_code(main, ["--advise", *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out


def _partial(*settings: str) -> list[str]:
    words = [f"callbacks.partial_experts_checkpoint.{setting}" for setting in settings]
    return ["callbacks=[fault_recovery,load_balancer]", *words]


def _composed(folder: Path, name: str) -> dict[str, Any]:
    with config_folder():
        overrides = [f"hydra.searchpath=[file://{folder.absolute()}]", f"recipes={name}", "run_name=x", "run_dir=x"]
        composed = compose("train", overrides, return_hydra_config=True)
    del composed.hydra
    config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    config["trainer"] |= {"devices": 1, "accelerator": "cpu"}
    check_config(config)
    return {str(key): value for key, value in config.items()}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    out = _advice(capsys)
    names = [line.split()[0] for line in out.splitlines() if line[:1].strip()]
    assert out.startswith("advice for quickstart on this machine, 2 ranks of ")
    for name in ("mesh", "slots", "replicas", "checkpoint", "K_snapshot", "batch", "tokens/s", "memory", "goodput"):
        assert name in names
    assert max(map(len, out.splitlines())) <= 80
    assert "K_snapshot     8 of 8" in out  # a copy takes next to nothing
    config = _composed(Path("outputs/advice"), "quickstart_advised")
    assert config["callbacks"]["partial_experts_checkpoint"]["k_persist"] == 8
    assert config["ranks"] == 2
    assert config["data"]["global_batch_size"] == 8
    assert "fault_recovery" in config["callbacks"]
    assert _advice(capsys)  # its own file is written again


def test_a_cluster_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    out = _advice(
        capsys, "text", "--cluster", "2x4xA30", *LARGE, "data.source=books", "--out", "my own/recipes/big.yaml"
    )
    assert "on 2 nodes of 4 A30" in out
    assert "moe-train --config-dir 'my own' recipes=big" in out
    text = Path("my own/recipes/big.yaml").read_text()
    assert "moe-train --config-dir 'my own' recipes=big elastic" in text
    assert text.startswith("# @package _global_\n# Recommended by moe-train --advise: text on 2 nodes of 4 A30")
    assert "elastic.rdzv_endpoint=HOST:29510" in text
    config = _composed(Path("my own"), "big")
    assert (config["ranks"], config["elastic"]["num_nodes"]) == (4, 2)
    assert (config["data"]["source"], config["trainer"]["precision"]) == ("books", "bf16-mixed")
    assert config["model"]["num_layers"] == 12


def test_the_dial_and_callbacks_stay(capsys: pytest.CaptureFixture[str]) -> None:
    _advice(capsys, "depth=2", "callbacks=[recompute,fault_recovery]", "optimizer=muon", "ranks=1")
    config = _composed(Path("outputs/advice"), "quickstart_advised")
    assert (config["model"]["num_layers"], config["model"]["d_model"], config["ranks"]) == (2, 128, 1)
    assert config["optimizer"]["name"] == "muon"
    assert {"recompute_dense", "fault_recovery", "partial_experts_checkpoint"} <= set(config["callbacks"])


def test_settings_of_the_command_line_stay(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, dict[str, Any]] = {
        "fault_recovery": {"min_replicas": 1, "failures": 2},
        "load_balancer": {"rebalance_every": 70},
        "partial_experts_checkpoint": {"every_n_steps": 10, "k_snapshot": 3},
        "dynamic_k": {"threshold": 0.02},
    }
    words = [f"callbacks.{name}.{key}={value}" for name, node in given.items() for key, value in node.items()]
    out = _advice(capsys, "--cluster", "2x8xH100", "callbacks=[fault_recovery,load_balancer]", *words)
    rows = _rows(out)
    assert rows["replicas"] == ["1", "as given"]
    assert rows["rebalance"] == ["every 70", "as given"]
    assert rows["checkpoint"] == ["every 10", "as given"]
    assert rows["K_snapshot"] == ["3 of 8", "as given"]
    callbacks = _composed(Path("outputs/advice"), "quickstart_advised")["callbacks"]
    assert {name: {key: callbacks[name][key] for key in node} for name, node in given.items()} == given


def _rows(out: str) -> dict[str, list[str]]:
    """Value and reason of each row, by its name; of a reason the first line."""
    return {line.split()[0]: re.split("  +", line)[1:] for line in out.splitlines() if line[:1].strip()}


def test_the_recipe_has_what_the_command_leaves_to_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    """Training would choose another interval and protection for auto than the rows say."""
    recovery = [f"callbacks.fault_recovery.{setting}" for setting in ("protection=auto", "min_replicas=1")]
    given = _partial("every_n_steps=auto", "k_snapshot=auto", "k_persist=null")
    rows = _rows(_advice(capsys, "--cluster", "2x8xH100", *given, *recovery))
    callbacks = _composed(Path("outputs/advice"), "quickstart_advised")["callbacks"]
    partial = callbacks["partial_experts_checkpoint"]
    assert rows["checkpoint"][0] == f"every {partial['every_n_steps']}"
    assert rows["K_snapshot"][0] == f"{partial['k_snapshot']} of 8"
    assert rows["protection"][0] == callbacks["fault_recovery"]["protection"]


def test_more_replicas_than_nodes_are_planned_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["callbacks=fault_recovery", "callbacks.fault_recovery.min_replicas=9"]
    rows = _rows(_advice(capsys, "--cluster", "2x8xH100", *given))
    config = _composed(Path("outputs/advice"), "quickstart_advised")
    assert rows["replicas"] == ["9", "as given"]
    assert config["callbacks"]["fault_recovery"]["min_replicas"] == 9
    assert rows["slots"][0] == "8 of 8", "training begins with 9 blocks of ranks, of which some have one rank"
    assert config["strategy"]["slots"] == 8


def test_as_many_failures_as_given_are_survived(capsys: pytest.CaptureFixture[str]) -> None:
    promises = ["callbacks.fault_recovery.failures=2", "callbacks.fault_recovery.min_replicas=2"]
    rows = _rows(_advice(capsys, "--cluster", "4x2xH100", "callbacks=fault_recovery", *promises))
    recovery = _composed(Path("outputs/advice"), "quickstart_advised")["callbacks"]["fault_recovery"]
    assert (recovery["failures"], recovery["protection"]) == (2, "arc")
    assert rows["protection"][0] == "arc"


def test_snapshots_of_the_recipe_have_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU they lie in the memory of the ranks."""
    monkeypatch.setattr(advise, "available_memory", lambda: RANK_BYTES + 120_000_000)
    told = " ".join(_advice(capsys, "ranks=1", "data.global_batch_size=256").split())
    needed = re.search(r"memory (\S+) MB of 120 MB a rank: .* snapshots ", told)
    assert needed
    assert float(needed[1]) < 120


@pytest.mark.parametrize("given", [["k_snapshot=9"], ["k_snapshot=9", "lossless=true"], ["k_persist=9"]])
def test_more_experts_than_there_are_mean_all(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    out = _advice(capsys, "--cluster", "2x8xH100", *_partial(*given))
    name = given[0].partition("=")[0]
    row = next(line for line in out.splitlines() if line.startswith(name.capitalize()))
    assert re.split("  +", row)[1:] == ["8 of 8", "as given"]


@pytest.mark.parametrize("pp", [1, 2])
def test_validations_come_after_as_many_steps_as_before(capsys: pytest.CaptureFixture[str], pp: int) -> None:
    """These settings of the Trainer count micro-batches, of which the advice makes others."""
    accumulating = [f"strategy.mesh.pp={pp}", "trainer.accumulate_grad_batches=8"]
    every = ["trainer.val_check_interval=800", "trainer.limit_train_batches=1600"]
    every += ["trainer.limit_val_batches=40", "trainer.overfit_batches=16", "trainer.fast_dev_run=24"]
    sizes = ["model.tie_embeddings=false", "data.global_batch_size=64"]
    _advice(capsys, "--cluster", "1x4xH100", *sizes, *accumulating, *every)
    config = _composed(Path("outputs/advice"), "quickstart_advised")
    micro_batches = config["trainer"]["accumulate_grad_batches"]
    assert micro_batches < 8
    assert config["trainer"]["val_check_interval"] == 100 * micro_batches
    assert config["trainer"]["limit_train_batches"] == 200 * micro_batches
    assert config["trainer"]["limit_val_batches"] == 5 * micro_batches
    assert config["trainer"]["overfit_batches"] == 2 * micro_batches
    assert config["trainer"]["fast_dev_run"] == 3 * micro_batches
    if pp == 2:
        assert (micro_batches, config["strategy"]["mesh"]["pp"]) == (1, 2)


def test_a_batch_below_the_ranks_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    out = _advice(capsys, "--cluster", "2x8xH100")
    assert "8 samples are fewer than the 16 ranks" in " ".join(out.split())
    assert _composed(Path("outputs/advice"), "quickstart_advised")["data"]["global_batch_size"] == 16


_REPLICAS = ["callbacks.fault_recovery.min_replicas=3"]
MISTAKES = [
    (["--cluster", "many"], "--cluster 'many' must be NODESxGPUSxNAME such as 4x8xH100"),
    (["--cluster", "4x8xH10"], "--cluster 4x8xH10: H10 is not known (did you mean 'h100'?): choose one of RTX3090"),
    (["--cluster", "0x8xH100"], "must be NODESxGPUSxNAME"),
    (["--cluster"], "argument --cluster: expected one argument"),
    (["--cluster", "machine.json"], "--cluster 'machine.json' must be NODESxGPUSxNAME"),
    (["--clustr", "4x8xH100"], "--clustr"),
    (["--out", "mine.yaml"], "--out mine.yaml must be recipes/NAME.yaml"),
    (["--config-dir", "no"], "--config-dir no is not a folder"),
    (["recipes=nothing"], "there is no recipe 'nothing'"),
    (["quickstrt"], "there is no recipe 'quickstrt' (did you mean 'quickstart'?)"),
    (["recipes=swinv2_moe"], "--advise plans language models with experts"),
    (["model.num_experts=0"], "--advise plans language models with experts"),
    (["strategy.ep_size=4"], "strategy.ep_size=4 cuts the ranks into groups, which do not survive a lost rank"),
    (_partial("k_snapshot=2", "k_persist=4"), "k_persist=4 is more than k_snapshot=2"),
    (_partial("lossless=true", "k_persist=4"), "lossless=True saves all state of every expert"),
    (
        ["--cluster", "2x8xH100", "strategy.slots=1", "callbacks=fault_recovery", *_REPLICAS],
        "strategy.slots=1 cannot hold the 2 experts that 3 replicas of each put on a rank: use at least 2",
    ),
    (["model.d_model=-1"], "model.d_model=-1 must be an integer of at least 1"),
    (["text"], "data.source is needed here: give data.source=VALUE"),
    (["--cluster", "1x1xA30", "model=mixtral_8x7b", "model.num_layers=2"], "this run needs"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, ["--advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("moe-train: error: ")
    assert expected in error
    assert not Path("outputs").exists()


def test_nodes_that_fail_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def see(scenario: Scenario, **_: Any) -> Advice:
        events[:] = [(event.time_ns, event.failed, event.joined) for event in scenario.events[1:]]
        raise ConfigurationError("seen")

    monkeypatch.setattr(advise, "_MOST_STEPS", 10**9)
    monkeypatch.setattr(advise, "recommend", see)
    with pytest.raises(SystemExit):
        main(["--advise", "--cluster", "2x8xA800"])
    lost = [(time_ns, failed) for time_ns, failed, _ in events if failed]
    assert len(lost) >= 2
    hour_ns = 3600 * NS
    for time_ns, failed in lost[:2]:
        assert (time_ns + hour_ns, (), failed) in events


def test_another_file_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("# @package _global_\n# Mine.\n")
    with pytest.raises(SystemExit):
        main(["--advise", "--out", "recipes/mine.yaml"])
    assert "exists and was not recommended: name another file" in capsys.readouterr().err
    assert Path("recipes/mine.yaml").read_text().endswith("Mine.\n")
