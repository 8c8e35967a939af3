"""The part of the strategy that makes a step: batches cut over the ranks, gradients of the mean over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.data.step_sampler import StepSlice
from moe_lightning.modules.stream import SampleStream
from moe_lightning.strategies.gradient_norm import global_gradient_norm, scale_gradients
from moe_lightning.strategies.stand_ins import nothing_of, without_traces
from moe_lightning.strategies.step_data import StepData, running_slice, training_slice
from moe_lightning.strategies.step_weights import StepWeights
from moe_lightning.strategies.world_changing import WorldChangingStrategy


class SteppingStrategy(WorldChangingStrategy):
    """One step of training or evaluation, the same whatever the number of ranks.

    Attributes:
        last_gradient_norm: of the last clipped step, over the whole model.
        is_stand_in: the batch that runs, or ran last, is no sample of this rank, which has none in it: a callback that
            counts samples passes over it.
    """

    is_stand_in: bool
    last_gradient_norm: Tensor | None
    _data: StepData | None
    _seed: int | None
    _stream: SampleStream
    _weights: StepWeights

    # ------------------------------------------------------------------ data

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if module is not None and module._trainer is not None:  # a strategy may be set up without a Trainer
            # Lightning would replace the sampler of every training loader by one that shuffles.
            module._trainer._accelerator_connector.use_distributed_sampler = False

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Cut a loader over the ranks: its batch_size is the global batch.

        Raises:
            ConfigurationError: a loader that cannot be cut exactly (an iterable dataset, batches of the user's own,
                ...).
        """
        assert self.lightning_module is not None
        return self._step_data().cut(dataloader, self.lightning_module.trainer)

    def _step_data(self) -> StepData:
        if self._data is None:
            self._data = StepData(
                rank=self.global_rank,
                world_size=self.world_size,
                seed=self._run_seed(),
                is_elastic=self._elastic is not None,
            )
        return self._data

    def _run_seed(self) -> int:
        """The strategy's seed, or the one given to Lightning's seed_everything, or 0."""
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def _enter_batch(self, here: StepSlice | None) -> None:
        """Learn which samples the running batch holds, and let keyed randomness follow them."""
        self._slice = here
        self.is_stand_in = here is not None and here.count == 0
        if here is not None:
            step = self.trainer.global_step
            self._stream.advance(
                step=step, first_sample=here.offset, num_samples=here.count, total_samples=here.micro_total
            )

    def _leave_batch(self) -> None:
        self._slice = None
        self._stream.is_stand_in = False

    # ------------------------------------------------------------------ one step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._enter_batch(training_slice(self.trainer.train_dataloader))
        self.trainer.fit_loop._restarting = False  # Lightning would leave out what a plateau does at the epoch's end
        self._weights.begin(self._slice)
        with without_traces(self.lightning_module) if self._stream.is_stand_in else nullcontext():
            output = super().training_step(*args, **kwargs)
        if self.world.size > 1:
            self._weights.warn_of_ignored_targets(args)
        if not self.lightning_module.automatic_optimization:
            self._leave_batch()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, "val_dataloaders", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, "test_dataloaders", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, "predict_dataloaders", *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], loaders: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        index = kwargs.get("dataloader_idx", args[2] if len(args) > 2 else 0)
        self._enter_batch(running_slice(getattr(self.trainer, loaders), index))
        try:
            if not self._stream.is_stand_in:
                return step(*args, **kwargs)
            with without_traces(self.lightning_module):
                return nothing_of(step(*args, **kwargs))
        finally:
            self._leave_batch()

    def weigh(self, loss: Tensor, weight: Tensor | float) -> Tensor:
        """See `moe_lightning.modules.losses.global_mean`; collective."""
        return self._weights.weigh(loss, weight, self._slice, self.world)

    def scale_sum(self, loss: Tensor) -> Tensor:
        """See `moe_lightning.modules.losses.global_sum`."""
        return self._weights.scale_sum(loss, self._slice, self.world)

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """As in DDP, but inside a step the mean over ranks is the mean over the samples of the micro-batch, and
        integers have exact means.
        """
        is_mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg", "reduceop.avg")
        here = self._slice
        if isinstance(tensor, Tensor) and is_mean and not tensor.is_floating_point():
            tensor = tensor.double()  # DDP would cut the fraction, and with it Lightning's counts of samples
        if self.world_size == 1:
            return tensor
        if isinstance(tensor, Tensor) and is_mean and here is not None and group is None:
            return super().reduce(tensor * (here.count / here.micro_total), group, "sum")
        return super().reduce(tensor, group, reduce_op)

    def _loss_weight(self) -> float | Tensor:
        """This rank's share of the step's loss, undoing Lightning's division by the number of micro-batches."""
        here = self._slice
        if here is None:
            return 1.0 / self.world.size
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return here.count / here.step_total
        return self._weights.share(here) * self.trainer.accumulate_grad_batches

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Gradients of the mean over the global batch, summed over replicas before any hook sees them.

        Under manual optimization what earlier calls left in the gradients is summed already: it steps aside.
        """
        assert self.lightning_module is not None
        weight = torch.as_tensor(self._loss_weight(), dtype=closure_loss.dtype, device=closure_loss.device)
        is_automatic = self.lightning_module.automatic_optimization
        earlier = {} if is_automatic else _take_gradients(self.lightning_module)
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss * weight, self.lightning_module)
        if self.experts.visits is not None:
            self.experts.visits.is_last_backward = not self._sync_blocked
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        if is_automatic:
            self._leave_batch()
        if not self._sync_blocked:
            self.experts.sum_replica_gradients()
            if is_automatic:
                self._weights.finish(self.lightning_module)
        _add_gradients(earlier)
        self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sync_blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sync_blocked = False

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._shards is not None:
            self._shards.spread_updates(self.parameters_of(optimizer))
        self.after_update()
        if self._elastic is not None:
            self._elastic.commit()
        return output

    def after_update(self) -> None:
        """What follows every update of the parameters, on each rank by itself."""
        for layer in self.experts.layers:
            layer.router.update_bias()

    def _clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = self.parameters_of(optimizer)
        self.last_gradient_norm = global_gradient_norm(parameters, self.experts.stack_of, self.world)
        scale_gradients(parameters, self.last_gradient_norm, float(clip_val))


def _take_gradients(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Empty the gradients of a module into copies, because DDP may write the next ones into the same memory."""
    taken = {p: p.grad.clone() for p in module.parameters() if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def _add_gradients(taken: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in taken.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
