"""The walks of the documentation lead through files that are there, and are no longer than they promise to be."""

from __future__ import annotations

import re

import pytest

from tests.documented import ROOT

PAGE = (ROOT / "docs" / "how-it-works.md").read_text()
WALKS = {title: re.findall(r"^\d+\. `([^`]+)`", body, re.MULTILINE) for title, body in re.findall(
    r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
)}  # fmt: skip


@pytest.mark.parametrize(("walk", "most"), [("A token", 9), ("A gradient", 9), ("A snapshot", 16), ("A fault", 22)])
def test_a_walk(walk: str, most: int) -> None:
    files = WALKS[walk]
    assert 0 < len(files) <= most
    assert len(set(files)) == len(files)
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_walk_is_looked_at() -> None:
    assert list(WALKS) == ["A token", "A gradient", "A snapshot", "A fault"]
