"""The cases by their names."""

from __future__ import annotations

from benchmarks.silent.case import Case
from benchmarks.silent.catalogue import norms

CASES: dict[str, Case] = {case.id: case for part in (norms,) for case in part.CASES}
