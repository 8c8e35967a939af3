"""Faults as text and the slots of a trace: every text is read as written or refused in one sentence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.callbacks.fault_injection import (
    KINDS,
    PLACES,
    Fault,
    Kind,
    distinct,
    parse_faults,
    slot_absences,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.failures import NS, Event

faults = st.builds(
    Fault,
    kind=st.sampled_from(("kill", "stop", "drop_node")),
    rank=st.integers(0, 7),
    step=st.integers(0, 99),
    place=st.sampled_from(PLACES),
)


def text_of(fault: Fault) -> str:
    seconds = f", seconds = {fault.seconds!r}" if fault.kind == "stop" else ""
    return f"step={fault.step},rank={fault.rank},place={fault.place}{seconds}"


@settings(deadline=None, max_examples=60)
@given(st.lists(faults, max_size=5, unique_by=lambda fault: fault.name))
def test_what_is_written_is_read(wanted: list[Fault]) -> None:
    for kind in ("kill", "stop", "drop_node"):
        mine = [fault for fault in wanted if fault.kind == kind]
        assert set(parse_faults(kind, "; ".join(map(text_of, mine)) if mine else None)) == set(mine)
        assert set(parse_faults(kind, [text_of(fault) for fault in mine])) == set(mine)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(KINDS), st.text(max_size=40))
def test_any_text_is_read_or_refused(kind: Kind, text: str) -> None:
    refusal = None
    found: tuple[Fault, ...] = ()
    try:
        found = parse_faults(kind, text)
    except ConfigurationError as error:
        refusal = str(error)
    assert bool(found) != bool(refusal)
    assert refusal is None or refusal.startswith(kind)


def test_kinds_are_known() -> None:
    with pytest.raises(ConfigurationError, match="kind='melt' of Fault must be 'kill' or 'stop'"):
        Fault(kind="melt", rank=0, step=0)  # type: ignore[arg-type]


def test_a_fault_is_due_at_its_place_and_step() -> None:
    fault = Fault(kind="kill", rank=1, step=30, place="backward")
    assert fault.is_due(step=30, place="backward")
    assert not fault.is_due(step=31, place="backward")
    assert not fault.is_due(step=30, place="forward")
    late = Fault(kind="kill", rank=1, step=30, place="validation")
    assert late.is_due(step=50, place="validation")
    assert not late.is_due(step=29, place="validation")
    slow = Fault(kind="slow", rank=0, step=5, steps=3)
    assert [step for step in range(20) if slow.slows(step)] == [5, 6, 7]
    assert not fault.slows(30)


def test_kinds_do_not_hide_each_other() -> None:
    both = distinct([*parse_faults("kill", "rank=0,step=2"), *parse_faults("stop", "rank=0,step=1")])
    assert [fault.kind for fault in both] == ["stop", "kill"]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Event], int]:
    """Events of a cluster that never has more nodes than slots."""
    num_slots = draw(st.integers(1, 5))
    live: list[int] = []
    changes, time_s, born = [], 0, 0
    for index in range(draw(st.integers(0, 12))):
        time_s += draw(st.integers(1, 5)) if index else 0
        failed = tuple(node for node in live if draw(st.booleans())) if index else ()
        live = [node for node in live if node not in failed]
        joined = tuple(range(born, born + draw(st.integers(0, num_slots - len(live)))))
        born += len(joined)
        live += joined
        changes.append(Event(time_ns=time_s * NS, failed=failed, joined=joined))
    return changes, num_slots


@settings(deadline=None, max_examples=150)
@given(clusters(), st.sampled_from([0.5, 1.0, 4.0]))
def test_slots_are_taken_as_often_as_there_are_nodes(cluster: tuple[list[Event], int], speed: float) -> None:
    changes, num_slots = cluster
    absences = slot_absences(changes, num_slots, speed=speed)
    live: set[int] = set()
    for index, change in enumerate(changes):
        live = (live - set(change.failed)) | set(change.joined)
        begin_s = change.time_ns / NS
        end_s = changes[index + 1].time_ns / NS if index + 1 < len(changes) else begin_s + 10
        now_s = (begin_s + end_s) / 2 / speed
        free = sum(any(absence.covers(now_s) for absence in slot) for slot in absences)
        assert free == num_slots - len(live)
        losses = sum(any(absence.from_s == begin_s / speed for absence in slot) for slot in absences)
        assert losses >= len(change.failed)
    for slot in absences:
        assert all(before.to_s <= after.from_s for before, after in pairwise(slot))
