"""Dense models as Mixture-of-Experts models: the same function at step 0, other experts later, LLaMA as a Mixtral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

from moe_lightning import ConfigurationError
from moe_lightning.models.upcycling import UpcyclingConfig
from moe_lightning.moe.layer import moe_layers
from moe_lightning.moe.router import RouterConfig
from tests.huggingface_models import DENSE, inputs_for, logits_of, make_checkpoint, reloaded
from tests.unit.test_huggingface import TOLERANCE, assert_same_logits, edited, fit, load, save

ROUTERS: list[dict[str, Any]] = [
    {"softmax_after_top_k": True},
    {"top_k": 3},
    {"score": "sigmoid", "num_groups": 2, "top_groups": 1},
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", DENSE)
def test_the_function_is_kept(name: str, router: dict[str, Any], tmp_path: Path) -> None:
    theirs, inputs = make_checkpoint(name, tmp_path), inputs_for(name)
    module = load(tmp_path, upcycling={"num_experts": 6, "router": router})
    assert_same_logits(module, logits_of(theirs, inputs), inputs)
    routers = [layer.router.weight for layer in moe_layers(module)]
    assert all(weight.abs().max() > 0 for weight in routers)
    assert len({float(weight.detach().sum()) for weight in routers}) == len(routers) > 1


@pytest.mark.parametrize("name", ["gpt2", "llama", "swinv2"])
def test_every_other_layer(name: str, tmp_path: Path) -> None:
    theirs, inputs = make_checkpoint(name, tmp_path), inputs_for(name)
    module = load(tmp_path, upcycling={"num_experts": 4, "moe_every": 2})
    assert len(moe_layers(module)) == {"gpt2": 1, "llama": 1, "swinv2": 2}[name]
    assert_same_logits(module, logits_of(theirs, inputs), inputs)


def test_a_checkpoint_of_the_bare_model(tmp_path: Path) -> None:
    """The well-known GPT-2 files name no head and hold attention masks."""
    theirs, inputs = make_checkpoint("gpt2", tmp_path), inputs_for("gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {key.removeprefix("transformer."): value for key, value in tensors.items() if key != "lm_head.weight"}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "model.safetensors")
    module = load(tmp_path, upcycling={"num_experts": 4})
    assert_same_logits(module, logits_of(theirs, inputs), inputs)


@pytest.mark.parametrize(
    ("name", "moe_every", "family", "block"),
    [
        ("llama", 1, "mixtral", "model.layers.0.mlp"),
        ("mistral", 1, "mixtral", "model.layers.0.mlp"),
        ("qwen3_dense", 1, "qwen3_moe", "model.layers.0.mlp"),
        ("qwen3_dense", 2, "qwen3_moe", "model.layers.1.mlp"),
    ],
)
def test_upcycled_models_are_those_of_transformers(
    name: str, moe_every: int, family: str, block: str, tmp_path: Path
) -> None:
    theirs, inputs = make_checkpoint(name, tmp_path / "dense"), inputs_for(name)
    module = load(tmp_path / "dense", upcycling={"num_experts": 4, "moe_every": moe_every})
    save(module, tmp_path / "at_start")
    sparse = reloaded(tmp_path / "at_start")
    assert sparse.config.model_type == family
    expected = logits_of(theirs, inputs)
    assert float((logits_of(sparse, inputs) - expected).abs().max()) <= TOLERANCE

    fit(module, steps=4)
    stack = module.architecture.layers[block].experts.w_up
    assert not torch.equal(stack[0], stack[1]), "experts drift apart"
    save(module, tmp_path / "trained")
    assert_same_logits(module.eval(), logits_of(reloaded(tmp_path / "trained"), inputs), inputs)
    again = load(tmp_path / "trained")
    assert torch.equal(again.architecture.layers[block].experts.w_up, stack)


def test_images_train(tmp_path: Path) -> None:
    make_checkpoint("swinv2", tmp_path)
    module = load(tmp_path, upcycling={"num_experts": 4})
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 3, 16, 16, generator=generator), torch.arange(16) % 5)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = fit(module, loader=DataLoader(data, batch_size=8))
    assert not [key for key, value in module.state_dict().items() if ".moe." in key and torch.equal(value, before[key])]
    assert trainer.predict(module, DataLoader(data, batch_size=8))[0].shape == (8,)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "changes", "upcycling", "message"),
    [
        ("gpt2", {}, {"num_experts": 0}, "num_experts=0 of UpcyclingConfig must be an integer of at least 1"),
        ("gpt2", {}, {"moe_every": 3}, "moe_every=3 and num_dense_layers=0 leave no MoE layer among 2"),
        (
            "gpt2",
            {"activation_function": "relu"},
            {},
            "the activation 'relu' of this gpt2 is not one that experts have",
        ),
        ("llama", {"mlp_bias": True}, {}, "mlp_bias=true of this llama is not known"),
        ("gpt2", {}, {"router": {"top_k": 1}}, "top_k=1 cannot keep the function"),
        ("gpt2", {}, {"router": {"normalize_top_k": False}}, "normalize_top_k=false and scale=1.0 would change"),
        ("gpt2", {}, {"router": {"scale": 2.0}}, "scale=2.0 would change"),
        ("gpt2", {}, {"router": {"capacity_factor": 1.0}}, "capacity_factor=1.0 would drop tokens"),
        ("gpt2", {}, {"num_experts": 1}, "top_k=2 is more than the 1 experts"),
    ],
)
def test_wrong_configurations(
    name: str, changes: dict[str, Any], upcycling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint(name, tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, upcycling=upcycling)


def test_options_of_pretrained_routers_do_not_fit(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    with pytest.raises(ConfigurationError, match=r"set upcycling\.router instead"):
        load(tmp_path, upcycling={}, router={"jitter": 0.1})


def test_what_transformers_has_no_class_for_is_not_exported(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path / "gpt2")
    module = load(tmp_path / "gpt2", upcycling={})
    with pytest.raises(ConfigurationError, match="has no gpt2 with experts"):
        save(module, tmp_path / "ours")
    make_checkpoint("llama", tmp_path / "llama")
    make_checkpoint("qwen3_dense", tmp_path / "qwen3")
    for dense, options, message in (
        ("llama", {"moe_every": 2}, "is a Mixtral only with experts in every layer"),
        ("llama", {"router": RouterConfig(score="sigmoid")}, "mixtral has a .* cannot hold router.score=sigmoid"),
        ("llama", {"router": RouterConfig(group_top_k=1)}, "cannot hold router.group_top_k=1"),
        ("qwen3", {"router": RouterConfig(bias_update_rate=0.1)}, "qwen3_moe has a plain softmax router"),
    ):
        module = load(tmp_path / dense, upcycling=UpcyclingConfig(**options))  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=message):
            save(module, tmp_path / "ours")
    edited(tmp_path / "qwen3", use_sliding_window=True)
    with pytest.raises(ConfigurationError, match="use_sliding_window=true means other layers"):
        save(load(tmp_path / "qwen3", upcycling={}), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
