"""The sizes of a run's model, samples and processes against the memory there is; see `room`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from moe_lightning.cli.capacity import check_model, check_processes, check_sample, machine_memory, whole_memory
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.models.gpt_module import GPTModule
from moe_lightning.models.size import least_gpt_parameters, least_slot_parameters
from moe_lightning.models.swin import SwinConfig, SwinModule

_GPT_SIZES = (
    "vocab_size", "context_length", "num_layers", "num_heads", "d_model", "d_hidden", "num_experts", "d_expert",
    "num_shared_experts",
)  # fmt: skip
_SWIN_SIZES = ("num_classes", "image_size", "embed_dim", "num_experts", "mlp_ratio", "patch_size", "window_size")


def check_room(config: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Refuse what cannot be held by the machines that the configuration names.

    Raises:
        ConfigurationError: the key that is too large, and how large it may be.
    """
    trainer, data = config["trainer"], config["data"]
    devices = trainer["devices"] if isinstance(trainer["devices"], int) else len(trainer["devices"])
    nodes = trainer.get("num_nodes", 1) * config["elastic"].get("num_nodes", 1)
    memory = whole_memory(trainer, nodes)
    check_processes(devices, data.get("num_workers", 0))
    if isinstance(module, GPTModule):
        optimizer = module.optimizer_config.name
        _check_gpt(module.config, memory, config["strategy"].get("slots"), devices * nodes, optimizer)
    elif isinstance(module, SwinModule):
        _check_swin(module.config, memory, module.optimizer_config.name)
    for name in ("num_shapes", "global_batch_size"):
        if name in data:
            check_sample(f"data.{name}", data[name], data[name], machine_memory())


def _check_gpt(config: GPTConfig, memory_bytes: int, slots: int | None, ranks: int, optimizer: str) -> None:
    sizes = {f"model.{name}": getattr(config, name) or 0 for name in _GPT_SIZES}
    check_model(sizes, least_gpt_parameters(config), memory_bytes, optimizer)
    # One sample's activations between the layers, or the tables of rotary positions.
    check_sample("model.context_length", config.context_length, config.context_length * config.d_model, memory_bytes)
    if slots is not None:
        parameters = ranks * least_slot_parameters(config, slots)
        check_model({"strategy.slots": slots}, parameters, memory_bytes, optimizer)


def _check_swin(config: SwinConfig, memory_bytes: int, optimizer: str) -> None:
    sizes = {f"model.{name}": getattr(config, name) or 0 for name in _SWIN_SIZES}
    side = config.image_size
    check_sample("model.image_size", side, 3 * side * side, memory_bytes)
    widths = [(config.embed_dim or 96) << stage for stage in range(min(len(config.depths or ()), 32))]
    hidden = [math.ceil((config.mlp_ratio or 4.0) * width) for width in widths]
    dense = sum(depth * 4 * width**2 for depth, width in zip(config.depths or (), widths, strict=False))
    expert = 2 * widths[-1] * hidden[-1] * config.num_experts if widths else 0
    check_model(sizes, dense + expert + config.num_classes, memory_bytes, optimizer)
