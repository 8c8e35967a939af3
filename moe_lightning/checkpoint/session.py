"""Checkpoint session of one start of a run: snapshotter, agent, and protection of snapshots.

Saving needs no messages. Ranks communicate when a session opens, and when K_snapshot and the interval adapt to measured
times.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.agent_handle import LEAVE_S, AgentHandle, AgentStatus, read_status
from moe_lightning.checkpoint.agreement import Agreement
from moe_lightning.checkpoint.arena import (
    ARENAS,
    arena_bytes,
    arena_directory,
    arena_path,
    arenas_name,
    fallback_directory,
)
from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.contents import SnapshotContents
from moe_lightning.checkpoint.directory import (
    check_world,
    claim,
    headings,
    mark_damaged,
    newest_of,
    run_of,
)
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings
from moe_lightning.checkpoint.protection import ProtectionLayout
from moe_lightning.checkpoint.schedule import AdaptiveConfiguration
from moe_lightning.checkpoint.snapshot_protection import Protector
from moe_lightning.checkpoint.snapshotter import CopyWindows, SnapshotReport, Snapshotter, arena_room
from moe_lightning.checkpoint.storage import absolute, pause_s
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.errors import CheckpointError, WorldAbortedError
from moe_lightning.parallel.collectives import all_gather_json, failing_together
from moe_lightning.parallel.context import World

_LEAST_OBJECT_BYTES = 1 << 20
_OBJECT_GROWTH = 4
"""An object may grow to so many times the size that the largest one has when a session opens."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavingPlace:
    """Place of a run's checkpoints, and of this node's arenas.

    Attributes:
        root: directory of the checkpoints.
        name: of the run; names the arenas.
        node: name of the node where several may share a machine; empty: the host's name is enough.
        leave_mark: on rank 0, leaves the mark of this world in `root`, and returns its number (`directory.WorldMark`).
    """

    root: Place
    name: str
    node: str
    leave_mark: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Agreement of the ranks at the opening of a session.

    Attributes:
        root: directory of the checkpoints.
        run: of the directory.
        session: name of this session; later ones sort behind it.
        arenas: folder of this node's arenas.
        world_number: under which it saves (`directory.py`).
        agent: of this node, on the rank that keeps it; None on others.
    """

    root: Place
    run: str
    session: str
    arenas: Path
    world_number: int
    agent: AgentHandle | None


class LateCheckpoint(CheckpointError):
    """The last checkpoint of a session was not written in time; raised on every rank."""


class CheckpointSession:
    """Saves one start of a run, from `open` to `close`.

    Args:
        world: the ranks.
        contents: chooses what each snapshot holds.
        opening: what the ranks agreed on.
        snapshotter: copies.
        protector: of snapshots; None: they are not protected.
        is_broken: returns True once a rank of the world is lost: its parts may never come.

    Attributes:
        contents: as given.
        adapted: what the measured times suggested; None before.
    """

    def __init__(
        self,
        world: World,
        contents: SnapshotContents,
        opening: Opening,
        snapshotter: Snapshotter,
        protector: Protector | None,
        is_broken: Callable[[], bool],
    ) -> None:
        self._world, self.contents, self._opening = world, contents, opening
        self._snapshotter, self._protector, self._is_broken = snapshotter, protector, is_broken
        self._unprotected: int | None = None
        self.adapted: AdaptiveConfiguration | None = None
        self._has_saved = False

    @classmethod
    def open(
        cls,
        contents: SnapshotContents,
        world: World,
        place: SavingPlace,
        settings: CheckpointSettings,
        *,
        objects: Mapping[str, Any],
        ledger_bytes: int,
        layout: ProtectionLayout | None,
        is_broken: Callable[[], bool],
    ) -> CheckpointSession:
        """Reserve memory, start this node's agent, and end all sessions of older worlds; collective.

        Args:
            settings: how to save.
            objects: this rank's objects of the moment, to reserve room for those that it will save.
            ledger_bytes: room for the ledger, which rank 0 saves as well.
            layout: protection of snapshots; None: none.
            is_broken: returns True once a rank of the world is lost.

        Raises:
            ConfigurationError: memory for the arenas is missing, or the directory belongs to another run.
        """
        largest = max((len(dump_object(value)) for value in objects.values()), default=0)
        object_bytes = max(_LEAST_OBJECT_BYTES, _OBJECT_GROWTH * largest, ledger_bytes if world.rank == 0 else 0)
        num_objects = len(objects) + 1  # and the ledger
        reserved = contents.reserved()
        needed_bytes = arena_bytes(*arena_room(reserved.values(), num_objects, object_bytes))
        place = replace(place, root=absolute(place.root), node=_node_name(place, world))
        opening = _agree(world, place, settings, needed_bytes)
        on_one_node = len(world.node_peers) == world.size
        windows = CopyWindows(world, separate_link=on_one_node) if settings.windows == "scheduled" else None
        snapshotter = Snapshotter(
            arena_path(opening.arenas, world.rank),
            run=opening.run,
            session=opening.session,
            rank=world.rank,
            world_size=world.size,
            state=reserved,
            objects=num_objects,
            object_bytes=object_bytes,
            windows=windows,
            world=opening.world_number,
        )
        protector = Protector(snapshotter.arena, layout, world) if layout is not None else None
        if protector is not None:
            snapshotter.on_published = protector.prepare
        return cls(world, contents, opening, snapshotter, protector, is_broken)

    # ------------------------------------------------------------------ saving

    def save(
        self, step: int, checkpoint_ledger: CheckpointLedger | None, objects: Mapping[str, Any], *, full: bool = False
    ) -> None:
        """Begin a checkpoint of the state after `step`; tensors must stay until `wait_before_update` returns.

        Args:
            checkpoint_ledger: of the run; None for a dense model.
            objects: this rank's objects by key, readable with weights_only.
            full: save every expert, as the first checkpoint of a session does in any case.
        """
        if self._snapshotter.arena.replaced:
            self._renew()
        chosen = self.contents.begin(step, checkpoint_ledger, full=full)
        objects = dict(objects)
        if checkpoint_ledger is not None and self._world.rank == 0:
            objects["ledger"] = checkpoint_ledger.state_dict()
        self._snapshotter.start(
            step,
            chosen.pieces,
            fresh=chosen.fresh,
            persist=chosen.persist,
            objects=objects,
            groups=chosen.groups,
            extra=chosen.extra,
            until=chosen.until,
        )
        if chosen.until is None:
            self._unprotected = step
        self._has_saved = True
        if self._opening.agent is not None:
            self._opening.agent.ensure()

    def _renew(self) -> None:
        """Reserve this rank's memory anew where it was deleted; the next snapshot copies everything."""
        if self._opening.agent is not None:
            logger.warning("%s: snapshots go on in new memory", _deletion_of(self._opening.arenas))
            self._opening.agent.wait_for_end()
        self._snapshotter.renew()
        if self._protector is not None:
            self._protector.renew()

    @property
    def windows(self) -> CopyWindows | None:
        """Scheduler of the copies; None where they go on at any time."""
        return self._snapshotter.windows

    @property
    def in_window(self) -> bool:
        """True if the snapshot that was begun last is completed by `save_more`."""
        return self.contents.window is not None

    @property
    def newest_step(self) -> int | None:
        """Step of the last published snapshot; None before the first."""
        return self._snapshotter.newest_step

    def save_more(self, step: int) -> None:
        """Copy what the window holds of the state after a step; tensors must stay as after `save`."""
        chosen = self.contents.next(step)
        self._snapshotter.add(step, chosen.pieces, groups=chosen.groups)
        if not self.in_window:
            self._unprotected = step

    def reassign(self, state: TrainingState) -> IntArray | None:
        """Experts have moved: give up an open window, and go on with other writers; see `SnapshotContents.reassign`."""
        if self.in_window:
            self._snapshotter.give_up()
            self.contents.give_window_up()
        return self.contents.reassign(state)

    def protect(self) -> None:
        """Begin to protect the last snapshot, if it is published and not protected yet; collective, between two steps.

        Nothing happens where no layout was given.
        """
        if self._protector is None or self._unprotected is None:
            return
        self._snapshotter.finish()
        self._protector.start(self._unprotected)
        self._unprotected = None

    def finish_copy(self) -> None:
        """Wait for the running copy and publish it, so that a recovery may read it; local."""
        self._snapshotter.finish()

    def wait_before_update(self) -> float:
        """Wait until the live tensors may change; seconds waited."""
        return self._snapshotter.wait_before_update()

    def _has_committed(self, step: int) -> bool:
        status = self.status()
        is_ours = status.committed_session == self._opening.session
        return is_ours and status.committed_step is not None and status.committed_step >= step

    @property
    def last_report(self) -> SnapshotReport | None:
        """Times of the last snapshot that is published; None before the first."""
        return self._snapshotter.report

    def status(self) -> AgentStatus:
        """Last report of this node's agent, without an error of an earlier session; what it has committed where the
        report was deleted.
        """
        if self._opening.arenas.is_dir():
            status = read_status(self._opening.arenas)
            is_earlier = "" < status.error_session < self._opening.session
            return replace(status, error=None) if is_earlier else status
        if (found := newest_of(self._opening.root, self._opening.session)) is None:
            return AgentStatus()
        path, newest = found
        return AgentStatus(committed_step=newest.step, committed_session=newest.session, committed_path=str(path))

    def adapt(self, *, overlap_s: float, step_s: float) -> bool:
        """Choose K_snapshot, K_persist and the interval from the times of the full checkpoint, the slowest rank's.
        Collective.

        Returns:
            False: no checkpoint was begun, they are chosen already, or the first one is not committed on every node.
        """
        if self.adapted is not None or not self._has_saved:
            return False
        report, status = self._snapshotter.finish(), self.status()
        is_timed = status.persist_s > 0  # not where the agent has left
        committed = report is not None and is_timed and status.committed_session == self._opening.session
        own_bytes = [self.contents.rank_bytes(k) for k in range(self.contents.num_experts + 1)]
        times = [int(committed), report.copy_s if report else 0.0, status.persist_s, overlap_s, step_s, own_bytes]
        gathered = all_gather_json(times, self._world)
        if not all(entry[0] for entry in gathered):
            return False
        copy_s, persist_s, step_s = (max(entry[i] for entry in gathered) for i in (1, 2, 4))
        self.adapted = self.contents.adapt(
            copy_s=copy_s,
            persist_s=persist_s,
            step_s=step_s,
            overlap_s=min(entry[3] for entry in gathered),
            copied_bytes={k: max(sizes) for k, sizes in enumerate(zip(*(e[5] for e in gathered), strict=True))},
        )
        return True

    def mark_damaged(self, step: int) -> None:
        """Record that what this session has saved since a step may hold damaged memory."""
        mark_damaged(self._opening.root, self._opening.session, step)

    def close(self, *, timeout_s: float, wait: bool = True) -> AgentStatus:
        """Publish what is being copied; with `wait`, let the agent commit it and leave. One that was killed is replaced
        once.

        Raises:
            RuntimeError: the running copy failed.
            ConnectionError: it did.
            LateCheckpoint: the agent could not write in time, or has ended again; the last committed checkpoint is as
                it was.
            CheckpointError: a newer world saves here; the last one is as it was, too.
        """
        try:
            self._snapshotter.give_up()
        finally:
            if self._protector is not None:
                self._protector.close()
            self._snapshotter.close()
        if not wait:
            return self.status()
        newest, agent = self._snapshotter.newest_step, self._opening.agent
        began = time.monotonic()
        deadline, problem, is_replaced = began + timeout_s, "", False
        while newest is not None and not self._has_committed(newest):
            check_world(self._opening.root, self._opening.world_number)
            if self._is_broken():
                raise WorldAbortedError(f"a rank was lost while the checkpoint of step {newest} was written")
            status = self.status()
            gone = agent is not None and not agent.runs
            if agent is not None and gone and not is_replaced:
                agent.ensure()
                is_replaced = True
            elif time.monotonic() > deadline or gone:
                reason = status.error or ("its process has ended" if gone else "it did not answer")
                if not self._opening.arenas.is_dir():
                    reason = _deletion_of(self._opening.arenas)
                before = status.committed_step
                last = "there is no whole one" if before is None else f"the last whole one is step {before}"
                waited = f"{time.monotonic() - began:.1f} s"
                problem = f"the checkpoint of step {newest} is not written after {waited} ({reason}): {last}"
                break
            time.sleep(pause_s(self._opening.root))
        status = self.status()
        problems = all_gather_json(problem, self._world)  # every rank of the node has read the status
        if late := next(filter(None, problems), None):
            raise LateCheckpoint(str(late))
        if agent is not None:
            agent.leave(max(LEAVE_S, deadline - time.monotonic()))
            if self._opening.arenas.is_dir() and not any(self._opening.arenas.glob(ARENAS)):
                shutil.rmtree(self._opening.arenas)
        return status


