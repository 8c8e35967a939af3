"""An accelerator that is not there: tensors that lie on the CPU and say that they do not, and a count of what a real
one would have to do for them.

Operations run on the CPU's data, so values are real. Triton's kernels run in its interpreter. What is counted is what a
CUDA device would see: launches, host waits, and copies from the host.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.gpu import fake_streams

NAME = "fake"
_WITHOUT_A_KERNEL = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "as_strided", "alias", "detach", "split", "split_with_sizes", "unbind", "_reshape_alias", "lift_fresh", "empty",
    "empty_like", "new_empty", "empty_strided", "new_empty_strided", "is_same_size",
}  # fmt: skip
_HOST_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: Any) -> Tensor:
        index = device if isinstance(device, int) else device.index
        assert index == 0, "the other device is another rank's"
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any) -> None: ...

    Stream, Event = fake_streams.Stream, fake_streams.Event
    current_stream = staticmethod(fake_streams.current_stream)

    def stream(self, stream: fake_streams.Stream | None) -> Any:
        return stream or nullcontext()


def set_up() -> torch.device:
    """Make the device known to this process."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.Event, torch.Stream = fake_streams.Event, fake_streams.Stream  # type: ignore[assignment, misc]
    torch.accelerator.current_stream = fake_streams.current_stream  # type: ignore[assignment]
    torch.accelerator.set_stream = fake_streams.set_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = _synchronize
    return torch.device(NAME, 0)


def _synchronize(*_: Any) -> None:
    """Of all streams."""
    _active().counts.waits.append("synchronize")
    for stream in tuple(fake_streams.streams):
        stream.synchronize()


