"""Slow ranks: which one the others wait for, in which phase of a step, and why.

Torch's flight recorder has the time at which each rank has begun each collective. A collective ends when the last of
its ranks has begun it, so what a rank does between the end of one and its begin of the next is its own time: computing,
data, callbacks, and no waiting for others. Marks of the strategy divide it into phases. Three times a minute, without a
collective and outside the main thread, the first rank asks for some steps to come, all publish theirs in the common
store when these have ended, and the first one compares them. In a pipeline ranks wait for others without a record: they
are not compared.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import traceback
import zlib
from base64 import b64decode, b64encode
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from types import FrameType
from typing import Literal, NamedTuple

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.parallel.context import LatestValues
from moe_lightning.strategies.process_stacks import is_blocked, place_of, waits_s
from moe_lightning.strategies.slow_links import Link, SlowHost, own_links, since, slowest_host

PERIOD_S = 20.0
SLOW_RATIO = 1.2
"""Own time over the median of the other ranks', from which a rank is reported."""

_LEAST_SHARE = 0.05  # of a step: less is not worth a line, whatever the ratio
_MOST_STEPS = 64
_MOST_CALLS = 20_000  # collectives of all ranks in a comparison
_MOST_SHARE = 0.01  # of the first rank's time for comparisons: those of a thousand ranks come less often
_FEW_STEPS = 4  # so many or more are compared without the longest one, which may be a single pause
_AHEAD, _AHEAD_S = 2, 0.4  # steps and time that a rank may be ahead when it publishes: they take the place of old ones
_WINDOWS = 3  # comparisons in a row before a line, and between two lines
_AGAIN_S = 1.0  # between two looks for what the others have published
StepPhase = Literal["setup", "evaluation", "forward", "backward", "update", "callbacks and data"]
"""Phase of a step of training, or of what is around it."""

_BEGIN_OF_STEP: StepPhase = "forward"
_WORK: tuple[StepPhase, ...] = ("forward", "backward")
"""Phases of which a slow rank has each place for longer."""

_NOT_COMPARED: StepPhase = "evaluation"

_MOST_FRAMES, _MOST_PLACES = 60, 4
_MOST_SAMPLES = 1000  # some minutes of them: where the first rank asks for nothing, none are taken out
_LEAST_EVIDENCE = 0.5  # of a rank's excess or of its samples, to be named as the cause
_LOADER = "/torch/utils/data/"

Place = tuple[tuple[str, int, str], ...]
"""Calls of the main thread: file, line and function, the innermost last."""


