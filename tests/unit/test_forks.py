"""Forks of tests, and their own, come from one server that has imported everything."""

from __future__ import annotations

import gc
import os
import sys
from multiprocessing.connection import Connection

from tests.distributed.harness import run_ranks
from tests.forks import FORKS, PRELOADED, forked


def _look(rank: int, world_size: int) -> tuple[set[str], int, int, int]:
    """Return what this rank has, the objects in it that are not collected, its parent, and that of a fork of it."""
    ours, theirs = FORKS.Pipe()
    with forked(_tell_parent, theirs):
        return set(sys.modules), gc.get_freeze_count(), os.getppid(), ours.recv()


def _tell_parent(pipe: Connection) -> None:
    pipe.send(os.getppid())


def test_ranks_and_their_forks_have_one_parent() -> None:
    ((modules, frozen, parent, parent_of_fork),) = run_ranks(1, _look)
    assert set(PRELOADED) <= modules
    assert frozen > 100_000
    assert parent == parent_of_fork
