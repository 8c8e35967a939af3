"""Gradients of the whole model: the norm over all ranks, clipping, and their comparison.

Dense parameters count once, each expert once, and every shard of a parameter once, so that the norm is that of one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from moe_lightning.compat import private_torch
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.parallel.mesh import TensorCut
from moe_lightning.state.tensors import cut_of, is_sharded, local
from moe_lightning.strategies.dummy_batches import LIBRARIES
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

_SAME_NORM = 1e-5
"""Relative difference of norms of the same gradients, on unlike devices."""


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
            spread.append(_norms_of_experts(gradient, stack, stack.owned(), 0.0, parameter.device).square())
        elif (cut := cut_of(parameter)) is not None:
            spread.append(_squared_part(gradient, cut, world))
        elif gradient is not None:
            dense.append(norm_of(gradient).square())
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


def norm_of(gradient: Tensor, dim: int | None = None) -> Tensor:
    """Compute a norm in float32, summed in the gradient's own precision if that is higher."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, dtype=dtype)
    return norm.float()


def _squared_part(gradient: Tensor | None, cut: TensorCut, world: World) -> Tensor:
    """Return squares [parts], with this rank's at its place if it is the first that holds these values."""
    among = world.row_cut
    squares = torch.zeros(len(among.holders), dtype=torch.float32, device=world.device)
    if among.holders_of(cut)[0] == world.rank and gradient is not None:
        squares[among.index] = norm_of(local(gradient)).square()
    return squares


