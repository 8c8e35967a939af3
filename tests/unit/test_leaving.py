"""Ranks that hand over before a world ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_lightning.checkpoint.memory import DamagedSnapshots
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.elastic.client_state import ClientState
from moe_lightning.elastic.membership import ElasticTask
from moe_lightning.elastic.worker import Preempted
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import MeshShape
from moe_lightning.strategies import elastic_worlds, recovery, steps
from moe_lightning.strategies.committed_step import CommittedStep
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageMap
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds


def offline(rank: int, size: int) -> World:
    return World.offline(rank, size, torch.device("cpu"))


def elastic(world: Any, *, tp: int = 1, **engine: Any) -> Any:
    """End of a rank of a world, around a strategy that is there for its worlds alone."""
    worlds: Any = elastic_worlds.ElasticWorlds.__new__(elastic_worlds.ElasticWorlds)
    worlds.engine, worlds._departure, worlds._state = MagicMock(**engine), None, MagicMock()
    worlds._strategy = MagicMock(worlds=Worlds(MeshShape(tp=tp)))
    worlds._strategy.worlds.set_present(world)
    worlds._strategy.options.timeout = timedelta(seconds=1)
    worlds.step = SimpleNamespace(is_torn=False, is_first=False)
    return worlds


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let ranks that hand over gather these notices, and their barrier end with an error."""

    def set_up(found: list[Any], error: Exception | None = None) -> None:
        monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda *_: found)
        monkeypatch.setattr(elastic_worlds, "store_barrier", MagicMock(side_effect=error))

    return set_up


@pytest.mark.parametrize(("rank", "is_spare"), [(0, False), (2, True)])
def test_who_is_cut_off_by_one_that_met_all_others_has_met_them_too(
    meet: Callable[..., None], rank: int, is_spare: bool
) -> None:
    """The first of them breaks the world up while others still read that all have come; a death is another matter."""
    meet([[None, False]] * 3, dist.DistNetworkError("the store of a world that broke"))
    worlds = elastic(offline(rank, 3), tp=2, reason="ranks wait", notice=None)
    assert worlds._hand_over("ranks wait") is is_spare
    worlds.engine.reason = "rank 1 on node b died"
    with pytest.raises(dist.DistNetworkError):
        worlds._hand_over("ranks wait")


def test_who_is_cut_off_by_one_that_stays_leaves_all_the_same(meet: Callable[..., None]) -> None:
    meet([[None, False], ["SIGTERM", False]], dist.DistNetworkError("the store of a world that broke"))
    worlds = elastic(offline(1, 2), reason="ranks leave", notice="SIGTERM")
    with pytest.raises(Preempted, match="SIGTERM"):
        worlds._hand_over("ranks leave")


def test_nobody_leaves_while_values_of_some_rank_are_torn(meet: Callable[..., None]) -> None:
    """Damaged values that a rank sends would count as good, and the good copy may be that of a rank that leaves."""
    meet([["SIGTERM", False], [None, True], [None, False]])
    worlds = elastic(SimpleNamespace(rank=0, size=3, is_connected=True), notice="SIGTERM")
    assert not worlds._hand_over("SIGTERM")
    worlds._state.transfer.hand_over.assert_not_called()


@pytest.mark.parametrize("rank", [0, 2])
def test_if_all_leave_those_with_a_place_in_the_mesh_stay_to_save(meet: Callable[..., None], rank: int) -> None:
    """A checkpoint is saved in a world that the mesh fits."""
    meet([["SIGTERM", False]] * 3)
    worlds = elastic(SimpleNamespace(rank=rank, size=3, is_connected=True), tp=2, notice="SIGTERM")
    worlds._policy, worlds.members = elastic_worlds.RecoveryPolicy(), MagicMock()
    if rank == 2:
        with pytest.raises(Preempted):
            worlds._hand_over("SIGTERM")
    else:
        assert not worlds._hand_over("SIGTERM")
    (staying, *_), _ = worlds._state.transfer.hand_over.call_args
    assert list(staying) == [0, 1]


def test_an_agreed_change_does_not_end_who_has_returned_from_behind_a_dead_link(meet: Callable[..., None]) -> None:
    """It has met all ranks by then: the link works again."""
    task = ElasticTask(address="none", secret_file="none", node="me")
    state = ClientState(task)
    state.receive({"t": "evicted", "reason": "the link is dead", "probes": {"node-1": ["10.0.0.1", 7]}}, 0.0)
    state.check_wait(0.0, after := task.settings.rendezvous_timeout_s + 1.0)
    state.rename()
    meet([[None, False]] * 2)
    worlds = elastic(offline(0, 2), notice=None, record_progress=state.record_progress)
    assert not worlds._hand_over("ranks join or leave")
    state.start_join(is_ready=True, is_spare=False)
    state.check_wait(after, after)


