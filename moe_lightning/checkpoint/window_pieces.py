"""What one rank copies at each step of a window of sparse snapshots (`algorithms/replay_window.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from moe_lightning.algorithms.replay_window import ReplayWindow, most_frozen
from moe_lightning.state.pieces import WEIGHTS, StatePiece, expert_of, parse_expert_key, replay_key


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
    """What of frozen experts' weights a window may hold at most, whichever experts come last, under keys of its own: to
    reserve room.

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
