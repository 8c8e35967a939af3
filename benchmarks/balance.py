"""moe-bench balance: the step time under skewed routing, for every way of balancing, on two ranks of one core each.

All ratios are taken inside one run, against the median step of plain expert parallelism under uniform routing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from typing_extensions import override

from benchmarks.measuring import goal, medians_of, own_cores, pinning
from benchmarks.padded_dispatch import PADDED
from moe_lightning.arguments import Count, InputFile, OutputFile, option
from moe_lightning.arrays import FloatArray
from moe_lightning.balancing.cluster import balance_ratio, imbalance
from moe_lightning.balancing.rules import STRATEGIES, Strategy
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.cli.short_training import (
    WARMUP_STEPS,
    ModelOptions,
    StepClock,
    balancer_of,
    machine,
    most_skewed,
    on_ranks,
    train,
    write_trace,
)
from moe_lightning.compat import private_lightning
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.dispatch.shadow_exchange import TransferCosts
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.text_table import table

Medians = Mapping[tuple[str, str], Mapping[str, float]]
"""(skew, strategy) -> name of a figure -> its median over rounds."""

CONTENDERS: dict[str, Strategy | None] = {
    **{name: strategy for name, strategy in STRATEGIES.items() if name != "search"},
    "ours": None,
}
"""Contenders: the strategies of `balancing.rules`, and LoadBalancer with its defaults. In training "search" is
"prophet"."""

_COMPARED = ("plain", "padded", "top2", "top3", "fastermoe", "prophet", "compact", "spread", "lazarus", "ours")
"""Default contenders: one of each kind, a few seconds each under each routing."""

_RANKS = 2
_UNIFORM = "uniform"
_OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of this benchmark."""

    trace: InputFile | None = option("routing trace (.npz) whose most skewed layer is added", None)
    ratios: tuple[Count, ...] = option("loads of the two ranks, as N to 1", [4, 8])
    strategies: list[str] = option("ways of balancing to compare", list(_COMPARED), choices=list(CONTENDERS))
    rounds: Count = option("measurements of each, in turns", 1)
    steps: Count = option("measured steps of each", 8)
    batch: Count = option("sequences of a rank", 4)
    slots: Count = option("resident experts of a rank", 5)
    json: OutputFile | None = option("where to leave all measurements", None)


def run(options: Options) -> int:
    """Measure, print one table and the goals beside what was reached; 0 on success."""
    if options.experts % _RANKS or options.slots * _RANKS < options.experts:
        raise ConfigurationError(
            f"{options.experts} experts do not divide over {_RANKS} ranks of {options.slots} slots: "
            "use an even number, and at least half as many slots"
        )
    cores, began = own_cores(_RANKS), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moe-balance-") as folder:
        rows = _measure(Path(folder), options, cores)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"{machine()}; {_RANKS} ranks, {pinning(cores)}")
    print(
        f"{len(rows)} trainings in {time.monotonic() - began:.0f} s: each way of balancing under each routing, "
        f"{options.rounds} x {options.steps} steps after {WARMUP_STEPS} of warm-up; medians"
    )
    but = ("round", "skew", "strategy")
    medians = {
        (skew, name): medians_of([row for row in rows if (row["skew"], row["strategy"]) == (skew, name)], but=but)
        for skew in dict.fromkeys(row["skew"] for row in rows)
        for name in options.strategies
    }
    print(format_table(medians))
    print("ratio: to plain under uniform routing; of: what the model says that copies take, hidden or not")
    print("\n".join(goals(medians)))
    return 0


def _measure(folder: Path, options: Options, cores: list[int]) -> list[dict[str, Any]]:
    shares = skews(options.experts, options.ratios)
    if options.trace is not None:
        shares["trace"] = most_skewed(options.trace, options.experts)
    traces = {name: str(write_trace(folder / f"{index}.npz", s)) for index, (name, s) in enumerate(shares.items())}
    settings = asdict(options) | {"traces": traces, "trace": None, "json": None}
    rows: list[dict[str, Any]] = on_ranks(
        "benchmarks.balance:train_all", settings, num_ranks=_RANKS, folder=folder, cores=cores
    )[0]
    return rows


