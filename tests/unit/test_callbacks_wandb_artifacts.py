"""Checkpoints as artifacts: names, aliases, ages of experts, lineage, and nothing that training waits for."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lightning.callbacks.loggers import CheckpointUploads, checkpoint_metadata, resumed_artifact
from moe_lightning.checkpoint.manifest import FileRecord, Manifest
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.state.pieces import Block, Piece


class Run:
    """What uploads ask of W&B's run, which may be slow."""

    def __init__(self, *, offline: bool = False) -> None:
        self.id, self.offline = "abc123", offline
        self.may_log = threading.Event()
        self.may_log.set()
        self.config: dict[str, Any] = {}
        self.logged: list[tuple[str, list[str], dict[str, Any], list[str]]] = []
        self.used: list[str] = []
        self.references: list[str] = []
        self.digests: list[str] = []
        self.config = SimpleNamespace(told={}, update=lambda values, **_: self.config.told.update(values))

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        assert self.may_log.wait(60)
        self.references = [entry.ref for _, entry in sorted(artifact.manifest.entries.items()) if entry.ref]
        self.digests.append(artifact.digest)
        self.logged.append((artifact.name, aliases, artifact.metadata, sorted(artifact.manifest.entries)))

    def use_artifact(self, name: str) -> None:
        self.used.append(name)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def checkpoint(tmp_path: Path, step: int) -> Path:
    path = tmp_path / "run" / "checkpoints" / f"step-{step:07d}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"state {step}")
    return path


def test_an_artifact_says_which_step_it_is(tmp_path: Path) -> None:
    run = Run()
    uploads = CheckpointUploads(run)
    uploads.log(checkpoint(tmp_path, 20))
    uploads.finish()
    name, aliases, metadata, files = run.logged[0]
    assert name == "checkpoint-abc123"
    assert aliases == ["latest", "step-20"]
    assert metadata == {"step": 20}
    assert files == ["step-0000020.ckpt"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"], "no links are left"


def test_a_file_that_is_replaced_under_its_name_is_logged_again(tmp_path: Path) -> None:
    run = Run()
    uploads = CheckpointUploads(run)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    for state in ("state 9", "state 10", "state 10"):
        if not last.exists() or last.read_text() != state:
            last.write_text(state)
        uploads.log(last)
        uploads.finish()
    assert run.digests[0] != run.digests[1]
    assert [(aliases, metadata) for _, aliases, metadata, _ in run.logged] == [(["latest"], {})] * 2


def test_a_slow_upload_holds_nobody_up_and_the_newest_waits(tmp_path: Path) -> None:
    run = Run()
    run.may_log.clear()
    uploads = CheckpointUploads(run)
    for step in (1, 2, 3, 4):  # returns while the first one is stuck
        uploads.log(checkpoint(tmp_path, step))
    run.may_log.set()
    uploads.finish()
    steps = [metadata["step"] for _, _, metadata, _ in run.logged]
    assert steps[-1] == 4
    assert len(steps) <= 2, "those that waited gave way"


def test_a_pruned_checkpoint_is_a_warning(tmp_path: Path) -> None:
    run = Run()
    uploads = CheckpointUploads(run)

    def log() -> None:
        uploads.log(tmp_path / "checkpoints" / "step-0000009")
        uploads.finish()

    with pytest.warns(match=r"W&B gets no artifact of .*step-0000009"):
        log()
    assert run.logged == []


def test_a_resumed_run_uses_what_it_goes_on_from(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 20)
    assert resumed_artifact(path, 20) is None, "no W&B run wrote it"
    (tmp_path / "run" / "wandb_run_id").write_text("xyz987\n")
    assert resumed_artifact(path, 20) == "checkpoint-xyz987:step-20"
    assert resumed_artifact(path.parent, 20) == "checkpoint-xyz987:step-20"
    for offline, used in ((False, ["checkpoint-xyz987:step-20"]), (True, [])):
        run = Run(offline=offline)
        uploads = CheckpointUploads(run)
        uploads.use("checkpoint-xyz987:step-20")
        uploads.finish()
        assert run.used == used
        assert run.config.told == {"resumed_from": "checkpoint-xyz987:step-20"}


def test_an_artifact_refers_to_a_checkpoint_in_a_store(tmp_path: Path) -> None:
    root = place_of(f"memory://{tmp_path.name}")
    place = root / "step-00000010-w1-s"
    record = FileRecord(path="../step-00000008-w1-s/a.distcp", nbytes=1, xxh3="0" * 16)
    manifest = Manifest(
        run="r", session="s", step=10, world_size=1, files={"a.distcp": record}, sequence=3, created_s=0.0,
        previous=None, stored=(), extra={},
    )  # fmt: skip
    storage_of(place).put(place / "MANIFEST.json", manifest.dump())
    run = Run()
    uploads = CheckpointUploads(run)
    uploads.log(place)
    uploads.finish()
    ((_, aliases, _, files),) = run.logged
    assert aliases == ["latest", "step-10"]
    assert files == ["step-00000008-w1-s/a.distcp", "step-00000010-w1-s/MANIFEST.json"]
    assert run.references == [f"{root}/{name}" for name in files]


def test_ages_of_partial_experts() -> None:
    def piece(key: str, version: int) -> Piece:
        block = Block(offsets=(0,), sizes=(2,), whole=(2,))
        return Piece(key=key, version=version, dtype="float32", block=block, group="g", nbytes=8)

    manifest = Manifest(
        run="r", session="s", step=10, world_size=2, files={}, sequence=3, created_s=0.0, previous=None,
        stored=(
            piece("expert/0/0/weight/w", 10), piece("expert/0/0/exp_avg/w", 8), piece("expert/0/1/weight/w", 4),
            piece("expert/1/0/weight/w", 10), piece("expert/1/1/weight/w", 6), piece("dense/a", 10),
        ),
        extra={"plt": 0.25},
    )  # fmt: skip
    told = checkpoint_metadata(manifest)
    assert told["expert_versions"] == {"layer00": [8, 4], "layer01": [10, 6]}
    assert told["oldest_expert_steps"] == 6
    assert told["mean_expert_steps"] == 3.0
    assert told["plt"] == 0.25
