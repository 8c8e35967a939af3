"""Recommendation for a model on a cluster that fails: each choice by the rule of its paper, checked by simulation.

slots: the fewest whose step is within one percent of the best, as far as memory goes. min_replicas: one more than the
nodes that fail at once (Lazarus 4.1), or one where that trains more. protection: none where replicas survive such a
failure, else parity or copies (REFT 4). K_snapshot, K_persist and the interval: MoC-System 5.3, for checkpoints of all
experts, of some, and for lossless windows; of these the first that trains within one percent of the best, tokens that
are lost not counted. rebalance_every: the best of a few by simulation. What a choice buys is the goodput and PLT of the
same run with that choice undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_lightning.balancing.cluster import affordable_replicas
from moe_lightning.balancing.rules import ONE_NODE_RULES
from moe_lightning.checkpoint.protection import choose_protection
from moe_lightning.checkpoint.schedule import adapt
from moe_lightning.config import build_config
from moe_lightning.dispatch.placement import uniform_slots
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.mesh_search import ROOM, MeshAdvice, search_mesh
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.scenario import Report, Scenario, model_of
from moe_lightning.simulate.step_model import StepModel
from moe_lightning.text_table import table


def mixture_of(scenario: Scenario) -> str | None:
    """Return what mixing nodes costs without faults; None where all nodes are alike.

    A cluster is compared with as many nodes that all have the mean speed, and with itself under the same work for all
    ranks.
    """
    hardware, nodes = scenario.hardware, scenario.num_nodes
    speeds = hardware.rank_speeds(nodes * hardware.ranks_per_node)[:: hardware.ranks_per_node]
    if (speeds == speeds[0]).all():
        return None

    def rate(by_speed: bool = scenario.policy.by_speed, **changes: Any) -> float:
        machine = replace(hardware, **changes)
        policy = replace(scenario.policy, by_speed=by_speed)
        model = StepModel(scenario.workload, machine, policy, scenario.routing, nodes, scenario.mesh)
        usable = model.usable_nodes(nodes)
        return scenario.workload.samples_per_step(usable * machine.ranks_per_node) / model.cost(usable, 0, 0).step_s

    mixed, even, alike = rate(), rate(by_speed=False), rate(speeds=[float(np.mean(speeds))])
    return (
        f"mixing costs {100 * (1 - mixed / alike):.1f} % against {nodes} nodes of the mean speed, "
        f"{100 * (1 - even / alike):.1f} % if all ranks got the same work"
    )


_REBALANCE_PERIODS = (50, 200, 1000)
_MORE_SLOTS = 4
_WORTH = 0.01
"""Gain for which replicas, or whole checkpoints, are given up."""


@dataclass(frozen=True, kw_only=True)
class RecommendedChoice:
    """One choice: its value, what it was compared with, and what that would cost."""

    name: str
    value: object
    instead: object
    report: Report


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommended policy, its prediction, and each choice undone.

    Attributes:
        scenario: with the mesh that was found.
        policy, report: the recommended policy and its prediction.
        choices: each choice undone.
        mixture: what unlike nodes cost; None where they are alike.
        lossless: the same with lossless windows; None where the policy has them.
        meshes: that were searched; None where the mesh was given.
    """

    scenario: Scenario
    policy: Policy
    report: Report
    choices: tuple[RecommendedChoice, ...]
    mixture: str | None = None
    lossless: Report | None = None
    meshes: MeshAdvice | None = None

    def table(self) -> str:
        """The prediction, what unlike nodes cost, and a line for each choice."""
        lines = [self.report.table()]
        if self.mixture is not None:
            lines.append(f"{'speeds':<12} {self.mixture}")
        if self.lossless is not None and self.lossless.samples:
            lines.append(
                f"{'lost tokens':<12} {100 * self.report.plt:.2g} %, for "
                f"{100 * (self.report.samples / self.lossless.samples - 1):.2g} % more samples than with lossless "
                "windows: in all more tokens count; policy.lossless=true loses none"
            )
        rows = []
        for choice in self.choices:
            gain = f"{choice.report.goodput / self.report.goodput - 1:+.2%}" if self.report.goodput else "-"
            rows.append((choice.name, choice.value, choice.instead, gain, f"{choice.report.plt:.5f}"))
        return "\n".join([*lines, table(("choice", "value", "instead", "goodput", "PLT instead"), rows)])


