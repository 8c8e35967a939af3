"""Snapshots of a pipeline's stages are copied while a stage waits for others (REFT's HAS)."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from benchmarks.checkpoint_bubbles import bubble_table
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.schedule import Window
from moe_lightning.checkpoint.snapshotter import CopyWindows
from tests.agents import agent_ahead
from tests.distributed.harness import run_pooled
from tests.distributed.training import train
from tests.forks import PATIENCE_S
from tests.parameters import slow

STEPS = 4
_expected = CopyWindows.expected
FOUR = {"num_layers": 4, "tie_embeddings": False}


class Copies:
    """What of each copy of this rank was begun in bubbles, and a file when it has ended."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.shares: list[float] = []
        self.bubbles_s: list[float] = []
        self._folder, self._rank = folder, rank

    def ended(self, windows: CopyWindows, num_bytes: int, copy_s: float) -> None:
        self.shares.append(windows.copied_bytes[Window.BUBBLE] / num_bytes)
        windows._bytes_per_s = 1e9
        (self._folder / f"{self._rank}-{len(self.shares)}").touch()

    def expected(self, windows: CopyWindows) -> dict[Window, float]:
        """What was measured, and bubbles that suffice however slow this machine is."""
        step = _expected(windows)
        self.bubbles_s += [step[Window.BUBBLE]] if step else []
        return step | {Window.BUBBLE: 60.0} if step else step

    def wait_for_other(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while count and not (self._folder / f"{1 - self._rank}-{count}").exists():
            assert time.monotonic() < deadline, "the other rank copies nothing while it waits"
            time.sleep(0.001)


class SlowStages(pl.Callback):
    """Every stage computes until the other, which waits for it, has copied its state."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        rank = trainer.global_rank

        def work(_module: nn.Module, _arguments: Any) -> None:
            self._copies.wait_for_other(trainer.global_step)

        pl_module.model.blocks[-rank].register_forward_pre_hook(work)


def train_twice(rank: int, world_size: int, folder: str, schedule: str) -> dict[str, Any]:
    """With and without snapshots; what of each was copied in bubbles."""
    copies = Copies(Path(folder), rank)
    saver = PartialExpertsCheckpoint(
        f"{folder}/steps", every_n_steps=1, windows="scheduled", save_on_train_end=False, keep_last=1
    )
    strategy = {"mesh": {"pp": 2}, "schedule": schedule, "micro_batches": 2}
    options = {"model": FOUR, "strategy": strategy, "steps": STEPS}
    plain = train(rank, world_size, **options)
    saving = {"callbacks": [saver, SlowStages(copies)], "trainer": {"enable_checkpointing": True}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyWindows, "copy_ended", lambda *arguments: copies.ended(*arguments))
        patch.setattr(CopyWindows, "expected", lambda windows: copies.expected(windows))
        found = train(rank, world_size, **options, **saving)
    return {"plain": plain["losses"], "losses": found["losses"], "shares": copies.shares, "bubbles_s": copies.bubbles_s}


@pytest.mark.parametrize("schedule", ["1f1b", slow("interleaved")])
def test_snapshots_are_copied_in_bubbles_that_suffice(schedule: str, tmp_path: Path) -> None:
    agent = agent_ahead(tmp_path / "steps")
    for rank in run_pooled(2, partial(train_twice, folder=str(tmp_path), schedule=schedule)):
        assert rank["losses"] == rank["plain"]
        planned = rank["shares"][1 : STEPS - 1]  # before it nothing is measured, and no step follows the last
        assert len(planned) == STEPS - 2
        assert min(planned) >= 0.9, rank
        assert min(rank["bubbles_s"]) > 0, rank
    agent.join(60.0)


class LateEmbedding(pl.Callback):
    """Trains the token embedding, which only the first stage has, from the third step on."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if "token_embedding" in name:
                parameter.requires_grad_(trainer.global_step >= 2)


def train_embedding_late(rank: int, world_size: int, folder: str) -> None:
    saver = PartialExpertsCheckpoint(folder, every_n_steps=1, k_snapshot=6, keep_last=9, save_on_train_end=False)
    strategy = {"mesh": {"pp": 2}, "micro_batches": 2, "check_state_every": 0, "timeout_s": 30}
    train(rank, world_size, model=FOUR, strategy=strategy, steps=4, callbacks=[LateEmbedding(), saver],
          trainer={"enable_checkpointing": True})  # fmt: skip


def test_a_stage_saves_the_states_of_what_it_unfreezes(tmp_path: Path) -> None:
    run_pooled(2, partial(train_embedding_late, folder=str(tmp_path / "steps")))
    saved = Checkpoint(tmp_path / "steps" / "step-00000004").shapes()
    assert "dense/model.token_embedding.weight/exp_avg" in saved


@pytest.mark.slow
def test_the_benchmark_tells_of_both_stages(tmp_path: Path) -> None:
    lines = bubble_table(1, tmp_path).splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("scheduled")] == [
        ["scheduled", "0"],
        ["scheduled", "1"],
    ]
    assert lines[-1] == "losses of all of them: the same"
