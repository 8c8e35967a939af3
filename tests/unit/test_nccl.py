"""What only NCCL needs, with stand-ins for its groups."""

from __future__ import annotations

import os
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from moe_lightning.compat import private_torch
from moe_lightning.errors import WorldAbortedError
from moe_lightning.parallel import context
from moe_lightning.parallel.abort import GroupAborter
from moe_lightning.parallel.context import World
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
MINUTE = timedelta(minutes=1)


class Error(Enum):
    SUCCESS = 0
    COMM_ERROR = 1


class Group:
    """A group and its backend."""

    def __init__(
        self, calls: list[str], error: Error = Error.SUCCESS, refusal: str | None = None, kind: str = "nccl"
    ) -> None:
        self.calls, self.error, self.refusal, self.kind = calls, error, refusal, kind

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self.kind

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
    context.abort_together([Group(calls, refusal="gone already"), Group(calls)], GPU)  # type: ignore[list-item]
    assert calls == ["start", "abort", "abort", "end"]
    assert "gone already" in caplog.text
    context.abort_together([], GPU)


def test_groups_of_a_world_that_broke_while_they_were_built_are_aborted_too() -> None:
    calls: list[str] = []
    aborter = GroupAborter()
    with aborter:
        aborter.abort()
    aborter.add_groups([Group(calls), Group(calls)], GPU)  # type: ignore[list-item]
    assert calls == ["start", "abort", "abort", "end"]
    aborter.abort()
    assert len(calls) == 4, "once"


def test_what_ends_a_groups_collectives_is_asked_of_the_group() -> None:
    """The backend's name may be that of several, as "cpu:gloo,cuda:nccl"."""
    groups: list[Any] = [Group([]), Group([], kind="gloo")]
    assert [context.is_silent(group, GPU) for group in groups] == [True, False]
    assert not context.is_silent(groups[0], CPU)


def test_groups_on_other_devices_get_their_timeout_too() -> None:
    given: list[Any] = []
    other: Any = SimpleNamespace(_device_types=[torch.device("xpu")], set_timeout=given.append)
    private_torch.set_group_timeout(other, MINUTE)
    assert given == [MINUTE]


def test_what_users_set_for_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "to be undone")
        monkeypatch.delenv(name)
    context.prepare_environment(is_elastic=False)
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    context.prepare_environment(is_elastic=True)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    context.prepare_environment(is_elastic=True)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


def test_only_groups_on_gpus_get_options() -> None:
    assert context.first_group_options(CPU) == context.background_options(CPU, MINUTE) == {}
    assert context.first_group_options(GPU) == {"device_id": GPU}


def test_the_background_group_has_the_timeout_that_torch_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", own, raising=False)
    options = context.background_options(GPU, MINUTE)["pg_options"]
    assert options.is_high_priority_stream
    assert options._timeout == MINUTE


@pytest.mark.parametrize("error", Error)
def test_an_error_that_nccl_notes_without_a_word_is_heard(error: Error) -> None:
    group: Any = Group([], error)
    assert context.has_failed(group, GPU) is (error is Error.COMM_ERROR)
    world = World(rank=0, size=2, device=torch.device("cuda", 0), dense=group)
    if error is Error.SUCCESS:
        world.require_whole()
        return
    with pytest.raises(WorldAbortedError, match="the world was aborted while its ranks communicated"):
        world.require_whole()


def test_nothing_is_read_in_an_aborted_world() -> None:
    world = World(rank=0, size=2, device=torch.device("cpu"), is_aborted=lambda: True)
    for read in (lambda: world.read(torch.ones(2)), world.synchronize):
        with pytest.raises(WorldAbortedError):
            read()
    assert World.single().read(torch.ones(2)).tolist() == [1.0, 1.0]


def test_no_decision_of_ranks_is_taken_in_an_aborted_world(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ExpertParallelStrategy(parallel_devices=[CPU], cluster_environment=LightningEnvironment())
    monkeypatch.setattr(ExpertParallelStrategy, "world_size", 2)
    strategy.worlds.set_present(World(rank=0, size=2, device=CPU, is_aborted=lambda: True))
    with pytest.raises(WorldAbortedError):
        strategy.reduce_boolean_decision(True, all=False)
