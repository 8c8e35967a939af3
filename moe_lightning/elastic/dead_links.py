"""Links between nodes that are dead though both ends reach the rendezvous host: reports of them, and who stays out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from moe_lightning.elastic.formation import Link, Member, hearing_members, links_between
from moe_lightning.elastic.membership import node_of

_DECISION_SHARE = 0.05  # of the silence timeout


def decision_s(silence_s: float) -> float:
    """How long after the first report of a dead link it is decided who goes on."""
    return _DECISION_SHARE * silence_s


class DeadLinks:
    """What members of the standing world have reported, and what is remembered of former worlds.

    Attributes:
        known: links that are dead until one of the two nodes reaches the other.
    """

    def __init__(self) -> None:
        self.known: set[Link] = set()
        self._reports: dict[str, frozenset[str]] = {}  # member -> nodes
        self._decide_at: float | None = None

    def report(self, member: Member, nodes: Collection[str], now: float) -> None:
        """A member of the standing world does not hear these nodes, and no others."""
        self._reports[member.id] = frozenset(nodes)
        if self._decide_at is None:
            self._decide_at = now + decision_s(member.patience.silence_s)

    def mend(self, node: str, others: Iterable[str]) -> None:
        """A node reaches others again."""
        self.known -= {frozenset((node, other)) for other in others}

    def forget_reports(self, member_id: str | None = None) -> None:
        """A member is out of the world, or without one the world has ended."""
        if member_id is not None:
            self._reports.pop(member_id, None)
            return
        self._reports.clear()
        self._decide_at = None

    def decide(self, inside: Collection[Member], now: float) -> list[tuple[Member, str]]:
        """The members that do not hear the larger part, with the links they lack as a sentence's end; nobody before
        the first report is some moments old.

        Args:
            inside: all members of the standing world.
        """
        if self._decide_at is None or now < self._decide_at:
            return []
        nodes = {member.node for member in inside}
        dead = {
            frozenset((node_of(reporter), node))
            for reporter, others in self._reports.items()
            for node in others & nodes
            if node != node_of(reporter)
        }
        silent = {m.node for m in inside if now - m.heard_at > m.patience.silence_s / 2 or m.lost_at is not None}
        if any(link & silent for link in dead):
            return []  # a member that the host does not hear either is judged by its silence
        self._decide_at = None
        staying = {member.id for member in hearing_members(inside, dead)}
        self.known |= dead
        near = {node_of(member_id) for member_id in staying}
        leaving = [member for member in inside if member.id not in staying]
        return [(member, words_for(member.node, links_between(member.node, near, dead))) for member in leaving]


def words_for(node: str, others: Iterable[str]) -> str:
    """What is said of a node's dead links."""
    names = ", ".join(others)
    return f"the link between nodes {node} and {names} is dead, though both reach the rendezvous host"