class OnDevice(Tensor):
    """Looks as if it lay on the device; `host` holds the data, and `memory` knows which streams use it."""

    host: Tensor
    memory: fake_streams.Memory

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.host, made.memory = host, fake_streams.device_memory(host)
        return made

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: OnDevice) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host, self.memory = other.host, other.memory

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return fake_streams.DeviceStorage(self.host.untyped_storage(), self.memory)

    def record_stream(self, stream: fake_streams.Stream) -> None:  # type: ignore[override]
        self.memory.recorded(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _active().run(func, args, kwargs or {})


@dataclasses.dataclass
class Counts:
    """What the device was asked to do; `waits` of the host and `uploads` that block it name their operations; for
    `downloaded` and `uploaded` bytes nobody waited.
    """

    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    waits: list[str] = dataclasses.field(default_factory=list)
    uploads: list[str] = dataclasses.field(default_factory=list)
    collectives: list[str] = dataclasses.field(default_factory=list)
    downloaded: int = 0
    uploaded: int = 0


class FakeDevice(TorchDispatchMode):
    """Inside, tensors can be made on the device, and what happens to them is counted in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __enter__(self) -> FakeDevice:
        _running.append(self)
        self._from_numbers = _FromNumbers()
        self._from_numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._from_numbers.__exit__(*error)
        _running.pop()

    def take(self) -> Counts:
        """What was counted since the last time."""
        counts, self.counts = self.counts, Counts()
        return counts

    def launch(self, kernel: Any, grid: tuple[int, ...], data: Tensor, *arguments: Any, **meta: Any) -> None:
        """In the place of `triton.launch.launch`."""
        if all(grid):
            self.counts.launches[kernel.__name__] += 1
            tensors = [each for each in (getattr(value, "base", value) for value in arguments) if is_here(each)]
            stream = fake_streams.current_stream()
            before = [(each, each.host.clone()) for each in tensors if each.memory.is_shared(stream)]
            kernel[grid](*map(_host, arguments), **meta)
            read = {each.memory for each, was in before if torch.equal(each.host, was)}
            stream.begin()
            for each in tensors:
                each.memory.used(stream, kernel.__name__, writes=each.memory not in read)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        is_there = any(map(is_here, leaves))
        name = func.overloadpacket.__name__
        accesses = [] if name in _WITHOUT_A_KERNEL else list(_accesses(func, args, kwargs))
        if not is_there and asked != NAME:
            for tensor, writes in accesses:
                fake_streams.used_by_host(tensor, name, writes=writes)
            return func(*args, **kwargs)
        waited, stream = len(self.counts.waits) + len(self.counts.uploads), fake_streams.current_stream()
        self._count(name, args, kwargs, asked)
        waits = len(self.counts.waits) + len(self.counts.uploads) > waited
        stream.begin()
        for tensor, writes in accesses:
            if isinstance(tensor, OnDevice):
                assert _has_memory(tensor.host), f"{name} uses memory that was given back"
                tensor.memory.used(stream, name, writes=writes)
            elif waits or not _is_copy(name) or not (writes or fake_streams.is_locked(tensor)):
                fake_streams.used_by_host(tensor, name, writes=writes)
            else:
                assert fake_streams.is_locked(tensor), f"{name} to pageable memory, for which nobody waits"
                fake_streams.copied_by_device(tensor, stream, name, writes=writes)
        if waits:
            stream.synchronize()
        stays = asked in (None, NAME)
        if asked is not None:
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if name == "copy_" or (name.endswith("_") and not name.startswith("_")):
            return args[0]
        if "out" in kwargs:
            return kwargs["out"] if func._schema.returns else None
        if not stays:
            if not waits:
                fake_streams.copied_by_device(fake_streams.lock_pages(result), stream, name, writes=True)
            return result
        old = {tensor.memory for tensor, _ in accesses if isinstance(tensor, OnDevice)}
        made = tree_map(_wrapped, result)
        for leaf in tree_leaves(made) if name not in _WITHOUT_A_KERNEL else ():
            if isinstance(leaf, OnDevice) and leaf.memory not in old:
                leaf.memory.used(stream, name, writes=True)
        return made

    def _count(self, name: str, args: Any, kwargs: dict[str, Any], asked: str | None) -> None:
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            target_is_here = asked in (None, NAME) if name == "_to_copy" else isinstance(args[0], OnDevice)
            if not isinstance(source, OnDevice):
                if blocks:
                    self.counts.uploads.append(f"{name} {list(source.shape)}")
                else:
                    self.counts.uploaded += source.nbytes
            elif target_is_here:
                self.counts.launches[name] += 1
            elif blocks:
                self.counts.waits.append(name)
            else:
                self.counts.downloaded += source.nbytes
            return
        if name in _INDEXING and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] if i is not None):
            self.counts.waits.append(f"{name} by mask")
        if name in _HOST_WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.counts.waits.append(name)
        if name == "bincount":  # looks at the smallest and the largest value first
            self.counts.waits += ["bincount"] * 2
        if name not in _WITHOUT_A_KERNEL and name != "_local_scalar_dense":
            self.counts.launches[name] += 1


class _FromNumbers(TorchFunctionMode):
    """What dispatch does not see: torch.tensor(numbers, device=...) makes a tensor on the host and brings it up, and
    page-locked memory, which is plain memory here.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == NAME
        if is_there and func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        is_locked = kwargs.pop("pin_memory", False)
        assert func is torch.empty or not is_locked
        if func is Tensor.data_ptr and not isinstance(args[0], OnDevice):
            fake_streams.used_by_host(args[0], "data_ptr", writes=True)
        result = func(*args, **kwargs)
        return fake_streams.lock_pages(result) if is_locked else result


_running: list[FakeDevice] = []


def _active() -> FakeDevice:
    return _running[-1] if _running else FakeDevice()


def _host(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        return dataclasses.replace(value, base=_host(value.base))
    return value.host if isinstance(value, OnDevice) else value


def is_here(value: Any) -> bool:
    return isinstance(value, OnDevice)


def _is_copy(name: str) -> bool:
    return name in ("_to_copy", "copy_")


def _has_memory(data: Tensor) -> bool:
    return data.numel() == 0 or data.untyped_storage().size() > 0


def _accesses(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Tensors that an operation reads or writes, and whether it writes them."""
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        yield from ((leaf, writes) for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, OnDevice) else value


_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single", "broadcast",
    "reduce_scatter_tensor",
)  # fmt: skip


def on_hosts() -> None:
    """Let collectives of `torch.distributed` move the data behind the tensors, and count them."""
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, unwrapped(getattr(dist, name)))


def unwrapped(function: Any) -> Any:
    """A collective of `torch.distributed` on the data behind the tensors."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        here = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, OnDevice)]
        if here:
            _active().counts.collectives.append(function.__name__)
            stream = fake_streams.current_stream()
            stream.begin()
            for tensor in here:
                tensor.memory.used(stream, function.__name__, writes=True)
        return function(*tree_map(_host, arguments), **tree_map(_host, keywords))

    return call
