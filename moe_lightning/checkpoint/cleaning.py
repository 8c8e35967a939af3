"""Arenas that nobody serves or writes any more: what runs leave in memory when their agents are killed as well."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_lightning.checkpoint.agent_control import LOCK, LOG, STATUS, STOP
from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.arena_location import ARENAS, MEMORY, NAMED
from moe_lightning.errors import CheckpointError

_OURS = re.compile(
    rf"(rank|held|parity)[\w.-]+\.(arena|copy|parity|alive|new)|\.?({LOCK}|{LOG}|{STATUS}|{STOP})(\.[0-9a-f]+\.new)?"
)


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A directory of arenas whose agent and ranks are dead.

    Attributes:
        nbytes: that it takes.
        root: where its checkpoints were written; None where that is not recorded.
        unwritten: step of its newest snapshot that no checkpoint holds; None where there is none.
        problems: a sentence for each damaged arena.
    """

    path: Path
    nbytes: int
    root: str | None
    unwritten: int | None
    problems: tuple[str, ...]


def orphans(rooms: Iterable[Path] = ()) -> list[Orphan]:
    """Those of this user in shared memory and in other rooms, such as directories of checkpoints."""
    found = []
    for room in dict.fromkeys([MEMORY, *rooms]):
        for path in sorted(room.glob(f"{NAMED}*")):
            if _is_own(path):
                with _claimed(path) as is_free:
                    if is_free:
                        found.append(_described(path))
    return found


def remove(orphan: Orphan) -> bool:
    """Delete its files, and the directory if nothing else lies in it; False where somebody uses it by now."""
    with _claimed(orphan.path) as is_free:
        if not is_free:
            return False
        for name in os.listdir(orphan.path):
            path = orphan.path / name
            if _OURS.fullmatch(name) and not path.is_symlink() and path.is_file():
                path.unlink()
        if not os.listdir(orphan.path):
            orphan.path.rmdir()
    return True


def _is_own(path: Path) -> bool:
    """A directory of this user with something in it that an agent or a rank makes."""
    try:
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            return False
        return (path / LOCK).is_file() or any(path.glob(ARENAS))
    except OSError:
        return False


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock of the directory; if so, nobody takes one while the context is open."""
    with ExitStack() as stack:
        try:
            for lock in [path / LOCK, *path.glob("*.alive")]:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or not ours to look at
            yield False
        else:
            yield True


def _described(path: Path) -> Orphan:
    waiting: list[int] = []
    problems: list[str] = []
    for file in sorted(path.glob(ARENAS)):
        try:
            arena = Arena(file)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            waiting += arena.state.waiting
            arena.close()
    return Orphan(
        path=path,
        nbytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        root=_root_of(path),
        unwritten=max(waiting, default=None),
        problems=tuple(problems),
    )


def _root_of(path: Path) -> str | None:
    try:
        root = json.loads((path / LOCK).read_bytes())["root"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return root if isinstance(root, str) else None
