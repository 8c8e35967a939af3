"""Running averages of weights.

The average of a parameter is one of its optimizer's states, so that it moves, is saved and is restored with the others;
that of a buffer is a piece of the state table beside it.
Optimizers do not see it in an update: some take a parameter with any state for one that they have updated before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from moe_lightning.state.tensors import is_digest, local

AVERAGE = "average"
"""Name of the average of a parameter among the states of its optimizer."""

OBJECT_KEY = "averages"
"""Key of the number of updates among the objects of a state table."""


class _Tensors(nn.Module):
    """A module of the given parameters, for torch's rules of averaging."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    @override
    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self._tensors)


class Averages:
    """Averages of a module's weights on this rank, by torch's `AveragedModel` for each element.

    Args:
        rule: arguments of AveragedModel, such as `avg_fn`; empty: equal weights.
        use_buffers: average buffers too, instead of copying their last values.

    Attributes:
        buffers: averages of the buffers on this rank, by name.
    """

    def __init__(self, rule: Mapping[str, Any], *, use_buffers: bool) -> None:
        self._rule, self._use_buffers = AveragedModel(_Tensors(), use_buffers=True, **rule), use_buffers
        self.buffers: dict[str, Tensor] = {}

    @property
    def count(self) -> int:
        """Updates of the averages; before the first they are the initial weights."""
        return int(self._rule.n_averaged)

    def set_count(self, count: int) -> None:
        """Set the updates to those of a checkpoint."""
        self._rule.n_averaged.fill_(count)

    @torch.no_grad()
    def make_buffers(self, module: nn.Module, names: Container[str] | None = None) -> None:
        """Create the averages of buffers that are missing, from the present values.

        Args:
            names: only of these.
        """
        for name, buffer in _buffers(module):
            if name not in self.buffers and (names is None or name in names):
                self.buffers[name] = buffer.detach().clone()

    def drop_buffers(self, names: Iterable[str]) -> None:
        """Drop averages of buffers that will come from another rank."""
        for name in names:
            self.buffers.pop(name, None)

    @torch.no_grad()
    def begin(self, module: nn.Module, optimizer: Optimizer, home_of: Callable[[nn.Parameter], torch.device]) -> None:
        """Create the averages that are missing, before the weights change for the first time.

        Args:
            optimizer: the one that changes them.
            home_of: see `State.home_of`.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_weight = parameter.is_floating_point() or parameter.is_complex()  # codes and digests never change
                if is_weight and not parameter.is_meta and AVERAGE not in optimizer.state[parameter]:
                    average = local(parameter.detach()).to(home_of(parameter), copy=True)
                    optimizer.state[parameter][AVERAGE] = average
        self.make_buffers(module)

    @torch.no_grad()
    def update(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Average the present weights in; before their first change they are their averages."""
        self.make_buffers(module)
        pairs, buffers = list(_of_weights(optimizers)), list(self._of_buffers(module))
        if self._use_buffers:
            pairs += buffers
        else:
            for average, buffer in buffers:
                average.copy_(buffer)
        if not pairs:
            self._rule.n_averaged += 1
            return
        self._rule.module = _Tensors([average for average, _ in pairs])
        self._rule.update_parameters(_Tensors([value for _, value in pairs]))
        self._rule.module = _Tensors()

    @torch.no_grad()
    def swap(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Exchange the weights on this rank with their averages, in place."""
        for average, value in (*_of_weights(optimizers), *self._of_buffers(module)):
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)

    @torch.no_grad()
    def reset(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Set the averages to the present weights."""
        for average, value in (*_of_weights(optimizers), *self._of_buffers(module)):
            average.copy_(value)

    @torch.no_grad()
    def load(self, named: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Set the averages from a state_dict of the averaged module, in this rank's parts."""
        names = {p: name for name, p in module.named_parameters()}
        for parameter, average in averaged(optimizers).items():
            if names.get(parameter) in named:
                average.copy_(local(named[names[parameter]]))
        for name, average in self.buffers.items():
            if name in named:
                average.copy_(named[name])

    def _of_buffers(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        for name, buffer in _buffers(module):
            if name in self.buffers:
                yield self.buffers[name], buffer.detach()


def averaged(optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, Tensor]:
    """Return the averages on this rank; of a parameter of several optimizers that of the first."""
    found: dict[Any, Tensor] = {}
    for optimizer in reversed(optimizers):
        found |= {parameter: state[AVERAGE] for parameter, state in optimizer.state.items() if AVERAGE in state}
    return found


def set_aside(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    """Take the averages out of an optimizer's states, and return them."""
    states: dict[Any, dict[str, Any]] = optimizer.state
    return {p: state.pop(AVERAGE) for p, state in states.items() if AVERAGE in state}


def _of_weights(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the averages of parameters with this rank's parts of these."""
    for parameter, average in averaged(optimizers).items():
        yield average, local(parameter.detach())


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a module computes with, which digests of frozen weights are not."""
    for name, buffer in module.named_buffers():
        if not is_digest(f"dense/{name}/buffer"):
            yield name, buffer
