"""Commits that other agents have made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_lightning.checkpoint import commit
from moe_lightning.checkpoint.storage import storage_of


def test_a_part_written_anew_after_the_commit_hides_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that gave up and began again comes with its part when the others have committed."""
    staging = storage_of(tmp_path).staging(tmp_path, "session", 8, 0)
    storage_of(tmp_path).make(staging)
    (Path(str(staging)) / commit.part_name(0)).write_text("{}")
    known = [(tmp_path / "step-00000008", SimpleNamespace(session="session", step=8))]
    monkeypatch.setattr(commit, "headings", lambda root: known)
    assert commit.try_commit(tmp_path, "session", 8, 2, has_written=True) == known[0][0]
    assert commit.try_commit(tmp_path, "former", 8, 2, has_written=True) is None
