"""Checks of optimizers before training: trials on small parameters, with the options of their groups.

Experts are rows of stacked parameters, and the neighbors of an expert's row differ from rank to rank. Replicas diverge
under an optimizer with a statistic over the whole tensor (Adafactor's clipping, LBFGS's products), or whose arithmetic
depends on the position of a row (fused kernels, for rows that do not fill vector registers). In each trial a row is
updated alone and beside others, and must come out the same.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from moe_lightning.checkpoint.training_state import preserved_generators
from moe_lightning.data.sampler import OwnGenerators
from moe_lightning.errors import ConfigurationError
from moe_lightning.state.table import require_row_each
from moe_lightning.state.tensors import is_sharded, local

_STEPS = 6
_FIRST_WEIGHTS = 1e-3
"""Small enough for the last bits of an update to be bits of the weights."""

_ROWS = (1, 2, 3, 5, 9, 128)
"""Numbers of rows, of which the trial takes the last; a vector register ends at another place in each of the first
five. The most have more than 4096 numbers, the size from which eight-bit optimizers quantize their states."""

_VECTOR = 64
"""Rows are tried with as many numbers as fill the last vector register of the real ones."""

_LINE_BYTES = 64
"""Bytes of a vector of torch's fused kernels on the CPU; the rest of a tensor is computed element by element, with
another rounding."""

_warn_once = cache(rank_zero_warn)  # several groups and checks would repeat it


class _Outline(NamedTuple):
    """Properties of a parameter, besides its values, on which the update of a row can depend."""

    dimensions: int
    rest: int  # of numbers that do not fill a vector register
    dtype: torch.dtype


class _Trial(NamedTuple):
    """A small parameter after some updates, and its states in the optimizer."""

    parameter: Tensor
    states: dict[str, Any]


@dataclass(frozen=True)
class _Options:
    """Options of a parameter group that the class of its optimizer takes; alike where they are printed alike."""

    text: str
    values: dict[str, Any] = field(compare=False)


def require_updates_by_expert(optimizers: Sequence[Optimizer], stacks: Collection[nn.Parameter]) -> None:
    """
    Args:
        stacks: the parameters whose rows are experts.

    Raises:
        ConfigurationError: an optimizer that updates an expert differently beside other experts, or has a state without
            a row for each of them.
    """
    experts = set(stacks)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            outlines = {_outline(p): p for p in group["params"] if p in experts}
            for parameter in outlines.values():
                _require_updates_by_expert(optimizer, group, parameter)


def _require_updates_by_expert(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
    is_fused = group.get("fused")
    ends_within_vector = is_fused and parameter.device.type == "cpu" and parameter[:1].nbytes % _LINE_BYTES
    trials = [] if ends_within_vector else _tried(optimizer, group, parameter, _ROWS)  # one shows it with luck only
    if ends_within_vector or not _are_alike(trials):
        cure = "drop fused=True" if is_fused else _ELEMENTWISE
        raise ConfigurationError(
            f"{type(optimizer).__name__} updates an expert differently beside other experts, so replicas would diverge "
            f"and the loss would depend on the number of ranks: {cure} for experts"
        )
    if trials:  # it can be tried
        for scope, value in trials[-1].states.items():
            if isinstance(value, Tensor) and value.ndim:  # a number belongs to all rows
                require_row_each(scope, value, "experts", trials[-1].parameter)


_ELEMENTWISE = "use AdamW or another elementwise optimizer, with float32 parameters"


def require_updates_by_row(optimizers: Sequence[Optimizer]) -> None:
    """Check the optimizers of parameters that are cut by rows: an update must not depend on rows that are elsewhere.

    Raises:
        ConfigurationError: one with a statistic over the whole parameter.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            cut = [p for p in group["params"] if is_sharded(p) and not p.is_meta]  # those are in other stages
            kinds = {local(p).dtype: nn.Parameter(local(p).detach()) for p in cut}
            for block in kinds.values():
                if not _are_alike(_tried(optimizer, group, block, _ROWS), rtol=1e-3):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} updates the rows of a parameter by what is in other rows, and "
                        f"dense=fsdp, hsdp and mesh.tp keep those on other ranks: {_ELEMENTWISE}, or dense=zero1 and "
                        "mesh.tp=1"
                    )


