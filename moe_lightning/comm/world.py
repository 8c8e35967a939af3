"""One membership of ranks and the two process groups that everything runs on.

Dense gradients use torch's default group through DDP. Token dispatch and combine run on the *compute* group,
everything that may overlap
with it (replica sums, later shadows and migrations) on the *background* group. Both span the whole world: ranks that
have nothing
to say to each other exchange zero rows, so a change of placement or of dispatch groups never builds a group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]

from moe_lightning.comm.exchange_clock import ExchangeClock
from moe_lightning.errors import ConfigurationError

STORE_VARIABLE = "MOE_LIGHTNING_STORE"
"""Set by the launcher to "host:port/prefix" of the store that outlives its workers."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that train together.

    Attributes:
        rank: this process, 0-based.
        size: number of ranks.
        device: where this rank's tensors live.
        compute: group of dispatch and combine; None when the world is one rank.
        background: group of transfers that overlap with compute; None when the world is one rank.
        exchanges: the clock of this rank's exchanges on the compute group.
    """

    rank: int
    size: int
    device: torch.device
    compute: ProcessGroup | None = field(default=None, repr=False)
    background: ProcessGroup | None = field(default=None, repr=False)
    exchanges: ExchangeClock = field(default_factory=ExchangeClock, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        """A copy of a model talks to the same ranks over the same groups, which cannot be copied."""
        return replace(self, exchanges=ExchangeClock())

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """A world of one rank: no groups, no communication."""
        return cls(rank=0, size=1, device=torch.device(device))

    @classmethod
    def offline(cls, rank: int, size: int, device: torch.device) -> World:
        """The place that a process expects in a world that it has not joined yet: no groups, so no communication."""
        return cls(rank=rank, size=size, device=device)

    @property
    def is_connected(self) -> bool:
        """Whether there are peers to talk to."""
        return self.compute is not None

    @classmethod
    def connect(cls, device: torch.device, timeout: timedelta) -> World:
        """Build the groups over all ranks of torch's default group, or a world of one where there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.single(device)
        compute = dist.new_group(timeout=timeout, group_desc="compute")
        background = dist.new_group(timeout=timeout, group_desc="background")
        return cls(
            rank=dist.get_rank(), size=dist.get_world_size(), device=device, compute=compute, background=background
        )

    def close(self) -> None:
        """Give the two groups back; the default group stays, it belongs to who made it."""
        for group in (self.compute, self.background):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def join_launched_world(*, rank: int, size: int, backend: str, timeout: timedelta) -> bool:
    """Make torch's default group over the launcher's store, or keep it; False when another launcher started this
    process.

    Raises:
        ConfigurationError: the variable that names the store is malformed.
    """
    address = os.environ.get(STORE_VARIABLE)
    if address is None:
        return False
    if dist.is_initialized():
        return True  # a second fit or validate of the same process
    host, _, rest = address.partition(":")
    port, _, prefix = rest.partition("/")
    if not (host and port.isdigit() and prefix):
        raise ConfigurationError(f"{STORE_VARIABLE}={address!r} is not host:port/prefix: leave it to moe-train")
    store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timeout)
    return True


def broadcast_(tensor: torch.Tensor, source: int, world: World) -> None:
    """Overwrite a tensor on every rank with the source rank's one."""
    if world.is_connected:
        dist.broadcast(tensor, src=source)


def all_reduce_(tensor: torch.Tensor, world: World) -> None:
    """Sum a tensor over all ranks in place."""
    if world.is_connected:
        dist.all_reduce(tensor)
