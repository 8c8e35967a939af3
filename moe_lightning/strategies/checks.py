"""Checks of a Trainer, its module and its optimizers before training.

Optimizers are tried on small parameters. Experts are rows of stacked parameters, and the neighbors of an expert's row
differ from rank to rank. Replicas diverge under an optimizer with a statistic over the whole tensor (Adafactor's
clipping, LBFGS's products), or whose arithmetic depends on the position of a row (fused kernels, for rows that do not
fill vector registers).
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.mesh import STAGES_PER_RANK, ScheduleName
from moe_lightning.state.table import require_row_each
from moe_lightning.state.tensors import frozen_base, is_cut, local, swap_parameters
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


_STEPS = 6
_FIRST_WEIGHTS = 1e-3
"""Small enough for the last bits of an update to be bits of the weights."""

_NEIGHBORS = (2, 3, 5, 9, 128)
"""Numbers of slots, of which the trial takes the last; a vector register ends at another place in each of the first
four. The most have more than 4096 numbers, the size from which eight-bit optimizers quantize their states."""

_VECTOR = 64
"""Rows are tried with as many numbers as fill the last vector register of the real ones."""


_LINE_BYTES = 64
"""Bytes of a vector of torch's fused kernels on the CPU; the rest of a tensor is computed element by element, with
another rounding."""


def require_same_names(names: Sequence[list[str]]) -> None:
    """
    Args:
        names: of the values that each rank reduces with others, in its order.

    Raises:
        ConfigurationError: they differ.
    """
    other = next((rank for rank, each in enumerate(names) if each != names[0]), None)
    if other is not None:
        pairs = zip_longest(names[0], names[other], fillvalue="nothing")
        first, second = next((one, two) for one, two in pairs if one != two)
        raise ConfigurationError(
            f"one rank has logged {first} where another has logged {second}, and sync_dist=True reduces values in the "
            "order of their first logs: log the same names in the same order on every rank, with batch_size=0 where a "
            "batch has no value for one"
        )


def require_no_exchanged_weights(optimizers: Sequence[Optimizer], dense: str) -> None:
    """
    Args:
        dense: a sharding, which keeps states, or parts of weights and states, on one rank each.

    Raises:
        ConfigurationError: an optimizer that exchanges weights by its states.
    """
    for optimizer in optimizers:
        if callable(getattr(optimizer, "eval", None)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} exchanges weights by its states in eval() and train(), and "
                f"dense={dense} keeps a part of these on each rank: use dense=ddp"
            )


def require_updates_by_expert(optimizers: Sequence[Optimizer], stacks: Collection[nn.Parameter]) -> None:
    """Try every optimizer on small parameters with its own options.

    Args:
        stacks: the parameters whose rows are experts.

    Raises:
        ConfigurationError: one that updates an expert differently beside other experts, or has a state without a row
            for each of them.
    """
    experts = set(stacks)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            outlines = {_outline(p): p for p in group["params"] if p in experts}
            for parameter in outlines.values():
                _require(optimizer, group, parameter)


def require_updates_by_parameter(optimizers: Sequence[Optimizer], sharding: str) -> None:
    """Try every optimizer on a small parameter, alone and beside others, with its own options.

    Args:
        sharding: option that gives each rank some of the parameters only.

    Raises:
        ConfigurationError: one that updates a parameter by what is in others, such as by the norm of all gradients.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            here = [p for p in group["params"] if not p.is_meta]  # those are in other stages
            if here and not _updates_by_parameter(optimizer, group, here[0]):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} updates a parameter by what is in others, and {sharding} gives each "
                    "rank some of them only: use AdamW or another optimizer that updates each by itself, or dense=ddp "
                    "without mesh.pp"
                )


