"""A first world whose groups are not built in time is built again, unless somebody was lost; it may follow a world
without survivors, which a later fit of the same process never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy
from moe_lightning.elastic.faults import WorldChanged, is_world_fault
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.worker import Preempted
from moe_lightning.errors import ConfigurationError, WorldAbortedError
from moe_lightning.parallel.context import World
from moe_lightning.strategies import elastic_worlds
from moe_lightning.strategies.elastic_worlds import ElasticWorlds, RecoveryPolicy, Standing, first_world
from moe_lightning.strategies.worlds import FixedWorld, Worlds
from tests.distributed.training import OwnModule, RandomTokens, quiet_trainer
from tests.forks import wait_until


@pytest.fixture(autouse=True)
def _without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none to destroy; what is done for them takes seconds in a process of many tests."""
    monkeypatch.setattr("moe_lightning.strategies.elastic_worlds.destroy_groups", lambda: None)


class Engine:
    """Of a run whose ranks come together each time."""

    reason = None

    def __init__(self, cause: str | None = None) -> None:
        self.cause, self.joined, self.broken = cause, 0, 0

    def world_exists(self) -> bool:
        return False

    def withdraw_if_early(self) -> bool:
        return False

    def join(self) -> Any:
        self.joined += 1
        return SimpleNamespace(number=self.joined)

    def abort(self, reason: str) -> None:
        self.broken += 1

    def wait_for_cause(self) -> str | None:
        return self.cause


def met(engine: Any, *errors: Exception) -> Any:
    """What comes of builds that fail like this before one succeeds."""
    left = list(errors)

    def build(members: Any) -> Any:
        if left:
            raise left.pop(0)
        return f"world {members.number}"

    return first_world(engine, build)


def test_what_took_too_long_is_tried_again() -> None:
    engine = Engine()
    world = met(engine, dist.DistNetworkError("only 3 of 4 ranks came to build their groups within 5 s"))
    assert (world, engine.broken) == ("world 2", 1)


@pytest.mark.parametrize(
    ("error", "cause", "joined"),
    [
        (dist.DistNetworkError("slow"), None, 3),
        (dist.DistNetworkError("slow"), "rank 1 was killed by SIGKILL", 1),
        (ConfigurationError("rank 1 has another version"), None, 1),
    ],
)
def test_what_does_not_help_is_left(error: Exception, cause: str | None, joined: int) -> None:
    engine = Engine(cause)
    with pytest.raises(type(error), match=str(error)):
        met(engine, error, error, error)
    assert engine.joined == joined


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Worlds of one rank that never recovers, before its first fit; it was started once."""
    engine = MagicMock(reason="a rank was lost")
    engine.task.starts, engine.task.settings.min_ranks = 1, 1
    engine.is_late.return_value = False
    worlds = Worlds()
    strategy: Any = SimpleNamespace(
        worlds=worlds, state=MagicMock(), checkpoints=MagicMock(), options=MagicMock(), root_device=torch.device("cpu")
    )
    strategy.state.trainer.fit_loop.done = False
    monkeypatch.setattr(Worlds, "present", SimpleNamespace(size=1, rank=0, is_connected=False))
    for name in ("set_up_data", "leave_schedule"):
        monkeypatch.setattr(elastic_worlds, name, lambda *_: None)
    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda value, _: [value])
    elastic = ElasticWorlds(strategy, engine)
    elastic.step = MagicMock(version=0)
    return elastic


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_rank_without_a_place_in_the_mesh_joins_as_spare(
    alone: Any, monkeypatch: pytest.MonkeyPatch, is_spare: bool
) -> None:
    """It gives its state to others first."""
    alone.standing = Standing.MEMBER
    monkeypatch.setattr(alone, "_hand_over", lambda reason: is_spare)
    monkeypatch.setattr(alone, "_require_members", MagicMock())
    monkeypatch.setattr(elastic_worlds, "destroy_groups", lambda: None)
    alone._strategy.leave_world = lambda: None
    alone.engine.join.side_effect = Preempted("the host is gone")
    with pytest.raises(Preempted):
        alone._recover(WorldChanged("a rank leaves"))
    alone.engine.join.assert_called_once_with(is_ready=True, is_spare=is_spare)
    assert alone.is_newcomer is is_spare


@pytest.mark.parametrize(("errors", "raised"), [(1, Preempted), (9, ValueError)], ids=["once", "always"])
def test_an_error_in_a_recovery_is_shown(
    alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, errors: int, raised: type[Exception]
) -> None:
    """The broken world may have caused it, unless it comes again in each attempt."""
    alone.standing = Standing.MEMBER
    monkeypatch.setattr(alone, "_require_members", MagicMock())
    alone._strategy.leave_world = MagicMock(side_effect=[ValueError("the snapshot failed")] * errors + [None])
    alone.engine.join.side_effect = Preempted("the host is gone")
    with pytest.raises(raised):
        alone._recover(dist.DistNetworkError("reset"))
    (shown,) = [record for record in caplog.records if record.exc_info and "ValueError" in str(record.exc_info[0])]
    assert "taken for a consequence of a broken world (a rank was lost)" in shown.getMessage()
    assert "the snapshot failed" in caplog.text
    assert alone._strategy.leave_world.call_count == (2 if errors == 1 else 3)


def test_ranks_that_are_lost_in_a_recovery_do_not_count_against_its_step(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be processes that join, and die again and again."""
    alone.standing, error = Standing.MEMBER, dist.DistNetworkError("reset")
    members = SimpleNamespace(ids=("a", "b"))
    plan, repair = MagicMock(stale=()), MagicMock()
    join = MagicMock(side_effect=[error] * 5 + [(plan, repair)])
    for name, value in (("_require_members", lambda: members), ("_join_and_transfer", join)):
        monkeypatch.setattr(alone, name, value)
    alone._strategy.leave_world = lambda: None
    alone._recover(error)
    assert join.call_count == 6


