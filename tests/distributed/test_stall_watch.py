"""A rank that the others wait for is named on all of them, with where it is; ranks that are slow together are not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from moe_lightning.strategies.watch import Standstill, awaited, stall_message
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer
from tests.forks import PATIENCE_S

LIMIT_S = 0.5


class Heard(logging.Handler):
    """What the watch prints, on this rank and the others."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.rank, self.folder = rank, folder

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        (self.folder / str(self.rank)).touch()

    @property
    def ranks(self) -> int:
        return len(list(self.folder.iterdir()))


class Loops(pl.Callback):
    """On one rank, code that does not come to its end before the watch has spoken."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            self.loop_of_the_users(trainer)

    def loop_of_the_users(self, trainer: pl.Trainer) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.heard.ranks < trainer.world_size and time.monotonic() < deadline:
            time.sleep(0.01)


class Fetches(pl.Callback):
    """All ranks take long, at the same place."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            time.sleep(4 * LIMIT_S)


def fit(rank: int, world_size: int, folder: Path, slow: Callable[[Heard], pl.Callback]) -> tuple[int, list[str]]:
    heard = Heard(rank, folder)
    logging.getLogger("moe_lightning.strategies.watch").addHandler(heard)
    trainer = make_trainer(
        rank, world_size, {"stall_warning_s": LIMIT_S, "timeout_s": PATIENCE_S}, callbacks=[slow(heard)], max_steps=6
    )
    trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12))
    names = [thread.name for thread in threading.enumerate()]
    assert "stall-watch" not in names
    return trainer.global_step, heard.lines


def together(_: Heard) -> pl.Callback:
    return Fetches()


def test_a_loop_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    for steps, lines in run_ranks(3, fit, tmp_path, Loops):
        assert steps == 6
        assert len(lines) == 1
        first, *_ = lines[0].splitlines()
        assert first.startswith("no step for ")
        assert first.endswith(" s: ranks 0, 2 wait for rank 1")
        assert "rank 1 is at" in lines[0]
        assert "in loop_of_the_users" in lines[0]


def test_ranks_that_are_slow_together_are_not_told(tmp_path: Path) -> None:
    assert run_ranks(2, fit, tmp_path, together) == [(6, [])] * 2


def at(**counts: int) -> Standstill:
    return Standstill(counts=counts, stack='  File "train.py", line 3, in fetch\n')


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        ({0: at(dense=4), 1: at(dense=4)}, []),
        ({0: at(dense=4), 1: at(dense=3), 2: at(dense=4)}, [1]),
        ({0: at(dense=4, compute=7), 1: at(dense=4, compute=6)}, [1]),
        ({0: at(a=4), 1: at(a=4), 2: at(b=1), 3: at(b=0)}, [3]),  # stages of a pipeline
    ],
)
def test_who_is_awaited(ranks: dict[int, Standstill], late: list[int]) -> None:
    assert awaited(ranks) == late
    assert (stall_message(60.0, ranks, len(ranks)) is None) == (not late)


def test_a_rank_that_says_nothing() -> None:
    assert stall_message(300.0, {0: at(dense=4), 1: at(dense=4)}, 2, has_stages=True) == (
        'no step for 300 s\nrank 0 is at\n  File "train.py", line 3, in fetch'
        '\nrank 1 is at\n  File "train.py", line 3, in fetch'
    )
    words = stall_message(300.0, {0: at(dense=4), 2: at(dense=4)}, 3)
    assert words is not None
    assert words.startswith("no step for 300 s: ranks 0, 2 may wait for rank 1, of which there is no sign")
