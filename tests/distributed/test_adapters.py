"""Adapters over ranks: one loss sequence wherever the frozen experts lie, checkpoints of adapters only, and a base
that must be the same when they come back.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from moe_lightning import GPTModule
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.cli.saved_model import _Directory
from moe_lightning.moe.adapters import add_adapters
from tests.distributed import balanced_training
from tests.distributed.harness import RankFailure, run_pooled, run_ranks
from tests.distributed.same_training import assert_same_training
from tests.distributed.training import TINY, RandomTokens, make_trainer, train
from tests.parameters import slow

OPTIMIZER = {"lr": 1e-2, "eps": 1e-6, "warmup_steps": 1, "decay": "constant"}
STEPS = 5
SOME_TWICE = {"placement": [[1, 0], [1, 1], [0, 1], [1, 1], [0, 1], [1, 0]], "slots": 5}
ALL_TWICE = {"replicas": 2, "slots": 5, "dense": "zero1"}


class Adapted(GPTModule):
    """A tiny GPT that trains its adapters."""

    adapter: ClassVar[dict[str, Any]] = {"rank": 4}

    def __init__(self) -> None:
        super().__init__(TINY, OPTIMIZER)

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            super().configure_model()
            add_adapters(self.model, self.adapter)


class Untied(Adapted):
    """One that can be cut in stages."""

    def __init__(self) -> None:
        GPTModule.__init__(self, TINY | {"tie_embeddings": False}, OPTIMIZER)


class OtherBase(Adapted):
    """The same beside another embedding, and then beside another expert."""

    changed: ClassVar[str] = "embedding"

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        GPTModule.configure_model(self)
        if self.changed == "embedding":
            with torch.no_grad():
                self.model.token_embedding.weight[0, 0] += 1.0
        else:
            self.model.blocks[0].feed_forward.experts.init_seed += 1
        add_adapters(self.model, self.adapter)


class OtherExperts(OtherBase):
    changed = "experts"


class Everywhere(Adapted):
    """Adapters wherever they can be, beside experts in four bits."""

    adapter: ClassVar[dict[str, Any]] = {"kind": "qlora", "rank": 4, "targets": ["experts", "attention", "router"]}


class OneGroup(Adapted):
    """The same with everything that it has in an optimizer, frozen weights and their digests too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


MODULES = {
    "lora": Adapted,
    "qlora": Everywhere,
    "embedding": OtherBase,
    "experts": OtherExperts,
    "one group": OneGroup,
}


