"""Meeting on one machine: in a folder of this user's alone, found by name or by announcement, never a stranger's."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder, checked_folder, find_folder, users_folder
from moe_lightning.parallel.context import STORE_VARIABLE, World, join_local_world
from tests.distributed.harness import connect, run_ranks
from tests.programs import run_program

TIMEOUT = timedelta(seconds=60)
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(STORE_VARIABLE, raising=False)


def meet(rank: int, world_size: int, temporary: Path, named: bool) -> tuple[list[bool], list[int], float]:
    """Twice, as a process that leaves its world and makes another one."""
    dist.barrier()  # who leaves at once cuts connections that the other one still builds
    dist.destroy_process_group()
    tempfile.tempdir = str(temporary)
    folder = None
    if named:
        if rank == 0:
            folder = PrivateFolder()
            Path("folder").with_suffix(".new").write_text(str(folder.path))
            Path("folder.new").rename("folder")
        while not Path("folder").exists():
            time.sleep(0.01)
        os.environ[STORE_VARIABLE] = Path("folder").read_text()
    joined, sizes = [], []
    for _ in range(2):
        for _ in range(2):
            done = join_local_world(
                rank=rank,
                size=world_size,
                backend="gloo",
                device=torch.device("cpu"),
                timeout=TIMEOUT,
                meeting="port 1",
            )
            joined.append(done)
        world = connect()
        sizes.append(world.size)
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total, group=world.compute)
        dist.barrier()
        dist.destroy_process_group()
    return joined, sizes, float(total)


@pytest.mark.parametrize("named", [True, False])
def test_ranks_meet_in_a_private_folder(tmp_path: Path, named: bool) -> None:
    assert run_ranks(2, meet, tmp_path, named) == [([True] * 4, [2, 2], 3.0)] * 2


def test_ranks_of_several_machines_meet_elsewhere() -> None:
    assert not join_local_world(rank=0, size=2, backend="gloo", device=torch.device("cpu"), timeout=TIMEOUT)
    world = World.connect(torch.device("cpu"), TIMEOUT)
    assert (world.rank, world.size, world.compute, world.background) == (0, 1, None, None)


# ---------------------------------------------------------------------- folders


def test_a_folder_is_its_users_alone_and_goes_with_its_maker() -> None:
    with PrivateFolder() as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.path.parent.stat().st_mode & 0o777 == 0o700
        folder.announce("a run")
        assert find_folder("a run", 0.0) == folder.path
    assert list(users_folder().iterdir()) == []
    with pytest.raises(ConfigurationError, match=r"rank 0 did not appear on this machine within 0 s \(a run\)"):
        find_folder("a run", 0.0)


def test_the_announcement_of_a_killed_run_is_not_followed() -> None:
    code = "import os, sys; from moe_lightning.files import PrivateFolder as F; f = F(); "
    code += "f.announce('a run'); os.utime(f.path, (0, 0)); os.kill(os.getpid(), 9)"
    assert run_program("-c", code).returncode == -9
    assert len(list(users_folder().iterdir())) == 2
    with pytest.raises(ConfigurationError, match="rank 0 did not appear"):
        find_folder("a run", 0.0)
    with PrivateFolder() as folder:  # sweeps what was left, and leaves what is in use
        assert list(users_folder().iterdir()) == [folder.path]
        os.utime(folder.path, (0, 0))
        with PrivateFolder():
            assert folder.path.exists()


def test_two_runs_do_not_find_each_other() -> None:
    with PrivateFolder() as one, PrivateFolder() as two:
        one.announce("run 1")
        two.announce("run 2")
        assert (find_folder("run 1", 0.0), find_folder("run 2", 0.0)) == (one.path, two.path)


def test_an_announcement_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    with PrivateFolder() as folder:
        folder.announce("a run")
        (announcement,) = users_folder().glob("meeting-*")
        announcement.write_text(str(tmp_path))
        with pytest.raises(ConfigurationError, match="rank 0 did not appear"):
            find_folder("a run", 0.0)


@pytest.mark.parametrize("kind", ["open", "file", "link", "missing"])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    if kind == "open":
        path.mkdir(mode=0o755)
    elif kind == "file":
        path.touch(mode=0o600)
    elif kind == "link":
        (tmp_path / "private").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "private")
    monkeypatch.setenv(STORE_VARIABLE, str(path))
    with pytest.raises(ConfigurationError, match=rf"{path} (is not a folder that this user alone|cannot be used)"):
        join_local_world(rank=0, size=1, backend="gloo", device=torch.device("cpu"), timeout=TIMEOUT)


@as_root
def test_the_folder_of_another_user_is_refused() -> None:
    path = Path(tempfile.gettempdir()) / f"moe-lightning-{os.geteuid()}"
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(ConfigurationError, match=r"owner 65534.*set TMPDIR to a directory of your own"):
        PrivateFolder()
    with pytest.raises(ConfigurationError, match="owner 65534"):
        checked_folder(path)
