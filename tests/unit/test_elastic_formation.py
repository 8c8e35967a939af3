"""Who forms the next world: the pure decisions, and the state machine around them against random histories."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from moe_lightning.elastic.client_state import ClientState
from moe_lightning.elastic.membership import (
    ElasticTask,
)
from moe_lightning.elastic.protocol import Message, WireError
from moe_lightning.elastic.rendezvous_state import (
    CurrentWorld,
    Member,
    RendezvousState,
    Timeouts,
    admissible_newcomers,
    connected_nodes,
    next_number,
    next_world,
    overdue_members,
)

TIMEOUTS = Timeouts(heartbeat_s=0.5, silence_s=5.0, start_s=120.0)
TIMES = [0.5, 5.0, 120.0]


def member(name: str, **facts: object) -> Member:
    return replace(Member(id=f"{name}.node-{name}.token-{name}", timeouts=TIMEOUTS), **facts)  # type: ignore[arg-type]


def test_the_first_world_waits_for_all_that_are_expected_or_for_the_start_timeout() -> None:
    two = [member("a", joining_since=0.0, expected=3), member("b", joining_since=1.0, expected=3)]
    assert next_world(two, None, 119.0) == ()
    assert next_world(two, None, 120.0) == (two[0].id, two[1].id)
    three = [*two, member("c", joining_since=2.0, expected=3)]
    assert next_world(three, None, 2.0) == tuple(m.id for m in three)


def test_a_standing_world_is_waited_for_but_not_those_that_left_it() -> None:
    old, new = member("a"), member("b", joining_since=0.0)
    world = CurrentWorld(number=1, ids=(old.id,))
    assert next_world([old, new], world, 1000.0) == ()
    world.gone.add(old.id)
    assert next_world([old, new], world, 1000.0) == (new.id,)


@pytest.mark.parametrize(
    ("known", "gone", "new", "multiple", "expected"),
    [
        ("", "", "abcde", 2, "abcd"),  # the first world of a run
        ("", "", "a", 2, "a"),  # too few to train: they hold the state
        ("abcd", "b", "", 2, "acd"),  # each may hold what no other does: they part when it is handed over
        ("acd", "d", "d", 2, "ac"),  # which has come to wait
        ("ac", "", "d", 2, "ac"),
        ("ac", "", "de", 2, "acde"),
        ("ac", "", "def", 2, "acde"),
        ("ac", "a", "d", 2, "cd"),
        ("abcd", "abc", "", 4, "d"),
        ("d", "", "efg", 4, "defg"),
        ("abc", "", "d", 1, "abcd"),
    ],
)
def test_worlds_train_in_multiples(known: str, gone: str, new: str, multiple: int, expected: str) -> None:
    facts = {"joining_since": 0.0, "multiple": multiple, "expected": len(new)}
    members = {name: member(name, **facts) for name in "abcdefg"}
    world = CurrentWorld(number=1, ids=tuple(members[name].id for name in known)) if known else None
    if world is not None:
        world.gone |= {members[name].id for name in gone}
    joining = [members[name] for name in {*known, *new} - ({*gone} - {*new})]
    assert next_world(joining, world, 1000.0) == tuple(members[name].id for name in expected)


def test_a_standing_world_lets_in_whom_it_has_a_place_for() -> None:
    members = [member(name, joining_since=0.0, multiple=2) for name in "cde"]
    world = CurrentWorld(number=1, ids=(member("a").id, member("b").id))
    assert admissible_newcomers(members[:1], world) == []
    assert admissible_newcomers(members, world) == [members[0].id, members[1].id]


@pytest.mark.parametrize(
    ("facts", "broken_at", "progress_at", "now", "expected"),
    [
        ({"last_seen": 0.0}, None, 0.0, 5.1, "stopped answering for 5.0 s"),
        ({"last_seen": 0.0}, None, 3.0, 5.1, None),  # the others step on, so it does, too
        ({"last_seen": 0.0}, 1.0, 3.0, 5.1, "stopped answering for 5.0 s"),
        ({"lost_at": 0.0}, None, 0.0, 4.9, None),  # a lost connection breaks nothing by itself
        ({"lost_at": 0.0}, None, 0.0, 5.1, "lost its connection and did not come back"),
        ({"lost_at": 0.0}, 1.0, 0.0, 1.4, None),
        ({"lost_at": 0.0}, 1.0, 0.0, 1.6, "lost its connection and did not come back"),
        ({"lost_at": 0.0, "grace_s": 3.0}, 1.0, 0.0, 3.9, None),  # the host was started anew
        ({"last_seen": 12.9, "progress": 1}, 1.0, 0.0, 13.1, None),  # a process that hangs ends itself
    ],
)
def test_whom_nobody_waits_for(
    facts: dict[str, float], broken_at: float | None, progress_at: float, now: float, expected: str | None
) -> None:
    one = member("a", **facts)
    world = CurrentWorld(number=1, ids=(one.id,), broken_at=broken_at, progress_at=progress_at)
    assert overdue_members([one], world, now, others_wait=True) == ([(one.id, expected)] if expected else [])


def test_numbers_grow_though_clocks_go_back() -> None:
    assert next_number(5, 10.0) == 10_000
    assert next_number(20_000, 10.0) == 20_001


def staying(nodes: str, dead: Iterable[str]) -> str:
    """Which nodes stay, where "ab" is a dead link between a and b, and c is the rendezvous host's machine."""
    members = [member(name, is_local=name == "c") for name in nodes]
    links = {frozenset(f"node-{name}" for name in pair) for pair in dead}
    return "".join(sorted(node.removeprefix("node-") for node in connected_nodes(members, links)))


