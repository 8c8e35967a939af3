"""Ranks that hand over before a world ends."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_lightning.parallel.context import World
from moe_lightning.strategies import elastic_worlds, gradients
from moe_lightning.strategies.committed_step import CommittedStep


@pytest.mark.parametrize(("rank", "is_spare"), [(0, False), (2, True)])
def test_who_is_cut_off_by_one_that_met_all_others_has_met_them_too(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_spare: bool
) -> None:
    """The first of them breaks the world up while others still read that all have come; a death is another matter."""

    def cut(*_: object) -> None:
        raise dist.DistNetworkError("the store of a world that broke")

    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda *_: [None] * 3)
    monkeypatch.setattr(elastic_worlds, "store_barrier", cut)
    world, engine = World.offline(rank, 3, torch.device("cpu")), SimpleNamespace(store=None, reason="ranks wait")
    rest: dict[str, Any] = {
        "notice": None, "nodes": ["a", "b", "c"], "min_replicas": 1, "timeout": timedelta(seconds=1), "spares": 1,
        "reason": "ranks wait",
    }  # fmt: skip
    hand_over = partial(elastic_worlds.hand_over, SimpleNamespace(), world, engine, **rest)  # type: ignore[arg-type]
    assert hand_over() is is_spare
    engine.reason = "rank 1 on node b died"
    with pytest.raises(dist.DistNetworkError):
        hand_over()


@pytest.mark.parametrize(("rank", "is_newcomer", "is_torn"), [(0, False, False), (1, False, True), (1, True, False)])
def test_a_rank_whose_values_a_fault_left_half_overwritten_does_not_offer_them(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_newcomer: bool, is_torn: bool
) -> None:
    def fail(*_: object) -> None:
        raise dist.DistNetworkError("rank 2 died")

    monkeypatch.setattr(elastic_worlds, "fetch_missing", lambda *_, **__: None)
    monkeypatch.setattr(elastic_worlds, "fetch_dense", fail)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds._state = SimpleNamespace(abort_window_replay=lambda: None)
    worlds._strategy, worlds._planner = SimpleNamespace(checkpoints=SimpleNamespace(reads_objects=False)), None
    worlds.step, worlds.is_newcomer = CommittedStep(MagicMock()), is_newcomer
    plan = SimpleNamespace(level="live", live_ranks=(0,), apply_prepared=())
    with pytest.raises(dist.DistNetworkError):
        worlds._move(plan, None, World.offline(rank, 3, torch.device("cpu")))
    assert worlds.step.is_torn is is_torn


@pytest.mark.parametrize("own", [{}, {"forward": len}], ids=["of its class", "its own"])
def test_a_module_has_its_forward_again_after_a_failure_in_ddp(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    """Lightning sets another one for the call of DDP, which calls it back."""
    monkeypatch.setattr(gradients, "DistributedDataParallel", MagicMock())
    module, dense_sum = nn.Linear(1, 1), gradients.DenseGradientSum({}, None)
    module.__dict__.update(own)
    for _ in range(2):
        dense_sum.wrapped(module, MagicMock(), None)
        module.forward = print  # type: ignore[method-assign,assignment]
        assert dense_sum.unwrapped(module) is module
        assert {name: value for name, value in module.__dict__.items() if name == "forward"} == own
    module.__dict__.update(forward=max)
    assert dense_sum.unwrapped(module).forward is max, "DDP was not in this world"