def _deletion_of(arenas: Path) -> str:
    return (
        f"files of {arenas} were deleted, as systemd does when a user logs out (set RemoveIPC=no in logind.conf, or "
        "run loginctl enable-linger)"
    )


def _agree(world: World, place: SavingPlace, settings: CheckpointSettings, needed_bytes: int) -> Opening:
    """Agree on run, session, the node's arenas and the world's number; the first rank of a node starts its agent, and
    from here on no older world commits anything. Raises as `CheckpointSession.open`.
    """
    node_peers = world.node_peers
    opening = all_gather_json([needed_bytes, uuid.uuid4().hex], world)
    agent: AgentHandle | None = None
    began: tuple[int, str] | None = None
    room: str | None = None
    with failing_together(world):
        run = run_of(place.root) or str(opening[0][1])
        if world.rank == node_peers[0]:
            agent, folder = _start_agent(place, settings, run, {rank: int(opening[rank][0]) for rank in node_peers})
            room = str(folder)
        if world.rank == 0:
            number = place.leave_mark()
            began = number, later_session(place.root, number)
    answers = all_gather_json([room, began], world)
    number, session = answers[0][1]
    arenas = Path(answers[node_peers[0]][0])
    return Opening(root=place.root, run=run, session=session, arenas=arenas, world_number=int(number), agent=agent)


