"""The laws with everything on: experts move, visit and are planned for, and the training is the same (L1 to L3)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.errors import ConfigurationError
from tests.distributed import training
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import (
    CASES,
    TOLERANCE,
    assert_same_training,
    on_one_world,
    reference,
)
from tests.distributed.training import BRIEF, OwnModule, make_trainer
from tests.parameters import slow

# Slow experts on fast links: shadows pay, and every run plans alike.
EAGER = {"calibrate": False, "flops_per_s": 1e6, "bytes_per_s": 1e12, "speeds": "even"}


def balanced(rank: int, world_size: int, *, balancer: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A training under a balancer, and the sums and last values of what it logged."""
    watcher = Watcher()
    callbacks = [LoadBalancer(**balancer), watcher]
    result = training.train(rank, world_size, callbacks=callbacks, **BRIEF | options)
    names = ("moved", "shadows", "shadow_bytes", "metrics")
    return result | {name: getattr(watcher, name) for name in names}


class Watcher(pl.Callback):
    def __init__(self) -> None:
        self.moved = self.shadows = self.shadow_bytes = 0.0
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("balance/")}
        self.moved += found.get("balance/migrated_states", 0.0)
        self.shadows += sum(value for name, value in found.items() if name.endswith("shadows_count"))
        self.shadow_bytes += found.get("balance/shadow_bytes", 0.0)
        self.metrics |= found


def run(world_size: int, balancer: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_pooled(world_size, partial(balanced, balancer=balancer, **options))
    return results


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        slow(1, [("skewed", {}, {})]),
        (
            2,
            [
                ("skewed", {"slots": 4}, {}),
                ("skewed_top_1", {"slots": 3}, {"rebalance_every": 2}),
                ("skewed_accumulate", {"slots": 4}, {"rebalance_every": 2}),
                ("skewed", {"slots": 4}, {"rebalance_every": 2, "lag": 2}),
            ],
        ),
        slow(3, [("own", {"slots": 4}, {"shadows": "top3", "rebalance_every": 2})]),
        (
            4,
            [
                ("skewed", {"slots": 3, "dense": "zero1"}, {"rebalance_every": 2}),
                ("skewed", {"slots": 3, "mesh": {"cp": 2}}, {"rebalance_every": 2}),
                ("skewed_top_1", {"slots": 2}, {"shadows": "top2", "placement_rule": "plain"}),
                ("skewed_accumulate", {"slots": 2}, {"shadows": "fastermoe", "forecast": "last"}),
                (
                    "plain",
                    {"slots": 3},
                    {"placement_rule": "mro+", "min_replicas": 2, "ranks_per_node": 1, "rebalance_every": 2},
                ),
            ],
        ),
    ],
)
def test_the_training_is_the_same(world_size: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    options = [{"balancer": EAGER | balancer, "strategy": strategy, **CASES[key]} for key, strategy, balancer in cases]
    for (key, *how), ranks in zip(cases, on_one_world(world_size, balanced, options), strict=True):
        assert_same_training(reference(key), ranks, f"{key}, {how}")
        # Where the balancer had nothing to do, the test shows nothing.
        assert world_size == 1 or ranks[0]["moved"] + ranks[0]["shadows"] > 0, f"{key}, {how}"


def test_shadows_and_migrations_together_relieve_the_busiest_rank() -> None:
    balancer = EAGER | {"rebalance_every": 2}
    ranks = run(4, balancer, strategy={"slots": 2}, **CASES["skewed"])
    assert_same_training(reference("skewed"), ranks)
    assert ranks[0]["moved"] > 0
    assert ranks[0]["shadows"] > 0
    metrics = ranks[0]["metrics"]
    assert metrics["balance/layer00/imbalance_after_ratio"] < metrics["balance/layer00/imbalance_before_ratio"] - 0.1
    assert ranks[0]["shadow_bytes"] > 0
    assert {name for name, value in metrics.items() if not np.isfinite(value)} == set()
    assert [result["metrics"].keys() for result in ranks] == [metrics.keys()] * 4


@pytest.mark.slow
def test_bf16_mixed_stays_close_and_replicas_identical() -> None:
    ranks = run(4, EAGER | {"rebalance_every": 2}, strategy={"slots": 2}, **CASES["bf16"])
    assert ranks[0]["moved"] > 0
    assert ranks[0]["shadows"] > 0
    np.testing.assert_allclose(ranks[0]["losses"], reference("bf16")["losses"], rtol=0, atol=0.02)
    training_replicas = [result["replicas"] for result in ranks]
    for name in training_replicas[0]:
        seen: dict[int, bytes] = {}
        for replicas in training_replicas:
            for expert, content in replicas[name].items():
                assert seen.setdefault(expert, content) == content


def test_a_calibrated_run_keeps_the_law_and_states_the_models_error(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "step.svg"
    balancer = {"rebalance_every": 2, "timeline_path": str(picture)}
    ranks = run(2, balancer, strategy={"slots": 4}, **CASES["skewed"])
    assert ">experts</text>" in picture.read_text()
    assert_same_training(reference("skewed"), ranks)
    operations = ("exchange", "experts_forward", "experts_backward", "trans", "agg")
    metrics = ranks[0]["metrics"]
    assert all(metrics[f"balance/model_error/{name}_ratio"] >= 0 for name in operations)


def test_resuming_under_another_world_continues_the_losses(tmp_path: Path) -> None:
    path, balancer = str(tmp_path / "balanced.ckpt"), EAGER | {"rebalance_every": 2}
    run(4, balancer, strategy={"slots": 2}, save_to=path, **CASES["skewed"] | {"steps": 2})
    expected = reference("skewed")["losses"][2:]
    for world_size, strategy in ((2, {"slots": 5}), (1, {})):
        for result in run(world_size, balancer, strategy=strategy, ckpt_path=path, **CASES["skewed"]):
            np.testing.assert_allclose(result["losses"], expected, rtol=0, atol=TOLERANCE)


def refusals(rank: int, world_size: int) -> list[str]:
    messages = []
    for strategy in ({"placement": [[1, 1]] * 4 + [[1, 0]] * 2}, {"ep_size": 1}):
        trainer = make_trainer(rank, world_size, strategy, fast_dev_run=1)
        trainer.strategy.connect(OwnModule())
        trainer.strategy.setup_environment()
        trainer.strategy.setup(trainer)
        with pytest.raises(ConfigurationError) as caught:
            LoadBalancer().on_train_start(trainer, OwnModule())
        messages.append(str(caught.value))
    return messages


def test_what_the_balancer_cannot_balance() -> None:
    uneven, groups = run_ranks(2, refusals)[0]
    assert "ranks keep [4, 6]: set the strategy's slots, to 6 or more" in uneven
    assert "drop the strategy's ep_size" in groups
