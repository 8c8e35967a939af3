"""Experts change ranks in the middle of a run, with all their state, and nothing else changes (laws L1 and L3)."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_lightning.balancing.migration import held_states, plan_migration
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.state import transfer as state_transfer
from moe_lightning.strategies import placed_experts
from moe_lightning.strategies.placed_experts import PlacedExperts, grow, migrate_rows, next_slots
from tests.distributed.balanced_training import random_placement, train
from tests.distributed.harness import RankFailure, connect, run_pooled, run_ranks
from tests.distributed.same_training import CASES, TOLERANCE, assert_same_training, on_one_world, reference
from tests.distributed.training import BRIEF, OwnModule, make_trainer, set_up
from tests.parameters import slow

SHAPES = {"weight": (3, 2), "moment": (3, 2), "bias": (4,), "counter": ()}


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_slots_of_those_who_stay_do_not_change(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(0, 6))
    before = data.draw(st.lists(st.integers(0, 9), max_size=num_slots, unique=True))
    slots = data.draw(st.permutations(before + [-1] * (num_slots - len(before))))
    after = data.draw(st.sets(st.integers(0, 9), max_size=num_slots))
    moved = next_slots(slots, after)
    assert len(moved) == num_slots
    assert sorted(expert for expert in moved if expert >= 0) == sorted(after)
    assert all(new == old for old, new in zip(slots, moved, strict=True) if old in after)


def content(layer: int, expert: int, name: str) -> torch.Tensor:
    """What an expert's row must hold, wherever it is."""
    dtype = torch.bfloat16 if name == "moment" else torch.float32
    return torch.full(SHAPES[name], 10.0 * layer + expert + len(name) / 16, dtype=dtype)


def move_at_random(rank: int, world_size: int) -> int:
    world = connect()
    rng = np.random.default_rng(world_size)
    slots, num_layers, moved = 4, 2, 0
    placements = [random_placement(rng, world_size, slots) for _ in range(num_layers)]
    experts = [next_slots([-1] * slots, placement.experts_on(rank)) for placement in placements]
    stacks = []
    for layer in range(num_layers):
        stacks.append({name: nn.Parameter(torch.zeros(slots, *shape)) for name, shape in SHAPES.items()})
        stacks[-1]["moment"].data = stacks[-1]["moment"].data.bfloat16()
        for slot, expert in enumerate(experts[layer]):
            for name, stack in stacks[-1].items():
                if expert >= 0:
                    stack.data[slot] = content(layer, expert, name)
    for _ in range(8):
        planned = [random_placement(rng, world_size, slots) for _ in range(num_layers)]
        transfers = plan_migration(held_states(placements), planned)
        after = [next_slots(old, new.experts_on(rank)) for old, new in zip(experts, planned, strict=True)]
        old, new = (
            [
                ExpertStack(parameters=stack, slot_experts=held, placement=placement, rank=rank)
                for stack, held, placement in zip(stacks, at, places, strict=True)
            ]
            for at, places in ((experts, placements), (after, planned))
        )
        sent_bytes = migrate_rows(old, new, (), transfers, world)
        state_bytes = 6 * 4 + 6 * 2 + 4 * 4 + 4
        assert sent_bytes == state_bytes * sum(t.source == rank for t in transfers)
        for layer, stack in enumerate(stacks):
            for slot, expert in enumerate(after[layer]):
                for name, tensor in stack.items():
                    expected = content(layer, expert, name) if expert >= 0 else torch.zeros_like(tensor[slot])
                    assert torch.equal(tensor[slot], expected), (layer, slot, expert, name)
        placements, experts, moved = planned, after, moved + len(transfers)
    return moved


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_arrive_where_they_belong_and_vacant_ones_are_zero(world_size: int) -> None:
    moved = run_pooled(world_size, move_at_random)
    assert moved[0] > 0
    assert len(set(moved)) == 1


def migrate_until_killed(rank: int, world_size: int, folder: str, killed: int, exchange: int) -> None:
    """All experts of each rank go to the next one; one rank is killed before an exchange of many, or where there are
    fewer after the last one. The others write whether their rows are those of before.
    """
    world, experts = connect(), [3 * rank + slot for slot in range(3)]
    before = Placement(replicas=np.repeat(np.eye(world_size, dtype=np.int64), 3, axis=0))
    after = Placement(replicas=np.roll(before.replicas, 1, axis=1))
    stack = {name: nn.Parameter(torch.zeros(3, *shape)) for name, shape in SHAPES.items()}
    for slot, expert in enumerate(experts):
        for name, parameter in stack.items():
            parameter.data[slot] = content(0, expert, name)
    old, new = (
        [ExpertStack(parameters=stack, slot_experts=slots, placement=placement, rank=rank)]
        for slots, placement in ((tuple(experts), before), (after.experts_on(rank), after))
    )
    values = {name: parameter.detach().clone() for name, parameter in stack.items()}
    left, exchanged = [exchange], state_transfer._exchange

    def exchange_or_die(*arguments: Any) -> None:
        if rank == killed and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        exchanged(*arguments)

    def transfer_or_die(*arguments: Any, **options: Any) -> int:
        sent = state_transfer.transfer(*arguments, **options | {"most_bytes": 32})
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return sent

    state_transfer._exchange = exchange_or_die
    placed_experts.transfer = transfer_or_die
    transfers = plan_migration(held_states([before]), [after])
    with pytest.raises(RuntimeError):
        migrate_rows(old, new, (), transfers, world)
    intact = all(torch.equal(parameter.data, values[name]) for name, parameter in stack.items())
    (Path(folder) / str(rank)).write_text(f"{intact} {exchange - left[0]}")