def recommend(
    scenario: Scenario,
    simultaneous: int = 1,
    fixed: Mapping[str, Any] | None = None,
    fixed_mesh: Mapping[str, Any] | None = None,
) -> Advice:
    """The policy for a scenario, and its mesh.

    Args:
        simultaneous: nodes that fail at once.
        fixed: parts of the policy that stay as they are.
        fixed_mesh: parts of the mesh that stay, while the others are searched; None: it is that of the scenario.

    Raises:
        ConfigurationError: a model that does not fit the cluster, or a rule that does not place the fixed replicas.
    """
    fixed = fixed or {}
    meshes = None if fixed_mesh is None else search_mesh(scenario, fixed_mesh)
    if meshes is not None:
        scenario = replace(scenario, mesh=meshes.mesh)
    several = min(simultaneous + 1, scenario.num_nodes)
    if scenario.policy.placement in ONE_NODE_RULES:
        several = 1
        if fixed.get("min_replicas", 1) > 1:
            raise ConfigurationError(
                f"policy.placement={scenario.policy.placement} leaves experts on one node, and policy.min_replicas="
                f"{fixed['min_replicas']} asks for more: use packed, or min_replicas=1"
            )
    wanted = [scenario.policy.min_replicas] if "min_replicas" in fixed else sorted({1, several})
    candidates = [_candidate(scenario, simultaneous, fixed, replicas) for replicas in wanted]
    policy, report, lossless = candidates[-1]
    for other in candidates[:-1]:  # replicas cost sums of gradients; they must not cost more than they save
        if other[1].samples > (1 + _WORTH) * report.samples:
            policy, report, lossless = other
    experts = scenario.workload.num_experts
    undone: dict[str, Any] = {
        "slots": max(1, -(-experts // _stage_ranks(scenario))),
        "min_replicas": 1 if policy.min_replicas > 1 else several,
        "lossless": False,
        "k_snapshot": experts,
        "k_persist": experts,
        "interval_steps": 10 * (policy.interval_steps or 1),
        "rebalance_every": 0,
        "protection": "none",
    }
    choices = []
    for name, instead in undone.items():
        if getattr(policy, name) in (instead, None) or name in fixed:
            continue
        changes = {name: instead} | ({"k_snapshot": experts} if name in ("k_persist", "lossless") else {})
        worse = simulate(_with(scenario, policy, **changes))
        choices.append(RecommendedChoice(name=name, value=getattr(policy, name), instead=instead, report=worse))
    mixture = mixture_of(_with(scenario, policy))
    return Advice(
        scenario=scenario,
        policy=policy,
        report=report,
        choices=tuple(choices),
        mixture=mixture,
        lossless=lossless,
        meshes=meshes,
    )


def _candidate(
    scenario: Scenario, simultaneous: int, fixed: Mapping[str, Any], replicas: int
) -> tuple[Policy, Report, Report | None]:
    """The best policy with so many replicas of every expert, its prediction, and that of lossless windows where these
    are not the best.
    """
    policy = replace(scenario.policy, min_replicas=replicas)
    if "slots" not in fixed:
        policy = replace(policy, slots=_slots(replace(scenario, policy=policy)))
    assert policy.slots is not None
    experts, ranks = scenario.workload.num_experts, _stage_ranks(scenario)
    most = max(1, ranks // -(-experts // policy.slots))  # of the uniform placement, with which training starts
    possible = affordable_replicas(
        experts,
        slots=ranks * policy.slots,
        num_nodes=max(1, scenario.num_nodes // scenario.mesh.pp),
        min_replicas=min(replicas, most),
    )
    if "min_replicas" not in fixed or min(replicas, ranks) > most:
        policy = replace(policy, min_replicas=possible)
    if "protection" not in fixed:
        replicated = possible > simultaneous
        layout = choose_protection(range(scenario.num_nodes), replicated=replicated, failures=simultaneous)
        policy = build_config(Policy, vars(policy) | {"protection": layout.method})
    kinds: list[dict[str, Any]] = [
        {"lossless": False, "k_snapshot": experts, "k_persist": experts},
        {"lossless": False},
        {"lossless": True},
    ]
    if fixed.keys() & {"lossless", "k_persist", "scopes", "saving"}:
        kinds = [{}]
    elif "k_snapshot" in fixed:
        kinds = kinds[1:]
    ways: list[tuple[Policy, Report]] = []
    for kind in kinds:
        way = _checkpoints(_with(scenario, policy, **kind), fixed.keys() | kind.keys())
        periods = [way.rebalance_every] if "rebalance_every" in fixed else _REBALANCE_PERIODS
        ways.append(_best_period(scenario, way, periods))
    worth = [report.samples * (1 - report.plt) for _, report in ways]
    policy, report = next(way for way, value in zip(ways, worth, strict=True) if value >= (1 - _WORTH) * max(worth))
    is_lossy = not policy.lossless and report.plt > 0
    return policy, report, next((other for way, other in ways if is_lossy and way.lossless), None)


def _best_period(scenario: Scenario, policy: Policy, periods: Sequence[int]) -> tuple[Policy, Report]:
    """The policy with the period of rebalancing that trains most samples; of equals the longest, which moves least."""
    runs = {period: simulate(_with(scenario, policy, rebalance_every=period)) for period in sorted(periods)[::-1]}
    best = max(runs, key=lambda period: runs[period].samples)
    return replace(policy, rebalance_every=best), runs[best]


def _with(scenario: Scenario, policy: Policy, **changes: Any) -> Scenario:
    return replace(scenario, policy=replace(policy, **changes))


def _stage_ranks(scenario: Scenario) -> int:
    """Ranks over which the experts of a layer lie."""
    return scenario.num_nodes * scenario.hardware.ranks_per_node // scenario.mesh.pp


def _slots(scenario: Scenario) -> int:
    """The fewest slots whose step is within one percent of the best that memory allows."""
    hardware, experts = scenario.hardware, scenario.workload.num_experts
    ranks = _stage_ranks(scenario)
    least = uniform_slots(experts, ranks, scenario.policy.min_replicas)
    seconds: dict[int, float] = {}
    for slots in range(least, min(experts, least + _MORE_SLOTS) + 1):
        policy = replace(scenario.policy, slots=slots)
        model = StepModel(scenario.workload, hardware, policy, scenario.routing, scenario.num_nodes, scenario.mesh)
        if seconds and model.memory().total > ROOM * hardware.memory_bytes:
            break
        seconds[slots] = model.cost(model.usable_nodes(scenario.num_nodes), 0, 0).step_s
    best = min(seconds.values())
    return next(slots for slots, step_s in seconds.items() if step_s <= 1.01 * best)


def _checkpoints(scenario: Scenario, fixed: Set[str]) -> Policy:
    """K_snapshot and K_persist by MoC-System's adaptive configuration, and the interval that costs least.

    Args:
        fixed: names of the parts of the policy that stay.
    """
    work, names = scenario.workload, ("k_snapshot", "k_persist")
    given = {name: min(k, work.num_experts) for name in names if (k := getattr(scenario.policy, name))}
    policy = replace(scenario.policy, **given)  # more than there are mean all, as in training
    fixed_k = {name: given.get(name, work.num_experts) for name in names if name in fixed}
    least = fixed_k.get("k_persist", 1)  # what is written is copied
    ranks = scenario.num_nodes * scenario.hardware.ranks_per_node
    cost = model_of(scenario).cost(scenario.num_nodes, 0, 0)
    plans = {k: replace(policy, k_snapshot=k) if policy.lossless else policy for k in range(1, work.num_experts + 1)}
    costs = {k: save_cost(work, scenario.hardware, plan, ranks, k, k) for k, plan in plans.items()}
    found = adapt(
        snapshot_s=lambda k: costs[max(k, least)].snapshot_s,
        persist_s=lambda k: costs[fixed_k.get("k_persist", k)].persist_s,
        step_s=cost.step_s,
        overlap_s=cost.overlap_s,
        num_layers=work.num_layers,
        num_experts=work.num_experts,
        ep_size=min(ranks, work.num_experts),
        failure_rate_per_s=scenario.expected_faults_per_s,
        restart_s=policy.restart_s,
        k_snapshot=fixed_k.get("k_snapshot"),
    )
    values: dict[str, Any] = {
        "k_snapshot": max(found.k_snapshot, least),
        "k_persist": None if policy.lossless else found.k_persist,
        "interval_steps": found.interval_steps,
    }
    return replace(policy, **{name: value for name, value in values.items() if name not in fixed})
