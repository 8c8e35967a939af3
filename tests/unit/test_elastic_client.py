"""State of a rendezvous client against calls and messages in any order, foreign and late ones among them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.elastic.client_state import ClientState, JoinedWorld, WorldTooSmall
from moe_lightning.elastic.membership import (
    ElasticSettings,
    ElasticTask,
    Members,
    new_member_id,
    new_token,
    node_of,
)
from moe_lightning.elastic.protocol import Message, WireError, encode
from moe_lightning.errors import ConfigurationError

PATIENCE = ElasticSettings(join_window_s=1.0, join_timeout_s=60.0, rendezvous_timeout_s=9.0)
DEAD_LINK: Message = {"t": "evicted", "reason": "the link is dead", "probes": {"node-1": ["10.0.0.1", 7]}}
PEERS = [f"{index:020}.node-{index}.peer-{index}" for index in range(1, 4)]


def client() -> ClientState:
    return ClientState(ElasticTask(address="none", secret_file="none", node="me", birth_ns=0, settings=PATIENCE))


def test_who_comes_later_is_younger_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ElasticTask(address="none", secret_file="none", node="me")
    first = ClientState(task)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    again = ElasticTask.from_environment(replace(task, starts=2, token=new_token()).to_environment())
    assert again is not None
    later = ClientState(again)
    assert first.member_id < later.member_id
    first.rename()
    assert first.member_id > later.member_id


def formed(state: ClientState, number: int, peers: list[str], *, is_inside: bool = True) -> Message:
    ids = [*([state.member_id] if is_inside else []), *peers]
    probes = {node_of(member_id): ["10.0.0.1", 7] for member_id in ids}
    return {"t": "formed", "number": number, "members": ids, "probes": probes, "has_set_up": False}


EVENTS = st.one_of(
    st.tuples(st.just("join"), st.booleans(), st.booleans()),
    st.tuples(st.just("formed"), st.integers(1, 6), st.sets(st.sampled_from(PEERS)), st.booleans()),
    st.tuples(st.just("broken"), st.integers(1, 6), st.integers(1, 3)),
    st.tuples(st.just("waiting"), st.integers(0, 2)),
    st.tuples(st.just("finished"), st.integers(0, 3)),
    st.tuples(st.just("links"), st.frozensets(st.sampled_from(["node-1", "node-2"])), st.booleans()),
    st.tuples(st.sampled_from(["guard", "abort", "evicted", "rename", "beat", "connect", "withdraw", "step"])),
)


def play(state: ClientState, event: Any, now: float) -> None:
    """Let one event happen, if a worker could cause it."""
    match event:
        case ("join", is_ready, is_spare):
            state.start_join(is_ready=is_ready, is_spare=is_spare)
        case ("formed", number, peers, is_inside):
            state.receive(formed(state, number, sorted(peers), is_inside=is_inside), now)
        case ("broken", number, rating):
            state.receive({"t": "broken", "number": number, "reason": f"{number} {rating}", "rating": rating}, now)
        case ("waiting", count):
            state.receive({"t": "waiting", "count": count}, now)
        case ("finished", count):
            state.receive({"t": "finished", "finished": count}, now)
        case ("links", nodes, is_connected) if state.is_training:
            state.report_links(nodes, now, is_connected=is_connected)
        case ("guard",) if state.world is not None and state.world is not state.guarded:
            state.guard(state.world.members)
        case ("abort",):
            state.abort("felt", now)
        case ("evicted",):
            state.receive({"t": "evicted", "reason": "silent", "probes": {}}, now)
        case ("rename",) if state.may_return:
            state.rename()
        case ("beat",):
            state.beat(now)
        case ("connect",):
            check_introduction(state)
        case ("withdraw",):
            state.withdraw_if_early(now)
        case ("step",):
            state.record_progress()


def check_introduction(state: ClientState) -> None:
    """A host that was restarted learns the world from it, if this process is in it."""
    for is_full in (False, True):
        reported = state.introduction(("10.0.0.9", 9), is_full=is_full)["world"]
        world = state.world
        if world is None or state.member_id not in world.members.ids:
            assert reported is None
            continue
        assert reported["number"] == world.members.number
        assert reported.get("broken") == world.reason
        assert ("members" in reported) == is_full
        if is_full:
            assert reported["members"] == world.members.ids


def test_a_long_reason_fits_into_messages() -> None:
    state = client()
    state.receive(formed(state, 1, PEERS), 0.0)
    state.guard(state.world.members)
    state.abort("x" * 5_000_000, 0.0)
    for message in (state.outbox[-1], state.introduction(None)):
        assert len(encode(message)) < 10_000


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 2)), max_size=40))
def test_any_order_of_events(history: list[tuple[Any, float]]) -> None:
    state, now = client(), 0.0
    known: dict[int, tuple[str, ...]] = {}
    aborts: dict[int, int] = {}  # since the world was guarded
    before: dict[int, tuple[int, float | None]] = {}
    for event, seconds in history:
        now += seconds
        number = state.world.members.number if state.world else 0
        guarded = state.guarded
        play(state, event, now)
        world = state.world
        if world is not None:
            assert world.members.number >= number, "numbers grow"
            assert known.setdefault(world.members.number, world.members.ids) == world.members.ids
        if state.guarded is not guarded:
            aborts[state.guarded.members.number] = 0
        for each in state.broken:
            aborts[each] = aborts.get(each, 0) + 1
        state.broken.clear()
        for each in filter(None, (state.world, state.guarded)):
            check_break(each, before)
        if state.guarded is not None:
            expected = int(state.guarded.broken_at is not None)
            assert aborts[state.guarded.members.number] == expected, "aborted once, and only if it broke"
        assert not (state.is_training and state.exceeded_limit_s(now) is not None)
    check_sent(state)


def check_break(world: JoinedWorld, before: dict[int, tuple[int, float | None]]) -> None:
    """A break stays, and its reason only gets better."""
    number = world.members.number
    rating, broken_at = before.get(number, (0, None))
    assert world.rating >= rating
    assert broken_at is None or world.broken_at == broken_at
    assert (world.reason is None) == (world.broken_at is None)
    before[number] = (world.rating, world.broken_at)


def check_sent(state: ClientState) -> None:
    """A change of the dead links is told once, a break by its first cause alone."""
    kinds = [message["t"] for message in state.outbox]
    assert set(kinds) <= {"join", "beat", "unreachable", "broken", "withdraw"}
    broken = [message["number"] for message in state.outbox if message["t"] == "broken"]
    assert len(broken) == len(set(broken))


def test_a_late_message_of_a_former_world_changes_nothing() -> None:
    state = client()
    state.receive(formed(state, 5, PEERS), 0.0)
    world = state.world
    state.receive(formed(state, 4, PEERS[:1]), 0.0)
    state.receive({"t": "broken", "number": 4, "reason": "old", "rating": 3}, 0.0)
    assert state.world is world
    assert world.broken_at is None
    with pytest.raises(WireError, match="malformed members"):
        state.receive(formed(state, 6, PEERS) | {"members": [5]}, 0.0)


def test_a_process_ends_where_the_others_have_finished_without_it() -> None:
    state = client()
    state.receive({"t": "state", "finished": 2, "exists": True}, 0.0)
    state.start_join(is_ready=True, is_spare=False)
    assert not state.is_unneeded()
    state.receive({"t": "finished", "finished": 3}, 0.0)
    assert state.is_unneeded()
    state.receive(formed(state, 5, PEERS), 0.0)
    state.guard(state.world.members)
    assert not state.is_unneeded(), "it is in a world, and may hold state"
    state.receive({"t": "spare"}, 0.0)
    assert state.is_unneeded()
    assert state.is_finish_known
    state.finish()
    assert not state.is_finish_known
    assert state.introduction(None)["finished"] == 5, "to a host that is restarted meanwhile"
    state.receive({"t": "finished", "finished": 5}, 0.0)
    assert state.is_finish_known
    assert not state.is_unneeded(), "they finished with it"
    state.start_join(is_ready=True, is_spare=True)
    state.receive(formed(state, 7, PEERS), 0.0)
    assert not state.is_late(), "they train again, now with it"
    state.receive({"t": "finished", "finished": 8}, 0.0)
    assert state.is_late(), "they finished another run without it"
    state.receive({"t": "spare"}, 0.0)
    assert state.is_unneeded()


def test_each_run_that_a_process_finishes_in_one_world_has_a_number_of_its_own() -> None:
    """A process that registered between two of them learns of the second one's end."""
    state = client()
    state.receive({"t": "state", "finished": 0, "exists": False}, 0.0)
    state.receive(formed(state, 5, PEERS), 0.0)
    for number in (5, 6):
        state.finish()
        assert state.introduction(None)["finished"] == number
        assert state.outbox[-1] == {"t": "finish", "number": number}


