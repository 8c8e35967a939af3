"""One rank of moe-bench balance: trains the same small model under every way of balancing and every skew."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from moe_lightning.algorithms.balancing import STRATEGIES, Strategy
from moe_lightning.algorithms.metrics import balance_ratio, imbalance
from moe_lightning.algorithms.placement import uniform_placement
from moe_lightning.algorithms.quota import balanced_quota
from moe_lightning.bench.ranks import enter
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.padded import PaddedDispatcher
from moe_lightning.elastic.lifeline import leave_process_groups
from moe_lightning.models.gpt_config import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.modules.forced_routing import ForcedRouting
from moe_lightning.modules.router import RouterConfig
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.strategies.placed_experts import PlacedExperts

CONTENDERS: dict[str, Strategy | None] = {**STRATEGIES, "ours": None}
"""What is compared: the strategies of `algorithms.balancing`, and LoadBalancer as it comes."""

Summary = Callable[[Sequence[float]], float]

WARMUP_STEPS = 12
"""A balancer places experts at step 8 and has measured dense layers before."""


class PaddedStrategy(ExpertParallelStrategy):
    """Expert parallelism with padded exchanges."""

    @override
    def place_experts(self, module: nn.Module) -> PlacedExperts:
        experts = super().place_experts(module)
        for layer in experts.layers:
            layer.dispatcher = PaddedDispatcher.like(layer.dispatcher)
        return experts


class Watch(pl.Callback):
    """Notes, after the warm-up, the time of each step, and what travelled and was waited for in it.

    The processor time of a rank, threads of the exchanges included, is what the step would take on a machine that does
    nothing else and never waits.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._last_end = self._last_cpu = 0.0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step_s, cpu_s = time.perf_counter() - self._last_end, time.process_time() - self._last_cpu
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        if trainer.global_step > WARMUP_STEPS:
            self.rows.append({"step_s": step_s, "cpu_s": cpu_s} | _layers(strategy.experts) | _copies(trainer))
        self._last_end, self._last_cpu = time.perf_counter(), time.process_time()  # without what was noted here

    def summary(self, strategy: ExpertParallelStrategy, over_steps: Summary = statistics.median) -> dict[str, float]:
        """Over steps; of the slowest rank for times, summed over ranks for bytes. Collective."""
        mine = {name: over_steps([row[name] for row in self.rows]) for name in self.rows[0]}
        ranks = all_gather_json(mine, strategy.world)
        return {name: (sum if name.endswith("_bytes") else max)(rank[name] for rank in ranks) for name in mine}


def _layers(experts: PlacedExperts) -> dict[str, float]:
    """Means over layers of the balance, and the bytes that left this rank in the four exchanges of each."""
    before, after, quotients, sent_bytes = [], [], [], 0
    for layer in experts.layers:
        assert layer.statistics is not None
        tokens = layer.statistics.computed_NE.numpy().sum(axis=0)
        loads = layer.dispatcher.last_rank_loads
        if loads is None:  # a world of one rank
            loads = tokens.sum(keepdims=True)
        plain = balanced_quota(tokens, uniform_placement(len(tokens), len(loads)).replicas).sum(axis=0)
        before.append(imbalance(plain))
        after.append(imbalance(loads))
        quotients.append(min(balance_ratio(plain, loads), 1e3))
        sent_bytes += 4 * layer.dispatcher.last_sent_bytes
    return {
        "imbalance_before": statistics.mean(before),
        "imbalance_after": statistics.mean(after),
        "balance_ratio": statistics.mean(quotients),
        "exchange_bytes": sent_bytes,
    }


def _copies(trainer: pl.Trainer) -> dict[str, float]:
    """What the shadows of the last step cost, and what the performance model expected."""
    balancer = next((c for c in trainer.callbacks if isinstance(c, LoadBalancer)), None)  # type: ignore[attr-defined]
    visits = balancer.last_visits if balancer is not None else None
    planner = balancer.planner if visits is not None and balancer is not None else None
    expected = planner.predicted_step() if planner is not None else None
    return {
        "copy_bytes": visits.sent_bytes if visits else 0,
        "exposed_trans_s": visits.trans_wait_s if visits else 0.0,
        "exposed_agg_s": visits.agg_wait_s if visits else 0.0,
        "expected_copy_s": expected.transfer_s if expected else 0.0,
        "expected_exposed_s": expected.exposed_s if expected else 0.0,
    }


def measure(
    name: str,
    trace: str,
    options: dict[str, Any],
    *,
    extra: Sequence[pl.Callback] = (),
    over_steps: Summary = statistics.median,
) -> dict[str, float]:
    """Train under one contender and one recorded popularity of experts; `extra` callbacks work beside the watch."""
    pl.seed_everything(0, verbose=False)
    ways = CONTENDERS[name]
    strategy = _strategy(ways, options["slots"])
    watch = Watch()
    callbacks: list[pl.Callback] = [watch, *extra]
    if ways is None:
        callbacks.append(LoadBalancer())
    elif name not in ("plain", "padded"):
        callbacks.append(
            LoadBalancer(
                rebalance_every=0 if ways.placement.rule == "plain" else 200,
                placement=ways.placement.rule,
                allocation=ways.placement.allocation,
                shadows=ways.shadows,
            )
        )
    steps = WARMUP_STEPS + options["steps"]
    trainer = pl.Trainer(
        strategy=strategy,
        plugins=[LightningEnvironment()],
        accelerator="cpu",
        devices=options["ranks"],
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in extra),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=steps + 1,
    )
    config = model_config(options, forced=ForcedRouting(kind="trace", path=trace))
    batch = options["batch"] * trainer.world_size
    ids = torch.randint(0, 256, (batch * steps, options["context"] + 1))
    loader = DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch)
    trainer.fit(GPTModule(config, OptimizerConfig(lr=1e-4, warmup_steps=0)), loader)
    found = watch.summary(strategy, over_steps)
    strategy.world.close()
    return found


def model_config(options: Mapping[str, Any], *, forced: ForcedRouting | None = None) -> GPTConfig:
    """The GPT that is measured."""
    return GPTConfig(
        vocab_size=256,
        context_length=options["context"],
        num_layers=options["layers"],
        num_heads=4,
        d_model=options["d_model"],
        d_expert=options["d_expert"],
        num_experts=options["experts"],
        moe_every=1,
        router=RouterConfig(top_k=2, aux_loss_coef=0.0, forced=forced),
    )


def _strategy(ways: Strategy | None, slots: int) -> ExpertParallelStrategy:
    if ways is None:
        return ExpertParallelStrategy(slots=slots)
    if ways.padded:
        return PaddedStrategy()
    return ExpertParallelStrategy(slots=slots, quota="balanced" if ways.balanced else "equal")


def main(arguments: list[str]) -> None:
    options = json.loads(Path(arguments[0]).read_text())
    rank = enter(options["cores"])
    results = []
    for index in range(options["rounds"]):
        for name in options["strategies"]:
            for skew, trace in options["traces"].items():  # innermost: goals are ratios between skews
                found = measure(name, trace, options)
                results.append({"round": index, "skew": skew, "strategy": name} | found)
                if rank == 0:
                    print(f"round {index + 1}, {skew}, {name}: {1e3 * found['step_s']:.1f} ms", flush=True)
    if rank == 0:
        Path(arguments[1]).write_text(json.dumps(results))
    leave_process_groups()


if __name__ == "__main__":
    main(sys.argv[1:])
