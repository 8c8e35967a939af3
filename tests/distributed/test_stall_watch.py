"""A rank that the others wait for is named on all of them, with its place, as are ranks that wait for each other; ranks
that are slow together are not.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from moe_lightning.compat import private_torch
from moe_lightning.strategies.watch import Standstill, awaited, place_of, stall_message
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


class OnOneRank(pl.Callback):
    """Does on rank 0 what every rank must do."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3:
            getattr(self, self.what)(trainer)

    def stop(self, trainer: pl.Trainer) -> None:
        trainer.should_stop = True

    def save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint("one.ckpt")


def fit_until_timeout(rank: int, world_size: int, folder: Path, what: str) -> list[str]:
    heard = Heard(rank, folder)
    logging.getLogger("moe_lightning.strategies.watch").addHandler(heard)
    private_torch.set_group_timeout(dist.group.WORLD, timedelta(seconds=3))
    trainer = make_trainer(
        rank, world_size, {"stall_warning_s": LIMIT_S, "timeout_s": 3}, callbacks=[OnOneRank(what)], max_steps=6
    )
    with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout|[Cc]onnection"):
        trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12))
    return heard.lines


@pytest.mark.parametrize(
    ("what", "place"),
    [("save", 'in save: trainer.save_checkpoint("one.ckpt")'), ("stop", "> fit_loop.on_run_end >")],
)
def test_ranks_that_wait_for_each_other_are_named_with_both_places(what: str, place: str, tmp_path: Path) -> None:
    for lines in run_ranks(2, fit_until_timeout, tmp_path, what):
        message = next(line for line in lines if " and 1 wait" in line)  # a loaded machine may have others
        first, *places = message.splitlines()
        assert "s: ranks 0 and 1 wait for each other; " in first
        assert "(save_checkpoint, should_stop, " in first
        assert places[0] == "rank 0 is at"
        assert place in "\n".join(places[1:3])
        assert places[3] == "rank 1 is at"
        assert "in fit_until_timeout: trainer.fit(OwnModule(), " in places[4]
        assert "training_epoch_loop.advance" in places[5]
        assert len(places) == 6


def test_a_loop_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    for steps, lines in run_ranks(3, fit, tmp_path, Loops):
        assert steps == 6
        assert len(lines) == 1
        first, *_ = lines[0].splitlines()
        assert first.startswith("no step for ")
        assert first.endswith(" s: ranks 0 and 2 wait for rank 1")
        assert "rank 1 is at" in lines[0]
        assert "in loop_of_the_users" in lines[0]


def test_ranks_that_are_slow_together_are_not_told(tmp_path: Path) -> None:
    assert run_ranks(2, fit, tmp_path, together) == [(6, [])] * 2


def at(place: str = "train.py:3, in fetch", *, in_collective: bool = False, **counts: int) -> Standstill:
    return Standstill(counts=counts, place=f"  {place}", in_collective=in_collective)


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        ({0: at(dense=4), 1: at(dense=4)}, []),
        ({0: at(dense=4), 1: at(dense=3), 2: at(dense=4)}, [1]),
        ({0: at(dense=4, compute=7), 1: at(dense=4, compute=6)}, [1]),
        ({0: at(dense=4, compute=6), 1: at(dense=3, compute=7)}, [0, 1]),
        ({0: at(a=4), 1: at(a=4), 2: at(b=1), 3: at(b=0)}, [3]),  # stages of a pipeline
    ],
)
def test_who_is_awaited(ranks: dict[int, Standstill], late: list[int]) -> None:
    assert awaited(ranks) == late
    assert (stall_message(60.0, ranks, len(ranks)) is None) == (not late)


def test_a_rank_that_says_nothing() -> None:
    assert stall_message(300.0, {0: at(dense=4), 1: at(dense=4)}, 2, is_late=True) == (
        "no step for 300 s\nranks 0 and 1 are at\n  train.py:3, in fetch"
    )
    words = stall_message(300.0, {0: at(dense=4), 2: at(dense=4)}, 3)
    assert words is not None
    assert words.startswith("no step for 300 s: ranks 0 and 2 may wait for rank 1, of which there is no sign")


def test_ranks_in_different_collectives_of_one_group() -> None:
    ranks = {rank: at(f"train.py:{3 + rank // 2}", in_collective=True, dense=4) for rank in range(3)}
    words = stall_message(300.0, ranks, 3, is_late=True)
    assert words is not None
    first, *places = words.splitlines()
    assert "ranks 0, 1 and 2 wait for each other; " in first
    assert places == ["ranks 0 and 1 are at", "  train.py:3", "rank 2 is at", "  train.py:4"]


def test_a_place_is_the_users_line_and_what_it_calls() -> None:
    torchs, lightnings = str(dist.__file__), str(pl.__file__)
    own = traceback.FrameSummary("/home/me/train.py", 7, "training_step", line="self.log(name, x, sync_dist=True)")
    below = [
        traceback.FrameSummary(f"{Path(lightnings).parent}/core/module.py", 5, "log", line="result.log()"),
        traceback.FrameSummary(torchs, 9, "all_reduce", line="work.wait()"),
    ]
    above = traceback.FrameSummary(lightnings, 5, "fit", line="self.run()")
    line = "  /home/me/train.py:7, in training_step: self.log(name, x, sync_dist=True)"
    assert place_of([above, own, *below]) == f"{line}\n  in module.log"
    assert place_of([above, own]) == line
    assert place_of([above, *below]) == "  in __init__.fit > module.log"
