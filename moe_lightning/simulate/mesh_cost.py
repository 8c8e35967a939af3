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
class StageWork:
    """What a rank of the busiest stage does in a step, as far as the axes are concerned, and on what.

    Attributes:
        workload, machine, mesh, stage: see their classes.
        num_ranks: of the world.
        tokens: of the rank, all micro-batches together; the ranks of cp and tp have different ones.
        micro_batches: of the step.
        dense_s: forward and backward passes of dense layers, all micro-batches.
    """

    workload: Workload
    machine: Hardware
    mesh: Mesh
    stage: Stage
    num_ranks: int
    tokens: float
    micro_batches: int
    dense_s: float

    def bytes_per_s(self, span: int) -> float:
        """Of a group among `span` consecutive ranks."""
        return link_bytes_per_s(self.machine, span, self.num_ranks)

    @property
    def weight_shards(self) -> int:
        """Ranks among which dense weights are cut."""
        return self.mesh.weight_shards(self.num_ranks, self.machine.ranks_per_node)


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


def axes(work: StageWork) -> Axes:
    """All of them."""
    return Axes(
        tensor_s=tensor_s(work),
        context_s=context_s(work),
        hops_s=hops_s(work),
        gathers_s=gathers_s(work),
    )


def tensor_s(work: StageWork) -> float:
    """Gathers and scatters of a sequence around every tensor parallel part of a layer (Korthikanti et al. 2022, 4.2.2),
    which carry what the all-reduces of plain tensor parallelism carry.

    Attention is one part of a layer, a dense feed-forward layer or shared experts another; experts lie whole on ranks.
    A pass over a part gathers the rows of all tp ranks and scatters as many; backward passes the same.
    """
    if work.mesh.tp == 1:
        return 0.0
    rows_bytes = (work.mesh.tp - 1) * work.tokens * work.workload.d_model * work.workload.activation_bytes
    bytes_per_s = work.bytes_per_s(work.mesh.tp)
    collectives = 2 * (work.stage.blocks + work.stage.dense_blocks) * _passes(work.mesh)
    return collectives * (rows_bytes / bytes_per_s + work.micro_batches * work.machine.latency_s)


def context_s(work: StageWork) -> float:
    """All-to-alls that turn parts of a sequence into heads and back (Jacobs et al. 2023, DeepSpeed-Ulysses, 3.2).

    Queries and outputs travel once each, and so do keys and values where their heads divide; where they do not, every
    rank gathers them whole.
    """
    if work.mesh.cp == 1:
        return 0.0
    heads = work.workload.num_heads or work.mesh.cp * work.mesh.tp
    kv_heads = work.workload.kv_heads or heads
    head = work.workload.d_model / heads
    even = (work.mesh.cp - 1) / work.mesh.cp
    keys = even if kv_heads % (work.mesh.cp * work.mesh.tp) == 0 else work.mesh.cp - 1
    numbers = work.tokens * head * (2 * heads * even + 2 * kv_heads * keys)
    bytes_per_s = work.bytes_per_s(work.mesh.cp * work.mesh.tp)
    seconds = numbers * work.workload.activation_bytes / bytes_per_s + 2 * work.micro_batches * work.machine.latency_s
    return _passes(work.mesh) * work.stage.blocks * seconds


def hops_s(work: StageWork) -> float:
    """Activations and their gradients between stages, as far as nothing hides them: those of one micro-batch through
    the empty pipeline, there and back, and what outlasts the dense passes that gathers leave free."""
    hop_s, gather_s = _hop_s(work), _gather_s(work)
    forward_s, backward_s = _hiding(work)
    sent_s = work.mesh.chunks * hop_s
    late_s = _beyond(sent_s, forward_s - _prefetched(gather_s, work.stage)) + _beyond(sent_s, backward_s - 2 * gather_s)
    return 2 * (work.mesh.pp - 1) * hop_s + work.micro_batches * late_s


def gathers_s(work: StageWork) -> float:
    """Of fsdp and hsdp: every micro-batch gathers the weights of each layer before its forward and before its backward
    pass and scatters sums of gradients behind that (Zhao et al. 2023, 3.2), under the dense passes; the first gather
    has nothing to hide under."""
    gather_s = _gather_s(work)
    forward_s, backward_s = _hiding(work)
    ahead_s = _prefetched(gather_s, work.stage)
    late_s = gather_s - ahead_s + _beyond(ahead_s, forward_s) + _beyond(2 * gather_s, backward_s)
    return work.micro_batches * late_s


def gradients_s(work: StageWork) -> float:
    """Sums of dense gradients that nothing hides, under what is free of the last micro-batch's dense backward pass: of
    all of them (ddp, zero1, which then sends the new weights out) or of a shard between copies (hsdp)."""
    group = work.num_ranks // (work.mesh.pp * work.mesh.tp)
    shards = work.weight_shards
    params = work.stage.dense_params / work.mesh.tp / shards
    number = work.workload.activation_bytes
    bytes_per_s = work.bytes_per_s(work.num_ranks // work.mesh.pp)
    sum_s = ring_s(2, group // shards, params, number, bytes_per_s)
    sent_s = ring_s(1, group, params, number, bytes_per_s) if work.mesh.dense == "zero1" else 0.0
    _, backward_s = _hiding(work)
    hops_s = work.mesh.chunks * _hop_s(work)
    return _beyond(sum_s, backward_s - 2 * _gather_s(work) - hops_s) + sent_s


def _gather_s(work: StageWork) -> float:
    """All dense weights of the stage once, layer by layer; 0 where every rank has them."""
    shards = work.weight_shards
    if shards == 1:
        return 0.0
    bytes_per_s = work.bytes_per_s(shards * work.mesh.tp)
    once_s = ring_s(1, shards, work.stage.dense_params / work.mesh.tp, work.workload.activation_bytes, bytes_per_s)
    return once_s + (work.stage.blocks + 1) * work.machine.latency_s


def _prefetched(gather_s: float, stage: Stage) -> float:
    """Of the gathers of a forward pass: all but the first of the layers and what stands beside them."""
    return gather_s * stage.blocks / (stage.blocks + 1)


def _hop_s(work: StageWork) -> float:
    """One micro-batch from a stage to the next."""
    if work.mesh.pp == 1:
        return 0.0
    hop_bytes = work.tokens / work.micro_batches * work.workload.d_model * work.workload.activation_bytes
    return work.machine.latency_s + hop_bytes / work.bytes_per_s(work.num_ranks)


def _hiding(work: StageWork) -> tuple[float, float]:
    """Seconds of one micro-batch's dense forward and backward pass that may hide transfers."""
    backward = backward_ratio(work.mesh)
    hiding_s = work.machine.overlap * work.dense_s
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
