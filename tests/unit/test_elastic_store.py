"""What goes through the store: the news, the ring of heartbeats, knocks, and torch's rendezvous state as JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from moe_lightning.elastic.membership import Members, new_member_id, node_of, token_of
from moe_lightning.elastic.news import News
from moe_lightning.elastic.rendezvous import _from_json, _to_json
from moe_lightning.elastic.watches import KNOCK_S, Knocks, Ring


def test_news_are_read_once_and_in_order() -> None:
    store = dist.HashStore()
    writer, reader = News(store), News(store)
    assert reader.read() == []
    writer.tell("arrived", member="a")
    writer.tell("formed", world="w", ids=["a", "b"])
    assert reader.read() == [
        {"kind": "arrived", "member": "a"},
        {"kind": "formed", "world": "w", "ids": ["a", "b"]},
    ]
    assert reader.read() == []
    writer.tell("left", member="a")
    assert reader.read() == [{"kind": "left", "member": "a"}]


def test_lines_that_are_no_news_are_passed_over() -> None:
    store = dist.HashStore()
    reader = News(store)
    prefixed = dist.PrefixStore("news", store)
    for text in ("no json\n", "[1]\n", '{"kind": 3}\n', '{"kind": "died", "token": "t", "how": {"a": 1}}\n'):
        prefixed.append("lines", text)
    prefixed.append("lines", '{"kind": "le')  # torn
    prefixed.add("count", 1)
    assert reader.read() == [{"kind": "died", "token": "t"}]
    prefixed.append("lines", 'ft"}\n')
    prefixed.add("count", 1)
    assert reader.read() == [{"kind": "left"}]


def members(me: int, size: int) -> Members:
    return Members(name="w", ids=tuple(f"{rank}.n{rank}.t" for rank in range(size)), me=me)


def test_the_ring_finds_who_is_silent() -> None:
    store = dist.HashStore()
    rings = {rank: Ring(members(rank, 4), 1.0, 0.0) for rank in range(4)}
    found = []
    for tick in range(60):
        now = tick * 0.1
        alive = [rank for rank in rings if rank != 2 or now < 2.0]
        found += [(now, rank, silent) for rank in alive if (silent := rings[rank].silent_rank(store, set(), now))]
    assert {(watcher, silent) for _, watcher, silent in found} == {(3, 2)}
    assert 2.8 < found[0][0] < 3.3, "within the timeout and a beat"


def test_the_ring_closes_around_ranks_that_left() -> None:
    store = dist.HashStore()
    ring = Ring(members(3, 4), 1.0, 0.0)
    silent = [ring.silent_rank(store, {1, 2}, tick * 0.1) for tick in range(20)]
    assert set(silent) == {None, 0}
    alone = Ring(members(3, 4), 1.0, 0.0)
    assert {alone.silent_rank(store, {0, 1, 2}, tick * 0.1) for tick in range(20)} == {None}


def knocked(window_s: float, knocks: list[bool]) -> list[bool]:
    """Whether the world lets somebody in, tick by tick, while a newcomer knocks or does not."""
    store = dist.HashStore()
    inside, outside = Knocks(), Knocks()
    answers = []
    for tick, knocking in enumerate(knocks):
        now = 10 + tick * KNOCK_S
        outside.step(store, knocking, now)
        inside.step(store, False, now)
        answers.append(inside.have_lasted(window_s, now))
    return answers


def test_who_knocks_for_the_window_is_let_in() -> None:
    answers = knocked(1.0, [False] + [True] * 8)
    assert answers == [False] * 5 + [True] * 4


def test_a_single_knock_is_not_enough_even_without_a_window() -> None:
    assert not any(knocked(0.01, [False, True] + [False] * 8))
    assert any(knocked(0.01, [False, True, True]))


def test_who_stops_knocking_is_forgotten() -> None:
    answers = knocked(1.0, [False] + [True] * 8 + [False] * 6)
    assert answers[8]
    assert not any(answers[-2:])


def test_the_last_knocks_of_members_are_no_newcomers() -> None:
    store = dist.HashStore()
    inside, slow = Knocks(), Knocks()
    inside.forget(10.0, settle_s=1.0)
    answers = []
    for tick in range(12):
        now = 10 + tick * KNOCK_S
        if tick < 5:  # another member, whose join ends later
            slow.step(store, True, now)
        inside.step(store, False, now)
        answers.append(inside.have_lasted(0.1, now))
    assert not any(answers)


def test_names_of_members_sort_by_birth_and_keep_node_and_token() -> None:
    names = [new_member_id("host.example.org", f"{i:x}") for i in range(20, 0, -1)]
    assert names == sorted(names)
    assert {node_of(name) for name in names} == {"host.example.org"}
    assert [token_of(name) for name in names] == [f"{i:x}" for i in range(20, 0, -1)]
    world = Members(name="w", ids=tuple(names), me=3)
    assert (world.rank, world.size, set(world.nodes)) == (3, 20, {"host.example.org"})


NAMES = st.sets(st.text(min_size=1, max_size=5), max_size=4)


@settings(deadline=None, max_examples=50)
@given(
    participants=NAMES, waiting=NAMES, number=st.integers(0, 10**6), complete=st.booleans(), seconds=st.floats(0, 4e9)
)
def test_the_rendezvous_state_survives_json(
    participants: set[str], waiting: set[str], number: int, complete: bool, seconds: float
) -> None:
    state = _RendezvousState()
    moment = datetime.fromtimestamp(seconds, UTC)
    state.round, state.complete, state.deadline = number, complete, moment if complete else None
    state.participants = {_NodeDesc(name, 0, 0): rank for rank, name in enumerate(sorted(participants))}
    state.wait_list = {_NodeDesc(name, 0, 0) for name in waiting}
    state.last_heartbeats = {_NodeDesc(name, 0, 0): moment for name in waiting | participants}
    again = _from_json(_to_json(state))
    assert vars(again).keys() == vars(state).keys()
    for name, value in vars(state).items():
        if name not in ("deadline", "last_heartbeats"):
            assert getattr(again, name) == value, name
    assert again.last_heartbeats.keys() == state.last_heartbeats.keys()
    assert all(abs(beat - moment) < timedelta(milliseconds=1) for beat in again.last_heartbeats.values())


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"round": "x"}), "\x80\x04."])
def test_a_damaged_rendezvous_state_is_named(text: str) -> None:
    with pytest.raises(RuntimeError, match="damaged"):
        _from_json(text)
