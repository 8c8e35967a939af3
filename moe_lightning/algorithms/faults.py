"""Faults on purpose, as text and as plans: which rank suffers what, where in which step, and when nodes come and go.

parse_faults("kill", "rank=1,step=30")
parse_faults("stop", "rank=0,step=40,seconds=5,place=backward; rank=2,step=60,seconds=5")
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moe_lightning.errors import ConfigurationError

Kind = Literal["kill", "stop", "slow", "drop_node", "corrupt_arena", "fill_disk"]
Place = Literal["forward", "backward", "gradients", "update", "step_end", "validation", "recovery"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PLACES: tuple[Place, ...] = get_args(Place)

_PASSED_AT_ANY_STEP = ("validation", "recovery")
"""Places that not every step has: the first one from the step on counts."""

# What each kind takes beside rank and step: its default, or None where it must be given.
_OPTIONS: dict[Kind, dict[str, Any]] = {
    "kill": {"place": "forward"},
    "stop": {"place": "forward", "seconds": 10.0},
    "slow": {"factor": 2.0, "steps": 10},
    "drop_node": {"place": "forward"},
    "corrupt_arena": {"place": "forward"},
    "fill_disk": {"folder": None, "megabytes": None, "seconds": 10.0},
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: "kill" (SIGKILL), "stop" (SIGSTOP, and SIGCONT after `seconds`), "slow" (forward and backward take
            `factor` times as long for `steps` steps), "drop_node" (all ranks of the rank's node are killed and their
            snapshots deleted), "corrupt_arena" (every snapshot of the rank is damaged), "fill_disk" (at most
            `megabytes` of a `folder` are taken for `seconds`).
        rank: of the world in which the step is trained.
        step: optimizer steps done before.
        place: before the "forward" or "backward" pass; with the step's "gradients" summed; in the "update", when this
            rank has applied it and others may not have; at "step_end"; in a "validation" or at the end of a
            "recovery", the first from the step on.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    kind: Kind
    rank: int
    step: int
    place: Place = "forward"
    seconds: float = 10.0
    factor: float = 2.0
    steps: int = 10
    folder: str = ""
    megabytes: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"a fault {self.kind!r} is not known: use one of {', '.join(KINDS)}")
        if self.place not in PLACES:
            raise ConfigurationError(f"{self.kind}: place={self.place} is not known: use one of {', '.join(PLACES)}")
        if self.rank < 0 or self.step < 0:
            raise ConfigurationError(f"{self.kind}: rank={self.rank} and step={self.step} must be at least 0")
        if self.steps < 1:
            raise ConfigurationError(f"{self.kind}: steps={self.steps} must be at least 1")
        if not 0 < self.seconds < math.inf:
            raise ConfigurationError(f"{self.kind}: seconds={self.seconds:g} must be above 0 and finite")
        if not 1 < self.factor < math.inf:
            raise ConfigurationError(f"{self.kind}: factor={self.factor:g} must be above 1 and finite")
        if self.kind == "fill_disk" and not (self.folder and 0 < self.megabytes < math.inf):
            raise ConfigurationError(
                f"fill_disk: folder={self.folder} and megabytes={self.megabytes:g} must name a folder and a finite "
                "number above 0"
            )

    @property
    def name(self) -> str:
        """Tells it from all other faults of a run."""
        return f"{self.kind}.rank{self.rank}.step{self.step}.{self.place}"

    def is_due(self, *, step: int, place: Place) -> bool:
        """Whether it strikes here, on its rank."""
        if place != self.place:
            return False
        return step >= self.step if place in _PASSED_AT_ANY_STEP else step == self.step

    def slows(self, step: int) -> bool:
        """Whether a step is one of those that it makes slow."""
        return self.kind == "slow" and self.step <= step < self.step + self.steps


def parse_faults(kind: Kind, texts: str | Sequence[str] | None) -> tuple[Fault, ...]:
    """Faults of one kind from "rank=1,step=30" and its like, several separated by semicolons or in a list.

    Raises:
        ConfigurationError: a name that the kind does not take, one that is missing or comes twice, a value that is no
            number or out of range, the same fault twice.
    """
    lines = [] if texts is None else [texts] if isinstance(texts, str) else list(texts)
    faults = [_parsed(kind, part.strip()) for line in lines for part in str(line).split(";") if part.strip()]
    if lines and not faults:
        raise ConfigurationError(f"{kind}={lines[0]!r} names no fault: write {_example(kind)}, or null for none")
    return distinct(faults)


def distinct(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults in the order of their steps.

    Raises:
        ConfigurationError: one comes twice; as each strikes once in a run, the second never would.
    """
    known: dict[str, Fault] = {}
    for fault in sorted(faults, key=lambda f: (f.step, f.name)):
        if fault.name in known:
            raise ConfigurationError(
                f"{fault.kind} strikes rank {fault.rank} twice at step {fault.step}, {fault.place}: change one"
            )
        known[fault.name] = fault
    return tuple(known.values())


