"""Which members form the next world, whom nobody waits for any more, and who goes on where links are dead: pure
decisions on what the rendezvous host knows, with times as its own clock counts them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from moe_lightning.elastic.membership import node_of
from moe_lightning.elastic.settings import may_hang_s

Link = frozenset[str]
"""Two nodes."""

RECONNECT_S = 3.0
"""A client that has lost its connection tries again within this time, if it can."""

_EXACT_CONFLICTS = 16  # nodes with dead links up to which the largest part is found exactly
_HANG_MARGIN_S = 2.0  # who hangs ends itself first


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a member's run waits, in seconds; see `ElasticSettings`."""

    heartbeat_s: float
    silence_s: float
    hang_s: float
    start_s: float


@dataclass(kw_only=True)
class Member:
    """What is known of one member.

    Attributes:
        id: its name.
        patience: of its run.
        expected: members that the first world of its run waits for.
        is_local: it runs on the rendezvous host's machine.
        probe: where its links are tried; None on one machine.
        heard_at: when it last said anything.
        lost_at: when its connection ended; None while it has one.
        grace_s: how long it may then take to come back while others wait.
        joining_since: when it came to the join; None while it does not wait for a world.
        has_set_up: it has been in a world, or goes on with training in the next one at once.
        progress: the last count of its steps that it has told.
        kept_out_of: number of the world that it was told not to reach all members of.
        multiple: the worlds of its run train in multiples of so many members.
        is_spare: it was told that it waits until there are enough for a multiple.
    """

    id: str
    patience: Patience
    expected: int = 1
    is_local: bool = False
    probe: tuple[str, int] | None = None
    heard_at: float = 0.0
    lost_at: float | None = None
    grace_s: float = 0.0
    joining_since: float | None = None
    has_set_up: bool = False
    progress: int = 0
    kept_out_of: int = 0
    multiple: int = 1
    is_spare: bool = False

    @property
    def node(self) -> str:
        """Its failure domain."""
        return node_of(self.id)


@dataclass(kw_only=True)
class StandingWorld:
    """The newest world.

    Attributes:
        number: grows for ever.
        ids: its members by rank.
        gone: those that left, died or were expelled.
        broken_at: when it broke; None while it holds.
        reason: why, as one sentence.
        rating: how much the reason says: 1 an error that a rank felt, 2 silence or a dead link, 3 a launcher's word.
        progress_at: when any member last made a step.
        has_settled: some of its members had set up before it formed, or may have.
    """

    number: int
    ids: tuple[str, ...]
    gone: set[str] = field(default_factory=set)
    broken_at: float | None = None
    reason: str = ""
    rating: int = 0
    progress_at: float = 0.0
    has_settled: bool = True

    def holds(self, member_id: str) -> bool:
        """Whether somebody is in it and not gone."""
        return member_id in self.ids and member_id not in self.gone

    @property
    def is_over(self) -> bool:
        """Whether nobody is left of it."""
        return len(self.gone) >= len(self.ids)


def next_number(last: int, wall_clock_s: float) -> int:
    """A world's number: above all former ones, also those of a host that forgot them when it was started again."""
    return max(last + 1, int(wall_clock_s * 1000))


def next_world(
    members: Collection[Member], world: StandingWorld | None, dead: Collection[Link], now: float
) -> tuple[str, ...]:
    """The ids of the world that can form now, oldest first; empty where somebody is waited for or nobody waits.

    A world forms when everybody has come who is alive and was in the last one; the first of a run when all that are
    expected have come, or the first has waited for `start_s`. Those of the last world are all in it, since each may
    hold what no other does; of the others as many as make it a multiple. Where there are fewer than one multiple, all
    are: they hold the state until others come.
    """
    joining = [member for member in members if member.joining_since is not None]
    if not joining or any(member.lost_at is not None for member in joining):
        return ()
    if world is not None and any(world.holds(m.id) and m.joining_since is None for m in members):
        return ()
    chosen = hearing_members(joining, dead)
    if world is None:
        first = min(joining, key=lambda member: member.joining_since or 0.0)
        waited = now - (first.joining_since or 0.0)
        if len(chosen) < max(m.expected for m in chosen) and waited < first.patience.start_s:
            return ()
    known = [member for member in chosen if world is not None and world.holds(member.id)]
    others = sorted((member for member in chosen if member not in known), key=lambda member: member.id)
    whole = _whole(chosen, len(chosen))
    if whole:
        others = others[: max(0, whole - len(known))]
    return tuple(sorted(member.id for member in (*known, *others)))


def _whole(members: Collection[Member], count: int) -> int:
    """How many of `count` train, where these members say of what they train in multiples."""
    multiple = max(member.multiple for member in members)
    return count // multiple * multiple


