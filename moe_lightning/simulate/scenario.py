"""Scenario and result of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.failures import NS, Event
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.step_model import StepModel
from moe_lightning.simulate.workload import RoutingScenario, Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A run on a cluster whose nodes come and go.

    Attributes:
        workload, hardware, policy, routing: see their classes.
        events: changes of the cluster, ascending; the first holds the nodes that are there at the start.
        num_nodes: of the cluster when nothing has failed.
        duration_s: of the simulation.
        mesh: how the model lies over the ranks; the routing gets a layer for each stage at least.

    Raises:
        ConfigurationError: a duration that is not positive, or events in which no node joins.
    """

    workload: Workload
    hardware: Hardware
    policy: Policy
    routing: RoutingScenario
    events: Sequence[Event]
    num_nodes: int
    duration_s: float
    mesh: MeshSpec = field(default_factory=MeshSpec)

    def __post_init__(self) -> None:
        if not self.duration_s > 0:
            raise ConfigurationError(f"duration_s={self.duration_s} must be above 0")
        object.__setattr__(self, "routing", self.routing.with_layers(self.mesh.pp))
        there = max((node for event in self.events for node in event.joined), default=-1) + 1
        if not there:
            raise ConfigurationError("no node ever joins: give a trace or events with at least one node")

    @property
    def faults_per_s(self) -> float:
        return sum(bool(event.failed) for event in self.events) / self.duration_s

    @property
    def expected_faults_per_s(self) -> float:
        """Rate for which checkpoints are planned: at least one fault in the simulation."""
        return max(self.faults_per_s, 1 / self.duration_s)


def model_of(scenario: Scenario) -> StepModel:
    """Return the model that plans and times the steps of a scenario."""
    parts = (scenario.workload, scenario.hardware, scenario.policy, scenario.routing)
    return StepModel(*parts, scenario.num_nodes, scenario.mesh)


@dataclass(frozen=True, kw_only=True)
class SteadyPhase:
    """A stretch of time in which nothing changed; samples per second while training, stalls left out."""

    start_s: float
    end_s: float
    state: str
    used_nodes: int
    live_nodes: int
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One way back to training: at what time, from what source, how long, and the steps that were undone."""

    time_s: float
    source: str
    seconds: float
    lost_steps: int
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a simulation.

    Attributes:
        provided_ns, useful_ns, lost_ns, overhead_ns, idle_ns: node-nanoseconds; the first is the sum of the others.
        steps, samples: that count at the end.
        lost_steps: that were undone.
        duration_s: simulated.
        step_s: of the first world, without stalls.
        stall_s: that training waited for checkpoints.
        rebalance_s: that it waited for experts to move.
        plt: proportion of lost tokens.
        interval_steps: between checkpoints at the end, not shorter than writing one takes.
        checkpoints, written_bytes: committed.
        rank_bytes: state of one rank; host_bytes: snapshots of one node.
        warnings: what the cluster could not hold.
        window: what a lossless window of the first world costs, in figures; None where there is none.
        recoveries, spans: over time.
    """

    provided_ns: int
    useful_ns: int
    lost_ns: int
    overhead_ns: int
    idle_ns: int
    steps: int
    samples: int
    lost_steps: int
    duration_s: float
    step_s: float
    imbalance: float
    stall_s: float
    rebalance_s: float
    plt: float
    k_persist: int
    interval_steps: int
    checkpoints: int
    written_bytes: float
    exchange_bytes: float
    rank_bytes: float
    host_bytes: float
    warnings: tuple[str, ...] = ()
    window: str | None = None
    recoveries: tuple[Recovery, ...] = ()
    spans: tuple[SteadyPhase, ...] = field(default=(), repr=False)

    @property
    def goodput(self) -> float:
        """Samples that count, per second of the simulation."""
        return self.samples / self.duration_s

    def share(self, account: str) -> float:
        """Return an account's share of the node-seconds provided: useful, lost, overhead or idle."""
        return int(getattr(self, f"{account}_ns")) / max(1, self.provided_ns)

    def table(self) -> str:
        """The figures as lines of text."""
        by_source = Counter(recovery.source for recovery in self.recoveries)
        sources = ", ".join(f"{count} {source}" for source, count in by_source.items()) or "none"
        recovering_s = sum(recovery.seconds for recovery in self.recoveries)
        rows = [
            ("step", f"{self.step_s:.4g} s, busiest rank {self.imbalance:.3f} of the mean"),
            ("goodput", f"{self.goodput:.4g} samples/s, {self.steps} steps, {self.samples} samples"),
            *((name, f"{100 * self.share(name):.3f} % of node-seconds") for name in _ACCOUNTS),
            ("provided", f"{self.provided_ns / NS / 3600:.2f} node-hours"),
            ("stalls", f"{self.stall_s:.1f} s of checkpoints, {self.rebalance_s:.1f} s of rebalancing"),
            ("recoveries", f"{recovering_s:.1f} s; {sources}"),
            ("rolled back", f"{self.lost_steps} steps"),
            ("PLT", f"{self.plt:.5f}, K_persist {self.k_persist} at the end"),
            (
                "checkpoints",
                f"{self.checkpoints} every {self.interval_steps} steps, {format_bytes(self.written_bytes)} written",
            ),
            ("exchanged", f"{format_bytes(self.exchange_bytes)} a step, all ranks"),
            (
                "memory",
                f"{format_bytes(self.rank_bytes)} of state a rank, {format_bytes(self.host_bytes)} of snapshots a node",
            ),
        ]
        if self.window is not None:
            rows.append(("windows", self.window))
        rows += [("warning", text) for text in self.warnings]
        return "\n".join(f"{name:<12} {text}" for name, text in rows)


_ACCOUNTS = ("useful", "lost", "overhead", "idle")


def format_bytes(num_bytes: float) -> str:
    """Return a size in three digits, with its unit."""
    num_bytes = float(f"{num_bytes:.3g}")
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} PB"
