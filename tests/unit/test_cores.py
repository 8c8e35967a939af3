"""Cores that a process may use: by its affinity, and by the quota of its container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_lightning import cores
from moe_lightning.cores import usable_cores
from moe_lightning.elastic.launcher import rank_environment


def test_ranks_share_the_cores_that_the_scheduler_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(cores, "_QUOTAS", (), raising=False)
    assert rank_environment(0, local=2, world=2)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("800000 100000",), 8),
        (("max 100000",), 64),
        (("50000 100000",), 1),
        (("800000", "100000"), 8),
        (("-1", "100000"), 64),
        ((), 64),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    texts: tuple[str, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number, _ in enumerate(texts or (None,))]
    for file, text in zip(files, texts, strict=False):
        file.write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "_QUOTAS", ((tmp_path, tuple(file.name for file in files)),))
    assert usable_cores() == expected


def test_a_service_has_the_cores_of_the_least_quota_of_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with CPUQuota= of systemd, in a slice that has another."""
    service, own = tmp_path / "user.slice" / "run.service", tmp_path / "own"
    service.mkdir(parents=True)
    (service.parent / "cpu.max").write_text("800000 100000\n")
    (service / "cpu.max").write_text("200000 100000\n")
    own.write_text("0::/user.slice/run.service\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "_QUOTAS", ((tmp_path, ("cpu.max",)),))
    monkeypatch.setattr(cores, "_OWN_GROUPS", own)
    assert usable_cores() == 2
