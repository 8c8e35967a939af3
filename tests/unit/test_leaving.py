"""Ranks that hand over before a world ends."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_lightning.checkpoint.memory import DamagedSnapshots
from moe_lightning.parallel.context import World
from moe_lightning.strategies import elastic_worlds, gradients
from moe_lightning.strategies.committed_step import CommittedStep
from moe_lightning.strategies.train_state import StateTransfer


@pytest.mark.parametrize(("rank", "is_spare"), [(0, False), (2, True)])
def test_who_is_cut_off_by_one_that_met_all_others_has_met_them_too(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_spare: bool
) -> None:
    """The first of them breaks the world up while others still read that all have come; a death is another matter."""

    def cut(*_: object) -> None:
        raise dist.DistNetworkError("the store of a world that broke")

    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda *_: [[None, False]] * 3)
    monkeypatch.setattr(elastic_worlds, "store_barrier", cut)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds.engine, worlds._departure = SimpleNamespace(store=None, reason="ranks wait", notice=None), None
    worlds.step = SimpleNamespace(is_torn=False)
    worlds._strategy = SimpleNamespace(
        worlds=SimpleNamespace(present=World.offline(rank, 3, torch.device("cpu")), spares=1),
        options=SimpleNamespace(timeout=timedelta(seconds=1)),
    )
    assert worlds._hand_over("ranks wait") is is_spare
    worlds.engine.reason = "rank 1 on node b died"
    with pytest.raises(dist.DistNetworkError):
        worlds._hand_over("ranks wait")


def test_who_is_cut_off_by_one_that_saw_others_leave_has_seen_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda *_: [[None, False], ["SIGTERM", False]])
    monkeypatch.setattr(elastic_worlds, "store_barrier", lambda *_: None)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds.engine, worlds._departure = MagicMock(reason="ranks leave", notice=None), None
    worlds.engine.store.wait.side_effect = dist.DistNetworkError("the store of a world that broke")
    worlds.step = SimpleNamespace(is_torn=False)
    present = World.offline(0, 2, torch.device("cpu"))
    worlds._strategy = MagicMock(worlds=SimpleNamespace(present=present, spares=0))
    assert not worlds._hand_over("ranks leave")
    worlds.engine.reason = "rank 1 on node b died"
    with pytest.raises(dist.DistNetworkError):
        worlds._hand_over("ranks leave")


def test_nobody_leaves_while_values_of_some_rank_are_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged values that a rank sends would count as good, and the good copy may be that of a rank that leaves."""
    found = [["SIGTERM", False], [None, True], [None, False]]
    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda *_: found)
    monkeypatch.setattr(elastic_worlds, "store_barrier", lambda *_: None)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds.engine, worlds._departure, worlds._state = MagicMock(notice="SIGTERM"), None, MagicMock()
    world = SimpleNamespace(rank=0, size=3, is_connected=True)
    worlds._strategy = MagicMock(worlds=SimpleNamespace(present=world, spares=0))
    worlds.step = SimpleNamespace(is_torn=False)
    assert not worlds._hand_over("SIGTERM")
    worlds._state.transfer.hand_over.assert_not_called()


def test_a_model_without_experts_is_handed_over() -> None:
    state = MagicMock(experts=SimpleNamespace(placements=[]))
    world = World.offline(0, 2, torch.device("cpu"))
    StateTransfer(state).hand_over([0], world, ["a", "b"], min_replicas=2)
    state.shards.hand_over.assert_called_once_with([0], world)


@pytest.mark.parametrize("moves", [False, True], ids=["whole", "optimizer states move"])
def test_a_rank_that_is_whole_in_the_new_world_offers_its_values(monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    def fail(*_: object) -> None:
        raise dist.DistNetworkError("rank 2 died")

    monkeypatch.setattr(elastic_worlds, "fetch_missing", lambda *_, **__: None)
    monkeypatch.setattr(elastic_worlds, "fetch_dense", lambda *_: {})
    monkeypatch.setattr(elastic_worlds, "restore_missing", lambda *_: None)
    monkeypatch.setattr(elastic_worlds, "agree", fail)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds._state, worlds._strategy, worlds._planner = MagicMock(), MagicMock(), None
    worlds._state.shards.moves_optimizers = moves
    worlds.step, worlds.is_newcomer = CommittedStep(MagicMock()), False
    plan = SimpleNamespace(level="live", live_ranks=(0,), apply_prepared=(), shards=(), held=None, nodes=())
    with pytest.raises(dist.DistNetworkError):
        worlds._move(plan, MagicMock(), World.offline(0, 3, torch.device("cpu")))
    assert worlds.step.is_torn is moves


def test_an_update_that_the_plan_does_not_apply_is_not_applied_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients of experts have gone by then."""

    def fail(*_: object) -> None:
        raise dist.DistNetworkError("rank 2 died")

    monkeypatch.setattr(elastic_worlds, "fetch_missing", lambda *_, **__: None)
    monkeypatch.setattr(elastic_worlds, "fetch_dense", fail)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds._state, worlds._strategy, worlds._planner = MagicMock(), MagicMock(), None
    worlds.step, worlds.is_newcomer = CommittedStep(MagicMock()), False
    worlds.step.prepare(MagicMock())
    plan = SimpleNamespace(level="live", live_ranks=(0,), apply_prepared=())
    with pytest.raises(dist.DistNetworkError):
        worlds._move(plan, MagicMock(), World.offline(0, 3, torch.device("cpu")))
    assert worlds.step.prepared is None


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


def test_a_second_plan_of_a_recovery_makes_no_update_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of the first one were damaged."""

    def fail(*_: object, **__: object) -> None:
        raise DamagedSnapshots([("a", "arena", 0, 1)])

    monkeypatch.setattr(elastic_worlds, "fetch_missing", fail)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds._state = SimpleNamespace(abort_window_replay=lambda: None)
    worlds._strategy, worlds._planner = SimpleNamespace(checkpoints=SimpleNamespace(reads_objects=False)), None
    worlds.step, worlds.is_newcomer, update = CommittedStep(MagicMock()), False, MagicMock()
    worlds.step.prepare(update)
    for _ in range(2):
        with pytest.raises(DamagedSnapshots):
            worlds._move(SimpleNamespace(level="live", live_ranks=(0, 1), apply_prepared=(0,)), None, World.single())
    assert (update.call_count, worlds.step.version) == (1, 1)


def test_a_departure_is_granted_for_one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank lost meanwhile, there may be too few others."""
    monkeypatch.setattr(elastic_worlds, "destroy_groups", lambda: None)
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds.engine, worlds._strategy = SimpleNamespace(abort=lambda _: None), MagicMock()
    worlds.engine.settings = SimpleNamespace(min_ranks=2)
    worlds._strategy.worlds.present = World.offline(0, 3, torch.device("cpu"))
    assert worlds.request_departure(0, "it is slow")
    worlds._leave("rank 2 died")
    assert worlds._departure is None


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
