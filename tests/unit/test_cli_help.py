"""What the command says about itself, and the decisions before any rank starts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from moe_lightning import __version__
from moe_lightning.callbacks.monitoring import WEBHOOK_VARIABLE
from moe_lightning.cli import sim, train
from moe_lightning.cli.composition import CONFIG_DIR, as_folder_name, fixed_keys, known_keys
from moe_lightning.cli.simulation import compose_simulation
from moe_lightning.cli.train import is_externally_launched, main, with_ranks
from moe_lightning.cli.training import _environment_plugins
from moe_lightning.errors import ConfigurationError
from tests.programs import exit_code


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Hydra's --info leaves a handler that writes to the stream of its test."""
    yield
    logging.getLogger().handlers.clear()


def _output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_code(main, arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_recipes_models_and_keys(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _output(capsys, flag)
    for recipe in (CONFIG_DIR / "recipes").glob("*.yaml"):
        assert f"\n  {recipe.stem}" in text
    for model in (CONFIG_DIR / "model").glob("*.yaml"):
        assert model.stem in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("arguments", [["--advise", "--help"], ["-h", "--advise", "text"], ["--health", "--help"]])
def test_help_of_an_option_is_that_of_the_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal of an unknown option beside --advise names its --help."""
    assert "--cluster 4x8xH100" in _output(capsys, *arguments)


def test_help_shows_only_keys_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _output(capsys, "--help").split("\nkeys")[1].split("\noptions")[0].splitlines()[1:]
    keys = [line.strip().split("=")[0] for line in lines if "=" in line.split("  ")[1]]
    assert len(keys) > 10
    assert set(keys) <= set(known_keys())


def test_help_lists_the_users_own_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# @package _global_\n# All my books.\n")
    assert re.search(r"\n  mine +All my books\.", _output(capsys, "--help", "--config-dir", str(tmp_path)))


def test_help_lists_a_recipe_in_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_bytes("# Größe\n".encode("latin-1"))
    assert re.search(r"^  mine +Gr", _output(capsys, "--help", "--config-dir", str(tmp_path)), re.M)


def test_help_of_the_simulator_shows_only_keys_that_exist() -> None:
    config = compose_simulation([])
    for key in re.findall(r"^  (?=\S*=)(?!moe-sim)(.+?)(?:   |$)", sim._HELP, re.M):
        for name in re.findall(r"([\w.]+)=", key):
            node: Any = config
            for part in name.split("."):
                assert part in node, name
                node = node[part]


def test_keys_of_the_users_own_recipes_are_known(tmp_path: Path) -> None:
    (tmp_path / "a, b" / "recipes").mkdir(parents=True)
    (tmp_path / "a, b" / "recipes" / "mine.yaml").write_text("# @package _global_\nnoise: 1\n")
    assert "noise" in known_keys(["recipes=mine"], str(tmp_path / "a, b"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _output(capsys, "--version") == f"moe-train {__version__}\n"


def test_version_with_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    names = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DIR", "WANDB_ENTITY", "SLURM_JOB_USER", "SLURM_NODELIST", "HUB")
    for private in (*names, "SLURM_JOB_ACCOUNT", "SLURM_LAUNCH_NODE_IPADDR", "TORCH_HOME", WEBHOOK_VARIABLE):
        monkeypatch.setenv(private, "private")
    for value in ("https://hooks.example/private", "/home/private", "private@node", "private:5000"):
        monkeypatch.setenv(f"NCCL_{value[0]}{len(value)}", value)
    report = _output(capsys, "--version", "--report")
    assert report.startswith(f"moe-lightning {__version__}\nPython 3.")
    assert f"torch {version('torch')}" in report
    assert "NCCL_DEBUG=INFO" in report
    assert "private" not in report


def test_cfg_prints_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    text = _output(capsys, "--cfg", "job", "optimizer.lr=0.5", "model=gpt_s")
    assert "lr: 0.5" in text
    assert "vocab_size: 50257" in text


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(CONFIG_DIR) in _output(capsys, "--info", "searchpath")


def test_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hydra_bash_completion" in _output(capsys, "-sc", "install=bash")
    monkeypatch.setenv("COMP_LINE", "moe-train recipes=qu")
    assert "recipes=quickstart" in _output(capsys, "-sc", "query=bash")


def test_folder_names_of_jobs() -> None:
    assert as_folder_name("data.source=a_b,optimizer.lr=1") == "data.source=a_b,optimizer.lr=1"
    alike = [as_folder_name(f"data.source=a{between}b") for between in ("_", "/", " ", "")]
    assert len(set(alike)) == 4
    assert not any("/" in name for name in alike)
    long = [as_folder_name("x" * 300 + end) for end in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 120


def test_jobs_are_named_by_what_is_swept() -> None:
    assert fixed_keys(["a.b=1", "c=1,2", "+d=[1,2]", "e=range(3)", "f=choice(x,y)"]) == ["a.b", "d"]


def _devices(monkeypatch: pytest.MonkeyPatch, gpus: int, **trainer: Any) -> Any:
    monkeypatch.setattr(train, "_visible_gpus", lambda: gpus)
    decided = with_ranks(
        {"trainer": {"accelerator": "auto", "devices": "auto", "num_nodes": 1} | trainer}, external=False
    )
    return decided["trainer"]["accelerator"], decided["trainer"]["devices"]


def test_ranks_are_every_gpu_or_two_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _devices(monkeypatch, gpus=0) == ("cpu", 2)
    assert _devices(monkeypatch, gpus=4) == ("gpu", 4)
    assert _devices(monkeypatch, gpus=4, accelerator="cpu") == ("cpu", 2)
    assert _devices(monkeypatch, gpus=4, devices=[1, 3]) == ("gpu", [1, 3])
    assert _devices(monkeypatch, gpus=0, devices=5) == ("cpu", 5)


@pytest.mark.parametrize("devices", [9, [4], [], 0, True, "four"])
def test_gpus_beyond_those_there_are(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="ranks="):
        _devices(monkeypatch, gpus=4, devices=devices)


def test_an_allocation_is_not_a_task_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the shell of salloc -n 4, or a batch script without srun: Lightning would take it for one of 4 ranks."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert _environment_plugins() == []
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert not is_externally_launched()
    assert [type(plugin) for plugin in _environment_plugins()] == [LightningEnvironment]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert _environment_plugins() == []
    config = {"trainer": {"accelerator": "cpu", "devices": "auto", "num_nodes": 1}}
    with pytest.raises(ConfigurationError, match=r"has started 4 tasks .* give srun or sbatch --ntasks-per-node=4"):
        with_ranks(config, external=is_externally_launched())
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert with_ranks(config, external=True)["trainer"]["devices"] == 4


def test_ranks_of_torchrun_and_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not is_externally_launched()
    monkeypatch.setattr(train, "_visible_gpus", lambda: 8)
    config = {"trainer": {"accelerator": "auto", "devices": "auto", "num_nodes": 1}}
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert is_externally_launched()
    assert with_ranks(config, external=True)["trainer"] == {"accelerator": "gpu", "devices": 8, "num_nodes": 2}
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "12"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert with_ranks(config, external=True)["trainer"] == {"accelerator": "gpu", "devices": 4, "num_nodes": 3}


def test_pods_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator of Kubeflow counts pods in the variables of ranks."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = {"trainer": {"accelerator": "cpu", "devices": "auto", "num_nodes": 1}}
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE=2 is set without LOCAL_RANK .* torchrun in each pod"):
        with_ranks(config, external=is_externally_launched())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert with_ranks(config, external=is_externally_launched())["trainer"]["devices"] == 1


def test_tasks_of_slurm_see_all_gpus_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    monkeypatch.setattr(train, "_visible_gpus", lambda: 1)  # by --gpus-per-task=1
    config = {"trainer": {"accelerator": "auto", "devices": "auto", "num_nodes": 1}}
    with pytest.raises(ConfigurationError, match=r"4 ranks on each node, .* sees 1 GPUs .* --gpus-per-node=4 in place"):
        with_ranks(config, external=True)


def test_ranks_that_another_launcher_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "_visible_gpus", lambda: 8)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    for ranks in (8, [0]):
        config = {"trainer": {"accelerator": "gpu", "devices": ranks, "num_nodes": 1}}
        with pytest.raises(ConfigurationError, match="started 1 on each node: give ranks=auto"):
            with_ranks(config, external=True)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as scripts export it for torch
    for ranks in (1, 4):  # of a node, and of all as recipes count them
        config = {"trainer": {"accelerator": "gpu", "devices": ranks, "num_nodes": 1}}
        trainer = with_ranks(config, external=is_externally_launched())["trainer"]
        assert (trainer["devices"], trainer["num_nodes"]) == (1, 4)
