"""Forks of tests, and their own, come from one server that has imported everything."""

from __future__ import annotations

import gc
import os
import sys
import threading
from multiprocessing.connection import Connection

from tests.distributed.harness import run_pooled, run_ranks
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


def visited(rank: int, world_size: int, keeps_thread: bool) -> tuple[int, str | None]:
    before = os.environ.get("VISITED")
    os.environ["VISITED"] = "1"
    if keeps_thread:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid(), before


def test_pooled_ranks_are_used_again_unless_they_keep_a_thread() -> None:
    first = run_pooled(2, visited, False)
    assert sorted(run_pooled(2, visited, False)) == sorted(first)
    ((kept, _),) = run_pooled(1, visited, True)
    assert kept in dict(first)
    after = run_pooled(2, visited, False)
    assert kept not in dict(after)
    assert {variable for _, variable in (*first, *after)} == {None}
