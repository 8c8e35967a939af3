"""Search of a mesh for a model and a cluster, and its report.

Of the meshes that fit a rank's memory the one with the shortest step wins, of steps that differ by less than one
percent the simplest; where nodes fail, the one of the best few that trains most.

Every choice of axes, sharding, micro-batches, chunks and recomputation is judged; experts lie over all ranks of a
stage. Results that two meshes share are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any

from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.memory import RankMemory
from moe_lightning.simulate.mesh import DENSE, MeshSpec, bubble_share
from moe_lightning.simulate.scenario import Report, Scenario, format_bytes, model_of
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.text_table import table

ROOM = 0.9
"""Share of a rank's memory that may be planned; the rest is for buffers, kernels and fragments."""

_SHOWN = 6
_CHUNKS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class MeshCandidate:
    """A mesh that fits.

    Attributes:
        mesh: with its micro-batches.
        slots: experts of a layer on each rank.
        step, memory: of its first world.
        report: of a simulation with failures, where there are any.
    """

    mesh: MeshSpec
    slots: int
    step: StepCost
    memory: RankMemory
    report: Report | None = None

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better: goodput, then the step to one percent, then what is simplest."""
        mesh = self.mesh
        simple = (mesh.unit, DENSE.index(mesh.dense), mesh.micro_batches or 1, mesh.chunks, mesh.recompute)
        goodput = _percents(self.report.goodput) if self.report and self.report.goodput else 0
        return (-goodput, _percents(self.step.step_s), *simple, self.step.step_s)


def _percents(number: float) -> int:
    """Return the logarithm of a number in whole percents."""
    return round(100 * log(number))


@dataclass(frozen=True, kw_only=True)
class MeshAdvice:
    """Result of a search.

    Attributes:
        best: the best of those that fit, best first.
        fitting, refused: how many fit a rank's memory, and how many do not.
        room: bytes that may be planned.
    """

    best: tuple[MeshCandidate, ...]
    fitting: int
    refused: int
    room: float

    @property
    def mesh(self) -> MeshSpec:
        return self.best[0].mesh

    def table(self) -> str:
        """A line for each of the best, and a sentence on the others."""
        headers = ("pp", "cp", "tp", "dense", "micro", "chunks", "redo", "slots", "step s", "bubble", "memory")
        rows = []
        for found in self.best:
            mesh, step = found.mesh, found.step
            rows.append(
                (
                    *(mesh.pp, mesh.cp, mesh.tp, mesh.dense, mesh.micro_batches or 1, mesh.chunks),
                    "yes" if mesh.recompute else "no",
                    found.slots,
                    f"{step.step_s:.4g}",
                    f"{step.bubble_s / (step.passes_s + step.bubble_s):.1%}",
                    format_bytes(found.memory.total),
                    *([f"{found.report.goodput:.4g}"] if found.report else ()),
                )
            )
        lines = table((*headers, *(["samples/s"] if self.best[0].report else ())), rows)
        room = format_bytes(self.room)
        return f"{lines}\n{self.fitting} meshes fit the {room} that a rank may plan with, {self.refused} need more"


def search_mesh(scenario: Scenario, fixed: Mapping[str, Any] | None = None) -> MeshAdvice:
    """The best meshes for all nodes of a scenario; fields that are `fixed` stay.

    Raises:
        ConfigurationError: no mesh divides ranks and model, or none fits a rank's memory.
    """
    hardware = scenario.hardware
    room, ranks = ROOM * hardware.memory_bytes, scenario.num_nodes * hardware.ranks_per_node
    fitting: list[MeshCandidate] = []
    refused: list[tuple[float, MeshSpec]] = []
    base: StepModel | None = None
    why: ConfigurationError | None = None
    for mesh in possible_meshes(scenario, ranks, fixed or {}):
        try:
            model = model_of(replace(scenario, mesh=mesh)) if base is None else base.beside(mesh)
        except ConfigurationError as error:
            why = why or error
            continue
        base = base or model
        memory = model.memory()
        if memory.total > room:
            refused.append((memory.total, mesh))
            continue
        step = model.cost(model.usable_nodes(scenario.num_nodes), 0, 0)
        fitting.append(MeshCandidate(mesh=mesh, slots=model.slots, step=step, memory=memory))
    if not fitting and refused:
        needed, nearest = min(refused, key=lambda entry: entry[0])
        raise ConfigurationError(
            f"none of {len(refused)} meshes of nodes={scenario.num_nodes} fits the {format_bytes(room)} that a rank "
            f"may plan with: the nearest, pp={nearest.pp} cp={nearest.cp} tp={nearest.tp} dense={nearest.dense}, needs "
            f"{format_bytes(needed)}; add nodes, or lower policy.min_replicas or the batch"
        )
    if not fitting:
        raise why or ConfigurationError(f"no mesh divides the {ranks} ranks of nodes={scenario.num_nodes}")
    best = sorted(fitting, key=lambda found: found.rank)
    shown = best[:_SHOWN]
    if any(event.failed for event in scenario.events):
        kinds = (next((found for found in best if found.mesh.dense == kind), None) for kind in DENSE)
        shown += [found for found in kinds if found is not None and found not in shown]
        shown = [replace(found, report=simulate(replace(scenario, mesh=found.mesh))) for found in shown]
        shown = sorted(shown, key=lambda found: found.rank)[:_SHOWN]
    return MeshAdvice(
        best=tuple(shown),
        fitting=len(fitting),
        refused=len(refused),
        room=room,
    )


def possible_meshes(scenario: Scenario, ranks: int, fixed: Mapping[str, Any]) -> Iterator[MeshSpec]:
    """Every mesh of so many ranks that could be tried; some of them heads, layers or experts may not allow."""
    work = scenario.workload
    heads = work.num_heads or ranks
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pp, cp, tp in product(sizes, sizes, sizes):
        if ranks % (pp * cp * tp) or pp > work.num_blocks or heads % (cp * tp) or (pp > 1 and work.tied):
            continue
        samples = work.samples_per_step(ranks) * pp * cp * tp / ranks
        for dense, chunks, recompute in product(DENSE, _CHUNKS if pp > 1 else (1,), (False, True)):
            for micro in _micro_batches(samples, pp):
                mesh = MeshSpec(
                    pp=pp,
                    cp=cp,
                    tp=tp,
                    dense=dense,
                    shard_size=fixed.get("shard_size") if dense == "hsdp" else None,
                    micro_batches=micro,
                    chunks=chunks,
                    recompute=recompute,
                )
                if all(getattr(mesh, name) == value for name, value in fixed.items()):
                    yield mesh


def _micro_batches(samples: float, pp: int) -> list[int]:
    """Powers of two that divide the samples of a data slice, and as many as there are; uneven slices are for data
    parallelism alone."""
    if samples < 1 or samples % 1:
        return [1] * (pp == 1 and samples >= 1)
    whole = int(samples)
    powers = [1 << power for power in range(whole.bit_length()) if whole % (1 << power) == 0]
    return sorted({*powers, whole})


def mesh_table(scenario: Scenario) -> str:
    """Return the mesh of a scenario's first world in figures, as lines of text.

    They say how the experts of a layer lie over the ranks of a stage, the parts of a step, and the memory of a rank.
    """
    mesh = scenario.mesh
    model = model_of(scenario)
    nodes = model.usable_nodes(scenario.num_nodes)
    ranks = model.ranks(nodes)
    step, memory, micro_batches = model.cost(nodes, 0, 0), model.memory(), model.micro_batches(ranks)
    dp = ranks // mesh.unit
    axes = f"pp={mesh.pp} dp={dp} cp={mesh.cp} tp={mesh.tp} dense={mesh.dense}"
    schedule = f"{micro_batches} micro-batches" + f", {mesh.chunks} chunks a stage" * (mesh.chunks > 1)
    bytes_of = ("parameters", "gradients", "optimizer", "activations", "gathered")
    rows = [
        ("mesh", f"{axes}, {schedule}" + ", recomputing" * mesh.recompute),
        ("experts", f"over the {ranks // mesh.pp} ranks of a stage, {model.slots} slots each"),
        ("step of", _parts_of(step)),
        ("bubbles", f"{100 * bubble_share(mesh.pp, micro_batches, mesh.chunks):.1f} % of a rank's passes"),
        (
            "rank",
            f"{format_bytes(memory.total)} of {format_bytes(scenario.hardware.memory_bytes)}: "
            + ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in bytes_of),
        ),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def _parts_of(step: StepCost) -> str:
    parts = {
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
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds)