def test_a_process_before_its_first_step_keeps_the_time_for_it(meet: Callable[..., None]) -> None:
    meet([[None, False]] * 2)
    worlds = elastic(offline(0, 2), notice=None)
    worlds.step.is_first = True
    assert not worlds._hand_over("ranks join or leave")
    worlds.engine.record_progress.assert_not_called()


def test_a_model_without_experts_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world, worlds = offline(0, 1), Worlds()
    worlds.set_present(world)
    module = nn.Linear(2, 2)
    state = TrainState(worlds, dense="ddp")
    state.set_module(module, PlacedExperts(module, [], world), StageMap(module, worlds))  # type: ignore[arg-type]
    handed = MagicMock()
    monkeypatch.setattr(state.transfer, "_hand_over_dense", handed)
    state.transfer.hand_over([0], world, ["a"], min_replicas=2)
    handed.assert_called_once_with([0], world)


def test_placements_of_an_only_stage_are_those_of_the_last_change() -> None:
    worlds, moved = Worlds(), [Placement(replicas=np.array([[1, 0], [1, 0]]))]
    worlds.set_present(offline(0, 2))
    stages = StageMap(MoELayer(8, 8, num_experts=2), worlds)
    stages.set_placements([uniform_placement(2, 2)])
    stages.assign([[0]], moved)  # rank 1 leaves
    assert (stages.placements, stages.ranks) == (moved, [range(2)])


LIVE: dict[str, Any] = {"level": "live", "live_ranks": (0,), "apply_prepared": (), "shards": ()}


@pytest.fixture
def fails_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a move to a plan's state fail in a call, of which those before it find nothing."""

    def set_up(name: str, error: Exception) -> None:
        results = {"fetch_missing": None, "fetch_dense": {}, "restore_missing": None, "agree": None}
        for call, found in (results | {"all_gather_json": [True]}).items():
            monkeypatch.setattr(recovery, call, MagicMock(return_value=found))
        monkeypatch.setattr(recovery, name, MagicMock(side_effect=error))

    return set_up


def recovering(*, is_replaying: bool = False) -> tuple[Any, CommittedStep]:
    """The recovery of a rank, and its last step."""
    state = MagicMock(window_replay=object() if is_replaying else None)

    def forget_restored() -> None:
        state.window_replay = None

    state.forget_restored.side_effect = forget_restored
    step = CommittedStep(state)
    return recovery.StateRecovery(MagicMock(state=state), step), step


CALLS = {"live": ("fetch_missing", "fetch_dense", "restore_missing", "agree"), "memory": ("fetch_missing", "agree")}


@pytest.mark.parametrize(("level", "call"), [(level, call) for level, calls in CALLS.items() for call in calls])
@pytest.mark.parametrize(
    ("rank", "is_replaying"), [(0, False), (1, False), (1, True)], ids=["live", "not live", "repeats a window"]
)
def test_a_fault_in_any_call_of_a_move_leaves_no_rank_whole_that_is_not(
    fails_in: Callable[..., None], level: str, call: str, rank: int, is_replaying: bool
) -> None:
    """Values that nothing has replaced are whole, but not while a window is repeated, nor if that is broken off."""
    fails_in(call, lost := dist.DistNetworkError("rank 2 died"))
    own, step = recovering(is_replaying=is_replaying)
    own._strategy.state.transfer.moves_optimizers = False
    plan = SimpleNamespace(**LIVE | {"level": level}, held=None, nodes=())
    with pytest.raises(type(lost)):
        own._move(plan, MagicMock(), offline(rank, 3), is_newcomer=False)
    is_kept = level == "live" and rank == 0
    assert step.is_whole is (is_kept or (call == "fetch_missing" and not is_replaying))


@pytest.mark.parametrize("moves", [False, True], ids=["whole", "optimizer states move"])
def test_a_rank_that_is_whole_in_the_new_world_offers_its_values(fails_in: Callable[..., None], moves: bool) -> None:
    fails_in("agree", lost := dist.DistNetworkError("rank 2 died"))
    own, step = recovering()
    own._strategy.state.transfer.moves_optimizers = moves
    with pytest.raises(type(lost)):
        own._move(SimpleNamespace(**LIVE, held=None, nodes=()), MagicMock(), offline(0, 3), is_newcomer=False)
    assert step.is_torn is moves


