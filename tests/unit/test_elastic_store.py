"""Keys of one world on the rendezvous host: requests that wait, against a model, and their cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning.elastic.protocol import WireError
from moe_lightning.elastic.rendezvous_host import WorldStore

KEYS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, 3), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["get", "set", "add", "check", "delete"]), st.integers(0, 3), KEYS.map(list)),
    st.tuples(st.just("close"), st.integers(0, 3), st.just([])),
)


def ask(store: WorldStore, connection: int, op: str, keys: list[str], n: int = 0) -> None:
    store.receive(connection, {"n": n, "number": 7, "op": op, "keys": keys, "value": "1"})


@given(st.lists(STEPS, max_size=30))
def test_a_request_waits_until_all_its_keys_are_set(steps: list[tuple[str, int, list[str]]]) -> None:
    store, present, waiting = WorldStore(), set[str](), dict[int, tuple[int, list[str]]]()
    store.begin(7)
    newest = dict(zip(range(4), range(4), strict=True))  # a connection that is closed never comes again
    for n, (op, client, keys) in enumerate(steps):
        connection = newest[client]
        store.outbox.clear()
        if op == "close":
            store.forget(connection)
            newest[client] += 4
            waiting = {number: wait for number, wait in waiting.items() if wait[0] != connection}
            continue
        ask(store, connection, op, keys, n)
        present = present | {*keys} if op in ("set", "add") else present - {*keys} if op == "delete" else present
        waiting[n] = connection, keys
        ready = {number for number, (_, wanted) in waiting.items() if present.issuperset(wanted)}
        ready |= {n} if op not in ("get", "wait") else set()
        assert sorted(answer["n"] for _, answer in store.outbox) == sorted(ready)
        assert all(waiting[answer["n"]][0] == connection for connection, answer in store.outbox)
        waiting = {number: wait for number, wait in waiting.items() if number not in ready}
    store.outbox.clear()
    store.begin(8)
    refused = [(connection, answer["n"]) for connection, answer in store.outbox if "error" in answer]
    assert {(connection, n) for n, (connection, _) in waiting.items()} <= {*refused}


def test_a_key_that_nobody_waits_for_costs_nothing_for_those_who_wait_for_another() -> None:
    class Counted(list[str]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            Counted.looks += 1
            return super().__iter__()

    store = WorldStore()
    store.begin(7)
    for connection in range(100):
        ask(store, connection, "wait", Counted(["id"]))
    asked = Counted.looks
    for connection in range(100):
        ask(store, connection, "set", [f"rank{connection}"])
    assert Counted.looks == asked
    ask(store, 0, "set", ["id"])
    assert [connection for connection, answer in store.outbox if answer["value"] is True] == [*range(100)]


def test_waits_of_one_connection_are_bounded() -> None:
    store = WorldStore()
    store.begin(7)
    for n in range(256):
        ask(store, 0, "wait", ["a"], n)
    with pytest.raises(WireError, match="more than 256 waits at once"):
        ask(store, 0, "wait", ["a"])
