"""Experts that are edited in a running fit become what an edited checkpoint has, and train on alike on any ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from moe_lightning.callbacks.expert_edits import ExpertEdits
from moe_lightning.checkpoint.files import read_file
from moe_lightning.cli.expert_edits import edit_file, parse_edits
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.test_partial_checkpoint import KillAt, let_the_agent_finish, root, run, saver
from tests.distributed.training import train

__all__ = ["root"]

EDITS = [
    {"step": 3, "layers": [0], "prune": [1]},
    {"step": 3, "layers": [1], "prune": [4]},
    {"step": 3, "merge": [[0, 3]], "duplicate": [2, 5, 5]},
]
WORDS: dict[str, Any] = {"prune": ["0:1", "1:4"], "merge": ["0+3"], "duplicate": ["2,5,5"]}


class Save(pl.Callback):
    """Saves before the edits of a step, and after them, before the next step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def edited(rank: int, world_size: int, *, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """A training with edits, and what it told."""
    edits = ExpertEdits(EDITS)
    saves = [] if folder is None else [Save(folder / "before.ckpt"), Save(folder / "after.ckpt")]
    found = train(rank, world_size, callbacks=[*saves[:1], edits, *saves[1:]], **options)
    return found | {"reports": edits.reports}


def test_a_live_edit_is_that_of_a_file_and_the_loss_goes_on_alike(tmp_path: Path) -> None:
    two = run_ranks(2, partial(edited, steps=6, folder=tmp_path, strategy={"copies": 2}))
    one = run_ranks(1, partial(edited, steps=6))[0]
    (report,) = one["reports"]
    assert report.experts == (6, 7)
    assert report.losses[0] != report.losses[1]
    np.testing.assert_allclose(two[0]["reports"][0].losses, report.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(two[0]["losses"], one["losses"], rtol=0, atol=1e-5)
    for name, held in two[0]["replicas"].items():
        assert held == two[1]["replicas"][name], name

    before, live = (read_file(tmp_path / f"{name}.ckpt") for name in ("before", "after"))
    (counts,) = (state["counts"] for name, state in before["callbacks"].items() if name.startswith("ExpertEdits"))
    edit_file(tmp_path / "before.ckpt", tmp_path / "file.ckpt", partial(parse_edits, **WORDS), loads_LE=counts.numpy())
    by_file = read_file(tmp_path / "file.ckpt")
    assert live["hyper_parameters"] == by_file["hyper_parameters"]
    assert live["state_dict"].keys() == by_file["state_dict"].keys()
    for name, value in by_file["state_dict"].items():
        assert torch.equal(live["state_dict"][name], value), name
    for number, entry in by_file["optimizer_states"][0]["state"].items():
        for name, value in entry.items():
            assert torch.equal(live["optimizer_states"][0]["state"][number][name], value), (number, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, {"dense": "zero1"}),
        (4, {"copies": 2, "slots": 6}),
        (4, {"copies": 1, "mesh": {"cp": 2}}),
    ],
    ids=str,
)
def test_the_loss_goes_on_alike_on_any_mesh(ranks: int, strategy: dict[str, Any]) -> None:
    one = run_ranks(1, partial(edited, steps=6))[0]
    many = run_ranks(ranks, partial(edited, steps=6, strategy=strategy))[0]
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(many["reports"][0].losses, one["reports"][0].losses, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_edited_run_resumes_on_other_ranks_from_before_and_after_the_edit(tmp_path: Path) -> None:
    whole = run_ranks(2, partial(edited, steps=6))[0]
    for steps, ranks in ((3, 1), (4, 3), (4, 1)):
        path = str(tmp_path / f"{steps}.ckpt")
        run_ranks(2, partial(edited, steps=steps, save_to=path))
        found = run_ranks(ranks, partial(edited, steps=6, ckpt_path=path))[0]
        assert len(found["reports"]) == (steps == 3)
        np.testing.assert_allclose(found["losses"], whole["losses"][steps:], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "saved"), [(3, 1), (5, 4)])
def test_partial_checkpoints_of_before_and_after_an_edit_are_resumed(root: Path, killed: int, saved: int) -> None:
    whole = run(2, [ExpertEdits(EDITS)], steps=8)[0]
    make = partial(saver, root, k_snapshot=2, k_persist=1)
    with pytest.raises(RankFailure):
        run(2, [make(), ExpertEdits(EDITS), KillAt(killed, (0, 1))], steps=100)
    let_the_agent_finish(root)  # every expert of step 1, or of step 4, the first after the edit
    edits = ExpertEdits(EDITS)
    resumed = run(1, [make(), edits], steps=8, ckpt_path=str(root))[0]
    np.testing.assert_allclose(resumed["losses"], whole["losses"][saved:], rtol=0, atol=1e-5)
