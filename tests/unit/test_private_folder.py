"""A private folder whose path is short enough for a Unix socket, wherever temporary files go."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder


def test_a_long_folder_of_temporary_files_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = tmp_path / ("long" * 30), tmp_path / "s"
    for folder in (long, short):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    longest = len(str(short)) + 60
    with PrivateFolder(longest=longest) as folder:
        assert len(str(folder.path)) <= longest
        assert folder.path.parent.parent == short
    with PrivateFolder() as anywhere:
        assert anywhere.path.parent.parent == long
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        PrivateFolder(longest=5)


def test_a_host_of_one_machine_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with RendezvousServer() as host:
        folder = host.secret_file.parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
