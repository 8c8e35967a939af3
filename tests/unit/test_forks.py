"""Forks of tests, and their own, come from one server that has imported everything."""

from __future__ import annotations

import gc
import os
import threading

from tests.distributed.harness import run_pooled


def collects(rank: int, world_size: int) -> bool:
    return gc.isenabled()


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


def test_garbage_is_collected_in_tests_and_in_forks() -> None:
    assert gc.isenabled()
    assert run_pooled(1, collects) == [True]
