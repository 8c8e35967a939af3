"""The lock of a run directory, between processes."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_lightning.cli.run_directory import RunDirectory, locked
from moe_lightning.errors import ConfigurationError
from tests.forks import FORKS, fork, kill


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    return made


def _hold(path: Path, party: str | None, pipe: Connection) -> None:
    try:
        with locked(RunDirectory(path), party) as is_first:
            pipe.send(is_first)
            pipe.recv()
    except ConfigurationError as error:
        pipe.send(str(error))


class Other:
    """Another process that holds, or tries to hold, the lock; `said` whether it is the first, or why it may not."""

    def __init__(self, path: Path, party: str | None = None) -> None:
        self.pipe, end = FORKS.Pipe()
        self.process = fork(_hold, path, party, end)
        end.close()
        self.said = self.pipe.recv()

    def end(self) -> None:
        kill([self.process])
        self.pipe.close()


def test_a_second_command_is_told_who_holds_it(directory: RunDirectory) -> None:
    other = Other(directory.path)
    try:
        assert other.said is True
        with pytest.raises(ConfigurationError, match=f"run is in use by process {other.process.pid} on .*run_name="):
            locked(directory).__enter__()
    finally:
        other.end()
    with locked(directory) as is_first:  # whoever is killed lets go
        assert is_first


def test_a_moved_directory_takes_its_lock_along(directory: RunDirectory) -> None:
    directory.record({})
    with locked(directory):
        directory.move_aside()
        directory.create()
        with locked(directory):
            other = Other(directory.path)
            other.end()
            assert "in use" in other.said


def test_machines_of_one_run_share_it(directory: RunDirectory) -> None:
    host = Other(directory.path, "host:29400")
    others = [Other(directory.path, party) for party in ("host:29400", "host:29401", None)]
    for process in (host, *others):
        process.end()
    assert (host.said, others[0].said) == (True, False)
    assert "in use" in others[1].said
    assert "in use" in others[2].said
