"""What faults on purpose do to processes, snapshots and disks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from moe_lightning.checkpoint.arena import Arena, arena_path
from moe_lightning.errors import ConfigurationError

_HELPER = Path(__file__).with_name("fault_helper.py")


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to processes, this one last; those that are gone already are passed over."""
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def stop_self(seconds: float) -> None:
    """SIGSTOP to this process; a helper continues it after a while."""
    _helped("continue", os.getpid(), seconds)
    os.kill(os.getpid(), signal.SIGSTOP)


def drop_arenas(arenas: Path | None) -> None:
    """Delete a node's snapshots, as if its memory were gone; an agent may still finish what it is writing."""
    if arenas is not None:
        shutil.rmtree(arenas, ignore_errors=True)


def damage_snapshots(arenas: Path | None, rank: int) -> int:
    """Turn round one byte in every piece of a rank's snapshots; how many pieces.

    Raises:
        ConfigurationError: the rank has no snapshots.
    """
    if arenas is None or not arena_path(arenas, rank).exists():
        raise ConfigurationError(
            f"corrupt_arena: rank {rank} has no snapshots at this step: use callbacks=partial_experts, or a later step"
        )
    arena = Arena(arena_path(arenas, rank))
    blocks = {piece.at.data_offset: piece for table in arena.tables() for piece in table.placed if piece.nbytes}
    for piece in blocks.values():
        arena.payload(piece)[piece.nbytes // 2] ^= 0xFF
    arena.close()
    return len(blocks)


def fill_disk(folder: Path, megabytes: float, seconds: float) -> int:
    """Take at most so much space of a folder's file system for a while, whatever becomes of this process; bytes taken.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"fill_disk: folder={folder} is not a folder that can be written to")
    return int(_helped("fill", folder, megabytes, seconds).split()[0])


def _helped(*arguments: object) -> str:
    """Start the helper, and return what it says when it is ready."""
    command = [sys.executable, "-I", "-S", str(_HELPER), *map(str, arguments)]
    helper = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert helper.stdout is not None
    with helper.stdout:
        said = helper.stdout.readline()
    if not said:
        raise RuntimeError(f"{_HELPER.name} {arguments[0]} ended with {helper.wait()}")
    return said
