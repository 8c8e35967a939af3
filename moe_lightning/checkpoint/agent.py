"""Persist agent: one process per node that writes snapshots to storage, also after the workers are dead.

The agent watches the arenas of a private directory, writes waiting snapshots as parts of checkpoints, commits a
checkpoint when every rank's part is there (on whichever node that happens), and prunes old ones. Everything it needs
after its own death is in the arenas and in the storage. It reports progress and failures in `status.json`; no process
waits for it. It writes to the very directory it was started for, even if the path leads to another one by now.

A carried file is one inode in all checkpoints that name it, so damage reaches all of them. While idle, the agent reads
carried files back within a number of commits; experts of a damaged or lost file are written again from memory.

    python -m moe_lightning.checkpoint.agent --arenas DIR --checkpoints ROOT
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import xxhash

from moe_lightning.checkpoint.agent_handle import LOCK, SIGNALS, STATUS, STOP, AgentStatus
from moe_lightning.checkpoint.agreement import (
    Agreement,
    Job,
    has_work,
    interrupted_job,
    is_superseded,
    is_void,
    left_behind,
    missing_parts,
    next_job,
    propose,
    will_lack_parts,
)
from moe_lightning.checkpoint.arena import ARENAS, Arena, TripleBuffer, newest_common, rank_of
from moe_lightning.checkpoint.commit import prune, try_commit, withdraw_part, write_part
from moe_lightning.checkpoint.directory import Superseded, check_world, read_manifest
from moe_lightning.checkpoint.manifest import FileRecord, Manifest
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.checkpoint.storage.interface import Place, lock_exclusively, write_durably
from moe_lightning.errors import CheckpointError


def complaint_of(error: Exception, root: Place) -> str:
    """Return the reason why an attempt to write a checkpoint failed, in one sentence."""
    if isinstance(error, CheckpointError):
        return str(error)
    where = getattr(error, "filename", None) or root
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"writing a checkpoint to {where} failed ({reason}): the last one is untouched"


def _log(text: object) -> None:
    with contextlib.suppress(OSError):  # the log lies with the arenas, in memory that may be full
        print(text, flush=True)


def record_root(lock: IO[str], root: Place, identity: str | None) -> None:
    """The agent's side: say in the lock file what is served."""
    lock.truncate(0)
    json.dump({"root": str(root), "identity": identity, "pid": os.getpid()}, lock)
    lock.flush()


class Elsewhere(OSError):
    """The path does not lead to the run's directory: nothing is written, and nothing there is the run's."""


class OwnRoot:
    """A directory by path and identity, kept open: an automounter unmounts a file system that is not in use, and the
    directory has another identity once it is mounted again.

    Args:
        path: of the checkpoints.
        identity: of the directory (`Storage.identity`); None: of the one that is there when it is first used.
    """

    def __init__(self, path: Place, identity: str | None) -> None:
        self._path, self._storage, self._identity = path, storage_of(path), identity
        self._held: weakref.finalize[..., Any] | None = None  # closes the directory

    def check(self, *, may_make: bool) -> None:
        """See that the path leads to the directory. Where it was deleted, but not what holds it, another will be made.

        Args:
            may_make: ranks of the run are alive; else what holds it now may be another run's.

        Raises:
            Elsewhere: it does not.
        """
        try:
            found = self._storage.identity(self._path)
        except FileNotFoundError:
            if self._identity is not None and not (may_make and self._storage.is_dir(self._path.parent)):
                raise Elsewhere(errno.ENOENT, "the run's directory was moved or deleted", str(self._path)) from None
            self._identity = None
            if self._held is not None:
                self._held()
                self._held = None
            return
        self._identity = self._identity or found
        if found != self._identity:
            raise Elsewhere(errno.ESTALE, "another directory took the place of the run's", str(self._path))
        self._hold()

    def made(self) -> None:
        """The directory is there: it is this one from now on, where it was not known."""
        self._identity = self._identity or self._storage.identity(self._path)
        self._hold()

    def _hold(self) -> None:
        if self._held is None and isinstance(self._path, Path):
            self._held = weakref.finalize(self, os.close, os.open(self._path, os.O_RDONLY | os.O_DIRECTORY))


_DATA = re.compile(r".+\.rank(\d+)\.step(\d+)\.distcp")


VERIFY_WITHIN = 8
"""Commits after each of which another part of the files that checkpoints carry over is read again."""


