"""The weights that a schedule-free optimizer evaluates at, in the place of those that it trains.

Such an optimizer (Defazio et al. 2024, arXiv 2405.15682) takes gradients at y, between its iterate z and the average x
of all iterates, which is what is evaluated and used afterwards. Parameters hold y, and so do snapshots and directory
checkpoints: going to x and back would round. Around an evaluation x lies in the parameters, and y is kept beside them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.checkpoint.evaluation_point import is_schedule_free
from moe_lightning.comm.world import World
from moe_lightning.state.row_blocks import local, updating_blocks
from moe_lightning.strategies.rank_state import RankState
from moe_lightning.strategies.worlds import Worlds

TRAINED = "y"
"""Name of an optimizer's state that holds the weights that are trained, while others are in their place, and those
that were, once training is over."""


class EvaluationWeights:
    """Of this rank's parameters under schedule-free optimizers; does nothing under others.

    Args:
        state: of this rank.
        worlds: whose listeners let go of the parameters before these change; hears itself when a world ends.
    """

    def __init__(self, state: RankState, worlds: Worlds) -> None:
        self._state, self._worlds = state, worlds
        self._trained: dict[nn.Parameter, Tensor] = {}
        self._is_in_place = False
        worlds.listeners.append(self)

    @contextmanager
    def in_place(self) -> Generator[bool, None, None]:
        """The weights to evaluate at; collective. Yields whether they are others than those that are trained."""
        was_in_place = self._is_in_place
        self.put()
        try:
            yield bool(self._switching())
        finally:
            if not was_in_place:
                self.leave()

    def put(self) -> None:
        """Put them into the parameters; collective."""
        optimizers = [o for o in self._switching() if all(group["train_mode"] for group in o.param_groups)]
        if self._is_in_place or not optimizers:
            return
        self._worlds.leave()  # nobody reads the parameters from now on
        self._is_in_place = True
        with torch.inference_mode(False), torch.no_grad():
            for optimizer in optimizers:
                parameters = [p for p in self._state.parameters_of(optimizer) if not p.is_meta]
                for parameter in parameters:
                    self._trained[parameter] = local(parameter.detach()).clone()
                    if optimizer.state.get(parameter):
                        optimizer.state[parameter][TRAINED] = self._trained[parameter]
                _switch(optimizer, "eval")
                gradients = [p.grad for p in parameters]
                self._state.spread(optimizer)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient  # of a step whose other micro-batches follow

    def leave(self) -> None:
        """Put the weights back that are trained, to the bit; local."""
        if not self._is_in_place:
            return
        with torch.inference_mode(False), torch.no_grad():
            for parameter, trained in self._trained.items():
                local(parameter.detach()).copy_(trained)
        for group in (group for optimizer in self._switching() for group in optimizer.param_groups):
            group["train_mode"] = True
        for state in (state for optimizer in self._switching() for state in optimizer.state.values()):
            state.pop(TRAINED, None)
        self.stay()

    def enter(self, world: World) -> None:
        """Another world begins with the weights that are trained."""

    def stay(self) -> None:
        """Training is over, or another begins: the weights stay where they are."""
        self._trained, self._is_in_place = {}, False

    def take_up(self) -> None:
        """Train on from a file, which holds the weights to evaluate at; collective."""
        with torch.no_grad():
            for optimizer in self._switching():
                _switch(optimizer, "train")
                for parameter, state in optimizer.state.items():
                    if TRAINED in state:
                        local(parameter.detach()).copy_(state.pop(TRAINED))
                self._state.spread(optimizer)

    def _switching(self) -> Sequence[Optimizer]:
        """The optimizers that have other weights to evaluate at by now, the same on every rank."""
        told = ((optimizer, optimizer.param_groups) for optimizer in self._state.optimizers)
        return [o for o, groups in told if is_schedule_free(groups) and any(group["k"] for group in groups)]


def _switch(optimizer: Any, mode: str) -> None:
    with updating_blocks(optimizer) as see_blocks:
        see_blocks()
        getattr(optimizer, mode)()
