"""Parallel context: the mesh and the process groups of one world, and clocks of exchanges.

A `World` is one membership of ranks, and never changes: other ranks or another layout are another world. It has three
groups over all its ranks: *dense* (torch's default group) for dense gradients and agreements, *compute* for token
dispatch and combine, *background* for everything that overlaps with it (replica gradients, shadow experts, migrations).
Beside them there is one group along each mesh axis but dp that has several ranks, and, where dense parameters are
sharded, one of the ranks that share a copy and one of those with the same part of other copies. Each of several
pipeline stages is a world of its own with three such groups. Ranks without data exchange zero rows, so a new placement
or new dispatch groups build no process group.

NCCL's settings and the handling of its silent aborts are here, too; these have not run on a GPU.
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
from torch.distributed import FileStore, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from moe_lightning.arrays import IntArray
from moe_lightning.compat import private_torch
from moe_lightning.errors import WorldAbortedError
from moe_lightning.files import PrivateFolder, checked_folder, find_folder, read_text, replace_text
from moe_lightning.parallel.mesh import Groups, Layout, MeshShape, RowCut

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


def has_passed(stamp: Any) -> bool:
    """True if the device has come to a stamp."""
    return isinstance(stamp, float) or bool(stamp.query())


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two stamps that have passed."""
    return ended - began if isinstance(began, float) else float(began.elapsed_time(ended)) / 1e3


