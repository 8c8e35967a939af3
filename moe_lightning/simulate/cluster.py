"""State of a simulated cluster: accounts of time, saved states, and worlds of nodes with their experts.

Accounts: every nanosecond of every live node goes to exactly one. useful: steps that still count at the end. lost:
steps, and parts of steps, that a fault undid. overhead: training waits for stalls of snapshots, detection, restarts,
migrations. idle: live nodes without work. All in integers, so that nothing is lost in rounding.

Saved states: a node stands for its ranks. It holds their experts, and one snapshot with the experts that it wrote;
protection puts copies and parities on other nodes as `checkpoint.protection` says. The library plans every recovery
from the survivors' inventories.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.migration import align_placements, held_states
from moe_lightning.checkpoint.policy import CheckpointLedger
from moe_lightning.checkpoint.recovery_plan import (
    HeldExpert,
    Origin,
    RankInventory,
    RecoveryPlan,
    SnapshotInventory,
    StorageInventory,
)
from moe_lightning.checkpoint.selection import DynamicKRule, parse_scopes
from moe_lightning.dispatch.placement import Placement
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.mesh import Part, parts_of_ranks
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.scenario import Scenario
from moe_lightning.simulate.step_model import StepModel
from moe_lightning.simulate.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Progress when a state was taken: the point to which a rollback returns.

    Attributes:
        step: steps done.
        useful_ns: node-nanoseconds of them.
        samples: trained in them.
    """

    step: int = 0
    useful_ns: int = 0
    samples: int = 0


@dataclass(kw_only=True)
class Accounts:
    """Node-nanoseconds by account, steps and samples; `partial_ns` is work on the step that is running."""

    step: int = 0
    samples: int = 0
    useful_ns: int = 0
    lost_ns: int = 0
    overhead_ns: int = 0
    idle_ns: int = 0
    partial_ns: int = 0
    provided_ns: int = 0
    lost_steps: int = 0
    now_ns: int = 0
    _unrecorded_steps: int = 0

    def work(self, duration_ns: int, nodes: int, live: int) -> None:
        """`nodes` of the `live` ones compute on the running step."""
        self.partial_ns += duration_ns * nodes
        self._provide(duration_ns, nodes, live)

    def finish_steps(self, count: int, samples: int) -> None:
        """The running step and all the work since the last call belong to `count` finished steps."""
        self.useful_ns += self.partial_ns
        self.partial_ns = 0
        self.step += count
        self.samples += samples
        self._unrecorded_steps += count

    def take_unrecorded(self) -> int:
        """Return the steps that count since the last call."""
        steps, self._unrecorded_steps = self._unrecorded_steps, 0
        return steps

    def wait(self, duration_ns: int, nodes: int, live: int) -> None:
        """`nodes` wait for something that training needs; the other live ones are idle."""
        self.overhead_ns += duration_ns * nodes
        self._provide(duration_ns, nodes, live)

    def _provide(self, duration_ns: int, nodes: int, live: int) -> None:
        assert duration_ns >= 0
        assert 0 <= nodes <= live
        self.idle_ns += duration_ns * (live - nodes)
        self.provided_ns += duration_ns * live
        self.now_ns += duration_ns

    def abort_step(self) -> None:
        """The running step is not applied."""
        self.lost_ns += self.partial_ns
        self.partial_ns = 0

    def mark(self) -> Mark:
        return Mark(step=self.step, useful_ns=self.useful_ns, samples=self.samples)

    def roll_back(self, mark: Mark) -> None:
        """Everything after the mark is lost."""
        self.abort_step()
        assert mark.step <= self.step
        self.lost_ns += self.useful_ns - mark.useful_ns
        self.lost_steps += self.step - mark.step
        self.step, self.useful_ns, self.samples = mark.step, mark.useful_ns, mark.samples
        self._unrecorded_steps = 0

    def close(self) -> None:
        """The simulation ends: a step that is half done was of no use. Checks that nothing is missing."""
        self.abort_step()
        assert self.provided_ns == self.useful_ns + self.lost_ns + self.overhead_ns + self.idle_ns


