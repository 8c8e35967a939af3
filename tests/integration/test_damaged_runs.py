"""`moe-train` goes on from directories in which bytes have flipped, and says what that costs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from moe_lightning.checkpoint.loader import find_newest
from tests.commands import TINY, moe_train, write_words

SETTINGS = (
    *TINY,
    "ranks=2",
    "callbacks=partial_experts",
    "callbacks.partial_experts_checkpoint.every_n_steps=1",
    "callbacks.partial_experts_checkpoint.k_snapshot=1",
    "callbacks.partial_experts_checkpoint.k_persist=1",
    "callbacks.partial_experts_checkpoint.save_on_train_end=false",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="checkpoints need shared memory and flock"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run that was gone on with once, so that it has checkpoints of two steps at least."""
    write_words(tmp_path, 3000)
    for steps in (3, 6):
        result = moe_train(tmp_path, *SETTINGS, f"trainer.max_steps={steps}")
        assert result.returncode == 0, result.stderr
    return tmp_path


@pytest.mark.parametrize("kind", ["experts", "dense", "objects", "MANIFEST", ".metadata", "run.json"])
def test_a_flip_anywhere_is_named_and_the_run_goes_on(folder: Path, kind: str) -> None:
    root, dice = folder / "outputs" / "tiny" / "checkpoints", random.Random(kind)
    assert len(list(root.glob("step-*"))) >= 2
    newest = max(root.glob("step-*"))
    candidates = sorted(p for p in [*newest.iterdir(), root / "run.json"] if p.name.startswith(kind))
    path = dice.choice(candidates)
    position = dice.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 2]))
    result = moe_train(folder, *SETTINGS, "trainer.max_steps=8")
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if path.name in line]
    assert len(told) == 1, result.stderr
    assert "Traceback" not in result.stderr
    found = find_newest(root).checkpoint  # passes over a manifest that stays damaged
    assert found.step >= 7