def _updates_by_parameter(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> bool:
    """Return True if the optimizer updates a parameter alike whatever is beside it, or cannot be tried."""
    generator = torch.Generator().manual_seed(0)
    size = (4, *(8,) * parameter.ndim)  # four parameters
    weights, *gradients = (torch.randn(size, generator=generator, device="cpu") for _ in range(1 + _STEPS))
    scale = torch.tensor([1.0, 100.0, 100.0, 100.0]).view(-1, *(1,) * parameter.ndim)
    found = []
    try:
        for count in (1, 4):
            trials = [nn.Parameter(values.to(parameter)) for values in (scale * weights)[:count]]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # of an optimizer that adds noise
                replica = _like(optimizer, group, *trials)
                for gradient in gradients:
                    for trial, values in zip(trials, scale * gradient, strict=False):
                        trial.grad = values.to(parameter)
                    replica.step(lambda: 0.0)
            found.append(trials[0].detach())
    except Exception:  # of a class that we do not know
        return True
    alone, beside = found
    return torch.allclose(alone, beside, rtol=0, atol=0, equal_nan=True)


def require_one_closure_call(optimizer: Optimizer, has_begun: bool, dense: str) -> None:
    """Check that an optimizer of parameters that ranks share computes the gradients of a step once.

    Args:
        has_begun: this step's update has begun; gradients are computed again.
        dense: the sharding.

    Raises:
        ConfigurationError: it calls its closure again.
    """
    if has_begun:
        raise ConfigurationError(
            f"{type(optimizer).__name__} calls its closure more than once in a step, but dense={dense} exchanges what "
            "ranks update after the step only: use dense=ddp, or an optimizer that calls it once"
        )


def require_host_updates(optimizers: Sequence[Optimizer]) -> None:
    """Try every optimizer on a small parameter on the host that takes the place of another one.

    Raises:
        ConfigurationError: one that cannot update it.
    """
    for optimizer in optimizers:
        for group in (group for group in optimizer.param_groups if group["params"]):
            if (reason := _why_not_on_host(optimizer, group)) is not None:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} cannot update parameters on the host, as offload_optimizer=true asks "
                    f"for ({reason}): use AdamW without capturable, another optimizer of torch, or "
                    "offload_optimizer=false"
                )


def _why_not_on_host(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return a reason for which the optimizer cannot update a replaced parameter; None if there is none."""
    ndim, _, dtype = _outline(group["params"][0])
    first, other = (nn.Parameter(torch.ones((2,) * ndim, dtype=dtype)) for _ in range(2))
    try:
        replica = _like(optimizer, group, first)
    except Exception:  # of a class that we do not know
        return None
    swap_parameters(replica, {first: other})
    other.grad = torch.ones_like(other)
    try:
        replica.step(lambda: 0.0)
    except Exception as error:
        return str(error).partition("\n")[0]
    return "it keeps a list of parameters of its own" if first in replica.state else None


def require_updates_by_row(optimizers: Sequence[Optimizer]) -> None:
    """Try the optimizers of parameters that are cut by rows: the update of a row must not depend on rows that are
    elsewhere.

    Raises:
        ConfigurationError: one with a statistic over the whole parameter.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            cut = [p for p in group["params"] if is_cut(p) and not p.is_meta]  # those are in other stages
            kinds = {local(p).dtype: nn.Parameter(local(p).detach()) for p in cut}
            for block in kinds.values():
                if not _are_alike(_tried(optimizer, group, block), rtol=1e-3):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} updates the rows of a parameter by what is in other rows, and "
                        "dense=fsdp, hsdp and mesh.tp keep those on other ranks: "
                        f"{_cure(block, 'AdamW')}, or dense=zero1 and mesh.tp=1"
                    )


def _are_alike(rows: Sequence[Tensor], rtol: float = 0.0) -> bool:
    """Return True if all are as the first one; there may be none."""
    return all(torch.allclose(rows[0], row, rtol=rtol, atol=0) for row in rows[1:])


