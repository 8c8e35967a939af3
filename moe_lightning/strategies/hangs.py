"""Hangs: one report when no step ends for a while.

Every process group counts its collectives, and torch's flight recorder keeps the last ones of this process with group,
operation and sizes; this module adds the step and its phase. A thread of each rank reads the counts several times a
second. Where nothing has changed for the limit, it publishes in the common store what this rank is doing. The first
rank that does so writes the report, of all ranks, once all have published or some seconds have passed: the ranks that
the others wait for have begun fewer collectives of some group, or have published nothing. A rank of the same machine
looks at the process of such a rank, which may be stopped, or hold the interpreter's lock.

Ranks that are all slow at the same place (they fetch data, compile, validate) have equal counts: nothing is reported.
Ranks with equal counts may wait in different collectives: torch's record shows the first one in which they differ.
Stages of a pipeline send and receive without a record: after `_LATE_FACTOR` times the limit the places are reported.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import sys
import tempfile
import threading
import time
import traceback
from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from moe_lightning.compat import private_torch
from moe_lightning.elastic.protocol import ProcessClock
from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.files import machine_folder
from moe_lightning.parallel.context import LatestValues, World, common_store
from moe_lightning.strategies import process_stacks
from moe_lightning.strategies.process_stacks import Process, Seen, place_of, relative
from moe_lightning.strategies.slow_ranks import Begun, SlowRank, SlowRankWatch, StepPhase
from moe_lightning.user_errors import ALARMS

_LOOK_S = 0.2
_ASK_S = 0.5  # between two requests to the store, of a rank that has published
_GRACE_S = 1.5
"""Time that ranks have to publish after the first one."""

_LATE_FACTOR = 5
"""Times the limit: before the first whole batch, in which code is compiled."""

_MOST_CALLS, _MOST_MARKS = 256, 2048
_COLLECTIVES = "/torch/distributed/"
_LOADER = "/torch/utils/data/dataloader.py"
_SAME_SIZES = {"all_reduce", "broadcast", "all_gather", "_all_gather_base", "_allgather_base"}
"""Operations to which all ranks give tensors of one size."""

_PAIRS = {"send", "recv", "recvAnySource"}
"""Operations of two ranks, whose order differs between the ranks of a group."""

_THREAD_END_S = 1.0

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """A collective that this rank has begun.

    Attributes:
        group: see `_Watched`.
        number: in the group, from one.
        sizes: of the tensors that this rank gives.
        is_done: else this rank waits in it.
        step, phase: in which it has begun.
    """

    group: str
    number: int
    operation: str
    sizes: list[list[int]]
    is_done: bool
    step: int
    phase: str

    def __str__(self) -> str:
        return f"{self.operation}{self.sizes} {self.number} of {self.group.partition(' ')[0]}"


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """A rank that makes no progress.

    Attributes:
        counts: collectives that it has begun, by group.
        step, phase: of training.
        place: of its main thread, see `place_of`.
        in_collective: the main thread waits in a collective.
        calls: the last collectives.
        stacks: of all threads.
        workers: places of the workers of data loaders, by process id, if the main thread waits for one.
    """

    counts: Mapping[str, int]
    place: str
    step: int = 0
    phase: str = ""
    in_collective: bool = False
    calls: Sequence[Call] = ()
    stacks: str = ""
    workers: Mapping[str, str] = field(default_factory=dict)

    @property
    def waits_in(self) -> Call | None:
        """The collective that it waits in."""
        return next((call for call in self.calls if not call.is_done), None)


def awaited(ranks: Mapping[int, Standstill]) -> list[int]:
    """Return the ranks that have begun fewer collectives of some group than others in it, but for those that wait for
    another one of these; all of them where each does.
    """
    most: dict[str, int] = {}
    for rank in ranks.values():
        for group, count in rank.counts.items():
            most[group] = max(count, most.get(group, 0))
    late = sorted(r for r, rank in ranks.items() if any(count < most[g] for g, count in rank.counts.items()))

    def waits_for_another(rank: int) -> bool:
        call = ranks[rank].waits_in
        return call is not None and any(ranks[r].counts.get(call.group, call.number) < call.number for r in late)

    return [rank for rank in late if not waits_for_another(rank)] or late


def are_apart(ranks: Mapping[int, Standstill]) -> bool:
    """Return True if ranks wait in collectives at different places."""
    return len({rank.place for rank in ranks.values() if rank.in_collective}) > 1


def first_difference(ranks: Mapping[int, Standstill]) -> dict[str, list[int]]:
    """Return the first collective of a group that is not the same one on all its ranks, as text, with the ranks that
    have begun it so; empty if there is none in their records.
    """
    found: dict[tuple[int, str], dict[str, list[int]]] = {}
    for rank, stalled in ranks.items():
        for call in stalled.calls:
            if call.operation in _PAIRS:
                continue
            text = str(call if call.operation in _SAME_SIZES else call._replace(sizes=[])).replace("[] ", " ")
            found.setdefault((call.number, call.group), {}).setdefault(text, []).append(rank)
    differing = {at: texts for at, texts in found.items() if len(texts) > 1}
    return differing[min(differing)] if differing else {}


_APART = (
    "a call that every rank must make (save_checkpoint, should_stop, log with sync_dist=True, a collective) was "
    "probably made on some of them only, or in another order"
)

_NETWORK = "all ranks have come to it, so look at the network between them"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Report of ranks that make no progress.

    Attributes:
        seconds: without a step.
        ranks: those that have published.
        silent: the processes of the other ones; None: nobody could look at it.
        is_late: the limit has passed several times.
    """

    seconds: float
    ranks: Mapping[int, Standstill]
    silent: Mapping[int, Seen | None] = field(default_factory=dict)
    is_late: bool = False

    @property
    def culprits(self) -> list[int]:
        """The ranks that the others wait for."""
        return sorted(self.silent) or awaited(self.ranks)

    def lines(self) -> list[str]:
        """Return who waits for whom, where these are, and if the order of collectives differs; empty if nothing is
        certain.
        """
        late, stalled = self.culprits, sorted(self.ranks)
        waiting = [rank for rank in stalled if rank not in late]
        different = {} if self.silent else first_difference(self.ranks)
        each_other = f"{_named(stalled, '', 'wait')} for each other"
        if different:
            calls = "; ".join(f"{_named(ranks, 'has', 'have')} called {call}" for call, ranks in different.items())
            who, where, order = each_other, self._places(stalled), f"{calls}: {_APART}"
        elif late and waiting:
            call = next((call for rank in waiting if (call := self.ranks[rank].waits_in) is not None), None)
            in_call = "" if call is None else f" in {call}, step {call.step}, {call.phase}"
            who = f"{_named(waiting, 'waits', 'wait')} for {_named(late)}{in_call}"
            where, order = self._places(late), "the order of collectives is the same on all ranks"
        elif late or (are_apart(self.ranks) and (self.is_late or self._all_wait)):
            who, where, order = each_other, self._places(stalled), _APART
        elif self._all_wait:
            who, where, order = f"all ranks wait in {self.ranks[0].waits_in}", self._places(stalled), _NETWORK
        else:
            return []
        return [f"no step for {self.seconds:.0f} s: {who}", where, order]

    @property
    def _all_wait(self) -> bool:
        """True if every rank waits in a collective, so that none computes."""
        return not self.silent and all(rank.waits_in is not None for rank in self.ranks.values())

    def _places(self, ranks: Sequence[int]) -> str:
        by_place: dict[str, list[int]] = {}
        for rank in ranks:
            by_place.setdefault(self._place(rank), []).append(rank)
        return "; ".join(f"{_named(of)}: {place}" for place, of in by_place.items())

    def _place(self, rank: int) -> str:
        if rank in self.ranks:
            stalled = self.ranks[rank]
            return stalled.place + "".join(f"; its loader's process {pid}: {at}" for pid, at in stalled.workers.items())
        seen = self.silent[rank]
        if seen is None:
            return "gives no sign, and nobody on its machine answers"
        return f"gives no sign, its process {seen.state}{': ' if seen.stacks else ''}{place_of(seen.frames)}"

    def text(self) -> str:
        """Return the report: the lines, then for each rank its collectives and stacks."""
        blocks = ["\n".join(self.lines())]
        for rank, stalled in sorted(self.ranks.items()):
            head = f"rank {rank} in step {stalled.step}, {stalled.phase}: {self._place(rank)}"
            calls = [f"  {'' if c.is_done else 'waits in '}{c}, step {c.step}, {c.phase}" for c in stalled.calls]
            blocks.append("\n".join([head, f"its last {len(calls)} collectives:", *calls, stalled.stacks]))
        for rank, seen in sorted(self.silent.items()):
            blocks.append(f"rank {rank}: {self._place(rank)}\n{seen.stacks if seen is not None else ''}")
        return "\n\n".join(blocks) + "\n"