@pytest.mark.parametrize(
    ("nodes", "dead", "expected"),
    [
        ("abc", [], "abc"),
        ("abc", ["ab"], "ac"),  # a is older than b
        ("abc", ["bc"], "ac"),  # a tie goes to the rendezvous host's machine
        ("ab", ["ab"], "a"),
        ("abcd", ["ab", "ac", "ad"], "bcd"),  # the larger part
        ("abcd", ["ac", "ad", "bc", "bd"], "cd"),
        ("abde", ["ad", "ae", "bd", "be"], "ab"),
        ("abcde", ["ac", "ad", "bc", "bd", "ec", "ed"], "abe"),
    ],
)
def test_who_goes_on_where_links_are_dead(nodes: str, dead: list[str], expected: str) -> None:
    assert staying(nodes, dead) == expected


def test_all_that_go_on_reach_each_other_and_nobody_is_left_out_for_nothing() -> None:
    """Whichever links of five nodes are dead."""
    links = ["".join(pair) for pair in itertools.combinations("abcde", 2)]
    for count in range(len(links) + 1):
        for dead in itertools.combinations(links, count):
            found = staying("abcde", dead)
            assert not any("".join(pair) in dead for pair in itertools.combinations(found, 2))
            for node in {*"abcde"}.difference(found):
                assert any("".join(sorted((node, other))) in dead for other in found)


def test_many_dead_links_are_decided_at_once() -> None:
    members = [member(f"{number:03}") for number in range(300)]
    dead = {frozenset((f"node-{number:03}", f"node-{number + 1:03}")) for number in range(0, 300, 2)}
    assert len(connected_nodes(members, dead)) == 150


# ---------------------------------------------------------------------- the state machine


class Crowd:
    """Clients of a roster that remember what they were told."""

    def __init__(self, **options: float) -> None:
        self.roster = RendezvousState(wall_clock_s=lambda: 1.0 + self.now, **options)
        self.now = 0.0
        self.told: dict[int, list[Message]] = {}
        self.worlds: dict[int, tuple[int, tuple[str, ...]]] = {}  # connection -> the world that it was told last

    def join(self, connection: int, name: str, *, expected: int = 1, **facts: object) -> None:
        introduction = {
            "t": "member", "id": f"{name}.node-{name}.token-{name}", "expected": expected, "patience": TIMES,
            "probe": None, "joining": True, "ready": False, "number": 0, "world": None, **facts,
        }  # fmt: skip
        self.say(connection, introduction)

    def say(self, connection: int, message: Message) -> None:
        self.roster.receive(connection, message, self.now)
        self.tick(0.0)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.roster.tick(self.now)
        for connection, message in self.roster.clients.outbox:
            self.told.setdefault(connection, []).append(message)
            if message["t"] == "formed" and "members" in message:
                self.worlds[connection] = message["number"], message["members"]
        self.roster.clients.outbox.clear()

    def last(self, connection: int, kind: str) -> Message | None:
        return next((m for m in reversed(self.told.get(connection, [])) if m["t"] == kind), None)


