"""The weights to evaluate at, of a directory checkpoint that a schedule-free optimizer trained: a directory holds the
weights y that are trained and the iterates z, between which and the average x to evaluate at y lies (beta of the way
from z to x).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Block, is_expert_key, parse_expert_key

_ITERATE = "z"


class EvaluationPoint:
    """Brings weights that were read from a checkpoint to where they are evaluated; those of other optimizers stay.

    Args:
        checkpoint: that they were read from.

    Raises:
        CheckpointError: optimizers with several betas, or a window of steps, whose weights have no iterates.
    """

    def __init__(self, checkpoint: CheckpointSource) -> None:
        told = [checkpoint.read_object(key) for key in checkpoint.keys("optimizer/")]
        groups = [group for optimizer in told for group in optimizer["param_groups"] if group.get("train_mode")]
        betas = {group["betas"][0] if "betas" in group else group["momentum"] for group in groups}
        self._checkpoint, self._keys = checkpoint, set(checkpoint.keys()) if betas else set()
        self._share = 1 - 1 / betas.pop() if betas else 0.0
        if betas or (self._keys and checkpoint.first_step < checkpoint.step):
            raise CheckpointError(
                f"{checkpoint.path.name} does not tell at which weights its schedule-free optimizer evaluates: train "
                "on from it with one first beta for all parameters and without lossless windows, and save a .ckpt file"
            )

    @torch.no_grad()
    def move(self, key: str, weight: torch.Tensor, block: Block | None = None) -> torch.Tensor:
        """The weight under a key, changed in place.

        Args:
            block: what of the whole tensor it is; None: all of it.
        """
        iterate = _iterate_key(key)
        if iterate in self._keys:
            z = torch.empty_like(weight)
            self._checkpoint.read_into(iterate, z, block=block)
            weight.lerp_(z, self._share)
        return weight


def _iterate_key(key: str) -> str:
    """Of the iterate of a weight."""
    if not is_expert_key(key):
        return f"{key.rpartition('/')[0]}/{_ITERATE}"
    layer, expert, _, name = parse_expert_key(key)
    return f"expert/{layer}/{expert}/{_ITERATE}/{name}"


def is_schedule_free(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an optimizer of such groups evaluates at other weights than it trains at."""
    return all("train_mode" in group for group in groups)


def require_same_weights(name: str, optimizer: Optimizer, saved_groups: Iterable[Mapping[str, Any]]) -> None:
    """
    Raises:
        CheckpointError: saved weights are trained ones of a schedule-free optimizer and this one is none, or the other
            way round.
    """
    kinds = ("an optimizer that is not schedule-free", "a schedule-free optimizer")
    saved, own = is_schedule_free(saved_groups), is_schedule_free(optimizer.param_groups)
    if saved != own:
        raise CheckpointError(
            f"{name} is of {kinds[saved]}, and {type(optimizer).__name__} is {kinds[own]}: use the optimizer that it "
            "was written with, or load its weights alone"
        )
