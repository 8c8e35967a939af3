"""Snapshots that are taken over several steps: in the arena, on storage, and read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.contents import file_group, most_frozen_pieces, window_pieces
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.loader import Checkpoint, find_usable
from moe_lightning.checkpoint.manifest import Manifest, check_coverage
from moe_lightning.checkpoint.schedule import ReplayWindow, plan_window
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


def test_every_step_of_a_window_can_be_read(root: Path) -> None:
    checkpoint = find_usable(root).checkpoint
    assert checkpoint is not None
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
    assert manifest.dump().startswith(b'{"format":2,')
    assert checkpoints(root)[1][1].dump().startswith(b'{"format":1,')
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
    assert found.checkpoint is not None
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
    assert reached is not None
    assert reached.step == LAST


def test_a_window_never_claims_to_begin_after_its_end(root: Path) -> None:
    manifest = checkpoints(root)[0][1]
    forged = replace(manifest, extra=manifest.extra | {"replayed_from": 99})
    assert forged.first_step == LAST
    assert Checkpoint(root / f"step-{LAST:08d}").first_step == 1
