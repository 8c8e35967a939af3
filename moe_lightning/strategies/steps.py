"""Training and evaluation steps that are the same on any number of ranks.

Batches are cut over the ranks, and gradients are those of the mean over all samples. A loss is weighted by the rank's
share of the samples of a step, or by the weight that the module gives to `global_mean`. A rank without a sample
computes a dummy batch. Under mesh.cp the sequences of every batch are cut over the ranks that share its samples. DDP
sums the gradients of dense parameters where each rank has the whole module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_lightning.compat import private_torch
from moe_lightning.data.loader import factors_of
from moe_lightning.data.sampler import StepSlice
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.losses import IGNORED_TARGET
from moe_lightning.moe.randomness import SampleStream
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.parallel.gradient_hook import DenseSum, sum_over_ranks
from moe_lightning.parallel.sequence import SequenceParts
from moe_lightning.state.tensors import local
from moe_lightning.strategies.dummy_batches import nothing_of, without_traces
from moe_lightning.strategies.step_data import begin_batch, joined_slice, running_slice
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

logger = logging.getLogger(__name__)

Context = Callable[[], AbstractContextManager[Any]]
"""Returns the context of the precision around a forward pass."""

_WATCHED_STEPS = 100
"""Batches that are searched for ignored targets, before the module is taken to have none."""


class StepWeights:
    """The weights of the micro-batches of one step.

    A micro-batch of weight W counts for W / sum(W) of the step. The sum is known with the last one only: until then
    gradients are scaled by the first W, and `finish` brings them to the sum's.

    Attributes:
        of_batch: W of the running micro-batch, the sum over its means; None where it was not given.
        of_mean: the part of its last mean.
    """

    def __init__(self) -> None:
        self._of_step: list[Tensor] = []
        self.of_batch: Tensor | None = None
        self.of_mean: Tensor | None = None
        self._is_stated = False
        self._watched = 0

    def begin(self, here: StepSlice | None, *, is_training: bool = True) -> None:
        """Begin a micro-batch, and with the first one of training a step."""
        self.of_batch = self.of_mean = None
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
            self._add(own)
            return counted
        totals = torch.stack([counted.detach().double() * own, own])
        all_reduce_(totals, world)
        self._add(totals[1])
        share = own / totals[1].clamp_min(torch.finfo(torch.float64).tiny)
        mean = totals[0] / totals[1].clamp_min(torch.finfo(torch.float64).tiny)
        value: Tensor = _MeanOfAll.apply(counted, mean.to(loss.dtype), (share * _all_shares(here)).to(loss.dtype))  # type: ignore[no-untyped-call]
        return value

    def _add(self, weight: Tensor) -> None:
        self.of_mean = weight
        self.of_batch = weight if self.of_batch is None else self.of_batch + weight

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
        if any(_ignores_unevenly(leaf, parts) for leaf in private_torch.tree_leaves(arguments)):
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


class Steps:
    """Running batch, weight of its loss, and sums of gradients.

    Args:
        worlds: the present world, whose ranks share a batch.
        state: the state of this rank, with its gradients.
        screened: returns a context for a forward or backward pass, see `StepUpdate.screened`.

    Attributes:
        weights: of the losses of the running step.
        stream: position of keyed randomness.
        sequences: this rank's part of each sample's positions.
        batch: samples of the running batch; None if the loader has no position, and between batches.
        is_blocked: others follow the running micro-batch in its step: nothing is summed over ranks yet.
        is_dummy_batch: the batch that runs, or ran last, has no sample of this rank.
    """

    def __init__(
        self, worlds: Worlds, state: TrainState, screened: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._worlds, self._state, self._screened = worlds, state, screened
        self.weights = StepWeights()
        self.is_blocked = False
        self.stream = SampleStream()
        self.sequences = SequenceParts()
        self.batch: StepSlice | None = None
        self._ended_batch: StepSlice | None = None  # of manual optimization, whose hooks may call backward
        self.is_dummy_batch = False
        self._has_warned = False  # of a counter
        self._earlier: dict[nn.Parameter, Tensor] | None = None  # gradients from before; None until a step has some

    def leave_world(self) -> None:
        """Abort the running step."""
        self.is_blocked, self.batch, self._ended_batch = False, None, None
        self.sequences.leave_world()

    def forget_step(self) -> None:
        """Forget the gradients that an aborted step has put aside."""
        self._earlier = None

    @property
    def has_left_step(self) -> bool:
        """True if the running batch is the first of a step, and the step before was left after some of its batches, as
        where a hook ends the epoch.
        """
        if self._earlier is None:  # asked in every batch
            return False
        here = joined_slice(self._state.trainer.train_dataloader)
        return here is not None and here.micro == 0

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
        self._state.parts.broadcast_buffers(self._worlds.present.stage)
        self.sequences.require_targets(arguments)
        self.begin_micro_batch(joined_slice(trainer.train_dataloader), is_training=True)
        traces: AbstractContextManager[list[str]] = nullcontext([])
        if self.stream.is_dummy_batch:
            traces = without_traces(module)
        with self._screened(), traces as restored, self.sequences.watched(training=True):
            yield
        if restored:
            self._warn_of_counters(restored[0])
        begin_batch(trainer.train_dataloader)  # one that the step itself has fetched
        if self._worlds.present.size > 1:
            self.weights.warn_of_ignored_targets(arguments, parts=self.sequences.parts)
        if not module.automatic_optimization:
            self._ended_batch = self.batch
            self._end_batch()

    def _warn_of_counters(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"{name} stays as it was on a rank without a sample of the last batch, since it may count samples: "
                "if it counts steps, use self.trainer.global_step or batch_idx, or drop_last=True"
            )

    def evaluate(self, step: Callable[..., Any], loaders: object, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of validation or test."""
        self.sequences.require_targets(args)
        return self.predict(step, loaders, *args, **kwargs)

    def predict(self, step: Callable[..., Any], loaders: object, *args: Any, **kwargs: Any) -> Any:
        """Run a batch outside of training; the prediction of a dummy batch has no rows."""
        index = kwargs.get("dataloader_idx", args[2] if len(args) > 2 else None)
        self.begin_batch(running_slice(loaders, index))
        try:
            if not self.stream.is_dummy_batch:
                with self.sequences.watched(training=False):
                    return self.sequences.whole(step(*args, **kwargs))
            with without_traces(self._state.module):
                return nothing_of(self.sequences.whole(step(*args, **kwargs)))
        finally:
            self._end_batch()
            self._state.before_reading()

    def begin_micro_batch(self, piece: StepSlice | None, *, is_training: bool) -> None:
        """Begin a batch, or in a pipeline one of its micro-batches."""
        self.begin_batch(piece)
        self.weights.begin(piece, is_training=is_training)

    def begin_batch(self, batch: StepSlice | None) -> None:
        """Set the samples of the running batch, and the position of keyed randomness."""
        self.batch = batch = batch and replace(batch, parts=self._worlds.present.shape.sharers)
        self._ended_batch = None
        self.is_dummy_batch = batch is not None and batch.count == 0
        self.sequences.enter()
        self.stream.begin_micro_batch()
        for layer in self._state.experts.layers:
            layer.begin_micro_batch()
        trainer = self._state.trainer
        if batch is not None:
            by_hand = trainer.training and not self._state.module.automatic_optimization  # batches may share an update
            self.stream.advance(
                step=batch.step if by_hand else trainer.global_step,
                first_sample=batch.offset,
                num_samples=batch.count,
                total_samples=batch.micro_total,
            )
        else:
            self.stream.release(step=trainer.global_step)

    def _end_batch(self) -> None:
        self.batch = None
        self.stream.is_dummy_batch = False
        self.sequences.leave()

    # ------------------------------------------------------------------ losses

    def weigh(self, loss: Tensor, weight: Tensor | float) -> Tensor:
        """See `moe_lightning.moe.losses.global_mean`; collective."""
        return self.weights.weigh(loss, weight, self.batch, self._worlds.present.stage)

    def scale_sum(self, loss: Tensor) -> Tensor:
        """See `moe_lightning.moe.losses.global_sum`."""
        copies = 1 if self.batch is None else self._num_copies
        return self.weights.scale_sum(loss, self.batch, self._worlds.present.stage) / copies

    def share(self) -> float | Tensor:
        """Return the weight of the running micro-batch's loss in the step."""
        assert self.batch is not None
        return self.weights.share(self.batch)

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

    def sum_over_ranks(self, value: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of a value over all ranks, to which each sample contributes once; collective.

        Args:
            reduce: returns the sum over the ranks, whatever their samples are.
        """
        is_dummy = self.batch is not None and self.is_dummy_batch
        of_all = reduce(torch.zeros_like(value) if is_dummy else value)
        mode = None if of_all.is_floating_point() else "floor"
        return of_all.div(self._num_copies, rounding_mode=mode) if self._num_copies > 1 else of_all

    @property
    def _num_copies(self) -> int:
        """Ranks that sum the same values."""
        shape = self._worlds.present.shape
        return shape.sharers // shape.cp

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss times this rank's share of the step, undoing Lightning's division by the number of
        micro-batches.
        """
        share: float | Tensor = 1.0 / self._worlds.present.size
        if self.batch is not None and self._state.module.automatic_optimization:
            share = self.weights.share(self.batch) * self._state.trainer.accumulate_grad_batches
        elif (batch := self.batch or self._ended_batch) is not None:
            share = batch.step_share
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

        Gradients of earlier steps, and under manual optimization of earlier calls, are summed already: they are put
        aside until the step's own are.
        """
        module, experts = self._state.module, self._state.experts
        if self._earlier is None:
            self._earlier = self._take_earlier()
        if experts.shadow_transfers is not None:
            experts.shadow_transfers.begin_backward(is_last=not self.is_blocked)
        with self._screened():
            yield
        if module.automatic_optimization:
            self._end_batch()
        if not self.is_blocked:
            experts.sum_replica_gradients()
            self._state.parts.sum_rest(self._worlds.present.stage)
            if module.automatic_optimization:
                self.weights.finish(module)
            add_gradients(self._earlier)
            self._earlier = None

    def _take_earlier(self) -> dict[nn.Parameter, Tensor]:
        """Move the gradients that are there before a backward pass into copies. Where automatic optimization clears a
        gradient on the rank that updates the parameter only, that rank's stays, to be summed, and others drop theirs.
        """
        shards, parts = self._state.shards, self._state.parts
        if self._worlds.present.size == 1 and not parts.is_enabled:
            return {}
        owned = shards.ranks if self._state.module.automatic_optimization else {}
        for parameter in shards.unowned if owned else ():
            parameter.grad = None
        # Copies, because DDP may write the next gradients into the same memory.
        taken = {p: p.grad.clone() for p in parts.resting_parameters() if p not in owned and p.grad is not None}
        for parameter in taken:
            parameter.grad = None
        return taken


def add_gradients(taken: Mapping[nn.Parameter, Tensor]) -> None:
    """Add gradients to those that parameters have by now."""
    for parameter, gradient in taken.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class WholeModel:
    """Forward and backward passes of a module that every rank has whole: `Pipeline` without stages. DDP sums the
    gradients of its dense parameters.

    Args:
        worlds: the present world, whose ranks share the gradients.
        state: the state of this rank.
        steps: weights of the losses.
        options: of DistributedDataParallel.
        check: called with gradients of this rank before they are summed.

    Attributes:
        last_loss: None, as on ranks without the last stage of a pipeline.
        opened: returns a context without effect: every rank has the whole state_dict.
    """

    last_loss: Tensor | None = None
    opened = nullcontext

    def __init__(
        self,
        worlds: Worlds,
        state: TrainState,
        steps: Steps,
        options: Mapping[str, Any],
        check: Callable[[Tensor], None],
    ) -> None:
        self._worlds, self._state, self._steps = worlds, state, steps
        self._options, self._check = options, check
        self._frozen: Sequence[nn.Parameter] = ()
        self._forward: Mapping[str, Any] | None = None  # the attribute of the module in DDP, if it has its own

    def begin_run(self) -> None:
        """Do nothing: every rank has the whole state_dict."""

    def end_run(self) -> None:
        """Do nothing: every rank has the whole state_dict."""

    def forget_step(self) -> None:
        """Do nothing: gradients are in the parameters."""

    def synchronize(self) -> None:
        """Do nothing: DDP, or Lightning where nothing is trained, has broadcast the values."""

    # ------------------------------------------------------------------ sums by DDP

    def wrapped(self, model: nn.Module, ignored: Collection[str], devices: list[int] | None) -> nn.Module:
        """Return the model in DDP, or as it is where nothing is summed; collective.

        Args:
            ignored: names of parameters and buffers that DDP neither broadcasts nor sums.
            devices: as DDP's `device_ids`.

        Raises:
            ConfigurationError: DDP cannot follow the options.
        """
        world = self._worlds.present
        if self._options.get("static_graph") and world.size > 1:
            num_micros = max(factors_of(self._state.trainer))
            if num_micros > 1:
                raise ConfigurationError(
                    f"static_graph=True fails in torch where gradients of {num_micros} batches are accumulated: drop "
                    "it, or use accumulate_grad_batches=1"
                )
        if not world.is_connected:
            return model
        summed = {name: p for name, p in model.named_parameters() if name not in ignored}
        self._frozen = [parameter for parameter in summed.values() if not parameter.requires_grad]
        if len(self._frozen) == len(summed):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name not in ignored:
                    broadcast_(tensor.data, 0, world)
            return model  # DDP refuses a model of which it would sum nothing
        # On a stream of its own as in stock Lightning: https://pytorch.org/docs/stable/notes/cuda.html#id5
        with nullcontext() if devices is None else _side_stream(world.device):
            ddp = DistributedDataParallel(model, devices, process_group=world.dense, **self._options)
        self._forward = {name: value for name, value in model.__dict__.items() if name == "forward"}
        assert world.dense is not None
        ddp.register_comm_hook(DenseSum(world.dense, self._check), sum_over_ranks)
        return ddp

    def unwrapped(self, module: nn.Module) -> nn.Module:
        """Return the module without DDP, whose reducer holds a group, and without the attribute `forward` that
        Lightning leaves there when DDP fails.
        """
        if self._forward is not None:
            module.__dict__.pop("forward", None)
            module.__dict__.update(self._forward)
        self._forward = None
        return module

    @property
    def lacks_unfrozen(self) -> bool:
        """True if parameters were frozen when DDP was built and train now, such as a backbone that is tuned from some
        epoch on.
        """
        return any(parameter.requires_grad for parameter in self._frozen)

    # ------------------------------------------------------------------ passes

    def train(self, stock: Callable[..., Any], _context: Context, *arguments: Any, **named: Any) -> Any:
        """Run Lightning's training step, which goes through DDP."""
        return stock(*arguments, **named)

    def evaluate(self, stock: Callable[..., Any], _context: Context, *arguments: Any, **named: Any) -> Any:
        """Run Lightning's step of an evaluation."""
        return stock(*arguments, **named)

    def weighted(self, loss: Tensor) -> Tensor:
        """Return a loss as it counts in its step, see `Steps.weighted`."""
        return self._steps.weighted(loss)

    def backward(self, stock: Callable[[], object]) -> None:
        """Run Lightning's backward pass, in which DDP sums the gradients."""
        stock()


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Queue work inside on another stream, after the work queued so far and before the following: DDP sends parameters
    that were just written, and fills those that are read next.
    """
    present, side = torch.accelerator.current_stream(device), torch.Stream(device=device)
    side.wait_stream(present)
    with side:
        yield
    present.wait_stream(side)
