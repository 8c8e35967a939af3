"""An expert's turn to be written counts once it is committed: dropped and failed persists cost no expert its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_lightning.checkpoint import agent as agents
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.agreement import next_job
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.policy import CheckpointLedger, Order
from moe_lightning.checkpoint.selection import parse_scopes
from moe_lightning.checkpoint.snapshotter import Snapshotter

LAYERS = 2


def keys(layers: int, experts: int) -> dict[str, torch.Tensor]:
    return {f"expert/{layer}/{e}/weight/w": torch.zeros(4) for layer in range(layers) for e in range(experts)}


def oldest_versions(
    base: Path,
    *,
    experts: int,
    k: tuple[int, int],
    steps: int,
    serves: Callable[[int], bool],
    order: Order = "sequential",
) -> dict[int, int]:
    """step -> version of the oldest expert in the checkpoint committed then; the agent looks when `serves` says so."""
    arenas, root = base / "arenas", base / "checkpoints"
    arenas.mkdir(mode=0o700)
    state = keys(LAYERS, experts)
    writer = Snapshotter(arena_path(arenas, 0), run="r", session="1", rank=0, world_size=1, state=state, objects=0)
    agent = Agent(arenas, root, retry_s=0.0)
    kept = CheckpointLedger(
        num_layers=LAYERS,
        num_experts=experts,
        planned_assignments=10**9,
        owners=np.zeros((LAYERS, experts), dtype=np.int64),
        num_ranks=1,
        scopes=parse_scopes("full"),
        order=order,
    )
    counts = np.random.default_rng(0)
    found: dict[int, int] = {}
    for step in range(1, steps + 1):
        kept.ledger.record(counts.integers(0, 100, (LAYERS, experts)))
        plan = kept.plan(*k, full=step == 1)
        kept.begin(step, plan)
        writer.start(
            step, state, fresh=plan.fresh(state), persist=plan.persisted(state), extra={"num_experts": experts}
        )
        writer.finish()
        while serves(step) and agent.serve_once():
            pass
        checkpoint = find_newest(root).checkpoint if root.is_dir() else None
        if checkpoint is not None:
            found[checkpoint.step] = int(checkpoint.expert_versions().min())
    writer.close()
    return found


def test_a_persist_that_takes_two_intervals_starves_nobody(tmp_path: Path) -> None:
    found = oldest_versions(tmp_path, experts=8, k=(2, 2), steps=40, serves=lambda step: step % 2 == 1)
    assert len(found) == 20
    assert max(step - oldest for step, oldest in found.items()) == 3


@pytest.mark.parametrize(("experts", "k", "limit"), [(6, (1, 1), 5), (8, (4, 1), 7), (6, (3, 2), 3)])
def test_dropped_persists_make_no_expert_older_than_its_turn(
    experts: int, k: tuple[int, int], limit: int, tmp_path: Path
) -> None:
    chance = random.Random(experts)
    found = oldest_versions(tmp_path, experts=experts, k=k, steps=60, serves=lambda _: chance.random() < 0.3)
    assert len(found) > 8
    assert max(step - oldest for step, oldest in found.items()) <= limit


def test_a_failed_persist_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, write = random.Random(1), agents.write_part

    def write_or_fail(*arguments: object, **options: object) -> object:
        if chance.random() < 0.5:
            raise OSError(28, "No space left on device")
        return write(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(agents, "write_part", write_or_fail)
    looks = iter(range(10**6))
    found = oldest_versions(tmp_path, experts=6, k=(2, 2), steps=60, serves=lambda _: next(looks) % 2 == 0)
    assert 5 < len(found) < 60, "some failed"
    assert max(step - oldest for step, oldest in found.items()) <= 2


def test_a_commit_without_drops_writes_k_experts(tmp_path: Path) -> None:
    oldest_versions(tmp_path, experts=8, k=(2, 2), steps=12, serves=lambda _: True)
    checkpoint = find_newest(tmp_path / "checkpoints").checkpoint
    assert checkpoint is not None
    assert ((checkpoint.expert_versions() == 12).sum(axis=1) == 2).all()


def test_a_snapshot_that_gives_way_while_an_agent_looks_leaves_it_without_a_job(tmp_path: Path) -> None:
    """A rank may drop what waited, for a newer snapshot, between two looks of the agent."""

    class Fleeting:
        writer_alive = True

        def __init__(self) -> None:
            self.waiting = [SimpleNamespace(session="1", step=3, world=1, world_size=1)]

        def waiting_tables(self) -> list[SimpleNamespace]:
            seen, self.waiting = self.waiting, []
            return seen

        def tables(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(session="1")]

    arenas = tmp_path / "arenas"
    arenas.mkdir(mode=0o700)
    agent = Agent(arenas, tmp_path / "checkpoints")
    agent._arenas = {arenas / "rank0": Fleeting()}  # type: ignore[dict-item]
    assert next_job(agent.root, *agent._current()) is None
