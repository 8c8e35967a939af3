"""Aborted collectives of NCCL raise nothing, they end with any numbers. Here gloo's do the same, and nothing of what
they leave is judged or made final.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from tests.chaos.elastic_runs import Kill, assert_same_losses, elastic_run, finish, reference
from tests.chaos.elastic_worker import UntilCommitted
from tests.forks import wait_until
from tests.parameters import slow

STEPS = 8
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
)


class Silent(pl.Callback):
    """Lets the collectives of its process end as aborted ones of NCCL do, from the start of training."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy

        def until_cut() -> None:
            wait_until(strategy.world.is_aborted, "nobody aborted the world of a dead rank")

        for name in COLLECTIVES:
            if hasattr(dist, name):  # some torch have others
                setattr(dist, name, _silent(getattr(dist, name), until_cut))


def _silent(collective: Any, until_cut: Any) -> Any:
    def ends_without_a_word(*args: Any, **kwargs: Any) -> Any:
        try:
            work = collective(*args, **kwargs)
        except RuntimeError:
            until_cut()
            work = None
            if collective.__name__ not in ("all_reduce", "broadcast"):  # in place: they keep what was there
                _scribble(args[0])
        return work if work is None else _SilentWork(work, until_cut)

    return ends_without_a_word


def _scribble(result: Any) -> None:
    for tensor in result if isinstance(result, list) else [result]:
        tensor.random_(0, 100)


class _SilentWork:
    def __init__(self, work: Any, until_cut: Any) -> None:
        self._work, self._until_cut = work, until_cut

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError:
            self._until_cut()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future


def silenced(folder: Path) -> list[pl.Callback]:
    return [Silent(), UntilCommitted(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "place"),
    [
        ("ddp", "prepare"),
        slow("ddp", "update"),
        slow("zero1", "exchange"),
        *(slow("ddp", place) for place in ("forward", "exchange", "backward")),
        *(slow("zero1", place) for place in ("forward", "backward", "prepare", "update")),
    ],
)
def test_nothing_that_an_aborted_collective_leaves_is_used(tmp_path: Path, dense: str, place: str) -> None:
    kills = [Kill(worker=1, step=4, place=place)]
    with elastic_run(
        tmp_path, workers=3, steps=STEPS, kills=kills, strategy={"dense": dense}, callbacks=silenced,
        saving={"every_n_steps": 1},
    ) as run:  # fmt: skip
        finish(run, [0, 2])
        assert_same_losses(run, reference(STEPS))
        report = run.result(0)["reports"][0]
        assert report["ranks_after"] == 2
        assert report["steps_lost"] == 0
