"""A second fault in a recovery, before ranks that have joined have made a step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import pytest

from moe_lightning.compat import private_lightning
from moe_lightning.parallel.context import World
from moe_lightning.strategies import committed_step
from moe_lightning.strategies.committed_step import CommittedStep, FitProgress
from tests.distributed.harness import connect, run_ranks


class Finished(NamedTuple):
    """Effects of the end of a recovery on a rank."""

    ran_hooks: bool
    ended_epoch: dict[str, bool]


def recover_twice(rank: int, world_size: int, lost: str) -> Finished | None:
    """Rank 0 has made the last step of an epoch and some of its hooks; rank 1 joins, and is lost before the end of the
    recovery, during it, or never.
    """
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", callbacks=[pl.Callback()])
    trainer.strategy.connect(pl.LightningModule())
    batches = trainer.fit_loop.epoch_loop.batch_progress
    batches.increment_ready()
    batches.increment_processed()
    hooks: list[str] = []
    ended: dict[str, bool] = {}
    with (
        patch.object(committed_step, "loader_states", lambda _: []),
        patch.object(private_lightning.BatchEnd, "run", lambda *_: hooks.append("run")),
        patch.object(private_lightning, "end_epoch", lambda _, **options: ended.update(options)),
    ):
        step = CommittedStep(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]
        if rank == 0:
            step.progress = replace(FitProgress.of(trainer, after_step=False), epoch_is_over=True)
            step.is_first = False
            step.batch.begin(None, None)
            step.keep_batch()
        world = connect()
        step.receive(plan_of(0), world)
        if lost == "during":
            with patch.object(step.batch, "finish", side_effect=ConnectionError), suppress(ConnectionError):
                step.finish(world, lambda _: False)
        if lost != "never":
            world = World.single()
            if rank == 1:
                return None
        step.receive(plan_of(*range(world.size)), world)
        step.finish(world, lambda _: False)
    return Finished(bool(hooks), ended)


def plan_of(*live_ranks: int) -> Any:
    return SimpleNamespace(level="live", resumes_at=0, version=0, live_ranks=live_ranks)


@pytest.mark.parametrize(
    ("lost", "finished"),
    [
        ("before", [Finished(True, {"drop_logged": False}), None]),
        ("during", [Finished(False, {"drop_logged": True}), None]),  # some ranks may have acted on it
        ("never", [Finished(False, {"drop_logged": True})] * 2),
    ],
)
def test_hooks_are_left_out_where_a_rank_has_not_made_the_step(lost: str, finished: list[Finished | None]) -> None:
    assert run_ranks(2, recover_twice, lost) == finished
