"""Records of steps, and the first difference between a distributed run and one process.

Records hold digests: the projection of a tensor on fixed numbers that belong to its positions, and its squared norm.
Both add up over blocks, so the parts of a tensor on several ranks make the digest of the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Digest of a tensor, or of one sample's part of it.

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
        if not math.isfinite(self.norm) or not math.isfinite(other.norm):
            return not math.isfinite(self.norm) and not math.isfinite(other.norm)
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
        counted: tokens by which selection biases move, by router.
        biases: changes of selection biases, by router.
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
    counted: Mapping[str, Digest] = field(default_factory=dict)
    biases: Mapping[str, Digest] = field(default_factory=dict)
    batches_of_ranks: bool = False


TENSORS = ("weights", "gradients", "clipped", "updates", "counted", "biases")
"""Attributes of a `StepRecord` that have digests by tensor, and their names in the records of ranks."""


def merged(notes: Sequence[Mapping[str, Any]]) -> StepRecord:
    """Merge the records that all ranks wrote of a step (`doctor.recorder`)."""
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
    return StepRecord(
        **{kind: tensors_of(notes, kind) for kind in TENSORS},
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
    rank, projection, square, _, slack = held[0]
    first = Digest(projection=projection, norm=math.sqrt(square), slack=slack)
    for other, its_projection, its_square, *_ in held[1:]:
        found = Digest(projection=its_projection, norm=math.sqrt(its_square))
        if not first.is_same(found, 1e-5):
            return rank, other, first.norm, found.norm
    return None


Kind = Literal[
    "weights",
    "inputs",
    "activation",
    "counts",
    "loss",
    "gradient",
    "clipped gradient",
    "update",
    "counted tokens",
    "selection bias",
]

NOISE = 0.01
"""Share of the tolerance, of the norm over all tensors, below which a tensor is rounding errors only."""
_ROUNDING = 1e-7
_EXACT = 1e-6
"""Tolerance of whole numbers."""
_PASSED_ON = 4.0
"""Differences of gradients that count are so much larger in an update that divides by the gradient's size. In 32 bits
they are far below the tolerance anyway."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Something that is not the same.

    Attributes:
        step: from 1.
        kind, name: what.
        here, there: its size in the run and in one process.
        ratio: of the two; with its sign where that is certain; nan where they have none.
        samples: of a row, those that differ; ranks: that held them.
        total: samples in all.
        differing: see `Digest`.
        hint: what comparing alone has found out.
    """

    step: int = 0
    kind: Kind
    name: str
    here: float
    there: float
    ratio: float
    samples: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    total: int = 0
    differing: tuple[int, int, float, float] | None = None
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of all steps.

    Attributes:
        partings: of the first step that has some, in the order of its computation.
        steps, tensors: compared.
        largest: relative difference of what is the same.
        near_tie: where an assignment was decided by rounding, after which nothing can be compared.
    """

    partings: tuple[Parting, ...]
    steps: int
    tensors: int
    largest: float
    near_tie: str = ""


@dataclass
class _Seen:
    tensors: set[str] = field(default_factory=set)
    largest: float = 0.0

    def note(self, name: str, here: Digest, there: Digest, scale: float) -> None:
        self.tensors.add(name)
        if scale > 0 and math.isfinite(here.norm) and math.isfinite(there.norm):
            apart = max(abs(here.projection - there.projection), abs(here.norm - there.norm))
            self.largest = max(self.largest, apart / scale)


# ---------------------------------------------------------------------- comparing


def compare(here: Sequence[StepRecord], there: Sequence[StepRecord], tolerance: float) -> Comparison:
    """A run's steps against those of one process, in the order of the computation.

    Args:
        tolerance: relative difference of digests that orders of summation explain.
    """
    seen, steps, near_tie = _Seen(), 0, ""
    found: tuple[Parting, ...] = ()
    for number, (run, alone) in enumerate(zip(here, there, strict=True), 1):
        if layer := _near_tie(run, alone, tolerance):
            near_tie = f"{layer} of step {number}"
            break
        found = tuple(replace(parting, step=number) for parting in _partings(run, alone, tolerance, seen))
        steps = number
        if found:
            break
    tensors, largest = len(seen.tensors), seen.largest
    return Comparison(partings=found, steps=steps, tensors=tensors, largest=largest, near_tie=near_tie)


