"""Loss scaling for float16 on several ranks: one scale, and updates that all ranks skip together.

Ranks hold other experts, so gradients can overflow on one rank and stay finite on the others. After the backward pass
every rank divides its gradients by the scale, and one collective of a single number spreads an overflow to all: either
every rank makes the update or none does, and the scale follows the same rule everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.compat.private_torch import SharedScaler
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import all_reduce_
from moe_lightning.state.tensors import local
from moe_lightning.strategies.worlds import Worlds


class AgreedScaler(SharedScaler):
    """Gradient scaler of all ranks of the present world.

    Args:
        former: scaler whose settings and scale this one takes over.
        worlds: the present world.
        parameters_of: returns the parameters that an optimizer updates on some rank.
    """

    def __init__(
        self, former: GradScaler, worlds: Worlds, parameters_of: Callable[[Optimizer], Sequence[nn.Parameter]]
    ) -> None:
        super().__init__(device=worlds.present.device.type)
        self.load_state_dict(former.state_dict())
        self.former, self._worlds, self._parameters_of = former, worlds, parameters_of

    @override
    @torch.no_grad()
    def unscaled(self, optimizer: Optimizer, inverse: Tensor) -> Tensor:
        """Divide the gradients of an optimizer by the scale, and return 1.0 if any of some rank has overflowed, else
        0.0; collective.
        """
        found = torch.zeros((), device=self._worlds.present.device)
        gradients = [local(p.grad) for p in self._parameters_of(optimizer) if p.grad is not None]
        self.divide(gradients, inverse.to(found.device), found)
        all_reduce_(found, self._worlds.present, dist.ReduceOp.MAX)
        return found

    def overflows(self, optimizer: Optimizer) -> bool:
        """True if the update is left out; the same on every rank. Collective for fused optimizers, whose gradients
        Lightning does not divide by the scale.
        """
        gradients = any(p.grad is not None for p in self._parameters_of(optimizer))
        if gradients and not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        return self.has_overflowed(optimizer)


def share_scale(
    precision: Precision, worlds: Worlds, parameters_of: Callable[[Optimizer], Sequence[nn.Parameter]]
) -> AgreedScaler | None:
    """Let a precision plugin use an `AgreedScaler`, until `own_scale`; return it, None where no loss is scaled.

    Raises:
        ConfigurationError: a scaler of a class of the user's.
    """
    former = precision.scaler if isinstance(precision, MixedPrecision) else None
    if former is None or not former.is_enabled():
        return None
    if type(former).__module__.partition(".")[0] != "torch" or hasattr(former, "process_group"):
        raise ConfigurationError(
            f"a {type(former).__name__} cannot agree on overflows with the ranks of other experts: give MixedPrecision "
            "a torch.amp.GradScaler"
        )
    assert isinstance(precision, MixedPrecision)
    precision.scaler = AgreedScaler(former, worlds, parameters_of)
    return precision.scaler


def own_scale(precision: Precision) -> None:
    """Give a precision plugin the scaler that it had, with the present scale."""
    if isinstance(precision, MixedPrecision) and isinstance(precision.scaler, AgreedScaler):
        former, state = precision.scaler.former, precision.scaler.state_dict()
        former.load_state_dict(state)
        precision.scaler = former