class CarriedFileVerifier:
    """Verification of the carried files of one node's ranks, a little at a time. The name of a file says after which
    of `VERIFY_WITHIN` commits in a row it is read.

    Attributes:
        damaged: names of files that the newest checkpoint carries and that are not as they were written.
        problems: one sentence for each file that was ever found damaged.
    """

    def __init__(self) -> None:
        self._commits = 0
        self._unread: Iterator[None] = iter(())  # what is left to be read until the next commit
        self.damaged: set[str] = set()
        self.problems: list[str] = []

    def committed(self, directory: Place, manifest: Manifest, ranks: Collection[int]) -> None:
        """A checkpoint is there: finish what should have been read by now, and choose what is read until the next one.

        Args:
            ranks: of this node; other nodes read the files of theirs.
        """
        for _ in self._unread:
            pass
        self._commits += 1
        carried = {name: r for name, r in manifest.files.items() if _is_carried(name, manifest.step, ranks)}
        self.damaged &= carried.keys()
        turn = self._commits % VERIFY_WITHIN
        due = [name for name in carried if xxhash.xxh3_64_intdigest(name.encode()) % VERIFY_WITHIN == turn]
        rounds = [self._read(directory, name, carried[name]) for name in due if name not in self.damaged]
        self._unread = chain.from_iterable(rounds)

    def work(self) -> bool:
        """Read a little; False where nothing is left to be read until the next commit."""
        return next(self._unread, self) is not self

    def _read(self, directory: Place, name: str, record: FileRecord) -> Iterator[None]:
        """Compare a file with its checksum, a chunk at a time."""
        path, digest, nbytes = directory / record.path, xxhash.xxh3_64(), 0
        problem: str | None = None
        storage = storage_of(directory)
        try:
            try:
                for chunk in storage.chunks(path, fresh=True):
                    digest.update(chunk)
                    nbytes += len(chunk)
                    yield
            except FileNotFoundError:
                if not storage.is_dir(directory):
                    return  # pruned: a newer checkpoint carries the file, and it is read from there
                problem = "is gone"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem is None and (nbytes, digest.hexdigest()) != (record.nbytes, record.xxh3):
            problem = "is damaged"
        if problem is not None:
            self.damaged.add(name)
            self.problems.append(f"{path} {problem}: the next checkpoint writes its experts again")


def _is_carried(name: str, step: int, ranks: Collection[int]) -> bool:
    match = _DATA.fullmatch(name)
    return match is not None and int(match[2]) != step and int(match[1]) in ranks


_HOPE_S, _LONGEST_HOPE_S = 0.2, 2.0
_LOCK_S = 0.1
_LONGEST_PAUSE_S = 60.0
_LAST_ATTEMPTS = 3  # failures in a row after which an agent that should leave gives up


