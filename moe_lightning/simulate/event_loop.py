"""Event loop of the simulation, in integer nanoseconds, with one state machine for every policy.

A world of nodes trains; at the end of some steps it saves, rebalances or observes other routing; nodes leave and join.
After a fault the state comes from live replicas, from protected snapshots, or from storage, and a new world is formed.
Between two events nothing changes, so a month costs as much as its events. Every nanosecond of every live node is
accounted for (`cluster.Accounts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

import numpy as np

from moe_lightning.checkpoint.recovery_plan import plan_recovery
from moe_lightning.simulate.checkpoint_cost import SaveCost, cheapest_interval, save_cost, stall_of
from moe_lightning.simulate.cluster import Accounts, ClusterState, Mark, SavedState, SimulatedWorld, inventories
from moe_lightning.simulate.failures import NS, Event
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.scenario import Recovery, Report, Scenario, SteadyPhase, format_bytes, model_of
from moe_lightning.simulate.step_model import StepCost


@dataclass(kw_only=True)
class History:
    """Stretches of time, recoveries, and what training waited for besides."""

    spans: list[SteadyPhase] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    stall_ns: int = 0
    rebalance_ns: int = 0

    def note(self, start_ns: int, end_ns: int, state: str, *, used: int, live: int, samples_per_s: float = 0.0) -> None:
        """Add a stretch; one that is like the last prolongs it, and stalls before it belong to the last."""
        phase = SteadyPhase(
            start_s=start_ns / NS,
            end_s=end_ns / NS,
            state=state,
            used_nodes=used,
            live_nodes=live,
            samples_per_s=samples_per_s,
        )
        if self.spans:
            last = self.spans.pop()
            joined = replace(last, end_s=phase.end_s)
            if joined == replace(phase, start_s=last.start_s):
                phase = joined
            else:
                self.spans.append(replace(last, end_s=phase.start_s))
        self.spans.append(phase)


_REFRESH_STEPS = 50  # between two computations of a step's time, while the routing drifts
_BUFFERS = 3  # of snapshots: being taken, being written, kept for a recovery


_SOURCES = {"live": "live replicas", "memory": "protected memory", "storage": "storage"}


def simulate(scenario: Scenario) -> Report:
    """Run a scenario to its end; the same scenario gives the same report."""
    run, end_ns = _Run(scenario), round(scenario.duration_s * NS)
    changes: list[tuple[int, Callable[[], None]]] = [(e.time_ns, partial(run.apply, e)) for e in scenario.events]
    changes += [(at_ns, run.change_speed) for at_ns in _speed_changes_ns(scenario)]
    for time_ns, change in sorted(changes, key=lambda entry: entry[0]):
        if time_ns >= end_ns:
            break
        run.advance(time_ns)
        change()
    run.advance(end_ns)
    return run.report()


def _speed_changes_ns(scenario: Scenario) -> list[int]:
    return [round(min(at_s, 1e9) * NS) for at_s in scenario.hardware.changes_s]


@dataclass(kw_only=True)
class _RunningStep:
    """The running step, and how much of its time is over."""

    cost: StepCost
    duration_ns: int
    done_ns: int = 0


class _Run:
    """The state of a simulation at one instant."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.model = model_of(scenario)
        self.live: set[int] = set()
        self.world: SimulatedWorld | None = None
        self.accounts = Accounts()
        self.history = History()
        first, ranks = self._first
        planned_steps = max(1, round(scenario.duration_s / first.step_s))
        workload = scenario.workload
        samples = workload.samples_per_step(ranks)
        self.saved = SavedState(
            workload,
            scenario.policy,
            num_layers=scenario.routing.num_layers,
            planned_assignments=planned_steps * samples * workload.context_length * workload.top_k,
            interval_steps=cheapest_interval(
                workload,
                scenario.hardware,
                scenario.policy,
                ranks,
                first,
                faults_per_s=scenario.expected_faults_per_s,
            ),
        )
        self._next: SimulatedWorld | None = None  # what is being formed until _ready_ns
        self._ready_ns = 0
        self._join_due_ns: int | None = None
        self._step: _RunningStep
        self._due: dict[str, int] = {}
        self._opened: Mark | None = None  # where a window began that is not complete yet
        self.worlds = ClusterState(scenario, self.model)

    @property
    def _first(self) -> tuple[StepCost, int]:
        """Cost of the first step, and ranks, while nothing has failed."""
        nodes = self.model.usable_nodes(self.scenario.num_nodes)
        return self.model.cost(nodes, 0, 0), self.model.ranks(nodes)

    @property
    def now_ns(self) -> int:
        return self.accounts.now_ns

    @property
    def _active(self) -> SimulatedWorld:
        """The world that trains."""
        assert self.world is not None
        return self.world

    @property
    def policy(self) -> Policy:
        return self.scenario.policy

    # ---------------------------------------------------------------- time

    def advance(self, until_ns: int) -> None:
        """Let time pass; nodes neither leave nor come."""
        while self.now_ns < until_ns:
            if self.now_ns < self._ready_ns:
                self._wait(min(until_ns, self._ready_ns))
            elif self.world is None:
                self._pass(until_ns, 0)
            elif self._join_due_ns is not None and self._join_due_ns <= self.now_ns:
                self._join_due_ns = None
                self._take_in()
            else:
                self._train(until_ns if self._join_due_ns is None else min(until_ns, self._join_due_ns))

    def _wait(self, until_ns: int) -> None:
        world = self._next or self.world
        self._pass(until_ns, len(world.nodes) if world else 0)
        if self.now_ns == self._ready_ns and self._next is not None:
            self._install(self._next)

    def _pass(self, until_ns: int, waiting: int) -> None:
        state = "idle" if not waiting else "recover" if self._next else "stall"
        if state != "stall":
            self.history.note(self.now_ns, until_ns, state, used=waiting, live=len(self.live))
        self.accounts.wait(until_ns - self.now_ns, waiting, len(self.live))

    def _train(self, until_ns: int) -> None:
        """Run whole steps up to what is due next, and a part of one up to the time given."""
        nodes, live = len(self._active.nodes), len(self.live)
        samples = self.scenario.workload.samples_per_step(self.model.ranks(nodes))
        while self.now_ns < until_ns and self.now_ns >= self._ready_ns:
            step, now_ns = self._step, self.now_ns
            left = min(self._due.values()) - self.accounts.step
            count = min(left, (until_ns - now_ns + step.done_ns) // step.duration_ns)
            if count:
                self.accounts.work(count * step.duration_ns - step.done_ns, nodes, live)
                self.accounts.finish_steps(count, count * samples)
                rate = samples * NS / step.duration_ns
                self.history.note(now_ns, self.now_ns, "train", used=nodes, live=live, samples_per_s=rate)
                step.done_ns = 0
            if count == left:
                self._after_step()
            elif self.now_ns < until_ns:
                step.done_ns += until_ns - self.now_ns
                self.accounts.work(until_ns - self.now_ns, nodes, live)

    # ---------------------------------------------------------------- what steps end with

    def _after_step(self) -> None:
        step = self.accounts.step
        if self._due["refresh"] <= step:
            self._set_cost()
        if self._due.get("rebalance", step + 1) <= step:
            self._rebalance()
        if self._due.get("memory", step + 1) <= step:
            self.saved.note_snapshot(self.accounts.mark(), self._active.nodes, self._active.writers_LE)
            self._due["memory"] = step + (self.policy.memory_interval_steps or 1)
        if self._due.get("save", step + 1) <= step:
            self._save()

    def _set_cost(self) -> None:
        """The time of a step under the routing of now, with what snapshots add to each."""
        world, step = self._active, self.accounts.step
        routing = self.scenario.routing
        cost = self.model.cost(len(world.nodes), world.sample, routing.sample(step), is_slow=self._is_slow)
        self._step = _RunningStep(cost=cost, duration_ns=max(1, round((cost.step_s + self._memory_stall_s(cost)) * NS)))
        following = routing.next_change(step)
        never = 1 << 62
        self._due["refresh"] = never if following is None else max(following, step + _REFRESH_STEPS)

    def change_speed(self) -> None:
        """Rank 0 slows down or recovers; what is done of the running step stays done."""
        if self.world is not None:
            former = self._step
            self._set_cost()
            self._step.done_ns = former.done_ns * self._step.duration_ns // former.duration_ns

    @property
    def _is_slow(self) -> bool:
        """True while rank 0 is."""
        return sum(at_ns <= self.now_ns for at_ns in _speed_changes_ns(self.scenario)) == 1

    def _memory_stall_s(self, cost: StepCost) -> float:
        """Return the cost of protection in each step: a copy that outlasts the passes, a transfer that outlasts the
        interval."""
        every, experts = self.policy.memory_interval_steps, self.scenario.workload.num_experts
        if every is None or self.policy.protection == "none":
            return 0.0
        save = self._save_cost(experts, experts)
        return (max(0.0, save.snapshot_s - cost.overlap_s) + max(0.0, save.protect_s - every * cost.step_s)) / every

    def _save_cost(self, k_snapshot: int, k_persist: int) -> SaveCost:
        world = self.world or self._next
        assert world is not None
        ranks = self.model.ranks(len(world.nodes))
        return save_cost(self.scenario.workload, self.scenario.hardware, self.policy, ranks, k_snapshot, k_persist)

    def _save(self) -> None:
        """A checkpoint of the state after this step."""
        save, step = self._save_cost(*self.saved.next_k()), self.accounts.step
        mark, self._opened = self._opened or self.accounts.mark(), None
        if step < mark.step + len(save.copies_s) - 1:  # a window begins, and counts with its last snapshot
            self._opened, self._due["save"] = mark, mark.step + len(save.copies_s) - 1
            return
        self.saved.commit_written(self.now_ns)
        self._record()
        stall_s = stall_of(save.copies_s, self._step.cost.overlap_s)
        if self.policy.saving == "blocking":
            stall_s = save.snapshot_s + save.persist_s
        stall_ns = round(stall_s * NS)
        self._begin_save(save, mark)
        self._due["save"] = max(step + 1, mark.step + self._effective_interval(save, self._step.duration_ns))
        self._ready_ns = max(self._ready_ns, self.now_ns) + stall_ns  # a rebalancing may have come before
        self.history.stall_ns += stall_ns

    def _begin_save(self, save: SaveCost, mark: Mark) -> None:
        world, done_ns = self._active, self.now_ns + round((save.snapshot_s + save.persist_s) * NS)
        self.saved.begin(mark, world.nodes, world.writers_LE, done_ns=done_ns, nbytes=save.persist_bytes)

    def _effective_interval(self, save: SaveCost, step_ns: int) -> int:
        """Storage must have finished one checkpoint before the next begins (MoC 5.3)."""
        written_ns = (save.snapshot_s + save.persist_s) * NS
        return max(self.saved.interval_steps, 1 if self.policy.saving == "blocking" else ceil(written_ns / step_ns))

    def _record(self) -> None:
        """Tell the ledger what was trained since the last time."""
        steps = self.accounts.take_unrecorded()
        if steps and self.saved.partial:
            ranks = self.model.ranks(len(self._active.nodes))
            routing = self.scenario.routing
            loads = routing.loads(routing.sample(self.accounts.step)).astype(np.float64)
            workload = self.scenario.workload
            tokens = workload.samples_per_step(ranks) * workload.context_length * workload.top_k * steps
            self.saved.record(np.round(loads / loads.sum(axis=1, keepdims=True) * tokens).astype(np.int64))

    def _rebalance(self) -> None:
        """Experts move to where the present routing wants them."""
        self._due["rebalance"] = self.accounts.step + self.policy.rebalance_every
        sample = self.scenario.routing.sample(self.accounts.step)
        if sample == self._active.sample:
            return
        following = self.worlds.plan(self._active.nodes, sample)
        moving_s = self.worlds.migration_s(following)
        self.world = following
        self.worlds.hold(following)
        self._set_cost()
        stall_ns = round(moving_s * NS)
        self._ready_ns = max(self._ready_ns, self.now_ns + stall_ns)
        self.history.rebalance_ns += stall_ns

    # ---------------------------------------------------------------- worlds

    def apply(self, event: Event) -> None:
        """Nodes leave and come."""
        failed = set(event.failed)
        self.live -= failed
        self.live |= set(event.joined)
        if failed:
            self.worlds.drop(event.failed)
            self.saved.lose(failed)
        world = self._next or self.world
        if world is not None and failed & set(world.nodes):
            self._recover(world, failed)
        elif world is None and self.live:
            self._begin()
        elif event.joined and world is not None and self._join_due_ns is None:
            self._join_due_ns = max(self.now_ns, self._ready_ns) + round(self.policy.join_wait_s * NS)

    def _begin(self) -> None:
        """Start, or start again once there are nodes enough."""
        first = not self.accounts.step and not self.history.recoveries
        self._form(sorted(self.live), "start" if first else "storage", 0)

    def _recover(self, world: SimulatedWorld, failed: set[int]) -> None:
        """Some of the world's nodes are gone: find the freshest whole state, and who trains on."""
        self.saved.commit_written(self.now_ns)
        experts, everyone = self.worlds.experts_by_node(), sorted(self.live)
        if not self.worlds.choose(everyone):
            self._form(everyone, "storage", 0)  # which stands still
            return
        if self.world is not None:
            self._record()  # experts that are lost have had these steps, too
        self.accounts.abort_step()
        now = self.accounts.mark()
        if self.policy.memory_interval_steps == 1 and self._next is None:
            self.saved.note_snapshot(now, world.nodes, world.writers_LE)
            self.saved.lose(failed)
        plan = plan_recovery(
            inventories(everyone, experts, now.step, self.policy, newest=self.saved.newest, stored=self.saved.stored),
            self.saved.on_storage(),
            num_layers=self.saved.shape[0],
            num_experts=self.saved.shape[1],
        )
        mark = self.saved.restore(plan, now)
        if plan.level == "live":
            holders = sorted(experts)
            chosen = holders if self.model.usable_nodes(len(holders)) else everyone  # newcomers wait where they can
            self._form(chosen, _SOURCES[plan.level], 0)
            if len(everyone) > len(chosen) and self._join_due_ns is None:
                self._join_due_ns = self._ready_ns + round(self.policy.join_wait_s * NS)
            return
        self.accounts.roll_back(mark)
        self.worlds.forget()
        self._join_due_ns = None
        self._form(everyone, _SOURCES[plan.level], now.step - mark.step)

    def _take_in(self) -> None:
        """Nodes that have joined become part of the world at the end of the running step, which is not waited for."""
        if self.model.usable_nodes(len(self.live)) <= len(self._active.nodes):
            return
        self.accounts.abort_step()
        self._record()
        if not self.policy.live_recovery and self.policy.saving != "none":  # saved on purpose before the restart
            self._begin_save(self._save_cost(*self.saved.next_k()), self.accounts.mark())
        self._form(sorted(self.live), "join", 0)

    def _form(self, available: Sequence[int], source: str, lost_steps: int) -> None:
        """Begin to form a world of as many of these nodes as can train."""
        self._next, self._ready_ns = None, self.now_ns
        nodes = self.worlds.choose(available)
        if not nodes:
            self._stand_still()
            return
        self._next = self.worlds.plan(nodes, self.scenario.routing.sample(self.accounts.step))
        seconds = self.worlds.forming_s(self._next, source)
        self.world = None
        self._ready_ns = self.now_ns + round(seconds * NS)
        if source != "start":
            self.history.recoveries.append(
                Recovery(
                    time_s=self.now_ns / NS,
                    source=source,
                    seconds=seconds,
                    lost_steps=lost_steps,
                    nodes=len(nodes),
                )
            )
        if self._ready_ns == self.now_ns:
            self._install(self._next)

    def _stand_still(self) -> None:
        """Too few nodes: nothing is kept in memory that a restart could use."""
        before = self.accounts.step
        if self.world is not None or before:
            layers, experts = self.saved.shape
            plan = plan_recovery([], self.saved.on_storage(), num_layers=layers, num_experts=experts)
            self.accounts.roll_back(self.saved.restore(plan, self.accounts.mark()))
        self.worlds.forget()
        self.saved.forget_memory()
        self.world = None
        self._join_due_ns = None

    def _install(self, world: SimulatedWorld) -> None:
        self.world, self._next, self._opened = world, None, None
        self.worlds.hold(world)
        self.saved.begin_session()
        step = self.accounts.step
        self._due = {"refresh": step}
        self._set_cost()
        if self.policy.rebalance_every:
            self._due["rebalance"] = step - step % self.policy.rebalance_every + self.policy.rebalance_every
        if self.policy.memory_interval_steps and self.policy.memory_interval_steps > 1:
            self._due["memory"] = step + self.policy.memory_interval_steps
        if self.policy.saving != "none":
            save = self._save_cost(self.saved.k_snapshot, self.saved.k_persist)
            interval = self._effective_interval(save, self._step.duration_ns)
            self._due["save"] = max(self.saved.storage.step + interval, step + 1)

    def report(self) -> Report:
        """Close the accounts and return the result."""
        self.saved.commit_written(self.now_ns)
        self.accounts.close()
        scenario, accounts, saved, (first, ranks) = self.scenario, self.accounts, self.saved, self._first
        work, hardware, experts = scenario.workload, scenario.hardware, scenario.workload.num_experts
        save = save_cost(work, hardware, scenario.policy, ranks, saved.k_snapshot, saved.k_persist)
        whole = save_cost(work, hardware, scenario.policy, ranks, experts, experts)
        rank_bytes = self.model.memory().state
        takes_snapshots = scenario.policy.saving != "none" or scenario.policy.memory_interval_steps is not None
        host_bytes = _BUFFERS * whole.snapshot_bytes * hardware.ranks_per_node if takes_snapshots else 0.0
        window = None
        if len(save.copies_s) > 1:
            sizes = [copy_s * hardware.host_copy_bytes_per_s for copy_s in save.copies_s]
            window = (
                f"{len(sizes)} steps, {format_bytes(sum(sizes))} of the busiest rank, "
                f"{format_bytes(max(sizes))} in one step; "
                f"{stall_of(save.copies_s, first.overlap_s):.3g} s of stall, "
                f"{(len(sizes) - 1) * first.step_s:.3g} s of replay"
            )
        limits = (
            ("weights and optimizer state of a rank", rank_bytes, hardware.memory_bytes),
            ("snapshots of a node", host_bytes, hardware.host_memory_bytes),
        )
        return Report(
            provided_ns=accounts.provided_ns,
            useful_ns=accounts.useful_ns,
            lost_ns=accounts.lost_ns,
            overhead_ns=accounts.overhead_ns,
            idle_ns=accounts.idle_ns,
            steps=accounts.step,
            samples=accounts.samples,
            lost_steps=accounts.lost_steps,
            duration_s=self.scenario.duration_s,
            step_s=first.step_s,
            imbalance=first.imbalance,
            stall_s=self.history.stall_ns / NS,
            rebalance_s=self.history.rebalance_ns / NS,
            plt=saved.plt,
            k_persist=saved.k_persist,
            interval_steps=self._effective_interval(save, round(first.step_s * NS)),
            checkpoints=len(saved.committed_bytes),
            written_bytes=sum(saved.committed_bytes),
            exchange_bytes=first.exchange_bytes,
            rank_bytes=rank_bytes,
            host_bytes=host_bytes,
            warnings=tuple(
                f"{what} need {format_bytes(size)}, more than the {format_bytes(room)} there are"
                for what, size, room in limits
                if size > room
            ),
            window=window,
            recoveries=tuple(self.history.recoveries),
            spans=tuple(self.history.spans),
        )
