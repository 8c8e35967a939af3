"""A run on one machine beside another user of it: nothing listens on the network, nothing takes what a stranger writes.

Rank 0 itself lets the stranger in, as user `nobody`, once all groups are there, with everything that it could find out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import run_script
from tests.integration.test_readme import block_after
from tests.parameters import slow
from tests.programs import TESTS, run_program

STRANGER = """
import json, os, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore

folder, ports = sys.argv[1], [int(port) for port in sys.argv[2:]]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)


def write(port):
    signal.alarm(5)  # a port that is no store's answers nothing
    patience = timedelta(seconds=2)
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience).set("rank_0", "mine")


def tries(attempt, *arguments):
    child = os.fork()
    if child == 0:
        try:
            attempt(*arguments)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


attempts = {tries(write, port): f"port {port} took what a stranger wrote" for port in ports}
attempts[tries(os.listdir, folder)] = f"a stranger saw what is in {folder}"
print(json.dumps([said for child, said in attempts.items() if os.waitpid(child, 0)[1] == 0]))
"""
OBSERVER = """
import glob as _glob, json as _json, os as _os, subprocess as _subprocess, sys as _sys
import torch.distributed as _dist


def _listening():
    inodes = {_os.readlink(f)[8:-1] for f in _glob.glob("/proc/self/fd/*") if _os.path.exists(f)
              and _os.readlink(f).startswith("socket:")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
    return [fields[1].split(":") for fields in lines if fields[3] == "0A" and fields[9] in inodes]


class _Observer(L.Callback):
    def on_train_start(self, trainer, module):
        listening = [None] * trainer.world_size
        _dist.all_gather_object(listening, _listening())
        if trainer.is_global_zero:
            folders = _glob.glob(f"{_os.environ['TMPDIR']}/moe-lightning-{_os.geteuid()}")
            told = {"listening": listening, "folders": folders}
            if _os.geteuid() == 0:
                ports = [str(int(port, 16)) for addresses in listening for _, port in addresses]
                command = [_sys.executable, "stranger.py", *folders, *ports]
                done = _subprocess.run(command, capture_output=True, check=True, text=True)
                told["stranger"] = _json.loads(done.stdout)
            open("told.json", "w").write(_json.dumps(told))


_fit = L.Trainer.fit


def _observed(trainer, *arguments):
    trainer.callbacks.append(_Observer())
    trainer.fit_loop.max_epochs = 1
    _fit(trainer, *arguments)


L.Trainer.fit = _observed
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("launcher", ["popen", slow("torchrun")])
def test_the_ten_lines_leave_no_way_in(tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = block_after("example: own module")
    head, main = example.split("if __name__ ==")
    (tmp_path / "script.py").write_text(f"{head}{OBSERVER}\nif __name__ =={main}")
    (tmp_path / "stranger.py").write_text(STRANGER)
    tmp_path.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variables = {**TESTS, "TMPDIR": str(temporary)}
    if launcher == "popen":
        done = run_script(tmp_path / "script.py", variables=variables)
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        done = run_program(*torchrun, "script.py", folder=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert all(told["listening"]), "gloo listens somewhere"
    assert {address for rank in told["listening"] for address, _ in rank} <= LOOPBACK
    assert len(told["folders"]) == 1
    if os.geteuid() == 0:
        assert told["stranger"] == []
    assert list(Path(told["folders"][0]).iterdir()) == [], "the run takes its folder with it"
