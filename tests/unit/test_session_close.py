"""The end of a checkpoint session whose newest snapshot is not committed."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lightning.checkpoint import session
from moe_lightning.checkpoint.agent_handle import AgentStatus
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.errors import CheckpointError


def closing(path: Path, **changes: Any) -> Any:
    snapshotter = SimpleNamespace(give_up=lambda: None, newest_step=20, close=lambda: None)
    status = changes.pop("status", AgentStatus())
    return SimpleNamespace(
        _snapshotter=snapshotter, _protector=None, _has_committed=lambda step: False, _root=path, world_number=1,
        _agent=SimpleNamespace(runs=changes.pop("runs", True)), status=lambda: status,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "timeout_s", "said"),
    [
        ({"runs": False}, 600.0, r"is not written after 0\.\d s \(its process has ended\): there is no whole one"),
        ({}, 0.2, r"is not written after 0\.[2-9] s \(it did not answer\): there is no whole one"),
        (
            {"runs": False, "status": AgentStatus(committed_step=10, error="disk full")},
            600.0,
            r"is not written after 0\.\d s \(disk full\): the last whole one is step 10",
        ),
    ],
)
def test_the_time_that_was_waited_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], timeout_s: float, said: str
) -> None:
    monkeypatch.setattr(session, "check_world", lambda *_: None)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        CheckpointSession.close(closing(tmp_path, **changes), timeout_s=timeout_s)
    assert time.monotonic() - began < 5
    assert re.search("the checkpoint of step 20 " + said, str(raised.value)), raised.value
