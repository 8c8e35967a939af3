"""Adapters: what they refuse, four-bit weights, and Hugging Face models whose adapters peft loads and that merge."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.models.gpt import GPT, GPTConfig
from moe_lightning.moe import nf4
from moe_lightning.moe.adapters import AdapterConfig, add_adapters
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.nf4 import dequantise, quantise
from moe_lightning.state.table import State
from tests.distributed.training import TINY
from tests.parameters import slow


def test_four_bits_are_the_nearest_of_sixteen_and_a_product_is_that_of_the_numbers_they_stand_for() -> None:
    torch.manual_seed(1)
    weights_SDF = torch.randn(3, 32, 24)
    codes, scales = (torch.stack(parts) for parts in zip(*map(quantise, weights_SDF), strict=True))
    whole_SDF = torch.stack([dequantise(*pair, torch.float32) for pair in zip(codes, scales, strict=True)])
    whole_SDF = whole_SDF.view_as(weights_SDF)
    assert codes.nbytes == weights_SDF.numel() // 2
    gap = 0.16 * scales.repeat_interleave(64, dim=1).view_as(weights_SDF)  # half of the widest, of the magnitude
    assert ((whole_SDF - weights_SDF).abs() <= gap).all()
    again, _ = quantise(whole_SDF[0])
    assert torch.equal(again, codes[0]), "what was quantised is what it is"

    x_MD, counts_S = torch.randn(7, 32, requires_grad=True), torch.tensor([4, 0, 3])
    out_MF = nf4.grouped_mm(x_MD, codes, scales, 24, counts_S)
    expected_MF = torch.cat([x_MD[:4] @ whole_SDF[0], x_MD[4:] @ whole_SDF[2]])
    torch.testing.assert_close(out_MF, expected_MF)
    grad = torch.randn_like(out_MF)
    torch.testing.assert_close(*(torch.autograd.grad(out, x_MD, grad)[0] for out in (out_MF, expected_MF)))


def test_more_mistakes() -> None:
    with pytest.raises(ConfigurationError, match="targets names experts"):
        add_adapters(nn.Linear(4, 4), {})
    with pytest.raises(ConfigurationError, match="not a multiple of 64"):
        add_adapters(nn.Sequential(Experts(2, 6, 5)), {"kind": "qlora"})
    model = GPT(GPTConfig(**TINY))
    add_adapters(model, {})
    with pytest.raises(ConfigurationError, match="has adapters already"):
        add_adapters(model, {})


def test_only_adapters_train_and_at_first_they_change_nothing() -> None:
    torch.manual_seed(0)
    model, ids = GPT(GPTConfig(**TINY)), torch.randint(64, (2, 16))
    before = model(ids)
    add_adapters(model, AdapterConfig(rank=2, targets=("experts", "attention", "router")))
    assert torch.equal(model(ids), before)
    model(ids).sum().backward()
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.grad is not None} == {
        "lora_a", "lora_b", *(f"lora_w_{way}_{part}" for way in ("up", "down") for part in "ab")
    }  # fmt: skip
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


def test_adapters_that_a_user_freezes_are_saved_too() -> None:
    model = GPT(GPTConfig(**TINY))
    add_adapters(model, AdapterConfig(rank=2, targets=("attention",)))
    state = partial(State, model, [], [], state_ranks={}, rank=0, world_size=1)
    before = {piece.key for piece in state().dense_pieces()}
    for name, parameter in model.named_parameters():
        if name.endswith("lora_a"):
            parameter.requires_grad_(False)
    assert {piece.key for piece in state().dense_pieces()} == before
    assert any("lora_a" in key for key in before)


def test_frozen_rows_come_from_the_source_when_no_rank_has_them() -> None:
    rows = {"w_up": torch.randn(8, 16), "w_down": torch.randn(16, 8)}
    experts = Experts(2, 8, 16)
    experts.freeze(rank=2, scale=1.0, in_4_bits=True)
    with pytest.raises(CheckpointError, match="no rank holds the frozen weights of expert 1 any more"):
        experts.read_base([1])
    experts.source = lambda expert: rows
    trained = experts.lora_w_up_a.detach().clone()
    experts.read_base([1])
    assert torch.equal(experts.w_up_codes[1], quantise(rows["w_up"])[0])
    assert experts.base_digest[0] != experts.base_digest[1]
    assert torch.equal(experts.lora_w_up_a, trained), "adapters come from elsewhere"


TARGETS = ["experts", "attention", "router"]


def disturb(model: nn.Module) -> None:
    """Adapters that change something."""
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))


def trainer_with(module: Any, path: Path, **options: Any) -> Any:
    """A Trainer that has exported the module's adapters and its sum with them, and saved it; nothing was trained."""
    from torch.utils.data import DataLoader

    from tests.distributed.training import RandomTokens, quiet, quiet_trainer
    from tests.huggingface_models import export

    quiet()
    trainer = quiet_trainer(max_steps=1, **options)
    trainer.fit(module, DataLoader(RandomTokens(2), batch_size=2))
    disturb(module)
    export(trainer, path / "merged")
    export(trainer, path / "adapter", adapter_alone=True)
    return trainer


