"""What the strategy refuses of a Trainer and its module before it trains."""

from __future__ import annotations

from collections.abc import Collection

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from moe_lightning import seams
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import moe_layers
from moe_lightning.state.tensors import cuts_of, frozen_base


def check_module(
    trainer: pl.Trainer, module: pl.LightningModule, *, cuts_dense: bool, fixed_groups: str | None
) -> None:
    """Warn where the loss would depend on the number of ranks in spite of all.

    Args:
        cuts_dense: whether ranks have parts of the dense parameters.
        fixed_groups: why optimizers get no further groups; None: they may.

    Raises:
        ConfigurationError: what cannot be trained the same on any number of ranks.
    """
    if str(trainer.precision) == "16-mixed":
        raise ConfigurationError(
            "precision='16-mixed' scales the loss, and ranks with different experts "
            "would skip different steps: use 'bf16-mixed' or '32-true'"
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = next((c for c in callbacks if isinstance(c, StochasticWeightAveraging | WeightAveraging)), None)
    if averaging is not None and (cuts_dense or moe_layers(module)):
        raise ConfigurationError(
            f"{type(averaging).__name__} copies the module before experts and parts of layers have their places: "
            "average checkpoints after training"
        )
    finetuning = next((c for c in callbacks if isinstance(c, BaseFinetuning)), None)
    if finetuning is not None and fixed_groups is not None and trainer.state.fn == TrainerFn.FITTING:
        raise ConfigurationError(f"{type(finetuning).__name__} adds parameter groups, but {fixed_groups}")
    if seams.was_compiled(module) and moe_layers(module):
        raise ConfigurationError(
            "torch.compile of the whole module cannot follow tokens, whose numbers are known at run time only: "
            "give the Trainer the module itself, and CompileDense() among the callbacks"
        )
    if cuts_dense and frozen_base(module):
        raise ConfigurationError(
            "adapters need the frozen weights outside of experts whole on every rank, and dense=fsdp, hsdp and mesh.tp "
            "cut them: use dense=ddp or zero1, and mesh.tp=1"
        )
    if trainer.world_size > 1 and any(
        isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for m in module.modules()
    ):
        rank_zero_warn(
            "BatchNorm takes its statistics from each rank's part of the batch, so the loss depends on the number "
            "of ranks: use LayerNorm or GroupNorm, or on GPUs sync_batchnorm=True"
        )


def require_same_parameters(module: nn.Module, before: Collection[nn.Parameter]) -> None:
    """
    Args:
        before: its parameters before `on_load_checkpoint`.

    Raises:
        ConfigurationError: the hook has replaced some, and the ranks have their parts already.
    """
    known = set(before)
    replaced = next((name for name, p in module.named_parameters() if known and p not in known), None)
    if replaced is not None:
        raise ConfigurationError(
            f"the module replaces the parameter {replaced} in on_load_checkpoint, when dense=fsdp, hsdp, mesh.tp and "
            "mesh.pp have cut it already: build it with its size in __init__ or configure_model, or use dense=ddp or "
            "zero1"
        )


def cut_parameters(module: nn.Module) -> list[str]:
    """Parameters of which every rank has another part, under all of their names."""
    return list(cuts_of(module))


def identical_buffers(module: nn.Module) -> list[str]:
    """Buffers of our own layers: every rank computes the same values, so DDP need not broadcast them before each
    forward pass.
    """
    ours = [f"{name}." for name, m in module.named_modules() if type(m).__module__.startswith("moe_lightning.")]
    return [name for name, _ in module.named_buffers() if any(name.startswith(prefix) for prefix in ours)]