@pytest.mark.parametrize("faults", [0, 1])
def test_a_second_fit_of_a_restarted_process_is_trained(
    alone: Any, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    """Also if a rank is lost in its first step: the ranks that are left have the state."""
    found: list[bool] = []
    monkeypatch.setattr(alone, "_recover", lambda fault: found.append(alone.is_newcomer))
    alone.run(RecoveryPolicy(sources=MagicMock()), lambda: None)
    alone.engine.task.starts = 2
    left = [dist.DistNetworkError("reset")] * faults
    fits: list[str] = []

    def fit() -> None:
        if left:
            raise left.pop()
        fits.append("done")

    alone.run(RecoveryPolicy(sources=MagicMock()), fit)
    assert (fits, found) == (["done"], [False] * faults)


def test_a_change_that_is_agreed_in_the_last_step_of_a_fit_is_not_of_the_next(alone: Any) -> None:
    found: list[bool] = []

    def fit() -> None:
        found.append(alone.change_is_due)
        alone.change_is_due = True

    for _ in range(2):
        alone.run(RecoveryPolicy(), fit)
    assert found == [False, False]


@pytest.mark.parametrize(
    ("starts", "fails", "version", "standings"),
    [
        (1, False, 0, []),
        (2, False, 0, [Standing.NEWCOMER]),
        (1, True, 0, [Standing.NEWCOMER]),
        (1, True, 5, [Standing.MEMBER]),
    ],
    ids=["nothing was lost", "a world was lost", "a rank was lost", "a rank of a resumed run was lost"],
)
def test_who_restores_before_its_first_step(
    alone: Any, monkeypatch: pytest.MonkeyPatch, starts: int, fails: bool, version: int, standings: list[Standing]
) -> None:
    """Standing of a rank in each recovery before its first step.

    Args:
        starts: of the process in its place.
        fails: a rank is lost before all know whether they follow a lost world.
        version: step that the fit begins with.
    """
    found: list[Standing] = []

    def recover(fault: BaseException | None) -> None:
        found.append(alone.standing)
        alone.standing = Standing.MEMBER
        monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda value, _: [value])

    monkeypatch.setattr(alone, "_recover", recover)
    if fails:
        lost = MagicMock(side_effect=dist.DistNetworkError("reset"))
        monkeypatch.setattr(elastic_worlds, "all_gather_json", lost)
    alone.engine.task.starts, alone.step = starts, MagicMock(version=version)
    alone.run(RecoveryPolicy(sources=MagicMock()), lambda: None)
    assert (found, alone.standing) == (standings, Standing.MEMBER)