def test_the_host_knows_whether_a_process_trains_or_has_finished() -> None:
    state = client()
    state.begin_fit()
    state.receive(formed(state, 5, PEERS), 0.0)
    state.guard(state.world.members)
    state.begin_fit()
    assert (state.outbox, state.introduction(None)["done"]) == ([], False)
    state.finish()
    assert state.introduction(None)["done"], "to a host that is restarted meanwhile"
    state.begin_fit()
    state.begin_fit()
    assert [message["t"] for message in state.outbox] == ["finish", "begin"]
    assert not state.introduction(None)["done"]


def test_the_host_knows_whether_a_process_that_has_finished_calls_the_trainer_again() -> None:
    """Others may wait for it in a validation, not in an export."""
    state = client()
    state.receive(formed(state, 5, PEERS), 0.0)
    state.guard(state.world.members)
    for is_running in (True, False, True):
        state.record_call(is_running=is_running)
    assert state.outbox == [], "it has finished nothing"
    state.finish()
    state.record_call(is_running=False)
    for is_running in (True, False):
        state.record_call(is_running=is_running)
        assert state.introduction(None)["done"] is not is_running
    words = [(message["t"], message.get("number")) for message in state.outbox]
    assert words == [("finish", 5), ("begin", None), ("finish", 5)]
    state.record_call(is_running=True)
    state.begin_fit()
    assert [message["t"] for message in state.outbox[3:]] == ["begin"]
    assert state.exceeded_limit_s(0.0) is None


