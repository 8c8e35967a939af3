"""An older world cannot commit once a newer one has begun, however their steps fall between each other."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_lightning.checkpoint.agent_handle import warnings_of
from moe_lightning.checkpoint.agreement import Agreement, propose
from moe_lightning.checkpoint.directory import (
    Superseded,
    WorldMark,
    check_world,
    enter_world,
    make_staging,
    newest_world,
    next_world,
    world_lock,
)
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.session import CheckpointSession, Opening, later_session
from moe_lightning.checkpoint.storage import posix
from moe_lightning.checkpoint.storage.posix import PosixStorage
from moe_lightning.errors import CheckpointError
from tests.parameters import soak
from tests.unit.checkpoint_state import node

STORAGE = PosixStorage()
RANKS = ("0", "1")
TIMEOUT_S = 30.0


class Schedule:
    """Lets threads make their file operations one at a time, in the order of their names; who ended is passed over."""

    def __init__(self, order: Iterable[str]) -> None:
        self._order = list(order)
        self._running: list[str] = []
        self._turn = threading.Condition()
        self.errors: dict[str, BaseException] = {}

    def run(self, **actors: Callable[[], None]) -> None:
        self._running = list(actors)
        threads = [threading.Thread(target=self._act, args=(n, a), name=n, daemon=True) for n, a in actors.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} never had its turn"

    def operation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*arguments: Any, **options: Any) -> Any:
            name = threading.current_thread().name
            if name not in self._running:
                return function(*arguments, **options)
            with self._turn:
                assert self._turn.wait_for(lambda: self._next() == name, TIMEOUT_S)
                if name in self._order:
                    self._order.remove(name)
                self._turn.notify_all()  # an operation may be made of others, which wait for turns of their own
                try:
                    return function(*arguments, **options)
                finally:
                    self._turn.notify_all()

        return wait_and_call

    def _act(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (CheckpointError, OSError) as error:
            self.errors[name] = error
        finally:
            with self._turn:
                self._running.remove(name)
                self._turn.notify_all()

    def _next(self) -> str:
        return next((name for name in self._order if name in self._running), self._running[0])


def write_and_commit(root: Path, rank: str, ranks: Sequence[str]) -> None:
    """An agent's round for world 1: its part, and the commit where it finds all parts."""
    staging = make_staging(root, "s", 5, 1)
    (staging / f"part-{rank}").touch()
    with STORAGE.held(staging) as held:
        if all((held / f"part-{r}").exists() for r in ranks):
            (held / "MANIFEST.json").touch()
            STORAGE.commit(staging, held, b"", [f"part-{r}" for r in ranks], lambda: check_world(root, 1))


def committed(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("step-*/*"))


