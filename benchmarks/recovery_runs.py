"""Trainings of moe-bench recovery: started by a launcher, watched through their diaries, and killed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recovery_worker import STOP, Task
from moe_lightning.checkpoint.memory import RecoverySources
from moe_lightning.cli.short_training import MODULE, rank_failures_as_user_errors
from moe_lightning.elastic.launcher import ElasticLauncher, LocalLauncher
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import replace_text
from moe_lightning.strategies.recovery import PHASES

SETTINGS = ElasticSettings(heartbeat_timeout_s=0.5, join_window_s=0.2)
KILL_PHASES = ("detection", *PHASES, "repeated step")
"""From a kill to the next finished step."""
SETTLED_STEPS = 5
"""Steps of a full world before the next kill."""

_POLL_S = 0.005
_WAIT_S = 240.0  # a process may take a minute to import its libraries where many do
_AHEAD = 30  # steps between telling the ranks where to stop and that step


class DiaryReader:
    """Reads the diaries of a run as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.entries: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All lines so far, in the order of time."""
        fresh = []
        for path in self._folder.glob("diary-*.jsonl"):
            with path.open() as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            pid = int(path.stem.rpartition("-")[2])
            fresh += [{**json.loads(line), "pid": pid} for line in whole.splitlines()]
        if fresh:
            self.entries = sorted(self.entries + fresh, key=lambda entry: float(entry["time_s"]))
        return self.entries

    def wait(self, found: Callable[[list[dict[str, Any]]], Any], what: str, timeout_s: float = _WAIT_S) -> Any:
        """What `found` makes of the lines, once that is something.

        Raises:
            ConfigurationError: it takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if result := found(self.read()):
                return result
            time.sleep(_POLL_S)
        raise ConfigurationError(f"{what} did not come within {timeout_s:g} s: the machine may be too busy")

    def settled(
        self, *, after_s: float, ranks: int, steps: int = SETTLED_STEPS, but: Collection[int] = ()
    ) -> dict[int, list[dict[str, Any]]]:
        """Waits until every rank of a world of that size has finished some steps after a moment; those, by process.

        Args:
            but: processes that do not count.
        """

        def done(entries: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
            mine: dict[int, list[dict[str, Any]]] = {}
            for entry in entries:
                here = entry["kind"] == "step" and entry["time_s"] > after_s and entry["ranks"] == ranks
                if here and entry["pid"] not in but:
                    mine.setdefault(entry["pid"], []).append(entry)
            mine = {pid: found for pid, found in mine.items() if len(found) >= steps}
            return mine if len(mine) >= ranks else {}

        settled: dict[int, list[dict[str, Any]]] = self.wait(done, f"{steps} steps of {ranks} ranks")
        return settled

    def stop(self) -> None:
        """Let the ranks end, all at one step."""
        last = max((entry["step"] for entry in self.read() if entry["kind"] == "step"), default=0)
        replace_text(self._folder / STOP, str(last + _AHEAD))


@dataclass(kw_only=True)
class _Director:
    """A thread that acts on a run while the main thread launches it."""

    act: Callable[[DiaryReader], None]
    watch: DiaryReader
    error: BaseException | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="bench-director")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.act(self.watch)
        except BaseException as error:
            self.error = error
        finally:
            self.watch.stop()

    def join(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def run_elastic(task: Task, act: Callable[[DiaryReader], None] | None = None, *, etcd: str | None = None) -> None:
    """Train on workers that are started again when they die, while `act` watches and kills them; without it, to the
    task's end.

    Args:
        etcd: endpoints of the cluster in which the launcher is elected; None: it hosts the rendezvous by itself.

    Raises:
        ConfigurationError: the training failed by itself.
    """
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ElasticLauncher(
        num_ranks=task.ranks,
        log_dir=folder / "ranks",
        settings=SETTINGS if etcd is None else replace(SETTINGS, membership="etcd"),
        rdzv_endpoint=etcd,
        rdzv_id=None if etcd is None else folder.name,
        module=MODULE,
        max_restarts=1000,
        cool_down_s=0.0,
        grace_s=5.0,
    )
    director = _Director(act=act, watch=DiaryReader(folder)) if act is not None else None
    with _without_snapshots_after(task):
        with rank_failures_as_user_errors(), quiet_errors(folder / "launcher.err"):
            launcher.run(task.job())
        if director is not None:
            director.join()


def run_plain(task: Task) -> None:
    """Train on workers that end together.

    Raises:
        RanksFailed: a rank failed, or was killed.
    """
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    launcher = LocalLauncher(num_ranks=task.ranks, log_dir=folder / "ranks", module=MODULE, grace_s=5.0)
    with quiet_errors(folder / "launcher.err"), _without_snapshots_after(task):
        launcher.run(task.job())


def run_torchrun(task: Task, act: Callable[[DiaryReader], None]) -> None:
    """Train under torchrun with restarts, while `act` watches and kills workers.

    Raises:
        ConfigurationError: torchrun gave up.
    """
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(task.ranks)]
    command += ["--max-restarts", "1000", "-m", MODULE, *task.job()]
    # torchrun's restarts with gloo meet the keys of the attempt before in a store that it shares
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "torchrun.err").open("w") as err:
        process = subprocess.Popen(command, env=environment, stdout=err, stderr=err, start_new_session=True)
        director = _Director(act=act, watch=DiaryReader(folder))
        try:
            director.join()
            code = process.wait(timeout=_WAIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it ends its workers
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=40)
                process.kill()
                process.wait()
    if code:
        tail = (folder / "torchrun.err").read_text().splitlines()[-5:]
        raise ConfigurationError(f"torchrun ended with code {code}: {' '.join(tail)}")


