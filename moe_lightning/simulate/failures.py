"""Events of nodes that leave and join: drawn from a distribution, at fixed intervals, or read from a real trace."""

from __future__ import annotations

import csv
import heapq
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from moe_lightning.config import NonNegativeInt, PositiveInt, shown, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text

_MILLISECONDS = re.compile(r"\s*[0-9]{1,15}\s*")
_MOST_FAILURES = 1e6

NS = 1_000_000_000
FailureKind = Literal["none", "exponential", "weibull", "periodic", "trace"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """At one instant some nodes leave and some come; both ascending."""

    time_ns: int
    failed: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


@validated
@dataclass(frozen=True, kw_only=True)
class Failures:
    """Changes of a cluster.

    Attributes:
        kind: "exponential" or "weibull" times between a node's failures; "periodic": every `period_s` one chosen at
            random; "trace": a file; "none".
        node_mtbf_hours: mean time between failures of one node.
        shape: of the Weibull distribution; below 1 failures cluster after a start, above 1 nodes wear out.
        period_s: of periodic failures.
        simultaneous: nodes that each failure takes, the others chosen at random.
        repair_s: after which a failed node, or its replacement, comes back; None: never.
        min_nodes: drawn failures never leave fewer.
        path: of a trace: lines of milliseconds, add or remove, name of the node, ascending in time.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    kind: FailureKind = "none"
    node_mtbf_hours: Annotated[float, Interval(gt=0, le=1e9)] = 10_000.0
    shape: Annotated[float, Interval(ge=0.1, le=100)] = 1.0
    period_s: Annotated[float, Interval(gt=0, le=1e9)] = 300.0
    simultaneous: PositiveInt = 1
    repair_s: Annotated[float, Interval(gt=0, le=1e9)] | None = None
    min_nodes: NonNegativeInt = 0
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "trace") != (self.path is not None):
            raise ConfigurationError(
                f"failures.kind={self.kind} with failures.path={shown(self.path)}: "
                "give a path with kind=trace, and only with it"
            )

    def events(self, num_nodes: int, duration_s: float, seed: int) -> list[Event]:
        """Changes of a cluster of `num_nodes`, the first at time 0 with the nodes that are there; ascending in time.

        Raises:
            ConfigurationError: a trace that is missing, unsorted or impossible, or failures that are too many.
        """
        end_ns = round(duration_s * NS)
        if self.kind == "trace":
            assert self.path is not None
            changes = read_trace(Path(self.path))
            if not any(event.joined for event in changes if event.time_ns < end_ns):
                raise ConfigurationError(f"{self.path} has no node in its first {duration_s:g} s: give another trace")
            return cap_nodes([event for event in changes if event.time_ns < end_ns], num_nodes)
        start = Event(time_ns=0, joined=tuple(range(num_nodes)))
        if self.kind == "none":
            return [start]
        self._check_number(num_nodes, duration_s)
        rng = np.random.default_rng(seed)
        if self.kind == "periodic":
            period_ns = round(self.period_s * NS)
            strikes = ((time_ns, None) for time_ns in range(period_ns, end_ns, period_ns))
            return [start, *self._strikes(num_nodes, strikes, end_ns, rng)]
        return [start, *self._drawn(num_nodes, end_ns, rng)]

    def _check_number(self, num_nodes: int, duration_s: float) -> None:
        name, number = "node_mtbf_hours", num_nodes * duration_s / 3600 / self.node_mtbf_hours
        if self.kind == "periodic":
            name, number = "period_s", duration_s / self.period_s
        if number > _MOST_FAILURES:
            raise ConfigurationError(
                f"failures.{name}={getattr(self, name)} makes about {number:.3g} failures, more than "
                f"{_MOST_FAILURES:g}, which would take days to simulate: raise it, or lower nodes or hours"
            )

    def _drawn(self, num_nodes: int, end_ns: int, rng: np.random.Generator) -> Iterator[Event]:
        shape = self.shape if self.kind == "weibull" else 1.0
        scale_ns = self.node_mtbf_hours * 3600 * NS / math.gamma(1 + 1 / shape)
        queue = [(round(x), node) for node, x in enumerate((scale_ns * rng.weibull(shape, num_nodes)).tolist())]
        heapq.heapify(queue)

        def strikes() -> Iterator[tuple[int, int | None]]:
            while queue and queue[0][0] < end_ns:
                time_ns, node = heapq.heappop(queue)
                yield time_ns, node
                again = time_ns + round((self.repair_s or 0) * NS) + max(1, round(scale_ns * float(rng.weibull(shape))))
                heapq.heappush(queue, (again, node))

        return self._strikes(num_nodes, strikes(), end_ns, rng)

    def _strikes(
        self, num_nodes: int, strikes: Iterable[tuple[int, int | None]], end_ns: int, rng: np.random.Generator
    ) -> Iterator[Event]:
        """Failures at the given times, of the given node or one at random, and what was repaired in between."""
        live = set(range(num_nodes))
        repairs: list[tuple[int, int]] = []
        for time_ns, node in strikes:
            yield from self._repaired(repairs, time_ns, live)
            count = min(self.simultaneous, len(live) - self.min_nodes)
            if count < 1 or (node is not None and node not in live):
                continue
            others = sorted(live - {node}) if node is not None else sorted(live)
            first = [] if node is None else [node]
            chosen = first + rng.permutation(others)[: count - len(first)].tolist()
            live -= set(chosen)
            if self.repair_s is not None:
                for lost in chosen:
                    heapq.heappush(repairs, (time_ns + round(self.repair_s * NS), lost))
            yield Event(time_ns=time_ns, failed=tuple(sorted(chosen)))
        yield from self._repaired(repairs, end_ns, live)

    @staticmethod
    def _repaired(repairs: list[tuple[int, int]], before_ns: int, live: set[int]) -> Iterator[Event]:
        while repairs and repairs[0][0] < before_ns:
            time_ns = repairs[0][0]
            back = []
            while repairs and repairs[0][0] == time_ns:
                back.append(heapq.heappop(repairs)[1])
            live.update(back)
            yield Event(time_ns=time_ns, joined=tuple(sorted(back)))


def read_trace(path: Path, start_ms: int = 0) -> list[Event]:
    """A trace of availability; nodes are numbered in the order in which they first come.

    Everything up to `start_ms` is summed up in the first event, at time 0.

    Raises:
        ConfigurationError: no such file, lines that are not milliseconds, action, node, times that fall, a node that
            comes twice or leaves without being there.
    """
    live: set[int] = set()
    numbers: dict[str, int] = {}
    changes: list[tuple[int, str, int]] = []
    last_ms = 0
    try:
        rows = list(csv.reader(io.StringIO(read_text(path), newline="")))
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"{path} cannot be read ({reason}): give a trace of milliseconds, add or remove, node"
        ) from error
    for line, row in enumerate(rows, start=1):
        time_ms, action, node = _parsed(row, f"{path}, line {line}")
        number = numbers.setdefault(node, len(numbers))
        if time_ms < last_ms:
            raise ConfigurationError(
                f"{path}, line {line}: time {time_ms} ms is before {last_ms} ms: sort the trace by time"
            )
        last_ms = time_ms
        if (action == "add") == (number in live):
            fault = "is added while it is there" if action == "add" else "is removed while it is not there"
            raise ConfigurationError(f"{path}, line {line}: {node} {fault}: mend the trace")
        live.symmetric_difference_update({number})
        changes.append((max(0, time_ms - start_ms), action, number))
    if not changes:
        raise ConfigurationError(f"{path} is empty: give a trace of milliseconds, add or remove, node")
    return _events(changes)


def _parsed(row: Sequence[str], where: str) -> tuple[int, str, str]:
    if len(row) != 3 or not _MILLISECONDS.fullmatch(row[0]) or row[1] not in ("add", "remove") or not _is_name(row[2]):
        raise ConfigurationError(f"{where}: {shown(','.join(row))} is not milliseconds,add|remove,node: mend the trace")
    return int(row[0]), row[1], row[2].strip()


def _is_name(text: str) -> bool:
    return text.isprintable() and text.strip() != ""


def _events(changes: Iterable[tuple[int, str, int]]) -> list[Event]:
    """One event for each instant; a node that leaves and comes at once has done both."""
    events = []
    there: set[int] = set()
    for time_ms, group in groupby(changes, key=lambda change: change[0]):
        before = set(there)
        touched = set()
        for _, action, node in group:
            touched.add(node)
            (there.add if action == "add" else there.discard)(node)
        replaced = touched & before & there if time_ms else set()
        events.append(
            Event(
                time_ns=time_ms * 1_000_000,
                failed=tuple(sorted((before - there) | replaced)),
                joined=tuple(sorted((there - before) | replaced)),
            )
        )
    return events


def cap_nodes(events: Sequence[Event], num_nodes: int) -> list[Event]:
    """The same changes for a cluster that takes at most `num_nodes`: a node that comes while it is full stays out."""
    inside: set[int] = set()
    capped: list[Event] = []
    for event in events:
        failed = tuple(node for node in event.failed if node in inside)
        inside -= set(failed)
        joined = event.joined[: num_nodes - len(inside)]
        inside |= set(joined)
        if failed or joined or not capped:
            capped.append(Event(time_ns=event.time_ns, failed=failed, joined=joined))
    return capped
