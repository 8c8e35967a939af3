"""What an MoE layer goes by when the Trainer that placed its experts has ended: the other ranks may be gone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.experts import Experts


class EndedWorld:
    """The experts of a layer after training, all of them where memory allowed.

    Args:
        experts: of the layer, as this rank holds them.
        num_ranks: of the world.
        stacks: every expert's parameters on the host, [E, ...] by name; None: too large to be kept on every rank.
    """

    def __init__(self, experts: Experts, num_ranks: int, stacks: Mapping[str, Tensor] | None) -> None:
        self._num_ranks = num_ranks
        self._local = Dispatcher.local(experts.num_experts)
        self._versions = _versions(experts)
        self._by_device = {} if stacks is None else {torch.device("cpu"): dict(stacks)}

    def whole(self, experts: Experts, device: torch.device) -> tuple[Dispatcher, Mapping[str, Tensor]] | None:
        """A dispatcher for this process alone and the stacks of all experts; None where the other ranks are needed:
        stacks are not known, this rank's experts have been changed since, or gradients are wanted.
        """
        stacks = self.stacks(experts)
        if not stacks or _trains(experts):
            return None
        if device not in self._by_device:
            self._by_device[device] = {name: stack.to(device) for name, stack in stacks.items()}
        return self._local, self._by_device[device]

    def stacks(self, experts: Experts) -> Mapping[str, Tensor]:
        """Those on the host; empty where they are not known, or this rank's experts have been changed since."""
        return self._by_device.get(torch.device("cpu"), {}) if _versions(experts) == self._versions else {}

    def ranks_are_gone(self, experts: Experts) -> ConfigurationError:
        """What a forward pass answers that needed them."""
        if self._by_device and _trains(experts):
            return ConfigurationError(
                f"the experts of this module lie on {self._num_ranks} ranks, and others of them have ended: to train "
                "on, give the Trainer strategy='expert_parallel', or load a checkpoint into a new module"
            )
        return ConfigurationError(
            f"the experts of this module lie on {self._num_ranks} ranks, and others of them have ended; they were not "
            "kept together, being large, or changed since: call trainer.test on every rank, or save a checkpoint "
            "(trainer.save_checkpoint) and load it into a new module (load_from_checkpoint)"
        )


def _trains(experts: Experts) -> bool:
    return experts.training and torch.is_grad_enabled()


def _versions(experts: Experts) -> list[int]:
    """Change when a parameter is overwritten."""
    return [parameter._version for parameter in experts.stacked_parameters().values()]
