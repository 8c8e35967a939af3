"""Training and evaluation steps that are the same on any number of ranks.

Batches are cut over the ranks, and gradients are those of the mean over all samples. A loss is weighted by the rank's
share of the samples of a step, or by the weight that the module gives to `global_mean`. A rank without a sample
computes a dummy batch, to take part in the collectives: `without_traces` restores the values that it changes. The
gradient norm is that of the whole model: dense parameters once, each expert once. Under mesh.cp the sequences of every
batch are cut over the ranks that share its samples, and predictions are gathered.
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from traceback import extract_tb
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.data.sampler import StepSlice
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.losses import IGNORED_TARGET
from moe_lightning.moe.randomness import SampleStream
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.parallel.mesh import TensorCut
from moe_lightning.parallel.sequence import ContextParallel, OtherAttention, Sharers, attach_context
from moe_lightning.state.tensors import cut_of, is_cut, local
from moe_lightning.strategies.step_data import begin_batch, running_slice, training_slice
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

_NOT_THE_USERS = frozenset(vars(nn.Module())) | frozenset(vars(pl.LightningModule()))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
"""Objects of installed packages are not restored: they may be shared with threads or other processes."""

_OURS = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "moe_lightning")
"""Packages whose modules count no samples of a user, or are handled by name."""

Undo = Callable[[], Any]
"""Restores the content of a value, and returns it."""


@contextmanager
def without_traces(module: pl.LightningModule) -> Generator[None, None, None]:
    """Restore the values of the module, its metrics, and its logs with `sync_dist=True` afterwards.

    Restored are all attributes and buffers of the module and its parts: numbers, tensors, containers of them, and
    objects of classes that belong to no installed package; parameters and their gradients stay. Layers of this library
    keep their counts over all ranks.

    A value that is logged for the first time keeps its entry, with the value of no samples: an epoch's values are
    reduced by all ranks together. Values that are not reduced over ranks stay, since a rank has no others.
    """
    trainer = module.trainer
    known: dict[int, Undo] = {}
    own = [_undo_of_module(part, known) for part in module.modules() if _package(part) not in _OURS]
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [_undo_of_metric(metric) for metric in [*metrics, *_reduced(trainer)]]
    seen = {id(metric) for metric in _reduced(trainer)}
    yield
    for undo in (*own, *before):
        undo()
    for metric in _reduced(trainer):
        if id(metric) not in seen:
            values = {name: _copy(value) for name, value in private_lightning.initial_values(metric).items()}
            private_lightning.set_values(metric, values, updates=metric.update_count)


def nothing_of(prediction: Any) -> Any:
    """Return a prediction with no rows."""
    return private_lightning.tree_map(
        lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf, prediction
    )


# ---------------------------------------------------------------------- metrics


def _undo_of_metric(metric: Metric) -> Undo:
    values = {name: _copy(value) for name, value in metric.metric_state.items()}
    return partial(private_lightning.set_values, metric, values, updates=metric.update_count)


def _reduced(trainer: pl.Trainer) -> list[Metric]:
    """Return the logged values that become a mean, sum or extreme over an epoch and over ranks."""
    values = private_lightning.logged_values(trainer)
    return [value for value in values if value.is_tensor and value.meta.on_epoch and value.meta.sync.should]


def _copy(value: Any) -> Any:
    """Copy a value, so that later updates in place do not change it."""
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


# ---------------------------------------------------------------------- anything else


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_users(value: object) -> bool:
    """True if a value is an object with attributes, of a class that belongs to no installed package."""
    if isinstance(value, Dataset | DataLoader | nn.Module | type) or not isinstance(
        getattr(value, "__dict__", 0), dict
    ):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    in_library = file is None or str(file).startswith(_LIBRARIES)
    return type(value).__module__ == "__main__" or not (in_library or _package(value) in _OURS)


def _undo_of_module(module: nn.Module, known: dict[int, Undo]) -> Undo:
    attributes = _undo_of_names(vars(module), known, but=_NOT_THE_USERS)
    buffers = _undo_of_names(private_torch.buffers_of(module), known)

    def undo() -> None:
        attributes()
        buffers()

    return undo


def _undo_of_names(names: dict[Any, Any], known: dict[int, Undo], but: frozenset[str] = frozenset()) -> Undo:
    values = {name: _undo_of(value, known) for name, value in names.items() if name not in but}

    def undo() -> dict[Any, Any]:
        for name in [name for name in names if name not in values and name not in but]:
            del names[name]
        for name, value in values.items():
            names[name] = value()
        return names

    return undo


def _undo_of(value: Any, known: dict[int, Undo]) -> Undo:
    """Return the function that restores a value's present content; a value that occurs again is copied once."""
    if id(value) not in known:
        known[id(value)] = lambda: value  # until it is known, for values that hold themselves
        known[id(value)] = _made_undo(value, known)
    return known[id(value)]


