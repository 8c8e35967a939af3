"""Activation checkpointing of the dense parts of a model: attention, dense feed-forward layers, shared experts.

MoE layers keep their activations: computing them again would send every token to its experts once more.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from moe_lightning.callbacks.compile_dense import CompileDense, dense_parts
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.randomness import remembering


class RecomputeDense(Callback):
    """While a Trainer fits, the dense parts of the module keep their inputs only, and compute what lies between again
    in the backward pass: the same losses, to the last bit, with less memory and about a third more dense computation.

    Attributes:
        recomputed: names of the parts.

    Raises:
        ConfigurationError: when training starts, the parts are compiled, too.
    """

    def __init__(self) -> None:
        self.recomputed: list[str] = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if any(isinstance(callback, CompileDense) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigurationError(
                "CompileDense and RecomputeDense both take the dense parts: Inductor decides by itself what to compute "
                "again, so drop one of them"
            )
        for name, part in dense_parts(pl_module):
            if "forward" not in vars(part):  # somebody else's, such as a quantiser's, stays
                part.forward = MethodType(_forward, part)
                self.recomputed.append(name)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for name in self.recomputed:
            del pl_module.get_submodule(name).forward
        self.recomputed = []


def _forward(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In the place of a part's own."""
    own = type(part).forward
    if not (part.training and torch.is_grad_enabled()):
        return own(part, *args, **kwargs)
    contexts = partial(remembering, list(part.modules()))
    return checkpoint(own, part, *args, use_reentrant=False, context_fn=contexts, **kwargs)
