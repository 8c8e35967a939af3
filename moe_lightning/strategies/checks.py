"""Checks of a Trainer and its module before training."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.mesh import MICRO_BATCHES_PER_RANK, STAGES_PER_RANK, ScheduleName
from moe_lightning.state.tensors import frozen_base
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS


def check_module(
    trainer: pl.Trainer, module: pl.LightningModule, *, cuts_dense: bool, fixed_groups: str | None
) -> None:
    """Check a module and its Trainer for what makes the loss depend on the number of ranks.

    Args:
        cuts_dense: True if ranks hold shards of the dense parameters.
        fixed_groups: reason for which no parameter groups may be added; None: they may.

    Raises:
        ConfigurationError: what cannot be trained the same on any number of ranks.
    """
    averaging = private_lightning.callback_of(trainer, StochasticWeightAveraging)
    if averaging is not None and (cuts_dense or moe_layers(module)):
        raise ConfigurationError(
            f"{type(averaging).__name__} copies the module before experts and parts of layers have their places: "
            "use WeightAveraging, or average checkpoints after training"
        )
    finetuning = private_lightning.callback_of(trainer, BaseFinetuning)
    if finetuning is not None and fixed_groups is not None and trainer.state.fn == TrainerFn.FITTING:
        raise ConfigurationError(f"{type(finetuning).__name__} adds parameter groups, but {fixed_groups}")
    compiled = [("", module)] if private_lightning.was_compiled(module) else []
    compiled += [(name, part) for name, part in module.named_modules() if private_torch.is_compiled(part)]
    for name, part in compiled:
        if moe_layers(part):
            raise ConfigurationError(
                f"torch.compile of {name or 'the whole module'}, which has experts, cannot follow tokens, whose "
                "numbers are known at run time only: give the Trainer the module itself, and CompileDense() among the "
                "callbacks"
            )
    steps = (module.training_step, module.validation_step, module.test_step, module.predict_step)
    if trainer.world_size > 1 and any(is_param_in_hook_signature(s, "dataloader_iter", explicit=True) for s in steps):
        raise ConfigurationError(
            "a step with dataloader_iter fetches its batches itself, so the samples of a rank's loss are not known "
            "before it: take batch in its place, or use one rank"
        )
    _check_adapters(trainer, module, cuts_dense=cuts_dense)
    embeddings = ((n, m) for n, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    for name, embedding in embeddings if trainer.world_size > 1 else ():
        option = "max_norm" if embedding.max_norm is not None else "scale_grad_by_freq"
        if embedding.max_norm is not None or embedding.scale_grad_by_freq:
            raise ConfigurationError(
                f"the embedding {name} has {option}, which changes rows by the tokens of a rank's own batch, so the "
                f"loss would depend on the number of ranks: drop {option}, or use one rank"
            )
    if trainer.world_size > 1 and any(
        isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for m in module.modules()
    ):
        rank_zero_warn(
            "BatchNorm takes its statistics from each rank's part of the batch, so the loss depends on the number "
            "of ranks: use LayerNorm or GroupNorm, or on GPUs sync_batchnorm=True"
        )


def _check_adapters(trainer: pl.Trainer, module: nn.Module, *, cuts_dense: bool) -> None:
    """Check what adapters ask for; raises as `check_module`."""
    if cuts_dense and frozen_base(module):
        raise ConfigurationError(
            "adapters need the frozen weights outside of experts whole on every rank, and dense=fsdp, hsdp and mesh.tp "
            "cut them: use dense=ddp or zero1, and mesh.tp=1"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for name, experts in ((n, m) for n, m in module.named_modules() if isinstance(m, Experts)):
        unfrozen = [base for base in sorted(experts.base_names) if experts.get_parameter(base).requires_grad]
        if unfrozen:
            raise ConfigurationError(
                f"{name}.{unfrozen[0]} would train beside adapters, but there weights of experts "
                "are neither moved nor saved: leave them frozen, or train without adapters"
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


def identical_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers that this library's layers own: every rank computes the same values, so DDP need
    not broadcast them before each forward pass. Those of other layers inside of ours may differ.
    """
    ours = [m for m in module.modules() if m is not module and type(m).__module__.startswith("moe_lightning.")]
    alike = {id(buffer) for m in ours for buffer in m.buffers(recurse=False)}
    return [name for name, buffer in module.named_buffers() if id(buffer) in alike]


