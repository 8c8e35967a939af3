"""Lossless windows in moe-bench checkpoint: their steps' bytes and stalls against those of a full snapshot."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from moe_lightning.checkpoint.contents import file_group, most_frozen_pieces, window_pieces
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.schedule import plan_window
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.state.pieces import Piece, StatePiece, is_expert_key, is_replayed, parse_expert_key
from moe_lightning.text_table import table

WINDOWS = ("window_longest", "window_mean", "window_whole")
"""What is measured of the stalls of a window's steps."""

_STEPS = 4


def room_of(state: Mapping[str, torch.Tensor], *, with_windows: bool) -> dict[str, StatePiece]:
    """All that a rank's arena may hold."""
    pieces = {key: StatePiece.of(key, tensor) for key, tensor in state.items()}
    if not with_windows:
        return pieces
    experts = _experts(pieces)
    return pieces | most_frozen_pieces(pieces, experts, -(-experts // _STEPS), None)


def window_stalls(
    snapshotter: Snapshotter, state: Mapping[str, torch.Tensor], first: int, *, ranks: int
) -> list[float]:
    """Take a window of four steps; the seconds that training would wait in each.

    Args:
        state: of this rank, whose experts are numbered behind those of the ranks before it.
        first: step of its first snapshot.
    """
    written = {key: StatePiece.of(key, tensor) for key, tensor in state.items()}
    experts = _experts(written)
    layers = 1 + max(parse_expert_key(key)[0] for key in written if is_expert_key(key))
    tokens = np.tile(np.arange(experts), (layers, ranks))  # as many of every rank have each turn
    window = plan_window(first, tokens, ranks * -(-experts // _STEPS))
    stalls = []
    for step in range(first, window.last + 1):
        began = time.perf_counter()
        pieces = window_pieces(window, step, written, None)
        groups = {key: file_group(piece, window) for key, piece in pieces.items()}
        if step == first:
            extra = {"replayed_from": first}
            snapshotter.start(first, pieces, groups=groups, extra=extra, until=window.last)
        else:
            snapshotter.add(step, pieces, groups=groups)
        snapshotter.wait_before_update()
        stalls.append(time.perf_counter() - began)
        snapshotter.finish()
    return stalls


def window_table(medians: Mapping[str, float], place: Place) -> str:
    """Bytes and stalls of a window, and what a restore does beside running its steps again.

    Args:
        medians: seconds of a full "snapshot" and of `WINDOWS`.
        place: a checkpoint of a window.
    """
    checkpoint = Checkpoint(place)
    stored, steps = checkpoint.manifest.stored, range(checkpoint.first_step, checkpoint.step + 1)
    written = [sum(piece.nbytes for piece in stored if _step_of(piece) == step) for step in steps]
    full = sum(piece.nbytes for piece in stored if not is_replayed(piece.key))
    sizes = (full, max(written), sum(written) / len(written), sum(written))
    names = {
        "snapshot": "full snapshot",
        "window_longest": "longest step of a window",
        "window_mean": "mean of its steps",
        "window_whole": "all its steps",
    }
    rows = []
    for (name, label), size in zip(names.items(), sizes, strict=True):
        stall_s = medians[name]
        shares = f"{size / full:.3f}", f"{stall_s / medians['snapshot']:.3f}"
        rows.append((label, f"{size / 1e6:.1f}", shares[0], f"{1e3 * stall_s:.1f}", shares[1]))
    headers = (f"K = E/{len(written)}, weights in float32", "MB of all ranks", "of full", "stall ms", "of full")
    frozen = [piece for piece in stored if is_replayed(piece.key) or piece.version > checkpoint.first_step]
    began = time.perf_counter()
    for piece in frozen:
        checkpoint.read(piece.key)
    return (
        f"{table(headers, rows, 'lossless windows, nothing to hide under')}\n"
        f"replay: {len(written) - 1} steps of training, and {time.perf_counter() - began:.3f} s in one process to read "
        f"the {sum(piece.nbytes for piece in frozen) / 1e6:.1f} MB that they set"
    )


def _experts(pieces: Mapping[str, StatePiece]) -> int:
    """Of a layer."""
    return len({parse_expert_key(key)[1] for key in pieces if is_expert_key(key)})


def _step_of(piece: Piece) -> int:
    """After which a piece of a window was copied."""
    return int(parse_expert_key(piece.key)[2]) if is_replayed(piece.key) else piece.version