def _parsed(kind: Kind, text: str) -> Fault:
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (equals and name and value):
            raise ConfigurationError(f"{kind}={text!r} cannot be read at {part.strip()!r}: write {_example(kind)}")
        if name in given:
            raise ConfigurationError(f"{kind}={text!r} says {name} twice: say it once")
        given[name] = value
    options = _OPTIONS[kind]
    taken = ("rank", "step", *options)
    for name in given:
        if name not in taken:
            raise ConfigurationError(f"{kind}={text!r}: {name} is not one of {', '.join(taken)}")
    for name in taken:
        if name not in given and options.get(name) is None:
            raise ConfigurationError(f"{kind}={text!r} lacks {name}: write {_example(kind)}")
    return Fault(kind=kind, **{**options, **_values(kind, given)})


def _values(kind: Kind, given: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in given.items():
        whole = name in ("rank", "step", "steps")
        try:
            values[name] = text if name in ("place", "folder") else int(text) if whole else float(text)
        except ValueError:
            raise ConfigurationError(f"{kind}: {name}={text} is not {'an integer' if whole else 'a number'}") from None
    return values


def _example(kind: Kind) -> str:
    extra = {"fill_disk": ",folder=FOLDER,megabytes=100", "stop": ",seconds=10", "slow": ",factor=2"}
    return f"rank=1,step=30{extra.get(kind, '')}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """At one moment some nodes leave and then some come."""

    time_s: float
    failed: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A slot has no node from `from_s` on, until `to_s`."""

    from_s: float
    to_s: float = math.inf

    def covers(self, time_s: float) -> bool:
        """Whether the slot is empty then."""
        return self.from_s <= time_s < self.to_s


def slot_absences(changes: Iterable[Change], num_slots: int, *, speed: float = 1.0) -> list[tuple[Absence, ...]]:
    """When each of so many slots has no node, as nodes come and go: who comes takes the lowest free slot.

    Args:
        changes: ascending in time, never more than `num_slots` nodes at once; the first one fills the slots at the
            start.
        num_slots: workers of the run.
        speed: seconds of the changes that pass in one second.

    Raises:
        ConfigurationError: more nodes than slots, a node that leaves without being there, or a speed of 0 or less.
    """
    if not 0 < speed < math.inf:
        raise ConfigurationError(f"speed={speed:g} must be above 0 and finite")
    slot_of: dict[int, int] = {}
    empty_since = dict.fromkeys(range(num_slots), 0.0)
    absences: list[list[Absence]] = [[] for _ in range(num_slots)]
    for change in changes:
        time_s = change.time_s / speed
        for node in change.failed:
            if node not in slot_of:
                raise ConfigurationError(f"node {node} leaves at {change.time_s:g} s without being there")
            empty_since[slot_of.pop(node)] = time_s
        for node in change.joined:
            if not empty_since:
                raise ConfigurationError(
                    f"node {node} comes at {change.time_s:g} s, but none of {num_slots} slots is free"
                )
            slot = min(empty_since)
            since_s = empty_since.pop(slot)
            if since_s < time_s:
                absences[slot].append(Absence(from_s=since_s, to_s=time_s))
            elif time_s > 0:  # another node at the same moment: its predecessor's process ends all the same
                absences[slot].append(Absence(from_s=time_s, to_s=time_s))
            slot_of[node] = slot
    for slot, since_s in empty_since.items():
        absences[slot].append(Absence(from_s=since_s))
    return [tuple(found) for found in absences]


def next_loss_s(absences: Sequence[Absence], time_s: float) -> float | None:
    """The next moment after `time_s` at which the slot loses its node."""
    return min((absence.from_s for absence in absences if absence.from_s > time_s), default=None)


def returns_at_s(absences: Sequence[Absence], time_s: float) -> float:
    """From when on the slot has a node: `time_s` itself where it has one."""
    return next((absence.to_s for absence in absences if absence.covers(time_s)), time_s)
