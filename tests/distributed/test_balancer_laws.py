"""The laws with everything on: experts move, visit and are planned for, and the training is the same (L1 to L3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
from torch.utils.data import DataLoader

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.callbacks import load_balancer
from moe_lightning.callbacks.load_balancer import LoadBalancer, balanced_ranks
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.adapters import add_adapters
from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.collectives import broadcast_object
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from tests.distributed import training
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import (
    CASES,
    TOLERANCE,
    assert_same_training,
    on_one_world,
    reference,
)
from tests.distributed.training import BRIEF, OwnModule, RandomTokens, make_trainer, set_up
from tests.parameters import slow

# Slow experts on fast links: shadows pay, and every run plans alike.
EAGER = {"calibrate": False, "flops_per_s": 1e6, "bytes_per_s": 1e12, "speeds": "even"}


@contextlib.contextmanager
def failing_alone(balancer: dict[str, Any]) -> Iterator[None]:
    """Under mro+, which spreads experts over nodes, the ranks of this machine count as one node each."""

    def apart(strategy: ExpertParallelStrategy) -> Cluster:
        cluster = balanced_ranks(strategy)
        return replace(cluster, node_of=tuple(range(cluster.num_ranks)))

    with mock.patch.object(
        load_balancer, "balanced_ranks", apart if balancer.get("placement_rule") == "mro+" else balanced_ranks
    ):
        yield


def balanced(rank: int, world_size: int, *, balancer: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A training under a balancer, and the sums and last values of what it logged."""
    watcher = Watcher()
    callbacks = [LoadBalancer(**balancer), watcher]
    with failing_alone(balancer):
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
                ("skewed", {"slots": 4}, {"rebalance_every": 2}),
            ],
        ),
        slow(3, [("own", {"slots": 4}, {"shadows": "top3", "rebalance_every": 2})]),
        slow(
            4,
            [
                ("skewed", {"slots": 3, "dense": "zero1"}, {"rebalance_every": 2}),
                ("skewed", {"slots": 3, "mesh": {"cp": 2}}, {"rebalance_every": 2}),
                ("skewed_top_1", {"slots": 2}, {"shadows": "top2", "placement_rule": "plain"}),
                ("skewed_accumulate", {"slots": 2}, {"shadows": "fastermoe"}),
                ("plain", {"slots": 3}, {"placement_rule": "mro+", "min_replicas": 2, "rebalance_every": 2}),
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


@pytest.mark.slow
def test_a_calibrated_run_keeps_the_law_and_states_the_models_error(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "step.svg"
    balancer = {"rebalance_every": 2, "timeline_path": str(picture)}
    ranks = run(2, balancer, strategy={"slots": 4}, **CASES["skewed"])
    assert ">experts</text>" in picture.read_text()
    assert_same_training(reference("skewed"), ranks)
    operations = ("exchange", "experts_forward", "experts_backward", "trans", "agg")
    metrics = ranks[0]["metrics"]
    assert all(metrics[f"balance/model_error/{name}_ratio"] >= 0 for name in operations)


@pytest.mark.slow
def test_resuming_under_another_world_continues_the_losses(tmp_path: Path) -> None:
    path, balancer = str(tmp_path / "balanced.ckpt"), EAGER | {"rebalance_every": 2}
    run(4, balancer, strategy={"slots": 2}, save_to=path, **CASES["skewed"] | {"steps": 2})
    expected = reference("skewed")["losses"][2:]
    for world_size, strategy in ((2, {"slots": 5}), (1, {})):
        for result in run(world_size, balancer, strategy=strategy, ckpt_path=path, **CASES["skewed"]):
            np.testing.assert_allclose(result["losses"], expected, rtol=0, atol=TOLERANCE)


class InFourBits(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        add_adapters(self, {"kind": "qlora", "rank": 2})


def refusals(rank: int, world_size: int) -> list[str]:
    messages = []
    manual = OwnModule()
    manual.automatic_optimization = False
    for strategy, module in (
        ({"ep_size": 1}, OwnModule()),
        ({}, manual),
        ({}, InFourBits()),
    ):
        trainer = set_up(rank, world_size, strategy, module)
        with pytest.raises(ConfigurationError) as caught:
            LoadBalancer().on_train_start(trainer, module)
        messages.append(str(caught.value))
    return messages


def test_what_the_balancer_cannot_balance() -> None:
    groups, manual, in_four_bits = run_pooled(2, refusals)[0]
    assert "drop the strategy's ep_size" in groups
    assert "use automatic optimization, or drop the callback" in manual
    assert "set the balancer's shadows to none" in in_four_bits


# ----------------------------------------------------------------------
# What stays of a balancer when training ends, and when ranks join.


class Fails(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            raise ValueError("an error of the user's")


def hooks_left(rank: int, world_size: int, *, fails: bool) -> list[str]:
    """Return the hooks that still watch the layers after one step with measured costs and speeds."""
    module = OwnModule()
    callbacks = [LoadBalancer(), *([Fails()] if fails else [])]
    trainer = make_trainer(rank, world_size, {"slots": 4}, max_steps=1 + fails, callbacks=callbacks)
    with pytest.raises(ValueError, match="the user's") if fails else contextlib.nullcontext():
        trainer.fit(module, DataLoader(RandomTokens(), batch_size=12))
    watched = {**dict(module.named_modules()), **{f"experts of {layer}": layer.experts for layer in moe_layers(module)}}
    found = [name for name, part in watched.items() if part._forward_hooks or part._forward_pre_hooks]
    return found + ["overlap" for layer in moe_layers(module) if layer.overlap_fn is not None]


@pytest.mark.parametrize("fails", [slow(False), True])
def test_no_hook_outlives_a_short_training(fails: bool) -> None:
    assert run_pooled(2, partial(hooks_left, fails=fails)) == [[], []]


class Joins(pl.Callback):
    """Calls what a change of the ranks calls, where rank 1 has a balancer that knows nothing, as one that joins."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        balancer = next(each for each in trainer.callbacks if isinstance(each, LoadBalancer))  # type: ignore[attr-defined]
        wanted = broadcast_object([balancer.state_dict(), _costs(balancer)], 0, trainer.strategy.world)  # type: ignore[attr-defined]
        if trainer.global_rank == 1:
            balancer = LoadBalancer()
        balancer.on_world_changed(trainer, module)
        batch: Any = None
        balancer.on_train_batch_end(trainer, module, batch, batch, 0)  # which a fault has left to run
        assert balancer.planner is None
        balancer.on_train_start(trainer, module)
        assert [balancer.state_dict(), _costs(balancer)] == wanted
        self.known.append(wanted)


def _costs(balancer: LoadBalancer) -> list[Any]:
    return [asdict(costs.at(None)) for costs in balancer.planner.costs]


def joined(rank: int, world_size: int) -> list[Any]:
    joins = Joins()
    training.train(rank, world_size, callbacks=[LoadBalancer(), joins], strategy={"slots": 4}, steps=10)
    return joins.known


@pytest.mark.slow
def test_ranks_that_join_plan_from_what_the_others_know() -> None:
    first, second = run_ranks(2, joined)
    assert first == second
    ((state, costs),) = first
    assert all(sum(own["load"]) > 0 for own in state["layers"].values())
    assert all(block["dense_forward_s"] > 0 for block in costs)