def _made_undo(value: Any, known: dict[int, Undo]) -> Undo:
    if isinstance(value, Metric):
        return _and(_undo_of_metric(value), value)
    if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
        return _undo_of_array(value)
    if isinstance(value, dict):
        return _undo_of_names(value, known)
    if isinstance(value, list | deque):
        return _undo_of_sequence(value, known)
    if isinstance(value, set):
        return _undo_of_set(value)
    return _and(_undo_of_names(vars(value), known), value) if _is_users(value) else lambda: value


def _undo_of_array(array: Any) -> Undo:
    before = array.detach().clone() if isinstance(array, Tensor) else array.copy()

    @torch.no_grad()
    def undo() -> Any:
        if not (torch.equal(array, before) if isinstance(array, Tensor) else np.array_equal(array, before)):
            array[...] = before  # a tensor of an earlier step's graph is written only if it has changed
        return array

    return undo


def _undo_of_set(values: set[Any]) -> Undo:
    before = set(values)

    def undo() -> set[Any]:
        values.clear()
        values.update(before)
        return values

    return undo


def _undo_of_sequence(values: Any, known: dict[int, Undo]) -> Undo:
    items = [_undo_of(value, known) for value in values]

    def undo() -> Any:
        values.clear()
        values.extend(item() for item in items)
        return values

    return undo


def _and(undo: Callable[[], object], value: Any) -> Undo:
    def both() -> Any:
        undo()
        return value

    return both


@torch.no_grad()
def gradient_norms(module: pl.LightningModule) -> dict[str, Tensor]:
    """Return Lightning's `grad_norm(module, 2)` as on one rank: the 2-norm of every gradient, and of all together, over
    all ranks and with each expert once; under stock strategies the same as that. For `on_before_optimizer_step`, which
    comes before clipping; collective.

    Returns:
        Scalars under Lightning's names, "grad_2.0_norm/NAME" and "grad_2.0_norm_total"; in a pipeline the parameters of
        this stage, and the total of all.
    """
    strategy: Any = module.trainer.strategy
    if not hasattr(strategy, "worlds"):
        return {name: torch.as_tensor(norm) for name, norm in grad_norm(module, 2).items()}
    world, stack_of = strategy.world, strategy.experts.stack_of
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    norms = {f"grad_2.0_norm/{name}": global_gradient_norm([p], stack_of, world.stage) for name, p in named.items()}
    return norms | {"grad_2.0_norm_total": global_gradient_norm(named.values(), stack_of, world.stage, world.pipe)}


def explained_norm(error: Exception) -> Exception:
    """Return the exception to raise instead of an error of stock functions that read whole gradients of one process
    only.
    """
    is_norm = any(frame.name == "grad_norm" for frame in extract_tb(error.__traceback__))
    if not is_norm or not any(words in str(error) for words in ("torch.Tensor and DTensor", "not allocated yet")):
        return error
    return ConfigurationError(
        "grad_norm cannot read gradients of which every rank holds rows: use moe_lightning.gradient_norms(module)"
    )


@torch.no_grad()
def global_gradient_norm(
    parameters: Iterable[nn.Parameter],
    stack_of: Mapping[nn.Parameter, ExpertStack],
    world: World,
    pipe: World | None = None,
    *,
    among: Collection[object] | None = None,
) -> Tensor:
    """Compute the 2-norm over the model, bit-identical on every rank.

    The squared norm of each expert, and of each block of a parameter that is cut, is summed at its own place of a
    vector, so the result hardly depends on which rank computed it.

    Args:
        parameters: all parameters of the optimizer on all ranks, expert stacks included, in an order that all ranks
            share.
        stack_of: those that are expert stacks.
        world: the ranks that share the parameters.
        pipe: the stages of a pipeline, each with parameters of its own; None: there is one.
        among: `_memory_of` the gradients that count; None: all.

    Returns:
        A float32 scalar on the world's device.
    """
    dense, spread = [], []
    for parameter in parameters:
        if parameter.is_meta:  # another stage's
            continue
        gradient = parameter.grad
        if among is not None and gradient is not None and _memory_of(gradient) not in among:
            gradient = None
        stack = stack_of.get(parameter)
        if stack is not None:
            spread.append(_squared_norms(gradient, stack, parameter.device))
        elif (cut := cut_of(parameter)) is not None:
            spread.append(_squared_part(gradient, cut, world))
        elif gradient is not None:
            dense.append(_norm(gradient).square())
    total = torch.stack(dense).sum() if dense else torch.zeros((), device=world.device)
    if spread:
        squares = torch.cat(spread)
        all_reduce_(squares, world)
        total = total + squares.sum()
    if pipe is not None and pipe.size > 1:
        squares = torch.zeros(pipe.size, device=world.device)
        squares[pipe.rank] = total
        all_reduce_(squares, pipe)
        total = squares.sum()
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Shrink the gradients so that the global norm is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        private_torch.scale_(gradients, factor.to(gradients[0].device))