@pytest.mark.parametrize("other", [3, -1], ids=["there", "lost"])
def test_a_rank_that_has_followed_an_update_is_live_while_the_progress_is_known(
    other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It applied it in a recovery that another fault broke off; the rank that made the step has the fit loop there."""
    own, step = recovering()
    step.version, step.progress = 3, MagicMock(step=2)
    told: list[Any] = []

    def inventory_of(_: Any, *, counts: bool, **__: Any) -> Any:
        told.append(counts)
        raise InterruptedError

    monkeypatch.setattr(recovery, "all_gather_json", lambda value, _: [value, other])
    monkeypatch.setattr(recovery, "inventory_of", inventory_of)
    with pytest.raises(InterruptedError):
        own.recover(offline(0, 2), MagicMock(), node="a", is_newcomer=False, min_replicas=1)
    assert told == [other == 3]


def test_an_update_that_the_plan_does_not_apply_is_not_applied_later(fails_in: Callable[..., None]) -> None:
    """Its gradients of experts have gone by then."""
    fails_in("fetch_dense", lost := dist.DistNetworkError("rank 2 died"))
    own, step = recovering()
    step.prepare(MagicMock())
    with pytest.raises(type(lost)):
        own._move(SimpleNamespace(**LIVE), MagicMock(), offline(0, 3), is_newcomer=False)
    assert step.prepared is None


@pytest.mark.parametrize(("rank", "is_newcomer", "is_torn"), [(0, False, False), (1, False, True), (1, True, False)])
def test_a_rank_whose_values_a_fault_left_half_overwritten_does_not_offer_them(
    fails_in: Callable[..., None], rank: int, is_newcomer: bool, is_torn: bool
) -> None:
    fails_in("fetch_dense", lost := dist.DistNetworkError("rank 2 died"))
    own, step = recovering()
    with pytest.raises(type(lost)):
        own._move(SimpleNamespace(**LIVE), None, offline(rank, 3), is_newcomer=is_newcomer)
    assert step.is_torn is is_torn


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_joins_forgets_the_checkpoint_that_it_has_read(fails_in: Callable[..., None], rank: int) -> None:
    fails_in("fetch_dense", lost := dist.DistNetworkError("rank 2 died"))
    own, _ = recovering()
    with pytest.raises(type(lost)):
        own._move(SimpleNamespace(**LIVE), None, offline(rank, 3), is_newcomer=rank == 1)
    assert own._strategy.state.forget_restored.called is (rank == 1)


def test_a_second_plan_of_a_recovery_makes_no_update_again(fails_in: Callable[..., None]) -> None:
    """Snapshots of the first one were damaged."""
    fails_in("fetch_missing", DamagedSnapshots([("a", "arena", 0, 1)]))
    (own, step), update = recovering(), MagicMock()
    step.prepare(update)
    plan = SimpleNamespace(**LIVE | {"live_ranks": (0, 1), "apply_prepared": (0,)})
    for _ in range(2):
        with pytest.raises(DamagedSnapshots):
            own._move(plan, None, World.single(), is_newcomer=False)
    assert (update.call_count, step.version) == (1, 1)


def test_a_departure_is_granted_for_one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank lost meanwhile, there may be too few others."""
    monkeypatch.setattr(elastic_worlds, "destroy_groups", lambda: None)
    worlds = elastic(offline(0, 3))
    worlds.engine.task.settings.min_ranks = 2
    assert worlds.request_departure(0, "it is slow")
    worlds._leave("rank 2 died")
    assert worlds._departure is None


@pytest.mark.parametrize("own", [{}, {"forward": len}], ids=["of its class", "its own"])
def test_a_module_has_its_forward_again_after_a_failure_in_ddp(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    """Lightning sets another one for the call of DDP, which calls it back."""
    monkeypatch.setattr(steps, "DistributedDataParallel", MagicMock())
    module, passes = nn.Linear(1, 1), steps.WholeModel(MagicMock(), MagicMock(), MagicMock(), {}, MagicMock())
    module.__dict__.update(own)
    for _ in range(2):
        passes.wrapped(module, (), None)
        module.forward = print  # type: ignore[method-assign,assignment]
        assert passes.unwrapped(module) is module
        assert {name: value for name, value in module.__dict__.items() if name == "forward"} == own
    module.__dict__.update(forward=max)
    assert passes.unwrapped(module).forward is max, "DDP was not in this world"
