"""Where experts are put first, and on how many nodes each shall stay."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS, PlanPlace, QuotaPolicy
from moe_lightning.dispatch.placement import Placement, parse_placements, uniform_placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import MOST_BYTES, check_regular, read_text
from moe_lightning.kernels import BackendName, set_backend
from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.context import World
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stage_state import StageState


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
        plan: PlanPlace,
        slots: int | None,
        kernels: BackendName | None,
    ) -> None:
        if placement is not None and copies is not None:
            raise ConfigurationError(
                f"copies={copies} belongs to the uniform placement: give either copies or placement, not both"
            )
        self._ep_size, self._copies, self._placement, self._slots = ep_size, copies, placement, slots
        DISPATCH_BACKENDS.find(dispatch)
        self._quota: QuotaPolicy = quota
        self._dispatch, self._plan_on, self._kernels = dispatch, plan, kernels
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

    def place(self, module: nn.Module, world: World, stages: StageState | None = None) -> PlacedExperts:
        """Put a module's experts into slots; collective.

        Args:
            world: the ranks, of each stage of a pipeline.
            stages: those on this rank; None: there is one.
        """
        if self._kernels is not None:
            set_backend(self._kernels)
        with nullcontext() if stages is None else stages.cut.whole():
            placements = resolve_placements(
                module, world.size, ep_size=self._ep_size, copies=self._copies, placement=self._placement
            )
        if stages is not None:
            placements = stages.take_placements(placements)
        return PlacedExperts(
            module,
            placements,
            world,
            ep_size=self._ep_size,
            quota=self._quota,
            dispatch=self._dispatch,
            plan_on=self._plan_on,
            slots=self._slots,
        )


def resolve_placements(
    module: nn.Module,
    num_ranks: int,
    *,
    ep_size: int | None = None,
    copies: int | None = None,
    placement: str | os.PathLike[str] | Sequence[Any] | None = None,
) -> list[Placement]:
    """The placement of each MoE layer: uniform with so many copies, or from a table or file.

    Raises:
        ConfigurationError: a file or table that is missing, malformed or made for other sizes.
    """
    layers = moe_layers(module)
    if placement is None:
        copies = max(1, num_ranks // (ep_size or num_ranks)) if copies is None else copies
        return [uniform_placement(layer.num_experts, num_ranks, copies) for layer in layers]
    if len({layer.num_experts for layer in layers}) > 1:
        raise ConfigurationError(
            "a placement table needs the same number of experts in every MoE layer: use copies instead"
        )
    table, origin = _read_table(placement)
    experts = layers[0].num_experts if layers else 0
    return parse_placements(table, num_layers=len(layers), num_experts=experts, num_ranks=num_ranks, origin=origin)


def _read_table(source: str | os.PathLike[str] | Sequence[Any]) -> tuple[object, str]:
    if not isinstance(source, str | os.PathLike):
        return list(source), "placement"
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"the placement file {path} does not exist: give a .json or .npy table [layers, experts, ranks]"
        )
    try:
        if path.suffix == ".npy":
            check_regular(path, most_bytes=MOST_BYTES)
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False)), str(path)
        return json.loads(read_text(path)), str(path)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ConfigurationError(f"the placement file {path} is not a .json or .npy table: {error}") from error