def world_of(*names: str, number: int = 7, **facts: object) -> Message:
    ids = [f"{name}.node-{name}.token-{name}" for name in names]
    return {"number": number, "members": ids, "patience": TIMES, **facts}


def test_a_host_that_was_started_anew_takes_up_the_standing_world_and_forms_no_other() -> None:
    crowd = Crowd(startup_grace_s=3.0)
    crowd.join(1, "d", ready=False)  # a newcomer comes first
    crowd.tick(1.0)
    crowd.join(2, "a", joining=False, number=7, world=world_of("a", "b"))
    crowd.join(3, "b", joining=False, number=7, world=world_of("a", "b"))
    for _ in range(100):
        crowd.tick(0.2)
        for connection in (1, 2, 3):
            crowd.say(connection, {"t": "beat", "progress": 0})
    assert crowd.last(1, "formed") is None
    assert crowd.last(2, "waiting") == {"t": "waiting", "count": 1}
    crowd.say(2, {"t": "broken", "number": 7, "reason": "newcomers", "rating": 1})
    for connection in (2, 3):
        crowd.say(connection, {"t": "join", "ready": True})
    formed = crowd.last(1, "formed")
    assert formed["number"] > 7
    assert len(crowd.worlds[1][1]) == 3


def test_a_host_that_was_started_anew_asks_one_after_another_for_their_world() -> None:
    crowd = Crowd(startup_grace_s=3.0)
    crowd.join(1, "d", ready=True)
    numbered = {"number": 7, "patience": TIMES}
    for connection, name in ((2, "a"), (3, "b"), (4, "c")):
        crowd.join(connection, name, joining=False, number=7, world=numbered)
    assert crowd.last(2, "introduce") == {"t": "introduce", "full": True}
    assert crowd.last(3, "introduce") is None
    crowd.tick(1.1)  # the first one does not answer
    assert crowd.last(3, "introduce") == {"t": "introduce", "full": True}
    crowd.tick(0.9)
    crowd.tick(0.9)
    crowd.roster.disconnect(3, crowd.now)  # neither does the next
    crowd.tick(0.3)
    assert crowd.last(1, "formed") is None, "a world that is not known may go on"
    crowd.join(4, "c", joining=False, number=7, world=world_of("a", "b", "c"))
    crowd.join(5, "a", joining=False, number=7, world=numbered)
    assert crowd.last(5, "introduce") is None
    assert crowd.last(5, "waiting") == {"t": "waiting", "count": 1}, "d waits"
    crowd.join(6, "e", joining=False, number=6, world={"number": 6, "patience": TIMES})
    assert crowd.last(6, "evicted") is not None
    assert crowd.roster.world.number == 7


def test_after_a_restart_of_the_host_who_was_lost_meanwhile_is_not_waited_for_long() -> None:
    crowd = Crowd(startup_grace_s=3.0)
    crowd.join(1, "a", number=7, ready=True, world=world_of("a", "b", broken="b died"))
    for _ in range(29):
        crowd.tick(0.1)
        crowd.say(1, {"t": "beat", "progress": 0})
    assert crowd.last(1, "formed") is None
    crowd.tick(0.2)
    crowd.tick(0.2)
    assert crowd.last(1, "formed") is not None


def test_a_successor_restores_the_world_from_its_record_and_buries_the_launcher_that_led() -> None:
    crowd = Crowd()
    ids = [f"{name}.node-{name}.{launcher}-{name}" for name, launcher in (("a", "dead"), ("b", "alive"))]

    crowd.roster.restore({"number": 7, "members": ids, "patience": TIMES}, 0.0)
    crowd.roster.lose_launcher("dead", "ended with its launcher", 0.0)
    crowd.join(1, "b", id=ids[1], joining=False, number=7, world={"number": 7, "patience": TIMES})
    assert crowd.last(1, "introduce") is None, "it is known"
    broken = crowd.last(1, "broken")
    assert broken["reason"] == "rank 0 on node node-a ended with its launcher"
    crowd.say(1, {"t": "join", "ready": True})
    assert crowd.worlds[1][1] == (ids[1],)
    assert crowd.worlds[1][0] > 7