def skews(num_experts: int, ratios: Sequence[int]) -> dict[str, FloatArray]:
    """Shares [E] of the experts for uniform routing and for rank loads of N to 1; inside a rank they fall as 1/i."""
    inside = 1.0 / (1.0 + np.arange(num_experts // _RANKS))
    inside /= inside.sum()
    shares = {_UNIFORM: np.full(num_experts, 1.0 / num_experts)}
    for ratio in ratios:
        if ratio < 1:
            raise ConfigurationError(f"a ratio of {ratio} to 1 is not a skew: use 1 or more")
        shares[f"{ratio}:1"] = np.concatenate([ratio * inside, inside]) / (ratio + 1)
    return shares


def format_table(medians: Medians) -> str:
    """One line for each way of balancing under each skew."""
    base = medians.get((_UNIFORM, "plain"), next(iter(medians.values())))
    headers = (
        "routing", "strategy", "step ms", "ratio", "cpu ms", "ratio", "max/mean", "RB", "tokens MB", "copies MB",
        "waited ms: Trans", "Agg", "of",
    )  # fmt: skip
    rows = [
        (
            skew,
            name,
            *(cell for kind in ("step_s", "cpu_s") for cell in (_ms(row[kind], 1), f"{row[kind] / base[kind]:.2f}")),
            f"{row['imbalance_before']:.2f} > {row['imbalance_after']:.2f}",
            f"{row['balance_ratio']:.1f}",
            *(f"{row[kind] / 1e6:.2f}" for kind in ("exchange_bytes", "copy_bytes")),
            *(_ms(row[kind], 2) for kind in ("exposed_trans_s", "exposed_agg_s", "expected_copy_s")),
        )
        for (skew, name), row in medians.items()
    ]
    return table(headers, rows)


def _ms(seconds: float, digits: int) -> str:
    return f"{1e3 * seconds:.{digits}f}"


def goals(medians: Medians) -> list[str]:
    """One line for each goal that the measurements can judge; by processor time too, which other work disturbs less."""
    lines = []
    ours, plain = medians.get((_UNIFORM, _OURS)), medians.get((_UNIFORM, "plain"))
    if ours and plain:
        cost, cpu_cost = (ours[name] / plain[name] - 1 for name in ("step_s", "cpu_s"))
        lines.append(goal("own cost under uniform routing", cost, 0.02, f"{{:.3f}} (processor time {cpu_cost:.3f})"))
    for (skew, name), row in medians.items():
        if name == _OURS and ours and skew != _UNIFORM:
            ratio, cpu_ratio = (row[name] / ours[name] for name in ("step_s", "cpu_s"))
            beside = medians.get((skew, "plain"))
            note = f"; plain: {beside['step_s'] / plain['step_s']:.2f}" if beside and plain else ""
            form = f"{{:.3f}} (processor time {cpu_ratio:.3f})"
            lines.append(goal(f"step under {skew} over uniform", ratio, 1.10, form, note))
    for (skew, name), row in medians.items():
        if row["expected_copy_s"] > 0:
            hidden = 1 - (row["exposed_trans_s"] + row["exposed_agg_s"]) / row["expected_copy_s"]
            could = 1 - row["expected_exposed_s"] / row["expected_copy_s"]
            verdict = "met   " if hidden >= min(0.8, could) else "missed"
            lines.append(f"{verdict}  copies hidden, {name} under {skew}: {hidden:.2f} (the model says {could:.2f})")
    return lines


# --- a rank ---------------------------------------------------------------------------------------------------------


def train_all(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every way of balancing under every skew, in turns. Collective."""
    traces = settings.pop("traces")
    options, rows = Options(**settings), []
    for index in range(options.rounds):
        for name in options.strategies:
            for skew, trace in traces.items():  # innermost: goals are ratios between skews
                found = train_with(name, trace, options)
                rows.append({"round": index, "skew": skew, "strategy": name} | found)
                print(f"round {index + 1}, {skew}, {name}: {1e3 * found['step_s']:.1f} ms", flush=True)
    return rows


def measured(
    strategy: ExpertParallelStrategy, callbacks: Sequence[pl.Callback], trace: str, options: Options
) -> dict[str, float]:
    """Train under one recorded popularity of experts and return figures of a step after the warm-up. Collective."""
    watch = BalanceWatch()
    train(strategy, watch, callbacks, trace, options)
    found = watch.summary(strategy)
    strategy.world.close()
    return found


class BalanceWatch(StepClock):
    """Notes, after the warm-up, the time of each step, and what travelled and was waited for in it."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[dict[str, float]] = []

    @override
    def note(self, trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        if trainer.global_step > WARMUP_STEPS:
            times = {"step_s": self.step_s[-1], "cpu_s": self.cpu_s[-1]}
            self._rows.append(times | _layers(strategy.experts) | _copies(trainer))

    def summary(self, strategy: ExpertParallelStrategy) -> dict[str, float]:
        """Medians over steps; of the slowest rank for times, summed over ranks for bytes. Collective."""
        mine = medians_of(self._rows)
        ranks = all_gather_json(mine, strategy.world)
        return {name: (sum if name.endswith("_bytes") else max)(rank[name] for rank in ranks) for name in mine}


def _layers(experts: PlacedExperts) -> dict[str, float]:
    """Means over layers of the balance, and the bytes that left this rank in the four exchanges of each."""
    before, after, quotients, sent_bytes = [], [], [], 0
    for layer in experts.layers:
        assert layer.statistics is not None
        tokens = layer.statistics.computed_NE.numpy().sum(axis=0)
        loads = layer.statistics.rank_loads
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
    """Return the measured and the predicted cost of the last step's shadows."""
    balancer = private_lightning.callback_of(trainer, LoadBalancer)
    transfers = None if balancer is None else balancer.last_shadow_transfers
    planner = None if balancer is None or transfers is None else balancer.planner
    expected = None if planner is None else planner.predicted_step()
    costs = TransferCosts() if transfers is None else transfers.costs
    return {
        "copy_bytes": costs.sent_bytes,
        "exposed_trans_s": costs.trans_waits.seconds,
        "exposed_agg_s": costs.agg_waits.seconds,
        "expected_copy_s": expected.transfer_s if expected else 0.0,
        "expected_exposed_s": expected.exposed_s if expected else 0.0,
    }


def train_with(name: str, trace: str, options: Options) -> dict[str, float]:
    """Train under one of the contenders. Collective."""
    ways = CONTENDERS[name]
    if ways is None:
        return measured(ExpertParallelStrategy(slots=options.slots), [LoadBalancer()], trace, options)
    if ways.padded:
        return measured(ExpertParallelStrategy(dispatch=PADDED), [], trace, options)
    strategy = ExpertParallelStrategy(slots=options.slots, quota="balanced" if ways.balanced else "equal")
    return measured(strategy, [] if name == "plain" else [balancer_of(ways)], trace, options)
