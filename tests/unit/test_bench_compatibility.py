"""The table of features by layouts: some cells run, and the page of all agrees with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.compatibility import written
from benchmarks.silent.matrix import FEATURES, LAYOUTS, cell, cell_id
from benchmarks.silent.runner import run_healthy
from tests.parameters import slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
QUICK = [("bf16-true", "tp + fsdp"), ("low-rank adapters", "fsdp"), ("tied embeddings", "pp")]


def _verdicts() -> dict[tuple[str, str], str]:
    head, _, *rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    layouts = [text.strip() for text in head.split("|")[2:-1]]
    found = {}
    for row in rows:
        feature, *verdicts = (text.strip() for text in row.split("|")[1:-1])
        found |= {(feature, layout): verdict for layout, verdict in zip(layouts, verdicts, strict=True)}
    return found


def test_the_page_has_every_cell() -> None:
    verdicts = _verdicts()
    assert list(verdicts) == [(feature, layout) for feature in FEATURES for layout in LAYOUTS]
    assert set(verdicts.values()) == {"same", "refused", "differs"}
    differing = {cell for cell, verdict in verdicts.items() if verdict == "differs"}
    assert differing == {(name, layout) for name, feature in FEATURES.items() for layout in feature.differs}


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        *QUICK,
        *(slow(feature, layout) for feature in FEATURES for layout in LAYOUTS if (feature, layout) not in QUICK),
    ],
)
def test_a_cell_is_as_the_page_says(feature: str, layout: str) -> None:
    result = run_healthy(cell(cell_id(feature, layout)))
    verdict = "refused" if result.told else "same" if result.holds else "differs"
    assert _verdicts()[feature, layout] == verdict, result.problem
    assert result.told in PAGE.read_text()


def test_a_reason_names_its_columns() -> None:
    rows = {"A": ("", "refused: not here", "refused: not here"), "B": ("differs: it may",) * 3}
    page = written({name: dict(zip(("ddp", "fsdp", "tp"), told, strict=True)) for name, told in rows.items()})
    assert "| A | same | refused | refused |\n| B | differs | differs | differs |" in page
    reasons = re.findall(r"^\* (.*)", page.split("## Reasons")[1], re.M)
    assert reasons == ["A (fsdp, tp) refused: not here", "B (everywhere) differs: it may"]
