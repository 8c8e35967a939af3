"""Optimizer states of dense parameters in host memory, where their updates are made, too (ZeRO-Offload, Ren et al.
2021, 4.1); those of experts stay on their device, where placements move them.

In a step gradients and weights come down into page-locked copies, and new weights go up. Weights come down each time
because the device's are the ones that count: restores, broadcasts and users change those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from moe_lightning.errors import ConfigurationError
from moe_lightning.state.row_blocks import local, swap_parameters, updating_blocks


class Updates:
    """What optimizers see of parameters in an update: plain tensors, see `updating_blocks`.

    Args:
        on_host: whether dense parameters that lie on a device are seen as copies on the host; on CPUs that changes
            nothing.

    Attributes:
        on_host: as given.
    """

    def __init__(self, *, on_host: bool) -> None:
        self.on_host = on_host
        self._copies = WeakTensorKeyDictionary()

    @contextmanager
    def around(
        self, optimizer: Optimizer, experts: Collection[nn.Parameter]
    ) -> Generator[Callable[[], None], None, None]:
        """From the call of what it yields to its end, the optimizer sees what it is to update.

        Args:
            experts: parameters that are updated where they are.

        Raises:
            ConfigurationError: the system lets this process lock too little memory.
        """
        copies: dict[nn.Parameter, nn.Parameter] = {}

        def see() -> None:
            if self.on_host:
                copies.update(self._brought(optimizer, experts))
                swap_parameters(optimizer, copies)
            see_blocks()

        try:
            with updating_blocks(optimizer) as see_blocks:
                yield see
        finally:
            swap_parameters(optimizer, {copy: p for p, copy in copies.items()})
        with torch.no_grad():
            for parameter, copy in copies.items():
                local(parameter.detach()).copy_(copy, non_blocking=True)

    @torch.no_grad()
    def _brought(self, optimizer: Optimizer, experts: Collection[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Copies, on the host and with gradients, of the dense parameters that are about to change."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in _dense(optimizer, experts):
            if parameter.grad is None or not lies_on_a_device(parameter):
                continue
            copy = copies[parameter] = self._copy_of(parameter)
            gradient = local(parameter.grad)
            assert copy.grad is not None
            copy.copy_(local(parameter.detach()), non_blocking=True)
            if gradient.is_sparse or copy.grad.is_sparse:  # of an embedding; there is no room of a known size for it
                copy.grad = gradient.cpu()
            else:
                copy.grad.copy_(gradient, non_blocking=True)
            state = optimizer.state.get(parameter, {})
            state.update({n: v.cpu() for n, v in state.items() if isinstance(v, Tensor)})  # made at once, as Adagrad's
        for device in {parameter.device for parameter in copies}:
            if device.type != "cpu":
                event = torch.Event(device=device)
                event.record()
                event.synchronize()
        return copies

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """With room for the gradient; its values are those of an earlier step, or none."""
        own, known = local(parameter.detach()), self._copies.get(parameter)  # type: ignore[no-untyped-call]
        if known is None or (known.shape, known.dtype) != (own.shape, own.dtype):
            weight, gradient = (page_locked(own.shape, own.dtype) for _ in range(2))
            known = self._copies[parameter] = nn.Parameter(weight)
            known.grad = gradient
        assert isinstance(known, nn.Parameter)
        return known


@contextmanager
def loading(optimizer: Optimizer, experts: Collection[nn.Parameter]) -> Generator[None, None, None]:
    """Inside, `load_state_dict` takes dense parameters to lie on the host, and leaves their states there."""
    here = {p: nn.Parameter(torch.empty(0, dtype=p.dtype), p.requires_grad) for p in _dense(optimizer, experts)}
    swap_parameters(optimizer, here)
    try:
        yield
    finally:
        swap_parameters(optimizer, {stand_in: p for p, stand_in in here.items()})


def lies_on_a_device(parameter: nn.Parameter) -> bool:
    """Whether an update on the host is one elsewhere."""
    return parameter.device.type not in ("cpu", "meta")


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory, with no values, that a device copies to and from while the host goes on.

    Raises:
        ConfigurationError: the system lets this process lock less.
    """
    try:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise ConfigurationError(
            f"this process may not lock {math.prod(shape) * dtype.itemsize} bytes of memory for copies from and to the "
            f"GPU ({str(error).splitlines()[0]}): raise the limit of locked memory (ulimit -l)"
        ) from error


def _dense(optimizer: Optimizer, experts: Collection[nn.Parameter]) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p not in experts]
