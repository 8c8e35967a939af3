"""Copies through two buffers, with a device that is as late as it may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_lightning.checkpoint import snapshotter
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.snapshotter import Snapshotter, Staging
from moe_lightning.errors import ConfigurationError
from tests.unit.checkpoint_state import state_of

CHUNK = 16


class Late:
    """An event: the device copies when somebody waits for it, and never before."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy = copy

    def synchronize(self) -> None:
        self._copy()


class LateStaging(Staging):
    """Its device has done nothing before it must have."""

    def fill(self, buffer: Tensor, part: Tensor, stream: Any) -> Any:
        buffer.fill_(0xEE)  # what the device may write meanwhile
        return Late(lambda: buffer.copy_(part))


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshotter, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(snapshotter, "page_locked", lambda shape, dtype: torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("sizes", [(), (1,), (CHUNK,), (CHUNK + 1, 3, 5 * CHUNK, 7)])
def test_every_byte_arrives_in_its_place(sizes: tuple[int, ...]) -> None:
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    staged, admitted = LateStaging(), []
    for target, source in zip(targets, sources, strict=True):
        staged.copy(target.data_ptr(), source, None, admitted.append)
    staged.finish()
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert sum(admitted) == sum(sizes)
    assert all(size <= CHUNK for size in admitted)


def test_two_chunks_are_under_way_at_most() -> None:
    source, target = torch.ones(5 * CHUNK, dtype=torch.uint8), torch.zeros(5 * CHUNK, dtype=torch.uint8)
    staged, arrived = LateStaging(), []
    staged.copy(target.data_ptr(), source, None, lambda size: arrived.append(int(target.sum()) // CHUNK))
    assert arrived == [0, 0, 1, 2, 3]
    staged.finish()


def test_a_copy_that_was_given_up_goes_nowhere() -> None:
    source, target = torch.ones(CHUNK, dtype=torch.uint8), torch.zeros(CHUNK, dtype=torch.uint8)
    staged = LateStaging()
    staged.copy(target.data_ptr(), source, None, lambda size: None)
    staged.forget()
    staged.finish()
    assert not target.any()


def test_what_lies_on_the_host_has_no_event_of_a_device(tmp_path: Path) -> None:
    """Objects, and the steps that optimizers count, beside a model on a GPU."""
    (arenas := tmp_path / "arenas").mkdir(mode=0o700)
    state = state_of(0, 1, 0)
    writer = Snapshotter(arena_path(arenas, 0), run="r", session="1", rank=0, world_size=1, state=state)
    writer._staging = Staging()
    writer.start(1, state, objects={"trainer": {"step": 1}})
    writer.finish()
    assert writer.newest_step == 1
    writer.close()


def test_little_locked_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigurationError, match=r"lock 8388608 bytes .*out of memory\): raise the limit of locked"):
        Staging()
