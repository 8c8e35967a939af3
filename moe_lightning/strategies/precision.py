"""Precision plugins on several ranks: buffers that stay in float32, and one loss scale for float16.

Parameters and buffers follow the precision plugin, as in stock Lightning. These buffers stay as they are, bit by bit:
the selection biases and rotary tables of this library; in models of transformers the rotary frequencies; complex
buffers, which have no half precision; and what a module, of transformers or a user's own, names in
`_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict`.

Ranks hold other experts, so gradients can overflow on one rank and stay finite on the others. After the backward pass
every rank divides its gradients by the scale, and one collective of a single number spreads an overflow to all: either
every rank makes the update or none does, and the scale follows the same rule everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.compat.private_torch import SharedScaler
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import all_reduce_, any_says
from moe_lightning.state.tensors import local, preserved_marks
from moe_lightning.strategies.worlds import Worlds

_DECLARATIONS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""A name or path of buffers, or of modules around them, or several, as in transformers."""

_FREQUENCIES = r"\w*inv_freq"
"""Rotary frequencies in the models of transformers, whose base class has a `base_model_prefix`."""


def convert_by_rule(precision: Precision, whole: Callable[[], AbstractContextManager[None]]) -> None:
    """Let a precision plugin leave these buffers as they are, until `private_lightning.use_own_methods`.

    Args:
        whole: restores the parts of the module inside that are on other ranks: these may come here later.
    """
    convert = type(precision).convert_module.__get__(precision)

    def convert_all(module: nn.Module) -> nn.Module:
        with whole():
            return _convert(convert, module)

    private_lightning.convert_with(precision, convert_all)


def _convert(convert: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    kept = [(part, name, part.get_buffer(name).data) for part, name in _declared_buffers(module)]
    with preserved_marks(module):  # a DTensor is replaced by another one
        converted = convert(module)
    for part, name, values in kept:
        buffer = part.get_buffer(name)
        if values.dtype in (torch.float16, torch.bfloat16):
            if values.any():  # zeros are exact
                rank_zero_warn(
                    f"buffer {name} of {type(part).__name__} is to stay in float32, but was built in "
                    f"{str(values.dtype).removeprefix('torch.')}, the default inside `configure_model`, which has "
                    "rounded its values: build it with dtype=torch.float32"
                )
            values = values.float()
        buffer.data = values.to(buffer.device)
    return converted


def _declared_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the names of buffers that keep their precision, with the modules that have them under these names."""
    for part in module.modules():
        declared = [getattr(part, attribute, None) or () for attribute in _DECLARATIONS]
        patterns = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
        if hasattr(part, "base_model_prefix"):
            patterns.append(_FREQUENCIES)
        if patterns:
            kept = re.compile(rf"(^|\.)({'|'.join(patterns)})($|\.)")
            yield from ((part, name) for name, _ in part.named_buffers() if kept.search(name))
        yield from ((part, name) for name, buffer in part.named_buffers(recurse=False) if buffer.is_complex())


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
        if not self.is_unscaled(optimizer):
            has_gradients = any(p.grad is not None for p in self._parameters_of(optimizer))
            if any_says([has_gradients], self._worlds.present)[0]:
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
