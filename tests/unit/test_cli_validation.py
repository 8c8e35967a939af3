"""What a composed configuration must be before anything is built: names, top-level keys, recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from moe_lightning.cli.composition import (
    CONFIG_DIR,
    KEYS,
    check_config,
    check_run_name,
    composition_errors,
    config_folder,
)
from moe_lightning.cli.train import elastic_options, resolved
from moe_lightning.errors import ConfigurationError


def composed(*overrides: str, recipe: tuple[Path, str] | None = None) -> dict[str, Any]:
    """moe-train's configuration, with a recipe of the user where one is given."""
    more: Sequence[str] = ("run_name=x", "run_dir=outputs/x", *overrides)
    if recipe is not None:
        folder, text = recipe
        (folder / "recipes").mkdir()
        (folder / "recipes" / "mine.yaml").write_text(text)
        more = (f"hydra.searchpath=[file://{folder}]", "recipes=mine", *more)
    with composition_errors(more), config_folder():
        config = compose("train", list(more))
    return resolved(config)


def test_the_defaults_pass() -> None:
    config = composed()
    assert set(config) == set(KEYS)
    check_config(config)


def test_a_validation_may_name_any_folder_of_checkpoints_as_it_writes_none() -> None:
    check_config(composed("task=validate", "callbacks.checkpoint.dirpath=scratch"))


def test_the_folder_of_checkpoints_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    check_config(composed(f"run_dir={tmp_path}/run", f"callbacks.checkpoint.dirpath={tmp_path}/link/checkpoints"))


@pytest.mark.parametrize("more", ["recipes=chaos", "objective=val/loss", "callbacks=fault_recovery"])
def test_the_doctor_takes_settings_of_what_it_leaves_out(more: str) -> None:
    config = composed("doctor=true", more)
    check_config(config)
    assert config["objective"] is None
    assert "parity_doctor" in config["callbacks"]
    assert not {"fault_injection", "fault_recovery", "checkpoint"} & set(config["callbacks"])


@pytest.mark.parametrize("name", ["a", "lr_0.001", "group/run", "5", "Größe", "x" * 200])
def test_names_of_runs(name: str) -> None:
    check_run_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a//b", "a/", "/a", " ", "a/../b", "-x", "a\nb", "x" * 201])
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(ConfigurationError, match="run_name="):
        check_run_name(name)


def test_a_number_names_a_run_too() -> None:
    assert composed("run_name=2024")["run_name"] == "2024"


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:65536", "host:99999", "host:-1"])
def test_addresses_without_a_port_that_there_is(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"elastic\.rdzv_endpoint=.* must be HOST:PORT"):
        elastic_options(composed(f"elastic.rdzv_endpoint='{address}'"), external=False)


def test_elastic_settings_are_checked_in_every_run() -> None:
    assert elastic_options(composed("elastic.enabled=false", "elastic.num_nodes=2"), external=False) is None
    for override in ("elastic.settings.min_ranks=0", "elastic.settings.join_window_s=nan", "elastic.max_restarts=-1"):
        with pytest.raises(ConfigurationError, match=override.split("=")[0]):
            elastic_options(composed(override), external=False)


@pytest.mark.parametrize("override", ["rdzv_endpoint='host:29400'", "num_nodes=2"])
def test_machines_that_would_each_train_alone_are_refused(override: str) -> None:
    with pytest.raises(ConfigurationError, match=r"this machine would train alone: add callbacks=fault_recovery"):
        elastic_options(composed(f"elastic.{override}"), external=False)
    assert elastic_options(composed(f"elastic.{override}", "callbacks=fault_recovery"), external=False) is not None


@pytest.mark.parametrize("override", ["rdzv_endpoint='host:29400'", "num_nodes=4", "enabled=true"])
def test_ranks_of_another_launcher_are_not_elastic(override: str) -> None:
    overrides = ["callbacks=fault_recovery", f"elastic.{override}"]
    with pytest.raises(ConfigurationError, match=r"torchrun or srun started these ranks.*a step of one task"):
        elastic_options(composed(*overrides), external=True)
    if "enabled" not in override:
        assert elastic_options(composed(*overrides, "elastic.enabled=false"), external=True) is None


PACKAGE = "# @package _global_\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (PACKAGE + "optimiser:\n  lr: 1\n", r"optimiser is not a key .*\(did you mean 'optimizer'\?\)"),
        ("trainer:\n  max_steps: 5\n", "begin its file with the line '# @package _global_'"),
        (PACKAGE + "- a\n- b\n", "mine"),
        (PACKAGE + "just words\n", "just words is not a key of moe-train"),
        (PACKAGE + "run_name: ${run_dir}\nrun_dir: ${run_name}\n", "run_name|run_dir"),
        (PACKAGE + "seed: ${nothing.there}\n", "seed"),
    ],
    ids=["misspelt", "no package", "list", "string", "loop", "nowhere"],
)
def test_recipes_that_would_change_nothing(tmp_path: Path, text: str, sentence: str) -> None:
    overrides = ["~run_name", "~run_dir"] if "run_dir: $" in text else []
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        composed(*overrides, recipe=(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_recipes_may_have_variables(tmp_path: Path) -> None:
    config = composed(recipe=(tmp_path, PACKAGE + "width: 128\nmodel:\n  d_model: ${width}\n"))
    assert config["model"]["d_model"] == 128
    assert "width" not in config


def test_every_key_is_there() -> None:
    assert set(KEYS) <= set(OmegaConf.load(CONFIG_DIR / "train.yaml")) | {path.name for path in CONFIG_DIR.iterdir()}
