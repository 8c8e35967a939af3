"""Toy workers that sum a vector in an endless loop, and go on in the next world when theirs breaks.

Each worker is a process that a test may kill or stop at any instant. It tells its pipe of every world that has done a
step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from moe_lightning.compat import private_torch
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask, Members, membership_from_environment
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.worker import EXIT_HANGING
from moe_lightning.parallel.abort import GroupAborter, begin_build
from tests.forks import FORKS, PATIENCE_S, fork, kill

FAST = ElasticSettings(
    heartbeat_timeout_s=0.4,
    silence_timeout_s=1.0,
    build_timeout_s=2.0,
    hang_timeout_s=4.0,
    join_window_s=0.3,
    start_timeout_s=30.0,
)
Event = dict[str, Any]


def resources() -> dict[str, int]:
    """Threads, descriptors and sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def work(environment: dict[str, str], pipe: Connection, behaviour: str) -> None:
    """The life of one worker."""
    os.setsid()
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    torch.set_num_threads(1)
    engine = membership_from_environment()
    assert engine is not None
    try:
        _train(engine, pipe, behaviour)
    except BaseException as error:
        pipe.send({"event": "failed", "error": f"{type(error).__name__}: {error}"})
    else:
        pipe.send({"event": "end", "reason": engine.reason})
    os._exit(0)


def _train(engine: RendezvousClient, pipe: Connection, behaviour: str) -> None:
    worlds, stop, is_ready = 0, False, behaviour == "ready"
    while not stop:
        members = engine.join(is_ready=is_ready)
        if behaviour == "sets up" and not is_ready:
            is_ready, is_early = True, engine.withdraw_if_early()
            pipe.send({"event": "first", "early": is_early})
            if is_early:
                continue
        joined = time.time()
        _meet_fate(behaviour, worlds)
        reason = engine.reason
        try:
            _build(engine, members)
            dist.all_reduce(torch.ones(1))
            engine.record_progress()
            worlds += 1
            pipe.send({
                "event": "world", "ids": members.ids, "rank": members.rank, "id": engine.member_id, "reason": reason,
                "joined": joined, "time": time.time(), **resources(),
            })  # fmt: skip
            stop = _steps(engine, members, pipe, behaviour)
        except (RuntimeError, ValueError, TimeoutError) as error:
            felt = time.time()
            engine.abort(f"rank {members.rank}: {error}")
            pipe.send({"event": "broken", "time": felt, "error": str(error)})
            if behaviour == "hang":
                time.sleep(3600)
        if dist.is_initialized():
            dist.destroy_process_group()
    engine.close()


def _meet_fate(behaviour: str, worlds: int) -> None:
    """Behaviour "SIGKILL 1 0.003": gets the signal that long after its second join, while it builds groups."""
    match behaviour.split():
        case [name, number, delay_s] if name.startswith("SIG") and int(number) == worlds:
            threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.Signals[name])).start()


def _build(engine: RendezvousClient, members: Members) -> None:
    store = dist.PrefixStore(members.name, engine.store)
    with GroupAborter() as aborter:
        engine.guard(members, aborter.abort)
        short = begin_build(store, members.size, engine.settings.build_timeout_s)
        dist.init_process_group("gloo", store=store, rank=members.rank, world_size=members.size, timeout=short)
        second = dist.new_group(timeout=short)
    assert dist.group.WORLD is not None
    for group in (dist.group.WORLD, second):
        private_torch.set_group_timeout(group, timedelta(seconds=60))
    aborter.confirm(gather_json)
    assert len(aborter.connections) >= 2 * (members.size - 1)


def gather_json(mine: object) -> list[object]:
    """What every rank says, as JSON in byte tensors."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [json.loads(bytes(part[: int(size)].tolist()).decode()) for part, size in zip(parts, sizes, strict=True)]


def _steps(engine: RendezvousClient, members: Members, pipe: Connection, behaviour: str) -> bool:
    """Step until somebody wants to let newcomers in (False) or the test wants an end (True)."""
    while True:
        state = torch.tensor([1.0, float(engine.has_newcomers()), float(pipe.poll())])
        dist.all_reduce(state)
        assert state[0] == members.size
        if state[2]:
            return True
        if state[1] and behaviour != "closed door":
            return False
        time.sleep(0.002)  # a step's computation


@dataclass
class Worker:
    """One worker as its test sees it."""

    process: BaseProcess
    pipe: Connection
    task: ElasticTask
    events: list[Event] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; the time."""
        assert self.process.pid is not None
        now = time.time()
        os.kill(self.process.pid, number)
        return now

    def worlds(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "world"]


class Toy:
    """Workers around a host of their own; all end with the block."""

    def __init__(self, settings: ElasticSettings = FAST) -> None:
        self.host = RendezvousServer()
        self.settings = settings
        self.workers: list[Worker] = []

    def start(
        self, count: int, *, expected: int | None = None, behaviours: dict[int, str] | None = None
    ) -> list[Worker]:
        """Start workers; those of one call are expected together."""
        made = []
        for index in range(count):
            task = ElasticTask(
                address=str(self.host.address),
                secret_file=str(self.host.secret_file),
                node=f"node{len(self.workers)}",
                expected=count if expected is None else expected,
                settings=self.settings,
            )
            mine, theirs = FORKS.Pipe()
            process = fork(work, task.to_environment(), theirs, (behaviours or {}).get(index, ""))
            theirs.close()
            made.append(Worker(process, mine, task))
            self.workers.append(made[-1])
        return made

    def wait(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Take the workers' events in until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            remaining = deadline - time.monotonic()
            pipes = {w.pipe: w for w in self.workers if not w.pipe.closed}
            ready = wait(list(pipes), timeout=max(0.0, remaining)) if pipes else []
            if not ready:
                seen = [list(w.events)[-3:] for w in self.workers]
                raise AssertionError(f"nothing happened within {timeout_s:g} s; last events: {seen}")
            for pipe in ready:
                worker = pipes[pipe]  # type: ignore[index]
                try:
                    worker.events.append(worker.pipe.recv())
                except (EOFError, OSError):
                    worker.pipe.close()

    def wait_for_world(self, workers: list[Worker], *, maybe: Sequence[Worker] = (), after: float = 0.0) -> list[Event]:
        """Wait until these workers, and nobody else, step in one world that began after a moment; their events.

        Args:
            maybe: workers that were stopped and go on: they come, too, or end themselves (`LOST_WAKE_UP`).
        """

        def together() -> bool:
            wanted = [*workers, *(worker for worker in maybe if not worker.pipe.closed)]
            for worker in wanted:
                for event in worker.events:
                    assert event["event"] != "failed", event
            last = [worker.worlds()[-1] if worker.worlds() else None for worker in wanted]
            if any(event is None or event["time"] < after for event in last):
                return False
            ids = {event["ids"] for event in last if event}
            return len(ids) == 1 and len(ids.pop()) == len(wanted)

        self.wait(together)
        for worker in maybe:
            if worker.pipe.closed:
                worker.process.join(timeout=5)
                assert worker.process.exitcode == EXIT_HANGING
        return [worker.worlds()[-1] for worker in workers]

    def stop(self, workers: list[Worker]) -> None:
        """Let these workers end well."""
        for worker in workers:
            worker.pipe.send("stop")
        self.wait(lambda: all(w.events and w.events[-1]["event"] == "end" for w in workers))

    def __enter__(self) -> Toy:
        return self

    def __exit__(self, *_: object) -> None:
        kill(worker.process for worker in self.workers)
        for worker in self.workers:
            worker.process.close()
            worker.pipe.close()
        self.host.close()
