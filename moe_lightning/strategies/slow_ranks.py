"""Slow ranks: which one the others wait for, in which phase of a step, and why.

Torch's flight recorder has the time at which each rank has begun each collective. A collective ends when the last of
its ranks has begun it, so what a rank does between the end of one and its begin of the next is its own time: computing,
data, callbacks, and no waiting for others. Marks of the strategy divide it into phases. Once a minute, without a
collective and outside the main thread, ranks publish 16 steps in the common store, and the first one compares them.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
import zlib
from base64 import b64decode, b64encode
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from types import FrameType
from typing import NamedTuple

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.strategies.process_stacks import place_of, waiting_s

PERIOD_S = 60.0
SLOW_RATIO = 1.2
"""Own time over the median of the other ranks', from which a rank is reported."""

_LEAST_SHARE = 0.05  # of a step: less is not worth a line, whatever the ratio
_STEPS, _SKIPPED = 16, 2  # of a comparison, and its longest ones, which may be single pauses
_FAST_S, _FAST_STEPS = 0.05, 64  # ranks that look 0.2 s apart choose the same steps
_WINDOWS = 2  # in a row, before a line
_PATIENCE_S = 2.0
_MOST_FRAMES = 60
_LEAST_EVIDENCE = 0.5  # of a rank's excess or of its samples, to be named as the cause
_LOADER = "/torch/utils/data/"

Place = tuple[tuple[str, int, str], ...]
"""Calls of the main thread: file, line and function, the innermost last."""


class Begun(NamedTuple):
    """A collective that a rank has begun.

    Attributes:
        group, number: the same on all ranks of it.
        at: time, in microseconds where ranks are compared.
        waits: the rank begins no other one before this has ended.
    """

    group: str
    number: int
    at: int
    waits: bool = True


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """Some steps of one rank.

    Attributes:
        first: number of the first one.
        marks: time in microseconds and phase, sorted; the first one begins the first step, the last one ends the last.
        begun: of each step after the first, the index of its first mark.
        calls: collectives, in the order of their begin.
        waiting: share of the time since the last comparison in which its threads were ready and had no CPU.
        places: of each phase, the place where its main thread was most often, and the share of that.
    """

    first: int
    marks: Sequence[tuple[int, str]]
    begun: Sequence[int]
    calls: Sequence[Begun]
    waiting: float
    places: Mapping[str, tuple[str, float]]

    def encode(self) -> str:
        """Return it as text of one or two kilobytes."""
        return b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> RankTimeline:
        """Return what `encode` has encoded."""
        values = json.loads(zlib.decompress(b64decode(text)))
        return cls(**values | {"calls": [Begun(*call) for call in values["calls"]]})


def clock_offsets_us(ranks: Sequence[RankTimeline]) -> list[float]:
    """Return how far each rank's clock is ahead of that of the first, in microseconds; 0 where it may be the same.

    No rank begins its next collective before all have begun the last one. For each two ranks that bounds the offset in
    both directions, and so does each way over other ranks.
    """
    after = [{call[:2]: (call.at, then.at) for call, then in pairwise(rank.calls) if call.waits} for rank in ranks]
    common = sorted(set(after[0]).intersection(*after))
    if not common:
        return [0.0] * len(ranks)
    own = np.array([[times[key] for key in common] for times in after], dtype=np.int64)  # [ranks, calls, 2]
    most = np.array([(own[rank, :, 1] - own[:, :, 0]).min(axis=1) for rank in range(len(ranks))])
    for between in range(len(ranks)):
        most = np.minimum(most, most[:, between, None] + most[between])
    bounds = zip((-most[0]).tolist(), most[:, 0].tolist(), strict=True)
    return [0.0 if least <= 0 <= upper or least > upper else (least + upper) / 2 for least, upper in bounds]


def own_times(ranks: Sequence[RankTimeline]) -> dict[str, np.ndarray]:
    """Return the own time of each rank in each step by phase, in seconds, float64 [ranks, steps]."""
    offsets = clock_offsets_us(ranks)
    last: dict[tuple[str, int], float] = {}
    for rank, offset in zip(ranks, offsets, strict=True):
        for call in rank.calls:
            last[call[:2]] = max(call.at - offset, last.get(call[:2], -np.inf))
    steps = min(len(rank.begun) + 1 for rank in ranks)
    found: dict[str, np.ndarray] = {}
    for index, (rank, offset) in enumerate(zip(ranks, offsets, strict=True)):
        times = [at for at, _ in rank.marks]
        free = float(times[0])
        for call in (*rank.calls, Begun("", 0, times[-1])):
            for mark, (began, ended) in _cut(times, free, call.at):
                step = bisect(rank.begun, mark)
                row = found.setdefault(rank.marks[mark][1], np.zeros((len(ranks), steps)))
                if step < steps:
                    row[index, step] += (ended - began) / 1e6
            free = max(free, call.at, last.get(call[:2], 0.0) + offset)
    return found


