"""Trainings on streams: the loss of one rank on several, and a kill -9 whose checkpoint goes on elsewhere."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from moe_lightning.data.streams import fingerprint
from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.training import RandomTokens, StatefulStream, TokenStream, train
from tests.parameters import slow

BATCH = 12
STREAMS = {"without a state": TokenStream, "with a state": StatefulStream}


class Rows(pl.Callback):
    """Writes the samples of every step that was made, and ends this process before a step."""

    def __init__(self, folder: Path, kill_at: int | None = None) -> None:
        self._folder, self._kill_at = folder, kill_at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        line = [trainer.global_step, trainer.global_rank, [fingerprint(row) for row in batch[0]]]
        with (self._folder / f"rows-{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")


def rows_of(folder: Path) -> dict[int, list[int]]:
    """step -> samples of all ranks, by number, in the order of the batch."""
    numbers = {fingerprint(RandomTokens()[index][0]): index for index in range(96)}
    assert len(numbers) == 96
    lines = [json.loads(line) for path in folder.glob("rows-*") for line in path.read_text().splitlines()]
    found: dict[int, list[int]] = {}
    for step, _, rows in sorted(lines, key=lambda line: line[:2]):
        found.setdefault(step, []).extend(numbers[row] for row in rows)
    return found


def expected(steps: int) -> dict[int, list[int]]:
    stream = TokenStream()
    order = [index for lap in range(10) for index in stream.order(lap)]
    return {step + 1: order[step * BATCH : (step + 1) * BATCH] for step in range(steps)}


def run(rank: int, world_size: int, folder: Path, steps: int, kind: str, kill_at: int | None, **options: Any) -> Any:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = {"enable_checkpointing": True}
    callbacks = [Rows(folder, kill_at), saver]
    return train(rank, world_size, steps=steps, stream=STREAMS[kind], callbacks=callbacks, trainer=trainer, **options)


def resume(rank: int, world_size: int, folder: Path, steps: int, kind: str, path: str) -> Any:
    return run(rank, world_size, folder, steps, kind, None, ckpt_path=path)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("with a state", 2, 1),
        slow("without a state", 2, 3),
        slow("with a state", 1, 3),
        slow("without a state", 3, 2),
    ],
)
def test_a_killed_run_goes_on_elsewhere_without_a_sample_twice_or_left_out(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    killed, resumed, whole = (tmp_path / name for name in ("killed", "resumed", "whole"))
    for folder in (killed, resumed, whole):
        folder.mkdir()
    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(before, run, killed, 8, kind, 5)
    result = run_ranks(after, resume, resumed, 8, kind, str(killed / "step=4.ckpt"))[0]
    first, second = rows_of(killed), rows_of(resumed)
    assert sorted(first) == [1, 2, 3, 4, 5]
    assert sorted(second) == [5, 6, 7, 8]
    assert {step: rows for step, rows in first.items() if step <= 4} | second == expected(8)
    alone = run_ranks(1, run, whole, 8, kind, None)[0]
    np.testing.assert_allclose(result["losses"], alone["losses"][4:], atol=1e-5)


def rows_in(folder: Path) -> list[Any]:
    return [Rows(folder)]


@pytest.mark.parametrize(
    ("workers", "places"),
    [
        (2, [(1, 3, "backward")]),
        slow(4, [(1, 2, "forward"), (0, 4, "backward"), (3, 5, "prepare"), (2, 6, "backward")]),
    ],
)
def test_a_stream_goes_on_where_ranks_are_lost(
    workers: int, places: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    """The failed step has the same samples on the ranks that are left, or have come back."""
    steps = 8
    kills = [Kill(worker=worker, step=step, place=place) for worker, step, place in places]
    restart, holds = (range(workers), [Hold(step=3, ranks=workers)]) if workers > 2 else ((), [])
    options = {"kills": kills, "holds": holds, "stream": True, "callbacks": rows_in}
    with elastic_run(tmp_path, workers=workers, steps=steps, **options) as found:
        found.supervise(restart=restart)
        assert found.kills_done() == len(kills)
        assert_same_losses(found, reference(steps, stream=True))
    rows = rows_of(tmp_path)
    assert {step: sorted(numbers) for step, numbers in rows.items()} == {
        step: sorted(numbers) for step, numbers in expected(steps).items()
    }
