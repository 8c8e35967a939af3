"""Watches of a fit: losses that are not finite, and stalled steps.

`LossWatch` warns once with rank, step and samples, ends the run, or skips the update.

`StallWatch` names the rank that the others wait for when no step ends for a while, and shows its stack. Every
process group counts its collectives: a rank with a lower count than others is one that they wait for. A thread of each
rank reads the counts several times a second. Where nothing has changed for `limit_s`, it publishes its counts and its
main thread's stack in the common store, and prints what follows from those of all ranks. Ranks that are all slow at the
same place (they fetch data, compile, validate) have equal counts: nothing is printed. Stages of a pipeline send and
receive without counts: after `_LATE_FACTOR` times the limit the stack of each is printed.
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
    """Check of the loss of every micro-batch.

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
        """Check the loss of a micro-batch.

        Args:
            place: rank, step and samples in words.
        """
        value = loss.detach()
        arriving = (value, None) if value.device.type == "cpu" else read_later(value)
        self._flying.append((*arriving, place))
        self._read(waits=self.stop is not None)

    def forget_step(self) -> None:
        """Forget the losses of the running step, which will be repeated."""
        self._flying.clear()
        self._found = None

    def finish(self) -> None:
        """Read the losses that have not been read yet, at the end of training."""
        self._read(waits=True)

    def decide(self, module: nn.Module, world: World) -> None:
        """End the run or drop the gradients before an update, if a rank has found a loss that is not finite; collective
        with `stop` only.

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
        message = next(text for text in all_gather_json(found, world) if text is not None)
        self._skipped += 1
        if self.stop == "end" or self._skipped > _MOST_SKIPPED:
            times = f" ({_MOST_SKIPPED} steps before it were left out)" if self.stop == "skip" else ""
            raise NonFiniteLossError(
                f"{message}{times}: the run ends before this update; look at these samples, lower the learning rate, "
                "or use stop_on_nan=skip"
            )
        if world.rank == 0:
            logger.warning("%s: this step changes nothing", message)
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
                self._report(f"the loss is {number} {place()}")

    def _report(self, message: str) -> None:
        self._found = self._found or message
        if self.stop is not None or self._has_warned:
            return
        self._has_warned = True
        store = common_store()
        if store is None or store.add(_WARNED, 1) == 1:  # with the next update all ranks have such losses
            write_to_terminal(f"warning: {message}; training goes on: stop_on_nan=end or skip would stop it")


_LOOK_S = 0.2
_ASK_S, _ASK_PER_RANK_S = 1.0, 0.01  # between two reads of the other ranks' keys
_LATE_FACTOR = 5
"""Times the limit: before the first whole batch, and where the rank that is waited for compiles."""

_FRAMES = 8
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
_THREAD_END_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """State of a rank that makes no progress.

    Attributes:
        counts: collectives that it has begun, by group.
        stack: the innermost frames of its main thread, as in a traceback.
        is_compiling: the main thread is in a compiler of torch or Triton.
    """

    counts: Mapping[str, int]
    stack: str
    is_compiling: bool = False


def awaited(ranks: Mapping[int, Standstill]) -> list[int]:
    """Return the ranks that have begun fewer collectives of some group than others in it."""
    most: dict[str, int] = {}
    for rank in ranks.values():
        for group, count in rank.counts.items():
            most[group] = max(count, most.get(group, 0))
    return sorted(r for r, rank in ranks.items() if any(count < most[g] for g, count in rank.counts.items()))


def stall_message(
    seconds: float, ranks: Mapping[int, Standstill], size: int, *, has_stages: bool = False
) -> str | None:
    """Return the message about a standstill; None if no rank is waited for.

    Args:
        seconds: without a step.
        ranks: those that have published their place.
        size: of the world.
        has_stages: ranks may wait for others without a collective.
    """
    began, stalled, late = f"no step for {seconds:.0f} s", sorted(ranks), awaited(ranks)
    silent = sorted(set(range(size)) - ranks.keys())
    if late:
        waiting = _named([rank for rank in stalled if rank not in late])
        return f"{began}: {waiting} {'wait' if waiting.startswith('ranks') else 'waits'} for {_named(late)}" + "".join(
            _place(rank, ranks[rank]) for rank in late
        )
    if silent:
        who = f"{_named(silent)}, of which there is no sign: stopped, or still at work"
        return f"{began}: {_named(stalled)} may wait for {who}"
    return began + "".join(_place(rank, ranks[rank]) for rank in stalled) if has_stages else None


def _place(rank: int, standstill: Standstill) -> str:
    return f"\nrank {rank} is at\n{standstill.stack.rstrip()}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class StallWatch:
    """Watch of the ranks of a world between `begin` and `end`.

    Args:
        limit_s: without a step, before a warning; None: never.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._progress = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def record_progress(self) -> None:
        """Record that another batch begins."""
        self._progress += 1

    def begin(self, world: World) -> None:
        """Watch these ranks from now on; a world of one rank is not watched."""
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
        """Stop watching: the world ends, or the Trainer has finished."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_THREAD_END_S)
        self._thread = None

    def _run(self, watched: _Watched, limit_s: float, ended: threading.Event) -> None:
        try:
            self._watch(watched, limit_s, ended)
        except Exception as error:  # the world ended, and with it the keys
            logger.debug("the watch for stalls has ended: %s", error)

    def _watch(self, watched: _Watched, limit_s: float, ended: threading.Event) -> None:
        clock, last, since, asked_at, is_published, is_done = ProcessClock(), None, 0.0, 0.0, False, False
        ask_s = max(min(_ASK_S, limit_s / 5), _ASK_PER_RANK_S * watched.size)
        while not ended.wait(min(_LOOK_S, limit_s / 5)):
            now, state = clock.tick(), (self._progress, watched.counts())
            if state != last:
                if is_published:
                    watched.publish(None)
                last, since, is_published, is_done = state, now, False, False
            waited_s = now - since
            if is_done or waited_s < limit_s * (1 if self._progress > 1 else _LATE_FACTOR):
                continue
            if not is_published:
                watched.publish(_standstill(state[1]))
                is_published = True
            is_late = waited_s >= limit_s * _LATE_FACTOR
            if now - asked_at < ask_s or not (is_late or watched.all_have_published()):
                continue
            asked_at, ranks = now, watched.read_all()
            if not is_late and (len(ranks) < watched.size or any(ranks[r].is_compiling for r in awaited(ranks))):
                continue
            message = stall_message(waited_s, ranks, watched.size, has_stages=watched.has_stages and is_late)
            is_done = is_late or message is not None
            if message is not None:
                logger.warning("%s", message)


class _Watched:
    """Process groups of a world, and the keys that its ranks share.

    Args:
        world: of several ranks.
        store: of torch's default group.
    """

    def __init__(self, world: World, store: Store) -> None:
        self.size, self._rank, self._store = world.size, world.rank, store
        between_stages = world.group("pp")  # which sends and receives: its ends count apart
        self.has_stages = between_stages is not None
        self._groups: dict[str, ProcessGroup] = {}
        for group in world.all_groups:
            if group is not between_stages:
                ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
                self._groups[f"{len(self._groups)} of {ranks}"] = group

    def counts(self) -> dict[str, int]:
        """Collectives that this rank has begun, by group."""
        return {name: private_torch.num_collectives(group) for name, group in self._groups.items()}

    def publish(self, standstill: Standstill | None) -> None:
        """Publish this rank's standstill; None: it has made progress."""
        self._store.set(self._key(self._rank), "" if standstill is None else json.dumps(asdict(standstill)))

    def all_have_published(self) -> bool:
        """True if every rank has published a standstill; it may have resumed since."""
        return self._store.check([self._key(rank) for rank in range(self.size)])

    def read_all(self) -> dict[int, Standstill]:
        """Return the standstills of all stalled ranks."""
        found: dict[int, Standstill] = {}
        for rank in range(self.size):
            if self._store.check([self._key(rank)]) and (text := self._store.get(self._key(rank))):
                values: dict[str, Any] = json.loads(text)
                found[rank] = Standstill(**values)
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
