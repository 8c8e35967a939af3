"""Watches of a fit: losses and gradients that are not finite, and stalled steps.

`FiniteWatch` warns once with rank, step and samples, ends the run, or skips the update.

`StallWatch` names the rank that the others wait for when no step ends for a while, and shows the place of each: the
line of the user's own code, and what it calls. Every process group counts its collectives: a rank with a lower count
than others is one that they wait for. A thread of each rank reads the counts several times a second. Where nothing has
changed for `limit_s`, it publishes its counts and its main thread's place in the common store, and prints what follows
from those of all ranks. Ranks that are all slow at the same place (they fetch data, compile, validate) have equal
counts: nothing is printed. Ranks with equal counts may wait in different collectives, and stages of a pipeline send and
receive without counts: after `_LATE_FACTOR` times the limit the place of each is printed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
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
from moe_lightning.state.tensors import local
from moe_lightning.strategies.checks import identical_buffers

StopOnNan = Literal["end", "skip"]

_MOST_SKIPPED = 10
"""Steps in a row; the weights are then beyond repair."""

_WARNED = "warned of a number"
_NORM = "the norm of the gradients"

logger = logging.getLogger(__name__)


class UpdateSkipped(Exception):
    """Leaves an optimizer's step before it changes anything."""


@dataclass(frozen=True)
class _Finding:
    """A number that is not finite.

    Attributes:
        what: it is, in words.
        place: rank, step and samples in words.
        is_cause: the samples of this place have caused it; else they may be those of another rank.
    """

    what: str
    place: str
    is_cause: bool