class ExchangeClock:
    """Clock of this rank's exchanges, as those on the compute group, including waits for slower peers and overlapped
    work. It counts nothing, and costs nothing, before `watch`.

    On a GPU a host call returns before its exchange begins, so the device's own events are timed.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._lock = threading.Lock()
        self._under_way = 0
        self._seconds = 0.0
        self._on_device: deque[tuple[Any, Any]] = deque()  # began, ended

    def __reduce__(self) -> tuple[type[ExchangeClock], tuple[()]]:
        """Models with a world are copied and pickled; a copy counts for itself, from zero."""
        return ExchangeClock, ()

    def watch(self) -> None:
        """Count from now on."""
        self._is_watched = True

    @contextmanager
    def exchange(self, device: torch.device) -> Iterator[None]:
        """Around one exchange of tensors on that device."""
        with self._timed(device) if self._is_watched else nullcontext():
            yield

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
            return self._under_way > 0 or any(has_passed(began) for began, _ in self._on_device)

    @property
    def seconds(self) -> float:
        """Seconds of all exchanges that have ended."""
        with self._lock:
            self._collect()
            return self._seconds

    def _collect(self) -> None:
        """Move what the device has finished into the sum."""
        while self._on_device and has_passed(self._on_device[0][1]):
            self._seconds += seconds_between(*self._on_device.popleft())


STORE_VARIABLE = "MOE_LIGHTNING_STORE"
"""Set by a launcher of ours to the folder in which its workers meet."""

_SOON = timedelta(seconds=1)
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
        shape: ranks along the axes of the mesh; by default all of them are data-parallel.
        nodes: failure domain of each rank, [size], numbered from 0; by default each rank is one.
        generation: number of this world, above those of all worlds before it; 0 where worlds have no numbers.
        dense: group of dense sums, broadcasts and agreements. All groups are None in a world of one rank.
        compute: group of dispatch and combine.
        background: group of transfers that overlap with compute.
        groups: this rank's group along each axis but dp that has several ranks; "shard": the ranks that have rows of
            what is this rank's by its tensor index; "copy": those that hold the same part of other copies.
        shards: ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side; in a
            pipeline those of this rank's stage. Empty where every rank has a copy of its own.
        own_stage: this rank's stage of several pipeline stages.
        is_aborted: returns True once this world is aborted.
        exchanges: the clock of this rank's exchanges on the compute group.
        bubbles: the clock of this rank's waits for other stages of a pipeline.
    """

    rank: int
    size: int
    device: torch.device
    shape: MeshShape = field(default_factory=MeshShape)
    nodes: tuple[int, ...] = field(default=(), repr=False)
    generation: int = 0
    dense: ProcessGroup | None = field(default=None, repr=False)
    compute: ProcessGroup | None = field(default=None, repr=False)
    background: ProcessGroup | None = field(default=None, repr=False)
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict, repr=False)
    shards: Groups = field(default=(), repr=False)
    own_stage: World | None = field(default=None, repr=False)
    is_aborted: Callable[[], bool] = field(default=_never, repr=False, compare=False)
    exchanges: ExchangeClock = field(default_factory=ExchangeClock, repr=False, compare=False)
    bubbles: ExchangeClock = field(default_factory=ExchangeClock, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shape.num_ranks == 1:
            object.__setattr__(self, "shape", MeshShape(dp=self.size))
        if not self.nodes:
            object.__setattr__(self, "nodes", tuple(range(self.size)))

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        """Share the groups, which cannot be copied, between the copies of a model."""
        return replace(self, exchanges=ExchangeClock(), bubbles=ExchangeClock())

    @classmethod
    def single(
        cls, device: torch.device | str = "cpu", generation: int = 0, *, is_aborted: Callable[[], bool] = _never
    ) -> World:
        """A world of one rank: no groups, no communication."""
        return cls(rank=0, size=1, device=torch.device(device), generation=generation, is_aborted=is_aborted)

    @classmethod
    def offline(cls, rank: int, size: int, device: torch.device, layout: Layout | None = None) -> World:
        """World that a process has not joined yet: no groups, so no communication."""
        if layout is None:
            return cls(rank=rank, size=size, device=device)
        world = cls(rank=rank, size=size, device=device, shape=layout.shape, nodes=layout.nodes)
        if layout.shape.pp == 1:
            return world
        ranks = next(ranks for ranks in layout.shape.stages if rank in ranks)
        return replace(world, own_stage=cls.offline(ranks.index(rank), len(ranks), device))

    @property
    def is_connected(self) -> bool:
        """True if there are other ranks to communicate with."""
        return self.dense is not None

    @property
    def may_be_cut(self) -> bool:
        """True if the world may be aborted while its ranks communicate."""
        return self.is_aborted is not _never

    @classmethod
    def before_setup(cls, device: torch.device) -> World:
        """All ranks of torch's default group, on that group alone; a world of one where there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.single(device)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device, dense=dist.group.WORLD)

    @classmethod
    def connect(
        cls,
        device: torch.device,
        timeout: timedelta,
        layout: Layout | None = None,
        *,
        is_aborted: Callable[[], bool] = _never,
        generation: int = 0,
    ) -> World:
        """Build the groups over all ranks of torch's default group, or a world of one where there is none.

        Args:
            layout: the same on every rank; None: all are data-parallel, with all dense parameters.
            is_aborted, generation: of the new world.
        """
        world = cls.before_setup(device)
        if not world.is_connected:
            return world
        world = replace(
            world,
            is_aborted=is_aborted,
            generation=generation,
            compute=dist.new_group(timeout=timeout, group_desc="compute"),
            background=dist.new_group(timeout=timeout, group_desc="background", **background_options(device, timeout)),
        )
        return world if layout is None else _with_layout(world, layout, timeout)

    def group(self, name: str) -> ProcessGroup | None:
        """Return this rank's group along an axis, "shard" or "copy"; None where it is alone there."""
        return self.groups.get(name)

    @property
    def all_groups(self) -> list[ProcessGroup]:
        """All that this rank is in, torch's default group first."""
        own = (self.dense, self.compute, self.background, *self.groups.values())
        known = (*own, *(self.own_stage.all_groups if self.own_stage is not None else ()))
        return list(dict.fromkeys(group for group in known if group is not None))

    @property
    def stage(self) -> World:
        """The ranks of this rank's pipeline stage, among which experts are dispatched; all where there is one stage."""
        return self.own_stage or self

    @cached_property
    def pipe(self) -> World:
        """The ranks that hold the other stages for this rank's samples, by stage."""
        return self.along("pp")

    def along(self, axis: str) -> World:
        """Return the ranks along an axis of the mesh, whose place is the same on all others, with one group."""
        rank, size = self.shape.place(self.rank, {axis})
        groups: dict[str, Any] = {"dense": self.group(axis), "background": self.group(axis)}
        return World(
            rank=rank, size=size, device=self.device, is_aborted=self.is_aborted, bubbles=self.bubbles, **groups
        )

    @property
    def data_rank(self) -> int:
        """Index of this rank's slice of the global batch; ranks along the other axes share it."""
        return self.shape.index(self.rank, "dp")

    def speeds_of_slices(self, speeds: IntArray) -> IntArray:
        """Return the speed of each slice of the global batch, int64 [dp], from those of the ranks of a stage: a slice
        is as fast as the slowest rank that computes it.
        """
        slowest: IntArray = speeds.reshape(self.shape.dp, -1).min(axis=1)
        return slowest

    @property
    def node_peers(self) -> tuple[int, ...]:
        """The ranks that fail together with this one, ascending."""
        return tuple(rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank])

    @cached_property
    def row_cut(self) -> RowCut:
        """Sharding of dense parameters by rows."""
        if not self.shards:
            return RowCut.whole(self.size)
        return RowCut.among(self.shards, self.rank, tensors=self.shape.tp)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the result of collectives to the host; nothing received from other ranks may be used or committed
        before. An NCCL collective that is aborted raises nothing and ends with arbitrary numbers.

        Raises:
            WorldAbortedError: the world was aborted before the collectives had certainly ended.
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
            WorldAbortedError: the world was aborted, or one of its groups has recorded an error without raising it.
        """
        is_elsewhere = self.device.type != "cpu"
        if self.is_aborted() or (is_elsewhere and any(has_failed(group, self.device) for group in self.all_groups)):
            raise WorldAbortedError("the world was aborted while its ranks communicated: what arrived is not used")

    def close(self) -> None:
        """Destroy the groups built here; the dense one, torch's default group, is destroyed by its creator."""
        for group in self.all_groups:
            if group is not self.dense and dist.is_initialized():
                dist.destroy_process_group(group)