@contextlib.contextmanager
def quiet_errors(path: Path) -> Iterator[None]:
    """Launchers speak of every death on purpose: into a file."""
    with path.open("a") as file, contextlib.redirect_stderr(file):
        yield


def arenas_of(task: Task) -> list[Path]:
    """The folders of snapshots of a run, whose ranks are nodes where it is elastic."""
    found = []
    for node in ("", *(f"local-{slot}" for slot in range(task.ranks))):
        sources = RecoverySources(
            root=task.checkpoints.absolute(),
            name=Path(task.folder).absolute().name,
            node=node,
            fallback=task.checkpoints.absolute(),
            report=print,
        )
        if (path := sources.arenas) is not None:
            found.append(path)
    return found


def drop_snapshots(task: Task) -> None:
    """Delete all snapshots in memory."""
    for path in arenas_of(task):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _without_snapshots_after(task: Task) -> Iterator[None]:
    """Leave nothing of a run in memory."""
    try:
        yield
    finally:
        drop_snapshots(task)


# --- kills ----------------------------------------------------------------------------------------------------------


def kills_in_process(
    ranks: int, left: int, rounds: int, seed: int
) -> tuple[Callable[[DiaryReader], None], list[dict[str, float]]]:
    """Kills one rank after the other at random moments; seconds of every phase until the survivors, `left` of whom
    train, have finished the next step.
    """
    rows: list[dict[str, float]] = []
    rng = random.Random(seed)

    def act(watch: DiaryReader) -> None:
        after_s = 0.0
        for index in range(rounds):
            before = watch.settled(after_s=after_s, ranks=ranks)
            victim = sorted(before)[index % ranks] if index else min(before)
            killed_s = _kill([victim], before, rng)
            after = watch.settled(after_s=killed_s, ranks=left, steps=1)
            rows.append(_phases(watch, after, killed_s))
            after_s = time.time()

    return act, rows


def kills_of_all(
    ranks: int,
    rounds: int,
    seed: int,
    lose: Callable[[], None] = lambda: None,
    *,
    only_one: bool = False,
    saved: Path | None = None,
) -> tuple[Callable[[DiaryReader], None], list[dict[str, float]]]:
    """Kills all ranks (or one, whose launcher ends the others), then calls `lose`; seconds until all have started
    anew, and until they have finished a step.

    Args:
        saved: where checkpoints go; no kill comes before this life of the ranks has left one there.
    """
    rows: list[dict[str, float]] = []
    rng = random.Random(seed)

    def act(watch: DiaryReader) -> None:
        after_s = 0.0
        for index in range(rounds):
            before = watch.settled(after_s=after_s, ranks=ranks)
            if saved is not None:
                first_s = max(entries[0]["time_s"] for entries in before.values())
                watch.wait(partial(_is_saved, saved, first_s), "a checkpoint")
                before = watch.settled(after_s=after_s, ranks=ranks)
            last = max(entries[-1]["step"] for entries in before.values())
            pids = sorted(before)
            killed_s = _kill([pids[index % ranks]] if only_one else pids, before, rng)
            lose()
            fresh = watch.settled(after_s=killed_s, ranks=ranks, steps=1, but=before)
            ended_s = max(entries[0]["time_s"] for entries in fresh.values())
            started_s = max(e["time_s"] for e in watch.entries if e["kind"] == "start" and e["pid"] in fresh)
            first = min(entries[0]["step"] for entries in fresh.values())
            rows.append(
                {
                    "start": started_s - killed_s,
                    "recovery": ended_s - started_s,
                    "total": ended_s - killed_s,
                    "steps_lost": max(0, last - first + 1),
                }
            )
            after_s = ended_s

    return act, rows


def _is_saved(folder: Path, since_s: float, _entries: object) -> bool:
    """Whether a checkpoint came into the folder after a moment."""
    return any(path.stat().st_mtime > since_s for path in folder.glob("*step*"))


def _kill(pids: Sequence[int], before: dict[int, list[dict[str, Any]]], rng: random.Random) -> float:
    """SIGKILL at a random moment of a step; when."""
    step_s = max(entry["step_s"] for entries in before.values() for entry in entries[-2:])
    time.sleep(rng.random() * step_s)
    killed_s = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed_s


def _phases(watch: DiaryReader, after: dict[int, list[dict[str, Any]]], killed_s: float) -> dict[str, float]:
    """Seconds from the kill to the end of the next step, as the survivor that ended it last spent them."""
    pid, ended_s = max(((pid, entries[0]["time_s"]) for pid, entries in after.items()), key=lambda pair: pair[1])
    report = next(
        e for e in reversed(watch.entries) if e["kind"] == "recovery" and e["pid"] == pid and e["time_s"] <= ended_s
    )
    seconds, began_s = report["seconds"], max(report["began_at"], killed_s)
    found = {"detection": began_s - killed_s, **{name: seconds.get(name, 0.0) for name in PHASES}}
    found["repeated step"] = ended_s - killed_s - sum(found.values())
    return {**found, "total": ended_s - killed_s, "steps_lost": report["steps_lost"]}
