"""The protocol of the control plane: only holders of the secret are heard, and nothing can be changed on the way."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.elastic import server
from moe_lightning.elastic.protocol import PROTOCOL, Address, Channel, Message, Refused, WireError, encode
from moe_lightning.elastic.server import WorldStore
from moe_lightning.errors import ConfigurationError

SECRET = b"s" * 64
MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)),
    max_size=6,
)


def greeted(client_secret: bytes = SECRET) -> tuple[Channel, Channel]:
    client, server = Channel(client_secret, is_server=False), Channel(SECRET, is_server=True)
    for _ in range(2):
        carry(client, server)
        carry(server, client)
    return client, server


def carry(source: Channel, target: Channel) -> list[Message]:
    data = bytes(source.outgoing)
    source.outgoing.clear()
    return target.receive(data)


@settings(max_examples=20)
@given(there=MESSAGES, back=MESSAGES, cut=st.integers(1, 50))
def test_messages_arrive_as_they_were_in_pieces_of_any_size(
    there: list[Message], back: list[Message], cut: int
) -> None:
    client, server = greeted()
    for source, target, messages in ((client, server, there), (server, client, back)):
        for message in messages:
            source.send(message)
        data, found = bytes(source.outgoing), []
        for start in range(0, len(data), cut):
            found += target.receive(data[start : start + cut])
        assert found == messages


def test_a_long_message_is_sent_in_fewer_bytes_once_for_many_channels() -> None:
    message: Message = {"nodes": [f"node-{number:04}" for number in range(4096)]}
    payload = encode(message)
    assert len(payload) < 0.2 * len(json.dumps(message))
    for _ in range(2):
        client, server = greeted()
        server.send_encoded(payload)
        assert carry(server, client) == [message]


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a"])
def test_what_no_resolver_takes_is_no_address(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"must be HOST:PORT, and .* is no name of a host"):
        Address.parse(f"{host}:29510")


def test_port_0_is_only_for_listeners() -> None:
    with pytest.raises(ConfigurationError, match="with a port of 1 to 65535"):
        Address.parse("host:0")
    assert Address.parse("host:0", least_port=0).port == 0


@pytest.mark.parametrize("text", ["[::1]:1", "[fe80::1%eth0]:1", "a_b:1", "host.:1", "bücher.example:1"])
def test_names_that_resolvers_take_are_addresses(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("payload", [b"\0", b"", zlib.compress(b"[1]"), zlib.compress(b" " * (8 << 20) + b"{}")])
def test_a_frame_of_no_message_is_refused(payload: bytes) -> None:
    """Not JSON, not compressed JSON, no object, and more than any message when it is decompressed."""
    client, server = greeted()
    server.send_encoded(payload)
    with pytest.raises(WireError, match=r"not JSON|not an object"):
        carry(server, client)


def test_another_secret_is_refused_by_the_client_and_told_to_the_user() -> None:
    with pytest.raises(Refused, match="its secret differs: give every machine the same secret_file"):
        greeted(b"t" * 64)


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    client, server = greeted()
    client.send({"t": "died", "token": "x"})
    frame = bytearray(client.outgoing)
    place = data.draw(st.integers(4, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError, match="did not write"):
        server.receive(bytes(frame))


def test_frames_can_be_neither_replayed_nor_left_out_nor_sent_back_nor_taken_elsewhere() -> None:
    client, server = greeted()
    client.send({"n": 1})
    first = bytes(client.outgoing)
    client.outgoing.clear()
    client.send({"n": 2})
    second = bytes(client.outgoing)
    assert server.receive(first) == [{"n": 1}]
    for target, frame in ((server, first), (client, second), (greeted()[1], first)):
        with pytest.raises(WireError, match="did not write"):
            target.receive(frame)
    _, fresh = greeted()
    with pytest.raises(WireError, match="did not write"):
        fresh.receive(second)


@given(st.binary(max_size=600))
def test_strangers_bytes_are_refused_or_waited_for(garbage: bytes) -> None:
    server = Channel(SECRET, is_server=True)
    with suppress(WireError):
        assert server.receive(garbage) == []
    assert not server.is_open


@pytest.mark.parametrize(
    "greeting",
    [
        {"moe-lightning": PROTOCOL, "nonce": "\ud800" * 32},
        {"moe-lightning": PROTOCOL, "nonce": "a b"},
        {"moe-lightning": PROTOCOL, "nonce": ""},
        {"proof": "00"},
        {"t": "died", "token": "x", "how": "y"},
    ],
)
def test_greetings_that_are_none(greeting: Message) -> None:
    with pytest.raises(WireError):
        Channel(SECRET, is_server=True).receive(framed(greeting))


def test_a_proof_that_is_none_is_refused() -> None:
    server = Channel(SECRET, is_server=True)
    server.receive(framed({"moe-lightning": PROTOCOL, "nonce": "0" * 32}))
    with pytest.raises(Refused, match="the secrets differ"):
        server.receive(framed({"proof": "\ud800"}))


def test_another_version_is_told_to_both() -> None:
    server, client = Channel(SECRET, is_server=True), Channel(SECRET, is_server=False)
    with pytest.raises(Refused, match=f"protocol 99 meets {PROTOCOL}:"):
        server.receive(framed({"moe-lightning": 99, "nonce": "0" * 32}))
    with pytest.raises(Refused, match="install the same moe-lightning everywhere"):
        carry(server, client)


def test_before_the_proof_only_a_few_hundred_bytes_are_taken() -> None:
    with pytest.raises(WireError, match="a frame of 513 bytes"):
        Channel(SECRET, is_server=True).receive(struct.pack(">I", 513))


@pytest.mark.parametrize("payload", [b"[" * 100_000, b'{"a": NaN}', b"[]", b"\xff"])
def test_payloads_that_are_no_messages(payload: bytes) -> None:
    client, server = greeted()
    mac = client._mac(client._key_out, 0, payload)
    with pytest.raises(WireError, match="a frame that is no"):
        server.receive(struct.pack(">I", len(payload) + len(mac)) + mac + payload)


def framed(said: Message) -> bytes:
    payload = json.dumps(said).encode()
    return struct.pack(">I", len(payload)) + payload


# ----------------------------------------------------------------------
# Keys of one world on the rendezvous host: requests that wait, against a model, and their cost.


KEYS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, 3), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["get", "set", "add", "check", "delete"]), st.integers(0, 3), KEYS.map(list)),
)


def ask(store: WorldStore, connection: int, op: str, keys: list[str], n: int = 0, value: str = "1") -> None:
    store.receive(connection, {"n": n, "number": 7, "op": op, "keys": keys, "value": value})


@given(st.lists(STEPS, max_size=30))
def test_a_request_waits_until_all_its_keys_are_set(steps: list[tuple[str, int, list[str]]]) -> None:
    store, present, waiting = WorldStore([]), set[str](), dict[int, tuple[int, list[str]]]()
    store.begin(7)
    for n, (op, connection, keys) in enumerate(steps):
        store.outbox.clear()
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

    store = WorldStore([])
    store.begin(7)
    for connection in range(100):
        ask(store, connection, "wait", Counted(["id"]))
    asked = Counted.looks
    for connection in range(100):
        ask(store, connection, "set", [f"rank{connection}"])
    assert Counted.looks == asked
    ask(store, 0, "set", ["id"])
    assert [connection for connection, answer in store.outbox if answer["value"] is True] == [*range(100)]


def test_deleting_what_is_not_there_gives_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_BYTES", 100)
    store = WorldStore([])
    store.begin(7)
    ask(store, 0, "delete", ["k" * 1000])
    with pytest.raises(WireError, match="more than 100 bytes"):
        ask(store, 0, "set", ["k" * 101])


def test_only_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_BYTES", 100)
    store = WorldStore([])
    store.begin(7)
    ask(store, 0, "set", ["a"], value="v" * 90)
    with pytest.raises(WireError, match="more than 100 bytes"):
        ask(store, 0, "set", ["b"], value="v" * 90)
    ask(store, 0, "set", ["a"], value="w" * 90)
    ask(store, 0, "add", ["c"], value="1")
    assert store._values == {"a": "w" * 90, "c": "1"}