class _Backoff:
    """Pause after a failure; it doubles with every further one in a row, up to a minute."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._retry_at = 0.0
        self.failures = 0  # in a row

    @property
    def is_over(self) -> bool:
        """True if the next attempt is due."""
        return time.monotonic() >= self._retry_at

    def failed(self) -> None:
        """Begin a pause."""
        self._retry_at = time.monotonic() + min(_LONGEST_PAUSE_S, self._pause_s * 2 ** min(self.failures, 10))
        self.failures += 1

    def succeeded(self) -> None:
        """Begin the row anew."""
        self.failures = 0


class Agent:
    """The agent's loop.

    Args:
        arenas: directory of the arena files.
        root: directory of the checkpoints.
        keep_last: whole checkpoints to keep.
        retry_s: pause after a failed attempt; it doubles with every further one, up to a minute.
        commit_timeout_s: how long to wait for the parts of other nodes, once those of this node are written; at least
            as long as that took.
        identity: of the very directory that the snapshots are for (`Storage.identity`); None: of the one that is there.
    """

    def __init__(
        self,
        arenas: Path,
        root: Place,
        *,
        keep_last: int = 2,
        retry_s: float = 1.0,
        commit_timeout_s: float = 600.0,
        identity: str | None = None,
    ) -> None:
        self.arenas_path, self.root, self.keep_last = arenas, root, keep_last
        self.commit_timeout_s = commit_timeout_s
        self._own_root, self._verifier = OwnRoot(root, identity), CarriedFileVerifier()
        self.status = AgentStatus()
        self._arenas: dict[Path, Arena] = {}
        self._damaged: set[Path] = set()  # arenas that were passed over
        self._job: Job | None = None
        self._backoff = _Backoff(retry_s)
        self._seen: tuple[list[tuple[TripleBuffer, bool]], Agreement | None] | None = None
        self._ends_with_workers = False

    def run(self, *, poll_s: float = 0.02, grace_s: float = 30.0) -> int:
        """Serve until a session asks to stop, or until the workers have been gone for the grace period; then persist
        what waits. Arenas that are deleted end it at once.

        Args:
            poll_s: pause between two looks at the arenas.
            grace_s: after the last worker's death, how long to wait for new ones before exiting.

        Returns:
            0, or 1 where a snapshot could not be persisted (its arena file is kept).
        """
        alive_at = time.monotonic()
        served = storage_of(self.arenas_path).identity(self.arenas_path)
        with contextlib.suppress(OSError):  # as `serve_once` will say
            self._own_root.check(may_make=False)
        while True:
            busy = self.serve_once()
            now = time.monotonic()
            if any(arena.writer_alive for arena in self._arenas.values()):
                alive_at = now
            is_stopping = (self.arenas_path / STOP).exists()
            gone = now - alive_at > (0.0 if self._ends_with_workers else grace_s)
            if not _is_at(self.arenas_path, served):
                return self._leave()  # somebody took the node's snapshots away
            if (is_stopping or gone) and not busy and (self._backoff.failures >= _LAST_ATTEMPTS or not self._pending()):
                return self._leave()
            if not busy and (is_stopping or not self.verify_carried()):
                time.sleep(poll_s)

    def end_with_workers(self) -> None:
        """Wait for no new workers, from now on; those that live may save until they end."""
        self._ends_with_workers = True

    def serve_once(self) -> bool:
        """Look at the arenas once and do what can be done; True if something was done."""
        self._find_arenas()
        if not self._backoff.is_over:
            return False
        try:
            if self._job is not None or any(has_work(arena) for arena in self._arenas.values()):
                self._own_root.check(may_make=any(arena.writer_alive for arena in self._arenas.values()))
            self._choose_job()
            if self._finish():  # perhaps an agent before this one, or another node's, wrote everything
                return True
            written = self._write()
            if written and self._finish(has_written=True):
                return True
            if self._job is not None:
                self._end_job_if_void(self._job)
            return written
        except (OSError, CheckpointError, RuntimeError, MemoryError) as error:  # also if no thread can be started
            # A newer world takes directories away, which shows in many ways.
            is_own = not isinstance(error, Elsewhere)
            with contextlib.suppress(OSError):  # a storage that is away cannot be asked
                if is_own and self._job is not None and self._is_fenced(self._job.world, self._job.session):
                    return True
            # Storage may recover; a snapshot that makes no complete checkpoint stays as it is.
            keep = not isinstance(error, CheckpointError) or self._backoff.failures < _LAST_ATTEMPTS
            self._fail(complaint_of(error, self.root), keep=keep, withdraw=is_own)
            return True

    def verify_carried(self) -> bool:
        """Read a little of what checkpoints carry over, and report damage; False where nothing is left to be read."""
        has_read = self._verifier.work()
        for problem in self._verifier.problems[self.status.damaged :]:
            _log(problem)
            self._report(replace(self.status, damage=problem, damaged=len(self._verifier.problems)))
        return has_read

    # --- steps of a round -------------------------------------------------------------------------------------------

    def _find_arenas(self) -> None:
        for path, arena in list(self._arenas.items()):
            if arena.replaced:
                arena.close()
                del self._arenas[path]
        for path in sorted(self.arenas_path.glob(ARENAS)):
            if path not in self._arenas:
                try:
                    self._arenas[path] = Arena(path)
                except FileNotFoundError:
                    continue  # being replaced: the next round sees the new one
                except CheckpointError as error:
                    if path not in self._damaged:
                        _log(f"{error} (its snapshots are passed over)")
                    self._damaged.add(path)
        for arena in self._arenas.values():
            if arena.state.writing is not None and not arena.writer_alive:
                arena.abort_if_writer_died()

    def _choose_job(self) -> None:
        """Choose the step to persist, and make its snapshots P."""
        if self._job is None:
            states = [(arena.state, arena.writer_alive) for arena in self._arenas.values()]
            seen = (states, Agreement.read(self.root) if any(state.waiting for state, _ in states) else None)
            if seen != self._seen:  # otherwise there was nothing to do, and tables are long
                self._seen = seen
                self._job = interrupted_job(self._arenas.values()) or next_job(self.root, *self._current())
        job = self._job
        if job is None:
            return
        for arena in self._arenas.values():
            state = arena.state
            index = state.waiting.get(job.step)
            table = arena.table(index) if state.persisting is None and index is not None else None
            if table is not None and table.session == job.session:
                arena.transition(lambda s: s.start_persist(job.step) if job.step in s.waiting else s)

    def _current(self) -> tuple[str | None, list[Arena]]:
        """The newest session of which a snapshot waits, and the arenas of its ranks; None where nothing waits that is
        still wanted."""
        waiting = [table for arena in self._arenas.values() for table in arena.waiting_tables()]
        session = max((table.session for table in waiting), default=None)
        if session is None:
            return None, []
        world = max(table.world for table in waiting if table.session == session)
        if self._is_fenced(world, session) or is_superseded(self.root, session):
            return None, []
        left = left_behind(self._arenas, session)
        return session, [arena for path, arena in self._arenas.items() if path not in left]

    def _write(self) -> bool:
        """Write the parts of all ranks of this node that are P and not written yet."""
        job = self._job
        if job is None:
            return False
        todo = []
        for path, arena in self._arenas.items():
            index = arena.state.persisting
            table = None if index is None or path in job.written else arena.table(index)
            if table is not None and (table.session, table.step) == (job.session, job.step):
                todo.append((path, arena, table))
        if not todo:
            return False
        with ThreadPoolExecutor(max_workers=min(4, len(todo))) as pool:
            damaged = frozenset(self._verifier.damaged)
            write = partial(write_part, self.root, damaged=damaged)
            parts = pool.map(lambda item: write(item[2], item[1].payload), todo)
            for (path, _, _), part in zip(todo, parts, strict=True):
                job.written.add(path)
                job.nbytes += sum(record.nbytes for record in part.files.values())
        job.written_at = time.monotonic()
        return True

    def _finish(self, *, has_written: bool = False) -> bool:
        """Commit if all parts are there; then the snapshots are R."""
        job = self._job
        if job is None:
            return False
        committed = try_commit(
            self.root, job.session, job.step, job.world_size, world=job.world, has_written=has_written
        )
        if committed is None:
            return False
        self._end_job(success=True)
        self._backoff.succeeded()
        self._own_root.made()
        self._report(
            replace(
                self.status,
                committed_step=job.step,
                committed_session=job.session,
                committed_path=str(committed),
                persist_s=time.monotonic() - job.began,
                persist_bytes=job.nbytes,
                error=None,
            )
        )
        for path in left_behind(self._arenas, job.session):
            self._close_arena(path, delete=True)
        agreed = Agreement.read(self.root)
        if agreed is not None and agreed.session == job.session and not agreed.is_open and agreed.step <= job.step:
            propose(self.root, agreed, agreed.fulfilled(), world=job.world)
        self._after_commit(committed, job.world)
        return True

    def _after_commit(self, committed: Place, world: int) -> None:
        """Nothing here makes the commit a failure."""
        try:
            ranks = {rank_of(path) for path in self._arenas}
            self._verifier.committed(committed, read_manifest(committed), ranks)
            prune(self.root, self.keep_last, world=world)
        except (OSError, CheckpointError) as error:
            where = getattr(error, "filename", None) or self.root
            reason = error.strerror if isinstance(error, OSError) else error
            _log(f"what is old could not be deleted or read again at {where}: {reason}")

    def _end_job_if_void(self, job: Job) -> None:
        """End the job if parts are missing that cannot come any more (with pauses that double, as it reads tables)."""
        now = time.monotonic()
        if now - job.looked_at < min(_LONGEST_HOPE_S, _HOPE_S * 2 ** min(job.looks, 10)):
            return
        job.looks, job.looked_at = job.looks + 1, now
        if is_void(job, self._arenas.values()):
            self._end_job(success=False, keep=False)
        elif will_lack_parts(job, self._arenas, self.root):
            self._end_job(success=False)
        elif now - job.written_at > (longest_s := max(self.commit_timeout_s, job.written_at - job.began)):
            raise CheckpointError(
                f"the parts of ranks {missing_parts(self.root, job)} of step {job.step} did not come within "
                f"{longest_s:.0f} s of those of this node: look at their agents"
            )

    def _end_job(self, *, success: bool, keep: bool = True) -> None:
        job, self._job, self._seen = self._job, None, None
        for arena in self._arenas.values():
            index = arena.state.persisting
            if job is not None and index is not None and arena.state.buffers[index].step == job.step:
                arena.transition(lambda s: s.finish_persist() if success else s.fail_persist(keep=keep))

    def _is_fenced(self, world: int, session: str) -> bool:
        """Return True if a newer world saves or has resumed, which voids what a session of this one has not
        committed.
        """
        try:
            check_world(self.root, world)
        except Superseded as error:
            if self._job is not None:
                self._end_job(success=False, keep=False)
            if self.status.error != str(error):
                _log(error)
                self._report(replace(self.status, error=str(error), error_session=session))
            return True
        return False

    def _fail(self, problem: str, *, keep: bool, withdraw: bool) -> None:
        """Keep the error for the workers, drop this node's parts, and try again later with the newest snapshot."""
        job = self._job
        if job is not None:
            for arena in self._arenas.values():
                index = arena.state.persisting
                table = None if index is None else arena.table(index)
                if withdraw and table is not None:
                    with contextlib.suppress(OSError, CheckpointError):  # `problem` says it already
                        withdraw_part(self.root, job.session, job.step, table.rank, world=job.world)
            self._end_job(success=False, keep=keep)
        self._seen = None
        self._backoff.failed()
        session = job.session if job is not None else ""
        self._report(replace(self.status, error=problem, error_session=session, errors=self.status.errors + 1))

    def _pending(self) -> bool:
        """Return True if a snapshot waits to be persisted or is being copied."""
        copying = any(arena.state.writing is not None and arena.writer_alive for arena in self._arenas.values())
        if copying or self._job is not None:
            return True
        try:
            session, arenas = self._current()
        except OSError:  # something waits, and a storage that is away cannot be asked if it is still wanted
            return True
        steps = [[t.step for t in arena.waiting_tables() if t.session == session] for arena in arenas]
        return newest_common(steps) is not None

    def _report(self, status: AgentStatus) -> None:
        self.status = status
        try:
            write_durably(self.arenas_path / STATUS, json.dumps(vars(status)).encode())
        except OSError as error:
            _log(f"the agent cannot report to {self.arenas_path} ({error.strerror}): {status}")

    def _leave(self) -> int:
        """Release memory unless it holds snapshots that storage lacks. The request to stop stays until a session asks
        for an agent again: another one may have been started and come to it later.
        """
        unsaved = self._pending()
        for path in list(self._arenas):
            self._close_arena(path, delete=not unsaved)
        return 1 if unsaved else 0

    def _close_arena(self, path: Path, *, delete: bool) -> None:
        arena = self._arenas.pop(path)
        if delete:
            arena.delete()
        arena.close()


