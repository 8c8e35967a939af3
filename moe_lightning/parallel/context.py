"""Parallel context: process groups of one world, a rank's coordinates on the mesh, and clocks of exchanges.

A `World` holds three groups over all its ranks: *dense* (torch's default group) for dense gradients and agreements,
*compute* for token dispatch and combine, *background* for everything that overlaps with it (replica gradients, shadow
experts, migrations). Beside them there is one group along each mesh axis but dp that has several ranks (pp, cp, tp),
and, where dense parameters are sharded, one of the ranks that share a copy and one of those with the same part of other
copies. With pipeline parallelism each stage is a world of its own with three such groups. Ranks without data exchange
zero rows, so a new placement or new dispatch groups build no process group.

`Mesh` adds a rank's coordinates: its slice of the batch, its dispatch peers, its stage and its failure domain. NCCL's
settings and the handling of its silent aborts are here, too; these have not run on a GPU.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from moe_lightning.arrays import IntArray
from moe_lightning.compat import private_torch
from moe_lightning.errors import WorldCutError
from moe_lightning.files import PrivateFolder, checked_folder, find_folder
from moe_lightning.parallel.mesh import AXES, STAGE, Axis, Groups, Layout, MeshShape, RowCut

logger = logging.getLogger(__name__)


def prepare_environment(*, is_elastic: bool) -> None:
    """Set the variables that NCCL and torch read before their first group; values set by the user stay.

    Args:
        is_elastic: ranks outlive their world.
    """
    # Several communicators run side by side, and their kernels must start in one order on all ranks.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if is_elastic:  # torch's watchdog would end a survivor whose groups we are about to abort
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def first_group_options(device: torch.device) -> dict[str, Any]:
    """For `init_process_group`: communicators are made at once, while those who build them are watched."""
    return {"device_id": device} if device.type == "cuda" else {}


def background_options(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """For `new_group` of a group whose transfers overlap with others: theirs are short, and go first."""
    if device.type != "cuda":
        return {}
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    private_torch.set_nccl_timeout(options, timeout)
    return {"pg_options": options}


def is_silent(group: ProcessGroup, device: torch.device) -> bool:
    """Return True if a group's collectives of a device's tensors run on the device, as NCCL's: only aborting the group
    ends one whose peer is gone, and then it raises nothing. Those of gloo run on sockets of this process, on GPUs, too.
    """
    return device.type != "cpu" and private_torch.backend_name(group, device) != "gloo"


def has_failed(group: ProcessGroup, device: torch.device) -> bool:
    """Return True if a group has recorded an error without raising it, as NCCL does."""
    return private_torch.backend_error(group, device) not in (None, "SUCCESS")


def abort_together(groups: Sequence[ProcessGroup], device: torch.device) -> None:
    """Abort communicators of a device in one bracket: one by one, each may wait for the others."""
    if not groups:
        return
    with private_torch.bracket(groups[0], device):
        for group in groups:
            try:
                group.abort()
            except RuntimeError as error:
                logger.warning("a process group could not be aborted: %s", error)


def stamp(device: torch.device) -> Any:
    """Now: seconds of the host on the CPU, else an event on the device's present stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class ExchangeClock:
    """Clock of this rank's exchanges on the compute group, including waits for slower peers and overlapped work. It
    counts nothing, and costs nothing, before `watch`.

    On a GPU a host call returns before its exchange begins, so the device's own events are timed.

    Attributes:
        listener: called on the host with True as an exchange begins and with False as it ends; None: nobody.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._lock = threading.Lock()
        self._under_way = 0
        self._seconds = 0.0
        self._on_device: deque[tuple[Any, Any]] = deque()  # began, ended
        self.listener: Callable[[bool], None] | None = None

    def __reduce__(self) -> tuple[type[ExchangeClock], tuple[()]]:
        """Models with a world are copied and pickled; a copy counts for itself, from zero."""
        return ExchangeClock, ()

    def watch(self) -> None:
        """Count from now on."""
        self._is_watched = True

    @contextmanager
    def exchange(self, device: torch.device) -> Iterator[None]:
        """Around one exchange of tensors on that device."""
        self._tell(True)
        try:
            with self._timed(device) if self._is_watched else nullcontext():
                yield
        finally:
            self._tell(False)

    def _tell(self, begins: bool) -> None:
        if self.listener is not None:
            self.listener(begins)

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        began = stamp(device)
        try:
            yield
        finally:
            ended = stamp(device)
            with self._lock:
                self._under_way -= 1
                if device.type != "cpu":
                    self._on_device.append((began, ended))
                else:
                    self._seconds += ended - began

    @property
    def is_busy(self) -> bool:
        """True while an exchange is running."""
        with self._lock:
            self._collect()
            return self._under_way > 0 or any(began.query() for began, _ in self._on_device)

    @property
    def seconds(self) -> float:
        """Seconds of all exchanges that have ended."""
        with self._lock:
            self._collect()
            return self._seconds

    def _collect(self) -> None:
        """Move what the device has finished into the sum."""
        while self._on_device and self._on_device[0][1].query():
            began, ended = self._on_device.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3


STORE_VARIABLE = "MOE_LIGHTNING_STORE"
"""Set by a launcher of ours to the folder in which its workers meet."""

_attempts = itertools.count()


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that train together.

    Attributes:
        rank: this process, 0-based.
        size: number of ranks.
        device: where this rank's tensors live.
        dense: group of dense sums, broadcasts and agreements. All groups are None in a world of one rank.
        compute: group of dispatch and combine.
        background: group of transfers that overlap with compute.
        shards: ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side; in a
            pipeline those of this rank's stage. Empty where every rank has a copy of its own.
        shard_group: those among them that have rows of what is this rank's by its tensor index; None where it has all
            of that.
        copy_group: the ranks that hold the same part of other copies; None where there is one copy.
        shape: ranks along the axes of the mesh; None: all of them are data-parallel.
        axis_groups: this rank's group along each axis but dp that has several ranks.
        is_cut: returns True once this world is aborted.
        stage: the ranks of this rank's pipeline stage; None where there is one stage.
        exchanges: the clock of this rank's exchanges on the compute group.
        bubbles: the clock of this rank's waits for other stages of a pipeline.
    """

    rank: int
    size: int
    device: torch.device
    dense: ProcessGroup | None = field(default=None, repr=False)
    compute: ProcessGroup | None = field(default=None, repr=False)
    background: ProcessGroup | None = field(default=None, repr=False)
    shards: Groups = field(default=(), repr=False)
    shard_group: ProcessGroup | None = field(default=None, repr=False)
    copy_group: ProcessGroup | None = field(default=None, repr=False)
    shape: MeshShape | None = field(default=None, repr=False)
    axis_groups: Mapping[Axis, ProcessGroup] = field(default_factory=dict, repr=False)
    is_cut: Callable[[], bool] = field(default=_never, repr=False, compare=False)
    stage: World | None = field(default=None, repr=False)
    exchanges: ExchangeClock = field(default_factory=ExchangeClock, repr=False, compare=False)
    bubbles: ExchangeClock = field(default_factory=ExchangeClock, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        """Share the groups, which cannot be copied, between the copies of a model."""
        return replace(self, exchanges=ExchangeClock(), bubbles=ExchangeClock())

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """A world of one rank: no groups, no communication."""
        return cls(rank=0, size=1, device=torch.device(device))

    @classmethod
    def offline(cls, rank: int, size: int, device: torch.device, shape: MeshShape | None = None) -> World:
        """World that a process has not joined yet: no groups, so no communication."""
        world = cls(rank=rank, size=size, device=device, shape=shape)
        if shape is None or shape.pp == 1:
            return world
        ranks = shape.peers(rank, STAGE)
        return replace(world, stage=cls(rank=ranks.index(rank), size=len(ranks), device=device))

    @property
    def is_connected(self) -> bool:
        """True if there are other ranks to communicate with."""
        return self.dense is not None

    @property
    def may_be_cut(self) -> bool:
        """True if the world may be aborted while its ranks communicate."""
        return self.is_cut is not _never

    @classmethod
    def before_setup(cls, device: torch.device) -> World:
        """All ranks of torch's default group, on that group alone; a world of one where there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.single(device)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device, dense=dist.group.WORLD)

    @classmethod
    def connect(cls, device: torch.device, timeout: timedelta, layout: Layout | None = None) -> World:
        """Build the groups over all ranks of torch's default group, or a world of one where there is none.

        Args:
            layout: the same on every rank; None: all are data-parallel, with all dense parameters.
        """
        world = cls.before_setup(device)
        if not world.is_connected:
            return world
        world = replace(
            world,
            compute=dist.new_group(timeout=timeout, group_desc="compute"),
            background=dist.new_group(timeout=timeout, group_desc="background", **background_options(device, timeout)),
        )
        if layout is None:
            return world
        world, shards = _with_axes(world, layout.shape, timeout), layout.shards
        return world if not shards else _sharing(world, shards, layout.shape, timeout)

    @property
    def groups(self) -> list[ProcessGroup]:
        """All that this rank is in, torch's default group first."""
        own = (self.dense, self.compute, self.background, self.shard_group, self.copy_group)
        known = (*own, *self.axis_groups.values(), *(self.stage.groups if self.stage is not None else ()))
        return list(dict.fromkeys(group for group in known if group is not None))

    @cached_property
    def row_cut(self) -> RowCut:
        """Sharding of dense parameters by rows."""
        if not self.shards:
            return RowCut.whole(self.size)
        return RowCut.among(self.shards, self.rank, tensors=1 if self.shape is None else self.shape.tp)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the result of collectives to the host; nothing received from other ranks may be used or committed
        before. An NCCL collective that is aborted raises nothing and ends with arbitrary numbers.

        Raises:
            WorldCutError: the world was aborted before the collectives had certainly ended.
        """
        host = tensor.cpu()
        self.require_whole()
        return host

    def synchronize(self) -> None:
        """Wait for all work of the device; raises as `read`."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.require_whole()

    def require_whole(self) -> None:
        """
        Raises:
            WorldCutError: the world was aborted, or one of its groups has recorded an error without raising it.
        """
        is_elsewhere = self.device.type != "cpu"
        if self.is_cut() or (is_elsewhere and any(has_failed(group, self.device) for group in self.groups)):
            raise WorldCutError("the world was cut while its ranks talked: what arrived is not used")

    def close(self) -> None:
        """Destroy the groups built here; the dense one, torch's default group, is destroyed by its creator."""
        for group in self.groups:
            if group is not self.dense and dist.is_initialized():
                dist.destroy_process_group(group)


def _with_axes(world: World, shape: MeshShape, timeout: timedelta) -> World:
    several: list[Axis] = [axis for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1 and axis != "dp"]
    groups = {axis: _own_group(shape.groups({axis}), world.rank, timeout, axis) for axis in several}
    world = replace(world, shape=shape, axis_groups=groups)
    return world if shape.pp == 1 else with_stage(world, shape, timeout)


def with_stage(whole: World, shape: MeshShape, timeout: timedelta) -> World:
    """The same ranks, and those of this rank's stage; every rank builds the groups of all stages in one order."""
    stages = shape.groups(STAGE)
    ranks = next(ranks for ranks in stages if whole.rank in ranks)
    groups: dict[str, ProcessGroup | None] = dict.fromkeys(("dense", "compute", "background"))
    if len(ranks) > 1:
        groups = {purpose: _own_group(stages, whole.rank, timeout, purpose) for purpose in groups}
    place = {"rank": ranks.index(whole.rank), "size": len(ranks)}  # the clocks are this rank's, in both
    axes = {axis: group for axis, group in whole.axis_groups.items() if axis in STAGE}
    stage = replace(whole, shape=replace(shape, pp=1), axis_groups=axes, **place, **groups)  # type: ignore[arg-type]
    return replace(whole, stage=stage)


def _sharing(world: World, shards: Groups, shape: MeshShape, timeout: timedelta) -> World:
    """Ranks that share copies of the dense parameters, in a pipeline those of each stage."""
    stage, size, copies = world.stage or world, len(shards[0]) // shape.tp, len(shards) // shape.pp
    shard_group, copy_group = (stage.dense if size == stage.size else None), None
    if 1 < size < stage.size:
        rows = [ranks[at : at + size] for ranks in shards for at in range(0, len(ranks), size)]
        shard_group = _own_group(rows, world.rank, timeout, "shards")
    if copies > 1:
        stages = [shards[at : at + copies] for at in range(0, len(shards), copies)]
        alike = [ranks for groups in stages for ranks in zip(*groups, strict=True)]
        copy_group = _own_group(alike, world.rank, timeout, "copies")
    first = world.rank - stage.rank
    own = tuple(ranks for ranks in shards if first <= ranks[0] < first + stage.size)
    world = replace(world, shards=own, shard_group=shard_group, copy_group=copy_group)
    if world.stage is None:
        return world
    counted = tuple(tuple(rank - first for rank in ranks) for ranks in own)
    return replace(world, stage=replace(stage, shards=counted, shard_group=shard_group, copy_group=copy_group))


def _own_group(groups: Sequence[tuple[int, ...]], rank: int, timeout: timedelta, purpose: str) -> ProcessGroup:
    """Build all these groups, on every rank in one order, and return this rank's."""
    own: ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=purpose)
        own = group if rank in ranks else own
    assert own is not None
    return own