SESSION = "simulated"


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSnapshot:
    """A state in the host memory of the nodes of a world.

    Attributes:
        mark: when it was taken.
        nodes: writers, in the order of the world.
        versions_LE: step of the newest copy of each expert in it.
        writer_LE: which of the nodes wrote each expert.
        ledger: of tokens, as it was then.
        lost: nodes that have failed since.
    """

    mark: Mark
    nodes: tuple[int, ...]
    versions_LE: IntArray
    writer_LE: IntArray
    ledger: CheckpointLedger
    lost: set[int] = field(default_factory=set)

    def experts_by_writer(self) -> dict[int, tuple[HeldExpert, ...]]:
        """Return the experts in each writer's part."""
        found: dict[int, list[HeldExpert]] = defaultdict(list)
        for (layer, expert), version in np.ndenumerate(self.versions_LE):
            writer = int(self.writer_LE[layer, expert])
            found[writer].append(HeldExpert(int(layer), int(expert), int(version), int(version)))
        return {writer: tuple(experts) for writer, experts in found.items()}

    def on_nodes(self, policy: Policy, *, protected: bool) -> dict[int, list[SnapshotInventory]]:
        """By live node: its own part, and with protection the copies or parities of others."""
        experts = self.experts_by_writer()
        found: dict[int, list[SnapshotInventory]] = defaultdict(list)

        def keep(kind: Origin, on: int, writer: int, members: tuple[int, ...] = ()) -> None:
            if self.nodes[on] not in self.lost:
                part = SnapshotInventory(
                    kind=kind,
                    writer=writer,
                    session=SESSION,
                    step=self.mark.step,
                    resumes_at=self.mark.step,
                    world_size=len(self.nodes),
                    experts=experts.get(writer, ()),
                    holder=on if kind is Origin.PARITY else -1,
                    members=members,
                )
                found[self.nodes[on]].append(part)

        for writer in range(len(self.nodes)):
            keep(Origin.ARENA, writer, writer)
        if protected and self.nodes:
            layout = policy.layout_of(len(self.nodes))
            for writer, holders in enumerate(layout.holders):
                for holder in holders:
                    keep(Origin.COPY, holder, writer)
            for group in layout.groups:
                for holder in group:
                    for writer in group:
                        if writer != holder:
                            keep(Origin.PARITY, holder, writer, group)
        return found