def test_first_counts_of_steps_after_a_restart_are_no_steps() -> None:
    """So who does not come back is lost in time."""
    crowd = Crowd()
    ids = tuple(f"{name}.node-{name}.token-{name}" for name in "ab")
    crowd.roster.restore({"number": 7, "members": ids, "patience": TIMES}, -3.5)
    crowd.join(1, "a", joining=False, number=7, world={"number": 7, "patience": TIMES})
    for seconds, is_broken in ((0.7, False), (0.7, False), (0.2, True)):
        crowd.tick(seconds)
        crowd.say(1, {"t": "beat", "progress": 40})
        assert (crowd.last(1, "broken") is not None) == is_broken, crowd.now


def test_who_was_formed_without_hearing_it_hears_it_on_the_next_connection() -> None:
    crowd = Crowd()
    crowd.join(1, "a", expected=2)
    crowd.join(2, "b", expected=2)
    formed = crowd.last(1, "formed")
    crowd.roster.disconnect(1, crowd.now)
    crowd.join(3, "a", expected=2)
    assert crowd.last(3, "formed") == formed


def test_a_host_that_heard_nobody_was_cut_off_itself() -> None:
    crowd = Crowd()
    for connection, name in enumerate("ab"):
        crowd.join(connection, name, expected=2)
    formed = crowd.last(0, "formed")
    for _ in range(300):
        crowd.tick(0.1)
    for connection, name in ((2, "a"), (3, "b")):
        crowd.roster.disconnect(connection - 2, crowd.now)
        crowd.join(connection, name, joining=False, number=1, world={**world_of("a", "b"), "number": formed["number"]})
        crowd.tick(2.0)
    crowd.say(2, {"t": "beat", "progress": 1})
    crowd.tick(0.9)
    assert not any(crowd.last(connection, "broken") or crowd.last(connection, "evicted") for connection in range(4))


def test_who_comes_back_from_an_older_world_is_another_member() -> None:
    crowd = Crowd()
    crowd.join(1, "b", joining=False, number=9, world=world_of("b", "c", number=9))
    crowd.join(2, "a", joining=False, number=7, world=world_of("a", "b", "c", number=7))
    assert crowd.last(2, "evicted")["reason"] == "the others continued without this process"


def test_a_launchers_word_frees_the_others_at_once() -> None:
    crowd = Crowd()
    crowd.say(9, {"t": "launcher", "token": "token", "expected": 2})
    crowd.join(1, "a", expected=2)
    crowd.join(2, "b", expected=2)
    crowd.say(9, {"t": "died", "token": "token-b", "how": "was killed by SIGKILL"})
    broken = crowd.last(1, "broken")
    assert broken["reason"] == "rank 1 on node node-b was killed by SIGKILL"
    crowd.say(1, {"t": "join", "ready": True})
    formed = crowd.last(1, "formed")
    assert formed is not None
    assert len(crowd.worlds[1][1]) == 1


@pytest.mark.parametrize(
    ("says", "meets_a_new_host", "launcher_lives", "is_evicted"),
    [
        ((), False, True, True),
        (("finish",), False, True, False),
        ((), True, True, False),  # which it tells that it has finished
        (("finish",), False, False, True),  # its machine has lost power
        (("finish", "begin"), False, True, True),  # it trains again
    ],
)
def test_who_has_finished_may_be_silent_while_its_launcher_is_heard(
    says: tuple[str, ...], meets_a_new_host: bool, launcher_lives: bool, is_evicted: bool
) -> None:
    """An export may hold Python's lock for minutes; its launcher reports how its process ends."""
    crowd = Crowd()
    for connection, name in ((1, "a"), (2, "b")):
        crowd.join(connection, name, expected=2)
    number, _ = crowd.worlds[1]
    if meets_a_new_host:
        world = world_of("a", "b", number=number)
        crowd = Crowd()
        crowd.join(1, "a", joining=False, number=number, world=world, finished=number, done=True)
        crowd.join(2, "b", joining=False, number=number, world=world)
    crowd.say(9, {"t": "launcher", "token": "token", "expected": 2})
    for kind in says:
        crowd.say(1, {"t": kind, "number": number})
    for _ in range(24):
        crowd.tick(0.5)
        crowd.say(2, {"t": "beat", "progress": 0})
        if launcher_lives:
            crowd.say(9, {"t": "beat", "progress": 0})
    assert (crowd.last(1, "evicted") is not None) == is_evicted
    assert (crowd.last(2, "broken") is not None) == is_evicted
    is_done = meets_a_new_host or says == ("finish",)
    assert (crowd.last(9, "evicted") is not None) == (is_evicted and not is_done), "its launcher would kill it"


