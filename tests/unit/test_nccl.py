"""What only NCCL needs, with stand-ins for its groups."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

import pytest
import torch

from moe_lightning.comm import nccl
from moe_lightning.comm.world import World
from moe_lightning.errors import WorldCutError


class Error(Enum):
    SUCCESS = 0
    COMM_ERROR = 1


class Group:
    """A group and its backend."""

    def __init__(self, calls: list[str], error: Error = Error.SUCCESS, refusal: str | None = None) -> None:
        self.calls, self.error, self.refusal = calls, error, refusal

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def get_error(self) -> Error:
        return self.error

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append("abort")
        if self.refusal is not None:
            raise RuntimeError(self.refusal)


def test_communicators_are_aborted_in_one_bracket_and_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    nccl.abort_together([Group(calls, refusal="gone already"), Group(calls)])  # type: ignore[list-item]
    assert calls == ["start", "abort", "abort", "end"]
    assert "gone already" in caplog.text
    nccl.abort_together([])


def test_what_users_set_for_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "to be undone")
        monkeypatch.delenv(name)
    nccl.prepare_environment(is_elastic=False)
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    nccl.prepare_environment(is_elastic=True)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    nccl.prepare_environment(is_elastic=True)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


def test_only_groups_on_gpus_get_options() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert nccl.first_group_options(cpu) == nccl.background_options(cpu) == {}
    assert nccl.first_group_options(gpu) == {"device_id": gpu}


@pytest.mark.parametrize("error", Error)
def test_an_error_that_nccl_notes_without_a_word_is_heard(error: Error) -> None:
    group: Any = Group([], error)
    assert nccl.has_failed(group) is (error is Error.COMM_ERROR)
    world = World(rank=0, size=2, device=torch.device("cuda", 0), dense=group)
    if error is Error.SUCCESS:
        world.require_whole()
        return
    with pytest.raises(WorldCutError, match="the world was cut while its ranks talked"):
        world.require_whole()


def test_nothing_is_read_in_a_world_that_was_cut() -> None:
    world = World(rank=0, size=2, device=torch.device("cpu"), is_cut=lambda: True)
    for read in (lambda: world.read(torch.ones(2)), world.settle):
        with pytest.raises(WorldCutError):
            read()
    assert World.single().read(torch.ones(2)).tolist() == [1.0, 1.0]