def _named(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """Return the ranks in words, with a verb for one or several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {several}".rstrip()


class HangWatch:
    """Watch of the ranks of a world between `begin` and `end`.

    Args:
        limit_s: without a step, before a report; None: never.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._batches = 0
        self._marks: deque[tuple[int, int, StepPhase]] = deque(maxlen=_MOST_MARKS)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._slow: SlowRankWatch | None = None

    def begin_phase(self, phase: StepPhase, step: int, *, is_batch: bool = False) -> None:
        """Record that a phase of a step begins.

        Args:
            is_batch: and with it a batch, which counts as progress.
        """
        self._marks.append((time.time_ns(), step, phase))
        self._batches += is_batch

    def begin(self, world: World, folder: str) -> None:
        """Watch these ranks from now on.

        Args:
            folder: in which reports are written; a URL: the working directory.
        """
        self.end()
        store = common_store()
        self._batches, self._ended, self._slow = 0, threading.Event(), None
        if self._limit_s is None or store is None or not world.is_connected:
            return
        watched = _Watched(world, store)
        if world.shape.pp == 1:
            self._slow = SlowRankWatch(world.rank, world.size, store, str(watched.number))
        arguments = watched, self._limit_s, self._ended, machine_folder(folder) / "hangs"
        self._thread = threading.Thread(target=self._run, args=arguments, name="hang-watch", daemon=True)
        self._thread.start()

    @property
    def slowest(self) -> SlowRank | None:
        """The slowest rank of the last comparison, on the first rank; None elsewhere and before it."""
        return None if self._slow is None else self._slow.last

    def end(self) -> None:
        """Stop watching: the world ends, or the Trainer has finished."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_THREAD_END_S)
        self._thread = None

    def _run(self, watched: _Watched, limit_s: float, ended: threading.Event, reports: Path) -> None:
        try:
            self._watch(watched, limit_s, ended, reports)
        except Exception as error:  # the world ended, and with it the keys
            logger.debug("the watch for hangs has ended: %s", error)

    def _watch(self, watched: _Watched, limit_s: float, ended: threading.Event, reports: Path) -> None:
        clock, last, since, asked_at, is_done = ProcessClock(), None, 0.0, 0.0, False
        published_at: float | None = None
        while not ended.wait(min(_LOOK_S, limit_s / 5)):
            self._look_for_slow_ranks(watched)
            now, state = clock.tick(), (self._batches, watched.counts())
            if state != last:
                if published_at is not None:
                    watched.resume()
                last, since, published_at, is_done = state, now, None, False
            waited_s = now - since
            if waited_s < limit_s * (1 if self._batches > 1 else _LATE_FACTOR):
                continue
            if published_at is None:
                watched.publish(self._standstill(watched, state[1]))
                published_at = now
            if now - asked_at < min(_ASK_S, limit_s / 5):
                continue
            asked_at, graces = now, (now - published_at) / _GRACE_S
            if graces >= 1:
                watched.look_beside()
            if is_done or not watched.is_reporter():
                continue
            is_late = waited_s >= limit_s * _LATE_FACTOR
            hang = watched.read(waited_s, graces=graces, is_late=is_late)
            if hang is None:
                continue
            is_done = is_late or bool(hang.lines())
            if hang.lines():
                _report(hang, reports)

    def _look_for_slow_ranks(self, watched: _Watched) -> None:
        if self._slow is None or not self._marks:
            return
        self._slow.sample(self._marks[-1][2], _main_frame())
        self._slow.look(self._marks, watched.begun)

    def _standstill(self, watched: _Watched, counts: Mapping[str, int]) -> Standstill:
        frame = _main_frame()
        frames = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        marks = list(self._marks) or [(0, 0, "setup")]
        times = [at for at, _, _ in marks]
        calls = []
        for entry in private_torch.recorded_collectives(watched.since_ns)[-_MOST_CALLS:]:
            _, step, phase = marks[max(0, bisect(times, entry["time_created_ns"]) - 1)]
            calls.append(
                Call(
                    group=watched.name_of(*entry["process_group"]),
                    number=entry["collective_seq_id"],
                    operation=entry["profiling_name"].partition(":")[2],
                    sizes=entry["input_sizes"],
                    is_done=entry["retired"],
                    step=step,
                    phase=phase,
                )
            )
        return Standstill(
            counts=counts,
            place=place_of(frames),
            step=marks[-1][1],
            phase=marks[-1][2],
            in_collective=bool(frames) and (_COLLECTIVES in frames[-1].filename or any(not c.is_done for c in calls)),
            calls=calls,
            stacks=_own_stacks(),
            workers=_workers() if any(_LOADER in f.filename for f in frames) else {},
        )


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        return file.read()


def _workers() -> dict[str, str]:
    """Return the places of this process's children by their ids; where some are in the user's code, of these only."""
    children = process_stacks.look_at_children()
    places = {pid: place_of(seen.frames) if seen.stacks else seen.state for pid, seen in children.items()}
    busy = {pid: place for pid, place in places.items() if not place.startswith("in ")}
    return {str(pid): place for pid, place in (busy or places).items()}


def _report(hang: Hang, folder: Path) -> None:
    """Write a report to a file of its own, and its lines to the terminal and as an alarm."""
    *lines, last = hang.lines()
    step = max(stalled.step for stalled in hang.ranks.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(1)))
        path = next(path for end in suffixes if not (path := folder / f"step-{step:07}{end}.txt").exists())
        path.write_text(hang.text())
        where = f"stacks and the last collectives of all ranks are in {relative(str(path))}"
    except OSError as error:
        where = f"stacks and collectives could not be written to {folder}: {error.strerror}"
    message = "\n".join([*lines, f"{last}; {where}"])
    write_to_terminal(message)
    ALARMS.warning("%s", message)


class _Sign(NamedTuple):
    """A rank as others see it in the store.

    Attributes:
        process: that can be looked at.
        number: of the last standstill, from one.
        is_stalled: it has made no progress since.
    """

    process: Mapping[str, Any] | None
    number: int
    is_stalled: bool


class _Watched:
    """Process groups of a world, and the keys that its ranks share.

    Args:
        world: of several ranks.
        store: of torch's default group.
    """

    def __init__(self, world: World, store: Store) -> None:
        self._size, self._rank, self._store, self._beside = world.size, world.rank, store, world.node_peers
        self._values = LatestValues(store)
        self.number = store.add(f"hang/watches/{world.rank}", 1)  # all ranks begin as often; the store outlives them
        between_stages = world.group("pp")  # which sends and receives: its ends count apart
        self._groups: dict[str, ProcessGroup] = {}
        for group in world.all_groups:
            if group is not between_stages:
                first, *others = dist.get_process_group_ranks(group)
                name = f"{group.group_desc} {len(self._groups)} of {1 + len(others)} ranks from rank {first}"
                self._groups[name] = group
        self._names: dict[str, str] = {group.group_name: name for name, group in self._groups.items()}
        self.since_ns = time.time_ns()
        self.process = process_stacks.show_stacks()
        self._number = 0
        self._read: dict[tuple[int, int], Standstill] = {}
        self._seen: set[int] = set()  # ranks that this one has looked at in this standstill
        self._sign(is_stalled=False)
        if world.rank == 0:
            self._store.set(self._key("reporter"), "")

    def name_of(self, name: str, description: str) -> str:
        """Return the name of a group that all its ranks share, given those of torch."""
        return self._names.get(name, f"{description} {name}")

    def counts(self) -> dict[str, int]:
        """Collectives that this rank has begun, by group."""
        return {name: private_torch.num_collectives(group) for name, group in self._groups.items()}

    def begun(self) -> list[Begun]:
        """Return the last collectives and their times in nanoseconds."""
        return [
            Begun(
                group=self.name_of(*entry["process_group"]),
                number=entry["collective_seq_id"],
                at=entry["time_created_ns"],
                waits=entry["profiling_name"].endswith((":all_to_all", ":barrier")),
            )
            for entry in private_torch.recorded_collectives(self.since_ns)
            if not entry["is_p2p"]
        ]

    def publish(self, standstill: Standstill) -> None:
        """Publish this rank's standstill."""
        self._number += 1
        self._values.set(self._key("standstill", self._rank), json.dumps(asdict(standstill)))
        self._sign(is_stalled=True)

    def resume(self) -> None:
        """Publish that this rank has made progress; another one may report the next hang."""
        self._sign(is_stalled=False)
        self._read.clear()
        for rank in self._seen:
            self._store.set(self._key("seen", rank), "")
        self._seen.clear()
        if self.is_reporter():
            self._store.set(self._key("reporter"), "")

    def is_reporter(self) -> bool:
        """True if no rank has been in standstill for longer."""
        return self._store.compare_set(self._key("reporter"), "", str(self._rank)) == str(self._rank).encode()

    def look_beside(self) -> None:
        """Look at the processes of this machine whose ranks have not published, on the first rank of it that has."""
        signs = self._signs(self._beside)
        stalled = [rank for rank, sign in signs.items() if sign.is_stalled]
        if self._rank != min(stalled, default=None):
            return
        for rank in signs.keys() - {*stalled, *self._seen}:
            process = signs[rank].process
            if process is not None and self.process is not None and process["host"] == self.process.host:
                seen = process_stacks.look_at(Process(**process))
                self._store.set(self._key("seen", rank), json.dumps(asdict(seen)))
                self._seen.add(rank)

    def _signs(self, ranks: Sequence[int]) -> dict[int, _Sign]:
        """Return the signs of those of these ranks that have given one."""
        keys = {rank: self._key("sign", rank) for rank in ranks}
        return {
            rank: _Sign(*json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def read(self, seconds: float, *, graces: float, is_late: bool) -> Hang | None:
        """Return the hang as the reporter sees it; None if ranks have made progress, or may still publish.

        Args:
            graces: times that ranks have had to publish: after one those that have not will not, after two nobody
                will look at their processes.
        """
        signs = self._signs(range(self._size))
        ranks: dict[int, Standstill] = {}
        for rank, sign in signs.items():
            if sign.is_stalled and (standstill := self._standstill(rank, sign.number)) is not None:
                ranks[rank] = standstill
        others = set(range(self._size)) - ranks.keys()
        if others and (graces < 1 or (not is_late and any(signs[r].number for r in others & signs.keys()))):
            return None
        seen = {rank: self._seen_of(rank) for rank in sorted(others)}
        if None in seen.values() and graces < 2:
            return None
        return Hang(seconds=seconds, ranks=ranks, silent=seen, is_late=is_late)

    def _standstill(self, rank: int, number: int) -> Standstill | None:
        """Return a rank's standstill; None while a file system of the network does not show it."""
        if (rank, number) not in self._read:
            for text in self._values.get([self._key("standstill", rank)]):
                values: dict[str, Any] = json.loads(text)
                self._read[rank, number] = Standstill(**values | {"calls": [Call(*call) for call in values["calls"]]})
        return self._read.get((rank, number))

    def _seen_of(self, rank: int) -> Seen | None:
        """Return what a rank of the same machine has seen of a silent one's process; None: nothing."""
        key = self._key("seen", rank)
        text = self._store.get(key) if self._store.check([key]) else b""
        return Seen(**json.loads(text)) if text else None

    def _sign(self, *, is_stalled: bool) -> None:
        process = None if self.process is None else asdict(self.process)
        self._store.set(self._key("sign", self._rank), json.dumps(_Sign(process, self._number, is_stalled)))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("hang", self.number, *parts)))
