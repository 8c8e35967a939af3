"""Tensor parallelism: collectives with their transposes as gradients, and the styles of a model's layers.

Every rank computes a loss of its own, and gradients are those of the sum of all ranks' losses: so the gradient of an
all-gather is a reduce-scatter, that of a reduce-scatter an all-gather, and that of a sum over ranks a sum over ranks.

Between sharded layers each rank has some positions of every sequence, [B, L / ranks, D]: norms, dropout, routers and
experts work on these. A sharded layer sees all positions and computes some of its heads, hidden units or tokens of the
vocabulary. Sources: Megatron-LM, and Korthikanti et al. 2022 for the positions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.exchange import all_gather_flat, linear
from moe_lightning.parallel.mesh import TensorCut

# Before torch 2.13 it had another name, which warns there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that compute parts of the same layers.

    Attributes:
        group: theirs.
        rank: this process among them.
        size: their number.
    """

    group: ProcessGroup = field(repr=False)
    rank: int
    size: int

    def __deepcopy__(self, memo: dict[int, object]) -> TensorRanks:
        """A copy of a model talks to the same ranks; a group cannot be copied."""
        return self

    def __reduce__(self) -> str:
        raise ConfigurationError(
            "layers that are cut over ranks cannot be pickled: save a checkpoint with the Trainer that cut them "
            "(trainer.save_checkpoint)"
        )

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, one after the other along a dimension."""
        return linear(x, partial(_gathered, dim=dim, ranks=self), partial(_sum_of_parts, dim=dim, ranks=self))

    def sum_parts(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along a dimension of the sum over ranks.

        Raises:
            ConfigurationError: the parts would not be equal.
        """
        self._check(x, dim)
        return linear(x, partial(_sum_of_parts, dim=dim, ranks=self), partial(_gathered, dim=dim, ranks=self))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return linear(x, partial(_summed, ranks=self), partial(_summed, ranks=self))

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what all ranks have.

        Raises:
            ConfigurationError: the parts would not be equal.
        """
        self._check(x, dim)
        return x.chunk(self.size, dim)[self.rank]

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """float32 [T], of logits of which each rank has those of some classes; the same on all ranks.

        Args:
            logits_TV: float32 [T, V / ranks].
            targets_T: int64, of all classes; those of no class count for nothing, and have any loss.
        """
        return _CrossEntropy.apply(logits_TV, targets_T, self)  # type: ignore[no-any-return, no-untyped-call]

    def _check(self, x: Tensor, dim: int) -> None:
        if x.shape[dim] % self.size:
            raise ConfigurationError(
                f"{x.shape[dim]} positions of a sequence are not a multiple of mesh.tp={self.size}: pad the sequences, "
                "change their length (with mesh.cp, that of each part), or lower mesh.tp"
            )


def _gathered(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty(ranks.size * first.shape[0], *first.shape[1:])
    all_gather_flat(whole, first, ranks.group)
    return whole.movedim(0, dim).contiguous()


def _sum_of_parts(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    part = first.new_empty(first.shape[0] // ranks.size, *first.shape[1:])
    _reduce_scatter(part, first, group=ranks.group)
    return part.movedim(0, dim).contiguous()


def _summed(x: Tensor, ranks: TensorRanks, op: Any = dist.ReduceOp.SUM) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, op=op, group=ranks.group)
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, ranks: TensorRanks) -> Tensor:
        width = logits_TV.shape[1]
        own_T = targets_T - ranks.rank * width
        is_here_T = (own_T >= 0) & (own_T < width)
        own_T = own_T.clamp(0, width - 1)
        largest_T = _summed(logits_TV.amax(dim=1), ranks, dist.ReduceOp.MAX)
        shares_TV = (logits_TV - largest_T[:, None]).exp()
        chosen_T = logits_TV.gather(1, own_T[:, None])[:, 0].masked_fill(~is_here_T, 0.0)
        total_T, chosen_T = _summed(torch.stack([shares_TV.sum(dim=1), chosen_T]), ranks)
        ctx.ranks = ranks
        ctx.save_for_backward(shares_TV.div_(total_T[:, None]), own_T, is_here_T)
        losses_T: Tensor = total_T.log() + largest_T - chosen_T
        return losses_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "the cross entropy of mesh.tp has no second derivatives, but create_graph=True asks for them: leave it "
                "out, or set mesh.tp=1"
            )
        shares_TV, own_T, is_here_T = ctx.saved_tensors
        total_T = _summed(gradient_T, ctx.ranks)
        gradient_TV = shares_TV * total_T[:, None]
        gradient_TV.scatter_add_(1, own_T[:, None], (-total_T).masked_fill(~is_here_T, 0.0)[:, None])
        return gradient_TV, None, None


_POSITIONS = -2


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Sharding of a parameter.

    Attributes:
        dim: along which it is cut.
        sections: sizes along `dim`, each of which is cut by itself, such as queries, keys and values in one matrix.
        unit: numbers along `dim` that stay together, such as those of a head.
        of: what the units are, for messages.
    """

    dim: int
    sections: tuple[int, ...]
    unit: int = 1
    of: str = "features"


