"""The cases by their names."""

from __future__ import annotations

from benchmarks.silent.case import Case
from benchmarks.silent.catalogue import data, export, gradients, norms, products, routing, saving, tensor

CASES: dict[str, Case] = {
    case.id: case for part in (norms, gradients, tensor, routing, products, data, saving, export) for case in part.CASES
}
