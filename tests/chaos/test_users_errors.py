"""Errors of a user's own code are no faults of the network, whatever their words are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.chaos.elastic_runs import ElasticRun, elastic_run
from tests.forks import wait_until
from tests.parameters import slow


class Refused(pl.Callback):
    """On one rank, a service of the user's is out of reach."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            raise self.kind("tokenizer service at 10.0.0.7:80: connection refused")


class OwnStore(pl.Callback):
    """On one rank, a store of the user's that torch made is out of reach: nothing tells it from the world's."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            raise dist.DistNetworkError("The client socket has failed to connect")


class Unused(pl.Callback):
    """Adds a parameter that the loss does not use."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        module.unused = nn.Parameter(torch.zeros(3))


def unused(_: Path) -> list[Any]:
    return [Unused()]


def refused(_: Path) -> list[Any]:
    return [Refused(RuntimeError)]


def refused_connection(_: Path) -> list[Any]:
    return [Refused(ConnectionError)]


def own_store(_: Path) -> list[Any]:
    return [OwnStore()]


def ends(run: ElasticRun, workers: set[int]) -> None:
    """Wait until these workers have ended."""
    wait_until(lambda: run.reap(workers).keys() >= workers, run.words)


@pytest.mark.parametrize("callbacks", [refused, slow(refused_connection)])
def test_a_refused_connection_of_the_users_ends_its_rank_once(tmp_path: Path, callbacks: Any) -> None:
    with elastic_run(tmp_path, workers=2, steps=6, callbacks=callbacks) as run:
        ends(run, {0, 1})
        codes = [run.processes[worker].exitcode for worker in range(2)]
        assert set(codes) == {0, 1}, "the other one goes on alone"
        words = (tmp_path / f"error-{codes.index(1)}.txt").read_text()
        assert "tokenizer service at 10.0.0.7:80: connection refused" in words
        assert "in the step after step 3" in words
        assert len(run.recoveries(codes.index(0))) == 1


def test_data_that_differ_between_the_first_ranks_are_refused(tmp_path: Path) -> None:
    with elastic_run(tmp_path, workers=2, steps=2, samples=(24, 26)) as run:
        ends(run, {0, 1})
        assert {process.exitcode for process in run.processes.values()} == {1}
        assert "samples of RandomTokens and rank 1" in run.words()
        assert not any(path.read_text() for path in tmp_path.glob("diary-*")), "no step was made"


def test_unused_parameters_are_named_before_replicas_that_differ_by_them(tmp_path: Path) -> None:
    with elastic_run(tmp_path, workers=2, steps=6, callbacks=unused) as run:
        ends(run, {0, 1})
        assert "use ExpertParallelStrategy(find_unused_parameters=True)" in run.words()
        assert "differ between ranks" not in run.words()


@pytest.mark.slow
def test_a_step_that_fails_in_the_same_way_three_times_ends_the_run(tmp_path: Path) -> None:
    with elastic_run(tmp_path, workers=2, steps=6, callbacks=own_store) as run:
        ends(run, {0, 1})
        assert "the step after step 3 failed 3 times in the same way, and no rank was lost" in run.words()
        assert max(len(run.recoveries(worker)) for worker in range(2)) <= 4, "another rank may go on alone"
