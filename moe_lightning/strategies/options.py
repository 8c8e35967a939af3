"""Options of the strategy from which every process builds its run, and those of Lightning's that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from multiprocessing import get_all_start_methods
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.mesh import MeshShape, ScheduleName
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