def join_local_world(
    *, rank: int, size: int, backend: str, device: torch.device, timeout: timedelta, meeting: str | None = None
) -> bool:
    """Make torch's default group over a store that no other user of this machine can reach, or keep it.

    Args:
        meeting: what the ranks of this run know and those of other runs do not, where all ranks are on this machine
            and no launcher has named a folder; None: they may be on several.

    Returns:
        False where ranks may be on several machines.

    Raises:
        ConfigurationError: the folder is not this user's alone, or rank 0 does not come.
    """
    if dist.is_initialized():
        return True  # a second fit or validate of the same process
    named = os.environ.get(STORE_VARIABLE)
    if named is None and meeting is None:
        return False
    for variable, interface in loopback_variables().items():
        os.environ.setdefault(variable, interface)
    attempt = next(_attempts)  # a process may leave its world and make another one
    if named is not None:
        folder = checked_folder(Path(named))
    elif rank == 0:
        own = PrivateFolder()
        atexit.register(own.close)
        own.announce(f"{meeting} {attempt}")
        folder = own.path
    else:
        folder = find_folder(f"{meeting} {attempt}", timeout.total_seconds())
    store = FileStore(str(folder / f"store-{attempt}"))
    prepare_environment(is_elastic=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, **first_group_options(device)
    )
    return True