def _memory_of(gradient: Tensor) -> object:
    """Return what a gradient has in common with `detach()`, `data` and `flatten()` of it."""
    if gradient.layout is not torch.strided:
        return id(gradient)
    return local(gradient).data_ptr(), gradient.numel()


def _norm(gradient: Tensor, dim: int | None = None) -> Tensor:
    """Compute a norm in float32, summed in the gradient's own precision if that is higher."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, dtype=dtype)
    return norm.float()


def _squared_part(gradient: Tensor | None, cut: TensorCut, world: World) -> Tensor:
    """Return squares [parts], with this rank's at its place if it is the first that holds these values."""
    among = world.row_cut
    squares = torch.zeros(len(among.holders), dtype=torch.float32, device=world.device)
    if among.holders_of(cut)[0] == world.rank and gradient is not None:
        squares[among.index] = _norm(local(gradient)).square()
    return squares


def _squared_norms(gradient: Tensor | None, stack: ExpertStack, device: torch.device) -> Tensor:
    squares_E = torch.zeros(stack.num_experts, dtype=torch.float32, device=device)
    if gradient is not None:
        per_slot = _norm(gradient.flatten(1), dim=1).square()
        for slot, expert in stack.owned():
            squares_E[expert] = per_slot[slot]
    return squares_E


_WATCHED_STEPS = 100
"""Batches that are searched for ignored targets, before the module is taken to have none."""


_SAME_NORM = 1e-5
"""Relative difference of norms of the same gradients, on unlike devices."""


class StepWeights:
    """The weights of the micro-batches of one step.

    A micro-batch of weight W counts for W / sum(W) of the step. The sum is known with the last one only: until then
    gradients are scaled by the first W, and `finish` brings them to the sum's.

    Attributes:
        of_batch: W of the running micro-batch; None where it was not given.
    """

    def __init__(self) -> None:
        self._of_step: list[Tensor] = []
        self.of_batch: Tensor | None = None
        self._is_stated = False
        self._watched = 0

    def begin(self, here: StepSlice | None, *, is_training: bool = True) -> None:
        """Begin a micro-batch, and with the first one of training a step."""
        self.of_batch = None
        if is_training and (here is None or here.micro == 0):
            self._of_step = []

    def weigh(self, loss: Tensor, weight: Tensor | float, here: StepSlice | None, world: World) -> Tensor:
        """Return the mean over ranks weighted by `weight`, as a loss that will be weighted by samples; collective.

        Returns:
            The global mean as value, this rank's part of it as gradient.
        """
        self._is_stated = True
        if here is None:
            return loss
        own = torch.as_tensor(weight, dtype=torch.float64, device=loss.device)
        own = own if here.count else torch.zeros_like(own)
        counted = torch.where(own > 0, loss, torch.zeros_like(loss))
        if world.size == 1:
            self.of_batch = own
            return counted
        totals = torch.stack([counted.detach().double() * own, own])
        all_reduce_(totals, world)
        self.of_batch = totals[1]
        share = own / totals[1].clamp_min(torch.finfo(torch.float64).tiny)
        mean = totals[0] / totals[1].clamp_min(torch.finfo(torch.float64).tiny)
        value: Tensor = _MeanOfAll.apply(counted, mean.to(loss.dtype), (share * _all_shares(here)).to(loss.dtype))  # type: ignore[no-untyped-call]
        return value

    def scale_sum(self, loss: Tensor, here: StepSlice | None, world: World) -> Tensor:
        """Return a sum over samples, as a loss that will be weighted by samples."""
        self._is_stated = True
        if here is None or world.size == 1:
            return loss
        return loss * _all_shares(here)

    def share(self, here: StepSlice) -> float | Tensor:
        """Return the weight of this rank's loss of the running micro-batch in the step, up to the factor of `finish`.

        Raises:
            ConfigurationError: a weight was given in some micro-batches of the step only.
        """
        if here.micro and (self.of_batch is not None) != bool(self._of_step):
            raise ConfigurationError(
                "global_mean was called in some micro-batches of a step and not in others, so they have no common "
                "weight: call it in each, with weight=0 where nothing is to be learned"
            )
        if self.of_batch is None:
            return here.step_share
        if here.num_micros == 1:  # without any weight it counts for nothing, as with accumulation
            return (self.of_batch > 0).to(self.of_batch.dtype) * here.step_share
        self._of_step.append(self.of_batch)
        first = self._of_step[0]
        scale = torch.where(first > 0, self.of_batch / first, self.of_batch) / here.num_micros
        return scale * here.micro_share

    def append(self, weights: Sequence[float], device: torch.device) -> None:
        """Append the weights of further micro-batches of the step, computed by another rank."""
        self._is_stated = self._is_stated or len(weights) > 0
        self._of_step += [torch.tensor(weight, dtype=torch.float64, device=device) for weight in weights]

    @torch.no_grad()
    def finish(self, module: nn.Module) -> None:
        """Divide the gradients of a step by its sum of weights, once they are summed over all ranks and
        micro-batches.
        """
        if not self._of_step:
            return
        first, total = self._of_step[0], torch.stack(self._of_step).sum()
        factor = len(self._of_step) * torch.where(first > 0, first, torch.ones_like(first)) / total
        factor = torch.where(total > 0, factor, torch.ones_like(factor))
        gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        self._of_step = []

    def warn_of_ignored_targets(self, arguments: Any, *, parts: int = 1) -> None:
        """Warn once if samples, or parts of them, may differ in the number of their ignored targets, and the module has
        not stated the weight of its mean.

        Args:
            parts: parts of each sample, of which this rank has one.
        """
        if self._is_stated or self._watched >= _WATCHED_STEPS:
            return
        self._watched += 1
        if any(_ignores_unevenly(leaf, parts) for leaf in private_lightning.tree_leaves(arguments)):
            self._is_stated = True
            rank_zero_warn(
                f"the samples of a batch hold different numbers of targets {IGNORED_TARGET}, but the loss of a rank "
                "counts by its samples, so a mean over targets depends on the number of ranks: return "
                "moe_lightning.global_mean(self, loss, weight=number_of_targets), or a mean over samples"
            )


