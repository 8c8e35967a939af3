"""Trained adapters for others: added to the weights of a plain checkpoint, or alone in a folder that peft loads.

peft keeps the products of all experts of a stack in one pair of matrices: A has a row for each (expert, rank), B a
column for each (rank, expert). The stack that comes second in transformers' module wraps the first one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_lightning.errors import ConfigurationError
from moe_lightning.models.huggingface.export import Export, existing
from moe_lightning.models.huggingface.families import MODEL_BLOCK, OUR_ROUTER
from moe_lightning.moe.adapters import AdapterConfig
from moe_lightning.moe.experts import dequantise

_DENSE = ".adapter.lora_"
_PREFIX = "base_model.model."
_STACKS = {"w_up": ("gate_up_proj", ".base_layer"), "w_down": ("down_proj", "")}
"""Of our stacks: what transformers calls them, and where peft puts their adapters."""


def merged_dense(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """The model's tensors outside of experts with their adapters added, in float32 where there are any.

    Args:
        tensors: by name; adapters of layers among them.
    """
    merged = {name: tensor for name, tensor in tensors.items() if _DENSE not in name}
    for name, a_RD in tensors.items():
        if name.endswith(f"{_DENSE}a"):
            layer = name.removesuffix(f"{_DENSE}a")
            b_FR = tensors[f"{layer}{_DENSE}b"]
            merged[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() + config.scale * b_FR.float() @ a_RD.float()
    return merged


def merged_experts(
    stacks_EX: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: AdapterConfig
) -> dict[str, Tensor]:
    """The stacks of one block with their adapters added, in float32 where there are any.

    Args:
        stacks_EX: by the names of our parameters.
        shapes: of an expert's weights by name.
    """
    merged = {}
    for name, shape in shapes.items():
        if name in stacks_EX:
            merged[name] = stacks_EX[name]
        else:
            pairs = zip(stacks_EX[f"{name}_codes"], stacks_EX[f"{name}_scales"], strict=True)
            merged[name] = torch.stack([dequantise(*pair, torch.float32).view(shape) for pair in pairs])
        if f"lora_{name}_a" in stacks_EX:
            a_EDR, b_ERF = (stacks_EX[f"lora_{name}_{part}"].float() for part in "ab")
            merged[name] = torch.baddbmm(merged[name].float(), a_EDR, b_ERF, alpha=config.scale)
    return merged


def write_adapter(
    path: Path,
    export: Export,
    config: AdapterConfig,
    base: str,
    dense: Mapping[str, Tensor],
    experts: Iterable[Mapping[str, Tensor]],
) -> int:
    """Write a folder that `peft.PeftModel.from_pretrained` loads onto the plain checkpoint; returns the bytes of it.

    Args:
        path: of the folder, which must not exist.
        export: of the model.
        base: the plain checkpoint, for peft's own notes.
        dense: tensors by the names in our model, the adapters of layers among them.
        experts: for each block the full stacks [E, ...], of which only the adapters are taken.

    Raises:
        ConfigurationError: the folder exists already, or peft cannot load these adapters.
    """
    require_peft_knows(config)
    if path.exists():
        raise existing(path)
    tensors, modules, parameters = _dense_adapters(export, dense)
    for block, stacks in zip(export.blocks, experts, strict=True):
        for ours, (theirs, place) in _STACKS.items():
            if f"lora_{ours}_a" not in stacks:
                continue
            a_EDR, b_ERF = stacks[f"lora_{ours}_a"], stacks[f"lora_{ours}_b"]
            if ours == "w_up":
                b_ERF = export.family.layout.columns(b_ERF)
            stem = f"{_PREFIX}{block}.experts{place}"
            tensors[f"{stem}.lora_A.weight"] = a_EDR.transpose(1, 2).flatten(0, 1)
            tensors[f"{stem}.lora_B.weight"] = b_ERF.permute(2, 1, 0).flatten(1)
            parameters.add(f"{MODEL_BLOCK}.experts.{theirs}")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters),
        "inference_mode": True,
    }
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    staged.mkdir(parents=True)
    try:
        (staged / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, staged / "adapter_model.safetensors", {"format": "pt"})
        os.rename(staged, path)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return sum(tensor.nbytes for tensor in plain.values())


def _dense_adapters(export: Export, dense: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """Tensors by peft's names, adapted linear layers, adapted parameters."""
    tensors, modules, parameters = dict[str, Tensor](), set[str](), set[str]()
    for name, tensor in dense.items():
        layer, found, part = name.partition(_DENSE)
        if not found:
            continue
        if layer.endswith(OUR_ROUTER):
            layer = f"{layer.removesuffix(OUR_ROUTER)}{export.family.router}"
            parameters.add(f"{MODEL_BLOCK}.{export.family.router}.weight")
        else:
            modules.add(layer)
        tensors[f"{_PREFIX}{layer}.lora_{part.upper()}.weight"] = tensor
    return tensors, modules, parameters


def require_peft_knows(config: AdapterConfig | None) -> None:
    """
    Raises:
        ConfigurationError: there are no adapters, or peft cannot load them.
    """
    if config is None:
        raise ConfigurationError("the model has no adapters (model.adapter) to be written alone: write it whole")
    if "dense" in config.targets:  # its conversion of old configurations goes by these names
        raise ConfigurationError(
            "peft takes the linear layers of targets=dense for those of experts: write the model merged, or train "
            "without dense"
        )
