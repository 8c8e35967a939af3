"""Lines that pass every checksum and signature, and that nothing of ours wrote: tables of snapshots, and what members
and launchers tell the rendezvous host. One sentence each, and nobody else is harmed."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.checkpoint.arena import Arena, SnapshotIndex, arena_path
from moe_lightning.checkpoint.loader import find_usable
from moe_lightning.checkpoint.memory import local_inventory, protected_tables
from moe_lightning.elastic.protocol import Message, WireError
from moe_lightning.elastic.rendezvous_state import RendezvousState
from moe_lightning.errors import CheckpointError
from tests.unit.checkpoint_state import Node, node

HUGE = 2**63
WRONG: list[Any] = [None, True, -7, HUGE, 10**30, 1.5, "x", "", [], {}, [[1]], {"a": 1}, "\ud800", "y" * 10_000]
DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        made.snapshot(1)
        yield made


def table_of(made: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.ranks[0].arena.tables()[0].dump())
    return found


def forged(table: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(what was forged, the table)."""
    for name in table:
        for wrong in WRONG:
            yield f"{name}={wrong!r}"[:60], json.dumps(table | {name: wrong}).encode()
        yield f"without {name}", json.dumps({k: v for k, v in table.items() if k != name}).encode()
    first = table["placed"][0]
    for part, names in {"piece": first, "block": first["block"], "location": first["location"]}.items():
        for name, wrong in itertools.product(names, [*WRONG, "missing"]):
            other = copy.deepcopy(table)
            entry = other["placed"][0] if part == "piece" else other["placed"][0][part]
            if wrong == "missing":
                del entry[name]
            else:
                entry[name] = wrong
            yield f"{part} {name}={wrong!r}"[:60], json.dumps(other).encode()
    yield "deep", DEEP
    yield "deep inside", json.dumps(table | {"extra": "@"}).encode().replace(b'"@"', DEEP)
    yield "a long number", json.dumps(table | {"step": "@"}).encode().replace(b'"@"', b"1" * 5000)
    yield "no object", b"[1]"
    yield "no text", b"\xff\xfe"


FREE = (
    "run=", "session=", "extra=", "piece key=", "piece group=", "world=0", "rank=0", "without extra", "without world",
    "placed=[]", "piece due='missing'", "location file=", "location offset='missing'", "location length='missing'",
)  # fmt: skip
"""Any text, or any object, will do there."""


def refusal(data: bytes, memory_bytes: int) -> str | None:
    try:
        SnapshotIndex.parse(data, "arena 0", memory_bytes=memory_bytes)
    except CheckpointError as error:
        return str(error)
    return None


def test_a_forged_table_is_one_sentence(made: Node) -> None:
    table, memory_bytes = table_of(made), made.ranks[0].arena.memory.numel()
    said = {what: refusal(data, memory_bytes) for what, data in forged(table)}
    assert not [what for what, sentence in said.items() if sentence is None and not what.startswith(FREE)]
    sentences = [sentence for sentence in said.values() if sentence is not None]
    assert len(sentences) > 100
    for sentence in sentences:
        assert sentence.startswith("arena 0 was written by something else: ")
        assert "\n" not in sentence
        assert len(sentence) < 300
    assert SnapshotIndex.parse(json.dumps(table | {"new": 1}).encode(), "arena 0").step == 1


def test_an_arena_with_a_forged_table_is_passed_over(made: Node, caplog: pytest.LogCaptureFixture) -> None:
    made.persist()
    made.snapshot(2)
    path = arena_path(made.arenas, 0)
    writer, data = Arena(path), json.dumps(table_of(made) | {"placed": [7]}).encode()
    for index in range(3):
        writer._write_record(writer._table_at + index * writer.table_bytes, data)
    writer.close()
    with caplog.at_level(logging.WARNING):
        assert {snapshot.writer for snapshot in local_inventory(made.arenas, "run")} == {1}
    assert any(f"{path} was written by something else" in record.message for record in caplog.records)
    made.agent.serve_once()
    found = find_usable(made.root)
    assert found.checkpoint.step == 1


def test_a_forged_parity_is_one_sentence(made: Node) -> None:
    table = made.ranks[0].arena.tables()[0]
    for tables in (*WRONG, [DEEP.decode()], ["{}"], ["\ud800"]):
        if tables == []:
            continue
        with pytest.raises(CheckpointError, match="the parity of rank 0 was written by something else"):
            protected_tables(SnapshotIndex(**{**vars(table), "extra": {"tables": tables}}))


WORLD = {"number": 5, "ids": ["a.0.x", "a.1.y"], "patience": [1.0, 2.0, 3.0]}
MEMBER: Message = {
    "t": "member", "id": "a.0.x", "expected": 2, "patience": [1.0, 2.0, 3.0], "probe": ["127.0.0.1", 80],
    "joining": True, "ready": True, "number": 0, "world": WORLD,
}  # fmt: skip
LINES: list[Message] = [
    MEMBER, {"t": "launcher"}, {"t": "died", "token": "x", "how": "y"}, {"t": "beat", "progress": 1},
    {"t": "join", "ready": True}, {"t": "leave"}, {"t": "withdraw", "reason": "r"},
    {"t": "broken", "number": 5, "reason": "r", "rating": 1}, {"t": "unreachable", "number": 5, "nodes": ["a"]},
    {"t": "finish", "number": "x"}, {"t": "begin"}, {"kind": "formed", "ids": ["x"]},
    {"t": "formed", "number": 9, "ids": ["x"]}, {},
]  # fmt: skip


def forged_lines() -> Iterator[Message]:
    yield from LINES[-3:]
    for line in LINES:
        for name in line:
            for wrong in WRONG:
                yield line | {name: wrong}
            yield {k: v for k, v in line.items() if k != name}
    for name in WORLD:
        for wrong in WRONG:
            yield MEMBER | {"world": WORLD | {name: wrong}}


def told(roster: RendezvousState, sender: int, line: Message) -> str | None:
    """Why the host gives up a connection that said this; None where it does not."""
    try:
        roster.receive(sender, line, 0.2)
    except WireError as error:
        roster.disconnect(sender, 0.2)
        return str(error)
    return None


def test_forged_lines_do_no_harm_to_the_host_or_to_other_members() -> None:
    refused = 0
    for line in forged_lines():
        roster = RendezvousState(wall_clock_s=lambda: 1.0)
        roster.receive(1, MEMBER | {"id": "b.0.z", "world": None, "expected": 1}, 0.0)
        roster.tick(0.0)
        roster.receive(3, MEMBER | {"world": None, "expected": 1}, 0.1)
        for sender in (2, 3):  # one that has not said who it is, and one that has
            sentence = told(roster, sender, line)
            refused += sentence is not None
            assert len(str(sentence)) < 400
            assert "\n" not in str(sentence)
            roster.tick(0.3)
        json.dumps(roster.clients.outbox)
        roster.receive(1, {"t": "beat", "progress": 1}, 0.4)
        roster.tick(0.5)
    assert refused > 300
