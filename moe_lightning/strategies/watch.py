"""Watches of a fit: losses that are not finite, steps that do not come.

Losses that are no finite numbers: one warning that says where they came from, or an end, or a step left out.

Says which rank the others wait for when no rank has made a step for a while, and where its code is.

Every process group counts its collectives, so a rank with fewer than the others is one that they wait for. A thread of
each rank reads the counts several times a second. Where nothing has changed for `limit_s`, it tells the others, by the
keys that they share, its counts and where its main thread is, and prints what follows from those of all.

Ranks that are all slow at the same place (they fetch data, compile, validate) have equal counts: nothing is printed.
Stages of a pipeline send and receive, which is counted nowhere: late, it is said where each of them is.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from moe_lightning.compat import private_torch
from moe_lightning.dispatch.transports import read_later
from moe_lightning.elastic.protocol import ProcessClock
from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.errors import NonFiniteLossError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, any_says, common_store

StopOnNan = Literal["end", "skip"]

_MOST_SKIPPED = 10
"""Steps in a row; the weights are then beyond repair."""

_WARNED = "warned of a loss"

logger = logging.getLogger(__name__)


class LossWatch:
    """Looks at the loss of every micro-batch.

    Without `stop` nothing waits for a device: a loss is copied to the host behind the work that is queued, and read
    when a later micro-batch finds that it has arrived. With it the host reads every loss before the update, and the
    ranks agree, in one small collective for each step.

    Args:
        stop: "end" the run before the update, or "skip" it; None: warn once.
    """

    def __init__(self, stop: StopOnNan | None) -> None:
        self.stop = stop
        self._flying: deque[tuple[Tensor, Any, Callable[[], str]]] = deque()
        self._found: str | None = None
        self._has_warned = False
        self._skipped = 0

    def look(self, loss: Tensor, place: Callable[[], str]) -> None:
        """Take the loss of a micro-batch in.

        Args:
            place: rank, step and samples in words.
        """
        value = loss.detach()
        arriving = (value, None) if value.device.type == "cpu" else read_later(value)
        self._flying.append((*arriving, place))
        self._read(waits=self.stop is not None)

    def forget_step(self) -> None:
        """The step that runs will be made again."""
        self._flying.clear()
        self._found = None

    def finish(self) -> None:
        """Read what has not been read yet: training is over."""
        self._read(waits=True)

    def decide(self, module: nn.Module, world: World) -> None:
        """Before an update: end, or drop the gradients, where a rank has found something; collective with `stop` only.

        Raises:
            NonFiniteLossError: on every rank.
        """
        if self.stop is None:
            return
        found, self._found = self._found, None
        (is_bad,) = any_says([found is not None], world)
        if not is_bad:
            self._skipped = 0
            return
        words = next(said for said in all_gather_json(found, world) if said is not None)
        self._skipped += 1
        if self.stop == "end" or self._skipped > _MOST_SKIPPED:
            times = f" ({_MOST_SKIPPED} steps before it were left out)" if self.stop == "skip" else ""
            raise NonFiniteLossError(
                f"{words}{times}: the run ends before this update; look at these samples, lower the learning rate, or "
                "use stop_on_nan=skip"
            )
        if world.rank == 0:
            logger.warning("%s: this step changes nothing", words)
        for parameter in module.parameters():
            parameter.grad = None

    def _read(self, *, waits: bool) -> None:
        while self._flying:
            value, arrived, place = self._flying[0]
            if arrived is not None and not arrived.query():
                if not waits:
                    return
                arrived.synchronize()
            self._flying.popleft()
            number = float(value.float().mean())
            if not math.isfinite(number):
                self._take(f"the loss is {number} {place()}")

    def _take(self, words: str) -> None:
        self._found = self._found or words
        if self.stop is not None or self._has_warned:
            return
        self._has_warned = True
        store = common_store()
        if store is None or store.add(_WARNED, 1) == 1:  # with the next update all ranks have such losses
            write_to_terminal(f"warning: {words}; training goes on: stop_on_nan=end or skip would stop it")


_LOOK_S = 0.2
_ASK_S, _ASK_PER_RANK_S = 1.0, 0.01  # between two looks at what others have told
_PATIENT = 5
"""Times the limit: before the first whole batch, and where the rank that is waited for compiles."""

_FRAMES = 8
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
_GOODBYE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """A rank on which nothing happens.

    Attributes:
        counts: collectives that it has begun, by group.
        stack: the innermost frames of its main thread, as in a traceback.
        is_compiling: the main thread is in a compiler of torch or Triton.
    """

    counts: Mapping[str, int]
    stack: str
    is_compiling: bool = False


def awaited(ranks: Mapping[int, Standstill]) -> list[int]:
    """The ranks that have begun fewer collectives of some group than others in it."""
    most: dict[str, int] = {}
    for rank in ranks.values():
        for group, count in rank.counts.items():
            most[group] = max(count, most.get(group, 0))
    return sorted(r for r, rank in ranks.items() if any(count < most[g] for g, count in rank.counts.items()))


def in_words(seconds: float, ranks: Mapping[int, Standstill], size: int, *, has_stages: bool = False) -> str | None:
    """What is printed of a standstill; None where no rank is waited for.

    Args:
        seconds: without a step.
        ranks: those that have said where they are.
        size: of the world.
        has_stages: ranks may wait for others without a collective.
    """
    began, told, late = f"no step for {seconds:.0f} s", sorted(ranks), awaited(ranks)
    silent = sorted(set(range(size)) - ranks.keys())
    if late:
        waiting = _named([rank for rank in told if rank not in late])
        return f"{began}: {waiting} {'wait' if waiting.startswith('ranks') else 'waits'} for {_named(late)}" + "".join(
            _place(rank, ranks[rank]) for rank in late
        )
    if silent:
        who = f"{_named(silent)}, of which there is no sign: stopped, or still at work"
        return f"{began}: {_named(told)} may wait for {who}"
    return began + "".join(_place(rank, ranks[rank]) for rank in told) if has_stages else None


def _place(rank: int, standstill: Standstill) -> str:
    return f"\nrank {rank} is at\n{standstill.stack.rstrip()}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class StallWatch:
    """Watches the ranks of a world between `begin` and `end`.

    Args:
        limit_s: without a step, before something is said; None: never.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._progress = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def made_progress(self) -> None:
        """Another batch begins."""
        self._progress += 1

    def begin(self, world: World) -> None:
        """Watch these ranks from now on; one that has no peers is waited for by none."""
        self.end()
        store = common_store()
        if self._limit_s is None or store is None or not world.is_connected:
            return
        self._progress, self._ended = 0, threading.Event()
        watched = _Watched(world, store)
        self._thread = threading.Thread(
            target=self._run, args=(watched, self._limit_s, self._ended), name="stall-watch", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Watch no longer: the world ends, or what a trainer was asked for is done."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_GOODBYE_S)
        self._thread = None

    def _run(self, watched: _Watched, limit_s: float, ended: threading.Event) -> None:
        try:
            self._watch(watched, limit_s, ended)
        except Exception as error:  # the world ended, and with it the keys
            logger.debug("nobody looks for stalls any more: %s", error)

    def _watch(self, watched: _Watched, limit_s: float, ended: threading.Event) -> None:
        clock, last, since, asked_at, is_told, is_done = ProcessClock(), None, 0.0, 0.0, False, False
        ask_s = max(min(_ASK_S, limit_s / 5), _ASK_PER_RANK_S * watched.size)
        while not ended.wait(min(_LOOK_S, limit_s / 5)):
            now, state = clock.tick(), (self._progress, watched.counts())
            if state != last:
                if is_told:
                    watched.tell(None)
                last, since, is_told, is_done = state, now, False, False
            waited_s = now - since
            if is_done or waited_s < limit_s * (1 if self._progress > 1 else _PATIENT):
                continue
            if not is_told:
                watched.tell(_standstill(state[1]))
                is_told = True
            is_late = waited_s >= limit_s * _PATIENT
            if now - asked_at < ask_s or not (is_late or watched.all_have_told()):
                continue
            asked_at, ranks = now, watched.told()
            if not is_late and (len(ranks) < watched.size or any(ranks[r].is_compiling for r in awaited(ranks))):
                continue
            words = in_words(waited_s, ranks, watched.size, has_stages=watched.has_stages and is_late)
            is_done = is_late or words is not None
            if words is not None:
                logger.warning("%s", words)


class _Watched:
    """The groups of a world, and the keys that its ranks share.

    Args:
        world: of several ranks.
        store: of torch's default group.
    """

    def __init__(self, world: World, store: Store) -> None:
        self.size, self._rank, self._store = world.size, world.rank, store
        between_stages = world.axis_groups.get("pp")  # which sends and receives: its ends count apart
        self.has_stages = between_stages is not None
        self._groups: dict[str, ProcessGroup] = {}
        for group in world.groups:
            if group is not between_stages:
                ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
                self._groups[f"{len(self._groups)} of {ranks}"] = group

    def counts(self) -> dict[str, int]:
        """Collectives that this rank has begun, by group."""
        return {name: private_torch.num_collectives(group) for name, group in self._groups.items()}

    def tell(self, standstill: Standstill | None) -> None:
        """Let the others read this rank's; None: it goes on."""
        self._store.set(self._key(self._rank), "" if standstill is None else json.dumps(asdict(standstill)))

    def all_have_told(self) -> bool:
        """True if every rank has stood still once; it may go on by now."""
        return self._store.check([self._key(rank) for rank in range(self.size)])

    def told(self) -> dict[int, Standstill]:
        """Those of all ranks that stand still."""
        found: dict[int, Standstill] = {}
        for rank in range(self.size):
            if self._store.check([self._key(rank)]) and (text := self._store.get(self._key(rank))):
                said: dict[str, Any] = json.loads(text)
                found[rank] = Standstill(**said)
        return found

    @staticmethod
    def _key(rank: int) -> str:
        return f"stalled/{rank}"


def _standstill(counts: Mapping[str, int]) -> Standstill:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    is_compiling = any(part in f.filename for f in frames for part in _COMPILERS)
    stack = "".join(traceback.format_list(frames[-_FRAMES:]))
    return Standstill(counts=counts, stack=stack, is_compiling=is_compiling)
