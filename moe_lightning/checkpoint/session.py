"""Checkpoint session of one start of a run: snapshotter, agent, and the content of each snapshot.

Saving needs no messages: every rank takes the same decisions from the same counts. Ranks communicate when a session
opens, and when K_snapshot and the interval adapt to measured times.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.agent_handle import AgentHandle, AgentStatus, read_status
from moe_lightning.checkpoint.arena import (
    ARENAS,
    arena_bytes,
    arena_directory,
    arena_path,
    arenas_name,
    capacity_of,
    fallback_directory,
)
from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.directory import check_world, claim, enter_world, next_world, run_of
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings
from moe_lightning.checkpoint.protection import ProtectionLayout
from moe_lightning.checkpoint.schedule import AdaptiveConfiguration, ReplayWindow, adapt, most_frozen
from moe_lightning.checkpoint.snapshot_protection import ProtectionReport, Protector
from moe_lightning.checkpoint.snapshotter import CopyWindows, SnapshotReport, Snapshotter
from moe_lightning.checkpoint.storage import absolute, pause_s
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.errors import CheckpointError, ConfigurationError, WorldCutError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.state.pieces import WEIGHTS, StatePiece, describe, expert_of, parse_expert_key, replay_key


def window_pieces(
    window: ReplayWindow, step: int, written: Mapping[str, StatePiece], computed_in: torch.dtype | None
) -> dict[str, StatePiece]:
    """The pieces to copy after a step, by key.

    Args:
        written: everything that this rank writes.
        computed_in: what experts compute in, where that is less than their weights; None: it is not.
    """
    whole, frozen = window.whole_at(step), window.frozen_at(step)
    found = {}
    for key, piece in written.items():
        expert = expert_of(key)
        if whole[expert] if expert is not None else step == window.first:
            found[key] = piece
        elif expert is not None and frozen[expert]:
            layer, number, scope, name = parse_expert_key(key)
            if scope in WEIGHTS:
                found[replay_key(layer, number, step, name)] = frozen_piece(piece, step, computed_in)
    return found


def frozen_piece(piece: StatePiece, step: int, computed_in: torch.dtype | None) -> StatePiece:
    """An expert's weights of a step, as they are computed with."""
    layer, expert, _, name = parse_expert_key(piece.key)
    return replace(piece, key=replay_key(layer, expert, step, name), stored_as=computed_in)


def file_group(piece: StatePiece, window: ReplayWindow) -> str:
    """The file that a piece goes into."""
    expert = expert_of(piece.key)
    if expert is None:
        return "dense"
    return f"experts-slot{window.turns[expert]:03d}" if piece.is_expert_key else "replay"


def most_frozen_pieces(
    written: Mapping[str, StatePiece], num_experts: int, k: int, computed_in: torch.dtype | None
) -> dict[str, StatePiece]:
    """Return the largest set of frozen weights that a window may hold, under keys of its own, to reserve space.

    Args:
        written: everything that this rank may write.
        num_experts, k: E, and experts of a layer in each turn.
        computed_in: as for `window_pieces`.
    """
    found: dict[str, StatePiece] = {}
    by_layer: dict[tuple[int, str], list[StatePiece]] = {}
    for key, piece in written.items():
        if piece.is_expert_key and parse_expert_key(key)[2] in WEIGHTS:
            layer, _, _, name = parse_expert_key(key)
            by_layer.setdefault((layer, name), []).append(piece)
    for pieces in by_layer.values():
        for number in range(most_frozen(num_experts, k, min(len(pieces), num_experts))):
            piece = frozen_piece(pieces[0], number, computed_in)
            found[piece.key] = piece
    return found


_LEAST_OBJECT_BYTES = 1 << 20
_OBJECT_GROWTH = 4
"""An object may grow to so many times the size that the largest one has when a session opens."""