@pytest.mark.parametrize(("killed", "exchange"), [(0, 3), (2, 3), (1, 10**9)])
def test_a_rank_that_is_killed_between_exchanges_leaves_all_rows_as_they_were(
    tmp_path: Path, killed: int, exchange: int
) -> None:
    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(3, migrate_until_killed, str(tmp_path), killed, exchange)
    found = {int(file.name): file.read_text().split() for file in tmp_path.iterdir()}
    assert found.keys() == {0, 1, 2} - {killed}
    assert all(intact == "True" and int(begun) > 3 for intact, begun in found.values()), found


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_pooled(world_size, partial(train, **BRIEF | options))
    return results


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        slow(2, [("plain", {}), ("accumulate", {})]),
        slow(3, [("plain", {"replicas": 2, "slots": 6})]),
        (4, [("plain", {"dense": "zero1"})]),
        slow(4, [("own", {})]),
    ],
)
def test_moving_experts_changes_nothing(world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    moving = {"move_at": (1, 2, 3), "slots": 4}
    options = [{"strategy": {"slots": 4, **strategy}, "moving": moving, **CASES[key]} for key, strategy in cases]
    for (key, strategy), ranks in zip(cases, on_one_world(world_size, train, options), strict=True):
        assert ranks[0]["moved_states"] > 0
        assert_same_training(reference(key), ranks, f"{key}, {strategy}")


@pytest.mark.slow
def test_a_checkpoint_after_a_migration_resumes_anywhere(tmp_path: Path) -> None:
    path = str(tmp_path / "moved.ckpt")
    strategy = {"slots": 5}
    run(4, steps=2, strategy=strategy, moving={"move_at": (1,), "slots": 5}, save_to=path)
    for world_size, options in ((1, {}), (2, strategy), (3, {})):
        moving = {"move_at": (3,), "slots": 5} if options else {}
        for result in run(world_size, strategy=options, moving=moving, ckpt_path=path):
            np.testing.assert_allclose(result["losses"], reference("plain")["losses"][2:], rtol=0, atol=TOLERANCE)


def refusals(rank: int, world_size: int) -> list[str]:
    trainer = set_up(rank, world_size, {"slots": 4}, OwnModule())
    messages = []
    rng = np.random.default_rng(0)
    crowded = random_placement(rng, world_size, 6)
    crowded = type(crowded)(replicas=np.ones_like(crowded.replicas))
    for placements in ([crowded], [], [random_placement(rng, world_size + 1, 4)]):
        with pytest.raises(ConfigurationError) as caught:
            trainer.strategy.replace_experts(placements)  # type: ignore[attr-defined]
        messages.append(str(caught.value))
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(rank, world_size, {"slots": 0})
    messages.append(str(caught.value))
    return messages


def test_wrong_placements_are_refused_before_anything_moves() -> None:
    crowded, missing, foreign, none = run_pooled(2, refusals)[0]
    assert "puts 6 experts on rank 0, which keeps 4 slots: raise the strategy's slots" in crowded
    assert "0 placements do not fit the 1 MoE layers of the model" in missing
    assert "has shape (6, 3), but this run needs (6, 2)" in foreign
    assert "slots=0 of ExpertParallelStrategy must be an integer of at least 1" in none


def move_to_neighbours(rank: int, world_size: int) -> tuple[int, int]:
    """States that move and bytes that this rank sends, when rank 1 takes over two experts of ranks 0 and 2."""
    strategy: Any = set_up(rank, world_size, {"slots": 6}, OwnModule()).strategy
    strategy.worlds.set_present(replace(strategy.world, nodes=(0, 0, 1, 1)))
    table = np.zeros((6, world_size), dtype=np.int64)
    table[:, [0, 2]] = 1
    strategy.replace_experts([Placement(replicas=table)])
    table[:2, 1] = 1
    report = strategy.replace_experts([Placement(replicas=table)])
    return report.moved_states, report.sent_bytes


def test_a_source_on_the_own_node_is_taken_when_experts_move_in_training() -> None:
    reports = run_pooled(4, move_to_neighbours)
    assert [moved for moved, _ in reports] == [2] * 4
    sent = [sent for _, sent in reports]
    assert sent[0] > 0
    assert sent[1:] == [0, 0, 0], "rank 2 holds them too, on another node"


def too_few(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        set_up(rank, world_size, {"slots": 2}, OwnModule())
    return str(caught.value)


def test_too_few_slots_for_the_first_placement() -> None:
    assert "slots=2 cannot hold the 3 experts" in run_pooled(2, too_few)[0]


def place_in_a_world_of_unlike_rooms(rank: int, world_size: int) -> list[str | None]:
    """Rank 0 has had more experts than a rank that joins, until both meet in a new world; then a user moves some."""
    world, halves = connect(), Placement(replicas=np.repeat([[1, 0], [0, 1]], 3, axis=0))
    experts = PlacedExperts(OwnModule(), [halves], world)
    if rank == 0:
        grow(experts.layers[0], 5, ())
    experts.enter_world(world, [halves], held_states([halves]), (), [])
    experts.dispatch_among(experts.layers, [halves], world)
    told: list[str | None] = []
    for on_rank_0 in (5, 6):
        replicas = np.array([[int(e < on_rank_0), int(e >= 3)] for e in range(6)])
        try:
            experts.replace([Placement(replicas=replicas)], (), world.nodes, World.single())
            told.append(None)
        except ConfigurationError as error:
            told.append(str(error))
    return told


def test_ranks_that_come_with_unlike_rooms_decide_alike() -> None:
    first, second = run_pooled(2, place_in_a_world_of_unlike_rooms)
    assert first == second == [None, first[1]]
    assert "puts 6 experts on rank 0, which keeps 5 slots" in first[1]
