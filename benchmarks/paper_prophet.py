"""Pro-Prophet: speed-ups over DeepSpeed-MoE and FasterMoE, and balance (VI; Tables I, IV, V, Fig. 10-16)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np

from benchmarks.balance_trace import load_trace, reference_costs
from benchmarks.paper_table import PaperTable, Row, Sources
from moe_lightning.balancing.rules import STRATEGIES, evaluate, plan_shadows
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import QuotaRule
from moe_lightning.plots import bar_chart
from moe_lightning.simulate.hardware import Hardware, preset
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.step_model import StepModel
from moe_lightning.simulate.workload import RoutingScenario, Workload, trace_routing

_EXPERTS = 16
_MODELS = {"S": (12, 512), "M": (12, 1024), "L": (12, 2048), "DS": (24, 512), "DM": (24, 1024)}
# Table IV (4 HPNV nodes) and Table V (2 LPWNV nodes): speed-up over DeepSpeed-MoE of FasterMoE and of Pro-Prophet.
_TABLE_4 = {
    (1, "S"): (1.63, 1.98), (1, "M"): (1.99, 2.22), (1, "L"): (1.62, 1.80), (1, "DS"): (1.34, 1.70),
    (1, "DM"): (1.68, 2.26), (2, "S"): (2.31, 2.62), (2, "M"): (1.82, 2.10), (2, "L"): (1.94, 2.23),
    (2, "DS"): (1.77, 1.94), (2, "DM"): (1.84, 2.07),
}  # fmt: skip
_TABLE_5 = {
    (1, "S"): (1.20, 1.30), (1, "M"): (1.02, 1.18), (1, "DS"): (1.12, 1.30), (1, "DM"): (0.96, 1.26),
    (2, "S"): (1.56, 1.91), (2, "M"): (1.29, 1.94), (2, "DS"): (1.44, 1.64), (2, "DM"): (1.25, 1.58),
}  # fmt: skip
_HPNV = preset("rtx3090", ranks_per_node=4, node_bytes_per_s=50e9, utilization=0.25, expert_utilization=0.25)
_HPWNV = preset("rtx3090", ranks_per_node=4, utilization=0.25, expert_utilization=0.25)
_LPWNV = preset(
    "rtx3090",
    ranks_per_node=4,
    flops_per_s=27e12,
    memory_bytes=11e9,
    memory_bytes_per_s=616e9,
    utilization=0.25,
    expert_utilization=0.25,
)
_WHY = "padding, kernels and the routing of their run are not printed"
_EXPLAINS = (0.5, 2.0)
_SAMPLES = range(2, 11, 2)
_ASSUMED = (
    "first 100 iterations of the recorded routing, 16 hottest experts; plans from the routing of the step itself",
    "25 percent of peak; DeepSpeed-MoE pads its exchanges to the fullest (expert, rank) pair",
)


def _workload(name: str, top_k: int, tokens: int, gpus: int) -> Workload:
    layers, width = _MODELS[name]
    hidden = 2 * width
    dense = layers * (4 * width * width + _EXPERTS * width) + (50257 + 1024) * width
    return Workload(
        dense_params=dense,
        expert_params=2 * width * hidden + width + hidden,
        num_layers=layers,
        num_experts=_EXPERTS,
        top_k=top_k,
        d_model=width,
        dense_flops_per_token=2.0 * (dense - 1024 * width) + 2 * layers * 1024 * width,
        context_length=tokens // gpus,
        rank_batch=1,
    )


def _seconds(work: Workload, hardware: Hardware, gpus: int, strategy: str, routing: RoutingScenario) -> float:
    """Mean step over the samples; experts one or more to a GPU, held once."""
    plan = policy("moc", strategy=strategy, slots=max(1, _EXPERTS // gpus))
    nodes = gpus // hardware.ranks_per_node
    model = StepModel(work, hardware, plan, routing, nodes)
    return fmean(model.cost(nodes, sample, sample).step_s for sample in _SAMPLES)


def _routing(sources: Sources, layers: int) -> RoutingScenario:
    return trace_routing(sources.routing_path(), num_experts=_EXPERTS, num_layers=layers)


def _ratio(what: str, printed: float, ours: float) -> Row:
    """A speed-up of the paper beside a modelled one."""
    return Row(what=what, printed=printed, ours=ours, unit="x", why=_WHY, explains=_EXPLAINS)


def _speedups(
    sources: Sources,
    title: str,
    hardware: Hardware,
    gpus: int,
    tokens: int,
    printed: dict[tuple[int, str], tuple[float, float]],
) -> PaperTable:
    rows = []
    bars: dict[str, dict[str, float]] = {}
    for (top_k, name), values in printed.items():
        work = _workload(name, top_k, tokens, gpus)
        routing = _routing(sources, work.num_layers)
        base = _seconds(work, hardware, gpus, "padded", routing)
        for system, strategy, value in (("FasterMoE", "fastermoe", values[0]), ("Pro-Prophet", "prophet", values[1])):
            ours = base / _seconds(work, hardware, gpus, strategy, routing)
            rows.append(_ratio(f"top-{top_k} MoE-GPT-{name}, {gpus} GPUs: {system}", value, ours))
            bars.setdefault(f"{name} k={top_k}", {})[f"{system}, paper"] = value
            bars[f"{name} k={top_k}"][f"{system}, ours"] = ours
    return PaperTable(
        title=title,
        rows=tuple(rows),
        assumptions=_ASSUMED,
        chart=partial(bar_chart, bars, f"{title}", "speed-up over DS-MoE"),
    )


def table_4(sources: Sources) -> PaperTable:
    """16 GPUs with NVLink pairs, 16384 tokens."""
    return _speedups(sources, "Pro-Prophet Table IV: 4 HPNV nodes", _HPNV, 16, 16384, _TABLE_4)


def table_5(sources: Sources) -> PaperTable:
    """8 slower GPUs, 4096 tokens."""
    return _speedups(sources, "Pro-Prophet Table V: 2 LPWNV nodes", _LPWNV, 8, 4096, _TABLE_5)


_FIGURE_10 = {  # nodes, top-k: least and most speed-up over the better of DeepSpeed-MoE and FasterMoE
    (4, 1): (1.01, 1.23),
    (8, 1): (1.08, 1.31),
    (4, 2): (1.14, 1.48),
    (8, 2): (1.05, 1.31),
}


def figure_10(sources: Sources) -> PaperTable:
    """Fig. 10 and 12: the default cluster; over the better baseline, and per iteration over FasterMoE."""
    rows = []
    bars: dict[str, dict[str, float]] = {}
    for (nodes, top_k), (least, most) in _FIGURE_10.items():
        gpus, found = 4 * nodes, []
        for name in _MODELS if nodes == 4 else ("S", "M", "DS", "DM"):
            work = _workload(name, top_k, 1024 * gpus, gpus)
            routing = _routing(sources, work.num_layers)
            seconds = {s: _seconds(work, _HPWNV, gpus, s, routing) for s in ("padded", "fastermoe", "prophet")}
            found.append(min(seconds["padded"], seconds["fastermoe"]) / seconds["prophet"])
            bars.setdefault(f"{nodes} nodes k={top_k}", {})[name] = found[-1]
            if (nodes, top_k, name) == (4, 1, "M"):
                ratio = seconds["fastermoe"] / seconds["prophet"]
                rows.append(_ratio("Fig. 12: over FasterMoE, mean", 1.34, ratio))
        for what, printed, ours in (("least", least, min(found)), ("most", most, max(found))):
            rows.append(_ratio(f"Fig. 10: {nodes} nodes, top-{top_k}, {what}", printed, ours))
    return PaperTable(
        title="Pro-Prophet Fig. 10 and 12: HPWNV nodes, over the better baseline",
        rows=tuple(rows),
        assumptions=(*_ASSUMED, "1024 tokens a GPU; on 32 GPUs two groups of 16, each with all experts"),
        chart=partial(bar_chart, bars, "Pro-Prophet Fig. 10", "speed-up"),
    )


def figure_11(sources: Sources) -> PaperTable:
    """Fig. 11: single layers of MoE-GPT-M, over DeepSpeed-MoE and over FasterMoE."""
    rows = []
    work = _workload("M", 1, 16384, 16)
    routing = _routing(sources, work.num_layers)
    model = StepModel(work, _HPWNV, policy("moc", slots=1), routing, 4)
    costs, placement = model.block_costs(16), uniform_placement(_EXPERTS, 16)
    seconds: dict[str, list[float]] = {}
    for layer in range(work.num_layers):
        tokens = routing.tokens(_SAMPLES[-1], layer, 1024, 16)
        for name in ("padded", "fastermoe", "prophet"):
            known = replace(costs, transfer=STRATEGIES[name].transfer)
            (plan,) = plan_shadows(tokens[None], [placement], [known], STRATEGIES[name].shadows)
            block_s = evaluate(tokens, placement, plan, known, STRATEGIES[name]).block_s
            dense_s = costs.dense_forward_s + costs.dense_backward_s
            seconds.setdefault(name, []).append(block_s + dense_s)
    for base, label, printed in (("padded", "DS-MoE", (1.60, 2.25)), ("fastermoe", "FasterMoE", (1.09, 1.49))):
        ratios = [slow / fast for slow, fast in zip(seconds[base], seconds["prophet"], strict=True)]
        for what, value, ours in (("least", printed[0], min(ratios)), ("most", printed[1], max(ratios))):
            rows.append(_ratio(f"over {label}, {what} of layers", value, ours))
    return PaperTable(
        title="Pro-Prophet Fig. 11: single layers of MoE-GPT-M",
        rows=tuple(rows),
        assumptions=_ASSUMED,
    )


def components(sources: Sources) -> PaperTable:
    """Fig. 10, 14 and 15: default cluster; the planner and the scheduler alone, and simpler policies."""
    rows = []
    for top_k, planner, scheduler, top2, top3 in ((1, 1.26, 1.14, 1.795, 2.07), (2, 1.12, 1.01, 1.39, 1.39)):
        work = _workload("M", top_k, 16384, 16)
        routing = _routing(sources, work.num_layers)
        blocking = replace(_HPWNV, overlap=0.0)
        plain = _seconds(work, blocking, 16, "plain", routing)
        planned = _seconds(work, blocking, 16, "prophet", routing)
        scheduled = _seconds(work, _HPWNV, 16, "prophet", routing)
        simple = [_seconds(work, _HPWNV, 16, name, routing) for name in ("top2", "top3")]
        rows += [
            _ratio(f"top-{top_k}: planner over nothing", planner, plain / planned),
            _ratio(f"top-{top_k}: and scheduler", scheduler, planned / scheduled),
            _ratio(f"top-{top_k}: over top2", top2, simple[0] / scheduled),
            _ratio(f"top-{top_k}: over top3", top3, simple[1] / scheduled),
        ]
    return PaperTable(
        title="Pro-Prophet Fig. 14 and 15: MoE-GPT-M, 4 HPWNV nodes", rows=tuple(rows), assumptions=_ASSUMED
    )


def balance(sources: Sources) -> PaperTable:
    """Fig. 16: how much evener Pro-Prophet's planner leaves the ranks than FasterMoE."""
    trace = load_trace(sources.routing_path())
    placement = uniform_placement(trace.counts.shape[3], trace.counts.shape[2])
    quotients: dict[QuotaRule, list[float]] = {"local": [], "balanced": []}
    for sample in range(60, len(trace.iteration), 20):
        for layer in range(0, trace.counts.shape[1], 2):
            tokens = trace.counts[sample, layer].T
            found: dict[tuple[str, QuotaRule], float] = {}
            for name in ("prophet", "fastermoe"):
                strategy = STRATEGIES[name]
                costs = replace(reference_costs(), transfer=strategy.transfer)
                (plan,) = plan_shadows(tokens[None], [placement], [costs], strategy.shadows)
                for rule in quotients:
                    judged = replace(plan, quota_rule=rule)
                    found[name, rule] = evaluate(tokens, placement, judged, costs, strategy).balance_ratio
            for rule, values in quotients.items():
                quotient = found["prophet", rule] / found["fastermoe", "local"]
                if np.isfinite(quotient):
                    values.append(quotient)
    rows = (
        Row(what="RB over FasterMoE's, largest", printed=11.01, ours=max(quotients["balanced"]), unit="x",
            why="our planner also balances quotas over the holders of an expert, theirs does not"),
        Row(what="the same, mean", printed=None, ours=fmean(quotients["balanced"]), unit="x"),
        Row(what="our plans with holders that keep only their own rows, mean", printed=None, unit="x",
            ours=fmean(quotients["local"])),
    )  # fmt: skip
    return PaperTable(
        title="Pro-Prophet Fig. 16: balance",
        rows=rows,
        assumptions=("32 experts on 16 ranks of the recorded routing after iteration 600, FasterMoE's constants",),
    )


