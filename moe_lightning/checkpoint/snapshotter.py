"""Copies of a rank's state into its arena in planned windows of a step.

After the optimizer step of iteration k, `start` passes the live tensors to a background thread; before the optimizer
step of iteration k + 1, `wait_before_update` waits until the copy is complete and returns the seconds of that stall.
The thread copies in chunks, so that `CopyWindows` can keep it out of windows in which bandwidth matters more. A
snapshot may be taken over several steps (`start(until=...)`, then `add`). Nothing here communicates.

Bytes of a GPU go through two small page-locked buffers: one is filled by the device while this thread empties the
other. An arena itself is not page-locked, because that takes as long as a step, again after every recovery, and
containers allow little locked memory.

Sources: PEC 3.2, MoC-System 5.2; windows REFT 4.1, Alg. 1. Ours: the seconds of the windows are those of the last steps
of the running training instead of derived from a pipeline's shape; a plan takes twice the time that the bandwidth asks
for, and each one that made training wait doubles that for those after it.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_lightning.checkpoint.arena import Arena, SnapshotIndex, block_bytes, capacity_of, digest_of
from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.schedule import Window, schedule_snapshot
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.state.pieces import DTYPES, OBJECT, Block, Location, Piece, StatePiece, describe, is_expert_key
from moe_lightning.state.tensors import page_locked

CHUNK_BYTES = 8 << 20


class Staging:
    """Copies of device tensors to host memory, asynchronous and in chunks, of one thread.

    Raises:
        ConfigurationError: the system lets this process lock less memory than two chunks.
    """

    def __init__(self) -> None:
        self._buffers = [page_locked((CHUNK_BYTES,), torch.uint8) for _ in range(2)]
        self._arriving: tuple[Any, Tensor, int, int] | None = None  # event, buffer, address, bytes

    def copy(self, address: int, source: Tensor, stream: Any, admit: Callable[[int], None]) -> None:
        """Copy bytes to an address in host memory; all are there after `finish`.

        Args:
            address: of the place.
            source: uint8, contiguous, on the device.
            stream: on which the device copies.
            admit: returns when so many bytes may be copied.
        """
        for start in range(0, source.numel(), CHUNK_BYTES):
            part = source[start : start + CHUNK_BYTES]
            admit(part.numel())
            buffer = self._buffers[0]
            event = self.fill(buffer[: part.numel()], part, stream)
            before, self._arriving = self._arriving, (event, buffer, address + start, part.numel())
            self._buffers.reverse()
            _put(before)

    def fill(self, buffer: Tensor, part: Tensor, stream: Any) -> Any:
        """Let the device copy a chunk; an event that is set when it is there."""
        with stream:
            buffer.copy_(part, non_blocking=True)
            event = torch.Event(device=part.device)
            event.record(stream)
        return event

    def finish(self) -> None:
        """Wait for the chunk that is under way, and put it into its place."""
        arriving, self._arriving = self._arriving, None
        _put(arriving)

    def forget(self) -> None:
        """A copy was given up: what is under way goes nowhere. Its buffer and its source are in use until it is there,
        or until the device has failed.
        """
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            with suppress(RuntimeError):
                arriving[0].synchronize()


def _put(arriving: tuple[Any, Tensor, int, int] | None) -> None:
    if arriving is not None:
        event, buffer, address, num_bytes = arriving
        event.synchronize()
        ctypes.memmove(address, buffer.data_ptr(), num_bytes)


def side_stream(device: torch.device) -> torch.Stream:
    """A stream of the device that starts after the work queued so far (the optimizer step whose result is copied)."""
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


_STEPS = 5
_RESERVE = 2.0
_LONGEST_LOOK_S = 1e-3
_STALL_S = 1e-3


class RunningStep:
    """Windows of the step that runs, as the training thread reports it; read by the copying thread.

    Args:
        world: whose exchanges are the communication window, and whose waits for other stages the bubbles.
    """

    def __init__(self, world: World) -> None:
        self._clock, self._bubbles = world.exchanges, world.bubbles
        self._clock.watch()
        self._bubbles.watch()
        self.begin()

    def begin(self) -> None:
        """The optimizer has stepped: idle until the next batch."""
        self._in_batch = False
        self._updated_at = self._idle_since = time.perf_counter()
        self._idle_s, self._communicated_s = 0.0, self._clock.seconds
        self._left_batch_at_s = self._other_bubbles_s = self._bubbles.seconds

    def begin_batch(self) -> None:
        """Forward and backward of a micro-batch begin."""
        self._idle_s += time.perf_counter() - self._idle_since
        self._other_bubbles_s += self._bubbles.seconds - self._left_batch_at_s
        self._in_batch = True

    def end_batch(self) -> None:
        """They ended, and no update followed."""
        self._in_batch = False
        self._idle_since, self._left_batch_at_s = time.perf_counter(), self._bubbles.seconds

    def windows(self) -> Mapping[Window, float]:
        """Seconds of the step so far, by window."""
        whole_s = time.perf_counter() - self._updated_at
        communication_s = self._clock.seconds - self._communicated_s
        step = {Window.BUBBLE: self.bubble_s, Window.IDLE: self._idle_s, Window.COMMUNICATION: communication_s}
        return step | {Window.COMPUTE: max(0.0, whole_s - sum(step.values()))}

    @property
    def bubble_s(self) -> float:
        """Bubbles of this step, as far as they have ended."""
        return self._bubbles.seconds - self._other_bubbles_s

    @property
    def window(self) -> Window:
        """The window of now."""
        if self._in_batch and self._bubbles.is_busy:
            return Window.BUBBLE
        if self._clock.is_busy:
            return Window.COMMUNICATION
        return Window.COMPUTE if self._in_batch else Window.IDLE


class CopyWindows:
    """Lets copies go on in some windows of a step only.

    The training thread reports where the step is (`step`, `before_update`), the copying
    thread asks before every chunk (`admit`). Until one whole step was measured, every window is open. What fits into
    the bubbles that are still to come waits for them.

    Args:
        world: whose exchanges are the communication window, and whose waits for other stages the bubbles.
        separate_link: exchanges and copies take different ways, as NVLink and PCIe, so that copies may go on during
            exchanges. On CPUs a rank that waits in an exchange has an idle core, and that window counts as idle time.

    Attributes:
        step: the one that runs.
        open: the windows that the present copy may use, for what does not fit into bubbles.
        copied_bytes: of the present copy, by window.
    """

    def __init__(self, world: World, *, separate_link: bool) -> None:
        self.step, self._separate_link = RunningStep(world), separate_link
        self._waits_are_idle = world.device.type == "cpu"
        self._changed = threading.Condition()
        self._is_hurried = False
        self._measured: deque[Mapping[Window, float]] = deque(maxlen=_STEPS)
        self._bytes_per_s = 0.0
        self._reserve = _RESERVE
        self._held_s = self._bubbles_due_s = 0.0
        self._left_bytes = 0
        self.open = frozenset(Window)
        self.copied_bytes = dict.fromkeys(Window, 0)

    # ------------------------------------------------------------------ the training thread

    def before_update(self) -> None:
        """Forward and backward of the step's last micro-batch ended: the step's windows are measured."""
        self._measured.append(self.step.windows())

    def hurry(self) -> None:
        """Let the copy go on in any window, because training waits for it."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def waited(self, stall_s: float) -> None:
        """Training had to wait so long for the copy."""
        if stall_s > _STALL_S and (self.open != frozenset(Window) or self._bubbles_due_s):
            self._reserve *= 2

    def copy_begins(self, num_bytes: int) -> None:
        """Plan the windows of a copy from what the last steps and the last copy took."""
        self.copied_bytes = dict.fromkeys(Window, 0)
        self._held_s = 0.0
        self._is_hurried = False
        self._left_bytes = num_bytes
        self.open, self._bubbles_due_s = self._plan(num_bytes)

    def expected(self) -> dict[Window, float]:
        """Seconds of a step by window, the medians of the last ones; empty before one was measured."""
        if not self._measured:
            return {}
        return {window: statistics.median(step[window] for step in self._measured) for window in Window}

    def _plan(self, num_bytes: int) -> tuple[frozenset[Window], float]:
        """The windows for what fits no bubble, and the seconds of bubbles that are expected."""
        step = self.expected()
        if not step or not self._bytes_per_s:
            return frozenset(Window), 0.0
        exchange_s = step[Window.COMMUNICATION]
        if self._waits_are_idle:
            exchange_s, step[Window.IDLE] = 0.0, step[Window.IDLE] + exchange_s
        step[Window.COMMUNICATION] = exchange_s if self._separate_link else 0.0
        copied = schedule_snapshot(num_bytes, step, bytes_per_s=self._bytes_per_s / self._reserve)
        if sum(copied.values()) < num_bytes:
            return frozenset(Window), 0.0
        used = {window for window, size in copied.items() if size} | {Window.BUBBLE, Window.IDLE}
        if self._waits_are_idle:
            used.add(Window.COMMUNICATION)
        fits_bubbles = copied[Window.BUBBLE] == num_bytes
        return frozenset(Window) if fits_bubbles else frozenset(used), step[Window.BUBBLE]

    # ------------------------------------------------------------------ the copying thread

    def admit(self, num_bytes: int) -> None:
        """Return when so many bytes may be copied."""
        window = self.step.window
        if not self._admits(window):
            began = time.perf_counter()
            with self._changed:
                while not self._admits(window):
                    self._changed.wait(_LONGEST_LOOK_S)
                    window = self.step.window
            self._held_s += time.perf_counter() - began
        self.copied_bytes[window] += num_bytes
        self._left_bytes -= num_bytes

    def copy_ended(self, num_bytes: int, copy_s: float) -> None:
        """Learn the bandwidth from a copy's time, the time that it was held back left out."""
        if num_bytes:
            self._bytes_per_s = num_bytes / max(copy_s - self._held_s, 1e-9)

    def _admits(self, window: Window) -> bool:
        if self._is_hurried or window is Window.BUBBLE:
            return True
        due_s = self._bubbles_due_s - self.step.bubble_s
        fits_bubbles = due_s > 0 and self._left_bytes * self._reserve <= due_s * self._bytes_per_s
        return window in self.open and not fits_bubbles


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """Measured times of one snapshot.

    Attributes:
        copied_bytes: payload copied this time (carried-over experts are not).
        copy_s: from `start` to the end of the copy.
        copied_by_window: the bytes of it by window of the step; empty where windows are not scheduled.
    """

    copied_bytes: int
    copy_s: float
    copied_by_window: Mapping[Window, int] = field(default_factory=dict)