def test_a_launcher_does_not_kill_who_was_evicted_by_a_new_host_and_has_finished() -> None:
    """It could not introduce itself there while an export held Python's lock."""
    crowd = Crowd()
    world = world_of("a", "b")
    crowd.say(9, {"t": "launcher", "token": "token", "expected": 2})
    crowd.join(2, "b", joining=False, number=7, world=world)
    for _ in range(24):
        crowd.tick(0.5)
        for connection in (2, 9):
            crowd.say(connection, {"t": "beat", "progress": 0})
    assert crowd.last(9, "evicted")["token"] == "token-a"
    for is_done in (False, True):
        crowd.join(1, "a", joining=False, number=7, world=world, finished=7, done=is_done)
        assert crowd.last(1, "evicted") is not None
        assert (crowd.last(9, "arrived") == {"t": "arrived", "token": "token-a"}) == is_done


def test_all_members_are_sent_one_message_of_their_world() -> None:
    crowd = Crowd()
    for connection, name in enumerate("abcd"):
        crowd.join(connection, name, expected=4, probe=["10.0.0.1", 1000 + connection])
    crowd.say(9, {"t": "launcher", "token": "token", "expected": 2})
    crowd.say(9, {"t": "died", "token": "token-b", "how": "was killed by SIGKILL"})
    crowd.join(5, "e", probe=["10.0.0.5", 1005])
    for connection in (0, 2, 3):
        crowd.say(connection, {"t": "join", "ready": True})
    formed = crowd.last(0, "formed")
    assert all(crowd.last(connection, "formed") is formed for connection in (2, 3, 5)), "it is encoded once"
    assert [port for _, port in formed["probes"].values()] == [1000, 1002, 1003, 1005]
    assert len(crowd.worlds[0][1]) == 4


def test_members_that_are_expected_and_not_connected_are_counted() -> None:
    crowd = Crowd()
    assert crowd.roster.missing == 0
    crowd.say(9, {"t": "launcher", "token": "token", "expected": 3})
    assert crowd.roster.missing == 3
    crowd.join(1, "a", expected=3)
    crowd.join(2, "a", expected=3)  # on another connection
    assert crowd.roster.missing == 2
    crowd.roster.disconnect(1, crowd.now)
    assert crowd.roster.missing == 2
    crowd.roster.disconnect(2, crowd.now)
    assert crowd.roster.missing == 3


def test_a_launcher_is_told_of_its_own_workers_alone() -> None:
    crowd = Crowd()
    for connection, name in ((8, "a"), (9, "b")):
        crowd.say(connection, {"t": "launcher", "token": name, "expected": 2})
        crowd.join(connection - 8, name, expected=2, id=f"{name}.node.{name}-0")
    assert [crowd.last(connection, "arrived") for connection in (8, 9)] == [
        {"t": "arrived", "token": token} for token in ("a-0", "b-0")
    ]
    assert [crowd.last(connection, "formed") for connection in (8, 9)] == [
        {"t": "formed", "tokens": [token]} for token in ("a-0", "b-0")
    ]