def outcome(root: Path, order: Iterable[str], ranks: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """Run agents of world 1 and a beginning world 2 in an order of their operations, and check what must hold."""
    schedule = Schedule(order)
    seen: list[list[str]] = []

    def begin() -> None:
        enter_world(root, 2)
        seen.append(committed(root))

    with monkeypatch.context() as patch:
        for owner, name in ((os, "listdir"), (os, "rename"), (os, "mkdir"), (posix, "write_durably")):
            patch.setattr(owner, name, schedule.operation(getattr(owner, name)))
        agents = {f"old{rank}": lambda rank=rank: write_and_commit(root, rank, ranks) for rank in ranks}
        schedule.run(new=begin, **agents)
    assert "new" not in schedule.errors
    assert newest_world(root) == 2
    assert committed(root) == seen[0], "what an older world commits, it commits before the newer one has entered"
    whole = sorted([*(f"step-00000005/part-{rank}" for rank in ranks), "step-00000005/MANIFEST.json"])
    assert committed(root) in ([], whole), "what has a name is whole"
    assert not [p for p in root.glob(".staging-*") if any(p.iterdir())]
    return schedule


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def test_every_order_of_one_agents_and_a_newer_worlds_operations(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = refusals = 0
    for places in itertools.combinations(range(9), 4):  # four operations of the agent, five of the newer world
        order = ["old0" if i in places else "new" for i in range(9)]
        schedule = outcome(root, order, RANKS[:1], monkeypatch)
        commits += bool(committed(root))
        refusals += isinstance(schedule.errors.get("old0"), Superseded)
        shutil.rmtree(root)
        root.mkdir()
    assert commits > 0
    assert refusals > 0


@pytest.mark.parametrize("first", [*range(0, 60, 20), *map(soak, range(60, 3000, 20))])
def test_random_orders_of_two_agents_and_a_newer_world(first: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty seeds is an order: to collect a test for each takes longer than to run it."""
    for seed in range(first, first + 20):
        order = random.Random(seed).choices(["old0", "old1", "new"], k=24)
        outcome(root, order, RANKS, monkeypatch)  # which asserts
        shutil.rmtree(root)
        root.mkdir()


def test_a_directory_that_took_the_name_of_a_swept_one_is_not_committed(root: Path) -> None:
    """Somebody of the older world makes it anew and has not looked for marks yet."""
    staging = make_staging(root, "s", 5, 1)
    with STORAGE.held(staging) as held:
        (held / "MANIFEST.json").touch()
        os.rename(staging, root / ".swept-x")
        staging.mkdir()
        with pytest.raises(CheckpointError, match="was replaced while it was written"):
            STORAGE.commit(staging, held, b"", [], lambda: check_world(root, 1))
    assert committed(root) == []


def test_a_swept_directory_is_told_before_its_manifest_is_written(root: Path) -> None:
    staging = make_staging(root, "s", 5, 1)
    with STORAGE.held(staging) as held:
        enter_world(root, 2)
        shutil.rmtree(staging, ignore_errors=True)
        with pytest.raises(Superseded):
            STORAGE.commit(staging, held, b"{}", [], lambda: check_world(root, 1))
    assert committed(root) == []


def test_marks_only_grow_and_a_lower_world_is_refused_in_a_sentence(root: Path) -> None:
    assert newest_world(root) == 0
    enter_world(root, 7)
    enter_world(root, 7)
    assert next_world(root) > 7
    with pytest.raises(Superseded, match=r"world 6 may not write .* world 7 has begun to save"):
        enter_world(root, 6)
    check_world(root, 7)
    with pytest.raises(Superseded):
        make_staging(root, "s", 1, 6)
    enter_world(root, next_world(root))
    assert [path.name for path in root.glob(".world-*")] == [f".world-{newest_world(root)}"]
    assert STORAGE.owner(STORAGE.staging(root, "s-1", 12, 9)) == (9, "s-1", 12)


def test_worlds_that_do_not_change_save_under_one_number_until_the_run_is_started_again(root: Path) -> None:
    mark = WorldMark(root)
    number = mark.leave(0)
    assert mark.leave(0) == number == newest_world(root)
    again = WorldMark(root)
    assert again.leave(0) > number
    with pytest.raises(Superseded):
        mark.leave(0)
    assert again.leave(10**15) == 10**15 == newest_world(root), "the generation of an elastic world"


def test_a_session_sorts_behind_older_ones_whose_clock_was_ahead(tmp_path: Path) -> None:
    ahead = f"{4 * 10**15:020d}"
    (tmp_path / "later").mkdir()
    with node(tmp_path, session=ahead) as made:
        made.save(1)
        assert later_session(made.root, 5) > ahead
        propose(made.root, None, Agreement(session=f"{5 * 10**15:020d}"))
        assert later_session(made.root, 5) > f"{5 * 10**15:020d}"
        with node(tmp_path / "later", root=made.root, session=later_session(made.root, 5)) as later:
            later.save(2)
        assert find_newest(made.root).checkpoint.step == 2  # type: ignore[union-attr]


def test_a_lock_of_an_older_world_holds_nobody_up(root: Path) -> None:
    with world_lock(root, 1):
        enter_world(root, 2)
        with world_lock(root), world_lock(root, 3):  # would raise, or wait for ever
            pass


def test_an_agent_stands_aside_and_ends(tmp_path: Path) -> None:
    with node(tmp_path, world=4) as old:
        old.save(1)
        assert find_newest(old.root).checkpoint.manifest.world == 4  # type: ignore[union-attr]
        old.snapshot(2)
        enter_world(old.root, 5)
        old.persist()
        assert "world 4 may not write" in (old.agent.status.error or "")
    assert old.agent.run(grace_s=0.0) == 0, "nothing of it is waited for"
    assert [path.name for path in old.root.glob("step-*")] == ["step-00000001"]
    assert not list(old.arenas.glob("*.arena"))


def test_a_world_does_not_warn_of_the_errors_of_the_one_before(tmp_path: Path) -> None:
    def warnings(session: str) -> list[str]:
        opening = Opening(root=old.root, run="run", session=session, arenas=old.arenas, world_number=5, agent=None)
        return warnings_of(CheckpointSession.status(cast(CheckpointSession, SimpleNamespace(_opening=opening))))

    with node(tmp_path, session="1", world=4) as old:
        old.save(1)
        old.snapshot(2)
        enter_world(old.root, 5)
        old.persist()
        assert "world 4 may not write" in warnings("1")[0]
        assert warnings("2") == []
    with node(tmp_path, session="2", world=5) as new:
        new.agent.root = tmp_path / "file" / "checkpoints"
        new.agent.root.parent.touch()
        new.snapshot(3)
        new.persist_attempts(1)
        assert "failed (Not a directory)" in warnings("2")[0]
        assert warnings("3") == []


def test_the_mark_of_a_clock_that_was_ahead_is_named(tmp_path: Path) -> None:
    """An elastic world has the time of its host as its number."""
    now = time.time_ns() // 1_000_000
    enter_world(tmp_path, now + 3_600_000)
    with pytest.raises(Superseded, match=rf"if there is no such run, .*: delete {tmp_path}/.world-{now + 3_600_000}"):
        WorldMark(tmp_path).leave(now)
