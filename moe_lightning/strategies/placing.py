"""Where experts are put first, and on how many nodes each shall stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from moe_lightning.comm.dispatcher import DISPATCH_BACKENDS, QuotaPolicy
from moe_lightning.comm.world import World
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.placed_experts import PlacedExperts, resolve_placements


class Placing:
    """What the user chose: see ExpertParallelStrategy.

    Attributes:
        promised_replicas: nodes that shall hold each expert where slots allow; recovery relies on it.

    Raises:
        ConfigurationError: two placements, or an unknown dispatch.
    """

    def __init__(
        self,
        *,
        ep_size: int | None,
        copies: int | None,
        placement: str | os.PathLike[str] | Sequence[Any] | None,
        quota: QuotaPolicy,
        dispatch: str,
        slots: int | None,
    ) -> None:
        if placement is not None and copies is not None:
            raise ConfigurationError(
                f"copies={copies} belongs to the uniform placement: give either copies or placement, not both"
            )
        self._ep_size, self._copies, self._placement, self._slots = ep_size, copies, placement, slots
        DISPATCH_BACKENDS.find(dispatch)
        self._quota: QuotaPolicy = quota
        self._dispatch = dispatch
        self.promised_replicas = 1

    def require_replicas(self, nodes: int, world_size: int) -> int:
        """Promise that so many nodes hold each expert: whoever places experts must keep it. The uniform placement holds
        each that often, if there are as many ranks. To be called before the strategy is set up.

        Returns:
            Replicas of each expert under the placement that the user chose, or that this call chose.

        Raises:
            ConfigurationError: dispatch groups, which a changing number of ranks cannot keep.
        """
        if self._ep_size is not None:
            raise ConfigurationError(
                f"ep_size={self._ep_size} cuts the ranks into groups, which do not survive a lost rank: drop ep_size"
            )
        self.promised_replicas = nodes
        if self._copies is None and self._placement is None:
            self._copies = min(nodes, world_size)
        return self._copies or 1

    def place(self, module: nn.Module, world: World) -> PlacedExperts:
        """Put a module's experts into slots; collective."""
        placements = resolve_placements(
            module, world.size, ep_size=self._ep_size, copies=self._copies, placement=self._placement
        )
        return PlacedExperts(
            module,
            placements,
            world,
            ep_size=self._ep_size,
            quota=self._quota,
            dispatch=self._dispatch,
            slots=self._slots,
        )