def test_who_is_left_out_for_a_dead_link_learns_whom_to_probe() -> None:
    """Also on its next connection; it may return as another member when they answer. Its launcher lets it wait."""
    crowd = Crowd()
    crowd.say(9, {"t": "launcher", "token": "token", "expected": 3})
    for connection, name in enumerate("abc"):
        crowd.join(connection, name, expected=3, probe=["10.0.0.1", 1000 + connection])
    formed = crowd.last(0, "formed")
    crowd.say(1, {"t": "unreachable", "number": formed["number"], "nodes": ["node-c"]})
    crowd.tick(0.3)
    evicted = crowd.last(2, "evicted")
    assert "rank 2 on node node-c was left out: the link between nodes node-c and node-b is dead" in evicted["reason"]
    assert evicted["probes"] == {"node-b": ("10.0.0.1", 1001)}
    assert crowd.last(9, "evicted") is None
    for connection in (0, 1):
        crowd.say(connection, {"t": "join", "ready": True})
    crowd.join(3, "c", probe=["10.0.0.1", 1002], joining=False, number=formed["number"])
    assert crowd.last(3, "evicted") == evicted
    assert crowd.last(0, "waiting") is None
    crowd.join(3, "d", probe=["10.0.0.1", 1002], id="d.node-c.token-c", ready=True)
    assert crowd.last(0, "waiting") == {"t": "waiting", "count": 1}


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_a_rank_that_was_silent_for_a_while_is_left_out_only_if_its_link_stays_dead(is_withdrawn: bool) -> None:
    """A call that holds Python's lock answers neither probes nor the host."""
    crowd = Crowd()
    for connection, name in enumerate("abc"):
        crowd.join(connection, name, expected=3, probe=["10.0.0.1", 1000 + connection])
    number, _ = crowd.worlds[0]
    for seconds in range(8):
        crowd.tick(0.5)
        for connection in (0, 1):
            crowd.say(connection, {"t": "beat", "progress": 0})
        if seconds == 5:
            crowd.say(0, {"t": "unreachable", "number": number, "nodes": ["node-c"]})
    crowd.say(2, {"t": "beat", "progress": 0})
    assert crowd.last(2, "evicted") is None, "the replies to the others are on their way"
    if is_withdrawn:
        crowd.say(0, {"t": "unreachable", "number": number, "nodes": []})
    crowd.tick(0.3)
    assert (crowd.last(2, "evicted") is None) == is_withdrawn


