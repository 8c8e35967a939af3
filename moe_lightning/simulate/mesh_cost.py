"""What the axes of a mesh add to a step: bubbles, gathers and sums of dense parameters, attention over parts of a
sequence, tensor parallel layers, hops between stages.

Pure functions of sizes and rates. A collective of n ranks takes what a ring takes: (n - 1) / n of the bytes for a
gather or a scatter, twice that for a sum, and the latency of an exchange. Links have no contention.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.mesh import Mesh, Stage
from moe_lightning.simulate.workload import Workload


def bubble_share(pp: int, micro_batches: int, chunks: int = 1) -> float:
    """Of the time of a pipeline, in which a rank waits: (pp - 1) / (micro_batches * chunks + pp - 1) (Narayanan et al.
    2021, 2.2), the same on every stage under 1F1B and the interleaved schedule."""
    return (pp - 1) / (micro_batches * chunks + pp - 1)


def bubble_s(passes_s: float, pp: int, micro_batches: int, chunks: int = 1) -> float:
    """Seconds in which a rank waits beside so many in which it works."""
    return passes_s * (pp - 1) / (micro_batches * chunks)


def ring_s(passes: int, ranks: int, numbers: float, number_bytes: int, bytes_per_s: float) -> float:
    """Seconds of a gather or scatter (1 pass) or a sum (2) of so many numbers over ranks."""
    return passes * (ranks - 1) / ranks * numbers * number_bytes / bytes_per_s


def link_bytes_per_s(machine: Hardware, span: int, num_ranks: int) -> float:
    """Bandwidth of a group among `span` consecutive ranks of a world: that of a node where it lies in one."""
    size = machine.ranks_per_node
    inside = span <= size and (num_ranks <= size or size % span == 0)
    return machine.node_bytes_per_s if inside else machine.link_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank of the busiest stage does in a step, as far as the axes are concerned.

    Attributes:
        num_ranks: of the world.
        tokens: of the rank, all micro-batches together; the ranks of cp and tp have different ones.
        micro_batches: of the step.
        dense_s: forward and backward passes of dense layers, all micro-batches.
    """

    num_ranks: int
    tokens: float
    micro_batches: int
    dense_s: float


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Seconds that the axes of a mesh add to the passes of a step; see the functions of these names."""

    tensor_s: float = 0.0
    context_s: float = 0.0
    hops_s: float = 0.0
    gathers_s: float = 0.0

    @property
    def total(self) -> float:
        return self.tensor_s + self.context_s + self.hops_s + self.gathers_s


def axes(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> Axes:
    """All of them."""
    return Axes(
        tensor_s=tensor_s(workload, machine, mesh, stage, work),
        context_s=context_s(workload, machine, mesh, stage, work),
        hops_s=hops_s(workload, machine, mesh, stage, work),
        gathers_s=gathers_s(workload, machine, mesh, stage, work),
    )


def tensor_s(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> float:
    """Gathers and scatters of a sequence around every tensor parallel part of a layer (Korthikanti et al. 2022, 4.2.2),
    which carry what the all-reduces of plain tensor parallelism carry.

    Attention is one part of a layer, a dense feed-forward layer or shared experts another; experts lie whole on ranks.
    A pass over a part gathers the rows of all tp ranks and scatters as many; backward passes the same.
    """
    if mesh.tp == 1:
        return 0.0
    rows_bytes = (mesh.tp - 1) * work.tokens * workload.d_model * workload.activation_bytes
    bytes_per_s = link_bytes_per_s(machine, mesh.tp, work.num_ranks)
    collectives = 2 * (stage.blocks + stage.dense_blocks) * _passes(mesh)
    return collectives * (rows_bytes / bytes_per_s + work.micro_batches * machine.latency_s)


def context_s(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> float:
    """All-to-alls that turn parts of a sequence into heads and back (Jacobs et al. 2023, DeepSpeed-Ulysses, 3.2).

    Queries and outputs travel once each, and so do keys and values where their heads divide; where they do not, every
    rank gathers them whole.
    """
    if mesh.cp == 1:
        return 0.0
    heads = workload.num_heads or mesh.cp * mesh.tp
    kv_heads = workload.kv_heads or heads
    head = workload.d_model / heads
    even = (mesh.cp - 1) / mesh.cp
    keys = even if kv_heads % (mesh.cp * mesh.tp) == 0 else mesh.cp - 1
    numbers = work.tokens * head * (2 * heads * even + 2 * kv_heads * keys)
    bytes_per_s = link_bytes_per_s(machine, mesh.cp * mesh.tp, work.num_ranks)
    seconds = numbers * workload.activation_bytes / bytes_per_s + 2 * work.micro_batches * machine.latency_s
    return _passes(mesh) * stage.blocks * seconds


def hops_s(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> float:
    """Activations and their gradients between stages, as far as nothing hides them: those of one micro-batch through
    the empty pipeline, there and back, and what outlasts the dense passes that gathers leave free."""
    hop_s, gather_s = _hop_s(workload, machine, mesh, work), _gather_s(workload, machine, mesh, stage, work)
    forward_s, backward_s = _hiding(machine, mesh, work)
    sent_s = mesh.chunks * hop_s
    late_s = _beyond(sent_s, forward_s - _prefetched(gather_s, stage)) + _beyond(sent_s, backward_s - 2 * gather_s)
    return 2 * (mesh.pp - 1) * hop_s + work.micro_batches * late_s


def gathers_s(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> float:
    """Of fsdp and hsdp: every micro-batch gathers the weights of each layer before its forward and before its backward
    pass and scatters sums of gradients behind that (Zhao et al. 2023, 3.2), under the dense passes; the first gather
    has nothing to hide under."""
    gather_s = _gather_s(workload, machine, mesh, stage, work)
    forward_s, backward_s = _hiding(machine, mesh, work)
    ahead_s = _prefetched(gather_s, stage)
    late_s = gather_s - ahead_s + _beyond(ahead_s, forward_s) + _beyond(2 * gather_s, backward_s)
    return work.micro_batches * late_s


def gradients_s(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> float:
    """Sums of dense gradients that nothing hides, under what is free of the last micro-batch's dense backward pass: of
    all of them (ddp, zero1, which then sends the new weights out) or of a shard between copies (hsdp)."""
    group = work.num_ranks // (mesh.pp * mesh.tp)
    shards = mesh.weight_shards(work.num_ranks, machine.ranks_per_node)
    params = stage.dense_params / mesh.tp / shards
    number = workload.activation_bytes
    bytes_per_s = link_bytes_per_s(machine, work.num_ranks // mesh.pp, work.num_ranks)
    sum_s = ring_s(2, group // shards, params, number, bytes_per_s)
    sent_s = ring_s(1, group, params, number, bytes_per_s) if mesh.dense == "zero1" else 0.0
    _, backward_s = _hiding(machine, mesh, work)
    hops_s = mesh.chunks * _hop_s(workload, machine, mesh, work)
    return _beyond(sum_s, backward_s - 2 * _gather_s(workload, machine, mesh, stage, work) - hops_s) + sent_s


def _gather_s(workload: Workload, machine: Hardware, mesh: Mesh, stage: Stage, work: Work) -> float:
    """All dense weights of the stage once, layer by layer; 0 where every rank has them."""
    shards = mesh.weight_shards(work.num_ranks, machine.ranks_per_node)
    if shards == 1:
        return 0.0
    bytes_per_s = link_bytes_per_s(machine, shards * mesh.tp, work.num_ranks)
    once_s = ring_s(1, shards, stage.dense_params / mesh.tp, workload.activation_bytes, bytes_per_s)
    return once_s + (stage.blocks + 1) * machine.latency_s


def _prefetched(gather_s: float, stage: Stage) -> float:
    """Of the gathers of a forward pass: all but the first of the layers and what stands beside them."""
    return gather_s * stage.blocks / (stage.blocks + 1)


def _hop_s(workload: Workload, machine: Hardware, mesh: Mesh, work: Work) -> float:
    """One micro-batch from a stage to the next."""
    if mesh.pp == 1:
        return 0.0
    hop_bytes = work.tokens / work.micro_batches * workload.d_model * workload.activation_bytes
    return machine.latency_s + hop_bytes / link_bytes_per_s(machine, work.num_ranks, work.num_ranks)


def _hiding(machine: Hardware, mesh: Mesh, work: Work) -> tuple[float, float]:
    """Seconds of one micro-batch's dense forward and backward pass that may hide transfers."""
    backward = backward_ratio(mesh)
    hiding_s = machine.overlap * work.dense_s
    return (
        hiding_s / (backward + 1) / work.micro_batches,
        hiding_s * backward / (backward + 1) / work.micro_batches,
    )


def _beyond(seconds: float, free_s: float) -> float:
    """What of a transfer outlasts the time that is free for it."""
    return max(0.0, seconds - max(0.0, free_s))


def backward_ratio(mesh: Mesh) -> int:
    """Backward over forward time of a layer: 2, and 1 more where it makes activations again."""
    return 3 if mesh.recompute else 2


def _passes(mesh: Mesh) -> int:
    """Over a layer: forward, backward, and forward again where activations are made again."""
    return 3 if mesh.recompute else 2
