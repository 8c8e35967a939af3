"""Quantised checkpoints: dequantised as they are read, as transformers and plain arithmetic do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_lightning import CheckpointError
from moe_lightning.models.huggingface.weights import from_fp8, from_mxfp4
from tests.huggingface_models import inputs_for, logits_of, make_checkpoint, reloaded
from tests.unit.test_huggingface import assert_same_logits, load, save


def rewrite(folder: Path, method: str | None, quantise: Any) -> None:
    """Quantise the tensors of a checkpoint as `quantise` says, and note a method in config.json."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= quantise(name, tensor)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    noted = {} if method is None else {"quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(json.loads(file.read_text()) | noted))


def test_mxfp4_values() -> None:
    """Against the definition, one value after the other."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 3, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (2, 3, 4), generator=generator, dtype=torch.uint8)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    result = from_mxfp4(blocks, scales)
    assert result.shape == (2, 128, 3)
    assert result.dtype == torch.bfloat16
    for e, f, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(128)).tolist():
        byte = int(blocks[e, f, i // 32, i % 32 // 2])
        nibble = byte >> 4 if i % 2 else byte & 15
        value = (-1 if nibble & 8 else 1) * magnitudes[nibble & 7] * 2.0 ** (int(scales[e, f, i // 32]) - 127)
        assert float(result[e, i, f]) == value


def test_fp8_values() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 260, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator)
    result = from_fp8(weight, scale)
    for row, column in ((0, 0), (127, 127), (128, 128), (129, 259), (5, 256)):
        assert result[row, column] == weight[row, column].float() * scale[row // 128, column // 128]


def test_an_mxfp4_checkpoint(tmp_path: Path) -> None:
    """Experts as GPT-OSS is published; the dequantised model is what comes out again."""
    make_checkpoint("gpt_oss", tmp_path / "theirs", intermediate_size=64)
    generator = torch.Generator().manual_seed(2)
    unpacked: dict[str, Tensor] = {}

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        unpacked[name] = from_mxfp4(blocks, scales).float().contiguous()
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewrite(tmp_path / "theirs", "mxfp4", quantise)
    module = load(tmp_path / "theirs")
    save(module, tmp_path / "ours")
    exported = {name: t for file in (tmp_path / "ours").glob("*.safetensors") for name, t in load_file(file).items()}
    for name, tensor in unpacked.items():
        assert torch.equal(exported[name], tensor), name
    inputs = inputs_for("gpt_oss")
    plain = reloaded(tmp_path / "ours")
    assert getattr(plain.config, "quantization_config", None) is None
    assert_same_logits(module, logits_of(plain, inputs), inputs)


def test_an_fp8_checkpoint(tmp_path: Path) -> None:
    """Matrices as DeepSeek-V3 is published, against transformers with the dequantised weights."""
    theirs = make_checkpoint("deepseek", tmp_path / "theirs")
    weights = theirs.state_dict()
    dequantised: dict[str, Tensor] = {}

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.dim() != 2 or "proj" not in name:
            return {name: tensor}
        scale = tensor.abs().max() / 448.0
        small = (tensor / scale).to(torch.float8_e4m3fn)
        dequantised[name] = small.float() * scale
        return {name: small, f"{name}_scale_inv": scale.reshape(1, 1)}

    rewrite(tmp_path / "theirs", "fp8", quantise)
    module = load(tmp_path / "theirs")
    save(module, tmp_path / "ours")
    exported = {name: t for file in (tmp_path / "ours").glob("*.safetensors") for name, t in load_file(file).items()}
    assert len(dequantised) > 20
    for name, tensor in dequantised.items():
        assert torch.equal(exported[name], tensor), name
    assert not torch.equal(exported["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"])
    inputs = inputs_for("deepseek")
    assert_same_logits(module, logits_of(reloaded(tmp_path / "ours"), inputs), inputs)


@pytest.mark.parametrize("method", ["fp8", None])
@pytest.mark.parametrize("part", ["self_attn.o_proj", "experts.0.up_proj"])
def test_scales_of_another_name_are_refused(tmp_path: Path, method: str | None, part: str) -> None:
    """As AutoFP8 and ModelOpt name them: without them, weights are wrong by factors of hundreds."""
    make_checkpoint("deepseek", tmp_path)

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(f"{part}.weight"):
            return {name: tensor}
        scale = tensor.abs().max() / 448.0
        return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.reshape(1)}

    rewrite(tmp_path, method, quantise)
    with pytest.raises(
        CheckpointError, match=rf"{part}.weight' .* has float8_e4m3fn values without .*_scale_inv', its scales: give"
    ):
        load(tmp_path)


@pytest.mark.parametrize("broken", ["fp8", "mxfp4", "mxfp4_dtype"])
def test_parts_that_do_not_fit(broken: str) -> None:
    blocks, scales = torch.zeros(3, 2, 16, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)
    calls: dict[str, Any] = {
        "fp8": lambda: from_fp8(torch.zeros(4, 4, dtype=torch.float8_e4m3fn), torch.ones(2, 1)),
        "mxfp4": lambda: from_mxfp4(blocks, scales[:2]),
        "mxfp4_dtype": lambda: from_mxfp4(blocks, scales.float()),
    }
    with pytest.raises(CheckpointError, match="do not fit"):
        calls[broken]()