@pytest.fixture(scope="module", params=["lora", slow("qlora")])
def alone(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, run_pooled(1, fit, request.param, {})[0]


def fit_moving(rank: int, world_size: int, kind: str, shadows: bool) -> dict[str, Any]:
    """The same while experts move and, with `shadows`, have shadows on other ranks."""
    options = {"own_module": MODULES[kind], "strategy": {"replicas": 2, "slots": 6}, "steps": STEPS}
    return balanced_training.train(rank, world_size, moving={"move_at": (1, 3), "shadows": shadows}, **options)


def fit(rank: int, world_size: int, kind: str, strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A training of adapters; what `train` returns."""
    return train(rank, world_size, own_module=MODULES[kind], strategy=strategy, **{"steps": STEPS} | options)


def fit_saved(
    rank: int,
    world_size: int,
    kind: str,
    root: str,
    steps: int,
    resume: bool,
    *,
    averages: bool = False,
    precision: str = "32-true",
) -> dict[str, Any]:
    """The same with partial checkpoints, from the last one on."""
    saver = PartialExpertsCheckpoint(root, every_n_steps=1, k_snapshot=4, k_persist=2)
    callbacks = [saver, EMAWeightAveraging(decay=0.5)] if averages else [saver]
    trainer = {"enable_checkpointing": True, "precision": precision}
    strategy = SOME_TWICE if world_size > 1 else {}
    resumed = {"ckpt_path": root} if resume else {}
    return fit(rank, world_size, kind, strategy, steps=steps, callbacks=callbacks, trainer=trainer, **resumed)


@pytest.mark.parametrize(("world_size", "strategy"), [(2, SOME_TWICE), slow(4, ALL_TWICE)])
def test_same_loss(alone: tuple[str, dict[str, Any]], world_size: int, strategy: dict[str, Any]) -> None:
    kind, reference = alone
    assert reference["losses"][-1] < reference["losses"][0] - 0.01, "nothing was learned, so nothing was tested"
    assert_same_training(reference, run_pooled(world_size, fit, kind, strategy), kind)


@pytest.mark.slow
def test_same_loss_while_experts_move(alone: tuple[str, dict[str, Any]]) -> None:
    kind, reference = alone
    ranks = run_ranks(4, fit_moving, kind, kind == "lora")
    assert ranks[0]["moved_states"] > 0
    assert_same_training(reference, ranks, kind)
    if kind == "qlora":
        with pytest.raises(RankFailure, match="shadows of experts in four bits"):
            run_ranks(2, fit_moving, kind, True)


@pytest.mark.slow
def test_checkpoints_hold_adapters_only_and_know_their_base(alone: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    kind, reference = alone
    root = str(tmp_path / "checkpoints")
    run_ranks(2, fit_saved, kind, root, 3, False)
    checkpoint = find_newest(Path(root)).checkpoint
    weights = [key for key in checkpoint.keys() if "/master/" in key or key.endswith(("/weight", "/buffer"))]  # noqa: SIM118
    assert weights
    assert all("lora_" in key or "base_digest" in key for key in weights), "a frozen weight was written"
    if kind == "lora":
        for other in ("embedding", "experts"):
            with pytest.raises(RankFailure, match="trained beside other base weights"):
                run_ranks(1, fit_saved, other, root, STEPS, True)
    resumed = run_ranks(1, fit_saved, kind, root, STEPS, True)[0]
    np.testing.assert_allclose(resumed["losses"], reference["losses"][3:], rtol=0, atol=1e-5)


def validated(rank: int, world_size: int) -> float:
    stages = {"mesh": {"pp": 2}, "micro_batches": 4} if world_size > 1 else {}
    samples = 3 * stages.get("micro_batches", 1)
    trainer = make_trainer(rank, world_size, stages, max_steps=3, accumulate_grad_batches=12 // samples)
    module = Untied()
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=samples))
    (scores,) = trainer.validate(module, DataLoader(RandomTokens(30), batch_size=9), verbose=False)
    return scores["val/loss"]


@pytest.mark.slow
def test_a_pipeline_trains_adapters_and_validates_them() -> None:
    (alone,) = run_pooled(1, validated)
    assert run_pooled(2, validated) == pytest.approx([alone, alone], abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "saved", "resumed"),
    [
        ("lora", {"precision": "bf16-true"}, {"precision": "bf16-true"}),
        ("lora", {"averages": True}, {}),
        ("one group", {"averages": True}, {"averages": True}),
    ],
    ids=["bf16-true", "averages to the weights", "averages of one group"],
)
def test_digests_are_read_beside_adapters(
    kind: str, saved: dict[str, Any], resumed: dict[str, Any], tmp_path: Path
) -> None:
    """They keep their dtype in any precision, and have no averages."""
    root = str(tmp_path / "checkpoints")
    run_pooled(1, partial(fit_saved, **saved), kind, root, 2, False)
    newest = find_newest(Path(root)).checkpoint
    model = _Directory(newest)
    digests = [name for name in ("base_digest", "lora_w_up_a") if len(model.experts(0, "", name, TINY["num_experts"]))]
    assert digests == ["base_digest", "lora_w_up_a"]
    assert len(run_pooled(1, partial(fit_saved, **resumed), kind, root, 4, True)[0]["losses"]) == 2
