"""FaultInjection strikes where it is told to, once in a run; its faults do what they say, and end when they say."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from moe_lightning import GPTModule
from moe_lightning.callbacks import fault_injection
from moe_lightning.callbacks.fault_injection import PLACES, Absence, FaultInjection, start_timer
from moe_lightning.checkpoint.arena import Arena, arena_path, digest_of
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.errors import ConfigurationError
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, RandomTokens, make_trainer
from tests.programs import Program
from tests.unit.checkpoint_state import whole_state

STEPS = 4


def strikes(rank: int, world_size: int, folder: str, faults: dict[str, Any], runs: int = 1) -> list[tuple[int, str]]:
    """(step, place) of every kill of some trainings on one rank, noted instead of carried out."""
    struck: list[tuple[int, str]] = []
    injection: FaultInjection | None = None

    def note(_: Any) -> None:
        assert injection is not None
        place = next(
            fault.place for fault in injection.faults if (Path(folder) / fault.name).exists() and fault.name not in seen
        )
        seen.update(path.name for path in Path(folder).iterdir())
        struck.append((injection._step, place))

    seen: set[str] = set()
    fault_injection.kill = note  # type: ignore[assignment]  # in this process only
    for _ in range(runs):
        injection = FaultInjection(folder, **faults)
        trainer = make_trainer(
            rank, world_size, max_steps=STEPS, val_check_interval=2, limit_val_batches=1, callbacks=[injection]
        )
        loader = DataLoader(RandomTokens(), batch_size=12)
        trainer.fit(GPTModule(TINY), loader, loader)
    return struck


def test_every_place_is_struck_at_its_step_and_once(tmp_path: Path) -> None:
    folder = tmp_path / "faults"
    places = [place for place in PLACES if place != "recovery"]
    faults = {"kill": [f"rank=0,step=1,place={place}" for place in places]}
    [struck] = run_ranks(1, strikes, str(folder), faults, 2)
    assert struck == [(1, place) for place in ("forward", "backward", "gradients", "update", "step_end", "validation")]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_other_ranks_are_spared(tmp_path: Path) -> None:
    faults = {"kill": "rank=1,step=1"}
    assert run_ranks(2, strikes, str(tmp_path), faults) == [[], [(1, "forward")]]


def trace_without_launcher(rank: int, world_size: int, folder: str, trace: str) -> str:
    trainer = make_trainer(rank, world_size, max_steps=1, callbacks=[FaultInjection(folder, trace=trace)])
    try:
        trainer.fit(GPTModule(TINY), DataLoader(RandomTokens(), batch_size=12))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_trace_needs_workers_that_come_back(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n")
    [message] = run_ranks(1, trace_without_launcher, str(tmp_path / "faults"), str(trace))
    assert message == "a trace needs workers that are started again: use elastic.enabled=true"


def seconds_stopped(rank: int, world_size: int) -> float:
    began = time.monotonic()
    fault_injection.stop_self(0.3)
    return time.monotonic() - began


SLEEPER = ("-I", "-S", "-c", "import time; time.sleep(60)")


def test_a_stopped_process_is_continued() -> None:
    assert run_ranks(1, seconds_stopped)[0] >= 0.3


def test_what_continues_a_stopped_process_does_not_keep_its_output_open(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **options: started.append(popen(*a, **options)))
    monkeypatch.setattr(os, "kill", lambda *_: None)
    fault_injection.stop_self(60.0)
    monkeypatch.undo()
    [shell] = started
    outputs = [os.readlink(f"/proc/{shell.pid}/fd/{n}") for n in (1, 2)]
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait(30)
    assert outputs == [os.devnull] * 2


def test_space_is_taken_and_given_back(tmp_path: Path) -> None:
    taken = fault_injection.fill_disk(tmp_path, 3.0, 0.01)
    assert taken == 3_000_000
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    with pytest.raises(ConfigurationError, match="is not a folder that can be written to"):
        fault_injection.fill_disk(tmp_path / "missing", 1.0, 1.0)


def test_what_is_left_of_a_disk_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(_: int, offset: int, __: int) -> None:
        if offset >= 2 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert fault_injection.fill_disk(tmp_path, 100.0, 0.01) == 2 << 20


def test_every_piece_of_a_rank_is_damaged(tmp_path: Path) -> None:
    state = whole_state(1)
    snapshotter = Snapshotter(arena_path(tmp_path, 0), run="r", session="1", rank=0, world_size=1, state=state)
    snapshotter.start(1, state, fresh=set(state))
    snapshotter.finish()
    assert fault_injection.damage_snapshots(tmp_path, 0) == sum(tensor.numel() > 0 for tensor in state.values())
    arena = Arena(arena_path(tmp_path, 0))
    [table] = arena.tables()
    for placed in table.placed:
        whole = digest_of(arena.payload(placed)) == placed.xxh3
        assert whole == (placed.nbytes == 0)
    arena.close()
    snapshotter.close()
    with pytest.raises(ConfigurationError, match="rank 3 has no snapshots at this step"):
        fault_injection.damage_snapshots(tmp_path, 3)
    fault_injection.drop_arenas(tmp_path)
    assert not tmp_path.exists()


def test_the_dead_are_passed_over_and_the_living_killed() -> None:
    with Program(*SLEEPER) as gone, Program(*SLEEPER) as alive:
        gone.process.kill()
        gone.process.wait()
        fault_injection.kill([gone.process.pid, alive.process.pid])
        assert alive.end().returncode == -signal.SIGKILL


def test_a_node_is_lost_at_its_time_or_not_at_all() -> None:
    lost: list[float] = []
    began = time.time()
    timer = start_timer(began, [Absence(from_s=0.05, to_s=1.0)], lambda: lost.append(time.time() - began))
    timer.join(timeout=30)
    assert lost[0] >= 0.05
    later = start_timer(time.time(), [Absence(from_s=3600.0)], lambda: lost.append(-1.0))
    later.cancel()
    later.join(timeout=30)
    assert len(lost) == 1
    assert start_timer(time.time(), [Absence(from_s=0.0)], lambda: None) is None, "lost already"


def test_a_slot_waits_until_its_node_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(fault_injection.time, "sleep", waits.append)
    faults = FaultInjection(str(tmp_path))
    faults._wait_for_node([Absence(from_s=0.0, to_s=100.0)])
    assert not waits, "the run begins"
    (tmp_path / "trace").touch()
    faults._wait_for_node([Absence(from_s=500.0)])
    faults._wait_for_node([Absence(from_s=0.0, to_s=100.0)])
    assert len(waits) == 1
    assert 50 < waits[0] <= 100
