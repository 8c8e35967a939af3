"""`moe-train depth=N`: what its rules set, and what the user's own values change."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from omegaconf import DictConfig, OmegaConf

from moe_lightning.cli.composition import composition_errors, config_folder
from moe_lightning.cli.dial import RULES, active_parameters, check_dial, dial_line, has_rules, with_dial
from moe_lightning.cli.train import resolved
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPT, GPTConfig
from moe_lightning.moe.layer import moe_layers

NAMED = ("run_name=x", "run_dir=outputs/x")


@cache
def composed(*overrides: str) -> DictConfig:
    with composition_errors(overrides), config_folder():
        return compose("train", [*with_dial(list(overrides)), *NAMED])


def built(config: DictConfig) -> GPT:
    node: Any = OmegaConf.to_container(config.model, resolve=True)
    model = {key: value for key, value in node.items() if key != "_target_"}
    router = {key: value for key, value in model.pop("router").items() if key != "_target_"}
    with torch.device("meta"):
        return GPT(GPTConfig(**model | {"vocab_size": 256, "router": router}))


@pytest.mark.parametrize("depth", [1, 2, 4, 12, 20, 64])
def test_every_depth_makes_a_model(depth: int) -> None:
    config = composed(f"depth={depth}")
    found = {key: OmegaConf.select(config, key) for key in RULES}
    assert found["model.d_model"] == 64 * depth
    assert found["model.num_heads"] == depth
    assert found["model.num_experts"] == 8 * found["model.router.top_k"]
    tokens = found["data.global_batch_size"] * found["trainer.max_steps"] * found["model.context_length"]
    active = active_parameters(config.model)
    assert 20 * active <= tokens < 20 * active + found["data.global_batch_size"] * found["model.context_length"]
    assert 46e3 * depth**3 < active < 60e3 * depth**3  # 12 D^2 of each layer, and the routers
    assert found["model.d_expert"] * found["model.router.top_k"] == pytest.approx(8 / 3 * 64 * depth, rel=0.15)


@pytest.mark.parametrize(
    "more",
    [
        *((), ("model.activation=gelu",), ("model.moe_every=2", "model.num_shared_experts=1")),
        *(("model.num_experts=0",), ("model.num_dense_layers=1",), ("model.num_kv_heads=2",)),
    ],
)
def test_active_parameters_are_those_of_the_model(more: tuple[str, ...]) -> None:
    config = composed("depth=4", *more)
    model, top_k = built(config), config.model.router.top_k
    layers = sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1)
    inactive = sum(
        stacked[top_k:].numel()
        for layer in moe_layers(model)
        for stacked in layer.experts.stacked_parameters().values()
    )
    assert active_parameters(config.model) == pytest.approx(layers - inactive, rel=0.005)  # biases of experts


def test_the_laws_are_those_that_are_printed() -> None:
    """DeepSeek LLM, eq. 1, at the 1.1e15 operations of four layers."""
    config = composed("depth=4")
    operations = 120 * active_parameters(config.model) ** 2
    assert operations == pytest.approx(1.2e15, rel=0.1)  # 120 N^2
    assert config.optimizer.lr == pytest.approx(0.3118 * operations**-0.125, rel=0.02)  # two digits
    tokens = config.data.global_batch_size * config.model.context_length
    assert tokens == pytest.approx(0.292 * operations**0.3271, rel=0.42)  # the next power of two of samples


def test_what_the_user_sets_stays_and_the_rest_follows() -> None:
    plain, own = composed("depth=4"), composed("model.d_model=128", "depth=4", "optimizer.lr=1e-3")
    assert (own.model.d_model, own.optimizer.lr) == (128, 1e-3)
    assert own.model.num_heads == 2
    assert own.trainer.max_steps < plain.trainer.max_steps
    assert has_rules(own)
    assert "4 layers of 128" in dial_line(own)


def test_a_longer_run_keeps_its_optimizer() -> None:
    """Else the command that trains on would be refused."""
    assert composed("depth=2").optimizer == composed("depth=2", "trainer.max_steps=5000").optimizer


def test_the_rate_follows_the_optimizer() -> None:
    assert composed("depth=2", "optimizer=adafactor").optimizer.lr == 0.01
    assert composed("depth=2", "optimizer=muon").optimizer.lr == composed("depth=2").optimizer.lr


def test_every_recipe_of_a_gpt_takes_a_depth() -> None:
    config = composed("depth=2", "recipes=partial_checkpoints")
    assert config.model.d_model == 128
    assert config.callbacks.partial_experts_checkpoint.every_n_steps == 10
    assert dial_line(composed("recipes=partial_checkpoints")) == ""


def test_a_recipe_chooses_the_rules_itself(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    search = f"hydra.searchpath=[file://{tmp_path}]"
    model = "  - override /model: quickstart\ndepth: 3\noptimizer: {lr: 0.5}\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n{model}")
    with pytest.raises(ConfigurationError, match="depth=3 sets nothing in a recipe without its rules"):
        check_dial(composed.__wrapped__(search, "recipes=mine"))
    rules = "  - /dial@_global_: depth\n  - _self_\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n{rules}{model}")
    config = resolved(composed.__wrapped__(search, "recipes=mine"))
    assert (config["model"]["d_model"], config["optimizer"]["lr"]) == (192, 0.5)


def test_depth_chooses_the_rules_once() -> None:
    assert with_dial(["ranks=2", "depth=4"]) == ["dial=depth", "ranks=2", "depth=4"]
    assert with_dial(["dial=depth", "depth=4"]) == ["dial=depth", "depth=4"]
    assert with_dial(["depth=null"]) == ["depth=null"]
    assert with_dial(["depth=2,4"]) == ["dial=depth", "depth=2,4"]


def test_the_documentation_names_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    section = page.split("## One dial")[1].split("\n## ")[0]
    assert [key for key in RULES if f"`{key.rpartition('.')[2]}`" not in section] == []
    assert OmegaConf.load(Path(__file__).parents[2] / "conf" / "train.yaml").depth is None
