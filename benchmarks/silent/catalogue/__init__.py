"""The cases by their names."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.silent import matrix
from benchmarks.silent.case import Case
from benchmarks.silent.catalogue import data, export, gradients, norms, products, routing, saving, tensor
from benchmarks.silent.compositions import PREFIX, composition

CASES: dict[str, Case] = {
    case.id: replace(case, kind=case.kind or part.KIND, beyond=case.beyond or vars(part).get("BEYOND", ""))
    for part in (norms, gradients, tensor, routing, products, data, saving, export)
    for case in part.CASES
}


def case_named(id: str) -> Case:
    """Return a case of the catalogue, a composition that is drawn by its number, or a cell of the matrix."""
    if id.startswith(PREFIX):
        return composition(int(id.removeprefix(PREFIX)))
    return matrix.cell(id) if id.startswith(matrix.PREFIX) else CASES[id]