def _cut(times: Sequence[int], began: float, ended: float) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield the parts of an interval between marks, each with the index of the mark that begins it."""
    mark = max(0, bisect(times, began) - 1)
    while began < ended and mark < len(times) - 1:
        until = min(ended, times[mark + 1])
        if until > began:
            yield mark, (began, until)
        began, mark = max(began, until), mark + 1


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """The slowest rank of a comparison.

    Attributes:
        rank: its number.
        ratio: of its own time to the median of the others'.
        excess_s: own time beyond that, in a step.
        step_s: median of the steps.
        phases: excess by phase, in seconds of a step.
        cause: in words.
    """

    rank: int
    ratio: float
    excess_s: float
    step_s: float
    phases: Mapping[str, float]
    cause: str = ""

    @property
    def is_slow(self) -> bool:
        """True if it is worth a line."""
        return self.ratio > SLOW_RATIO and self.excess_s > _LEAST_SHARE * self.step_s

    def __str__(self) -> str:
        parts = sorted(self.phases.items(), key=lambda each: -each[1])
        shown = ", ".join(f"{phase} {1e3 * s:.0f}" for phase, s in parts if s > 0.1 * self.excess_s)
        return (
            f"rank {self.rank} needs {self.ratio:.1f} times the median of the others for its part of a step, "
            f"{1e3 * self.excess_s:.0f} ms more ({shown}): {self.cause}"
        )


def slowest(ranks: Sequence[RankTimeline]) -> SlowRank:
    """Return the rank with the longest own time. The longest steps of each rank do not count."""
    found = own_times(ranks)
    totals = sum(found.values(), start=np.zeros((len(ranks), 1)))
    counted = np.argsort(totals, axis=1)[:, : max(1, totals.shape[1] - _SKIPPED)]
    phases = {phase: np.take_along_axis(own, counted, axis=1).mean(axis=1) for phase, own in found.items()}
    means = np.take_along_axis(totals, counted, axis=1).mean(axis=1)
    rank = int(means.argmax())
    usual = float(np.median(np.delete(means, rank)))
    excess = {phase: float(own[rank] - np.median(np.delete(own, rank))) for phase, own in phases.items()}
    first = ranks[0]
    begun_us = [first.marks[index][0] for index in (0, *first.begun, -1)]
    step_s = statistics.median(after - before for before, after in pairwise(begun_us)) / 1e6
    return SlowRank(
        rank=rank,
        ratio=float(means[rank]) / max(usual, 1e-9),
        excess_s=float(means[rank]) - usual,
        step_s=step_s,
        phases=excess,
        cause=_cause(rank, ranks, excess, step_s),
    )


def _cause(rank: int, ranks: Sequence[RankTimeline], excess: Mapping[str, float], step_s: float) -> str:
    own = ranks[rank]
    waiting = own.waiting - statistics.median(each.waiting for index, each in enumerate(ranks) if index != rank)
    if waiting * step_s > _LEAST_EVIDENCE * sum(excess.values()):
        return f"other processes take its CPU, for which its threads wait {100 * own.waiting:.0f} % of the time"
    phase = max(excess, key=excess.__getitem__)
    place, share = own.places.get(phase, ("", 0.0))
    if share > _LEAST_EVIDENCE and place:
        return f"it is mostly {place}"
    if phase in ("forward", "backward"):
        return "it computes more rows or more slowly; callbacks=load_balancer gives it fewer"
    return f"most of it is in the phase {phase}"


class SlowRankWatch:
    """Comparison of the ranks of a world, driven by the thread of `HangWatch`.

    Args:
        rank, size: of this process's world.
        store: of torch's default group.

    Attributes:
        last: the last comparison, on the first rank.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._due = _next_due()
        self._samples: Counter[tuple[str, Place]] = Counter()
        self._since = time.time(), waiting_s()
        self._first = -1
        self._awaited_until: float | None = None
        self._in_a_row: tuple[int, int] = (-1, 0)  # rank, comparisons
        self.last: SlowRank | None = None

    def sample(self, phase: str, frame: FrameType | None) -> None:
        """Record where the main thread is in a phase."""
        place = _place(frame)
        if place and "/torch/distributed/" not in place[-1][0]:
            self._samples[phase, place] += 1

    @property
    def is_due(self) -> bool:
        """True if this rank shall publish its steps."""
        return time.time() >= self._due

    def publish(self, marks: Sequence[tuple[int, int, str]], calls: Sequence[Begun]) -> None:
        """Publish the last steps, if they are others than before.

        Args:
            marks: time in nanoseconds, step and phase.
            calls: the last collectives, with nanoseconds.
        """
        self._due = _next_due()
        began, waited = self._since
        self._since = time.time(), waiting_s()
        waiting = (self._since[1] - waited) / max(self._since[0] - began, 1e-9)
        places = _most_frequent(self._samples)
        self._samples.clear()
        steps = chosen_steps(marks, calls, waiting=waiting, places=places)
        if steps is None or steps.first == self._first:
            return
        self._first = steps.first
        self._store.set(f"slow/{self._rank}", steps.encode())
        self._awaited_until = time.monotonic() + _PATIENCE_S if self._rank == 0 else None

    def compare(self) -> None:
        """Compare the ranks, on the first one, once all have published the same steps."""
        if self._awaited_until is None:
            return
        keys = [f"slow/{rank}" for rank in range(self._size)]
        found = [RankTimeline.decode(self._store.get(key)) for key in keys] if self._store.check(keys) else []
        if not found or any(steps.first != self._first for steps in found):
            if time.monotonic() > self._awaited_until:
                self._awaited_until = None
            return
        self._awaited_until = None
        self.last = slowest(found)
        rank, times = self._in_a_row
        self._in_a_row = (self.last.rank, times + 1 if self.last.rank == rank else 1) if self.last.is_slow else (-1, 0)
        if self._in_a_row[1] >= _WINDOWS:
            write_to_terminal(f"slow: {self.last}")