class Sample(NamedTuple):
    """Main thread of a rank at a moment.

    Attributes:
        is_blocked: it waits for a disk or another device.
    """

    phase: str
    place: Place
    is_blocked: bool


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
        waiting: share of the time since the last comparison in which one of its threads was ready and had no CPU: that
            which has waited longest.
        places: of each phase, the places where its main thread was most often, and the share of each.
        links: to other hosts.
    """

    first: int
    marks: Sequence[tuple[int, str]]
    begun: Sequence[int]
    calls: Sequence[Begun]
    waiting: float
    places: Mapping[str, Sequence[tuple[str, float]]]
    links: Sequence[Link] = ()

    @property
    def steps(self) -> tuple[int, int]:
        """The first one and their number."""
        return self.first, 1 + len(self.begun)

    def encode(self) -> str:
        """Return it as text of some ten bytes for each collective."""
        return b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> RankTimeline:
        """Return what `encode` has encoded."""
        values = json.loads(zlib.decompress(b64decode(text)))
        calls, links = [Begun(*call) for call in values["calls"]], [Link(*link) for link in values["links"]]
        return cls(**values | {"calls": calls, "links": links})


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
    """Return the rank with the longest own time beyond the median of the others. Its longest step does not count."""
    found = {phase: own for phase, own in own_times(ranks).items() if phase != _NOT_COMPARED}
    totals = sum(found.values(), start=np.zeros((len(ranks), 1)))
    steps = totals.shape[1]
    counted = np.argsort(totals, axis=1)[:, : steps - (steps >= _FEW_STEPS)]
    phases = {phase: np.take_along_axis(own, counted, axis=1).mean(axis=1) for phase, own in found.items()}
    marks, begun = ranks[0].marks, ranks[0].begun
    step_s = statistics.median(b - a for a, b in pairwise(marks[index][0] for index in (0, *begun, -1))) / 1e6
    excesses = [
        {phase: float(own[rank] - np.median(np.delete(own, rank))) for phase, own in phases.items()}
        for rank in range(len(ranks))
    ]
    rank = max(range(len(ranks)), key=lambda rank: sum(excesses[rank].values()))
    excess_s = sum(excesses[rank].values())
    usual_s = float(sum(own[rank] for own in phases.values())) - excess_s
    return SlowRank(
        rank=rank,
        ratio=1 + excess_s / max(usual_s, 1e-9),
        excess_s=excess_s,
        step_s=step_s,
        phases=excesses[rank],
        cause=_cause(rank, ranks, phases, excesses[rank], step_s),
    )


def _waits_more(rank: int, ranks: Sequence[RankTimeline]) -> float:
    """Return the share of the time that a rank waits for a CPU, less the median of the other ranks."""
    return ranks[rank].waiting - statistics.median(each.waiting for at, each in enumerate(ranks) if at != rank)


def _cause(
    rank: int,
    ranks: Sequence[RankTimeline],
    phases: Mapping[str, np.ndarray],
    excess: Mapping[str, float],
    step_s: float,
) -> str:
    own = ranks[rank]
    if _waits_more(rank, ranks) * step_s > _LEAST_EVIDENCE * sum(excess.values()):
        return f"other processes take its CPU, for which it waits {100 * own.waiting:.0f} % of the time"
    phase = max(excess, key=excess.__getitem__)
    is_work = phase in _WORK
    own_s = [float(phases[phase][rank if is_work else at]) for at in range(len(ranks))]
    seconds = [
        {place: share * s for place, share in r.places.get(phase, ())} for r, s in zip(ranks, own_s, strict=True)
    ]
    others = seconds[:rank] + seconds[rank + 1 :]
    more = {place: s - statistics.median(each.get(place, 0.0) for each in others) for place, s in seconds[rank].items()}
    place = max(more, key=more.__getitem__, default="")
    if place and more[place] > _LEAST_EVIDENCE * excess[phase]:
        return f"it is mostly {place}"
    if is_work:
        return "it computes more rows or more slowly; callbacks=load_balancer gives it fewer"
    return f"most of it is in the phase {phase}"


class SlowRankWatch:
    """Comparison of the ranks of a world, driven by the thread of `HangWatch`.

    Args:
        rank, size: of this process's world.
        store: of torch's default group.
        name: of this comparison in keys of the store, which may keep those of an earlier one.

    Attributes:
        last: the last comparison, on the first rank.
    """

    def __init__(self, rank: int, size: int, store: Store, name: str = "") -> None:
        self._rank, self._size, self._name = rank, size, name
        self._values = LatestValues(store)
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._since = time.monotonic(), waits_s()
        self._links: list[Link] = []
        self._asked: tuple[int, int] | None = None  # first and number of the steps
        self._published: tuple[int, int] | None = None
        self._look_at = self._next_at = self._until = 0.0
        self._in_a_row: dict[str, int] = {}  # comparisons, by a rank or the address of a host
        self.last: SlowRank | None = None

    def sample(self, phase: str, frame: FrameType | None) -> None:
        """Record where the main thread is in a phase."""
        place = _place(frame)
        if place and "/torch/distributed/" not in place[-1][0]:
            self._samples.append(Sample(phase, place, is_blocked(os.getpid())))

    def look(self, marks: Sequence[tuple[int, int, str]], calls: Callable[[], Sequence[Begun]]) -> None:
        """Take part in comparisons; to be called several times a second.

        Args:
            marks: time in nanoseconds, step and phase.
            calls: returns the last collectives, with nanoseconds.
        """
        now = time.monotonic()
        if self._rank == 0 and now > self._until:  # training has paused or ended, or a rank has no record of the steps
            self._asked = None
        if now >= self._look_at:
            if self._rank > 0:
                self._look_at = now + PERIOD_S / 10
                for text in self._values.get([self._key("asked")]):
                    first, number = json.loads(text)
                    self._asked = first, number
            elif self._asked is None:
                self._ask(list(marks), calls(), now)
            elif self._asked == self._published:
                self._compare(now)
        if self._asked is not None and self._asked != self._published and marks[-1][1] > sum(self._asked):
            self._publish(self._asked, list(marks), calls())

    def _ask(self, marks: Sequence[tuple[int, int, str]], calls: Sequence[Begun], now: float) -> None:
        """Ask all ranks for some steps to come, on the first one."""
        self._look_at = self._next_at = now + PERIOD_S
        if (chosen := steps_to_come(marks, calls, self._size)) is not None:
            first, number, seconds = chosen
            self._asked = first, number
            self._values.set(self._key("asked"), json.dumps(self._asked))
            self._look_at, self._until = now, now + PERIOD_S + 3 * seconds

    def _publish(self, asked: tuple[int, int], marks: Sequence[tuple[int, int, str]], calls: Sequence[Begun]) -> None:
        """Publish the steps that the first rank has asked for, if they are recorded."""
        (began, waited), (now, waits) = self._since, (time.monotonic(), waits_s())
        longest_s = max((s - waited.get(thread, 0.0) for thread, s in waits.items()), default=0.0)
        waiting, places = longest_s / max(now - began, 1e-9), _most_frequent(Counter(self._samples))
        found = timeline(*asked, marks, calls, waiting=waiting, places=places)
        self._published, self._since = asked, (now, waits)
        self._samples.clear()
        if found is not None:
            links = own_links()
            self._values.set(self._key(self._rank), replace(found, links=since(self._links, links)).encode())
            self._links = links

    def _compare(self, now: float) -> None:
        """Compare the ranks, on the first one, once all have published the same steps."""
        self._look_at = now + _AGAIN_S
        began = time.perf_counter()
        keys = [self._key(rank) for rank in range(self._size)]
        found = [RankTimeline.decode(text) for text in self._values.get(keys)]
        if not found or any(each.steps != self._asked for each in found):
            return
        self.last = slowest(found)
        host, lines = slowest_host([each.links for each in found]), {}
        if host is not None and (cost := cost_of(host, found[0], self.last.step_s)):
            lines[host.address] = f"slow: {host}{cost}"
        if self.last.is_slow and not lines:  # a slow link ends collectives of some ranks later than those of others
            lines[str(self.last.rank)] = f"slow: {self.last}"
        self._in_a_row = {each: 1 + self._in_a_row.get(each, 0) for each in lines}
        for each, line in lines.items():
            if self._in_a_row[each] % _WINDOWS == 0:
                write_to_terminal(line)
        self._asked = None
        self._look_at = max(self._next_at, now + (time.perf_counter() - began) / _MOST_SHARE)

    def _key(self, what: object) -> str:
        return f"slow/{self._name}/{what}"


def cost_of(host: SlowHost, rank: RankTimeline, step_s: float) -> str:
    """Return in words what a slow link costs a step where nothing hides it; "" if that is too little to name it."""
    cost_s = len(rank.calls) / rank.steps[1] * (host.rtt_s - host.usual_rtt_s) / 2
    if cost_s > (SLOW_RATIO - 1) * step_s:
        return f"; up to {1e3 * cost_s:.0f} ms of a step of {1e3 * step_s:.0f} ms"
    return "; packets are lost" if host.loses else ""


def steps_to_come(
    marks: Sequence[tuple[int, int, str]], calls: Sequence[Begun], size: int
) -> tuple[int, int, float] | None:
    """Return the first and the number of steps that every rank will know of in time, and have in its record when they
    have ended, which has room for so many collectives; and the seconds until then. None if there are none.

    Args:
        marks, calls: see `SlowRankWatch.look`.
        size: number of ranks.
    """
    known = [marks[index] for index in _begins(marks) if calls and marks[index][0] >= calls[0].at]
    if len(known) < 2:
        return None
    step_s = (known[-1][0] - known[0][0]) / 1e9 / (len(known) - 1)
    recorded = len(known) - 1 - _AHEAD - math.ceil(_AHEAD_S / step_s)
    affordable = max(1, _MOST_CALLS * len(known) // (size * len(calls)))
    number = min(_MOST_STEPS, recorded, affordable, max(1, round(0.6 * PERIOD_S / step_s)))
    until_known = 1 + math.ceil(PERIOD_S / 5 / step_s)
    return (known[-1][1] + until_known, number, (until_known + number) * step_s) if number > 0 else None


def _begins(marks: Sequence[tuple[int, int, str]]) -> list[int]:
    """Return the indices of marks that begin a step, of its first micro-batch."""
    found: list[int] = []
    for index, (_, step, phase) in enumerate(marks):
        if phase == _BEGIN_OF_STEP and (not found or marks[found[-1]][1] != step):
            found.append(index)
    return found


def timeline(
    first: int,
    number: int,
    marks: Sequence[tuple[int, int, str]],
    calls: Sequence[Begun],
    *,
    waiting: float,
    places: Mapping[str, Sequence[tuple[str, float]]],
) -> RankTimeline | None:
    """Return some steps; None if they are not recorded, or not whole.

    Args:
        first, number: of the steps.
        marks, calls: see `SlowRankWatch.publish`.
        waiting, places: see `RankTimeline`.
    """
    chosen = [index for index in _begins(marks) if first <= marks[index][1] <= first + number]
    if [marks[index][1] for index in chosen] != list(range(first, first + number + 1)):
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


def _place(frame: FrameType | None) -> Place:
    calls = () if frame is None else islice(traceback.walk_stack(frame), _MOST_FRAMES)
    return tuple((call.f_code.co_filename, line, call.f_code.co_name) for call, line in calls)[::-1]


def _most_frequent(samples: Mapping[Sample, int]) -> dict[str, list[tuple[str, float]]]:
    """Return the places of each phase in which most samples are, in words, and the share of each of them."""
    by_phase: dict[str, Counter[str]] = {}
    for (phase, place, waits), count in samples.items():
        words = place_of([traceback.FrameSummary(*call) for call in place])
        is_loader = any(_LOADER in path for path, *_ in place)
        text = f"in its data loader{': ' * bool(words)}{words}" if is_loader else f"at {words}" if words else ""
        text = f"waiting for a disk or a device, {text or 'in torch'}" if waits else text
        by_phase.setdefault(phase, Counter())[text] += count
    return {
        phase: [(text, count / sum(counts.values())) for text, count in counts.most_common(_MOST_PLACES)]
        for phase, counts in by_phase.items()
    }
