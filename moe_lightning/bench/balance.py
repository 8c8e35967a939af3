"""moe-bench balance: the step time under skewed routing, for every way of balancing, on two ranks of one core each.

All ratios are taken inside one run, against the median step of plain expert parallelism under uniform routing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from typing_extensions import override

from moe_lightning.algorithms.balancing import STRATEGIES, Strategy
from moe_lightning.algorithms.metrics import balance_ratio, imbalance
from moe_lightning.algorithms.placement import uniform_placement
from moe_lightning.algorithms.quota import balanced_quota
from moe_lightning.arguments import Count, InputFile, OutputFile, option
from moe_lightning.bench.balance_trace import load_trace
from moe_lightning.bench.measure import goal, machine, medians_of
from moe_lightning.bench.training import (
    ModelOptions,
    StepClock,
    gpt,
    on_ranks,
    own_cores,
    pinning,
    quiet_trainer,
    random_text,
)
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt_config import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.modules.forced_routing import ForcedRouting
from moe_lightning.modules.router import RouterConfig
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.text_table import table

FloatArray = NDArray[np.float64]
Medians = Mapping[tuple[str, str], Mapping[str, float]]
"""(skew, strategy) -> name of a figure -> its median over rounds."""

CONTENDERS: dict[str, Strategy | None] = {**STRATEGIES, "ours": None}
"""What is compared: the strategies of `algorithms.balancing`, and LoadBalancer as it comes."""

WARMUP_STEPS = 12
"""A balancer places experts at step 8 and has measured dense layers before."""

_RANKS = 2
_UNIFORM = "uniform"
_OURS = "ours"
_SETTLED = 600
"""Iteration of a trace from which its layers are looked at: before, routing has not settled."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Of this benchmark."""

    trace: InputFile | None = option("routing trace (.npz) whose most skewed layer is added", None)
    ratios: tuple[Count, ...] = option("loads of the two ranks, as N to 1", [2, 4, 8])
    strategies: list[str] = option("ways of balancing to compare", list(CONTENDERS), choices=list(CONTENDERS))
    rounds: Count = option("measurements of each, in turns", 1)
    steps: Count = option("measured steps of each", 12)
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
    cores = own_cores(_RANKS)
    with tempfile.TemporaryDirectory(prefix="moe-balance-") as folder:
        rows = _measure(Path(folder), options, cores)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"{machine()}; {_RANKS} ranks, {pinning(cores)}; medians of {options.rounds} x {options.steps} steps")
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
        "moe_lightning.bench.balance:train_all", settings, num_ranks=_RANKS, folder=folder, cores=cores
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


def most_skewed(path: Path, num_experts: int) -> FloatArray:
    """Shares [E] of the settled layer of a trace that loads two ranks least evenly, of its most used experts."""
    trace = load_trace(path)
    settled = trace.counts[trace.iteration >= _SETTLED].sum(axis=2)
    if not settled.size or settled.shape[2] < num_experts:
        raise ConfigurationError(
            f"{path} holds no {num_experts} experts after iteration {_SETTLED}: use a longer trace, or fewer experts"
        )
    plain = uniform_placement(num_experts, _RANKS).replicas
    best, worst = np.full(num_experts, 1.0), 0.0
    for load in settled.reshape(-1, settled.shape[2]):
        kept = load[np.sort(np.argsort(-load, kind="stable")[:num_experts])]
        skew = imbalance(kept @ plain)
        if skew > worst:
            best, worst = kept.astype(np.float64), skew
    shares: FloatArray = best / best.sum()
    return shares


def write_trace(path: Path, shares_E: FloatArray) -> Path:
    """A trace whose routing has these shares at every iteration."""
    counts = np.round(shares_E * 1e6).astype(np.int64)[None, None, None]
    np.savez(path, counts=counts, iteration=np.array([1], dtype=np.int64))
    return path


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
                found = train(name, trace, options)
                rows.append({"round": index, "skew": skew, "strategy": name} | found)
                print(f"round {index + 1}, {skew}, {name}: {1e3 * found['step_s']:.1f} ms", flush=True)
    return rows


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

    def summary(
        self, strategy: ExpertParallelStrategy, over_steps: Callable[[Sequence[float]], float]
    ) -> dict[str, float]:
        """Over steps; of the slowest rank for times, summed over ranks for bytes. Collective."""
        mine = {name: over_steps([row[name] for row in self._rows]) for name in self._rows[0]}
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


def train(
    name: str,
    trace: str,
    options: Any,
    *,
    extra: Sequence[pl.Callback] = (),
    over_steps: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Train under one contender and one recorded popularity of experts. Collective.

    Args:
        options: sizes, batch, steps and slots, as those of this benchmark.
        extra: callbacks that work beside the watch.
        over_steps: what is made of the figures of all steps.
    """
    pl.seed_everything(0, verbose=False)
    ways = CONTENDERS[name]
    strategy, watch = _strategy(ways, options.slots), BalanceWatch()
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
    steps = WARMUP_STEPS + options.steps
    trainer = quiet_trainer(strategy, steps=steps, callbacks=callbacks)
    batch = options.batch * trainer.world_size
    module = GPTModule(trace_gpt(options, trace), OptimizerConfig(lr=1e-4, warmup_steps=0))
    trainer.fit(module, DataLoader(random_text(batch * steps, options.context), batch))
    found = watch.summary(strategy, over_steps)
    strategy.world.close()
    return found


def trace_gpt(sizes: Any, trace: str | None = None) -> GPTConfig:
    """The GPT that is measured, routed as a trace says."""
    forced = ForcedRouting(kind="trace", path=trace) if trace else None
    return gpt(sizes, router=RouterConfig(top_k=2, aux_loss_coef=0.0, forced=forced))


def _strategy(ways: Strategy | None, slots: int) -> ExpertParallelStrategy:
    if ways is None:
        return ExpertParallelStrategy(slots=slots)
    if ways.padded:
        return ExpertParallelStrategy(dispatch="padded")
    return ExpertParallelStrategy(slots=slots, quota="balanced" if ways.balanced else "equal")