def _node_name(place: SavingPlace, world: World) -> str:
    """Return the name of this node in the names of arenas, which may lie beside those of other nodes in the folder of
    the checkpoints; empty where there is one node.
    """
    is_alone = len(world.node_peers) == world.size
    return place.node or ("" if is_alone else socket.gethostname())


def later_session(root: Place, number: int) -> str:
    """Return the name of a session of the world with this number, which sorts behind all that have saved here, whatever
    the clocks were.
    """
    agreed = Agreement.read(root)
    known = [heading.session for _, heading in headings(root)] + ([agreed.session] if agreed is not None else [])
    newest = max((int(session) for session in known if session.isdecimal()), default=0)
    return f"{max(time.time_ns() // 1000, 1000 * number, newest + 1):020d}"


def _start_agent(
    place: SavingPlace, settings: CheckpointSettings, run: str, sizes: Mapping[int, int]
) -> tuple[AgentHandle, Path]:
    """Start the agent of this node; returns it with the folder of its arenas."""
    root = place.root
    claim(root, run)
    named = arenas_name(place.name, run, place.node, root)
    arenas = arena_directory(named, sizes=sizes, fallback=fallback_directory(root))
    agent = AgentHandle(arenas, root, keep_last=settings.keep_last, poll_s=2 * pause_s(root))
    agent.begin()
    return agent, arenas