def waiting_newcomers(members: Iterable[Member], world: StandingWorld, dead: Collection[Link]) -> list[str]:
    """Who waits to be let into a standing world and reaches all its members, as far as they make it a multiple."""
    ids = [member_id for member_id in world.ids if world.holds(member_id)]
    inside = {node_of(member_id) for member_id in ids}
    waiting = [
        member
        for member in members
        if member.joining_since is not None
        and member.lost_at is None
        and member.id not in world.ids
        and not links_between(member.node, inside, dead)
    ]
    if not waiting:
        return []
    room = _whole(waiting, len(ids) + len(waiting)) - len(ids)
    return sorted(member.id for member in waiting)[: max(0, room)]


def links_between(node: str, others: Iterable[str], dead: Collection[Link]) -> list[str]:
    """The nodes that a node does not reach."""
    return sorted(other for other in set(others) if frozenset((node, other)) in dead) if dead else []


def overdue(
    members: Iterable[Member], world: StandingWorld | None, now: float, *, others_wait: bool
) -> list[tuple[str, str]]:
    """Members that nobody waits for any more, with a sentence's end that says why.

    Args:
        others_wait: somebody waits at the join, so every moment counts.
    """
    found = []
    for member in members:
        is_inside = world is not None and world.holds(member.id)
        if (why := _why_overdue(member, world if is_inside else None, now, others_wait=others_wait)) is not None:
            found.append((member.id, why))
    return found


def _why_overdue(member: Member, world: StandingWorld | None, now: float, *, others_wait: bool) -> str | None:
    patience = member.patience
    broken_at = world.broken_at if world is not None else None
    if member.lost_at is not None:
        is_awaited = others_wait and (world is None or broken_at is not None)
        since, limit = max(member.lost_at, broken_at or 0.0), max(member.grace_s, patience.silence_s)
        if is_awaited:
            limit = max(member.grace_s, patience.heartbeat_s)
        elif world is not None and broken_at is None:
            since = max(since, world.progress_at)  # the others step on: it must be with them
        return "lost its connection and did not come back" if now - since > limit else None
    silent_since = member.heard_at
    if world is not None and broken_at is None:
        silent_since = max(silent_since, world.progress_at)
    if now - silent_since > patience.silence_s:
        return f"stopped answering for {patience.silence_s:.1f} s"
    hang_s = may_hang_s(patience.hang_s, patience.start_s, member.progress)
    if broken_at is not None and member.joining_since is None and now - broken_at > hang_s + _HANG_MARGIN_S:
        return f"did not come back within {hang_s:g} s after its world broke"
    return None


def hearing_members(members: Collection[Member], dead: Collection[Link]) -> list[Member]:
    """The members of the nodes that go on where some links between nodes are dead."""
    if not dead:
        return list(members)
    facts: dict[str, NodeFacts] = {}
    for member in members:
        known = facts.get(member.node)
        facts[member.node] = NodeFacts(
            members=1 + (known.members if known else 0),
            is_local=member.is_local or (known is not None and known.is_local),
            oldest=min(member.id, known.oldest) if known else member.id,
        )
    nodes = hearing_part(facts, dead)
    return [member for member in members if member.node in nodes]


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What decides between nodes that do not hear each other.

    Attributes:
        members: how many run there.
        is_local: the rendezvous host's machine.
        oldest: the id of its oldest member.
    """

    members: int
    is_local: bool
    oldest: str


def hearing_part(facts: Mapping[str, NodeFacts], dead: Collection[Link]) -> frozenset[str]:
    """The largest set of nodes that all hear each other; among equals the one with the rendezvous host's machine, then
    with more members, then with the oldest one.

    Exact for up to 16 nodes that have a dead link; beyond, the node with the most dead links stays out until none is
    left.
    """
    heard = frozenset(facts)
    enemies = {node: frozenset(n for link in dead if node in link for n in link if n != node) & heard for node in heard}
    exact = sum(bool(others) for others in enemies.values()) <= _EXACT_CONFLICTS
    return _largest(heard, enemies, facts, exact=exact)


def _largest(
    nodes: frozenset[str], enemies: Mapping[str, frozenset[str]], facts: Mapping[str, NodeFacts], *, exact: bool
) -> frozenset[str]:
    """Either the node with the most enemies stays out, or all its enemies do."""

    def importance(node: str) -> tuple[int, bool, int]:
        return len(enemies[node] & nodes), not facts[node].is_local, -facts[node].members

    worst = max(sorted(nodes, key=lambda node: facts[node].oldest), key=importance, default=None)
    if worst is None or not enemies[worst] & nodes:
        return nodes
    without = _largest(nodes - {worst}, enemies, facts, exact=exact)
    if not exact:
        return without
    alone = _largest(nodes - enemies[worst], enemies, facts, exact=exact)
    return max(without, alone, key=lambda part: _worth(part, facts))


def _worth(part: frozenset[str], facts: Mapping[str, NodeFacts]) -> tuple[int, bool, int, list[int]]:
    everybody = sorted(fact.oldest for fact in facts.values())
    return (
        len(part),
        any(facts[node].is_local for node in part),
        sum(facts[node].members for node in part),
        [-everybody.index(oldest) for oldest in sorted(facts[node].oldest for node in part)],
    )