class _MeanOfAll(torch.autograd.Function):
    """A mean over all ranks, the same to the last bit on each of them, with the gradient of this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mean: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return grad * share, None, None


def _all_shares(here: StepSlice) -> float:
    """Return the factor that undoes the share of a rank that has a sample."""
    return here.micro_total * here.parts / max(1, here.count)


def _ignores_unevenly(leaf: object, parts: int) -> bool:
    if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.ndim < 1 or leaf.dtype is torch.bool:
        return False
    ignored = torch.eq(leaf, IGNORED_TARGET).reshape(len(leaf), -1).sum(dim=1)
    return bool((ignored != (ignored[:1] if parts == 1 else 0)).any())


_MIXERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, nn.Conv1d)
"""torch's own modules that mix positions, and cannot work on parts of sequences."""


class SequenceParts:
    """This rank's part of each sequence.

    Args:
        worlds: the present world, whose ranks share samples.
    """

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._context = ContextParallel()
        self._sharers: Sharers | None = None
        self._length: int | None = None  # of this rank's parts of the last batch
        self._batches = 0

    @property
    def parts(self) -> int:
        """Number of ranks that share a sample."""
        return self._worlds.present.shape.cp

    def attach(self, module: pl.LightningModule) -> None:
        """Attach the context of parallel sequences to a module's attention.

        Raises:
            ConfigurationError: a part of it mixes positions without the context.
        """
        if self._worlds.axes.cp > 1:
            _require_context(module, self._worlds.axes.cp)
        attach_context(module, self._context)
        self.enter_world()

    def enter_world(self) -> None:
        """Set this rank's part in the present world."""
        self._sharers = Sharers.of(self._worlds.present)
        self._batches, self._length = 0, None
        self._watched: set[bool] = set()
        self.leave()

    def enter(self) -> None:
        """Mark sequences as parts, at the begin of a step."""
        self._context.enter(self._sharers, self._length)

    @contextmanager
    def watched(self, *, training: bool) -> Generator[None, None, None]:
        """Check, around a module's first step in a world, that it has no attention without the context.

        Raises:
            ConfigurationError: it has some.
        """
        if self._sharers is None or self._length is None or training in self._watched:
            yield
            return
        with OtherAttention(self._context, self._length):
            yield
        self._watched.add(training)

    def leave_world(self) -> None:
        """Release the groups of the present world."""
        self._sharers = None
        self.leave()

    def leave(self) -> None:
        """Mark sequences as whole, outside of steps."""
        self._context.enter(None, None)

    def cut(self, batch: Any) -> Any:
        """Return this rank's part of every tensor [B, L, ...] of a batch; tensors [B] stay.

        Raises:
            ConfigurationError: tensors that do not all have L positions, or an L that the ranks do not divide; ranks
                that share samples have unlike ones.
        """
        if self._sharers is None:
            return batch
        leaves = [leaf for leaf in private_lightning.tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._batches += 1
        is_looked_at = self._batches & (self._batches - 1) == 0  # the first ones, and then more and more rarely
        if is_looked_at and self._sharers.differ(_digest(leaves)):
            raise ConfigurationError(
                f"the {self.parts} ranks that share samples under mesh.cp={self.parts} have loaded different "
                "batches: let "
                "a sample follow from its index alone, not from a random generator of the process"
            )
        sequences = [leaf for leaf in leaves if leaf.ndim > 1]
        lengths = {leaf.shape[1] for leaf in sequences}
        if len(lengths) != 1:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ConfigurationError(
                f"mesh.cp={self.parts} cuts the second dimension of a batch's tensors, which must be the positions of "
                f"all, but the batch has tensors of {shapes}: give tensors [B, L, ...] of one L, or [B]"
            )
        (length,) = lengths
        if length % self.parts:
            raise ConfigurationError(
                f"sequences of {length} positions cannot be cut into mesh.cp={self.parts} equal parts: pad or cut them "
                f"to a multiple of {self.parts}, with targets of -100 where they are padded"
            )
        self._length = length // self.parts
        part = slice(self._sharers.rank * self._length, (self._sharers.rank + 1) * self._length)
        return private_lightning.tree_map(
            lambda leaf: leaf[:, part] if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf, batch
        )

    def require_targets(self, batch: Any) -> None:
        """
        Raises:
            ConfigurationError: sequences without targets beside them: made in the step, those at the borders of parts
                would be lacking.
        """
        if self.parts == 1 or sum(isinstance(leaf, Tensor) for leaf in private_lightning.tree_leaves(batch)) > 1:
            return
        raise ConfigurationError(
            f"mesh.cp={self.parts} cuts sequences before the step sees them, which so cannot shift inputs to make "
            "targets: let the dataset give (inputs, targets)"
        )

    @torch.no_grad()
    def whole(self, prediction: Any) -> Any:
        """Return a prediction of whole sequences on the first of the ranks that share them, and of no rows on the
        others.
        """
        sharers = self._sharers
        if sharers is None:
            return prediction

        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            if leaf.ndim > 1 and leaf.shape[1] == self._length:
                (leaf,) = sharers.gather([leaf], 1)
            return leaf if sharers.rank == 0 else leaf[:0]

        return private_lightning.tree_map(gathered, prediction)


def _digest(leaves: list[Tensor]) -> list[object]:
    """Return short values that differ for different tensors."""
    return [
        [list(leaf.shape), zlib.crc32(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())]
        for leaf in leaves
    ]


def _require_context(module: pl.LightningModule, parts: int) -> None:
    holders = {name: m for name, m in module.named_modules() if isinstance(_context_of(m), ContextParallel)}
    kind = type(module).__name__
    knowing = [name for name, holder in holders.items() if _mixes(holder)]
    for name, part in module.named_modules():
        is_known = any(holder == name or holder.startswith(f"{name}.") for holder in holders)
        if not _mixes(part) or is_known or any(name.startswith(f"{outer}.") for outer in knowing):
            continue
        raise ConfigurationError(
            f"mesh.cp={parts} cuts sequences, and {name or kind} ({type(part).__name__}) of {kind} would mix the "
            "positions of a part only: let it keep a moe_lightning.ContextParallel() as `context` and call "
            "context.attention, or set mesh.cp=1"
        )
    if not holders:
        raise ConfigurationError(
            f"mesh.cp={parts} cuts sequences, and no part of {kind} knows of it: let its attention keep "
            "a moe_lightning.ContextParallel() as `context` and call context.attention, or set mesh.cp=1"
        )


def _context_of(module: nn.Module) -> object:
    return module.__dict__.get("context")


def _mixes(module: nn.Module) -> bool:
    """True if a module mixes positions, judged by its type or class name."""
    return isinstance(module, _MIXERS) or type(module).__name__.endswith(("Attention", "Attn", "Mamba", "Mixer"))


class Steps:
    """Running batch, weight of its loss, and sums of gradients.

    Args:
        worlds: the present world, whose ranks share a batch.
        state: the state of this rank, with its gradients.
        check_replicas_every: steps after which replicas of experts are compared bit by bit; 0: never.

    Attributes:
        stream: position of keyed randomness.
        sequences: this rank's part of each sample's positions.
        batch: samples of the running batch; None if the loader has no position, and between batches.
        is_blocked: others follow the running micro-batch in its step: nothing is summed over ranks yet.
        is_dummy_batch: the batch that runs, or ran last, has no sample of this rank.
        stage_loss: weighted loss of the last batch in the last stage of a pipeline on this rank; None elsewhere.
        last_gradient_norm: of the last clipped step, over the whole model.
        is_skipped: the last update was left out, because a loss or gradient was not finite.
        repairs_replicas: overwrite a replica that differs from a majority, unless the comparison before did so too:
            the cause is then more than a flipped bit.
    """

    def __init__(self, worlds: Worlds, state: TrainState, *, check_replicas_every: int) -> None:
        self._worlds, self._state = worlds, state
        self._check_replicas_every, self._compared_step = check_replicas_every, -1
        self.repairs_replicas = self._has_just_repaired = False
        self._weights = StepWeights()
        self.is_blocked = False
        self.stream = SampleStream()
        self.sequences = SequenceParts(worlds)
        self.batch: StepSlice | None = None
        self.is_dummy_batch = False
        self.stage_loss: Tensor | None = None
        self.last_gradient_norm: Tensor | None = None
        self.is_skipped = False
        self._writers: list[str] | None = None  # hooks that may change gradients, on any rank

    def leave_world(self) -> None:
        """Abort the running step. All ranks compare replicas again together, since newcomers have not."""
        self.is_blocked, self.batch, self._compared_step, self._writers = False, None, -1, None
        self.sequences.leave_world()

    def draw_noise(self) -> None:
        """Set the positions of keyed noise: this rank's part of each sequence in the present world, and where layers
        are cut, its share of that.
        """
        world, axes = self._worlds.present, {"cp", "tp"} if self._state.parts.layers_are_cut else {"cp"}
        self.stream.part, self.stream.parts = world.shape.place(world.rank, axes)

    # ------------------------------------------------------------------ batches

    @contextmanager
    def training(self, arguments: object) -> Generator[None, None, None]:
        """Prepare and end the forward pass of a micro-batch with these arguments."""
        trainer, module = self._state.trainer, self._state.module
        self._compare_replicas(trainer.global_step)
        self._state.parts.broadcast_buffers(self._worlds.present.stage)
        self.sequences.require_targets(arguments)
        self.enter(training_slice(trainer.train_dataloader))
        self._weights.begin(self.batch)
        traces = without_traces(module) if self.stream.is_dummy_batch else nullcontext()
        with traces, self.sequences.watched(training=True):
            yield
        begin_batch(trainer.train_dataloader)  # one that the step itself has fetched
        if self._worlds.present.size > 1:
            self._weights.warn_of_ignored_targets(arguments, parts=self.sequences.parts)
        if not module.automatic_optimization:
            self._leave()

    def evaluate(self, step: Callable[..., Any], loaders: object, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of validation or test."""
        self.sequences.require_targets(args)
        return self.predict(step, loaders, *args, **kwargs)

    def predict(self, step: Callable[..., Any], loaders: object, *args: Any, **kwargs: Any) -> Any:
        """Run a batch outside of training; the prediction of a dummy batch has no rows."""
        index = kwargs.get("dataloader_idx", args[2] if len(args) > 2 else 0)
        self.enter(running_slice(loaders, index))
        try:
            if not self.stream.is_dummy_batch:
                with self.sequences.watched(training=False):
                    return self.sequences.whole(step(*args, **kwargs))
            with without_traces(self._state.module):
                return nothing_of(self.sequences.whole(step(*args, **kwargs)))
        finally:
            self._leave()
            self._state.parts.reshard()

    def enter_piece(self, piece: StepSlice, *, is_training: bool) -> None:
        """Begin a micro-batch of the running batch."""
        self.enter(piece)
        self._weights.begin(piece, is_training=is_training)

    def enter(self, batch: StepSlice | None) -> None:
        """Set the samples of the running batch, and the position of keyed randomness."""
        self.batch = batch = batch and replace(batch, parts=self._worlds.present.shape.sharers)
        self.is_dummy_batch = batch is not None and batch.count == 0
        self.sequences.enter()
        self.stream.begin_micro_batch()
        if batch is not None:
            self.stream.advance(
                step=self._state.trainer.global_step,
                first_sample=batch.offset,
                num_samples=batch.count,
                total_samples=batch.micro_total,
            )

    def _leave(self) -> None:
        self.batch = None
        self.stream.is_dummy_batch = False
        self.sequences.leave()

    def require_stated_end(self, what: str) -> None:
        """
        Raises:
            ConfigurationError: manual optimization, whose steps have no stated end.
        """
        if not self._state.module.automatic_optimization:
            raise ConfigurationError(
                f"{what} need automatic optimization: a step of manual optimization may change weights at any time"
            )

    def _compare_replicas(self, step: int) -> None:
        """Compare replicas before a step whose number is a multiple of `check_replicas_every`; collective then.

        Raises:
            ReplicasDifferError: on every rank.
        """
        every = self._check_replicas_every
        if every and step % every == 0 and step not in (0, self._compared_step):
            self._compared_step = step
            repairs = self.repairs_replicas and not self._has_just_repaired
            optimizers = self._state.optimizers if repairs else None
            self._has_just_repaired = self._state.experts.compare_replicas(step, optimizers)

    # ------------------------------------------------------------------ losses

    def weigh(self, loss: Tensor, weight: Tensor | float) -> Tensor:
        """See `moe_lightning.moe.losses.global_mean`; collective."""
        return self._weights.weigh(loss, weight, self.batch, self._worlds.present.stage)

    def scale_sum(self, loss: Tensor) -> Tensor:
        """See `moe_lightning.moe.losses.global_sum`."""
        shape = self._worlds.present.shape
        copies = 1 if self.batch is None else shape.sharers // shape.cp  # ranks that have summed the same
        return self._weights.scale_sum(loss, self.batch, self._worlds.present.stage) / copies

    def share(self) -> float | Tensor:
        """Return the weight of the running micro-batch's loss in the step."""
        assert self.batch is not None
        return self._weights.share(self.batch)

    @property
    def weight_of_batch(self) -> Tensor | None:
        """Weight of the running micro-batch over all ranks; None if the step has not set one."""
        return self._weights.of_batch

    def append_weights(self, weights: Sequence[float]) -> None:
        """Append the weights of micro-batches whose losses another rank has weighted."""
        self._weights.append(weights, self._worlds.present.device)

    def share_of_mean(self, value: Tensor, *, over_all_ranks: bool) -> tuple[Tensor, str]:
        """Return this rank's contribution to a mean over samples, and the operation over ranks: "sum" or "mean".

        Args:
            over_all_ranks: True for a mean over all ranks, which inside a step is over the samples of the micro-batch.
        """
        if not value.is_floating_point():
            value = value.double()  # DDP would cut the fraction, and with it Lightning's counts of samples
        if not over_all_ranks or self.batch is None or self._worlds.present.stage.size == 1:
            return value, "mean"
        return value * self.batch.micro_share, "sum"

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss times this rank's share of the step, undoing Lightning's division by the number of
        micro-batches.
        """
        share: float | Tensor = 1.0 / self._worlds.present.size
        if self.batch is not None and not self._state.module.automatic_optimization:
            share = self.batch.step_share
        elif self.batch is not None:
            share = self._weights.share(self.batch) * self._state.trainer.accumulate_grad_batches
        if isinstance(share, Tensor):
            return loss * share.to(dtype=loss.dtype, device=loss.device)
        return loss * loss.new_full((), share)  # filled on the device: the host would wait for a copy

    # ------------------------------------------------------------------ gradients

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Leave gradients unsummed around micro-batches that are followed by others of the same step."""
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = False

    @contextmanager
    def summing(self) -> Generator[None, None, None]:
        """Sum gradients around a backward pass: dense ones over ranks during it, experts' over their holders after it.

        Under manual optimization gradients of earlier calls are summed already: they are put aside.
        """
        module, experts = self._state.module, self._state.experts
        is_summed = self._worlds.present.size > 1 or self._state.parts.is_wished
        earlier = _take_gradients(module) if is_summed and not module.automatic_optimization else {}
        if experts.shadow_transfers is not None:
            experts.shadow_transfers.is_last_backward = not self.is_blocked
        yield
        if not module.automatic_optimization:
            self._state.parts.end_backward()
        self._state.parts.drop_frozen()
        if module.automatic_optimization:
            self._leave()
        if not self.is_blocked:
            experts.sum_replica_gradients()
            self._state.parts.sum_rest(self._worlds.present.stage)
            if module.automatic_optimization:
                self._weights.finish(module)
        _add_gradients(earlier)

    def clip_by_value(self, optimizer: Optimizer, most: float) -> None:
        """Clip every element of an optimizer's gradients."""
        gradients = [local(p.grad) for p in self._state.parameters_of(optimizer) if p.grad is not None]
        for gradient in gradients:
            gradient.clamp_(-float(most), float(most))

    def clip(self, optimizer: Optimizer, most: float, look: Callable[[Tensor], None]) -> None:
        """Clip an optimizer's gradients by the norm of the whole model; collective.

        Args:
            look: called with the norm before gradients are scaled.
        """
        parameters = self._state.parameters_of(optimizer)
        world = self._worlds.present
        norm = global_gradient_norm(parameters, self._state.experts.stack_of, world.stage, world.pipe)
        self.last_gradient_norm = norm
        look(norm)
        scale_gradients(parameters, norm, float(most))

    def norms_for_clipping(self, gradients: list[Tensor], order: float) -> list[Tensor]:
        """Return the tensors whose norm is that by which functions of torch clip these gradients: for those of the
        module their norm over all ranks; others are as they are on this rank. Collective.

        Raises:
            ConfigurationError: a norm of the module's gradients other than the 2-norm.
        """
        world, stack_of = self._worlds.present, self._state.experts.stack_of
        parameters = [p for p in self._state.module.parameters() if p.requires_grad]
        own = {_memory_of(p.grad) for p in parameters if p.grad is not None}
        among = own & {_memory_of(gradient) for gradient in gradients}
        is_spread = world.pipe.size > 1 or any(p in stack_of or is_cut(p) for p in parameters)
        if world.size == 1 or not is_spread or (gradients and not among):
            return gradients
        if order != 2.0:
            raise ConfigurationError(
                f"a norm of gradients with norm_type={order} is not computed over all ranks: use norm_type=2, or "
                'self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm="value")'
            )
        norm = global_gradient_norm(parameters, stack_of, world.stage, world.pipe, among=among)
        return [norm, *(gradient for gradient in gradients if _memory_of(gradient) not in among)]

    def begin_training(self) -> None:
        """Forget what callbacks and module of an earlier training may have done."""
        self._writers = None

    @torch.no_grad()
    def require_same_gradients(self, optimizer: Optimizer) -> None:
        """Compare the norms of gradients that several ranks hold before an update, where hooks of the user may have
        changed them, or the module steps by itself; collective then, and at the first update in a world.

        Raises:
            ConfigurationError: they differ, on every rank.
        """
        world = self._worlds.present.stage
        if world.size == 1:
            return
        if self._writers is None:  # a rank may have a callback that others lack
            found = all_gather_json(_writers_of_gradients(self._state.trainer, self._state.module), world)
            self._writers = sorted({name for names in found for name in names})
        if not self._writers:
            return
        norms = _norms_of_copies(self._state.parameters_of(optimizer), self._state.experts.stack_of, world)
        bounds = torch.stack([norms, -norms.where(norms >= 0, torch.inf)])  # greatest, and minus the least
        all_reduce_(bounds, world, dist.ReduceOp.MAX)
        greatest, least = world.read(bounds) * torch.tensor([[1.0], [-1.0]])
        differing = torch.nonzero(greatest * (1 - _SAME_NORM) > least).flatten().tolist()
        if not differing:
            return
        first = differing[0]
        whose = "replicas of experts" if first else "dense parameters"
        raise ConfigurationError(
            f"{' or '.join(self._writers)} leaves the gradients of {whose} different on the ranks (norms from "
            f"{least[first]:.6g} to {greatest[first]:.6g}), because a rank's own gradients are not those of the whole "
            "model: clip with self.clip_gradients(optimizer, gradient_clip_val=...) or "
            "torch.nn.utils.clip_grad_norm_, and change gradients only by what is equal on all ranks"
        )


_BEFORE_UPDATES = (
    "backward", "on_after_backward", "optimizer_step", "on_before_optimizer_step", "configure_gradient_clipping"
)  # fmt: skip
"""Hooks in which a user may change gradients after they are summed over ranks."""


def _writers_of_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Return the hooks of the user that may change gradients, in words."""
    owners: list[Any] = [module, *trainer.callbacks]  # type: ignore[attr-defined]
    found = [(name, owner, getattr(owner, name, None)) for owner in owners for name in _BEFORE_UPDATES]
    writers = [
        f"{name} of {type(owner).__name__}"
        for name, owner, hook in found
        if hook is not None and str(getattr(hook, "__module__", "")).partition(".")[0] not in _OURS
    ]
    return writers if module.automatic_optimization else ["the training step", *writers]


def _norms_of_copies(
    parameters: Iterable[nn.Parameter], stack_of: Mapping[nn.Parameter, ExpertStack], world: World
) -> Tensor:
    """Return the norms of gradients that several ranks hold: of all dense ones, and of each expert in a stack with
    replicas; infinite where it is no number, and minus infinity for experts that this rank does not hold.
    """
    dense, of_experts = [], []
    for parameter in parameters:
        gradient, stack = parameter.grad, stack_of.get(parameter)
        if stack is not None:
            if stack.placement.is_replicated and parameter.requires_grad:
                of_experts.append(_norms_of_experts(gradient, stack, world.device))
        elif gradient is not None and gradient.layout is torch.strided and not is_cut(parameter):
            dense.append(gradient)
    norm = torch.zeros((), device=world.device) if not dense else torch.stack(private_torch.norms_of(dense)).norm()
    return torch.cat([norm[None], *of_experts]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _norms_of_experts(gradient: Tensor | None, stack: ExpertStack, device: torch.device) -> Tensor:
    norms_E = torch.full((stack.num_experts,), -torch.inf, device=device)
    held = list(stack.held())
    norms_S = torch.zeros(len(stack.slot_experts), device=device)
    if gradient is not None:
        norms_S = _norm(gradient.flatten(1), dim=1)
    norms_E[[expert for _, expert in held]] = norms_S[[slot for slot, _ in held]]
    return norms_E


def _take_gradients(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Move the gradients of a module into copies, because DDP may write the next ones into the same memory."""
    taken = {p: p.grad.clone() for p in module.parameters() if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def _add_gradients(taken: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in taken.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