def _is_at(path: Path, identity: str) -> bool:
    """True if a directory is still the one of this identity."""
    try:
        return storage_of(path).identity(path) == identity
    except FileNotFoundError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the agent."""
    parser = argparse.ArgumentParser(description="Writes the snapshots of this node's workers to storage.")
    parser.add_argument("--arenas", type=Path, required=True)
    parser.add_argument("--checkpoints", type=place_of, required=True)
    parser.add_argument("--identity", help="of the directory of checkpoints; default: of what is there")
    parser.add_argument("--keep-last", type=int, default=sys.maxsize, help="checkpoints to keep; default: all")
    for name in ("poll-s", "grace-s", "retry-s", "commit-timeout-s"):
        parser.add_argument(f"--{name}", type=float, default=argparse.SUPPRESS)
    options: dict[str, Any] = vars(parser.parse_args(argv))
    arenas, root = options.pop("arenas"), options.pop("checkpoints")
    if options["identity"] is None and storage_of(root).is_dir(root):
        options["identity"] = storage_of(root).identity(root)
    if not arenas.is_dir():
        print(f"{arenas} is gone, there is nothing to write")
        return 0
    with open(arenas / LOCK, "a") as lock:
        try:  # those who ask whether an agent lives hold the lock for an instant, too
            lock_exclusively(lock.fileno(), timeout_s=_LOCK_S, message=f"another agent serves {arenas} already")
        except CheckpointError as served:
            print(served)
            return 0
        record_root(lock, root, options["identity"])
        pauses = {name: options.pop(name) for name in ("poll_s", "grace_s") if name in options}
        agent = Agent(arenas, root, **options)
        for number in SIGNALS:
            signal.signal(number, lambda *_: agent.end_with_workers())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return agent.run(**pauses)


if __name__ == "__main__":
    sys.exit(main())
