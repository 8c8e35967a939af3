"""Which experts each token took, kept and forced again: for fine-tuning on what an inference engine generated (its
router and the trainer's part in the last digits, and so in choices), and for comparing runs token by token.

Choices are forced, weights are not: they come from the scores of the router that trains, with their gradients.

Shapes: B samples, L positions, T = B * L tokens, K choices, layers in the order of the model's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.moe_layer import moe_layers
from moe_lightning.modules.router import Router

CHOOSES_ITSELF = -1
"""In the place of an expert: the router chooses for this token, as for a prompt that no engine routed."""


@dataclass
class Choices:
    """What the routers of a model chose in the forward passes of a context, the last one for each.

    Attributes:
        by_layer: int64 [T, K] of each layer.
    """

    by_layer: list[Tensor | None] = field(default_factory=list)

    def stacked(self) -> Tensor:
        """int64 [T, layers, K].

        Raises:
            ConfigurationError: a layer saw no token, or layers have unlike K.
        """
        found = [chosen for chosen in self.by_layer if chosen is not None]
        if len(found) < len(self.by_layer) or not found:
            raise ConfigurationError("not every MoE layer has routed tokens: run the model inside record_routing")
        if len({chosen.shape for chosen in found}) > 1:
            raise ConfigurationError(
                f"the MoE layers chose {[tuple(chosen.shape) for chosen in found]} experts (tokens, top_k), which no "
                "table holds: give them one top_k"
            )
        return torch.stack(found, dim=1)


@contextmanager
def record_routing(model: nn.Module) -> Generator[Choices, None, None]:
    """Keep which experts every token takes in the forward passes inside.

    Raises:
        ConfigurationError: a model without MoE layers, or with a router of another kind.
    """
    routers = routers_of(model)
    choices = Choices([None] * len(routers))

    def recording(layer: int) -> Callable[[Router, Tensor], Tensor]:
        def choose(router: Router, scores_TE: Tensor) -> Tensor:
            chosen = choices.by_layer[layer] = router.choose(scores_TE)
            return chosen

        return choose

    with choosing(routers, [recording(layer) for layer in range(len(routers))]):
        yield choices


@contextmanager
def replay_routing(model: nn.Module, expert_ids: Tensor) -> Generator[None, None, None]:
    """Let every token take these experts in the forward passes inside.

    Args:
        expert_ids: integers [B, L, layers, K] or [T, layers, K]; -1 in all K: the router chooses.

    Raises:
        ConfigurationError: as `record_routing`, or a table that does not fit the model or its tokens.
    """
    routers = routers_of(model)
    check_expert_ids(expert_ids, routers)
    table = expert_ids.flatten(0, -3).long()
    with choosing(routers, [forced(table[:, layer]) for layer in range(len(routers))]):
        yield


def forced(ids_TK: Tensor) -> Callable[[Router, Tensor], Tensor]:
    """A choice of these experts."""

    def choose(router: Router, scores_TE: Tensor) -> Tensor:
        if len(ids_TK) != len(scores_TE):
            raise ConfigurationError(
                f"the routing to replay has {len(ids_TK)} tokens, but the model sees {len(scores_TE)}: give the table "
                "of this batch, padding included"
            )
        ids = ids_TK.to(scores_TE.device)
        left = ids < 0
        return torch.where(left, router.choose(scores_TE), ids) if left.any() else ids

    return choose


def check_expert_ids(expert_ids: Tensor, routers: Sequence[Router]) -> None:
    """
    Raises:
        ConfigurationError: not [..., tokens, layers, K] of these routers, no experts of theirs, or one twice for a
            token.
    """
    wanted, found = (len(routers), routers[0].config.top_k), tuple(expert_ids.shape[-2:])
    if expert_ids.ndim < 3 or found != wanted:
        raise ConfigurationError(
            f"the routing to replay has the shape {list(expert_ids.shape)}, but this model needs [..., tokens, "
            f"{wanted[0]} layers, {wanted[1]} experts]: record it with the same model"
        )
    if expert_ids.is_floating_point() or expert_ids.dtype is torch.bool:
        raise ConfigurationError(f"the routing to replay is {expert_ids.dtype}: give numbers of experts as integers")
    ids, num_experts = expert_ids.long(), min(router.num_experts for router in routers)
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_experts:
        raise ConfigurationError(
            f"the routing to replay names the experts {int(ids.min())} to {int(ids.max())}, but there are 0 to "
            f"{num_experts - 1} (-1: the router chooses)"
        )
    ordered = ids.sort(dim=-1).values
    is_free = (ids < 0).any(dim=-1)
    if (is_free != (ids < 0).all(dim=-1)).any() or (
        (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1) & ~is_free
    ).any():
        raise ConfigurationError(
            "the routing to replay gives a token an expert twice, or some of its experts only: give K distinct ones, "
            "or -1 for all K"
        )


def routers_of(model: nn.Module) -> list[Router]:
    """Of the MoE layers, in order.

    Raises:
        ConfigurationError: there is none, or one of another kind.
    """
    routers = [layer.router for layer in moe_layers(model)]
    if not routers:
        raise ConfigurationError(f"{type(model).__name__} has no MoE layer whose routing could be kept")
    for router in routers:
        if not isinstance(router, Router):
            raise ConfigurationError(
                f"a router of type {type(router).__name__} decides in its own way: routing is kept and replayed for "
                "moe_lightning's Router and its subclasses"
            )
    return [router for router in routers if isinstance(router, Router)]


@contextmanager
def choosing(
    routers: Sequence[Router], choices: Sequence[Callable[[Router, Tensor], Tensor]]
) -> Generator[None, None, None]:
    """Let others choose for routers."""
    before = [router.chooser for router in routers]
    for router, choice in zip(routers, choices, strict=True):
        router.chooser = choice
    try:
        yield
    finally:
        for router, chooser in zip(routers, before, strict=True):
            router.chooser = chooser