class FiniteWatch:
    """Check of the loss of every micro-batch and of the gradients of every update.

    Without `stop` nothing waits for a device: a number is copied to the host behind the work that is queued, and read
    when a later check finds that it has arrived. With it the host reads every number before the update, and the ranks
    agree, in one small collective for each step.

    Args:
        stop: "end" the run before the update, or "skip" it; None: warn once.
    """

    def __init__(self, stop: StopOnNan | None) -> None:
        self.stop = stop
        self._flying: deque[tuple[Tensor, Any, Callable[[float], _Finding | None]]] = deque()
        self._found: _Finding | None = None
        self._places: list[Callable[[], str]] = []
        self._own: list[Tensor] = []
        self._buffers: dict[str, Tensor] | None = None
        self._is_new_step = True
        self._has_warned = False
        self._skipped = 0

    def begin_batch(self, module: nn.Module) -> None:
        """Remember the user's buffers at the begin of a step that may be skipped; those of this library's layers change
        with updates only.
        """
        if self.stop == "skip" and self._buffers is None:
            ours = set(identical_buffers(module))
            self._buffers = {name: b.detach().clone() for name, b in module.named_buffers() if name not in ours}

    def look(self, loss: Tensor, place: Callable[[], str]) -> None:
        """Check the loss of a micro-batch.

        Args:
            place: rank, step and samples in words.
        """
        if self._is_new_step:
            self._places, self._is_new_step = [], False
        self._places.append(place)
        self._fly(loss.detach(), lambda value: _Finding(f"the loss is {value}", place(), is_cause=True))

    def look_at_own(self, gradients: Tensor) -> None:
        """Check gradients of this rank, before they are summed over ranks: they tell whose samples are the cause."""
        self._own.append(torch.linalg.vector_norm(gradients, dtype=torch.float32))

    def look_at_update(
        self, norm: Tensor, named: Callable[[], Mapping[str, nn.Parameter]], place: str, world: World, *, is_used: bool
    ) -> None:
        """Check the gradients that an optimizer is about to use.

        Args:
            norm: of them, of this rank or of all.
            named: returns the parameters of this rank.
            place: step in words.
            is_used: gradients are scaled by the norm; else one that overflows changes nothing.
        """
        own, is_read_now = self._own, self.stop is not None or norm.device.type == "cpu"
        places = self._places if world.size == 1 or own else []

        def find(value: float) -> _Finding | None:
            is_cause = world.size == 1 or any(not math.isfinite(float(value)) for value in own)
            where = " and ".join(place() for place in places) if is_cause else ""
            what = _named_gradients(named()) if is_read_now else ""
            if is_read_now and not what and not is_used:
                return None
            return _Finding(what or f"{_NORM} is {value}", where or place, is_cause)

        self._fly(norm.detach(), find)

    def forget_step(self) -> None:
        """Forget the running step, which will be repeated."""
        self._flying.clear()
        self._places, self._own, self._found, self._buffers = [], [], None, None
        self._is_new_step = True

    def finish(self) -> None:
        """Read the numbers that have not been read yet, at the end of training."""
        self._read(waits=True)

    def is_skipped(self, module: pl.LightningModule, world: World) -> bool:
        """End the run, or return True if the update is left out, if a rank has found a number that is not finite.
        Buffers are then as before the step. Collective with `stop` only.

        Raises:
            NonFiniteLossError: on every rank.
        """
        found, self._found, self._own, self._is_new_step = self._found, None, [], True
        before, self._buffers = self._buffers, None
        if self.stop is None:
            return False
        (is_bad,) = any_says([found is not None], world)
        if not is_bad:
            self._skipped = 0
            if not module.automatic_optimization:  # another update may follow in the same batch
                self.begin_batch(module)
            return False
        findings = [_Finding(*each) for each in all_gather_json(found and astuple(found), world) if each is not None]
        # The ranks that have samples that are the cause know most, then those whose gradients are not finite.
        first = min(findings, key=lambda each: (not each.is_cause, each.what.startswith(_NORM)))
        message = f"{first.what} {first.place}"
        self._skipped += 1
        if self.stop == "end" or self._skipped > _MOST_SKIPPED:
            times = f" ({_MOST_SKIPPED} steps before it were left out)" if self.stop == "skip" else ""
            raise NonFiniteLossError(
                f"{message}{times}: the run ends before this update; look at these samples, lower the learning rate, "
                "or use stop_on_nan=skip"
            )
        if world.rank == 0:
            logger.warning("%s: this step changes nothing", message)
        _restore(module, before or {})
        return True

    def _fly(self, value: Tensor, find: Callable[[float], _Finding | None]) -> None:
        arriving = (value, None) if value.device.type == "cpu" else read_later(value)
        self._flying.append((*arriving, find))
        self._read(waits=self.stop is not None)

    def _read(self, *, waits: bool) -> None:
        while self._flying:
            value, arrived, find = self._flying[0]
            if arrived is not None and not arrived.query():
                if not waits:
                    return
                arrived.synchronize()
            self._flying.popleft()
            number = float(value.float().mean())
            if not math.isfinite(number) and (self.stop is not None or not self._has_warned):
                self._found = self._found or find(number)
                if self._found is not None:
                    self._warn(self._found)

    def _warn(self, finding: _Finding) -> None:
        if self.stop is not None or self._has_warned:
            return
        self._has_warned = True
        store = common_store()
        if store is None or store.add(_WARNED, 1) == 1:  # with the next update all ranks have such losses
            message = f"{finding.what} {finding.place}"
            write_to_terminal(f"warning: {message}; training continues: stop_on_nan=end or skip would stop it")


def _named_gradients(named: Mapping[str, nn.Parameter]) -> str:
    """Return the parameters whose gradients are not finite, in words; empty if all are."""
    gradients = {name: local(p.grad) for name, p in named.items() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(dense_values(gradient).isfinite().all())]
    if not bad:
        return ""
    others = f" (nor those of {len(bad) - 1} other parameters)" if len(bad) > 1 else ""
    return f"the gradient of {bad[-1]} is not finite{others}"  # of the last one, which the backward pass met first


