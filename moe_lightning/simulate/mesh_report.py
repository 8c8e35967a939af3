"""A mesh in figures: the parts of its step, what a rank holds, where snapshots are copied, what a lost node costs."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lightning.algorithms.snapshot_windows import SnapshotWindows, schedule_snapshot
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.dense_parts import parts_of_ranks
from moe_lightning.simulate.mesh import Mesh
from moe_lightning.simulate.mesh_cost import bubble_share
from moe_lightning.simulate.mesh_memory import RankMemory
from moe_lightning.simulate.scenario import Scenario, format_bytes, model_of
from moe_lightning.simulate.step_model import StepCost


@dataclass(frozen=True, kw_only=True)
class MeshReport:
    """Of a scenario's first world.

    Attributes:
        mesh, dp, micro_batches: the axes and the schedule.
        stage_ranks, slots: ranks over which the experts of a layer lie, and how many of them each has room for.
        step: its parts.
        bubble_share: of the passes, in which a rank waits.
        memory, room: bytes of a rank, and those that it has.
        snapshot: where one of its snapshots is copied (REFT 4.1).
        dp_after, waiting: data slices that the survivors of one node form, and how many of them wait.
        is_live: whether the survivors of any one node have all of the dense state.
    """

    mesh: Mesh
    dp: int
    micro_batches: int
    stage_ranks: int
    slots: int
    step: StepCost
    bubble_share: float
    memory: RankMemory
    room: float
    snapshot: SnapshotWindows
    dp_after: int
    waiting: int
    is_live: bool

    def table(self) -> str:
        """The figures as lines of text."""
        mesh, step, memory, copied = self.mesh, self.step, self.memory, self.snapshot
        axes = f"pp={mesh.pp} dp={self.dp} cp={mesh.cp} tp={mesh.tp} dense={mesh.dense}"
        schedule = f"{self.micro_batches} micro-batches" + f", {mesh.chunks} chunks a stage" * (mesh.chunks > 1)
        passes = {
            "dense": step.dense_s,
            "experts": step.experts_s,
            "exchanges": step.exchange_s,
            "shadows": step.copies_s,
            "tensor": step.axes_s.tensor_s,
            "context": step.axes_s.context_s,
            "stages": step.axes_s.hops_s,
            "gathers": step.axes_s.gathers_s,
            "bubbles": step.bubble_s,
            "sums": step.gradients_s,
            "update": step.update_s,
        }
        bytes_of = ("parameters", "gradients", "optimizer", "activations", "gathered")
        total = copied.total_bytes or 1
        state = "has all of the dense state" if self.is_live else "lacks dense state: snapshots or storage"
        rows = [
            ("mesh", f"{axes}, {schedule}" + ", recomputing" * mesh.recompute),
            ("experts", f"over the {self.stage_ranks} ranks of a stage, {self.slots} slots each"),
            ("step of", ", ".join(f"{name} {seconds:.3g} s" for name, seconds in passes.items() if seconds)),
            ("bubbles", f"{100 * self.bubble_share:.1f} % of a rank's passes"),
            (
                "rank",
                f"{format_bytes(memory.total)} of {format_bytes(self.room)}: "
                + ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in bytes_of),
            ),
            (
                "snapshot",
                f"{100 * copied.bubble_bytes / total:.0f} % in bubbles, "
                f"{100 * copied.compute_bytes / total:.0f} % under passes, {copied.stall_s:.3g} s of stall",
            ),
            ("node lost", f"dp {self.dp} -> {self.dp_after}, {self.waiting} ranks wait; who is left {state}"),
        ]
        return "\n".join(f"{name:<12} {text}" for name, text in rows)


def mesh_report(scenario: Scenario) -> MeshReport | None:
    """Of a scenario with a mesh; None where there is only data and expert parallelism."""
    mesh, hardware = scenario.mesh, scenario.hardware
    if mesh.is_plain:
        return None
    model = model_of(scenario)
    nodes = model.usable_nodes(scenario.num_nodes)
    ranks, experts = model.ranks(nodes), scenario.workload.num_experts
    step, policy = model.cost(nodes, 0, 0), scenario.policy
    copied = min(experts, policy.k_snapshot or experts)
    save = save_cost(scenario.workload, hardware, policy, ranks, copied, copied)
    survivors = max(0, scenario.num_nodes - 1) * hardware.ranks_per_node
    micro_batches = model.micro_batches(ranks)
    return MeshReport(
        mesh=mesh,
        dp=ranks // mesh.unit,
        micro_batches=micro_batches,
        stage_ranks=ranks // mesh.pp,
        slots=model.slots,
        step=step,
        bubble_share=bubble_share(mesh.pp, micro_batches, mesh.chunks),
        memory=model.memory(),
        room=hardware.memory_bytes,
        snapshot=schedule_snapshot(
            round(save.snapshot_bytes),
            bytes_per_s=hardware.host_copy_bytes_per_s,
            bubble_s=step.bubble_s,
            compute_s=step.hiding * step.passes_s,
        ),
        dp_after=survivors // mesh.unit,
        waiting=survivors % mesh.unit,
        is_live=_survives_a_node(mesh, ranks, hardware.ranks_per_node),
    )


def _survives_a_node(mesh: Mesh, ranks: int, ranks_per_node: int) -> bool:
    """Whether every part of the dense state is on several nodes."""
    nodes: dict[object, set[int]] = {}
    for rank, part in enumerate(parts_of_ranks(mesh, ranks, ranks_per_node)):
        nodes.setdefault(part, set()).add(rank // ranks_per_node)
    return all(len(holders) > 1 for holders in nodes.values())