def _partings(run: StepRecord, alone: StepRecord, tolerance: float, seen: _Seen) -> Iterator[Parting]:
    for name, digest in run.weights.items():
        if digest.differing is not None:
            yield _of_tensor("weights", name, digest, alone.weights.get(name, digest))
    whole = {name: digest for name, digest in alone.weights.items() if name in run.weights}
    if all(digest.differing is None for digest in run.weights.values()):
        yield from _of_tensors("weights", run.weights, whole, tolerance, seen)
    if run.batches_of_ranks:
        yield from _of_batches(run)
    uncounted = list(alone.counts)
    for name in alone.rows:
        layer = name.partition(" [")[0]
        if layer in uncounted:
            uncounted.remove(layer)  # before what the layer makes of them
            yield from _of_counts(layer, run, alone)
        if name in run.rows:
            yield from _of_rows(name, run, alone, tolerance, seen)
    for layer in uncounted:
        yield from _of_counts(layer, run, alone)
    if run.loss is not None and alone.loss is not None:
        yield from _of_loss(run.loss, alone.loss, tolerance)
    yield from _of_tensors("gradient", run.gradients, alone.gradients, tolerance, seen)
    yield from _of_tensors("clipped gradient", run.clipped, alone.clipped, tolerance, seen)
    total = math.sqrt(sum(digest.norm**2 for digest in alone.gradients.values() if math.isfinite(digest.norm)))
    moved = {  # where a gradient is noise, an optimizer that divides by its size moves anywhere
        name: digest
        for name, digest in alone.updates.items()
        if name not in alone.gradients
        or alone.gradients[name].norm == 0
        or alone.gradients[name].norm > tolerance * total * NOISE * 10
    }
    is_low = 10 * tolerance > NOISE
    yield from _of_tensors("update", run.updates, moved, tolerance * (_PASSED_ON if is_low else 1.0), seen)
    yield from _of_tensors("counted tokens", run.counted, alone.counted, _EXACT, seen)
    yield from _of_tensors("selection bias", run.biases, alone.biases, tolerance, seen)


def _of_loss(here: float, there: float, tolerance: float) -> Iterator[Parting]:
    is_same = abs(here - there) <= tolerance * max(abs(here), abs(there), NOISE)
    if not is_same and not (math.isnan(here) and math.isnan(there)):
        ratio = here / there if there else math.nan
        yield Parting(kind="loss", name="", here=here, there=there, ratio=ratio)


def _of_batches(run: StepRecord) -> Iterator[Parting]:
    """The first batch that another rank has, too."""
    inputs = [rows for name, rows in run.rows.items() if name.startswith("input ")]
    seen: dict[tuple[Digest | None, ...], int] = {}
    for batch, rank in run.ranks.items():
        content = tuple(rows.get(batch) for rows in inputs)
        other = run.ranks[seen.setdefault(content, batch)]
        if other != rank and content and content[0] is not None:
            yield Parting(
                kind="inputs",
                name="input 0",
                here=content[0].norm,
                there=content[0].norm,
                ratio=1.0,
                samples=(batch,),
                ranks=(other, rank),
                total=len(run.ranks),
                hint="several ranks compute the same samples",
            )
            return


def _of_rows(name: str, run: StepRecord, alone: StepRecord, tolerance: float, seen: _Seen) -> Iterator[Parting]:
    ours, theirs = run.rows[name], alone.rows[name]
    floor = NOISE * tolerance * max((row.norm for row in theirs.values() if math.isfinite(row.norm)), default=0.0)
    nothing = Digest(projection=0.0, norm=0.0)
    apart = []
    for sample, there in theirs.items():
        here = ours.get(sample, nothing)
        if here.is_same(there, tolerance, floor):
            seen.note(name, here, there, max(here.norm, there.norm))
        else:
            apart.append(sample)
    is_input = name.startswith("input ")  # an output's other samples have their digests under other shapes
    extra = [sample for sample in ours if sample not in theirs] if is_input else []
    if not apart and not extra:
        return
    sample = (apart or extra)[0]
    here, there = ours.get(sample, nothing), theirs.get(sample, nothing)
    yield Parting(
        kind="inputs" if is_input else "activation",
        name=name,
        here=here.norm,
        there=there.norm,
        ratio=_ratio(here, there),
        samples=tuple(apart + extra),
        ranks=tuple(sorted({run.ranks[sample] for sample in apart + extra if sample in run.ranks})),
        total=len(theirs),
        hint=_where_from(ours, theirs, apart, tolerance) if is_input else _how_far(ours, theirs, apart),
    )


