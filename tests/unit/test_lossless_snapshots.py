"""Snapshots that are taken over several steps: in the arena, on storage, and read again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.contents import file_group, most_frozen_pieces, window_pieces
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.loader import Checkpoint, find_usable
from moe_lightning.checkpoint.manifest import Manifest, check_coverage
from moe_lightning.checkpoint.recovery_plan import (
    HeldExpert,
    Origin,
    RankInventory,
    SnapshotInventory,
    StorageInventory,
    plan_recovery,
)
from moe_lightning.checkpoint.schedule import ReplayWindow, most_frozen, plan_window, window_bytes, window_length
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.cli.ckpt import main
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import StatePiece, is_replayed
from tests.unit.checkpoint_state import EXPERTS, LAYERS, whole_state

LAST = 4


def pieces_of(step: int) -> dict[str, StatePiece]:
    return {key: StatePiece.of(key, tensor) for key, tensor in whole_state(step).items()}


@pytest.fixture
def snapshotter(tmp_path: Path) -> Snapshotter:
    (tmp_path / "arenas").mkdir(mode=0o700)
    state = pieces_of(0)
    state |= most_frozen_pieces(state, EXPERTS, 1, torch.bfloat16)
    path = arena_path(tmp_path / "arenas", 0)
    return Snapshotter(path, run="run", session="1", rank=0, world_size=1, state=state, objects=1, object_bytes=4096)


def window_from(first: int) -> ReplayWindow:
    return plan_window(first, np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)[:, ::-1], 1)


def take(snapshotter: Snapshotter, first: int, *, until: int | None = None) -> None:
    """The snapshots of a window, or only those up to a step."""
    window = window_from(first)
    for step in range(first, (window.last if until is None else until) + 1):
        pieces = window_pieces(window, step, pieces_of(step), torch.bfloat16)
        groups = {key: file_group(piece, window) for key, piece in pieces.items()}
        if step == first:
            extra = {"num_layers": LAYERS, "num_experts": EXPERTS, "replayed_from": first}
            snapshotter.start(
                step, pieces, objects={"trainer": {"at": step}}, groups=groups, extra=extra, until=window.last
            )
        else:
            snapshotter.add(step, pieces, groups=groups)
        snapshotter.wait_before_update()
    snapshotter.finish()


@pytest.fixture
def root(tmp_path: Path, snapshotter: Snapshotter) -> Path:
    """A checkpoint of everything after step 0, and one of the window of steps 1 to 4."""
    agent = Agent(tmp_path / "arenas", tmp_path / "checkpoints", retry_s=0.0)
    snapshotter.start(0, pieces_of(0), objects={"trainer": {"at": 0}})
    snapshotter.finish()
    while agent.serve_once():
        pass
    take(snapshotter, 1)
    while agent.serve_once():
        pass
    snapshotter.close()
    return tmp_path / "checkpoints"


def test_a_window_is_published_with_its_last_step(tmp_path: Path, snapshotter: Snapshotter) -> None:
    for _ in range(4):  # given up in the middle as often as one likes: no block is lost
        take(snapshotter, 1, until=3)
        assert snapshotter.arena.tables() == []
    take(snapshotter, 1)
    (table,) = snapshotter.arena.tables()
    assert (table.first_step, table.step, snapshotter.newest_step) == (1, LAST, LAST)
    for first in (5, 9, 13):
        take(snapshotter, first)
        take(snapshotter, first + 4, until=first + 5)
        assert max(table.step for table in snapshotter.arena.tables()) == first + 3
    snapshotter.close()


def test_a_window_that_is_given_up_in_the_buffer_of_the_newest_snapshot(snapshotter: Snapshotter) -> None:
    arena = snapshotter.arena
    for step in (1, 2):
        snapshotter.start(step, pieces_of(step))
        snapshotter.finish()
        arena.transition(lambda s, step=step: s.start_persist(step))  # type: ignore[misc]
        if step == 1:
            arena.transition(lambda s: s.finish_persist())
    snapshotter.start(3, pieces_of(3))
    snapshotter.finish()
    assert snapshotter.newest_step == 3
    take(snapshotter, 4, until=5)
    snapshotter.give_up()
    assert snapshotter.newest_step == max(table.step for table in arena.tables()) == 2


def test_every_step_of_a_window_can_be_read(root: Path) -> None:
    checkpoint = find_usable(root).checkpoint
    checkpoint.verify()
    assert (checkpoint.first_step, checkpoint.step) == (1, LAST)
    assert checkpoint.read_object("trainer") == {"at": 1}
    window = window_from(1)
    np.testing.assert_array_equal(checkpoint.expert_versions(), 1 + window.turns)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            turn = 1 + int(window.turns[layer, expert])
            for key in (f"expert/{layer}/{expert}/weight/w1", f"expert/{layer}/{expert}/weight/b"):
                torch.testing.assert_close(checkpoint.read(key), whole_state(turn)[key], rtol=0, atol=0)
                for step in range(1, turn):
                    found = checkpoint.read(checkpoint.key_at(key, step))
                    torch.testing.assert_close(found, whole_state(step)[key].bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(checkpoint.read("dense/embedding/weight"), whole_state(1)["dense/embedding/weight"])
    assert checkpoint.manifest.new_bytes == checkpoint.manifest.payload_bytes  # nothing is carried over


def test_weights_of_a_step_that_are_missing_are_found(root: Path) -> None:
    manifest = checkpoints(root)[0][1]
    assert Manifest.parse(manifest.dump(), "it") == manifest
    for gone in [piece.key for piece in manifest.stored if is_replayed(piece.key)]:
        with pytest.raises(CheckpointError, match="lacks its weights of step"):
            check_coverage([p for p in manifest.stored if p.key != gone], extra=manifest.extra)


def test_a_damaged_window_gives_way_to_the_checkpoint_before(root: Path) -> None:
    path, manifest = checkpoints(root)[0]
    piece = next(p for p in manifest.stored if p.key.startswith("expert/0/1/"))
    with (path / piece.at.file).open("r+b") as file:
        file.seek(piece.at.data_offset)
        file.write(b"\x7f\x7f")
    found = find_usable(root)
    assert found.checkpoint.step == 0
    assert "is damaged" in found.problems[0]


def test_the_command_line_says_what_a_window_is(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a restore goes back to step 1 and runs 3 steps again" in told
    target = tmp_path / "model.safetensors"
    assert main(["export", str(root), str(target)]) == 0
    assert "the model after step 1" in capsys.readouterr().out
    tensors = load_file(target)
    assert not any("exp_avg" in key or is_replayed(key) for key in tensors)
    for key, tensor in tensors.items():
        frozen = key.startswith("expert/") and key.split("/")[2] != str(EXPERTS - 1)  # the first turn is the last's
        wanted = whole_state(1)[key]
        torch.testing.assert_close(tensor, wanted.bfloat16().float() if frozen else wanted, rtol=0, atol=0)
    assert main(["verify", str(root)]) == 0


def test_a_run_that_ends_with_a_window_has_steps_to_run_again(root: Path) -> None:
    directory = RunDirectory(root.parent)
    assert directory.has_reached(LAST) is None
    reached = directory.has_reached(1)
    assert reached.step == LAST


def test_a_window_never_claims_to_begin_after_its_end(root: Path) -> None:
    manifest = checkpoints(root)[0][1]
    forged = replace(manifest, extra=manifest.extra | {"replayed_from": 99})
    assert forged.first_step == LAST
    assert Checkpoint(root / f"step-{LAST:08d}").first_step == 1


# ----------------------------------------------------------------------
# Windows of sparse snapshots: a toy training that is replayed from them ends exactly where it was.


class Toy:
    """Experts with a weight and a moment each, and a dense number; every update depends on all weights."""

    def __init__(self, layers: int, experts: int) -> None:
        self.weight = np.linspace(0.1, 1.0, layers * experts).reshape(layers, experts)
        self.moment = np.zeros((layers, experts))
        self.dense = np.array(0.5)

    def step(self, sample: float) -> None:
        gradient = np.sin(self.weight * sample + self.dense)
        gradient /= np.sqrt((gradient**2).sum() + self.dense**2)  # clipped by the norm of everything
        self.dense = self.dense - 0.01 * gradient.sum()
        self.moment = 0.9 * self.moment + gradient
        self.weight = self.weight - 0.1 * self.moment


@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 8), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_replay_ends_where_the_window_ended(layers: int, experts: int, k: int, first: int, random: object) -> None:
    tokens = np.array([[random.randrange(4) for _ in range(experts)] for _ in range(layers)])  # type: ignore[attr-defined]
    window = plan_window(first, tokens, k)
    assert window.last - window.first + 1 == window_length(experts, k)
    samples = [random.random() for _ in range(window.last)]  # type: ignore[attr-defined]
    toy, snapshots = Toy(layers, experts), {}
    for step in range(window.last + 1):
        if step:
            toy.step(samples[step - 1])
        if step >= first:
            whole, frozen = window.whole_at(step), window.frozen_at(step)
            held = whole | frozen
            snapshots[step] = np.where(held, toy.weight, np.nan), np.where(whole, toy.moment, np.nan), toy.dense
    replayed = Toy(layers, experts)
    replayed.dense = snapshots[first][2]
    for step in range(first, window.last + 1):
        if step > first:
            replayed.step(samples[step - 1])
        weight, moment, _ = snapshots[step]
        replayed.weight = np.where(np.isnan(weight), replayed.weight, weight)
        replayed.moment = np.where(np.isnan(moment), replayed.moment, moment)
    for name in ("weight", "moment", "dense"):
        np.testing.assert_array_equal(getattr(replayed, name), getattr(toy, name))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_every_expert_has_one_turn_and_popular_ones_come_last(experts: int, k: int, first: int) -> None:
    tokens = np.arange(experts)[None] * 7 % 11
    window = plan_window(first, tokens, k)
    steps = range(window.first, window.last + 1)
    assert (sum(window.whole_at(step).astype(int) for step in steps) == 1).all()
    assert all(window.whole_at(step).sum() <= k for step in steps)
    assert (np.diff(tokens[0][np.argsort(window.turns[0], kind="stable")][::k]) >= 0).all()
    for number in range(1, experts + 1):
        best = max(sum(chosen) for chosen in itertools.combinations(window.turns[0].tolist(), number))
        assert most_frozen(experts, k, number) == best
    sizes = window_bytes(
        num_layers=1, num_experts=experts, k=min(k, experts), dense_bytes=100, expert_bytes=12, weight_bytes=2
    )
    assert sizes == tuple(
        100 * (step == first) + 12 * window.whole_at(step).sum() + 2 * window.frozen_at(step).sum() for step in steps
    )


def inventories(*steps: tuple[int, int], live: int = -1) -> list[RankInventory]:
    """One rank whose node holds windows, (first, last) step each, of two experts."""
    snapshots = [
        SnapshotInventory(
            kind=Origin.ARENA,
            writer=0,
            session="1",
            step=last,
            resumes_at=first,
            world_size=1,
            experts=(HeldExpert(0, 0, first, first), HeldExpert(0, 1, last, last)),
        )
        for first, last in steps
    ]
    return [RankInventory(rank=0, node="", live_version=live, experts=((0, 0),), snapshots=tuple(snapshots))]


def test_the_newest_window_is_chosen_whole() -> None:
    plan = plan_recovery(inventories((2, 4), (5, 7)), None, num_layers=1, num_experts=2)
    assert (plan.level, plan.version, plan.resumes_at, plan.stale) == ("memory", 7, 5, {})
    assert {(read.expert, read.step) for read in plan.reads} == {(None, 7), ((0, 0), 7), ((0, 1), 7)}


def test_a_window_goes_before_live_state_that_lost_an_expert() -> None:
    plan = plan_recovery(inventories((5, 7), live=9), None, num_layers=1, num_experts=2)
    assert (plan.level, plan.resumes_at, plan.stale) == ("memory", 5, {})


def test_a_shard_that_is_lost_does_not_come_from_the_first_step_of_a_window() -> None:
    """What is no expert is older in a window than the step that it is called."""
    (mine,) = inventories((5, 7), live=7)
    shards = {"sharded_dense": ("head",), "experts": ((0, 0), (0, 1))}
    plan = plan_recovery([replace(mine, **shards)], None, num_layers=1, num_experts=2)
    assert (plan.level, plan.resumes_at, plan.stale) == ("memory", 5, {})
    kept = plan_recovery([replace(mine, **shards, owned_dense=("head",))], None, num_layers=1, num_experts=2)
    assert (kept.level, kept.resumes_at) == ("live", 7)


def test_a_window_on_storage_loses_nothing() -> None:
    stored = StorageInventory(session="1", step=7, resumes_at=5, versions=((5, 7),))
    plan = plan_recovery(inventories((2, 4)), stored, num_layers=1, num_experts=2)
    assert (plan.level, plan.version, plan.resumes_at, plan.stale) == ("storage", 7, 5, {})