class Snapshotter:
    """Snapshots of one rank.

    Args:
        path: the arena file, `arena_path` in a directory of `arena_directory`; the agent watches it.
        run: identifies the training run for ever; a manifest of another run is refused.
        session: identifies this start of the run, the same on all ranks and larger (as a string) than that of any
            earlier start; the first checkpoint of a session is full.
        rank: this process in the world.
        world_size: ranks that together make one checkpoint.
        state: every key that this rank may ever save, to size the arena (values are looked at, not copied).
        objects: number of object keys (`start(objects=...)`) to reserve room for.
        object_bytes: room of each.
        windows: when copies may go on; None: always.
        world: number of the world (`directory.py`).

    Attributes:
        windows: as given.
        report: times of the last copy; None before the first.
        on_published: called in the background thread with the table of every snapshot that is whole, before `finish`
            returns.

    Raises:
        ConfigurationError: the arena does not fit, or a dtype cannot be stored.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        session: str,
        rank: int,
        world_size: int,
        state: Mapping[str, torch.Tensor | StatePiece],
        objects: int = 8,
        object_bytes: int = 1 << 20,
        windows: CopyWindows | None = None,
        world: int = 0,
    ) -> None:
        for name, value in (("run", run), ("session", session)):
            if not re.fullmatch(r"[\w.-]+", value):
                raise ConfigurationError(
                    f"{name}={value!r} becomes part of file names: use letters, digits, '.', '_', '-'"
                )
        live = _live(state)
        self._index = partial(SnapshotIndex, run=run, session=session, rank=rank, world=world, world_size=world_size)
        self._object_bytes = object_bytes
        capacity, table_bytes = arena_room(live, objects, object_bytes)
        self.arena = Arena.create(path, capacity=capacity, table_bytes=table_bytes)
        self._device = next((p.tensor.device for p in live if p.tensor.device.type != "cpu"), None)
        self._staging = Staging() if self._device is not None else None
        self.windows = windows
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.report: SnapshotReport | None = None
        self._newest: SnapshotIndex | None = None
        self._begun: SnapshotIndex | None = None  # what is copied of a snapshot that takes several steps
        self.on_published: Callable[[SnapshotIndex], None] | None = None

    def start(
        self,
        step: int,
        state: Mapping[str, torch.Tensor | StatePiece],
        *,
        fresh: Collection[str] | None = None,
        persist: Collection[str] | None = None,
        objects: Mapping[str, object] | None = None,
        groups: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        until: int | None = None,
    ) -> None:
        """Begin copying the state after `step`; the tensors must stay untouched until `wait_before_update` returns.

        Args:
            state: everything that this rank is responsible for, copied now or not.
            fresh: the expert keys to copy (None: all). Others keep the block of their newest snapshot; keys that have
                none are copied in any case, and so is everything that is not an expert's.
            persist: the expert keys whose turn it is to be written (None: all fresh ones). A turn lasts until a
                snapshot is committed, whichever that is. Keys that are new here are written, too.
            objects: small picklable values under their keys, readable again with `weights_only=True`.
            groups: key -> file group, so that experts that are saved together share a file.
            extra: JSON for the manifest (ledger, plan).
            until: the step at which an `add` completes this snapshot, which is then called that step's; None: nothing
                is added. One that is not completed yet is given up.

        Raises:
            ConfigurationError: the state does not fit the arena it was sized for.
        """
        self.give_up()
        began = time.perf_counter()
        copies, carried = self._chosen(step, _live(state), fresh, persist, groups or {})
        copies += [self._object_piece(key, plain, step) for key, plain in (objects or {}).items()]
        placed = self._allocate([piece for piece, _ in copies], carried)
        last = step if until is None else until
        table = self._index(step=last, placed=(*placed, *carried), extra=dict(extra or {}))
        self._begin_copy(table, placed, [tensor for *_, tensor in copies], began, is_last=step == last)

    def _chosen(
        self,
        step: int,
        state: Sequence[StatePiece],
        fresh: Collection[str] | None,
        persist: Collection[str] | None,
        groups: Mapping[str, str],
    ) -> tuple[list[tuple[Piece, torch.Tensor]], list[Piece]]:
        """Return the pieces to copy and those that keep their block of the newest snapshot; arguments as of `start`."""
        older = {} if self._newest is None else {piece.key: piece for piece in self._newest.placed}
        copies: list[tuple[Piece, torch.Tensor]] = []
        carried: list[Piece] = []
        for live in state:
            key, known = live.key, older.get(live.key)
            is_expert = is_expert_key(key)
            group = groups.get(key, "experts" if is_expert else "dense")
            piece = describe(live, version=step, group=group)
            left_out = fresh is not None and is_expert and key not in fresh
            has_turn = not left_out if persist is None else key in persist
            due = step if has_turn or known is None else known.due
            if left_out and known is not None and (known.dtype, known.block) == (piece.dtype, piece.block):
                carried.append(replace(known, group=group, due=due))
            else:
                copies.append((replace(piece, due=due), live.tensor))
        return copies, carried

    def add(self, step: int, state: Mapping[str, StatePiece], *, groups: Mapping[str, str]) -> None:
        """Copy what a snapshot that was begun holds of the state after a later step.

        Args:
            state: what to copy.
            groups: as in `start`.

        Raises:
            ConfigurationError: the state does not fit the arena it was sized for.
        """
        self.finish()
        began, begun = time.perf_counter(), self._begun
        assert begun is not None, "start was called with the last step"
        pieces = [replace(describe(live, version=step, group=groups[live.key]), due=step) for live in state.values()]
        placed = self._allocate(pieces, list(begun.placed))
        table = replace(begun, placed=(*begun.placed, *placed))
        sources = [live.tensor for live in state.values()]
        self._begin_copy(table, placed, sources, began, is_last=step == begun.step)

    def _begin_copy(
        self, table: SnapshotIndex, placed: list[Piece], sources: list[torch.Tensor], began: float, *, is_last: bool
    ) -> None:
        self._copied.clear()
        if self.windows is not None:
            self.windows.copy_begins(sum(piece.nbytes for piece in placed))
        stream = side_stream(self._device) if self._device is not None else None
        arguments = (table, placed, sources, stream, began, is_last)
        self._thread = threading.Thread(target=self._copy, args=arguments, name="snapshot", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Wait for what is being copied, and drop a snapshot that lacks later steps."""
        self.finish()
        if self._begun is not None:
            session, self._begun = self._begun.session, None
            self.arena.transition(lambda s: s.abort_snapshot())
            # The window may have been begun in the buffer of the newest one.
            self._newest = next((table for table in self.arena.tables() if table.session == session), None)

    def wait_before_update(self) -> float:
        """Wait until the live tensors may change; returns the seconds waited (the stall of this step).

        Raises:
            RuntimeError: the copy failed.
        """
        began = time.perf_counter()
        self._hurry()
        self._copied.wait()
        stall_s = time.perf_counter() - began
        if self.windows is not None:
            self.windows.waited(stall_s)
        self._raise_failure()
        return stall_s

    def finish(self) -> SnapshotReport | None:
        """Wait until what is being copied is published, or copied where more is added to it; returns `report`."""
        if self._thread is not None:
            self._hurry()
            self._thread.join()
            self._thread = None
        self._raise_failure()
        return self.report

    def renew(self) -> None:
        """Reserve the arena anew where it was deleted; the next snapshot copies everything."""
        self.give_up()
        self.arena.renew()
        self._newest = None

    @property
    def newest_step(self) -> int | None:
        """Step of the last published snapshot; None before the first."""
        return None if self._newest is None else self._newest.step

    def close(self) -> None:
        """Publish what is being copied and release the arena; its file stays for the agent."""
        try:
            self.give_up()
        finally:
            self.arena.close()

    def _hurry(self) -> None:
        if self.windows is not None:
            self.windows.hurry()

    def _object_piece(self, key: str, value: object, step: int) -> tuple[Piece, torch.Tensor]:
        data = torch.frombuffer(bytearray(dump_object(value)), dtype=torch.uint8)
        if data.numel() > self._object_bytes:
            raise ConfigurationError(
                f"{key} takes {data.numel()} bytes now, the arena has room for {self._object_bytes}: keep less in the "
                "state_dict of callbacks, or start again, which resumes and measures the size again"
            )
        piece = Piece(
            key=key,
            dtype=OBJECT,
            block=Block.of(()),
            version=step,
            group="objects",
            nbytes=data.numel(),
            due=step,
        )
        return piece, data

    def _allocate(self, copies: list[Piece], carried: list[Piece]) -> list[Piece]:
        """Open a buffer, or go on with the open one, and give every piece a block that no other live snapshot uses."""
        state = self.arena.state if self._begun else self.arena.transition(lambda s: s.begin_snapshot())
        assert state.writing is not None
        if self._begun is None:
            self.arena.begin_table(state.writing)
        live = [self.arena.table(i) for i, b in enumerate(state.buffers) if i != state.writing and b.step >= 0]
        used = [piece for table in live if table is not None for piece in table.placed]
        free = self.arena.free_blocks([*used, *carried])
        placed = []
        for piece in copies:
            size = block_bytes(self._object_bytes if piece.dtype == OBJECT else piece.nbytes)
            if not free.get(size):
                self._begun = None
                self.arena.transition(lambda s: s.abort_snapshot())
                raise ConfigurationError(
                    f"{piece.key} ({piece.nbytes} bytes) has no room in the arena, which was sized for the state at "
                    "the start: give buffers a fixed shape, and keep what grows in the state_dict of a callback"
                )
            placed.append(replace(piece, location=Location(data_offset=free[size].pop(0))))
        return placed

    def _copy(
        self,
        table: SnapshotIndex,
        placed: list[Piece],
        sources: list[torch.Tensor],
        stream: Any,
        began: float,
        is_last: bool,
    ) -> None:
        """The background thread: copy, let training go on, checksum, publish."""
        try:
            for piece, source in zip(placed, sources, strict=True):
                stored_as = torch.uint8 if piece.dtype == OBJECT else DTYPES[piece.dtype]
                self._copy_one(self.arena.payload(piece), source, stored_as, stream)
            if self._staging is not None:
                self._staging.finish()
            copied = time.perf_counter()
            self._copied.set()
            self._publish(table, placed, is_last=is_last)
            copied_bytes = sum(piece.nbytes for piece in placed)
            if self.windows is not None:
                self.windows.copy_ended(copied_bytes, copied - began)
            self.report = SnapshotReport(
                copied_bytes=copied_bytes,
                copy_s=copied - began,
                copied_by_window=dict(self.windows.copied_bytes) if self.windows is not None else {},
            )
        except BaseException as error:  # handed to the training thread, which raises it
            self._failure, self._begun = error, None
            if self._staging is not None:
                self._staging.forget()
            self.arena.transition(lambda s: s.abort_snapshot())
        finally:
            self._copied.set()

    def _copy_one(self, target: torch.Tensor, source: torch.Tensor, stored_as: torch.dtype, stream: Any) -> None:
        if source.numel() == 0:
            return
        with nullcontext() if stream is None else stream:
            flat = source.detach().to(stored_as).contiguous().view(-1).view(torch.uint8)
        if self._staging is not None and flat.device.type != "cpu":  # objects and counts of steps are on the host
            self._staging.copy(target.data_ptr(), flat, stream, self._admit)
            return
        for start in range(0, flat.numel(), CHUNK_BYTES):
            part = flat[start : start + CHUNK_BYTES]
            self._admit(part.numel())
            # a quarter faster than copy_ here, and without the interpreter's lock as well
            ctypes.memmove(target.data_ptr() + start, part.data_ptr(), part.numel())

    def _admit(self, num_bytes: int) -> None:
        if self.windows is not None:
            self.windows.admit(num_bytes)

    def _publish(self, table: SnapshotIndex, placed: list[Piece], *, is_last: bool) -> None:
        """Add checksums of what was copied; publish the snapshot after its last part."""
        hashed = {
            (piece.key, piece.block.offsets): replace(piece, xxh3=digest_of(self.arena.payload(piece)))
            for piece in placed
        }
        placed_now = tuple(hashed.get((piece.key, piece.block.offsets), piece) for piece in table.placed)
        table = replace(table, placed=placed_now)
        self._begun = None if is_last else table
        if not is_last:
            return
        index = self.arena.state.writing
        assert index is not None
        self.arena.finish_table(index, table)
        self.arena.transition(lambda s: s.finish_snapshot(table.step))
        self._newest = table
        if self.on_published is not None:
            self.on_published(table)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(f"the snapshot failed: {failure}") from failure


def _live(state: Mapping[str, torch.Tensor | StatePiece]) -> list[StatePiece]:
    """A tensor by itself is a whole one."""
    return [value if isinstance(value, StatePiece) else StatePiece.of(key, value) for key, value in state.items()]


def arena_room(state: Iterable[StatePiece], objects: int, object_bytes: int) -> tuple[dict[int, int], int]:
    """Return the capacity of an arena for this state and so many objects, and the bytes of a table of it: what the
    pieces take as JSON with long numbers, and 256 KiB for the manifest's `extra`.
    """
    pieces = [describe(piece, version=0, group="") for piece in state]
    capacity = capacity_of([*(p.nbytes for p in pieces), *[object_bytes] * objects])
    at = Location(data_offset=1 << 40)
    widest = [replace(p, version=10**12, group="x" * 32, xxh3="f" * 16, location=at, due=10**12) for p in pieces]
    table = SnapshotIndex(run="", session="", step=0, rank=0, world_size=0, placed=tuple(widest))
    return capacity, -(-(len(table.dump()) + 512 * objects + (256 << 10)) // 4096) * 4096
