"""The harness of the other tests: ranks meet again where gloo has lost a connection, and run once."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import harness
from tests.distributed.harness import LostConnection, Rank, RankFailure, run_ranks
from tests.forks import FORKS, fork

LOST = "Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def _is_not_met(pipe: Connection, error: str) -> None:
    pipe.recv_bytes()
    try:
        raise RuntimeError(error)
    except RuntimeError:
        harness._send(pipe, (False, traceback.format_exc()))


def _ranks_with(error: str, times: int) -> Any:
    """`_start_rank`, whose first ranks do not meet the others."""
    real, left = harness._start_rank, [error] * times

    def start() -> Rank:
        if not left:
            return real()
        mine, theirs = FORKS.Pipe()
        process = fork(_is_not_met, theirs, left.pop())
        theirs.close()
        return Rank(process, mine)

    return start


def _counted(rank: int, ranks: int, folder: Path) -> int:
    """Leave a file for each time that this rank was run."""
    (folder / f"{rank}-{len(list(folder.glob(f'{rank}-*')))}").touch()
    return ranks


def test_ranks_meet_again_before_any_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_LEAVE_S", 0.1)
    monkeypatch.setattr(harness, "_start_rank", _ranks_with(LOST, 1))
    with pytest.warns(UserWarning, match="the ranks meet again, as gloo has lost a connection"):
        assert run_ranks(2, _counted, tmp_path) == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "1-0"]


@pytest.mark.filterwarnings("ignore:the ranks meet again")
def test_other_failures_and_the_third_one_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_LEAVE_S", 0.1)
    monkeypatch.setattr(harness, "_start_rank", _ranks_with("no route to host", 1))
    with pytest.raises(RankFailure, match=r"rank 0 failed:\nTraceback(.|\n)*no route to host"):
        run_ranks(2, _counted, tmp_path)
    monkeypatch.setattr(harness, "_start_rank", _ranks_with(LOST, 6))
    with pytest.raises(LostConnection):
        run_ranks(2, _counted, tmp_path)
    assert not list(tmp_path.iterdir())
