"""Lightning's switches for debugging keep their promises with our callbacks."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from moe_lightning.callbacks.latest_checkpoint import LatestCheckpoint
from tests.commands import TINY, moe_train, write_words


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="partial checkpoints need Linux's shared memory")
def test_a_try_leaves_no_checkpoint_that_a_run_would_go_on_from(tmp_path: Path) -> None:
    write_words(tmp_path)
    saving = ("callbacks=partial_experts", "callbacks.partial_experts_checkpoint.every_n_steps=1")
    done = moe_train(tmp_path, *TINY, *saving, "ranks=1", "trainer.fast_dev_run=2")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert not list(tmp_path.glob("outputs/tiny/checkpoints/step-*"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_try_leaves_no_file_either(tmp_path: Path) -> None:
    saver = LatestCheckpoint(tmp_path, every_n_train_steps=1)
    pl.Trainer(accelerator="cpu", fast_dev_run=1, enable_progress_bar=False, callbacks=saver).fit(BoringModel())
    assert not list(tmp_path.iterdir())