@pytest.mark.parametrize(("fits", "error"), [((2, 2), None), ((1, 2), Preempted), ((3, 2), WorldAbortedError)])
def test_a_process_that_starts_a_script_anew_joins_no_later_fit(
    monkeypatch: pytest.MonkeyPatch, fits: tuple[int, int], error: type[Exception] | None
) -> None:
    """Fits that this process and another rank of its new world have begun."""
    engine = MagicMock()
    engine.task.starts, engine.task.settings.min_ranks = 1, 1
    world = SimpleNamespace(size=2, rank=0, is_connected=False)
    strategy: Any = MagicMock(worlds=Worlds())
    monkeypatch.setattr(Worlds, "present", world)
    for name in ("set_up_data", "leave_schedule"):
        monkeypatch.setattr(elastic_worlds, name, MagicMock())
    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda own, _: [own, own])
    elastic = ElasticWorlds(strategy, engine)
    elastic.members, elastic.step = MagicMock(), MagicMock(version=0)
    for _ in range(fits[0]):
        elastic.run(RecoveryPolicy(), lambda: None)
    monkeypatch.setattr(elastic_worlds, "all_gather_json", lambda own, _: [own, fits[1]])
    monkeypatch.setattr(elastic, "_join", lambda *_, **__: world)
    monkeypatch.setattr(elastic, "_recovery", MagicMock(**{"recover.side_effect": Planned}))
    with pytest.raises(error or Planned) as raised:
        elastic._join_and_transfer(MagicMock())
    assert is_world_fault(raised.value, None) == (error is WorldAbortedError)
    assert engine.withdraw_if_early.called == (error is Preempted)


class Planned(Exception):
    """All ranks of the world are in the same fit."""


class Waiting(FixedWorld):
    """World of a process that was started again while the others train."""

    is_newcomer = True


class Late(ExpertParallelStrategy):
    def setup_distributed(self) -> None:
        self.worlds.allow_changes()
        self.elastic = Waiting()
        self.set_present(World.offline(1, 2, self.root_device, self.worlds.layout([0, 0])))


class Evaluated(OwnModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step


def test_a_process_that_waits_to_join_evaluates_nothing() -> None:
    """It has no peers to evaluate with."""
    trainer, module, loader = quiet_trainer(strategy=Late(), devices=1), Evaluated(), DataLoader(RandomTokens(8), 4)
    assert trainer.validate(module, loader) == trainer.test(module, loader) == trainer.predict(module, loader) == []
    assert "run" not in {**vars(trainer.validate_loop), **vars(trainer.test_loop), **vars(trainer.predict_loop)}


@pytest.fixture
def pair() -> Iterator[list[RendezvousClient]]:
    """Two clients whose first world waits for both."""
    with RendezvousServer() as host, ExitStack() as stack:
        settings = ElasticSettings(join_window_s=0.1)
        where = {"address": str(host.address), "secret_file": str(host.secret_file), "node": "a"}
        task = ElasticTask(**where, expected=2, settings=settings)
        yield [stack.enter_context(closing(RendezvousClient(replace(task, token=name)))) for name in "xy"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_who_sets_up_keeps_out_of_a_world_that_trains(pair: list[RendezvousClient], is_ready: bool) -> None:
    """The world that the ready one waited for is gone: both come to a first world at the same moment."""
    with ThreadPoolExecutor() as pool:
        worlds = list(pool.map(lambda client, ready: client.join(is_ready=ready), pair, (is_ready, False)))
        assert pair[1].withdraw_if_early() == is_ready
        if is_ready:
            pair[0].guard(worlds[0], lambda: None)
            assert pair[0].join(is_ready=True).size == 1, "it trains alone meanwhile"
            late = pool.submit(pair[1].join, is_ready=True)
            wait_until(pair[0].has_newcomers)
            assert (pair[0].join(is_ready=True).size, late.result().size) == (2, 2)


def test_ranks_whose_first_world_was_not_built_are_no_newcomers(
    pair: list[RendezvousClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has set up, so they build the next world."""
    monkeypatch.setattr(RendezvousClient, "wait_for_cause", lambda _: None)
    slow = [dist.DistNetworkError("only 1 of 2 ranks came to build their groups within 5 s")]

    def build(client: RendezvousClient, members: Any, errors: list[Exception]) -> Any:
        client.guard(members, lambda: None)
        if errors:
            raise errors.pop()
        return members

    with ThreadPoolExecutor() as pool:
        worlds = list(pool.map(lambda client: first_world(client, partial(build, client, errors=list(slow))), pair))
    assert [world and world.size for world in worlds] == [2, 2]
