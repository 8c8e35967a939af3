"""The validation loss of each source of a mixture: that of its held-out samples alone, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.data.text import TextData, TokenWindows
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, make_trainer
from tests.parameters import slow

NAMES = ("prose", "digits", "small")


def _validate(rank: int, world_size: int, folder: Path, mesh: dict[str, int], packing: bool) -> dict[str, float]:
    data = TextData(
        source=[str(folder / f"{name}.txt") for name in NAMES],
        context_length=16,
        global_batch_size=6,
        cache_dir=folder / "cache",
        val_fraction=0.2,
        packing=packing,
        end_of_document=10 if packing else None,
    )
    module = GPTModule({**TINY, "vocab_size": 256, "tie_embeddings": False}, OptimizerConfig(warmup_steps=0))
    trainer = make_trainer(rank, world_size, {"mesh": mesh} if mesh else None)
    (found,) = trainer.validate(module, datamodule=data, verbose=False)
    losses = {name: float(value) for name, value in found.items() if name.startswith("val/")}
    if world_size == 1 and not packing:
        for name, corpus in zip(NAMES, data.corpora, strict=True):
            windows = TokenWindows(corpus.val, 16)
            with torch.no_grad():
                by_hand = module.loss(tuple(default_collate([windows[i] for i in range(len(windows))])))
            assert losses[f"val/{name}/loss"] == pytest.approx(float(by_hand), abs=1e-5)
        own = module.loss
        module.loss = lambda batch: 2 * own(batch)  # type: ignore[method-assign]
        (doubled,) = trainer.validate(module, datamodule=data, verbose=False)
        assert {name: value / losses[name] for name, value in doubled.items() if name in losses} == pytest.approx(
            {name: 2.0 if name == "val/loss" else 1.0 for name in losses}
        )
    return losses


@pytest.mark.parametrize("packing", [slow(False), True])
@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_each_source_has_a_loss_of_its_own(mesh: dict[str, int], packing: bool, tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("".join(f"line {i} of some prose\n" for i in range(60)))
    (tmp_path / "digits.txt").write_text("".join(f"{i * i}\n" for i in range(120)))
    (tmp_path / "small.txt").write_text("the least of them all\n" * 5)
    arguments: tuple[Any, ...] = tmp_path, {}, packing
    (alone,) = run_pooled(1, _validate, *arguments)
    assert set(alone) == {"val/loss", *(f"val/{name}/loss" for name in NAMES)}
    assert len(set(alone.values())) == 4
    for found in run_pooled(2, _validate, tmp_path, mesh, packing):
        assert found == pytest.approx(alone, abs=1e-5)