def arithmetic(_: Sources) -> PaperTable:
    """What follows from the printed tables alone."""
    rows = [
        Row(what="Table I, MoE-GPT-M: search, place, reduce", printed=29.2, ours=3.2 + 12.5 + 12.5, unit="%"),
        Row(what="least speed-up over DS-MoE, HPNV", printed=1.71, ours=min(p for _, p in _TABLE_4.values()), unit="x"),
        Row(what="most speed-up over DS-MoE, HPNV", printed=2.63, ours=max(p for _, p in _TABLE_4.values()), unit="x"),
    ]
    for name, table, printed in (("HPNV", _TABLE_4, (1.10, 1.35)), ("LPWNV", _TABLE_5, (1.08, 1.50))):
        quotients = [prophet / faster for faster, prophet in table.values()]
        rows.append(Row(what=f"least over FasterMoE, {name}", printed=printed[0], ours=min(quotients), unit="x"))
        rows.append(Row(what=f"most over FasterMoE, {name}", printed=printed[1], ours=max(quotients), unit="x"))
    for what, printed_mean, values in (
        ("planner", 1.19, (1.26, 1.12)), ("scheduler", 1.075, (1.14, 1.01)), ("both", 1.025, (1.03, 1.02))
    ):  # fmt: skip
        rows.append(Row(what=f"Fig. 14, mean of the {what}", printed=printed_mean, ours=fmean(values), unit="x"))
    return PaperTable(title="Pro-Prophet: arithmetic of its tables", rows=tuple(rows))


PAPERS = {
    "prophet-end-to-end": figure_10,
    "prophet-layers": figure_11,
    "prophet-hpnv": table_4,
    "prophet-lpwnv": table_5,
    "prophet-components": components,
    "prophet-balance": balance,
    "prophet-arithmetic": arithmetic,
}
