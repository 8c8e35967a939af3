"""moe-train and moe-ckpt with a run's checkpoints in an S3 store."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from safetensors.torch import load, load_file

from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.cli.ckpt import main as moe_ckpt
from tests.commands import SMALL_MODEL, WORDS, moe_train, write_words
from tests.object_stores import BUCKET, Faults

SMALL = (
    "ranks=2", "logger=csv", *WORDS, "data.val_samples=4", *SMALL_MODEL, "trainer.val_check_interval=4",
    "callbacks=partial_experts",
    "callbacks.partial_experts_checkpoint.every_n_steps=4", "callbacks.partial_experts_checkpoint.k_persist=1",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_lives_in_a_store(faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_words(tmp_path, 2000)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/checkpoints"
    dirpath = f"callbacks.partial_experts_checkpoint.dirpath={url}"
    first = moe_train(tmp_path, *SMALL, "run_name=stored", dirpath, "trainer.max_steps=8")
    assert first.returncode == 0, first.stderr
    assert f"{url}/step-00000008" in first.stdout, "where it lies is told"
    second = moe_train(tmp_path, *SMALL, "run_name=stored", dirpath, "trainer.max_steps=12")
    assert second.returncode == 0, second.stderr
    root = place_of(url)
    assert checkpoints(root)[0][1].step == 12
    assert not list(tmp_path.glob("outputs/stored/checkpoints/*"))

    assert moe_ckpt(["verify", url]) == 0
    assert moe_ckpt(["inspect", url]) == 0
    assert "step-00000012" in capsys.readouterr().out
    assert moe_ckpt(["export", url, str(tmp_path / "x.safetensors")]) == 0
    assert moe_ckpt(["export", url, f"s3://{BUCKET}/x.safetensors"]) == 0
    copy = storage_of(root).read(place_of(f"s3://{BUCKET}/x.safetensors"))
    assert load(copy).keys() == load_file(tmp_path / "x.safetensors").keys()
    assert moe_ckpt(["prune", url, "--keep", "1"]) == 0
    assert len(checkpoints(root)) == 1
    assert moe_ckpt(["verify", "s3://nowhere/x"]) == 2
    assert moe_ckpt(["verify", "s4://x/y"]) == 2
    capsys.readouterr()


@pytest.mark.slow
def test_a_run_goes_on_from_a_store_elsewhere(faults: Faults, tmp_path: Path) -> None:
    write_words(tmp_path, 2000)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/checkpoints"
    dirpath = f"callbacks.partial_experts_checkpoint.dirpath={url}"
    first = moe_train(tmp_path, *SMALL, "run_name=stored", dirpath, "trainer.max_steps=8")
    assert first.returncode == 0, first.stderr
    elsewhere = moe_train(tmp_path, *SMALL, "run_name=other", f"resume={url}", "trainer.max_steps=14")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert checkpoints(tmp_path / "outputs/other/checkpoints")[0][1].step == 14


def test_a_store_that_is_not_there_is_one_sentence(faults: Faults, tmp_path: Path) -> None:
    write_words(tmp_path, 2000)
    wrong = "callbacks.partial_experts_checkpoint.dirpath=s3://nowhere/checkpoints"
    failed = moe_train(tmp_path, *SMALL, "ranks=1", "run_name=lost", wrong, "trainer.max_steps=4")
    assert failed.returncode == 2
    assert "there is no such bucket: make it first, or correct the URL" in failed.stderr
    assert "Traceback" not in failed.stderr
