"""Collectives of the fake device: gloo moves the data behind its tensors, and an aborted one ends as NCCL's do, with
any numbers and without an exception.

A collective whose peer is gone waits until its group is aborted, and fails the test where nobody does that.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.fake_device import NAME, OnDevice, _active, _host
from tests.gpu.fake_streams import Event, Stream, current_stream

BACKEND = "fakecl"
_PATIENCE_S = 60.0
_COLLECTIVES = {  # as torch's newest names, and what gloo calls them
    "allreduce": "allreduce", "allgather": "allgather", "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base", "broadcast": "broadcast", "reduce": "reduce", "barrier": "barrier",
    "all_to_all_single": "alltoall_base", "alltoall_base": "alltoall_base", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base", "_reduce_scatter_base": "_reduce_scatter_base",
    "send": "send", "recv": "recv",
}  # fmt: skip


class Error(Enum):
    """What a group says of itself."""

    SUCCESS = 0


class Works(dist.Work):  # type: ignore[misc]
    """One collective under way."""

    def __init__(self, work: Any, outputs: Any, aborted: threading.Event, ended: Event, used: Any) -> None:
        super().__init__()
        self._work, self._outputs, self._aborted = work, outputs, aborted
        self._ended, self._used = ended, used

    def wait(self, timeout: Any = None) -> bool:
        """Lets the present stream wait; the tensors are kept up to here."""
        self._wait()
        current_stream().wait_event(self._ended)
        self._used = None
        return True

    def _wait(self) -> bool:
        lost = "as it began"
        try:
            if self._work is not None:
                self._work.wait()
                return True
        except RuntimeError as error:
            lost = str(error)
        assert self._aborted.wait(_PATIENCE_S), f"nobody aborted the group of a dead peer ({lost})"
        for tensor in tree_leaves(self._outputs):
            if isinstance(tensor, Tensor):
                tensor.random_(0, 100)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Done at once, as on a device whose stream waits in the place of its host."""
        self.wait()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._outputs)
        return done


class FakeComms(dist.ProcessGroup):
    """One group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._aborted = threading.Event()
        self._stream = Stream()

    def name(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> FakeComms:
        assert device.type == NAME
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend_name(self) -> str:
        return BACKEND

    def get_error(self) -> Error:
        return Error.SUCCESS

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]


def _collective(name: str, inner: str) -> Any:
    def call(self: FakeComms, *arguments: Any, **keywords: Any) -> Works:
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, OnDevice)]
        if tensors:
            _active().counts.collectives.append(name)
        written = {id(leaf) for leaf in tree_leaves(arguments[:1])} if name != "send" else set()
        self._stream.wait_stream(current_stream())
        self._stream.begin()
        for tensor in sorted(tensors, key=lambda tensor: id(tensor) in written):
            tensor.memory.used(self._stream, name, writes=id(tensor) in written)
        ended = self._stream.record_event()
        here, named = tree_map(_host, arguments), tree_map(_host, keywords)
        try:
            work = getattr(self._gloo, inner)(*here, **named)
        except RuntimeError:  # on a connection that has ended
            work = None
        return Works(work, here[0] if here and name != "send" else (), self._aborted, ended, tensors)

    return call


for _name, _inner in _COLLECTIVES.items():
    setattr(FakeComms, _name, _collective(_name, _inner))


def set_up_comms() -> None:
    """Make the backend that of the device's tensors, in this process of a test."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch 2.15 cannot record collectives of groups written in Python
    dist.Backend.register_backend(BACKEND, FakeComms, devices=[NAME])


def meet_on_the_device(rank: int, size: int) -> None:
    """Let the ranks of `run_ranks` leave their gloo world for one on the device."""
    if size > 1:
        dist.destroy_process_group()
        store = dist.FileStore("met-on-the-device", size)  # in the folder of these ranks
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
