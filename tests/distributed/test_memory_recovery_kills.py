"""Processes are killed at random instants of copying, sending and publishing, and a node is lost with them: what was
protected everywhere is still there, byte by byte. A schedule is a seed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import threading
from pathlib import Path

import pytest

from moe_lightning.checkpoint.protection import ProtectionLayout, aec_layout, arc_layout
from moe_lightning.checkpoint.snapshot_protection import Protector
from moe_lightning.parallel.collectives import all_gather_json
from tests.distributed.harness import RankFailure, connect, run_ranks
from tests.distributed.protected_ranks import node_arenas, recover, snapshot, snapshotter_of

RANKS = 3


def protect_until_killed(
    rank: int, world_size: int, base: str, layout: ProtectionLayout, delays_s: list[float]
) -> None:
    """Every rank is killed at its own instant; what it has finished by then is in a file."""
    world = connect()
    snapshotter = snapshotter_of(node_arenas(Path(base), rank), rank, world_size)
    protector = Protector(snapshotter.arena, layout, world)
    if delays_s[0] < delays_s[1]:
        snapshotter.on_published = protector.prepare
    finished = os.open(Path(base) / f"finished{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    all_gather_json(0, world)
    threading.Timer(delays_s[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(1, 100_000):
        snapshot(snapshotter, rank, world_size, step)
        assert protector.start(step)
        if step % 2:  # otherwise the next start waits for it
            report = protector.finish()
            assert report is not None
            os.pwrite(finished, struct.pack("<q", report.step), 0)


def survive(seed: int, base: Path) -> tuple[int, int]:
    """(version that was protected everywhere, version that was recovered)"""
    rng = random.Random(seed)
    layout = rng.choice([aec_layout(range(RANKS)), arc_layout(range(RANKS))])
    first = rng.uniform(0.02, 0.4)
    delays_s = [first + rng.uniform(0.0, 0.01) for _ in range(RANKS)]
    with pytest.raises(RankFailure, match=r"died without a word|onnection"):
        run_ranks(RANKS, protect_until_killed, str(base), layout, delays_s)
    marks = [(base / f"finished{rank}").read_bytes() for rank in range(RANKS)]
    everywhere = min(struct.unpack("<q", mark)[0] if mark else 0 for mark in marks)
    lost = rng.randrange(RANKS)
    shutil.rmtree(base / f"node{lost}")
    plan = run_ranks(RANKS - 1, recover, str(base), [node for node in range(RANKS) if node != lost])[0]
    return everywhere, plan.version if plan.level == "memory" else 0


def check(seed: int, base: Path) -> int:
    everywhere, recovered = survive(seed, base)
    assert everywhere <= recovered <= everywhere + 3, f"schedule {seed}"
    return recovered


def test_kills_at_random_instants(tmp_path: Path) -> None:
    recovered = []
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        recovered.append(check(seed, tmp_path / str(seed)))
    assert max(recovered) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_kills_at_random_instants(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)
