"""What several ranks noted of a step, as one record.

Ranks note digests: of a tensor a projection on fixed numbers that belong to its places, and its squared norm. Both add
up over blocks, so parts of a tensor on several ranks make the digest of the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Of a tensor, or of one sample's part of it.

    Attributes:
        projection, norm: of its values.
        size: how many they are.
        slack: difference that rounding explains, whatever the norm.
        differing: ranks that hold other values than the first one that has them, with the norms of both.
    """

    projection: float
    norm: float
    size: int = 1
    slack: float = 0.0
    differing: tuple[int, int, float, float] | None = None

    def is_same(self, other: Digest, tolerance: float, floor: float = 0.0) -> bool:
        """Up to the tolerance, relative to the larger norm, and the floor."""
        if math.isnan(self.norm) or math.isnan(other.norm):
            return math.isnan(self.norm) and math.isnan(other.norm)
        allowed = tolerance * max(self.norm, other.norm) + floor + max(self.slack, other.slack)
        return abs(self.projection - other.projection) <= allowed and abs(self.norm - other.norm) <= allowed


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step over all ranks.

    Attributes:
        weights, gradients, clipped, updates: by tensor; experts each by itself.
        rows: by module in the order of the forward pass and by shape of a sample, then by sample.
        counts: assignments of each expert by layer, before and after drops.
        loss: as it is differentiated, over all micro-batches; None: nobody has it.
        ranks: that held each sample.
        batches_of_ranks: a sample is the whole batch of a rank.
    """

    weights: Mapping[str, Digest]
    gradients: Mapping[str, Digest]
    clipped: Mapping[str, Digest]
    updates: Mapping[str, Digest]
    rows: Mapping[str, Mapping[int, Digest]]
    counts: Mapping[str, Sequence[Sequence[int]]]
    loss: float | None
    ranks: Mapping[int, int]
    batches_of_ranks: bool = False


def merged(notes: Sequence[Mapping[str, Any]]) -> StepRecord:
    """What all ranks noted of a step, as `callbacks.doctor_recorder` writes it."""
    rows: dict[str, dict[int, list[float]]] = {}
    counts: dict[str, list[list[int]]] = {}
    counted: dict[str, int] = {}
    loss: float | None = None
    ranks: dict[int, int] = {}
    for note in notes:
        for micro in note["micros"]:
            for name, shape, digests in micro["rows"]:
                samples = rows.setdefault(f"{name} {shape}", {})
                for place, (projection, square) in zip(micro["samples"], digests, strict=True):
                    sample = samples.setdefault(place, [0.0, 0.0])
                    sample[0], sample[1] = sample[0] + projection, sample[1] + square
                    ranks.setdefault(place, note["rank"])
            for layer, *found in micro["counts"]:
                if micro["is_of_rank"] or counted.setdefault(layer, note["rank"]) == note["rank"]:
                    known = counts.setdefault(layer, [[0] * len(found[0]) for _ in found])
                    counts[layer] = [
                        [a + b for a, b in zip(*pair, strict=True)] for pair in zip(known, found, strict=True)
                    ]
            if micro["loss"] is not None:
                loss = micro["loss"] if loss is None else loss + micro["loss"]
    kinds = {kind: tensors_of(notes, kind) for kind in ("weights", "gradients", "clipped", "updates")}
    return StepRecord(
        **kinds,
        rows={
            name: {sample: Digest(projection=p, norm=math.sqrt(square)) for sample, (p, square) in found.items()}
            for name, found in rows.items()
        },
        counts=counts,
        loss=loss,
        ranks=ranks,
        batches_of_ranks=any(micro["is_of_rank"] for note in notes for micro in note["micros"]),
    )


def tensors_of(notes: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Digest]:
    """The digests of whole tensors from those of blocks; holders of a block should agree."""
    blocks: dict[str, dict[tuple[int, ...], list[tuple[int, float, float, int, float]]]] = {}
    for note in notes:
        for name, offsets, projection, square, size, slack in note[kind]:
            held = blocks.setdefault(name, {}).setdefault(tuple(offsets), [])
            held.append((note["rank"], projection, square, size, slack))
    found = {}
    for name, by_place in blocks.items():
        firsts = [held[0] for held in by_place.values()]
        differing = next(filter(None, map(_disagreement, by_place.values())), None)
        found[name] = Digest(
            projection=sum(first[1] for first in firsts),
            norm=math.sqrt(sum(first[2] for first in firsts)),
            size=sum(first[3] for first in firsts),
            slack=math.sqrt(sum(first[4] ** 2 for first in firsts)),
            differing=differing,
        )
    return found


def _disagreement(held: Sequence[tuple[int, float, float, int, float]]) -> tuple[int, int, float, float] | None:
    rank, projection, square = held[0][:3]
    for other, its_projection, its_square, *_ in held[1:]:
        norm, its_norm = math.sqrt(square), math.sqrt(its_square)
        allowed = 1e-5 * max(norm, its_norm) + held[0][4]
        if not (abs(projection - its_projection) <= allowed and abs(norm - its_norm) <= allowed):
            return rank, other, norm, its_norm
    return None
