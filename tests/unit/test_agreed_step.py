"""Agents of several nodes persist the same steps, however often and whenever each of them looks."""

from __future__ import annotations

import errno
import math
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.checkpoint import agent as agents
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.agreement import Agreement, propose
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.commit import write_part
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.checkpoint.storage.objects import FsspecStorage
from tests.parameters import slow, soak
from tests.unit.checkpoint_state import EXPERTS, EXTRA, assert_holds, state_of


class Nodes:
    """Nodes of one or more ranks each, with an agent each, in this process."""

    def __init__(self, base: Path, ranks_per_node: list[int], *, session: str = "1", root: Place | None = None) -> None:
        self.root = root or base / "checkpoints"
        self.world_size = sum(ranks_per_node)
        self.writers: list[Snapshotter] = []
        self.agents: list[Agent] = []
        for node, ranks in enumerate(ranks_per_node):
            arenas = base / f"node{node}"
            arenas.mkdir(mode=0o700, exist_ok=True, parents=True)
            self.agents.append(Agent(arenas, self.root, retry_s=0.0))
            for _ in range(ranks):
                rank = len(self.writers)
                self.writers.append(
                    Snapshotter(
                        arena_path(arenas, rank),
                        run="run",
                        session=session,
                        rank=rank,
                        world_size=self.world_size,
                        state=state_of(rank, self.world_size, 0),
                        objects=0,
                    )
                )

    def snapshot(self, rank: int, step: int) -> None:
        self.writers[rank].start(step, state_of(rank, self.world_size, step), extra=EXTRA)
        self.writers[rank].finish()

    def serve(self, node: int, times: int = 1) -> None:
        for _ in range(times):
            self.agents[node].serve_once()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    @property
    def committed(self) -> int:
        found = find_newest(self.root).checkpoint if storage_of(self.root).is_dir(self.root) else None
        return found.step if found is not None else 0


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_HOPE_S", 0.0)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_an_agent_that_lacks_threads_or_memory_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also if its log, which lies in the same memory, takes no line."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    nodes = Nodes(tmp_path, [1])
    nodes.snapshot(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(agents, "write_part", full)
        patch.setattr(agents, "write_durably", full)
        patch.setattr("builtins.print", full)
        nodes.serve(0)
    with monkeypatch.context() as patch:
        patch.setattr(agents.ThreadPoolExecutor, "map", lambda *_: (_ for _ in ()).throw(error))
        nodes.serve(0)
    assert f"failed ({str(error) or 'MemoryError'}): the last one is untouched" in str(nodes.agents[0].status.error)
    nodes.serve(0, 3)
    assert nodes.agents[0].status.error is None
    assert nodes.committed == 1
    nodes.close()


@pytest.mark.parametrize("seed", [*range(3), *map(slow, range(3, 10)), *map(soak, range(10, 50))])
def test_agents_that_look_at_random_moments_meet(seed: int, tmp_path: Path) -> None:
    """A snapshot after every step; each agent looks now and then, at its own pace: some only every tenth step."""
    rng = random.Random(seed)
    nodes = Nodes(tmp_path, rng.choice([[1, 1], [2, 1], [1, 1, 1]]))
    paces = [rng.choice([0.1, 0.5, 1.0, 3.0]) for _ in nodes.agents]
    commits: set[int] = set()
    step = 0
    while len(commits - {0}) < 3:
        step += 1
        assert step < 500, f"they meet again and again, but now only {commits}"
        for rank in rng.sample(range(nodes.world_size), nodes.world_size):
            nodes.snapshot(rank, step)
            for node, pace in enumerate(paces):
                nodes.serve(node, int(pace) + (rng.random() < pace % 1))
        commits.add(nodes.committed)
    last = step
    nodes.close()
    for _ in range(60):
        for node in rng.sample(range(len(paces)), len(paces)):
            nodes.serve(node)
    assert nodes.committed == last, "the last snapshot of a training is saved"
    found = find_newest(nodes.root).checkpoint
    assert_holds(found, dict.fromkeys(range(EXPERTS), last))
    for agent in nodes.agents:
        agent._find_arenas()
        assert not agent._pending(), "nothing is left to wait for"


def test_a_late_node_asks_for_a_step_that_both_can_hold(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [1, 1])
    for step in (1, 2, 3, 4):
        for rank in (0, 1):
            nodes.snapshot(rank, step)
        if step == 1:
            nodes.serve(0, 3)  # it begins with step 1, which node 1 no longer has when it looks
    nodes.serve(1, 2)
    assert Agreement.read(nodes.root) == Agreement(session="1", step=5, margin=1)
    nodes.serve(0, 2)
    for step in (5, 6, 7, 8):
        for rank in (0, 1):
            nodes.snapshot(rank, step)
    for _ in range(4):
        nodes.serve(0)
        nodes.serve(1)
    assert nodes.committed == 8, "step 5 was held and saved, then what was newest"
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-00000005", "step-00000008"]
    nodes.close()


def test_a_node_waits_for_the_others_as_long_as_it_has_written_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return write_part(*arguments, **options)

    monkeypatch.setattr(agents, "write_part", write_slowly)
    nodes = Nodes(tmp_path, [1, 1])
    for rank, agent in enumerate(nodes.agents):
        agent.commit_timeout_s = 0.05
        nodes.snapshot(rank, 1)
    nodes.serve(0)
    assert nodes.agents[0].status.error is None
    nodes.serve(1)
    assert nodes.committed == 1
    nodes.close()


def test_nodes_without_a_common_last_step_say_so_and_leave(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [1, 1])
    for step in range(1, 9):
        nodes.snapshot(0, step)
        if step < 5:
            nodes.snapshot(1, step)
    nodes.close()
    for _ in range(200):
        for node in (0, 1):
            nodes.serve(node)
    assert nodes.committed == 0
    errors = {agent.status.error for agent in nodes.agents}
    assert any(error and "not all nodes hold snapshots of step" in error for error in errors)


def test_the_agent_of_a_node_that_the_others_went_on_without_gives_up(tmp_path: Path) -> None:
    former = Nodes(tmp_path / "a", [1, 1])
    for rank in (0, 1):
        former.snapshot(rank, 3)
    former.serve(0, 3)  # the other node dies with its agent
    former.close()
    alone = Nodes(tmp_path / "b", [1], session="2")
    alone.root = alone.agents[0].root = former.root
    alone.snapshot(0, 3)
    alone.serve(0, 3)
    alone.close()
    assert alone.committed == 3
    former.serve(0, 3)
    assert not former.agents[0].serve_once(), "it rests instead of writing the same again and again"
    assert former.agents[0]._job is None
    assert not former.agents[0]._pending(), "it may leave"
    assert former.agents[0].status.error is None


def test_an_agent_that_waits_looks_for_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is over, and a rank has moved to another node while its arena stayed: the part is written once, and
    each look at the store is one listing of where the others' parts come.
    """
    root = place_of(f"memory://{uuid.uuid4().hex}/checkpoints")
    former = Nodes(tmp_path, [2], root=root)
    for rank in (0, 1):
        former.snapshot(rank, 1)
    former.serve(0, 3)
    assert former.agents[0].status.committed_step == 1
    former.close()
    nodes = Nodes(tmp_path, [1, 1], session="2", root=root)
    for rank in (0, 1):
        nodes.snapshot(rank, 2)
    nodes.close()
    nodes.serve(0, 3)
    calls: list[tuple[str, str]] = []
    for name in ("names", "size", "read_range", "write", "put_if_absent"):
        monkeypatch.setattr(FsspecStorage, name, noted(getattr(FsspecStorage, name), calls))
    monkeypatch.setattr(agents, "_HOPE_S", math.inf)  # between two looks at what others do
    monkeypatch.setattr(agents, "_LONGEST_HOPE_S", math.inf)
    nodes.serve(0, 20)
    assert calls == [("names", storage_of(root).staging(root, "2", 2, 0).name)] * 20
    nodes.serve(1, 3)
    assert nodes.agents[0].serve_once(), "it sees the commit"
    assert [agent.status.committed_step for agent in nodes.agents] == [2, 2]


def noted(call: Callable[..., Any], calls: list[tuple[str, str]]) -> Callable[..., Any]:
    """A storage's method that writes down where it is called for."""

    def method(storage: FsspecStorage, path: Place, *arguments: Any) -> Any:
        calls.append((call.__name__, path.name))
        return call(storage, path, *arguments)

    return method


def test_the_faster_proposal_counts(tmp_path: Path) -> None:
    first, second = Agreement(session="1", step=4), Agreement(session="1", step=5)
    assert propose(tmp_path, None, first) == first
    assert propose(tmp_path, None, second) == first
    assert propose(tmp_path, first, second) == second
    assert propose(tmp_path, first, replace(first, step=9)) == second
    assert Agreement.read(tmp_path) == second


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'{"session": 1, "step": 2, "margin": 0}',
        b'{"step": 2}',
        b'{"session": "1", "step": 99999999999999999999, "margin": 0}',
    ],
)
def test_a_damaged_agreement_is_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ".next.json").write_bytes(damage)
    assert Agreement.read(tmp_path) is None
    proposal = Agreement(session="1", step=4)
    assert propose(tmp_path, None, proposal) == proposal


def test_what_was_agreed_on_never_comes(tmp_path: Path) -> None:
    """Nothing but the death of the writers tells the agents that training is over."""
    nodes = Nodes(tmp_path, [1, 1])
    (tmp_path / "checkpoints").mkdir()
    propose(nodes.root, None, Agreement(session="1", step=10))
    for rank in (0, 1):
        nodes.snapshot(rank, 3)
    for node in (0, 1):
        nodes.serve(node, 3)
    assert nodes.committed == 0
    nodes.close()
    for _ in range(5):
        for node in (0, 1):
            nodes.serve(node)
    assert nodes.committed == 3