def inventories(
    live: Sequence[int],
    experts: Mapping[int, tuple[tuple[int, int], ...]],
    step: int,
    policy: Policy,
    *,
    newest: HeldSnapshot,
    stored: HeldSnapshot,
) -> list[RankInventory]:
    """One inventory of every live node.

    Args:
        live: nodes, ascending.
        experts: of every node with live state at `step`, (layer, expert) pairs that it holds; one holder of each is
            enough.
        step: of the live state.
        policy: whether live state and memory may be used, and how memory is protected.
        newest: snapshot, the protected one.
        stored: what was in memory when the newest checkpoint on storage was taken (MoC's recovery buffer).
    """
    parts: dict[int, list[SnapshotInventory]] = defaultdict(list)
    kept = [newest, stored] if policy.memory_recovery or policy.protection != "none" else []
    for index, snapshot in enumerate(kept):
        if index and snapshot.mark.step == newest.mark.step:
            continue
        for node, held in snapshot.on_nodes(policy, protected=index == 0).items():
            parts[node] += held
    usable = experts if policy.live_recovery else {}
    return [
        RankInventory(
            rank=rank,
            node=str(node),
            live_version=step if node in usable else -1,
            experts=usable.get(node, ()),
            snapshots=tuple(parts.get(node, ())),
        )
        for rank, node in enumerate(live)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """A checkpoint that is being written.

    Attributes:
        snapshot: that is written.
        stored_LE: versions on storage once it is.
        done_ns: when.
        nbytes: that are written.
    """

    snapshot: HeldSnapshot
    stored_LE: IntArray
    done_ns: int
    nbytes: float


class SavedState:
    """The checkpoints of a simulated run; selection, ledger and Dynamic-K are those of training.

    Counts are the routing's, layer by layer; nothing is counted where each checkpoint holds all experts.

    Args:
        workload, policy: of the run.
        num_layers: layers that are told apart, each standing for several of the model.
        planned_assignments: of one layer in the whole training, the denominator of PLT.
        interval_steps: between checkpoints.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        *,
        num_layers: int,
        planned_assignments: int,
        interval_steps: int,
    ) -> None:
        experts = workload.num_experts
        self.shape = num_layers, experts
        self.interval_steps = interval_steps
        some = None if policy.lossless else policy.k_snapshot  # a window is one checkpoint of everything
        self.k_snapshot = min(experts, some or experts)
        self.k_persist = min(self.k_snapshot, policy.k_persist or experts)
        self.partial = self.k_persist < experts
        self.committed_bytes: list[float] = []  # of each checkpoint
        self.saves = 0  # begun in this world
        nobody: IntArray = np.zeros(self.shape, dtype=np.int64)
        self._counts = CheckpointLedger(
            num_layers=num_layers,
            num_experts=experts,
            planned_assignments=planned_assignments,
            owners=nobody,
            num_ranks=1,
            scopes=parse_scopes(policy.scopes),
        )
        self._memory_versions = self._storage_versions = nobody
        # On storage: at first the initial state, which anybody can make and no node has in memory.
        self.stored = HeldSnapshot(
            mark=Mark(), nodes=(), versions_LE=nobody, writer_LE=nobody, ledger=copy(self._counts)
        )
        self.newest = self.stored
        self._pending: deque[_Pending] = deque()
        self._dynamic: DynamicKRule | None = None
        if policy.plt_threshold is not None and self.partial:
            self._dynamic = DynamicKRule(
                k0=self.k_persist,
                num_experts=experts,
                threshold=policy.plt_threshold,
                looks_ahead=policy.plt_lookahead,
            )

    @property
    def plt(self) -> float:
        return self._counts.plt

    @property
    def storage(self) -> Mark:
        """Progress at the newest checkpoint on storage."""
        return self.stored.mark

    def begin_session(self) -> None:
        """A world begins: its first checkpoint holds all experts."""
        self.saves = 0

    def next_k(self) -> tuple[int, int]:
        """Return the experts of a layer that the next checkpoint copies, and those that it writes."""
        experts = self.shape[1]
        return (experts, experts) if self.saves == 0 else (self.k_snapshot, self.k_persist)

    def record(self, counts_LE: IntArray) -> None:
        """Tokens that each expert has been trained on since the last call."""
        if self.partial:
            self._counts.record(counts_LE)

    def begin(self, mark: Mark, nodes: tuple[int, ...], writer_LE: IntArray, *, done_ns: int, nbytes: float) -> None:
        """The nodes of a world took a snapshot of the present state, which will be on storage at `done_ns`."""
        if any(entry.snapshot.mark.step == mark.step for entry in self._pending):
            return  # this very state is on its way
        copied = written = np.ones(self.shape, dtype=np.bool_)
        if self._dynamic is not None and self.saves:
            self._dynamic.before_checkpoint(lambda k: self._counts.cost(self._counts.plan(max(k, self.k_snapshot), k)))
            self._raise_k()
        if self.partial:
            plan = self._counts.plan(*self.next_k())
            self._counts.begin(mark.step, plan)
            copied, written = plan.snapshot.mask(), plan.persist.mask()
        self.saves += 1
        self._memory_versions = np.where(copied, mark.step, self._memory_versions)
        self.newest = self._taken(mark, nodes, self._memory_versions, writer_LE)
        before = self._pending[-1].stored_LE if self._pending else self._storage_versions
        stored = np.where(written, mark.step, before)  # a checkpoint that is skipped leaves its turn to the next
        self._pending.append(_Pending(snapshot=self.newest, stored_LE=stored, done_ns=done_ns, nbytes=nbytes))

    def _taken(self, mark: Mark, nodes: tuple[int, ...], versions_LE: IntArray, writer_LE: IntArray) -> HeldSnapshot:
        ledger = copy(self._counts)
        return HeldSnapshot(mark=mark, nodes=nodes, versions_LE=versions_LE, writer_LE=writer_LE, ledger=ledger)

    def commit_written(self, now_ns: int) -> None:
        """Commit what has been written by now; what is older than the newest of it is void."""
        for done in [entry for entry in self._pending if entry.done_ns <= now_ns]:
            while self._pending.popleft() is not done:
                pass
            self.stored = done.snapshot
            self._storage_versions = done.stored_LE
            self.committed_bytes.append(done.nbytes)

    def note_snapshot(self, mark: Mark, nodes: tuple[int, ...], writer_LE: IntArray) -> None:
        """A snapshot of everything for protection, which storage will not get."""
        self.newest = self._taken(mark, nodes, np.full(self.shape, mark.step), writer_LE)

    def lose(self, nodes: Collection[int]) -> None:
        """These nodes have failed, and their memory with them."""
        pending = [entry.snapshot for entry in self._pending]
        for snapshot in (self.newest, self.stored, *pending):
            snapshot.lost.update(nodes)

    def on_storage(self) -> StorageInventory:
        """The newest written checkpoint."""
        versions = tuple(tuple(int(version) for version in row) for row in self._storage_versions)
        return StorageInventory(
            session=SESSION, step=self.storage.step, resumes_at=self.storage.step, versions=versions
        )

    def restore(self, plan: RecoveryPlan, now: Mark) -> Mark:
        """Book what a recovery loses; the mark at which training goes on."""
        is_live = plan.level == "live"
        if is_live and (plan.versions >= plan.version).all():
            return now
        mark = now if is_live else self._saved_at(plan.version).mark
        if self.partial:
            self._count_losses(plan)
        self._pending.clear()
        self._memory_versions = np.minimum(self._memory_versions, plan.versions)
        if self.newest.mark.step > mark.step:
            self.newest = self.stored  # a later one is void
        return mark

    def _saved_at(self, step: int) -> HeldSnapshot:
        return self.newest if self.newest.mark.step == step else self.stored

    def _count_losses(self, plan: RecoveryPlan) -> None:
        """Tokens that the restored experts have not seen are lost, after which K may rise."""
        if plan.level == "live":
            stale = np.argwhere(plan.versions < plan.version).tolist()
            lost = self._counts.lose({(layer, expert): int(plan.versions[layer, expert]) for layer, expert in stale})
        else:
            saved = self._saved_at(plan.version).ledger.state_dict()
            lost = self._counts.restore(saved, plan.version, plan.versions)
        if self._dynamic is not None:
            self._dynamic.after_fault(self._counts.plt_of(lost.sum(axis=1)))
            self._raise_k()

    def forget_memory(self) -> None:
        """Nothing in host memory can be used any more."""
        self.newest = self.stored = replace(self.stored, nodes=())

    def _raise_k(self) -> None:
        assert self._dynamic is not None
        self.k_persist = self._dynamic.k
        self.k_snapshot = max(self.k_snapshot, self.k_persist)


_MAX_ALIGNED_NODES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedWorld:
    """Nodes that train together, in the order of their ranks, and where their experts are.

    Attributes:
        nodes: of the cluster.
        placements: of each routed layer, on the ranks of the nodes.
        writers_LE: int64 [L, E], the node, by its place in the world, that snapshots each expert.
        sample: of the routing from which they were planned.
    """

    nodes: tuple[int, ...]
    placements: Sequence[Placement]
    writers_LE: IntArray
    sample: int


class ClusterState:
    """Map from ranks of the cluster to the experts whose state they hold now, and the worlds that could come next.

    Args:
        scenario: of the simulation.
        model: plans placements.
    """

    def __init__(self, scenario: Scenario, model: StepModel) -> None:
        self._model = model
        self._policy, self._hardware, self._workload = scenario.policy, scenario.hardware, scenario.workload
        self._scale = scenario.workload.num_layers / scenario.routing.num_layers
        nodes = max(node for event in scenario.events for node in event.joined) + 1
        shape = (scenario.routing.num_layers, scenario.workload.num_experts, nodes * scenario.hardware.ranks_per_node)
        self._held: BoolArray = np.zeros(shape, dtype=np.bool_)
        self._parts: dict[int, Part] = {}  # of the dense state, by rank
        self._all_parts: set[Part] = set()
        self._last_nodes: tuple[int, ...] = ()

    # ---------------------------------------------------------------- what is held

    def hold(self, world: SimulatedWorld) -> None:
        """The world trains: its ranks hold what its placements say, nobody else holds anything."""
        self.forget()
        self._held[:, :, self._ranks(world.nodes)] = held_states(world.placements)
        self._parts = self._needed_parts(world)
        self._all_parts = set(self._parts.values())
        self._last_nodes = world.nodes

    def forget(self) -> None:
        """No live state counts any more."""
        self._held[:] = False
        self._parts = {}

    def drop(self, nodes: Sequence[int]) -> None:
        """These nodes have failed."""
        ranks = self._ranks(nodes)
        self._held[:, :, ranks] = False
        for rank in ranks:
            self._parts.pop(rank, None)

    def experts_by_node(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The nodes with live state, none where a part of the dense state is lost; each expert that is held is named at
        one of its holders, which is enough to know that it is."""
        if set(self._parts.values()) != self._all_parts:
            return {}
        found: dict[int, list[tuple[int, int]]] = {node: [] for node in sorted(self.holders())}
        first = self._held.argmax(axis=2) // self._hardware.ranks_per_node
        for layer, expert in np.argwhere(self._held.any(axis=2)).tolist():
            found[int(first[layer, expert])].append((layer, expert))
        return {node: tuple(pairs) for node, pairs in found.items()}

    def holders(self) -> set[int]:
        """Nodes with any live state."""
        by_node = self._held.any(axis=(0, 1)).reshape(-1, self._hardware.ranks_per_node).any(axis=1)
        return {int(node) for node in np.flatnonzero(by_node)}

    # ---------------------------------------------------------------- what could be next

    def choose(self, available: Sequence[int]) -> tuple[int, ...]:
        """As many of these nodes as can train, those that hold state first; those of the last world keep their place in
        it, or in their stage, as far as there is one."""
        holders = self.holders()
        count = self._model.usable_nodes(len(available))
        kept = self._retained_places(set(available), count)
        taken = set(kept.values())
        left = sorted((node for node in available if node not in taken), key=lambda node: (node not in holders, node))
        others = iter(sorted(left[: count - len(kept)]))
        return tuple(kept[place] if place in kept else next(others) for place in range(count))

    def _retained_places(self, available: Set[int], count: int) -> dict[int, int]:
        """Node by place in the next world, of those that keep theirs; none where stages end within nodes."""
        pp = self._model.mesh.pp
        if len(self._last_nodes) % pp or count % pp:
            return {}
        before, after = len(self._last_nodes) // pp, count // pp
        kept: dict[int, int] = {}
        for place, node in enumerate(self._last_nodes):
            stage, index = divmod(place, before)
            if node in available and index < after:
                kept[stage * after + index] = node
        return kept

    def plan(self, nodes: tuple[int, ...], sample: int) -> SimulatedWorld:
        """A placement for these nodes that fits what they hold, where the world is small enough to look for one."""
        planned: Sequence[Placement] = self._model.placements(len(nodes), sample)
        held = self._held[:, :, self._ranks(nodes)]
        if self._policy.layout == "replicated" and len(nodes) <= _MAX_ALIGNED_NODES and held.any():
            planned = self._aligned(held, planned)
        planned = self._model.over_stages(planned, len(nodes))
        writers = np.stack([placement.owners() for placement in planned]) // self._hardware.ranks_per_node
        return SimulatedWorld(nodes=nodes, placements=planned, writers_LE=writers, sample=sample)

    def _aligned(self, held: BoolArray, planned: Sequence[Placement]) -> list[Placement]:
        """Placements of which the ranks of each stage hold much already."""
        ranks = planned[0].num_ranks
        cluster = Cluster.of(ranks, self._model.slots, self._hardware.ranks_per_node)
        found = []
        for stage in range(self._model.mesh.pp):
            layers = self._model.stage_layers(stage)
            own = held[layers.start : layers.stop, :, stage * ranks : (stage + 1) * ranks]
            found += align_placements(own, planned[layers.start : layers.stop], cluster)
        return found

    def migration_s(self, world: SimulatedWorld) -> float:
        """Seconds in which the world's ranks get what they need and do not hold: those of the rank that receives most,
        or of those that send, which share evenly."""
        held = self._held[:, :, self._ranks(world.nodes)]
        lacking = held_states(world.placements) & ~held
        state_bytes = self._workload.expert_state_bytes
        bytes_per_s, latency_s = self._hardware.link_bytes_per_s, self._hardware.latency_s
        senders = max(1, int(held.any(axis=(0, 1)).sum()))
        busiest = max(int(lacking.sum(axis=(0, 1)).max()), int(lacking.sum()) / senders)
        seconds = self._scale * busiest * state_bytes / bytes_per_s + latency_s * (busiest > 0)
        if any(self._parts.get(rank) != part for rank, part in self._needed_parts(world).items()):
            dense = self._workload.dense_params / self._model.dense_cuts(self._model.ranks(len(world.nodes)))
            seconds += dense * self._workload.state_bytes / bytes_per_s
        return seconds

    def _needed_parts(self, world: SimulatedWorld) -> dict[int, Part]:
        """Return the part of the dense state of each rank of the cluster that trains in a world."""
        parts = parts_of_ranks(self._model.mesh, self._model.ranks(len(world.nodes)), self._hardware.ranks_per_node)
        return dict(zip(self._ranks(world.nodes), parts, strict=False))  # the last ranks may wait

    def forming_s(self, world: SimulatedWorld, source: str) -> float:
        """Seconds until the world trains with state from a source."""
        policy, hardware = self._policy, self._hardware
        if source == "start":
            return 0.0
        if source in ("live replicas", "join") and policy.live_recovery:
            detect_s = policy.detect_s if source != "join" else 0.0
            return detect_s + policy.regroup_s + self.migration_s(world)
        ranks, experts = self._model.ranks(len(world.nodes)), self._workload.num_experts
        save = save_cost(self._workload, hardware, policy, ranks, experts, experts)
        if source == "join":
            return save.snapshot_s + save.persist_s + policy.restart_s + save.load_s
        if source == "protected memory":
            fetched_s = save.snapshot_bytes / hardware.host_copy_bytes_per_s
            dense_bytes = self._workload.dense_params * self._workload.state_bytes
            fetched_s += dense_bytes / self._model.dense_cuts(ranks) / hardware.link_bytes_per_s
            return policy.detect_s + policy.restart_s + fetched_s
        return policy.detect_s + policy.restart_s + save.load_s

    def _ranks(self, nodes: Sequence[int]) -> list[int]:
        size = self._hardware.ranks_per_node
        return [node * size + rank for node in nodes for rank in range(size)]
