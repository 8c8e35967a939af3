"""Options of the strategy: those from which every process builds its run, and the choice of placements."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS, PlanPlace, QuotaPolicy
from moe_lightning.dispatch.placement import Placement, parse_placements, uniform_placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import MOST_BYTES, check_regular, read_text
from moe_lightning.kernels import BackendName, set_backend
from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import MeshShape, ScheduleName
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageMap
from moe_lightning.strategies.watch import StopOnNan
from moe_lightning.user_errors import suggestion


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of an ExpertParallelStrategy from which each process builds its run, see there.

    Attributes:
        timeout: longest wait for a peer in any collective.
        start_method: how a launcher of ours starts the other ranks: "popen" (the script again), or one of
            multiprocessing's.
        ddp: options of DistributedDataParallel.
    """

    timeout: timedelta
    start_method: str
    ddp: Mapping[str, Any]
    axes: MeshShape
    shard_size: int | None
    dense: str
    offload_optimizer: bool
    schedule: ScheduleName
    micro_batches: int
    seed: int | None
    check_state_every: int | Literal["auto"]
    check_arithmetic_every: int | Literal["auto"]
    stop_on_nan: StopOnNan | None
    hang_report_s: float | None
    resume_overrides: bool


def check_stock_options(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check a strategy's options that are not its own, and return those of DistributedDataParallel.

    Args:
        cls: the strategy.
        options: beside its own.

    Raises:
        ConfigurationError: neither DDPStrategy nor DistributedDataParallel has it, it is set here, or an unknown
            start_method.
    """
    own, stock, wrapper = (list(signature(c).parameters) for c in (cls, DDPStrategy, DistributedDataParallel))
    methods, start_method = ["popen", *get_all_start_methods()], options.get("start_method", "popen")
    if start_method not in methods:
        raise ConfigurationError(f"start_method={start_method!r} is not known here: use {', '.join(methods)}")
    if "timeout" in options:
        raise ConfigurationError(f"timeout is called timeout_s here, in seconds: {cls.__name__}(timeout_s=7200)")
    if options.get("ddp_comm_hook") is not None:
        raise ConfigurationError("ddp_comm_hook is taken by the sum over ranks: drop it")
    for name in {"device_ids", "process_group"} & options.keys():
        raise ConfigurationError(f"{cls.__name__} sets {name} itself: drop it")
    for name in options:
        if name not in stock and name not in wrapper[1:]:
            hint = suggestion(name, [*own, *stock, *wrapper[1:]]) or ": drop it"
            raise ConfigurationError(f"{cls.__name__} has no option {name!r}{hint}")
    return {name: value for name, value in options.items() if name not in stock}


@dataclass(kw_only=True)
class PlacementOptions:
    """Options of placement and dispatch: see ExpertParallelStrategy.

    Attributes:
        promised_replicas: nodes that hold each expert if slots allow; recovery relies on it.

    Raises:
        ConfigurationError: two placements, or an unknown dispatch.
    """

    ep_size: int | None
    replicas: int | None
    placement: str | os.PathLike[str] | Sequence[Any] | None
    quota: QuotaPolicy
    dispatch: str
    plan: PlanPlace
    slots: int | None
    kernels: BackendName | None
    promised_replicas: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if self.placement is not None and self.replicas is not None:
            raise ConfigurationError(
                f"replicas={self.replicas} belongs to the uniform placement: give either replicas or placement, not "
                "both"
            )
        DISPATCH_BACKENDS.find(self.dispatch)

    def require_replicas(self, nodes: int, world_size: int) -> int:
        """Promise that so many nodes hold each expert, in later placements too. The uniform placement holds each that
        often, if there are as many ranks. Must be called before the strategy is set up.

        Returns:
            Replicas of each expert under the chosen placement.

        Raises:
            ConfigurationError: dispatch groups, which a changing number of ranks cannot keep.
        """
        if self.ep_size is not None:
            raise ConfigurationError(
                f"ep_size={self.ep_size} cuts the ranks into groups, which do not survive a lost rank: drop ep_size"
            )
        self.promised_replicas = nodes
        if self.replicas is None and self.placement is None:
            self.replicas = min(nodes, world_size)
        return self.replicas or 1

    def place(self, module: nn.Module, world: World, stages: StageMap) -> PlacedExperts:
        """Put a module's experts into slots; collective.

        Args:
            world: the ranks, of each stage of a pipeline.
            stages: of the module.
        """
        if self.kernels is not None:
            set_backend(self.kernels)
        with stages.whole_module():
            placements = resolve_placements(
                module, world.size, ep_size=self.ep_size, replicas=self.replicas, placement=self.placement
            )
        return PlacedExperts(
            module,
            stages.set_placements(placements),
            world,
            ep_size=self.ep_size,
            quota=self.quota,
            dispatch=self.dispatch,
            plan_on=self.plan,
            slots=self.slots,
        )


def resolve_placements(
    module: nn.Module,
    num_ranks: int,
    *,
    ep_size: int | None = None,
    replicas: int | None = None,
    placement: str | os.PathLike[str] | Sequence[Any] | None = None,
) -> list[Placement]:
    """Return the placement of each MoE layer: uniform with so many replicas, or from a table or file.

    Raises:
        ConfigurationError: a file or table that is missing, malformed or made for other sizes.
    """
    layers = moe_layers(module)
    if placement is None:
        replicas = max(1, num_ranks // (ep_size or num_ranks)) if replicas is None else replicas
        return [uniform_placement(layer.num_experts, num_ranks, replicas) for layer in layers]
    if len({layer.num_experts for layer in layers}) > 1:
        raise ConfigurationError(
            "a placement table needs the same number of experts in every MoE layer: use replicas instead"
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
