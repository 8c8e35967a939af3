"""All ranks resume from one step, however late one of them is and whatever the agent of the killed run commits
meanwhile."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.io import TorchCheckpointIO

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.commit import prune, try_commit
from moe_lightning.checkpoint.directory import checkpoints, newest_world
from moe_lightning.checkpoint.storage.posix import PosixStorage
from moe_lightning.errors import CheckpointError
from tests.distributed.harness import run_pooled
from tests.distributed.test_partial_checkpoint import WITH_CHECKPOINTS, run, saver
from tests.distributed.training import train
from tests.forks import wait_until
from tests.parameters import slow, soak

RANKS, EARLIER, LATER = 2, 1, 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two steps of a run."""
    root = tmp_path_factory.mktemp("trained") / "checkpoints"
    run(RANKS, [saver(root, save_on_train_end=False, keep_last=5), Settled()], steps=LATER)
    assert [manifest.step for _, manifest in checkpoints(root)] == [LATER, EARLIER]
    return root


class Settled(pl.Callback):
    """Ends no step before the checkpoint that was begun in an earlier one is committed."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        saver_ = next(c for c in trainer.callbacks if isinstance(c, PartialExpertsCheckpoint))  # type: ignore[attr-defined]
        session = saver_.session
        if session is not None:
            session.finish_copy()
            wait_until(lambda: session.status().committed_step == saver_._saved_at, "it was not committed")


def about_to_commit(trained: Path, root: Path, *, without_older: bool) -> None:
    """A copy of a run in which the agent still holds the checkpoint of the later step, complete but for its name."""
    shutil.copytree(trained, root)
    newest, older = (path for path, _ in checkpoints(root))
    manifest = checkpoints(root)[0][1]
    newest.rename(PosixStorage().staging(root, manifest.session, manifest.step, newest_world(root)))
    if without_older:
        shutil.rmtree(older)


def agent_commits(trained: Path, root: Path, keep_last: int) -> None:
    """What the killed run's agent does next."""
    manifest = checkpoints(trained)[0][1]
    with contextlib.suppress(CheckpointError):  # where a newer world has begun, it is void
        if try_commit(root, manifest.session, manifest.step, RANKS, world=manifest.world) is not None:
            prune(root, keep_last)


class Late(PartialExpertsCheckpoint):
    """A rank looks for checkpoints only when the other one has looked, or waits for it; before that the agent of the
    killed run commits."""

    def __init__(self, root: Path, trained: Path, *, late: int, commits: str, keep_last: int) -> None:
        super().__init__(str(root), every_n_steps=100, save_on_train_end=False, keep_last=keep_last)
        self.trained, self.late, self.commits, self.keep_last = trained, late, commits, keep_last

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        rank = trainer.global_rank
        seen = self._root.parent / "looked"
        commit = partial(agent_commits, self.trained, self._root, self.keep_last)
        if rank == self.late:
            wait_until(seen.exists, "the other rank neither looked nor waited")
            if self.commits == "between":
                commit()
            return super()._find_last_checkpoints(trainer)
        if self.commits == "before":
            commit()
        enter = trainer.strategy.setup_environment

        def meet() -> None:
            seen.touch()
            enter()

        trainer.strategy.setup_environment = meet  # type: ignore[method-assign]
        found = super()._find_last_checkpoints(trainer)
        seen.touch()
        if self.commits == "after":
            commit()
        return found


class FirstStep(pl.Callback):
    """Remembers the step that its rank continues from."""

    step = -1

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step


def resumed_step(rank: int, world_size: int, root: Path, trained: Path, **options: Any) -> int:
    first = FirstStep()
    callbacks = [Late(root, trained, **options), first]
    train(rank, world_size, callbacks=callbacks, trainer=WITH_CHECKPOINTS, steps=LATER + 1, ckpt_path="last")
    return first.step


def check_round(trained: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    root, without_older = tmp_path / "checkpoints", seed % 2 == 0
    about_to_commit(trained, root, without_older=without_older)
    commits = ("between", "between", "after", "before")[seed // 4 % 4]
    late, keep_last = seed // 2 % 2, rng.choice([1, 2])
    options: dict[str, Any] = {"late": late, "commits": commits, "keep_last": keep_last}
    steps = run_pooled(RANKS, partial(resumed_step, root=root, trained=trained, **options))
    assert steps in ([LATER] * 2, [0 if without_older else EARLIER] * 2), options
    if commits == "before":
        assert steps == [LATER] * 2


@pytest.mark.parametrize("seed", [2, *map(slow, [0, 1, *range(3, 10)]), *map(soak, range(10, 40))])
def test_all_ranks_resume_from_one_step(trained: Path, tmp_path: Path, seed: int) -> None:
    check_round(trained, tmp_path, seed)


def verified_bytes(rank: int, world_size: int, root: Path) -> int:
    """Bytes that a rank compares with checksums in a resume."""
    count, chunks = [0], PosixStorage.chunks

    def counted(*args: Any, **options: Any) -> Iterator[bytes]:
        for chunk in chunks(*args, **options):
            count[0] += len(chunk)
            yield chunk

    with patch.object(PosixStorage, "chunks", counted):
        train(rank, world_size, callbacks=[], trainer=WITH_CHECKPOINTS, steps=LATER + 1, ckpt_path=str(root))
    return count[0]


def test_the_ranks_of_a_machine_verify_a_checkpoint_together(trained: Path) -> None:
    """One rank would take longer for a large one than the others may wait."""
    found = run_pooled(RANKS, partial(verified_bytes, root=trained))
    whole = checkpoints(trained)[0][1].disk_bytes
    assert sum(found) == whole
    assert max(found) < whole


class OwnFormat(TorchCheckpointIO):
    """Reads files that Lightning does not write."""

    def load_checkpoint(self, path: Any, *_: Any, **options: Any) -> dict[str, Any]:
        raise AssertionError(f"{path} is no file of this plugin")


def resumed_beside_plugin(rank: int, world_size: int, path: str) -> int:
    first, trainer = FirstStep(), {**WITH_CHECKPOINTS, "plugins": [OwnFormat()]}
    train(rank, world_size, callbacks=[first], trainer=trainer, steps=LATER + 1, ckpt_path=path)
    return first.step


@pytest.mark.parametrize("name", [".", "step-00000003", "step-00000003/MANIFEST.json"])
def test_directories_are_not_read_by_a_plugin_for_files(trained: Path, name: str) -> None:
    assert run_pooled(1, partial(resumed_beside_plugin, path=str(trained / name))) == [LATER]