def _where_from(
    ours: Mapping[int, Digest], theirs: Mapping[int, Digest], apart: Sequence[int], tolerance: float
) -> str:
    """Name the inputs that stand in place of the expected ones."""
    for sample in apart:
        if sample not in ours:
            return f"sample {sample} of the global batch is on no rank"
        for other, digest in theirs.items():
            if other != sample and ours[sample].is_same(digest, tolerance):
                twice = "" if other in apart else ", which so comes twice"
                return f"sample {sample} of the global batch is sample {other}{twice}"
    return ""


def _how_far(ours: Mapping[int, Digest], theirs: Mapping[int, Digest], apart: Sequence[int]) -> str:
    known = [(ours[s], theirs[s]) for s in apart if s in ours and theirs[s].norm > 0]
    worst = max((abs(a.projection - b.projection) / b.norm for a, b in known), default=math.inf)
    return f"{worst:.1e} of its size"


def _of_counts(layer: str, run: StepRecord, alone: StepRecord) -> Iterator[Parting]:
    if layer not in run.counts:
        return
    for what, ours, theirs in zip(("routed", "computed"), run.counts[layer], alone.counts[layer], strict=True):
        if list(ours) == list(theirs):
            continue
        expert = next(e for e, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        yield Parting(
            kind="counts",
            name=f"{layer}, expert {expert}, {what}",
            here=float(ours[expert]),
            there=float(theirs[expert]),
            ratio=math.nan,
            hint=f"{sum(ours)} assignments in all, and {sum(theirs)} in one process",
        )


def _of_tensors(
    kind: Kind, ours: Mapping[str, Digest], theirs: Mapping[str, Digest], tolerance: float, seen: _Seen
) -> Iterator[Parting]:
    """In the order of a backward pass, from the last tensor to the first."""
    total = math.sqrt(sum(d.norm**2 for d in theirs.values() if math.isfinite(d.norm)))
    floor = NOISE * tolerance * total + (_ROUNDING * total if kind == "update" else 0.0)
    for name in reversed(list(theirs)):
        there = theirs[name]
        here = ours.get(name, Digest(projection=0.0, norm=0.0))
        if here.differing is None and here.is_same(there, tolerance, floor):
            seen.note(name, here, there, max(here.norm, there.norm, floor / tolerance) + there.slack / tolerance)
        elif name in ours or kind == "gradient":
            yield _of_tensor(kind, name, here, there)


def _of_tensor(kind: Kind, name: str, here: Digest, there: Digest) -> Parting:
    ratio = _ratio(here, there)
    return Parting(kind=kind, name=name, here=here.norm, there=there.norm, ratio=ratio, differing=here.differing)


def _ratio(here: Digest, there: Digest) -> float:
    """Ratio of the projections, if the tensors point the same or the opposite way, as far as two numbers can tell."""
    if not there.norm or math.isnan(there.norm):
        return math.nan
    by_norm = here.norm / there.norm
    if not there.projection:
        return by_norm
    by_projection = here.projection / there.projection
    return by_projection if abs(abs(by_projection) - by_norm) <= 0.01 * by_norm else math.nan


def _near_tie(run: StepRecord, alone: StepRecord, tolerance: float) -> str:
    """The first layer whose few other assignments come from logits that are the same; "" if there is none."""
    for layer in alone.counts:
        ours, theirs = run.counts.get(layer), alone.counts[layer]
        if ours is None or ours[0] == theirs[0]:
            continue
        moved = sum(abs(a - b) for a, b in zip(ours[0], theirs[0], strict=True)) / 2
        if sum(ours[0]) != sum(theirs[0]) or moved > max(1.0, 1e-4 * sum(theirs[0])):
            return ""
        router = f"{layer}.router.logits"
        names = [name for name in alone.rows if name.startswith(router) and name in run.rows]
        rows = [(run.rows[name].get(s), there) for name in names for s, there in alone.rows[name].items()]
        same = all(here is not None and here.is_same(there, tolerance) for here, there in rows)
        return layer if rows and same else ""
    return ""