class Gradients:
    """Clipping of gradients by the norm of the whole model, their comparison between ranks, and a watch for updates
    that nobody counts.

    Args:
        worlds: the present world, whose ranks share the gradients.
        state: the state of this rank, with its gradients.

    Attributes:
        last_norm: of the last clipped step, over the whole model.
        has_summed: a backward pass went through the strategy, which sums gradients over ranks.
    """

    def __init__(self, worlds: Worlds, state: TrainState) -> None:
        self._worlds, self._state = worlds, state
        self.last_norm: Tensor | None = None
        self.has_summed = False
        self._watch: RemovableHandle | None = None
        self._is_counted = False
        self._writers: list[str] | None = None  # hooks that may change gradients, on any rank

    def begin_sum(self) -> None:
        """Begin a backward pass that goes through the strategy."""
        self.has_summed = True

    def clip_by_value(self, optimizer: Optimizer, most: float) -> None:
        """Clip every element of an optimizer's gradients."""
        gradients = [local(p.grad) for p in self._state.parameters_of(optimizer) if p.grad is not None]
        for gradient in gradients:
            gradient.clamp_(-float(most), float(most))

    def clip(self, optimizer: Optimizer, most: float, check: Callable[[Tensor], None]) -> None:
        """Clip an optimizer's gradients by the norm of the whole model; collective.

        Args:
            check: called with the norm before gradients are scaled.
        """
        parameters = self._state.parameters_of(optimizer)
        world = self._worlds.present
        norm = global_gradient_norm(parameters, self._state.experts.stack_of, world.stage, world.pipe)
        self.last_norm = norm
        check(norm)
        scale_gradients(parameters, norm, float(most))

    def norms_for_clipping(self, gradients: list[Tensor], order: float) -> list[Tensor]:
        """Return the tensors whose norm is that by which functions of torch clip these gradients: for those of the
        module their norm over all ranks; others are as they are on this rank. Collective.

        Raises:
            ConfigurationError: a norm of the module's gradients other than the 2-norm, or in a pipeline.
        """
        world, stack_of = self._worlds.present, self._state.experts.stack_of
        parameters = [p for p in self._state.module.parameters() if p.requires_grad]
        own = {_memory_of(p.grad) for p in parameters if p.grad is not None}
        among = own & {_memory_of(gradient) for gradient in gradients}
        is_spread = world.pipe.size > 1 or any(p in stack_of or is_sharded(p) for p in parameters)
        if world.size == 1 or not is_spread or (gradients and not among):
            return gradients
        if order != 2.0:
            raise ConfigurationError(
                f"a norm of gradients with norm_type={order} is not computed over all ranks: use norm_type=2, or "
                'self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm="value")'
            )
        if world.pipe.size > 1:
            raise ConfigurationError(
                "torch's functions for norms of gradients know one stage of mesh.pp only: use "
                "self.clip_gradients(optimizer, gradient_clip_val=...), or moe_lightning.gradient_norms(self)"
            )
        norm = global_gradient_norm(parameters, stack_of, world.stage, among=among)
        return [norm, *(gradient for gradient in gradients if _memory_of(gradient) not in among)]

    def forget_writers(self) -> None:
        """Ask all ranks again for hooks that may change gradients, in another training or world."""
        self._writers = None

    def watch_updates(self) -> None:
        """Refuse, until `end_watch`, an optimizer that the module steps past Lightning, on several ranks: that of
        `optimizers(use_pl_optimizer=False)`, or one inside of another.
        """
        self.end_watch()
        self._watch = register_optimizer_step_pre_hook(self._check_counted)

    def end_watch(self) -> None:
        """End what `watch_updates` began."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    @contextmanager
    def counted(self) -> Generator[None, None, None]:
        """Mark the updates inside as those of a step that Lightning counts."""
        self._is_counted = True
        try:
            yield
        finally:
            self._is_counted = False

    def _check_counted(self, optimizer: Optimizer, *_: object) -> None:
        """
        Raises:
            ConfigurationError: the update of parameters of the module is not one of a step.
        """
        state = self._state
        if self._is_counted or state.module.automatic_optimization or not state.trainer.training:
            return
        updated = {p for group in optimizer.param_groups for p in group["params"]}
        if self._worlds.may_have_peers and not updated.isdisjoint(state.module.parameters()):
            raise ConfigurationError(
                f"{type(optimizer).__name__} is stepped past Lightning, and so past the sums and checks of several "
                "ranks: step what self.optimizers() returns"
            )

    @torch.no_grad()
    def require_same_gradients(self, optimizer: Optimizer) -> None:
        """Compare the norms of gradients that several ranks hold before an update, where hooks of the user may have
        changed them, or the module steps by itself; collective then, and at the first update in a world.

        Raises:
            ConfigurationError: they differ, on every rank; or no backward pass of a module that optimizes manually went
                through the strategy.
        """
        world = self._worlds.present.stage
        if world.size == 1:
            return
        by_hand = not self._state.module.automatic_optimization
        if by_hand and not self.has_summed:
            raise ConfigurationError(
                "the training step updates parameters without a backward pass of the strategy, which sums their "
                "gradients over ranks: call self.manual_backward(loss) instead of loss.backward()"
            )
        if self._writers is None:  # a rank may have a callback that others lack
            found = all_gather_json(_writers_of_gradients(self._state.trainer, self._state.module), world)
            self._writers = sorted({name for names in found for name in names})
        if not self._writers:
            return
        norms = _norms_of_replicas(self._state.parameters_of(optimizer), self._state.experts.stack_of, world)
        bounds = torch.stack([norms, -norms.where(norms >= 0, torch.inf)])  # greatest, and minus the least
        all_reduce_(bounds, world, dist.ReduceOp.MAX)
        greatest, least = world.read(bounds) * torch.tensor([[1.0], [-1.0]])
        differing = torch.nonzero(greatest * (1 - _SAME_NORM) > least).flatten().tolist()
        if not differing:
            return
        first = differing[0]
        unused = (
            "; where a loss leaves parameters unused, as with several optimizers, give the strategy "
            "find_unused_parameters=True"
        )
        whose = "replicas of experts" if first else "dense parameters"
        raise ConfigurationError(
            f"{' or '.join(self._writers)} leaves the gradients of {whose} different on the ranks (norms from "
            f"{least[first]:.6g} to {greatest[first]:.6g}), because a rank's own gradients are not those of the whole "
            "model: clip with self.clip_gradients(optimizer, gradient_clip_val=...) or "
            "torch.nn.utils.clip_grad_norm_, and change gradients only by what is equal on all ranks"
            + (unused if by_hand else "")
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
        if hook is not None and str(getattr(hook, "__module__", "")).partition(".")[0] not in LIBRARIES
    ]
    return writers if module.automatic_optimization else ["the training step", *writers]


def _norms_of_replicas(
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
                of_experts.append(_norms_of_experts(gradient, stack, stack.held(), -torch.inf, world.device))
        elif gradient is not None and gradient.layout is torch.strided and not is_sharded(parameter):
            dense.append(norm_of(gradient))
    norm = torch.stack(dense).norm() if dense else torch.zeros((), device=world.device)
    return torch.cat([norm[None], *of_experts]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _norms_of_experts(
    gradient: Tensor | None, stack: ExpertStack, slots: Iterable[tuple[int, int]], absent: float, device: torch.device
) -> Tensor:
    norms_E = torch.full((stack.num_experts,), absent, dtype=torch.float32, device=device)
    norms_S: Sequence[float] | Tensor = [0.0] * len(stack.slot_experts)
    if gradient is not None:
        norms_S = norm_of(gradient.flatten(1), dim=1)
    for slot, expert in slots:
        norms_E[expert] = norms_S[slot]
    return norms_E