def reduced_names(names: Sequence[list[str]], *, may_lack: bool) -> list[str]:
    """Return the names of the values that all ranks reduce, in one order.

    Args:
        names: of those that each rank would reduce, in its order.
        may_lack: ranks come and go; one that joined in an epoch may not have logged all.

    Raises:
        ConfigurationError: some ranks lack a name that others have.
    """
    everywhere = set(names[0]).intersection(*names)
    lacking = [name for each in names for name in each if name not in everywhere]
    if lacking and not may_lack:
        raise ConfigurationError(
            f"some ranks have logged {lacking[0]} and others have not, and sync_dist=True reduces it over all: log the "
            "same names on every rank, with batch_size=0 where a batch has no value for one"
        )
    return [name for name in names[0] if name in everywhere]


def chosen_micro_batches(wanted: int | None, schedule: ScheduleName, ranks: int) -> int:
    """Return the number of micro-batches of a batch; 1 without a pipeline.

    Args:
        wanted: by the user.
        ranks: of the pipeline.

    Raises:
        ConfigurationError: a schedule that cannot run so many, or what has no meaning without a pipeline.
    """
    if ranks == 1:
        if wanted is not None or schedule != "1f1b":
            raise ConfigurationError(
                f"schedule={schedule} and micro_batches={wanted} are for pipelines, and mesh.pp is 1: drop them"
            )
        return 1
    micros = MICRO_BATCHES_PER_RANK * ranks if wanted is None else wanted
    if micros < ranks:
        raise ConfigurationError(
            f"micro_batches={micros} cannot fill the {ranks} stages of mesh.pp: use at least {ranks}"
        )
    if STAGES_PER_RANK[schedule] > 1 and micros % ranks:
        raise ConfigurationError(
            f"schedule={schedule} needs a multiple of mesh.pp={ranks} micro-batches, not micro_batches={micros}: use "
            f"{micros // ranks * ranks} or {(micros // ranks + 1) * ranks}"
        )
    return micros


def check_for_pipeline(module: pl.LightningModule, *, stage_size: int) -> None:
    """
    Args:
        stage_size: ranks of a stage, which sum its gradients.

    Raises:
        ConfigurationError: what cannot be trained in stages.
    """
    require_automatic_optimization(module, "mesh.pp cuts steps in stages", cure="mesh.pp=1")
    if stage_size > 1:
        require_dense_gradients(module, "mesh.pp with several ranks in a stage")


def require_automatic_optimization(module: pl.LightningModule, reason: str, *, cure: str) -> None:
    """
    Args:
        reason: for which it must be known where a step ends, in words.
        cure: what need not know it, in words.

    Raises:
        ConfigurationError: manual optimization.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{reason}, and manual optimization does not state where a step ends: use automatic optimization, or {cure}"
        )


def require_dense_gradients(module: nn.Module, beside: str) -> None:
    """
    Args:
        beside: what sums gradients of known size only, in words.

    Raises:
        ConfigurationError: an embedding with sparse gradients.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ConfigurationError(
                f"the embedding {name} has sparse=True, and {beside} sums dense gradients only: use sparse=False, or "
                "dense=ddp or zero1 without mesh.pp"
            )


def require_own_sharding(dense: str, beside: str) -> None:
    """
    Args:
        beside: options that work with the shardings of this library only, in words.

    Raises:
        ConfigurationError: another sharding.
    """
    *others, last = DENSE_SHARDINGS
    if dense not in (*others, last):
        raise ConfigurationError(
            f"{beside} and dense={dense} do not go together: use dense={', '.join(others)} or {last}"
        )