def loopback_variables() -> dict[str, str]:
    """Variables that keep the connections of one machine's ranks off its network."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback}


def common_store() -> Store | None:
    """Return the store of torch's default group, for messages outside of collectives; None without a group. Each call
    may fail with a DistError when the group ends.
    """
    return private_torch.default_store() if dist.is_initialized() else None


def agree(world: World) -> None:
    """Barrier: wait until all ranks have called it and received everything sent to them; raises as `World.read`."""
    word = torch.zeros(1, device=world.device)
    all_reduce_(word, world)
    world.read(word)


def any_says(words: Sequence[bool], world: World) -> list[bool]:
    """Return for each word True if it is true on any rank; collective, raises as `World.read`."""
    counts = torch.tensor(words, dtype=torch.int32, device=world.device)
    all_reduce_(counts, world)
    return [bool(count) for count in world.read(counts)]


def broadcast_(tensor: torch.Tensor, source: int, world: World, group: ProcessGroup | None = None) -> None:
    """Overwrite a tensor on every rank, or on every one of a group of them, with that of the source, counted there."""
    if world.is_connected:
        dist.broadcast(tensor, group=group or world.dense, group_src=source)


def all_reduce_(tensor: torch.Tensor, world: World) -> None:
    """Sum a tensor over all ranks in place."""
    if world.is_connected:
        dist.all_reduce(tensor, group=world.dense)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks of a run, and this rank's place among them.

    Attributes:
        shape: ranks along each axis.
        whole: all ranks: they agree, prepare and commit together, and `whole.rank` is who writes.
        world: the ranks of this rank's stage, among which experts are dispatched; `world.rank` counts in dispatch.
        node_of: failure domain of each rank of the whole, [whole.size]; numbered from 0.
    """

    shape: MeshShape
    whole: World
    world: World
    node_of: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.node_of) == self.shape.num_ranks == self.whole.size

    @classmethod
    def of(cls, world: World, node_of: tuple[int, ...]) -> Mesh:
        """Build from a world with its groups."""
        shape = world.shape or MeshShape(dp=world.size)
        return cls(shape=shape, whole=world, world=world.stage or world, node_of=node_of)

    @classmethod
    def build(cls, whole: World, shape: MeshShape, node_of: tuple[int, ...], timeout: timedelta) -> Mesh:
        """Build the groups of the stages; collective over the whole, which is torch's default group."""
        return cls.of(replace(with_stage(whole, shape, timeout) if shape.pp > 1 else whole, shape=shape), node_of)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.shape.index(self.whole.rank, "pp")

    @property
    def data_rank(self) -> int:
        """Index of this rank's slice of the global batch; ranks along the other axes share it."""
        return self.shape.index(self.whole.rank, "dp")

    @property
    def data_size(self) -> int:
        """Slices of the global batch."""
        return self.shape.dp

    def speeds_of_slices(self, speeds: IntArray) -> IntArray:
        """Return the speed of each slice of the global batch, int64 [data_size], from those of the ranks of a stage: a
        slice is as fast as the slowest rank that computes it.
        """
        slowest: IntArray = speeds.reshape(self.data_size, -1).min(axis=1)
        return slowest

    @property
    def sharers(self) -> int:
        """Ranks that compute the loss of the same samples: each counts for one of as many equal shares."""
        return self.shape.cp * self.shape.tp

    @property
    def node_peers(self) -> tuple[int, ...]:
        """The ranks of the whole that fail together with this one, ascending."""
        mine = self.node_of[self.whole.rank]
        return tuple(rank for rank, node in enumerate(self.node_of) if node == mine)

    @cached_property
    def pipe(self) -> World:
        """The ranks that hold the other stages for this rank's samples, by stage."""
        whole, group = self.whole, self.whole.axis_groups.get("pp")
        place = {"rank": self.stage, "size": self.shape.pp, "device": whole.device, "bubbles": whole.bubbles}
        return World(**place, dense=group, background=group)  # type: ignore[arg-type]

    @cached_property
    def devices(self) -> DeviceMesh:
        """torch's view of the mesh, for its parallel parts; collective over the whole the first time."""
        layout = torch.arange(self.whole.size).view(self.shape.sizes)
        return DeviceMesh(self.whole.device.type, layout, mesh_dim_names=AXES)

    def close(self) -> None:
        """Destroy the groups built for this mesh and its worlds; the default group is destroyed by its creator."""
        self.whole.close()
