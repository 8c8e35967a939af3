"""Leftovers of a module are named once: the next module is not blamed for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_lightning.checkpoint.agent_handle import LOCK
from moe_lightning.checkpoint.arena import NAMED
from tests import leftovers


def test_snapshots_that_are_left_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "MEMORY", tmp_path)
    monkeypatch.setattr(leftovers, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(leftovers, "processes", dict)
    own, others = (tmp_path / f"{NAMED}-{name}" for name in ("own", "others"))
    for folder, root in ((own, tmp_path), (others, Path("/elsewhere"))):
        folder.mkdir()
        (folder / LOCK).write_text(json.dumps({"root": str(root)}))
    watched = leftovers.Leftovers(tmp_path)
    assert watched.wait_for_none() == [f"{own} with snapshots of {tmp_path}"]
    assert watched.wait_for_none() == []
    assert others.is_dir()