def check_exports(name: str, path: Path, adapter: dict[str, Any], *, in_peft: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[peft]'")
    from moe_lightning.models.huggingface.module import HuggingFaceModule
    from tests.huggingface_models import inputs_for, logits_of, make_checkpoint, reloaded

    plain = logits_of(make_checkpoint(name, path / "theirs", initializer_range=0.2), inputs_for(name))
    config = {"pretrained": str(path / "theirs"), "context_length": 16, "adapter": {"rank": 3, "alpha": 5.0, **adapter}}
    module = HuggingFaceModule(config, {"lr": 1e-3, "warmup_steps": 0})
    trainer_with(module, path)
    ours: Tensor = module.eval()(inputs_for(name)).detach()
    assert (ours - plain).abs().max() > 0.01, "nothing was changed, so nothing was tested"
    close = {"rtol": 0.0, "atol": 1e-5 * max(1.0, float(ours.abs().max()))}
    torch.testing.assert_close(logits_of(reloaded(path / "merged"), inputs_for(name)), ours, **close)
    if in_peft:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found (missing|unexpected) adapter keys")
            loaded = peft.PeftModel.from_pretrained(reloaded(path / "theirs"), path / "adapter")
        torch.testing.assert_close(logits_of(loaded, inputs_for(name)), ours, **close)
    tokens = inputs_for(name)
    module.loss((tokens, tokens.roll(-1, dims=1))).backward()
    idle = [key for key, p in module.named_parameters() if "lora_" in key and (p.grad is None or not p.grad.any())]
    assert not idle, "adapters that nothing reads"
    cards = {folder: (path / folder / "README.md").read_text() for folder in ("merged", "adapter")}
    assert "library_name: peft" in cards["adapter"]
    assert "were trained; this folder has nothing else." in cards["adapter"]
    assert "| steps | 1 |" in cards["adapter"]
    assert "were trained; they are merged into the weights." in cards["merged"]
    assert str(path) not in "".join(cards.values())


PEFT_CASES: list[tuple[str, list[str]]] = [
    *((name, TARGETS) for name in ("mixtral_tied", "olmoe", "gpt_oss", "granite", "minimax")),
    *((name, [*TARGETS, "dense"]) for name in ("qwen2", "qwen3", "qwen3_5", "deepseek", "deepseek_v2")),
    *((name, [*TARGETS, "dense"]) for name in ("glm4", "ernie", "jamba", "llama4")),
    *((name, ["experts"]) for name in ("qwen2", "qwen3_5", "granite", "jamba", "llama4")),
    *(("deepseek", [target]) for target in (*TARGETS, "dense")),
    ("mixtral", ["router"]),
    ("granite", ["router"]),
    ("jamba", ["dense"]),
    ("gpt_oss", ["experts"]),
]


@pytest.mark.parametrize(
    ("name", "targets"),
    [slow(*case) if len(case[1]) == 1 and case[0] not in ("granite", "deepseek") else case for case in PEFT_CASES],
)
def test_peft_loads_the_adapters_and_plain_transformers_the_sum(name: str, targets: list[str], tmp_path: Path) -> None:
    check_exports(name, tmp_path, {"targets": targets}, in_peft=True)


def test_every_family_is_tried_in_peft() -> None:
    from moe_lightning.models.huggingface.families import FAMILIES
    from tests.huggingface_models import SPARSE, transformers

    classes = [SPARSE[name][0] for name, targets in PEFT_CASES if "experts" in targets]
    assert {getattr(transformers, each).model_type for each in classes} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "expert", "shapes"),
    [
        ("mixtral", "block_sparse_moe.experts.5.w{}", {"1": (48, 32), "2": (32, 48), "3": (48, 32)}),
        ("qwen2", "mlp.experts.5.{}_proj", {"gate": (24, 32), "up": (24, 32), "down": (32, 24)}),
        ("qwen3", "mlp.experts.5.{}_proj", {"gate": (24, 32), "up": (24, 32), "down": (32, 24)}),
    ],
)
def test_adapters_of_experts_have_the_names_that_vllm_reads(
    name: str, expert: str, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    """A pair of matrices for each matrix of each expert, by the names of the weights."""
    from safetensors.torch import load_file

    from moe_lightning.models.huggingface.module import HuggingFaceModule
    from tests.huggingface_models import make_checkpoint

    make_checkpoint(name, tmp_path / "theirs")
    trainer_with(HuggingFaceModule({"pretrained": str(tmp_path / "theirs"), "context_length": 16,
                                    "adapter": {"rank": 3}}), tmp_path)  # fmt: skip
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for matrix, (outputs, inputs) in shapes.items():
        key = f"model.layers.1.{expert.format(matrix)}"
        assert weights[f"{key}.weight"].shape == (outputs, inputs)
        assert adapters[f"base_model.model.{key}.lora_A.weight"].shape == (3, inputs)
        assert adapters[f"base_model.model.{key}.lora_B.weight"].shape == (outputs, 3)
    assert all(".experts." in key for key in adapters)


def test_linear_attention_counts_as_attention(tmp_path: Path) -> None:
    from tests.huggingface_models import make_checkpoint

    theirs = make_checkpoint("qwen3_5", tmp_path)
    add_adapters(theirs, {"rank": 2, "targets": ["attention"]})
    linear = {name for name, layer in theirs.named_modules() if "linear_attn" in name and isinstance(layer, nn.Linear)}
    assert linear
    assert all(f"{name}.adapter.lora_a" in theirs.state_dict() for name in linear)


def test_four_bit_weights_merge_as_the_numbers_they_stand_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_exports("olmoe", tmp_path, {"kind": "qlora"}, in_peft=False)
    assert "beside experts rounded to four bits (model.adapter.kind=qlora)" in capsys.readouterr().err
    assert "with those of theirs the model is another one.\n" in (tmp_path / "adapter" / "README.md").read_text()


def test_a_model_without_adapters_has_none_to_write() -> None:
    from moe_lightning.models.huggingface.export import require_adapters

    with pytest.raises(ConfigurationError, match="has no adapters"):
        require_adapters(None)


def test_four_bits_do_not_depend_on_the_default_precision() -> None:
    matrix = torch.randn(64, 64)
    codes, _ = quantise(matrix)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again, _ = quantise(matrix)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(codes, again)


def test_a_matrix_of_any_layout_is_quantised_without_a_warning() -> None:
    torch.set_warn_always(True)  # torch says such things once a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning is the failure
            quantise(torch.randn(64, 48).T)
            quantise(torch.randn(4, 128).T)
    finally:
        torch.set_warn_always(False)
