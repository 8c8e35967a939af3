"""SwinV2-MoE over ranks: one loss sequence on any number of them, with random views, stochastic depth, uneven batches,
replicas, experts that move, partial checkpoints and upcycled weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from tests.distributed.balanced_training import Moving
from tests.distributed.harness import run_pooled
from tests.distributed.training import Recorder, make_trainer, replicas_of
from tests.huggingface_models import inputs_for, logits_of, make_checkpoint

TOLERANCE = 1e-5
STEPS = 6
CLASSES = 12
TINY: dict[str, Any] = {
    "num_classes": CLASSES,
    "image_size": 16,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "mlp_ratio": 2.0,
    "drop_path_rate": 0.3,
    "num_experts": 4,
}
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 2, "decay": "constant"}


class Probe(pl.Callback):
    """Takes the logits of one batch before the first step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.eval()
        with torch.no_grad():
            self.logits = pl_module(inputs_for("swinv2")).numpy()
        pl_module.train()


def train_all(rank: int, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One training after the other, as a process imports transformers but once."""
    return {name: _train(rank, world_size, **case) for name, case in cases.items()}


def _train(
    rank: int,
    world_size: int,
    *,
    config: dict[str, Any] = TINY,
    strategy: dict[str, Any] | None = None,
    steps: int = STEPS,
    checkpoints: str | None = None,
    resume: bool = False,
    moving: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train over the end of an epoch and validate; what a run gives."""
    from moe_lightning import PartialExpertsCheckpoint
    from moe_lightning.data.images import ImageData
    from moe_lightning.models.swin import SwinModule

    recorder, probe = Recorder(), Probe()
    callbacks = [recorder, probe, *([Moving(**moving)] if moving else [])]
    if checkpoints is not None:
        callbacks.append(PartialExpertsCheckpoint(checkpoints, every_n_steps=3))
    trainer = make_trainer(
        rank,
        world_size,
        strategy,
        max_steps=steps,
        gradient_clip_val=1.0,
        val_check_interval=3,
        callbacks=callbacks,
        enable_checkpointing=checkpoints is not None,
    )
    module = SwinModule(config, OPTIMIZER)
    # 22 images are four whole steps of an epoch; 5 over 2 ranks are uneven.
    data = ImageData(image_size=16, global_batch_size=5, num_shapes=22, crop_scale=(0.5, 1.0), seed=3)
    trainer.fit(module, data, ckpt_path=checkpoints if resume else None)
    return {
        "losses": recorder.losses,
        "metrics": {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val/")},
        "logits": probe.logits,
        "replicas": replicas_of(module),
        "moved": sum(callback.moved_states for callback in callbacks if isinstance(callback, Moving)),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case gave on one rank, and on each of two."""
    folder: Path = tmp_path_factory.mktemp("swin")
    dense = make_checkpoint("swinv2", folder / "dense", num_labels=CLASSES)
    upcycled = {
        "num_classes": CLASSES,
        "pretrained": str(folder / "dense"),
        "image_size": 16,
        "drop_path_rate": 0.3,
        "num_experts": 4,
    }
    kept = str(folder / "checkpoints")
    one = run_pooled(1, train_all, {"scratch": {}, "upcycled": {"config": upcycled}})[0]
    two = run_pooled(
        2,
        train_all,
        {
            "scratch": {"strategy": {"dense": "zero1"}},
            "moving": {"strategy": {"slots": 4}, "moving": {"move_at": (2, 4), "slots": 4, "shadows": True}},
            "stopped": {"steps": 3, "checkpoints": kept},
            "resumed": {"checkpoints": kept, "resume": True},
            "upcycled": {"config": upcycled, "strategy": {"replicas": 2}},
        },
    )
    return {"dense": logits_of(dense, inputs_for("swinv2")).numpy(), "one": one, "two": two}


def assert_same_training(reference: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    seen: dict[str, bytes] = {}
    for result in ranks:
        np.testing.assert_allclose(result["losses"], reference["losses"], rtol=0, atol=TOLERANCE)
        assert result["metrics"] == pytest.approx(reference["metrics"], abs=TOLERANCE)
        for name, experts in result["replicas"].items():
            for expert, content in experts.items():
                assert seen.setdefault(f"{name}/{expert}", content) == content, f"{name} of expert {expert}"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scratch", "moving"])
def test_one_loss(case: str, runs: dict[str, Any]) -> None:
    reference = runs["one"]["scratch"]
    assert len(reference["losses"]) == STEPS
    assert set(reference["metrics"]) == {"val/loss", "val/accuracy", "val/top_5_accuracy"}
    assert_same_training(reference, [rank[case] for rank in runs["two"]])
    assert all((rank[case]["moved"] > 0) == (case == "moving") for rank in runs["two"])


@pytest.mark.slow
def test_a_run_goes_on_from_a_partial_checkpoint(runs: dict[str, Any]) -> None:
    """In the middle of an epoch, with the views that it would have seen."""
    reference = runs["one"]["scratch"]
    for rank in runs["two"]:
        joined = rank["stopped"]["losses"] + rank["resumed"]["losses"]
        assert len(rank["stopped"]["losses"]) == 3
        np.testing.assert_allclose(joined, reference["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_upcycled(runs: dict[str, Any]) -> None:
    """At step 0 the logits are those of the dense model, on any number of ranks; then there is one loss sequence."""
    reference, ranks = runs["one"]["upcycled"], [rank["upcycled"] for rank in runs["two"]]
    for result in (reference, *ranks):
        np.testing.assert_allclose(result["logits"], runs["dense"], rtol=0, atol=TOLERANCE)
    assert_same_training(reference, ranks)
    assert reference["losses"][-1] != reference["losses"][0]
