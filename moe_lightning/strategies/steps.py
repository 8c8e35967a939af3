"""Steps of training and evaluation, the same whatever the number of ranks: batches cut over the ranks, gradients of the
mean over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.data.sampler import StepSlice
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.randomness import SampleStream
from moe_lightning.parallel.mesh import Axis
from moe_lightning.state.tensors import local
from moe_lightning.strategies.gradient_norm import global_gradient_norm, scale_gradients
from moe_lightning.strategies.rank_state import RankState
from moe_lightning.strategies.sequence_parts import SequenceParts
from moe_lightning.strategies.stand_ins import nothing_of, without_traces
from moe_lightning.strategies.step_data import begin_batch, running_slice, training_slice
from moe_lightning.strategies.step_weights import StepWeights
from moe_lightning.strategies.worlds import Worlds


class Steps:
    """Follows the running batch, weighs its loss, and sums gradients.

    Args:
        worlds: whose ranks share a batch.
        state: whose gradients they are.
        check_replicas_every: steps after which replicas of experts are compared bit by bit; 0: never.

    Attributes:
        stream: what keyed randomness follows.
        sequences: which part of each sample's positions is this rank's.
        batch: which samples the running batch holds; None where the loader does not know, and between batches.
        is_blocked: others follow the running micro-batch in its step: nothing is summed over ranks yet.
        is_stand_in: the batch that runs, or ran last, is no sample of this rank.
        stage_loss: of the batch that ran last, what the last stage of a pipeline differentiates on this rank; None
            elsewhere.
        last_gradient_norm: of the last clipped step, over the whole model.
        repairs_replicas: overwrite a replica that differs from a majority, unless the comparison before did so, too:
            something else than a lost bit then parts them.
    """

    def __init__(self, worlds: Worlds, state: RankState, *, check_replicas_every: int) -> None:
        self._worlds, self._state = worlds, state
        self._check_replicas_every, self._compared_step = check_replicas_every, -1
        self.repairs_replicas = self._has_just_repaired = False
        self._weights = StepWeights()
        self.is_blocked = False
        self.stream = SampleStream()
        self.sequences = SequenceParts(worlds)
        self.batch: StepSlice | None = None
        self.is_stand_in = False
        self.stage_loss: Tensor | None = None
        self.last_gradient_norm: Tensor | None = None

    def leave_world(self) -> None:
        """The step that runs will not end. Newcomers have not compared replicas yet, and all do it together."""
        self.is_blocked, self.batch, self._compared_step = False, None, -1
        self.sequences.leave_world()

    def draw_noise(self) -> None:
        """Keyed noise is that of this rank's positions in the present world: its part of each sequence, and where
        layers are cut, its share of that.
        """
        mesh = self._worlds.mesh
        axes: set[Axis] = {"cp", "tp"} if self._state.parts.layers_are_cut else {"cp"}
        self.stream.part, self.stream.parts = mesh.shape.place(mesh.whole.rank, axes)

    # ------------------------------------------------------------------ batches

    @contextmanager
    def training(self, arguments: object) -> Generator[None, None, None]:
        """Around the forward pass of a micro-batch with these arguments."""
        trainer, module = self._state.trainer, self._state.module
        self._compare_replicas(trainer.global_step)
        self._state.parts.take_buffers(self._worlds.mesh.world)
        self.sequences.require_targets(arguments)
        self.enter(training_slice(trainer.train_dataloader))
        self._weights.begin(self.batch)
        traces = without_traces(module) if self.stream.is_stand_in else nullcontext()
        with traces, self.sequences.watched(training=True):
            yield
        begin_batch(trainer.train_dataloader)  # one that the step itself has fetched
        if self._worlds.present.size > 1:
            self._weights.warn_of_ignored_targets(arguments, parts=self.sequences.parts)
        if not module.automatic_optimization:
            self._leave()

    def evaluate(self, step: Callable[..., Any], loaders: object, *args: Any, **kwargs: Any) -> Any:
        """A batch of validation or test."""
        self.sequences.require_targets(args)
        return self.predict(step, loaders, *args, **kwargs)

    def predict(self, step: Callable[..., Any], loaders: object, *args: Any, **kwargs: Any) -> Any:
        """A batch outside of training; the prediction of a stand-in has no rows."""
        index = kwargs.get("dataloader_idx", args[2] if len(args) > 2 else 0)
        self.enter(running_slice(loaders, index))
        try:
            if not self.stream.is_stand_in:
                with self.sequences.watched(training=False):
                    return self.sequences.whole(step(*args, **kwargs))
            with without_traces(self._state.module):
                return nothing_of(self.sequences.whole(step(*args, **kwargs)))
        finally:
            self._leave()
            self._state.parts.rest()

    def enter_piece(self, piece: StepSlice, *, is_training: bool) -> None:
        """Enter a micro-batch of the running batch."""
        self.enter(piece)
        self._weights.begin(piece, is_training=is_training)

    def enter(self, batch: StepSlice | None) -> None:
        """Learn which samples the running batch holds, and let keyed randomness follow them."""
        self.batch = batch = batch and replace(batch, parts=self._worlds.mesh.sharers)
        self.is_stand_in = batch is not None and batch.count == 0
        self.sequences.enter()
        if batch is not None:
            self.stream.advance(
                step=self._state.trainer.global_step,
                first_sample=batch.offset,
                num_samples=batch.count,
                total_samples=batch.micro_total,
            )

    def _leave(self) -> None:
        self.batch = None
        self.stream.is_stand_in = False
        self.sequences.leave()

    def require_stated_end(self, what: str) -> None:
        """
        Raises:
            ConfigurationError: manual optimization, whose steps have none.
        """
        if not self._state.module.automatic_optimization:
            raise ConfigurationError(
                f"{what} need automatic optimization: a step of manual optimization may change weights at any time"
            )

    def _compare_replicas(self, step: int) -> None:
        """Before a step whose number is a multiple of `check_replicas_every`; collective then.

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
        return self._weights.weigh(loss, weight, self.batch, self._worlds.mesh.world)

    def scale_sum(self, loss: Tensor) -> Tensor:
        """See `moe_lightning.moe.losses.global_sum`."""
        copies = 1 if self.batch is None else self._worlds.mesh.shape.tp  # ranks that have summed the same
        return self._weights.scale_sum(loss, self.batch, self._worlds.mesh.world) / copies

    def share(self) -> float | Tensor:
        """What the loss of the running micro-batch counts for in the step."""
        assert self.batch is not None
        return self._weights.share(self.batch)

    @property
    def weight_of_batch(self) -> Tensor | None:
        """Of the running micro-batch over all ranks, where the step has said it."""
        return self._weights.of_batch

    def take_weights(self, weights: Sequence[float]) -> None:
        """Of micro-batches whose losses another rank has weighed."""
        self._weights.take(weights, self._worlds.present.device)

    def share_of_mean(self, value: Tensor, *, is_of_all: bool) -> tuple[Tensor, str]:
        """What of a mean over samples comes from this rank, and whether ranks give their "sum" or "mean".

        Args:
            is_of_all: over all ranks, and so inside a step over the samples of the micro-batch.
        """
        if not value.is_floating_point():
            value = value.double()  # DDP would cut the fraction, and with it Lightning's counts of samples
        if not is_of_all or self.batch is None or self._worlds.mesh.world.size == 1:
            return value, "mean"
        return value * self.batch.micro_share, "sum"

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss times this rank's share of the step, undoing Lightning's division by the number of micro-batches."""
        share: float | Tensor = 1.0 / self._worlds.present.size
        if self.batch is not None and not self._state.module.automatic_optimization:
            share = self.batch.step_share
        elif self.batch is not None:
            share = self._weights.share(self.batch) * self._state.trainer.accumulate_grad_batches
        if isinstance(share, Tensor):
            return loss * share.to(dtype=loss.dtype, device=loss.device)
        return loss * loss.new_full((), share)  # filled where it is: a copy from here would be waited for

    # ------------------------------------------------------------------ gradients

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Around micro-batches that others of the same step follow: nothing is summed over ranks yet."""
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = False

    @contextmanager
    def summing(self) -> Generator[None, None, None]:
        """Around a backward pass, which sums dense gradients over ranks: then experts' are summed over their holders.

        Under manual optimization what earlier calls left in the gradients is summed already: it steps aside.
        """
        module, experts = self._state.module, self._state.experts
        is_summed = self._worlds.present.size > 1 or self._state.parts.is_wished
        earlier = _take_gradients(module) if is_summed and not module.automatic_optimization else {}
        if experts.visits is not None:
            experts.visits.is_last_backward = not self.is_blocked
        yield
        if not module.automatic_optimization:
            self._state.parts.end_backward()
        self._state.parts.drop_frozen()
        if module.automatic_optimization:
            self._leave()
        if not self.is_blocked:
            experts.sum_replica_gradients()
            self._state.parts.sum_rest(self._worlds.mesh.world)
            if module.automatic_optimization:
                self._weights.finish(module)
        _add_gradients(earlier)

    def clip_by_value(self, optimizer: Optimizer, most: float) -> None:
        """Clip every number of an optimizer's gradients."""
        gradients = [local(p.grad) for p in self._state.parameters_of(optimizer) if p.grad is not None]
        for gradient in gradients:
            gradient.clamp_(-float(most), float(most))

    def clip(self, optimizer: Optimizer, most: float) -> None:
        """Clip an optimizer's gradients by the norm of the whole model; collective."""
        parameters = self._state.parameters_of(optimizer)
        mesh = self._worlds.mesh
        norm = global_gradient_norm(parameters, self._state.experts.stack_of, mesh.world, mesh.pipe)
        self.last_gradient_norm = norm
        scale_gradients(parameters, norm, float(most))


def _take_gradients(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Empty the gradients of a module into copies, because DDP may write the next ones into the same memory."""
    taken = {p: p.grad.clone() for p in module.parameters() if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def _add_gradients(taken: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in taken.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
