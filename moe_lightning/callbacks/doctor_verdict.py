"""The doctor's findings in words for whoever must mend the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_lightning.algorithms.run_comparison import Comparison, Parting

_LABEL = 10
_MOST_LISTED = 3


def sentence(comparison: Comparison, num_ranks: int) -> str:
    """What parts first, where, by how much, and the likely cause."""
    first = comparison.partings[0]
    return f"parity fails at step {first.step}: {_what(first)} {_how(first)}: {_cause(comparison.partings, num_ranks)}"


def table(comparison: Comparison, num_ranks: int, remarks: Sequence[str] = ()) -> str:
    """The verdict, some lines."""
    notes = [("note", remark) for remark in remarks]
    if comparison.near_tie:
        notes.append(("note", f"two experts tie in {comparison.near_tie}, so nothing after it can be compared"))
    if not comparison.partings:
        steps = f"{comparison.steps} step{'s' if comparison.steps != 1 else ''}"
        same = f"{steps}, {comparison.tensors} tensors, largest difference {comparison.largest:.0e}: the same"
        return _lines([("doctor", same), *notes])
    first = comparison.partings[0]
    others = comparison.partings[1:]
    lines = [
        ("doctor", f"parity fails at step {first.step}"),
        ("first", _what(first)),
        ("values", _how(first)),
        ("cause", _cause(comparison.partings, num_ranks)),
    ]
    if others:
        listed = ", ".join(dict.fromkeys(_what(other) for other in others[:_MOST_LISTED]))
        lines.append(
            ("then", f"{listed}{f' and {len(others) - _MOST_LISTED} more' if len(others) > _MOST_LISTED else ''}")
        )
    return _lines([*lines, *notes])


def _lines(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<{_LABEL}}{text}" for label, text in lines)


def _what(parting: Parting) -> str:
    name = parting.name.partition(" [")[0]
    if parting.kind == "loss":
        return "the loss"
    if parting.kind == "inputs":
        return f"the batch ({name})"
    if parting.kind == "activation":
        return f"the output of {name}"
    if parting.kind == "counts":
        return f"the assignments of {name}"
    return f"the {'weights' if parting.kind == 'weights' else parting.kind} of {name}"


def _how(parting: Parting) -> str:
    if parting.differing is not None:
        rank, other, norm, its_norm = parting.differing
        verb = "differ" if parting.kind == "weights" else "differs"
        return f"{verb} between ranks {rank} and {other} (norms {norm:.6g} and {its_norm:.6g})"
    if parting.kind == "inputs" and parting.here == parting.there:
        return f"is the same on ranks {parting.ranks[0]} and {parting.ranks[1]}"
    tells = parting.here != 0 and not math.isnan(parting.ratio) and abs(parting.ratio - 1) > 1e-3
    ratio = f", {parting.ratio:.4g} times that" if tells else ""
    where = f" in {len(parting.samples)} of {parting.total} samples" if parting.total > 1 else ""
    verb = "are" if parting.kind in ("counts", "weights") else "is"
    return f"{verb} {parting.here:.6g} and in one process {parting.there:.6g}{ratio}{where}"


def _cause(partings: Sequence[Parting], num_ranks: int) -> str:
    first = partings[0]
    if math.isnan(first.here) and not math.isnan(first.there):
        return "a number that is none: overflow, or memory that nobody has written"
    alike = [p for p in partings if p.kind == first.kind]
    if first.kind == "weights":
        return "copies of one tensor part before the step: one of them was not sent, or not updated"
    if first.kind == "inputs":
        on = _on(first)
        return f"{first.hint or 'other samples than in one process'}; look at the sampler and the seed{on}"
    if first.kind == "counts":
        return f"{first.hint}: tokens are dropped, doubled or counted on some ranks only"
    if first.kind == "activation":
        return _of_activation(first, num_ranks)
    if first.kind == "loss":
        return "all layers are the same, so the mean over ranks, a weight, or an auxiliary loss is not"
    if first.kind == "update":
        return _of_update(first)
    if first.kind == "clipped gradient":
        return f"gradients were the same before clipping, so the norm is not that of the whole model{_all(alike)}"
    return _of_gradient(first, alike, num_ranks)


def _of_activation(first: Parting, num_ranks: int) -> str:
    if 0 < len(first.ranks) < num_ranks and len(first.samples) < first.total:
        return f"what comes in is the same, and only samples{_on(first)} part: weights, dropout or rows of that rank"
    likely = "precision, eps, weights, or a sum over ranks"
    return f"what comes in is the same, but not what the layer makes of it ({first.hint}): {likely}"


def _of_gradient(first: Parting, alike: Sequence[Parting], num_ranks: int) -> str:
    if first.differing is not None:
        return f"ranks that share a tensor do not sum its gradient{_all(alike)}"
    if not first.here:
        return f"it never arrives: detached, or not sent back{_all(alike)}"
    ratio = first.ratio
    if not math.isnan(ratio) and abs(ratio + 1) < 0.01:
        return "the sign is wrong"
    if not math.isnan(ratio) and ratio > 1.5 and abs(ratio - round(ratio)) < 0.01 * ratio:
        of = f"{round(ratio)} ranks" if round(ratio) <= num_ranks else "ranks"
        return f"a sum over {of} stands where their mean is due, or it is summed twice{_all(alike)}"
    if not math.isnan(ratio) and 0 < ratio < 0.7 and abs(1 / ratio - round(1 / ratio)) < 0.01 / ratio:
        return f"it is divided by {round(1 / ratio)} once too often{_all(alike)}"
    return f"parts of some ranks are lacking or come twice, or one term of the loss is weighed otherwise{_all(alike)}"


def _of_update(first: Parting) -> str:
    if first.differing is not None:
        return "copies of one tensor are updated otherwise"
    if not first.here:
        return "the optimizer leaves it out"
    times = "" if math.isnan(first.ratio) else f" ({first.ratio:.4g} times the step)"
    return f"its gradient is the same: learning rate, weight decay, or another setting of its group{times}"


def _on(parting: Parting) -> str:
    ranks = ", ".join(map(str, parting.ranks))
    return f" of rank{'s' if len(parting.ranks) > 1 else ''} {ranks}" if ranks else ""


def _all(alike: Sequence[Parting]) -> str:
    return f" ({len(alike)} tensors alike)" if len(alike) > 1 else ""