class CheckpointSession:
    """Saves one start of a run; opening it is collective.

    Args:
        state: the live tensors; the optimizer must have made its states.
        world: the ranks.
        root: directory of the checkpoints.
        name: of the run; names the arenas.
        settings: how to save.
        objects: this rank's objects of the moment, to reserve room for those that it will save.
        ledger_bytes: room for the ledger, which rank 0 saves as well.
        node_peers: the ranks of this rank's node, ascending; the first one keeps the agent.
        node: name of the node where several may share a machine; else empty.
        layout: protection of snapshots; None: none.
        computed_in: what experts compute in, where that is less than their weights.
        experts_move: room for all experts that may ever be in this rank's slots; else for those that it writes now.
        world_number: of this world (`directory.py`), rank 0's counts; 0: the next one that the directory has not seen.

    Attributes:
        k_snapshot, k_persist: in force now; 0 for a dense model.
        adapted: what the measured times suggested; None before.
        predicted_bytes: of this rank in a partial checkpoint; of all steps of a lossless window, the mean rank's.
        windows: what schedules the copies; None where they go on at any time.
        world_number: under which this session saves.
        has_saved: whether a checkpoint was begun.

    Raises:
        ConfigurationError: memory for the arenas is missing, or the directory belongs to another run.
    """

    def __init__(
        self,
        state: TrainingState,
        world: World,
        root: Place,
        name: str,
        settings: CheckpointSettings,
        *,
        objects: Mapping[str, Any],
        ledger_bytes: int = 0,
        node_peers: Sequence[int],
        node: str = "",
        layout: ProtectionLayout | None = None,
        computed_in: torch.dtype | None = None,
        experts_move: bool = False,
        world_number: int = 0,
    ) -> None:
        self._state, self._world, self._root, self._settings = state, world, absolute(root), settings
        experts, self._computed_in = state.num_experts, computed_in
        self.k_snapshot = min(settings.k_snapshot, experts) if isinstance(settings.k_snapshot, int) else experts
        self._window: ReplayWindow | None = None
        self.k_persist = min(settings.k_persist or self.k_snapshot, self.k_snapshot)
        self.adapted: AdaptiveConfiguration | None = None
        self._pieces: Mapping[str, StatePiece] = state.written(self.k_persist)
        self._writers = state.expert_writers()
        self._room = None if experts_move else state.load_of(self._writers)
        rows = state.all_rows() if experts_move else {}
        self._ever = {key: p for key, p in self._pieces.items() if not (rows and p.is_expert_key)} | rows
        if settings.lossless and experts:
            self._ever |= most_frozen_pieces(self._ever, experts, self.k_snapshot, computed_in)
            self.predicted_bytes = round(sum(state.window_bytes(self.k_snapshot, computed_in)) / world.size)
        else:
            self.predicted_bytes = state.rank_bytes(self.k_persist)[world.rank]
        self._is_next_full, self.has_saved = True, False
        self.was_partial = False
        self._agent: AgentHandle | None = None
        self._keeps_agent = world.rank == node_peers[0]
        largest = max((len(dump_object(value)) for value in objects.values()), default=0)
        ledger_bytes = ledger_bytes if world.rank == 0 else 0
        self._object_bytes = max(_LEAST_OBJECT_BYTES, _OBJECT_GROWTH * largest, ledger_bytes)
        self._num_objects = len(objects) + 1  # and the ledger
        self._run, self._session, self._arenas, self.world_number = self._open(name, node, node_peers, world_number)
        on_one_node = len(node_peers) == world.size
        is_scheduled = settings.windows == "scheduled"
        self.windows = CopyWindows(world, separate_link=on_one_node) if is_scheduled else None
        self._snapshotter = Snapshotter(
            arena_path(self._arenas, world.rank),
            run=self._run,
            session=self._session,
            rank=world.rank,
            world_size=world.size,
            state=self._ever,
            objects=self._num_objects,
            object_bytes=self._object_bytes,
            windows=self.windows,
            world=self.world_number,
        )
        self._protector = Protector(self._snapshotter.arena, layout, world) if layout is not None else None
        if self._protector is not None:
            self._snapshotter.on_published = self._protector.prepare
        self._unprotected: int | None = None

    def _open(self, name: str, node: str, node_peers: Sequence[int], world_number: int) -> tuple[str, str, Path, int]:
        """Agree on run, session, the node's arenas and the world's number; the first rank of a node starts its agent,
        and from here on no older world commits anything."""
        opening = all_gather_json([self._needed_bytes(), uuid.uuid4().hex], self._world)
        first = node_peers[0]
        began: tuple[int, str] | None = None
        room: str | None = None
        problem: str | None = None
        try:
            run = run_of(self._root) or str(opening[0][1])
            if self._keeps_agent:
                needed = sum(int(opening[rank][0]) for rank in node_peers)
                room = str(self._start_agent(name, node, run, needed))
            if self._world.rank == 0:
                world_number = world_number or next_world(self._root)
                enter_world(self._root, world_number)
                began = world_number, f"{max(time.time_ns() // 1000, 1000 * world_number):020d}"
        except (ConfigurationError, CheckpointError, OSError) as error:
            problem = str(error)
        answers = all_gather_json([room, problem, began], self._world)
        for _, reason, _ in answers:
            if reason is not None:
                raise ConfigurationError(reason)
        number, session = answers[0][2]
        return run, session, Path(answers[first][0]), int(number)

    def _start_agent(self, name: str, node: str, run: str, needed_bytes: int) -> Path:
        claim(self._root, run)
        fallback = fallback_directory(self._root)
        named = arenas_name(name, run, node, self._root)
        arenas = arena_directory(named, needed_bytes=needed_bytes, fallback=fallback)
        self._agent = AgentHandle(
            arenas,
            self._root,
            keep_last=self._settings.keep_last,
            poll_s=2 * pause_s(self._root),
        )
        self._agent.begin()
        return arenas

    def _needed_bytes(self) -> int:
        pieces = [describe(piece, version=0, group="") for piece in self._ever.values()]
        capacity = capacity_of([*(piece.nbytes for piece in pieces), *[self._object_bytes] * self._num_objects])
        return arena_bytes(capacity, (1 << 20) + 1024 * len(pieces))

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
        fresh: set[str] | None = None
        persist: set[str] | None = None
        groups: dict[str, str] = {}
        objects = dict(objects)
        extra = {}
        if checkpoint_ledger is not None:
            whole = full or self._is_next_full
            is_window = self._settings.lossless and not whole and self.k_snapshot < self.num_experts
            self._window = checkpoint_ledger.window(step, self.k_snapshot) if is_window else None
            plan = checkpoint_ledger.plan(self.k_snapshot, self.k_persist, full=whole or is_window)
            checkpoint_ledger.begin(step, plan)
            self.was_partial = self.k_persist < self.num_experts and not whole
            pieces = self._pieces
            fresh, persist, groups = plan.fresh(pieces), plan.persisted(pieces), plan.groups(pieces)
            if self._world.rank == 0:
                objects["ledger"] = checkpoint_ledger.dump()
            extra = {"plt": checkpoint_ledger.ledger.plt, "num_experts": self.num_experts}
        if self._window is not None:
            self._begin_window(self._window, objects, extra)
        else:
            self._snapshotter.start(
                step, self._pieces, fresh=fresh, persist=persist, objects=objects, groups=groups, extra=extra
            )
            self._unprotected = step
        self._is_next_full, self.has_saved = False, True
        if self._agent is not None:
            self._agent.ensure()

    def _begin_window(self, window: ReplayWindow, objects: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        pieces = window_pieces(window, window.first, self._pieces, self._computed_in)
        groups = {key: file_group(piece, window) for key, piece in pieces.items()}
        extra = {**extra, "replayed_from": window.first}
        self._snapshotter.start(window.first, pieces, objects=objects, groups=groups, extra=extra, until=window.last)

    @property
    def in_window(self) -> bool:
        """True if the snapshot that was begun last is completed by `save_more`."""
        return self._window is not None

    @property
    def newest_step(self) -> int | None:
        """Step of the last published snapshot; None before the first."""
        return self._snapshotter.newest_step

    def save_more(self, step: int) -> None:
        """Copy what the window holds of the state after a step; tensors must stay as after `save`."""
        window = self._window
        assert window is not None
        pieces = window_pieces(window, step, self._pieces, self._computed_in)
        self._snapshotter.add(step, pieces, groups={key: file_group(piece, window) for key, piece in pieces.items()})
        if step == window.last:
            self._window, self._unprotected = None, step

    def give_window_up(self) -> None:
        """Its experts have other writers now: it stays incomplete, and the next checkpoint holds everything."""
        self._snapshotter.give_up()
        self._window, self._is_next_full = None, True

    def reassign(self, state: TrainingState) -> IntArray | None:
        """Experts have moved: others may write them from now on, in this session. Who writes an expert that it did not
        write before copies it next time, and all that is dense stays where it is.

        Args:
            state: the live tensors under their new keys.

        Returns:
            int64 [L, E], the rank that writes each expert, the same on every rank; None where a rank lacks room for
            those that it would have to write, so that a new session must be opened.
        """
        writers = state.expert_writers(self._writers)
        if self._room is not None and not state.load_of(writers) <= self._room:
            return None
        self._state, self._writers = state, writers
        dense = {key: piece for key, piece in self._pieces.items() if not piece.is_expert_key}
        self._pieces = {**state.experts_of(writers), **dense}
        return state.owners(writers)

    def protect(self) -> None:
        """Begin to protect the last snapshot, if it is published and not protected yet; collective, between two steps.

        Nothing happens where no layout was given.
        """
        if self._protector is None or self._unprotected is None:
            return
        self._snapshotter.finish()
        self._protector.start(self._unprotected)
        self._unprotected = None

    @property
    def protection(self) -> ProtectionReport | None:
        """Report on the protection of the last snapshot; None before the first."""
        return self._protector.report if self._protector is not None else None

    def finish_copy(self) -> None:
        """Wait for the running copy and publish it, so that a recovery may read it; local."""
        self._snapshotter.finish()

    def wait_before_update(self) -> float:
        """Wait until the live tensors may change; seconds waited."""
        return self._snapshotter.wait_before_update()

    def _has_committed(self, step: int) -> bool:
        status = self.status()
        return status.committed_session == self._session and (status.committed_step or -1) >= step

    @property
    def num_experts(self) -> int:
        return self._state.num_experts

    def raise_k(self, k: int) -> None:
        """Write at least k experts of each layer from now on."""
        self.k_persist = min(max(self.k_persist, k), self.num_experts)
        self.k_snapshot = max(self.k_snapshot, self.k_persist)

    @property
    def last_report(self) -> SnapshotReport | None:
        """Times of the last snapshot that is published; None before the first."""
        return self._snapshotter.report

    def status(self) -> AgentStatus:
        """Last report of this node's agent."""
        return read_status(self._arenas)

    def adapt(self, *, overlap_s: float, step_s: float) -> bool:
        """Choose K_snapshot, K_persist and the interval from the times of the full checkpoint, the slowest rank's.
        Collective.

        Returns:
            False while the first checkpoint is not committed on every node yet.
        """
        report, status = self._snapshotter.finish(), self.status()
        committed = report is not None and status.committed_session == self._session
        experts = self._state.num_experts
        own_bytes = [self._state.rank_bytes(k)[self._world.rank] for k in range(1, experts + 1)]
        times = [int(committed), report.copy_s if report else 0.0, status.persist_s, overlap_s, step_s, own_bytes]
        gathered = all_gather_json(times, self._world)
        if not all(entry[0] for entry in gathered):
            return False
        copy_s, persist_s, step_s = (max(entry[i] for entry in gathered) for i in (1, 2, 4))
        overlap_s = min(entry[3] for entry in gathered)
        copied: dict[int, float] = {k: max(entry[5][k - 1] for entry in gathered) for k in range(1, experts + 1)}
        written, is_lossless = copied, self._settings.lossless
        if is_lossless:
            windows = {k: self._state.window_bytes(k, self._computed_in) for k in copied}
            copied, written = ({k: of(sizes) for k, sizes in windows.items()} for of in (max, sum))
        self.adapted = adapt(
            snapshot_s=lambda k: copy_s * copied[k] / copied[experts],
            persist_s=lambda k: persist_s * written[k] / written[experts],
            step_s=step_s,
            overlap_s=overlap_s,
            num_layers=self._state.num_layers,
            num_experts=experts,
            ep_size=self._world.size if experts % self._world.size == 0 else 1,
            failure_rate_per_s=self._settings.failures_per_hour / 3600.0,
            k_persist=experts if is_lossless else self._settings.k_persist or 1,
        )
        self.k_snapshot = self.adapted.k_snapshot
        self.k_persist = min(self._settings.k_persist or self.adapted.k_persist, self.k_snapshot)
        self._is_next_full = True  # other windows: turns are counted from a checkpoint of everything
        return True

    def close(
        self, *, timeout_s: float, wait: bool = True, is_broken: Callable[[], bool] = lambda: False
    ) -> AgentStatus:
        """Publish what is being copied; with `wait`, let the agent commit it and leave.

        Args:
            is_broken: whether the world broke meanwhile: the parts of lost ranks may never come.

        Raises:
            ConnectionError: it did.
            CheckpointError: the agent could not write in time, or a newer world saves here; the last committed
                checkpoint is as it was.
        """
        self._snapshotter.give_up()
        newest = self._snapshotter.newest_step
        if self._protector is not None:
            self._protector.close()
        self._snapshotter.close()
        if not wait:
            return self.status()
        began = time.monotonic()
        deadline = began + timeout_s
        while newest is not None and not self._has_committed(newest):
            check_world(self._root, self.world_number)
            if is_broken():
                raise WorldCutError(f"a rank was lost while the checkpoint of step {newest} was written")
            status = self.status()
            gone = self._agent is not None and not self._agent.runs
            if time.monotonic() > deadline or gone:
                reason = status.error or ("its process has ended" if gone else "it did not answer")
                before = status.committed_step
                last = "there is no whole one" if before is None else f"the last whole one is step {before}"
                waited = f"{time.monotonic() - began:.1f} s"
                raise CheckpointError(
                    f"the checkpoint of step {newest} is not written after {waited} ({reason}): {last}"
                )
            time.sleep(pause_s(self._root))
        status = self.status()
        all_gather_json(0, self._world)  # every rank of the node has read the status
        if self._agent is not None:
            self._agent.leave(max(1.0, deadline - time.monotonic()))
            if not any(self._arenas.glob(ARENAS)):
                shutil.rmtree(self._arenas)
        return status