class Style(Protocol):
    """Treatment of a module in a plan."""

    def shares(self, module: Any) -> Mapping[str, Shares]:
        """The parameters that are cut, by their names in the module, none by default; called before any is."""
        return {}

    def __call__(self, module: Any, own: Callable[..., Any], ranks: TensorRanks, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, `own` being that of the module itself."""


Plan = Mapping[str, Style]
"""Name of a module, in which * stands for any one part between dots -> its style. It is asked for again when parameters
are cut already, and must not depend on their shapes."""


@dataclass(frozen=True)
class Columns:
    """A linear layer on all positions that computes some of its outputs.

    Attributes:
        sections: of the outputs; None: one.
        unit, of: see Shares.
    """

    sections: tuple[int, ...] | None = None
    unit: int = 1
    of: str = "hidden units"

    def shares(self, module: nn.Linear) -> Mapping[str, Shares]:
        sections = self.sections or (module.weight.shape[0],)
        share = Shares(dim=0, sections=sections, unit=self.unit, of=self.of)
        return {name: share for name, _ in module.named_parameters(recurse=False)}

    def __call__(self, module: nn.Linear, own: Callable[..., Any], ranks: TensorRanks, x: Tensor) -> Any:
        return own(x)


@dataclass(frozen=True)
class Rows:
    """A linear layer that has some of its inputs, and answers with the sum over ranks at this rank's positions."""

    def shares(self, module: nn.Linear) -> Mapping[str, Shares]:
        return {"weight": Shares(dim=1, sections=(module.weight.shape[1],))}

    def __call__(self, module: nn.Linear, own: Callable[..., Any], ranks: TensorRanks, x: Tensor) -> Any:
        out = ranks.sum_parts(F.linear(x, module.weight), _POSITIONS)
        return out if module.bias is None else out + module.bias.to(out.dtype)


@dataclass(frozen=True)
class Gathered:
    """A module that sees all positions of one of its arguments.

    Attributes:
        argument: its place, or its name where it is given by that.
        of_heads: names of parameters of its own that have a number for each head.
    """

    argument: int | str = 0
    of_heads: tuple[str, ...] = ()

    def shares(self, module: nn.Module) -> Mapping[str, Shares]:
        numbers = {name: len(module.get_parameter(name)) for name in self.of_heads}
        return {name: Shares(dim=0, sections=(number,), of="heads") for name, number in numbers.items()}

    def __call__(
        self, module: nn.Module, own: Callable[..., Any], ranks: TensorRanks, *args: Any, **kwargs: Any
    ) -> Any:
        return _call(module, own, self.argument, lambda x: ranks.gather(x, _POSITIONS), args, kwargs)


@dataclass(frozen=True)
class Parted(Style):
    """A module that sees this rank's positions of one of its arguments, of which all ranks have all.

    Attributes:
        argument: see Gathered; None in its place stays None.
    """

    argument: int | str = 0

    def __call__(
        self, module: nn.Module, own: Callable[..., Any], ranks: TensorRanks, *args: Any, **kwargs: Any
    ) -> Any:
        return _call(module, own, self.argument, lambda x: ranks.own(x, 1), args, kwargs)


@dataclass(frozen=True)
class PartedAttribute(Style):
    """A module that gets this rank's positions, and sees those of one of its attributes, [B, L, ...], too.

    Attributes:
        name: of the attribute; None in its place stays None.
    """

    name: str

    def __call__(
        self, module: nn.Module, own: Callable[..., Any], ranks: TensorRanks, *args: Any, **kwargs: Any
    ) -> Any:
        whole = getattr(module, self.name)
        if whole is None:
            return own(*args, **kwargs)
        setattr(module, self.name, ranks.own(whole, 1))
        try:
            return own(*args, **kwargs)
        finally:
            setattr(module, self.name, whole)


@dataclass(frozen=True)
class NormOfParts:
    """An RMS norm over features of which a rank has some.

    Attributes:
        eps: added to the mean square.
        unit, of: see Shares.
    """

    eps: float
    unit: int = 1
    of: str = "features"

    def shares(self, module: Any) -> Mapping[str, Shares]:
        return {"weight": Shares(dim=0, sections=(len(module.weight),), unit=self.unit, of=self.of)}

    def __call__(self, module: Any, own: Callable[..., Any], ranks: TensorRanks, x: Tensor) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = ranks.sum(wide.square().sum(dim=-1, keepdim=True))
        scale = (squares / (x.shape[-1] * ranks.size) + self.eps).rsqrt()
        return module.weight * (wide * scale).to(x.dtype)


@dataclass(frozen=True)
class Embedding:
    """An embedding [B, L] -> [B, L, D] that knows some tokens of the vocabulary; the answer is whole."""

    def shares(self, module: nn.Embedding) -> Mapping[str, Shares]:
        return {"weight": Shares(dim=0, sections=(module.weight.shape[0],), of="tokens of the vocabulary")}

    def __call__(self, module: nn.Embedding, own: Callable[..., Any], ranks: TensorRanks, ids: Tensor) -> Any:
        height = len(module.weight)
        ids = ids - ranks.rank * height
        is_elsewhere = (ids < 0) | (ids >= height)
        padding = None if module.padding_idx is None else module.padding_idx - ranks.rank * height
        padding = padding if padding is not None and 0 <= padding < height else None
        rows = F.embedding(ids.masked_fill(is_elsewhere, 0), module.weight, padding)
        return ranks.sum(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


@dataclass(frozen=True)
class Head(Columns):
    """A linear layer from this rank's positions to the vocabulary at all positions: whole logits, or this rank's tokens
    inside of `parted_logits`.
    """

    of: str = "tokens of the vocabulary"

    def __call__(self, module: nn.Linear, own: Callable[..., Any], ranks: TensorRanks, x: Tensor) -> Any:
        part = own(ranks.gather(x, _POSITIONS))
        return part if module.__dict__.get(_STAYS_PARTED) else ranks.gather(part, -1)


_STAYS_PARTED = "_moe_lightning_parted_logits"


class PartedForward:
    """In the place of a module's `forward` while it is cut.

    Args:
        module, style: what is cut, and how.
        ranks: that have its parts.
    """

    def __init__(self, module: nn.Module, style: Style, ranks: TensorRanks) -> None:
        self.module, self.style, self.ranks = module, style, ranks
        self._own, self._was_set = module.forward, module.__dict__.get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.style(self.module, self._own, self.ranks, *args, **kwargs)

    def undo(self) -> None:
        """The module computes by itself again."""
        del self.module.forward
        if self._was_set is not None:
            self.module.forward = self._was_set


def undo_parts(model: nn.Module) -> None:
    """Every module computes by itself again."""
    for module in model.modules():
        if isinstance(forward := module.__dict__.get("forward"), PartedForward):
            forward.undo()


@contextmanager
def parted_logits(model: nn.Module) -> Generator[TensorRanks | None, None, None]:
    """Inside, a model whose head is cut answers with the logits of this rank's tokens of the vocabulary, and the ranks
    that have the others are given; None where logits are whole.
    """
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    heads = [f for f in forwards if isinstance(f, PartedForward) and isinstance(f.style, Head)]
    for head in heads:
        head.module.__dict__[_STAYS_PARTED] = True
    try:
        yield heads[0].ranks if heads else None
    finally:
        for head in heads:
            del head.module.__dict__[_STAYS_PARTED]


def _call(
    module: nn.Module,
    own: Callable[..., Any],
    argument: int | str,
    change: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """`own` with one of its arguments changed, whether it is given by place or by name, where it is not None."""
    place, name = (len(args), argument) if isinstance(argument, str) else (argument, "")
    if name not in kwargs and place >= len(args):  # given in the other way, if at all
        # What is in the place of the module's `forward`, as under RecomputeDense, may take any; its class names them.
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        if name in names:
            place = names.index(name)
        elif place < len(names):
            name = names[place]
    if kwargs.get(name) is not None:
        kwargs = {**kwargs, name: change(kwargs[name])}
    elif place < len(args) and args[place] is not None:
        args = (*args[:place], change(args[place]), *args[place + 1 :])
    return own(*args, **kwargs)


def planned_styles(module: nn.Module, size: int) -> Iterator[tuple[str, Style]]:
    """Yield the names and styles of the modules that plans cut.

    Args:
        module: has modules with a `tensor_parallel_plan`, or is one.
        size: parts of each layer.

    Raises:
        ConfigurationError: no module has a plan.
    """
    planned: list[str] = []
    names = [name for name, _ in module.named_modules()]
    for prefix, part in module.named_modules():
        if any(prefix.startswith(f"{done}.") or not done for done in planned):
            continue
        plan = getattr(part, "tensor_parallel_plan", None)
        if plan is None:
            continue
        planned.append(prefix)
        for pattern, style in plan().items():
            wanted = re.compile(
                (f"{prefix}.{pattern}" if prefix else pattern).replace(".", r"\.").replace("*", r"[^.]+")
            )
            yield from ((name, style) for name in names if wanted.fullmatch(name))
    if not planned:
        raise ConfigurationError(
            f"mesh.tp={size} cuts layers, and {type(module).__name__} does not say which: give it a method "
            "tensor_parallel_plan (docs/expert-parallelism.md), or use dense=fsdp to share memory"
        )


def planned_cuts(module: nn.Module, size: int) -> dict[nn.Parameter, TensorCut]:
    """Return the cut of each parameter by the plans of a module whose parameters are whole.

    Args:
        size: parts of each layer.

    Raises:
        ConfigurationError: no module has a plan, parameters cannot be cut equally, one is cut in two ways, or a style
            does not compute what a module computes.
    """
    found: dict[nn.Parameter, TensorCut] = {}
    for name, style in dict(planned_styles(module, size)).items():
        part = module.get_submodule(name)
        _require_forward_of(style, part, name)
        for own_name, share in style.shares(part).items():
            parameter = part.get_parameter(own_name)
            _require_equal(name, share, size)
            cut = TensorCut(shape=tuple(parameter.shape), dim=share.dim, sections=tuple(share.sections))
            if found.setdefault(parameter, cut) != cut or sum(cut.sections) != parameter.shape[cut.dim]:
                raise ConfigurationError(f"{name}.{own_name} cannot be cut as the plan says: give it one way to be cut")
    return found


def _require_forward_of(style: Style, part: nn.Module, name: str) -> None:
    """Refuse code of a module's own where a style computes without the module's forward."""
    kind: Any = {Embedding: nn.Embedding, Rows: nn.Linear}.get(type(style))
    if kind is not None and type(part).forward is not kind.forward:
        raise ConfigurationError(
            f"{name} is a {type(part).__name__} with a forward of its own, which {type(style).__name__}() of its plan "
            f"does not call: use a plain nn.{kind.__name__} and compute the rest outside of it, or set mesh.tp=1"
        )


def _require_equal(name: str, share: Shares, size: int) -> None:
    for section in share.sections:
        units, rest = divmod(section, share.unit)
        if units % size or rest:
            raise ConfigurationError(
                f"mesh.tp={size} does not divide the {units} {share.of} of {name}: use a divisor, or another model"
            )
