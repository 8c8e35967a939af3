"""Contents of the snapshots of a rank: which pieces of its state each one copies, and which are written.

Planning only: every rank takes the same decisions from the same counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings
from moe_lightning.checkpoint.schedule import AdaptiveConfiguration, ReplayWindow, adapt, most_frozen
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.state.pieces import WEIGHTS, StatePiece, expert_of, is_expert_key, parse_expert_key, replay_key


@dataclass(frozen=True, kw_only=True)
class ChosenPieces:
    """Contents of one snapshot.

    Attributes:
        pieces: everything that this rank is responsible for in it, by key.
        groups: file group of each key.
        fresh, persist: expert keys to copy and to write, see `Snapshotter.start`; None: all.
        until: last step of a lossless window, which completes the snapshot; None: it has one step.
        extra: JSON for the manifest.
    """

    pieces: Mapping[str, StatePiece]
    groups: Mapping[str, str] = field(default_factory=dict)
    fresh: Collection[str] | None = None
    persist: Collection[str] | None = None
    until: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class SnapshotContents:
    """Chooses the contents of one snapshot after the other.

    Args:
        state: the live tensors; the optimizer must have made its states.
        settings: how to save.
        computed_in: what experts compute in, where that is less than their weights; None: it is not.
        experts_move: reserve room for all experts that may ever be in this rank's slots; else for those that it writes
            now, and a session ends where experts move.

    Attributes:
        k_snapshot, k_persist: in force now; 0 for a dense model.
        predicted_bytes: of this rank in a partial checkpoint; of all steps of a lossless window, the mean rank's.
        window: the lossless window that is open; None: none is.
        was_partial: True if the last checkpoint left out experts.
    """

    def __init__(
        self,
        state: TrainingState,
        settings: CheckpointSettings,
        *,
        computed_in: torch.dtype | None = None,
        experts_move: bool = False,
    ) -> None:
        self._state, self._settings, self._computed_in = state, settings, computed_in
        experts = state.num_experts
        self.k_snapshot = min(settings.k_snapshot, experts) if isinstance(settings.k_snapshot, int) else experts
        self.k_persist = min(settings.k_persist or self.k_snapshot, self.k_snapshot)
        # Plans stay; tensors are those bound at the moment, as modules may assign buffers, and optimizers their states.
        self._writers, self._rows = state.expert_writers(), state.dense_plan(self.k_persist)
        self._experts: Mapping[str, StatePiece] = {}
        self._addresses: Sequence[int] | None = None
        self._experts_move = experts_move
        self.predicted_bytes = self._predicted_bytes()
        self.window: ReplayWindow | None = None
        self._is_next_full, self.was_partial = True, False

    @property
    def num_experts(self) -> int:
        """E of a layer; 0 for a dense model."""
        return self._state.num_experts

    def reserved(self) -> dict[str, StatePiece]:
        """Return all pieces that a snapshot may ever have, by key."""
        experts = self._state.all_rows() if self._experts_move else self._written_experts()
        found = {**experts, **self._state.dense_of(self._rows)}
        if self._settings.lossless and self.num_experts:
            found |= most_frozen_pieces(found, self.num_experts, self.k_snapshot, self._computed_in)
        return found

    def _written_experts(self) -> Mapping[str, StatePiece]:
        """The pieces of experts that this rank writes, by key; found again only if a tensor has another address."""
        addresses = self._state.expert_addresses()
        if addresses != self._addresses:
            self._addresses, self._experts = addresses, self._state.experts_of(self._writers)
        return self._experts

    def _predicted_bytes(self) -> int:
        if self._settings.lossless and self.num_experts:
            sizes = self._state.window_bytes(self.k_snapshot, self._computed_in)
            return round(sum(sizes) / self._state.world_size)
        return self.rank_bytes(self.k_persist)

    def rank_bytes(self, k: int) -> int:
        """Bytes that this rank writes of K experts a layer."""
        return int(self._state.rank_bytes(k)[self._state.rank])

    def begin(self, step: int, checkpoint_ledger: CheckpointLedger | None, *, full: bool = False) -> ChosenPieces:
        """Choose what the snapshot after a step holds, and enter it into the ledger.

        Args:
            checkpoint_ledger: of the run; None for a dense model.
            full: every expert, as the first one of a session in any case.
        """
        whole, self._is_next_full = full or self._is_next_full, False
        pieces = {**self._written_experts(), **self._state.dense_of(self._rows)}
        if checkpoint_ledger is None:
            return ChosenPieces(pieces=pieces)
        is_window = self._settings.lossless and not whole and self.k_snapshot < self.num_experts
        self.window = window = checkpoint_ledger.window(step, self.k_snapshot) if is_window else None
        plan = checkpoint_ledger.plan(self.k_snapshot, self.k_persist, full=whole or is_window)
        checkpoint_ledger.begin(step, plan)
        self.was_partial = self.k_persist < self.num_experts and not whole
        extra: dict[str, Any] = {"plt": checkpoint_ledger.plt, "num_experts": self.num_experts}
        if window is None:
            fresh, persist = plan.fresh(pieces), plan.persisted(pieces)
            return ChosenPieces(pieces=pieces, groups=plan.groups(pieces), fresh=fresh, persist=persist, extra=extra)
        return replace(
            self._of_window(step, window, pieces), until=window.last, extra={**extra, "replayed_from": window.first}
        )

    def next(self, step: int) -> ChosenPieces:
        """Choose what the open window holds of the state after a step; its last step closes it."""
        window = self.window
        assert window is not None
        if step == window.last:
            self.window = None
        return self._of_window(step, window, self._written_experts())

    def _of_window(self, step: int, window: ReplayWindow, written: Mapping[str, StatePiece]) -> ChosenPieces:
        pieces = window_pieces(window, step, written, self._computed_in)
        return ChosenPieces(pieces=pieces, groups={key: file_group(piece, window) for key, piece in pieces.items()})

    def give_window_up(self) -> None:
        """Leave the open window incomplete: the next checkpoint holds everything."""
        self.window, self._is_next_full = None, True

    def reassign(self, state: TrainingState) -> IntArray | None:
        """Experts have moved: others may write them from now on. Who writes an expert that it did not write before
        copies it next time, and all that is dense stays where it is.

        Args:
            state: the live tensors under their new keys.

        Returns:
            int64 [L, E], the rank that writes each expert, the same on every rank; None where no room was reserved for
            others, so that a new session must be opened.
        """
        if not self._experts_move:
            return None
        writers = state.expert_writers(self._writers)
        self._state, self._writers, self._addresses = state, writers, None
        return state.owners(writers)

    def raise_k(self, k: int) -> None:
        """Write at least k experts of each layer from now on."""
        if k > self.k_persist:
            self.k_persist = min(k, self.num_experts)
            self.k_snapshot = max(self.k_snapshot, self.k_persist)
            self.predicted_bytes = self._predicted_bytes()

    def adapt(
        self, *, copy_s: float, persist_s: float, step_s: float, overlap_s: float, copied_bytes: Mapping[int, float]
    ) -> AdaptiveConfiguration:
        """Choose the interval from measured times, the same on every rank, and K_snapshot where the settings leave it
        open; the next checkpoint holds everything, because turns are counted from one that does.

        Args:
            copy_s, persist_s: time of the slowest rank to copy and to write the full checkpoint.
            step_s: of a step.
            overlap_s: of the passes under which copies hide, the shortest of all ranks.
            copied_bytes: by K from 0, what the busiest rank copies of K experts a layer.
        """
        experts, settings = self.num_experts, self._settings
        copied = written = copied_bytes
        if settings.lossless and experts:
            windows = {k: self._state.window_bytes(k, self._computed_in) for k in copied if k}
            copied, written = ({k: of(sizes) for k, sizes in windows.items()} for of in (max, sum))
        is_open = settings.k_snapshot == "auto" or (settings.lossless and settings.k_snapshot is None)
        adapted = adapt(
            snapshot_s=lambda k: copy_s * copied[k] / copied[experts],
            persist_s=lambda k: persist_s * written[k] / written[experts],
            step_s=step_s,
            overlap_s=overlap_s,
            num_experts=experts,
            failure_rate_per_s=settings.failures_per_hour / 3600.0,
            k_snapshot=None if is_open else self.k_snapshot,
            k_persist=self.k_persist,
        )
        self.k_snapshot, self.k_persist = adapted.k_snapshot, adapted.k_persist
        self.predicted_bytes = self._predicted_bytes()
        self._is_next_full = True
        return adapted


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
        elif expert is not None and frozen[expert] and parse_expert_key(key)[2] in WEIGHTS:
            kept = frozen_piece(piece, step, computed_in)
            found[kept.key] = kept
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
    return f"experts-slot{window.turns[expert]:03d}" if is_expert_key(piece.key) else "replay"


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
        if is_expert_key(key) and parse_expert_key(key)[2] in WEIGHTS:
            layer, _, _, name = parse_expert_key(key)
            by_layer.setdefault((layer, name), []).append(piece)
    for pieces in by_layer.values():
        for number in range(most_frozen(num_experts, k, min(len(pieces), num_experts))):
            piece = frozen_piece(pieces[0], number, computed_in)
            found[piece.key] = piece
    return found