def require_updates_by_parameter(optimizers: Sequence[Optimizer], sharding: str) -> None:
    """
    Args:
        sharding: option that gives each rank some of the parameters only.

    Raises:
        ConfigurationError: an optimizer that updates a parameter by what is in others, such as by the norm of all
            gradients.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            here = [p for p in group["params"] if not p.is_meta]  # those are in other stages
            if here and not _are_alike(_tried(optimizer, group, local(here[0]), (1, 4), are_apart=True)):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} updates a parameter by what is in others, and {sharding} gives each "
                    "rank some of them only: use AdamW or another optimizer that updates each by itself, or dense=ddp "
                    "without mesh.pp"
                )


def _are_alike(trials: Sequence[_Trial], rtol: float = 0.0) -> bool:
    """Return True if the last rows of all are as that of the first one; there may be none."""
    rows = [trial.parameter[-1] for trial in trials]
    return all(torch.allclose(rows[0], row, rtol=rtol, atol=0) for row in rows[1:])


def _tried(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, numbers: Sequence[int], *, are_apart: bool = False
) -> list[_Trial]:
    """Return a trial for each number of rows; empty if the optimizer cannot be tried.

    Args:
        are_apart: the rows are parameters of their own.
    """
    kind: Callable[..., Optimizer] = type(optimizer)
    known = inspect.signature(kind).parameters
    values = {name: value for name, value in group.items() if name in known and name != "params"}
    like = _Options(repr(values), values), _outline(parameter), parameter.device
    try:
        return [_updated(kind, *like, rows, are_apart) for rows in numbers]
    except Exception as error:  # of a class that we do not know, on parameters that are not its own
        _warn_once(
            f"{type(optimizer).__name__} cannot be tried on a small parameter ({type(error).__name__}), so ranks may "
            "make other updates than one process would: compare the first steps with ParityDoctor in a run without "
            "elastic; check_state_every compares replicas of experts"
        )
        return []


@lru_cache(maxsize=64)
def _updated(
    kind: Callable[..., Optimizer],
    options: _Options,
    outline: _Outline,
    device: torch.device,
    rows: int,
    are_apart: bool,
) -> _Trial:
    """Update rows a few times, as one parameter or as parameters of their own; return the one whose last row is to be
    looked at. Groups and worlds ask for the same few trials again.
    """
    growth = 1.0 if are_apart else 10.0

    def values(seed: int) -> Sequence[Tensor]:
        together = _rows(outline, device, rows, seed)
        return [row[None] for row in list(together)[::-1]] if are_apart else [together]

    trials = [nn.Parameter(_FIRST_WEIGHTS * value) for value in values(0)]
    with preserved_generators(device), OwnGenerators(0):  # an optimizer may add noise
        if device.type == "cuda":
            torch.cuda.manual_seed(0)  # torch.manual_seed would seed all devices
        replica = kind(trials, **copy.deepcopy(options.values))
        for step in range(_STEPS):
            for trial, gradient in zip(trials, values(1 + step), strict=True):
                trial.grad = gradient * growth**step
            replica.step(lambda: 0.0)
    return _Trial(trials[0].detach(), dict(replica.state.get(trials[0], {})))


def _outline(parameter: Tensor) -> _Outline:
    rest = parameter[:1].numel() % _VECTOR if parameter.ndim else 0
    return _Outline(parameter.ndim, rest, parameter.dtype)


def _rows(outline: _Outline, device: torch.device, rows: int, seed: int) -> Tensor:
    """Return random rows that end within a vector as those of a parameter, the last a hundredth of the others."""
    shape = [1] * (outline.dimensions - 2) + [_VECTOR + outline.rest]
    last = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    others = torch.randn(rows - 1, *shape, generator=torch.Generator().manual_seed(1000 + seed), device="cpu")
    return torch.cat([100.0 * others, last]).to(device, outline.dtype)


# ---------------------------------------------------------------------- without a trial


def require_host_updates(optimizers: Sequence[Optimizer]) -> None:
    """
    Raises:
        ConfigurationError: an optimizer that cannot update parameters that take the places of others on the host, or of
            which that is not known.
    """
    for optimizer in optimizers:
        is_known = type(optimizer).__module__.partition(".")[0] in ("torch", "moe_lightning")
        keeps_parameters = isinstance(optimizer, LBFGS)
        if keeps_parameters or not is_known or any(group.get("capturable") for group in optimizer.param_groups):
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot update parameters on the host, as offload_optimizer=true asks for: "
                "use AdamW without capturable, another optimizer of torch but LBFGS, or offload_optimizer=false"
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