def _with_layout(world: World, layout: Layout, timeout: timedelta) -> World:
    """The same ranks with the groups of a layout; every rank builds those of all ranks in one order."""
    shape, rank = layout.shape, world.rank
    several = [axis for axis, size in zip(shape.axes, shape.sizes, strict=True) if size > 1 and axis != "dp"]
    groups = {axis: _own_group(shape.groups({axis}), rank, timeout, axis) for axis in several}
    world = replace(world, shape=shape, nodes=layout.nodes)
    stages = shape.stages
    ranks = next(ranks for ranks in stages if rank in ranks)
    purposes: dict[str, Any] = {}
    if shape.pp > 1:
        purposes = dict.fromkeys(("dense", "compute", "background"))
    if shape.pp > 1 and len(ranks) > 1:
        purposes = {purpose: _own_group(stages, rank, timeout, purpose) for purpose in purposes}
    groups |= _shard_groups(layout, ranks, rank, purposes.get("dense", world.dense), timeout)
    own = tuple(group for group in layout.shards if group[0] in ranks)
    world = replace(world, groups=groups, shards=own)
    if shape.pp == 1:
        return world
    at = {rank: index for index, rank in enumerate(ranks)}
    place: dict[str, Any] = {"rank": at[rank], "size": len(ranks), "shape": replace(shape, pp=1)}  # its clocks, too
    return replace(
        world,
        own_stage=replace(
            world,
            **place,
            **purposes,
            nodes=tuple(world.nodes[rank] for rank in ranks),
            groups={axis: group for axis, group in groups.items() if axis != "pp"},
            shards=tuple(tuple(at[rank] for rank in group) for group in own),
        ),
    )


def _shard_groups(
    layout: Layout, stage: Sequence[int], rank: int, dense: ProcessGroup | None, timeout: timedelta
) -> dict[str, ProcessGroup]:
    """Groups of the ranks that share copies of the dense parameters, in a pipeline those of each stage.

    Args:
        stage: ranks of this rank's stage.
        dense: their group.
    """
    shards, shape = layout.shards, layout.shape
    groups: dict[str, ProcessGroup] = {}
    if not shards:
        return groups
    size, copies = len(shards[0]) // shape.tp, len(shards) // shape.pp
    if size == len(stage) and dense is not None:
        groups["shard"] = dense
    if 1 < size < len(stage):
        rows = [ranks[at : at + size] for ranks in shards for at in range(0, len(ranks), size)]
        groups["shard"] = _own_group(rows, rank, timeout, "shards")
    if copies > 1:
        stages = [shards[at : at + copies] for at in range(0, len(shards), copies)]
        alike = [ranks for copied in stages for ranks in zip(*copied, strict=True)]
        groups["copy"] = _own_group(alike, rank, timeout, "copies")
    return groups


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


def _file_of(store: Store) -> Path | None:
    """Return the file of a FileStore, below its prefixes; None for other stores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return Path(store.path) if isinstance(store, FileStore) else None  # type: ignore[attr-defined]


@contextmanager
def without_waiting_for(store: Store) -> Iterator[None]:
    """Let the store fail soon where the rank that keeps it has ended. A FileStore whose file is gone waits for another,
    for as long as a collective may take.
    """
    limit = store.timeout  # type: ignore[attr-defined]
    if _file_of(store) is not None:
        store.set_timeout(_SOON)
    try:
        yield
    finally:
        store.set_timeout(limit)


class LatestValues:
    """Values of a common store that ranks replace often. torch's FileStore appends to its file whatever is set: there
    they are files beside it.

    Args:
        store: of torch's default group.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._path = store, _file_of(store)

    def set(self, key: str, text: str) -> None:
        """Set or replace a value."""
        if self._path is None:
            self._store.set(key, text)
        else:
            replace_text(self._file(self._path, key), text)

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return the values; none if one of them is missing."""
        if self._path is None:
            return [self._store.get(key).decode() for key in keys] if self._store.check(list(keys)) else []
        files = [self._file(self._path, key) for key in keys]
        return [read_text(file) for file in files] if all(file.exists() for file in files) else []

    @staticmethod
    def _file(store: Path, key: str) -> Path:
        return store.with_name(f"{store.name}-{key.replace('/', '-')}")


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


_BUCKET_NUMBERS = 1 << 23


@torch.no_grad()
def in_buckets(tensors: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """Run a collective that works in place on tensors, joined to flat ones of one dtype and limited size. The order of
    the tensors is the same on all ranks.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[torch.Tensor] = []
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET_NUMBERS:
                _joined(bucket, collective)
                bucket = []
            bucket.append(tensor)
        _joined(bucket, collective)


def _joined(bucket: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    collective(flat)
    for tensor, values in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(values.view_as(tensor))


def all_reduce_(tensor: torch.Tensor, world: World, op: Any = dist.ReduceOp.SUM) -> None:
    """Sum a tensor over all ranks in place, or reduce it by another operation."""
    if world.is_connected:
        dist.all_reduce(tensor, op=op, group=world.dense)


def maximum_(tensor: torch.Tensor, world: World) -> None:
    """Replace a tensor by the elementwise maximum over all ranks."""
    all_reduce_(tensor, world, dist.ReduceOp.MAX)
