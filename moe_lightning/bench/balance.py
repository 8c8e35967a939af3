"""moe-bench balance: the step time under skewed routing, for every way of balancing, on two ranks of one core each.

All ratios are taken inside one run, against the median step of plain expert parallelism under uniform routing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.metrics import imbalance
from moe_lightning.algorithms.placement import uniform_placement
from moe_lightning.arguments import Count, input_file, output_file, value
from moe_lightning.bench.balance_trace import load_trace
from moe_lightning.bench.balance_worker import CONTENDERS
from moe_lightning.bench.measure import machine
from moe_lightning.bench.model_options import add_model_arguments
from moe_lightning.bench.ranks import launch, own_cores
from moe_lightning.elastic.failure import Interrupted
from moe_lightning.errors import ConfigurationError

FloatArray = NDArray[np.float64]

_RANKS = 2
_UNIFORM = "uniform"
_OURS = "ours"
_SETTLED = 600
"""Iteration of a trace from which its layers are looked at: before, routing has not settled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=input_file, help="routing trace (.npz) whose most skewed layer is added")
    parser.add_argument(
        "--ratios", type=value(Count), nargs="*", default=[2, 4, 8], help="loads of the two ranks, as N to 1"
    )
    parser.add_argument("--strategies", nargs="+", default=list(CONTENDERS), help="ways of balancing to compare")
    parser.add_argument(
        "--rounds", type=value(Count), default=1, help="measurements of each, in turns (default: %(default)s)"
    )
    parser.add_argument("--steps", type=value(Count), default=12, help="measured steps of each (default: %(default)s)")
    parser.add_argument("--batch", type=value(Count), default=4, help="sequences of a rank (default: %(default)s)")
    add_model_arguments(parser)
    parser.add_argument(
        "--slots", type=value(Count), default=5, help="resident experts of a rank (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, help="where to leave all measurements")


def run(options: argparse.Namespace) -> int:
    """Measure, print one table and the goals beside what was reached; 0 on success."""
    unknown = [name for name in options.strategies if name not in CONTENDERS]
    if unknown:
        raise ConfigurationError(f"--strategies {unknown[0]!r} is unknown: use some of {', '.join(CONTENDERS)}")
    if options.experts % _RANKS or options.slots * _RANKS < options.experts:
        raise ConfigurationError(
            f"{options.experts} experts do not divide over {_RANKS} ranks of {options.slots} slots: "
            "use an even number, and at least half as many slots"
        )
    cores = own_cores(_RANKS)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-balance-") as folder:
            rows = _measure(Path(folder), options, cores)
    except Interrupted as stop:
        print(f"moe-bench: {stop}", file=sys.stderr)
        return 128 + stop.signal
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    pinned = f"pinned to cores {cores}" if cores else "not pinned: too few cores"
    print(f"{machine()}; {_RANKS} ranks, {pinned}; medians of {options.rounds} x {options.steps} steps")
    medians = _medians(rows)
    print(format_table(medians))
    print("ratio: to plain under uniform routing; of: what the model says that copies take, hidden or not")
    print("\n".join(goals(medians)))
    return 0


def _measure(folder: Path, options: argparse.Namespace, cores: list[int]) -> list[dict[str, Any]]:
    shares = skews(options.experts, options.ratios)
    if options.trace is not None:
        shares["trace"] = most_skewed(options.trace, options.experts)
    traces = {name: str(_write_trace(folder / f"{index}.npz", s)) for index, (name, s) in enumerate(shares.items())}
    names = ("rounds", "steps", "batch", "context", "d_model", "d_expert", "layers", "experts", "slots", "strategies")
    settings = {name: getattr(options, name) for name in names} | {"traces": traces, "cores": cores, "ranks": _RANKS}
    (folder / "options.json").write_text(json.dumps(settings))
    launch(
        "moe_lightning.bench.balance_worker",
        [str(folder / "options.json"), str(folder / "results.json")],
        num_ranks=_RANKS,
        log_dir=folder / "logs",
    )
    rows: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
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


def _write_trace(path: Path, shares_E: FloatArray) -> Path:
    counts = np.round(shares_E * 1e6).astype(np.int64)[None, None, None]
    np.savez(path, counts=counts, iteration=np.array([1], dtype=np.int64))
    return path


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """By (skew, strategy), over rounds."""
    skews_met = dict.fromkeys(row["skew"] for row in rows)
    strategies = dict.fromkeys(row["strategy"] for row in rows)
    result = {}
    for skew, strategy in itertools.product(skews_met, strategies):
        mine = [row for row in rows if (row["skew"], row["strategy"]) == (skew, strategy)]
        names = [name for name in mine[0] if name not in ("round", "skew", "strategy")]
        result[skew, strategy] = {name: statistics.median(row[name] for row in mine) for name in names}
    return result


def format_table(medians: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """One line for each way of balancing under each skew."""
    base = _base(medians)
    lines = [
        f"{'routing':<9}{'strategy':<14}{'step ms':>9}{'ratio':>7}{'cpu ms':>9}{'ratio':>7}{'max/mean':>14}{'RB':>7}"
        f"{'tokens MB':>11}{'copies MB':>11}{'waited ms: Trans':>18}{'Agg':>7}{'of':>7}"
    ]
    for (skew, name), row in medians.items():
        lines.append(
            f"{skew:<9}{name:<14}{1e3 * row['step_s']:>9.1f}{row['step_s'] / base['step_s']:>7.2f}"
            f"{1e3 * row['cpu_s']:>9.1f}{row['cpu_s'] / base['cpu_s']:>7.2f}"
            f"{row['imbalance_before']:>7.2f} >{row['imbalance_after']:>5.2f}{row['balance_ratio']:>7.1f}"
            f"{row['exchange_bytes'] / 1e6:>11.2f}{row['copy_bytes'] / 1e6:>11.2f}"
            f"{1e3 * row['exposed_trans_s']:>18.2f}{1e3 * row['exposed_agg_s']:>7.2f}"
            f"{1e3 * row['expected_copy_s']:>7.2f}"
        )
    return "\n".join(lines)


def _base(medians: Mapping[tuple[str, str], Mapping[str, float]]) -> Mapping[str, float]:
    """Plain expert parallelism under uniform routing, or what was measured first."""
    return medians.get((_UNIFORM, "plain"), next(iter(medians.values())))


def goals(medians: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """One line for each goal that the measurements can judge; by processor time too, which other work disturbs less."""
    lines = []
    ours, plain = medians.get((_UNIFORM, _OURS)), medians.get((_UNIFORM, "plain"))
    if ours and plain:
        cost, cpu_cost = (ours[name] / plain[name] - 1 for name in ("step_s", "cpu_s"))
        lines.append(_goal("own cost under uniform routing", cost, cpu_cost, 0.02))
    for (skew, name), row in medians.items():
        if name == _OURS and ours and skew != _UNIFORM:
            ratio, cpu_ratio = (row[name] / ours[name] for name in ("step_s", "cpu_s"))
            beside = medians.get((skew, "plain"))
            note = f"; plain: {beside['step_s'] / plain['step_s']:.2f}" if beside and plain else ""
            lines.append(_goal(f"step under {skew} over uniform", ratio, cpu_ratio, 1.10, note))
    for (skew, name), row in medians.items():
        if row["expected_copy_s"] > 0:
            hidden = 1 - (row["exposed_trans_s"] + row["exposed_agg_s"]) / row["expected_copy_s"]
            could = 1 - row["expected_exposed_s"] / row["expected_copy_s"]
            verdict = "met   " if hidden >= min(0.8, could) else "missed"
            lines.append(f"{verdict}  copies hidden, {name} under {skew}: {hidden:.2f} (the model says {could:.2f})")
    return lines


def _goal(what: str, reached: float, cpu_reached: float, most: float, note: str = "") -> str:
    verdict = "met   " if reached <= most else "missed"
    return f"{verdict}  {what}: {reached:.3f} (processor time {cpu_reached:.3f}), goal at most {most:.2f}{note}"