def test_waiting_has_limits() -> None:
    state = client()
    state.start_join(is_ready=False, is_spare=False)
    state.check_wait(0.0, 60.0)
    with pytest.raises(WorldTooSmall, match="no world within 60 s"):
        state.check_wait(0.0, 60.1)
    state.receive({"t": "spare"}, 0.0)
    state.check_wait(0.0, 1e6)


def test_who_is_left_out_for_a_dead_link_returns_when_the_nodes_answer() -> None:
    state = client()
    state.start_join(is_ready=True, is_spare=False)
    state.receive(DEAD_LINK, 10.0)
    state.check_wait(9.0, 19.0)
    assert not state.may_return
    state.end_probes()
    assert state.may_return
    state.rename()
    state.check_wait(9.0, 1e6)


def test_who_is_left_out_for_a_dead_link_returns_once_though_no_node_answers() -> None:
    """The node behind it may have ended, or have been started again elsewhere; again after each step."""
    state = client()
    state.start_join(is_ready=True, is_spare=False)
    for evicted_at in (10.0, 110.0):
        state.start_join(is_ready=True, is_spare=False)
        state.receive(DEAD_LINK, evicted_at)
        state.check_wait(evicted_at, evicted_at + 9.1)
        assert state.may_return
        state.rename()
        state.receive(formed(state, int(evicted_at), PEERS), evicted_at + 20.0)
        state.record_progress()
    state.start_join(is_ready=True, is_spare=False)
    state.receive(DEAD_LINK, 210.0)
    state.check_wait(210.0, 219.1)
    state.rename()
    state.receive(formed(state, 210, PEERS), 220.0)
    state.start_join(is_ready=True, is_spare=True)
    state.check_wait(221.0, 221.0)
    state.start_join(is_ready=True, is_spare=False)  # its world is broken, by an eviction or an error
    with pytest.raises(ConfigurationError, match="the link is dead: repair it"):
        state.check_wait(222.0, 222.0)