def _require(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
    name = type(optimizer).__name__
    if group.get("fused") and parameter.device.type == "cpu" and parameter[:1].nbytes % _LINE_BYTES:
        raise _mixes(name, "drop fused=True")  # whether a small trial shows it is a matter of luck
    rows = _tried(optimizer, group, parameter)
    if not _are_alike(rows):
        is_fused = group.get("fused") and parameter.dtype == torch.float32
        raise _mixes(name, "drop fused=True" if is_fused else _cure(parameter, "AdamW, Adam, SGD"))
    if rows:  # it can be tried
        with torch.random.fork_rng(devices=[]):
            trial, states = _trained(optimizer, group, parameter, _NEIGHBORS[-1])
        for scope, value in states.items():
            if isinstance(value, Tensor) and value.ndim:  # a number belongs to all rows
                require_row_each(scope, value, "experts", trial)


def _cure(parameter: nn.Parameter, optimizers: str) -> str:
    """Return what helps against an optimizer that mixes the rows of a parameter.

    Below float32, torch rounds the end of a vector otherwise than its rest, and AdamW may fail as well.
    """
    if parameter.dtype == torch.float32:
        return f"use {optimizers} or another elementwise optimizer"
    adamw = torch.optim.AdamW([parameter])
    other = "AdamW, or " if _are_alike(_tried(adamw, adamw.param_groups[0], parameter)) else ""
    return f"use {other}a precision with float32 parameters instead of {str(parameter.dtype)[6:]}"


def _tried(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> list[Tensor]:
    """Return a row after some steps, alone and beside others; empty if the optimizer cannot be tried."""
    try:
        with torch.random.fork_rng(devices=[]):
            return [_trained(optimizer, group, parameter, slots)[0][-1] for slots in (1, *_NEIGHBORS)]
    except Exception as error:  # of a class that we do not know, on parameters that are not its own
        rank_zero_warn(
            f"{type(optimizer).__name__} cannot be tried on a small parameter ({type(error).__name__}), so whether it "
            "updates every row by itself, and keeps replicas of experts alike, shows only where check_state_every "
            "compares them"
        )
        return []


def _mixes(name: str, cure: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} updates an expert differently beside other experts, so replicas would diverge and the loss would "
        f"depend on the number of ranks: {cure} for the parameters of experts"
    )


def _outline(parameter: nn.Parameter) -> tuple[int, int, torch.dtype]:
    """Return the properties, besides its values, on which the update of a row can depend: dimensions, rest of a vector,
    dtype.
    """
    return parameter.ndim, parameter[:1].numel() % _VECTOR, parameter.dtype


def _trained(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter, slots: int
) -> tuple[Tensor, dict[str, Any]]:
    """Return so many slots after some steps, an expert in the last and random rows in the others, and their states."""
    ndim, rest, dtype = _outline(parameter)
    shape = [1] * (ndim - 2) + [_VECTOR + rest]

    def rows(seed: int) -> Tensor:
        expert = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed), device="cpu")
        others = torch.randn(slots - 1, *shape, generator=torch.Generator().manual_seed(1000 + seed), device="cpu")
        return torch.cat([100.0 * others, expert]).to(parameter.device, dtype)

    trial = nn.Parameter(_FIRST_WEIGHTS * rows(0))
    replica = _like(optimizer, group, trial)
    for step in range(_STEPS):
        trial.grad = rows(1 + step) * 10.0**step
        replica.step(lambda: 0.0)
    return trial.detach(), replica.state.get(trial, {})


def _like(optimizer: Optimizer, group: dict[str, Any], *parameters: nn.Parameter) -> Optimizer:
    """Build an optimizer of these parameters, of the same class and with a group's options."""
    known = inspect.signature(type(optimizer)).parameters
    options = {name: copy.deepcopy(value) for name, value in group.items() if name in known and name != "params"}
    return type(optimizer)(list(parameters), **options)


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
    micros = 2 * ranks if wanted is None else wanted
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
    require_automatic_optimization(module, "which mesh.pp cuts in stages", cure="mesh.pp=1")
    if stage_size > 1:
        require_dense_gradients(module, "mesh.pp with several ranks in a stage")


def require_automatic_optimization(module: pl.LightningModule, reason: str, *, cure: str) -> None:
    """
    Args:
        reason: for which steps cannot be divided further, in words.
        cure: what has no such reason, in words.

    Raises:
        ConfigurationError: manual optimization.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"manual optimization calls backward inside of a step, {reason}: use automatic optimization, or {cure}"
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


def require_one_optimizer_each(
    groups: Sequence[Sequence[Sequence[nn.Parameter]]], module: nn.Module, *, beside: str, cure: str
) -> None:
    """
    Args:
        groups: the parameters in the groups of each optimizer.
        beside: what has one place for the states of a parameter, in words.
        cure: what has more, in words.

    Raises:
        ConfigurationError: a parameter is in several optimizers.
    """
    homes = Counter(parameter for own in groups for parameter in set(chain.from_iterable(own)))
    for name, parameter in module.named_parameters():
        if homes[parameter] > 1:
            raise ConfigurationError(
                f"{name} is in {homes[parameter]} optimizers, and {beside} keeps the states of one: give each "
                f"parameter to one optimizer, or use {cure}"
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