def dense_values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@torch.no_grad()
def _restore(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in before and before[name].shape == buffer.shape:
            buffer.copy_(before[name])


_LOOK_S = 0.2
_ASK_S, _ASK_PER_RANK_S = 1.0, 0.01  # between two reads of the other ranks' keys
_LATE_FACTOR = 5
"""Times the limit: before the first whole batch, and where the rank that is waited for compiles."""

_CALLS = 6  # innermost ones, of those that are shown below the user's line
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
_COLLECTIVES = "/torch/distributed/"
_PACKAGES = Path(__file__).parents[2]
_LIBRARIES = (
    *(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib")),
    *(os.path.join(_PACKAGES, name, "") for name in ("moe_lightning", "kernels")),
)
"""Folders of code that is not the user's."""

_THREAD_END_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """State of a rank that makes no progress.

    Attributes:
        counts: collectives that it has begun, by group.
        place: of its main thread, see `place_of`.
        is_compiling: the main thread is in a compiler of torch or Triton.
        in_collective: the main thread is in a function of torch.distributed.
    """

    counts: Mapping[str, int]
    place: str
    is_compiling: bool = False
    in_collective: bool = False


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the place in a stack as text: the innermost line of the user's own code, and the functions that it has
    called, without those of torch.
    """
    own = max((n for n, f in enumerate(frames) if not f.filename.startswith(("<frozen ", *_LIBRARIES))), default=-1)
    calls = [f"{Path(f.filename).stem}.{f.name}" for f in frames[own + 1 :] if "/torch/" not in f.filename]
    parts = [f"  in {' > '.join(calls[-_CALLS:])}"] if calls else []
    if own >= 0:
        frame = frames[own]
        parts.insert(0, f"  {_relative(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line}")
    return "\n".join(parts)


def _relative(path: str) -> str:
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def awaited(ranks: Mapping[int, Standstill]) -> list[int]:
    """Return the ranks that have begun fewer collectives of some group than others in it."""
    most: dict[str, int] = {}
    for rank in ranks.values():
        for group, count in rank.counts.items():
            most[group] = max(count, most.get(group, 0))
    return sorted(r for r, rank in ranks.items() if any(count < most[g] for g, count in rank.counts.items()))


def are_apart(ranks: Mapping[int, Standstill]) -> bool:
    """Return True if ranks wait in collectives at different places."""
    return len({rank.place for rank in ranks.values() if rank.in_collective}) > 1


_APART = (
    "a call that every rank must make (save_checkpoint, should_stop, log with sync_dist=True, a collective) was "
    "probably made on some of them only"
)


def stall_message(seconds: float, ranks: Mapping[int, Standstill], size: int, *, is_late: bool = False) -> str | None:
    """Return the message about a standstill; None if no rank is waited for.

    Args:
        seconds: without a step.
        ranks: those that have published their place.
        size: of the world.
        is_late: there is something to say even if no rank has begun fewer collectives.
    """
    began, stalled, late = f"no step for {seconds:.0f} s", sorted(ranks), awaited(ranks)
    silent = sorted(set(range(size)) - ranks.keys())
    waiting = [rank for rank in stalled if rank not in late]
    if late and waiting:
        words = f": {_named(waiting, 'waits', 'wait')} for {_named(late)}"
    elif late or (is_late and not silent and are_apart(ranks)):
        words = f": {_named(stalled, '', 'wait')} for each other; {_APART}"
    elif silent:
        who = f"{_named(silent)}, of which there is no sign: stopped, or still at work"
        return f"{began}: {_named(stalled)} may wait for {who}"
    elif is_late:
        words = ""
    else:
        return None
    by_place: dict[str, list[int]] = {}
    for rank in [*late, *waiting]:
        by_place.setdefault(ranks[rank].place, []).append(rank)
    return began + words + "".join(f"\n{_named(r, 'is', 'are')} at\n{place}" for place, r in by_place.items())


def _named(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """Return the ranks in words, with a verb for one or several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {several}".rstrip()


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
            is_apart = watched.has_stages or are_apart(ranks)
            message = stall_message(waited_s, ranks, watched.size, is_late=is_late and is_apart)
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
    return Standstill(
        counts=counts,
        place=place_of(frames),
        is_compiling=any(part in f.filename for f in frames for part in _COMPILERS),
        in_collective=bool(frames) and _COLLECTIVES in frames[-1].filename,
    )
