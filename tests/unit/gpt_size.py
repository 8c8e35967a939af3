"""The size of a GPT, counted."""

from __future__ import annotations

import torch

from moe_lightning.models.gpt import GPT, GPTConfig


def count_parameters(config: GPTConfig) -> int:
    """Distinct parameters of the model, found without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())
