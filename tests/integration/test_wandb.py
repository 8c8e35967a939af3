"""A run is one W&B run however often it starts, and a sweep's agent starts runs that train."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from wandb.proto import wandb_internal_pb2
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from moe_lightning.cli.train import main
from tests.agents import ForkedAgent
from tests.commands import WORDS, write_words
from tests.forks import wait_until

SWEEP = Path(__file__).parents[2] / "docs" / "sweep.yaml"
EVERY_STEP = ("trainer.val_check_interval=2", "trainer.log_every_n_steps=1")
SMALL = ("model=llama_moe_tiny", "ranks=1", *WORDS, "data.global_batch_size=4", "data.val_samples=4", *EVERY_STEP)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)


def train(folder: Path, *arguments: str) -> Path:
    """The file that W&B wrote, complete."""
    before = set(folder.glob("outputs/*/wandb/offline-run-*/*.wandb"))
    with contextlib.chdir(folder), pytest.raises(SystemExit) as exit_:
        main([*SMALL, *arguments])
    wandb.finish()
    assert exit_.value.code == 0
    (written,) = set(folder.glob("outputs/*/wandb/offline-run-*/*.wandb")) - before
    wait_until(lambda: any(record.HasField("exit") for record in records(written)))  # W&B's own process writes it
    return written


def records(path: Path) -> Iterator[Any]:
    """What an offline run wrote: after seven bytes, a LevelDB log of blocks of 32 KiB, whose chunks have a checksum, a
    length and a kind: 1 whole, 2 first, 3 middle, 4 last.
    """
    data, at, pending = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return  # it is being written
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            yield record
            pending = b""


def settings(path: Path) -> dict[str, dict[str, object]]:
    """What a run was started with, as W&B has it."""
    updates = [update for record in records(path) for update in record.config.update]
    return {update.key or "/".join(update.nested_key): json.loads(update.value_json) for update in updates}


def history(path: Path) -> dict[str, list[str]]:
    """JSON texts of every logged value by its name."""
    found: dict[str, list[str]] = {}
    for record in records(path):
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    return found


@pytest.mark.slow
def test_every_start_goes_on_in_the_same_run(tmp_path: Path) -> None:
    files = [train(tmp_path, "run_name=mine", f"trainer.max_steps={steps}") for steps in (3, 5)]
    run_id = (tmp_path / "outputs" / "mine" / "wandb_run_id").read_text().strip()
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    first, second = map(history, files)
    assert first["trainer/global_step"][0] == "0"
    for config in (
        settings(files[0]),
        yaml.safe_load(next(tmp_path.glob("outputs/mine/csv/*/hparams.yaml")).read_text()),
    ):
        assert config["ranks"] == 1
        assert config["elastic"]["settings"]["heartbeat_timeout_s"] == 0.5
        assert config["callbacks"]["telemetry"]["peak_flops_per_s"] is None
        assert config["parameters/whole"] > config["parameters/active"] > 0
    assert second["trainer/global_step"][0] == "3", "the second start carries on"
    rows = [int(step) for steps in (first, second) for step in steps["_step"]]
    assert rows == list(range(len(rows))), "W&B's own step continues, too"
    assert first["moe/layer01/expert_load/_type"] == ['"histogram"'] * 3
    assert len(json.loads(first["moe/layer01/expert_load/values"][0])) == 4, "one bin for each expert"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="partial checkpoints need Linux's shared memory")
def test_partial_checkpoints_are_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.start_agent", ForkedAgent)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    saving = ("callbacks=partial_experts", "callbacks.partial_experts_checkpoint.every_n_steps=1")
    partial = ("callbacks.partial_experts_checkpoint.k_snapshot=1", "logger.wandb.log_model=true", "run_name=saved")
    first, second = (train(tmp_path, *saving, *partial, f"trainer.max_steps={steps}") for steps in (2, 4))
    run_id = (tmp_path / "outputs" / "saved" / "wandb_run_id").read_text().strip()
    for file, step in ((first, 2), (second, 4)):
        (artifact,) = (record.artifact for record in records(file) if record.HasField("artifact"))
        assert artifact.name == f"checkpoint-{run_id}"
        assert sorted(artifact.aliases) == ["latest", f"step-{step}"]
        metadata = json.loads(artifact.metadata)
        assert metadata["step"] == step
        assert set(metadata["expert_versions"]) == {"layer00", "layer01"}
        paths = {Path(entry.path) for entry in artifact.manifest.contents}
        assert Path(f"step-{step:08d}") / "MANIFEST.json" in paths
    assert "resumed_from" not in settings(first)
    assert settings(second)["resumed_from"] == f"checkpoint-{run_id}:step-2"


@pytest.mark.slow
def test_an_agent_of_a_sweep_starts_runs_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = yaml.safe_load(SWEEP.read_text())
    assert sweep["metric"]["name"] == "val/loss"
    chosen = {
        name: {"value": space["values"][0] if "values" in space else space["min"]}
        for name, space in sweep["parameters"].items()
    }
    arguments = create_sweep_command_args({"args": chosen})
    macros = {"env": ["/usr/bin/env"], "args_no_hyphens": arguments["args_no_hyphens"]}
    command = [
        word
        for chunk in create_sweep_command(list(sweep["command"]))
        for word in (macros[chunk[2:-1]] if chunk in ("${env}", "${args_no_hyphens}") else [chunk])
    ]
    assert command[:2] == ["/usr/bin/env", "moe-train"]
    monkeypatch.setenv("WANDB_RUN_ID", "abc123xy")
    file = train(tmp_path, *command[2:], "trainer.max_steps=2")
    assert file.name == "run-abc123xy.wandb"
    assert "val/loss" in history(file)
    config = (tmp_path / "outputs" / "sweep-abc123xy" / "config.yaml").read_text()
    assert "num_experts: 4" in config
    assert "top_k: 1" in config
