"""A private folder whose path is short enough for a Unix socket, and files that are written as a whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder, replace_text


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


def test_machines_that_write_one_file_at_once_have_drafts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hosts, rename = tmp_path / "command.yaml", ["a"], os.rename

    def late(draft: Path, target: Path) -> None:
        if len(hosts) == 1:
            hosts.append("b")
            replace_text(path, "of b")
        rename(draft, target)

    monkeypatch.setattr(os, "rename", late)
    replace_text(path, "of a")
    assert hosts == ["a", "b"]
    assert path.read_text() == "of a"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_former_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "command.yaml"
    replace_text(path, "former")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]