def test_a_process_that_has_set_up_waits_through_a_long_validation_of_the_others() -> None:
    state = client()
    state.start_join(is_ready=True, is_spare=False)
    state.check_wait(0.0, 1e6)
    state.receive(formed(state, 5, PEERS), 0.0)
    state.guard(state.world.members)
    state.start_join(is_ready=True, is_spare=False)
    with pytest.raises(WorldTooSmall, match="no world within 60 s"):
        state.check_wait(0.0, 60.1)


@pytest.mark.parametrize("attempts", [1, 2])
def test_who_has_withdrawn_from_a_world_that_trains_waits_as_one_outside_of_it(attempts: int) -> None:
    state = client()
    state.receive({"t": "state", "finished": 0, "exists": False}, 0.0)
    state.start_join(is_ready=False, is_spare=False)
    if attempts == 2:  # groups of a first world were not built
        state.receive(formed(state, 4, PEERS), 0.0)
        state.guard(state.world.members)
        state.abort("not in time", 0.0)
        state.start_join(is_ready=False, is_spare=False)
    state.receive(formed(state, 5, PEERS) | {"has_set_up": True}, 0.0)
    assert state.withdraw_if_early(0.0)
    state.start_join(is_ready=True, is_spare=False)
    state.check_wait(0.0, 1e6)
    assert state.is_dispensable, "it may leave on a notice"
    state.receive({"t": "finished", "finished": 5}, 0.0)
    assert state.is_unneeded()


def test_who_repeats_the_end_of_a_training_waits_for_those_that_have_finished_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They may export for longer than any limit, and end with the run if it ends with a mistake."""
    state = client()
    state.receive({"t": "state", "finished": 3, "exists": False}, 0.0)
    state.receive(formed(state, 5, PEERS), 0.0)
    state.guard(state.world.members)
    state.receive({"t": "broken", "number": 5, "reason": "one died", "rating": 3}, 0.0)
    state.start_join(is_ready=True, is_spare=False)
    with pytest.raises(WorldTooSmall, match="no world within 60 s"):
        state.check_wait(0.0, 60.1)
    assert not state.is_dispensable
    state.receive({"t": "finished", "finished": 5}, 0.0)
    state.check_wait(0.0, 60.0)
    assert caplog.messages == []
    assert state.is_dispensable, "on a notice it leaves: the others have saved what is left of the run"
    for now in (60.1, 1e6):
        state.check_wait(0.0, now)
    (line,) = caplog.messages
    assert line.startswith("this rank waits for others to end, on nodes node-1, node-2, node-3, which have finished")
    assert not state.is_unneeded(), "it may hold state, and has to export"


def test_newcomers_of_one_moment_join_together() -> None:
    state = client()
    state.receive({"t": "waiting", "count": 1}, 5.0)
    state.receive({"t": "waiting", "count": 2}, 5.9)
    assert [state.has_newcomers(now) for now in (5.9, 6.0)] == [False, True]
    state.receive({"t": "waiting", "count": 0}, 6.1)
    assert not state.has_newcomers(100.0)


def test_a_change_says_who_left_and_who_joined() -> None:
    a, b, c, d, *others = (new_member_id(node, "t", birth) for birth, node in enumerate("aabcdefg"))

    def after(*ids: str) -> Members:
        return Members(number=2, ids=ids, rank=0)

    assert after(a, b, c).change_from((a, b, c)) == ""
    assert after(a, b, c).change_from((a, b)) == "1 rank joins on node b"
    assert after(c).change_from((a, b, c)) == "2 ranks leave node a"
    assert after(b, d).change_from((a, b)) == "1 rank leaves node a, 1 rank joins on node c"
    assert after(a, *others).change_from((a, b)).endswith("1 rank joins on node f, ...")