@pytest.mark.parametrize("has_peer", [False, True])
def test_a_dead_link_is_decided_on_beside_a_silent_rank_that_has_finished(has_peer: bool) -> None:
    """Links to the silent one, or to another rank of its node, stay undecided: it answers no probe either, and may
    export for long.
    """
    crowd = Crowd()
    ranks = ["a", "b", "c", "d", *(["e"] if has_peer else [])]
    for connection, name in enumerate(ranks):
        place = {"id": "e.node-a.token-e"} if name == "e" else {}
        crowd.join(connection, name, expected=len(ranks), probe=["10.0.0.1", 1000 + connection], **place)
    crowd.say(9, {"t": "launcher", "token": "token", "expected": len(ranks)})
    number, _ = crowd.worlds[0]
    crowd.say(0, {"t": "finish", "number": number})

    def wait(seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            crowd.tick(0.5)
            for connection in (*range(1, len(ranks)), 9):
                crowd.say(connection, {"t": "beat", "progress": 0})

    wait(4.0)
    crowd.say(2, {"t": "unreachable", "number": number, "nodes": ["node-a"]})
    wait(4.0)
    assert all(crowd.last(connection, "evicted") is None for connection in range(len(ranks)))
    crowd.say(1, {"t": "unreachable", "number": number, "nodes": ["node-a", "node-d"]})
    wait(1.0)
    evicted = [connection for connection in range(len(ranks)) if crowd.last(connection, "evicted")]
    assert evicted in ([1], [3])


@pytest.mark.parametrize("peers", [(), ("b",)])
def test_who_comes_back_from_a_world_of_its_own_waits_for_no_others(peers: tuple[str, ...]) -> None:
    """It has the only state, and the others that were started may never come; peers would come back, too."""
    state = ClientState(ElasticTask(address="none", secret_file="none", node="a", token="a", expected=3))
    state.start_join(is_ready=True, is_spare=False)
    members = [state.member_id, *(f"{name}.node-{name}.token-{name}" for name in peers)]
    state.receive({"t": "formed", "number": 7, "members": members, "probes": {}, "has_set_up": True}, 0.0)
    state.guard(state.world.members)
    state.receive({"t": "evicted", "reason": "silent", "probes": {}}, 1.0)
    state.start_join(is_ready=True, is_spare=False)
    state.rename()
    crowd = Crowd()
    crowd.say(1, state.introduction(None))
    assert (crowd.last(1, "formed") is None) == bool(peers)


def test_a_launcher_that_connects_learns_of_its_workers() -> None:
    """A host that was replaced may have told nobody of the world that it formed last."""
    crowd = Crowd()
    ids = [f"{name}.node-{name}.{name}-0" for name in "ab"]
    crowd.roster.restore({"number": 7, "members": ids, "patience": TIMES}, 0.0)
    for connection, launcher in ((8, "a"), (9, "c")):
        crowd.say(connection, {"t": "launcher", "token": launcher, "expected": 2})
    assert crowd.last(8, "formed") == {"t": "formed", "tokens": ["a-0"]}
    assert crowd.last(9, "formed") is None


def test_a_malformed_world_changes_nothing() -> None:
    crowd = Crowd()
    with pytest.raises(WireError):
        crowd.roster.restore(world_of("a", "b", patience=[1, -1, 1]), 0.0)
    assert crowd.roster.world is None
    crowd.join(1, "c")
    assert crowd.last(1, "formed") is not None


@pytest.mark.parametrize(
    "message",
    [
        {"t": "member"},
        {"t": "no such"},
        {},
        {"t": "died", "token": "x", "how": "y"},  # of one that is no launcher
        {"t": "beat", "progress": "many"},
    ],
)
def test_messages_that_are_none(message: Message) -> None:
    with pytest.raises(WireError):
        RendezvousState().receive(1, message, 0.0)


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_end_in_one_world_of_all_that_live(seed: int) -> None:
    """Members join, die, lose connections and come back, and the host is started anew; numbers grow, and in the end
    whoever lives is in one world.
    """
    rng = random.Random(seed)
    crowd, clients = Crowd(), Clients()
    worlds: dict[int, tuple[str, ...]] = {}
    for _ in range(120):
        clients.act(crowd, rng)
        crowd.tick(rng.choice([0.0, 0.05, 0.3]))
        clients.hear(crowd)
        if rng.random() < 0.02:
            crowd = clients.meet_a_new_host(crowd)
        world = crowd.roster.world
        if world is not None:
            assert worlds.setdefault(world.number, world.ids) == world.ids, "a number is one world's for ever"
    clients.settle(crowd)
    assert {client.number for client in clients.alive} == {crowd.roster.world.number}
    assert sorted(client.state.member_id for client in clients.alive) == sorted(crowd.roster.world.ids)


class Client:
    """A worker around the state of its client, without threads and sockets."""

    def __init__(self, index: int) -> None:
        self.state = ClientState(ElasticTask(address="none", secret_file="none", node=f"n-{index}", token=f"t{index}"))
        self.connection: int | None = None
        self.aborted: list[int] = []
        self.join()

    @property
    def number(self) -> int:
        return 0 if self.state.world is None else self.state.world.members.number

    def join(self) -> None:
        self.is_joining = True
        self.state.start_join(is_ready=True, is_spare=False)

    def work(self, now: float, *, wants_break: bool = False) -> None:
        """Train in a new world, or come to the next join."""
        state, guarded = self.state, self.state.guarded
        if state.world is not guarded:
            assert self.is_joining, "a world without a join"
            assert state.world is not None
            assert guarded is None or state.world.members.number > guarded.members.number, "numbers grow"
            state.guard(state.world.members)
            self.is_joining = False
        elif not self.is_joining:
            if wants_break:
                state.abort("felt", now)
            if not state.is_training:
                self.join()

    def carry_out(self, crowd: Crowd) -> None:
        state = self.state
        if state.may_return and self.is_joining:
            state.rename()
            if self.connection is not None:
                crowd.say(self.connection, state.introduction(None))
        sent, state.outbox = state.outbox, []
        for message in sent if self.connection is not None else ():
            crowd.say(self.connection or 0, message)
        self.aborted += state.broken
        state.broken.clear()
        if state.guarded is not None:
            is_aborted = state.guarded.members.number in self.aborted
            assert is_aborted == (state.guarded.broken_at is not None)


class Clients:
    """Up to five clients."""

    def __init__(self) -> None:
        self.alive: list[Client] = []
        self._made = itertools.count()
        self._connections = itertools.count()
        self._read: dict[int, int] = {}

    def act(self, crowd: Crowd, rng: random.Random) -> None:
        if len(self.alive) < 5 and rng.random() < 0.3:
            self.alive.append(Client(next(self._made)))
        for client in list(self.alive):
            if client.connection is None:
                if rng.random() < 0.5:
                    self.connect(client, crowd)
            elif rng.random() < 0.05:
                crowd.roster.disconnect(client.connection, crowd.now)
                client.connection = None
                if rng.random() < 0.5:
                    self.alive.remove(client)  # it has died
                    continue
            client.state.beat(crowd.now)
            if rng.random() < 0.7:
                client.work(crowd.now, wants_break=rng.random() < 0.05)
            client.carry_out(crowd)

    def connect(self, client: Client, crowd: Crowd) -> None:
        client.connection = next(self._connections)
        crowd.say(client.connection, client.state.introduction(None))

    def hear(self, crowd: Crowd) -> None:
        for client in self.alive:
            if client.connection is None:
                continue
            connection, told = client.connection, crowd.told.get(client.connection, [])
            while (place := self._read.get(connection, 0)) < len(told):  # an answer may bring more
                self._read[connection] = place + 1
                self._take(client, told[place], crowd)

    def _take(self, client: Client, message: Message, crowd: Crowd) -> None:
        assert client.connection is not None
        if message["t"] == "introduce":
            crowd.say(client.connection, client.state.introduction(None, is_full=message["full"]))
            return
        client.state.receive(message, crowd.now)

    def meet_a_new_host(self, crowd: Crowd) -> Crowd:
        for client in self.alive:
            client.connection = None
        fresh = Crowd(startup_grace_s=crowd.now + 3.0)
        fresh.now = crowd.now
        return fresh

    def settle(self, crowd: Crowd) -> None:
        """Nothing happens any more: all find the host, and newcomers are let in."""
        for _ in range(400):
            for client in self.alive:
                if client.connection is None:
                    self.connect(client, crowd)
                client.state.beat(crowd.now)
                client.work(crowd.now, wants_break=client.state.has_newcomers(crowd.now))
                client.carry_out(crowd)
            crowd.tick(0.1)
            self.hear(crowd)


@pytest.mark.parametrize("teller", ["member", "launcher"])
def test_the_end_of_a_run_outlives_its_host(teller: str) -> None:
    """A member that finished, or its launcher, repeats it to the next host; one that starts there begins a new run."""
    first = Crowd()
    first.join(1, "a")
    (number, _) = first.worlds[1]
    first.say(1, {"t": "finish", "number": number})
    assert first.last(1, "finished") == {"t": "finished", "finished": number, "world": number}
    second = Crowd()
    second.join(2, "b", ready=True, joining=False)
    if teller == "member":
        second.join(3, "a", joining=False, number=number, finished=number)
    else:
        second.say(3, {"t": "launcher", "token": "token", "expected": 2, "finished": number, "world": number})
    assert second.last(2, "finished") == {"t": "finished", "finished": number, "world": number}
    second.join(4, "c")
    assert second.last(4, "state") == {"t": "state", "finished": number, "exists": False}
    assert second.worlds[4][0] > number


def test_a_world_that_has_ended_twice_is_still_the_present_one() -> None:
    """For the next host, which learns of the ends from a launcher: its members go on, and those left behind do not."""
    first = Crowd()
    first.join(1, "a")
    (number, _) = first.worlds[1]
    for end in (number, number + 1):
        first.say(1, {"t": "finish", "number": end})
        assert first.last(1, "finished") == {"t": "finished", "finished": end, "world": number}
    second = Crowd()
    second.say(3, {"t": "launcher", "token": "token", "expected": 2, "finished": number + 1, "world": number})
    second.join(4, "left", joining=False, number=number - 1, world={"number": number - 1, "patience": TIMES})
    second.join(2, "a", joining=False, number=number, world={"number": number, "patience": TIMES})
    assert second.last(4, "evicted") is not None
    assert second.last(2, "introduce") == {"t": "introduce", "full": True}


def test_an_end_of_no_world_is_malformed() -> None:
    crowd = Crowd()
    for number in (True, -1, 2**62, "1"):
        with pytest.raises(WireError, match="malformed number of a finished world"):
            crowd.say(1, {"t": "launcher", "token": "token", "expected": 2, "finished": number})
