"""The persist agent: one process per node that writes snapshots to storage, and goes on doing so when the workers are
dead.

It watches the arenas of a private directory, writes the snapshots that wait there as parts of checkpoints, commits
them when every rank's part is there (whichever node that happens on), and prunes old ones. Everything it needs to go
on after its own death lies in the arenas and in the storage. It tells the workers what it did, and what failed, in
`status.json`; nobody ever waits for it.

    python -m moe_lightning.checkpoint.agent --arenas DIR --checkpoints ROOT
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_lightning.checkpoint.agent_control import LOCK, STATUS, STOP, AgentStatus, complaint_of, record_root
from moe_lightning.checkpoint.agreed_step import Agreement, propose
from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.arena_location import ARENAS, rank_of
from moe_lightning.checkpoint.commit import prune, try_commit, withdraw_part
from moe_lightning.checkpoint.durable import lock_exclusively, write_durably
from moe_lightning.checkpoint.fence import Superseded, check_world
from moe_lightning.checkpoint.own_root import Elsewhere, OwnRoot
from moe_lightning.checkpoint.part_writer import write_part
from moe_lightning.checkpoint.persist_job import (
    Job,
    has_work,
    interrupted_job,
    is_superseded,
    is_void,
    left_behind,
    missing_parts,
    next_job,
    will_lack_parts,
)
from moe_lightning.checkpoint.scrubbing import Scrubber
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import place_of, storage_of
from moe_lightning.checkpoint.store import read_manifest
from moe_lightning.checkpoint.triple_buffer import TripleBuffer, newest_common
from moe_lightning.errors import CheckpointError

_HOPE_S = 0.2
_LOCK_S = 0.1
_LONGEST_PAUSE_S = 60.0
_LAST_ATTEMPTS = 3  # failures in a row after which an agent that should leave gives up


class Agent:
    """The agent's loop.

    Args:
        arenas: directory of the arena files.
        root: directory of the checkpoints.
        keep_last: whole checkpoints to keep.
        verify_within: commits within which every carried file is read again.
        copy_every: every so many commits all experts are written to files of their own, and pruning keeps a checkpoint
            that shares none of its files with the newest one; 0: never.
        poll_s: pause between two looks at the arenas.
        grace_s: after the last worker's death, how long to wait for new ones before exiting.
        retry_s: pause after a failed attempt; it doubles with every further one, up to a minute.
        commit_timeout_s: how long to wait for the parts of other nodes.
        identity: of the very directory that the snapshots are for (`Storage.identity`); None: of the one that is there.
    """

    def __init__(
        self,
        arenas: Path,
        root: Place,
        *,
        keep_last: int = 2,
        verify_within: int = 8,
        copy_every: int = 0,
        poll_s: float = 0.02,
        grace_s: float = 30.0,
        retry_s: float = 1.0,
        commit_timeout_s: float = 600.0,
        identity: str | None = None,
    ) -> None:
        self.arenas_path, self.root, self.keep_last = arenas, root, keep_last
        self.poll_s, self.grace_s, self.retry_s, self.commit_timeout_s = poll_s, grace_s, retry_s, commit_timeout_s
        self.copy_every, self._own_root = copy_every or None, OwnRoot(root, identity)
        self._scrubber = Scrubber(verify_within)
        self.status = AgentStatus()
        self._arenas: dict[Path, Arena] = {}
        self._damaged: set[Path] = set()  # arenas that were passed over
        self._job: Job | None = None
        self._retry_at = 0.0
        self._failures = 0  # in a row
        self._seen: tuple[list[tuple[TripleBuffer, bool]], Agreement | None] | None = None
        self._stop = threading.Event()

    def run(self) -> int:
        """Serve until told to stop, or until the workers have been gone for the grace period; then persist what waits.
        Arenas that are deleted end it at once.

        Returns:
            0, or 1 where a snapshot could not be persisted (its arena file is kept).
        """
        alive_at = time.monotonic()
        while True:
            busy = self.serve_once()
            now = time.monotonic()
            if any(arena.writer_alive for arena in self._arenas.values()):
                alive_at = now
            told = self._stop.is_set() or (self.arenas_path / STOP).exists()
            gone = now - alive_at > self.grace_s
            if not self.arenas_path.exists():
                return self._leave()  # somebody took the node's snapshots away
            if (told or gone) and not busy and (self._failures >= _LAST_ATTEMPTS or not self._pending()):
                return self._leave()
            if not busy and (told or not self.scrub()):
                time.sleep(self.poll_s)

    def stop(self) -> None:
        """Persist what waits and return from `run`."""
        self._stop.set()

    def serve_once(self) -> bool:
        """Look at the arenas once and do what can be done; True if something was done."""
        self._find_arenas()
        if time.monotonic() < self._retry_at:
            return False
        try:
            if self._job is not None or any(has_work(arena) for arena in self._arenas.values()):
                self._own_root.check()
            self._take_up()
            if self._finish():  # perhaps an agent before this one, or another node's, wrote everything
                return True
            written = self._write()
            if written and self._finish(has_written=True):
                return True
            if self._job is not None:
                self._give_up_if_hopeless(self._job)
            return written
        except (OSError, CheckpointError) as error:
            # A newer world takes directories away, which shows in many ways.
            is_own = not isinstance(error, Elsewhere)
            if is_own and self._job is not None and self._stands_aside(self._job.world):
                return True
            # Storage may recover; a snapshot that makes no whole checkpoint stays as it is.
            keep = isinstance(error, OSError) or self._failures < _LAST_ATTEMPTS
            self._fail(complaint_of(error, self.root), keep=keep, withdraw=is_own)
            return True

    def scrub(self) -> bool:
        """Read a little of what checkpoints carry over, and report damage; False where nothing is left to be read."""
        has_read = self._scrubber.work()
        for problem in self._scrubber.problems[self.status.damaged :]:
            print(problem, flush=True)
            self._report(replace(self.status, damage=problem, damaged=len(self._scrubber.problems)))
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
                        print(f"{error} (its snapshots are passed over)", flush=True)
                    self._damaged.add(path)
        for arena in self._arenas.values():
            if arena.state.writing is not None and not arena.writer_alive:
                arena.abort_of_the_dead()

    def _take_up(self) -> None:
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
        if self._stands_aside(world) or is_superseded(self.root, session):
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
            damaged = frozenset(self._scrubber.damaged)
            write = partial(write_part, self.root, damaged=damaged, copy_every=self.copy_every)
            parts = pool.map(lambda item: write(item[2], item[1].payload), todo)
            for (path, _, _), part in zip(todo, parts, strict=True):
                job.written.add(path)
                job.nbytes += sum(record.nbytes for record in part.files.values())
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
        self._failures = 0
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
            self._let_go(path, delete=True)
        agreed = Agreement.read(self.root)
        if agreed is not None and agreed.session == job.session and not agreed.is_open and agreed.step <= job.step:
            propose(self.root, agreed, agreed.fulfilled(), world=job.world)
        self._after_commit(committed, job.world)
        return True

    def _after_commit(self, committed: Place, world: int) -> None:
        """Nothing here makes the commit a failure."""
        try:
            ranks = {rank_of(path) for path in self._arenas}
            self._scrubber.committed(committed, read_manifest(committed), ranks)
            prune(self.root, self.keep_last, world=world, with_reserve=self.copy_every is not None)
        except (OSError, CheckpointError) as error:
            where = getattr(error, "filename", None) or self.root
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"what is old could not be deleted or read again at {where}: {reason}", flush=True)

    def _give_up_if_hopeless(self, job: Job) -> None:
        """End the job if parts are missing that will never come (looked at only now and then: it reads tables)."""
        now = time.monotonic()
        if now - job.checked < _HOPE_S:
            return
        job.checked = now
        if is_void(job, self._arenas.values()):
            self._end_job(success=False, keep=False)
        elif will_lack_parts(job, self._arenas, self.root):
            self._end_job(success=False)
        elif now - job.began > self.commit_timeout_s:
            raise CheckpointError(
                f"the parts of ranks {missing_parts(self.root, job)} of step {job.step} did not come within "
                f"{self.commit_timeout_s:g} s: look at their agents"
            )

    def _end_job(self, *, success: bool, keep: bool = True) -> None:
        job, self._job, self._seen = self._job, None, None
        for arena in self._arenas.values():
            index = arena.state.persisting
            if job is not None and index is not None and arena.state.buffers[index].step == job.step:
                arena.transition(lambda s: s.finish_persist() if success else s.fail_persist(keep=keep))

    def _stands_aside(self, world: int) -> bool:
        """Whether a newer world saves or has resumed: what this one has not committed is void then."""
        try:
            check_world(self.root, world)
        except Superseded as error:
            if self._job is not None:
                self._end_job(success=False, keep=False)
            if self.status.error != str(error):
                print(error, flush=True)
                self._report(replace(self.status, error=str(error)))
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
        self._retry_at = time.monotonic() + min(_LONGEST_PAUSE_S, self.retry_s * 2 ** min(self._failures, 10))
        self._failures += 1
        self._report(replace(self.status, error=problem, errors=self.status.errors + 1))

    def _pending(self) -> bool:
        """Whether there is, or soon will be, something to persist."""
        copying = any(arena.state.writing is not None and arena.writer_alive for arena in self._arenas.values())
        if copying or self._job is not None:
            return True
        session, arenas = self._current()
        steps = [[t.step for t in arena.waiting_tables() if t.session == session] for arena in arenas]
        return newest_common(steps) is not None

    def _report(self, status: AgentStatus) -> None:
        self.status = status
        try:
            write_durably(self.arenas_path / STATUS, json.dumps(vars(status)).encode())
        except OSError as error:
            print(f"the agent cannot report to {self.arenas_path} ({error.strerror}): {status}", file=sys.stderr)

    def _leave(self) -> int:
        """Release memory unless it holds snapshots that storage lacks. The request to stop stays until a session asks
        for an agent again: another one may have been started and come to it later.
        """
        unsaved = self._pending()
        for path in list(self._arenas):
            self._let_go(path, delete=not unsaved)
        return 1 if unsaved else 0

    def _let_go(self, path: Path, *, delete: bool) -> None:
        arena = self._arenas.pop(path)
        if delete:
            arena.delete()
        arena.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the agent."""
    parser = argparse.ArgumentParser(description="Writes the snapshots of this node's workers to storage.")
    parser.add_argument("--arenas", type=Path, required=True)
    parser.add_argument("--checkpoints", type=place_of, required=True)
    parser.add_argument("--identity", help="of the directory of checkpoints; default: of what is there")
    for name in ("keep-last", "verify-within", "copy-every"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
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
        agent = Agent(arenas, root, **options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stop())
        return agent.run()


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