def chosen_steps(
    marks: Sequence[tuple[int, int, str]],
    calls: Sequence[Begun],
    *,
    waiting: float,
    places: Mapping[str, tuple[str, float]],
) -> RankTimeline | None:
    """Return the last whole steps that all ranks choose alike; None if they are not recorded.

    Args:
        marks, calls: see `SlowRankWatch.publish`.
        waiting, places: see `RankTimeline`.
    """
    begins = [
        index
        for index, (_, step, phase) in enumerate(marks)
        if phase == "forward" and (index == 0 or marks[index - 1][1] != step)
    ]
    if len(begins) <= _STEPS:
        return None
    step_s = (marks[begins[-1]][0] - marks[begins[0]][0]) / 1e9 / (len(begins) - 1)
    unit = _STEPS if step_s > _FAST_S else _FAST_STEPS
    first = marks[begins[-1]][1] // unit * unit - _STEPS
    chosen = [index for index in begins if first <= marks[index][1] <= first + _STEPS]
    if [marks[index][1] for index in chosen] != list(range(first, first + _STEPS + 1)):
        return None
    begin_ns, end_ns = marks[chosen[0]][0], marks[chosen[-1]][0]
    inside = [call._replace(at=call.at // 1000) for call in calls if begin_ns <= call.at <= end_ns]
    if not inside or calls[0].at > begin_ns:
        return None
    return RankTimeline(
        first=first,
        marks=[(at // 1000, phase) for at, _, phase in marks[chosen[0] : chosen[-1] + 1]],
        begun=[index - chosen[0] for index in chosen[1:-1]],
        calls=inside,
        waiting=waiting,
        places=places,
    )


def _next_due() -> float:
    """Return the next time that all ranks have in common."""
    return (time.time() // PERIOD_S + 1) * PERIOD_S


def _place(frame: FrameType | None) -> Place:
    calls = () if frame is None else islice(traceback.walk_stack(frame), _MOST_FRAMES)
    return tuple((call.f_code.co_filename, line, call.f_code.co_name) for call, line in calls)[::-1]


def _most_frequent(samples: Mapping[tuple[str, Place], int]) -> dict[str, tuple[str, float]]:
    """Return the place of each phase in which most samples are, in words, and its share of them."""
    by_phase: dict[str, Counter[str]] = {}
    for (phase, place), count in samples.items():
        words = place_of([traceback.FrameSummary(*call) for call in place])
        is_loader = any(_LOADER in path for path, *_ in place)
        text = f"in its data loader{': ' * bool(words)}{words}" if is_loader else f"at {words}" if words else ""
        by_phase.setdefault(phase, Counter())[text] += count
    return {
        phase: (text, count / sum(counts.values()))
        for phase, counts in by_phase.items()
        for text, count in counts.most_common(1)
    }
