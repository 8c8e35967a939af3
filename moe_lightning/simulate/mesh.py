"""Mesh of a simulated run: axes, sharding of dense parameters, pipeline, and their costs in time.

Costs are pure functions of sizes and rates. A collective of n ranks takes what a ring takes: (n - 1) / n of the bytes
for a gather or a scatter, twice that for a sum, and the latency of an exchange. Links have no contention.

Every number of a rank is that of the busiest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, get_args

from annotated_types import Interval

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.mesh import MeshShape, hybrid_shard_size
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.workload import Workload, footprint_of

Dense = Literal["ddp", "zero1", "fsdp", "hsdp"]
DENSE: tuple[Dense, ...] = get_args(Dense)
Size = Annotated[int, Interval(ge=1, le=1e5)]

_MOST_MICRO_BATCHES_PER_STAGE = 4


@validated
@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Axes and shardings; data parallelism takes the ranks that the axes leave. Experts always lie over all ranks of a
    stage, whatever the other axes.

    Attributes:
        pp: pipeline stages.
        cp: ranks that share a sequence.
        tp: ranks that share a layer, with sequence-parallel norms.
        dense: who holds dense parameters: "ddp" (everybody), "zero1" (their optimizer states cut), "fsdp" (all of it
            cut over the ranks of a stage with the same tensor part), "hsdp" (the same in several copies).
        shard_size: of hsdp, at least so many ranks share a copy; None: those of a node, or half of all.
        micro_batches: of a step on each data slice; None: one, with a pipeline up to four for each stage.
        chunks: of layers on each stage: 1 is the 1F1B schedule, more the interleaved one.
        recompute: activations of the forward pass are made again in the backward pass.

    Raises:
        ConfigurationError: parts that contradict each other.
    """

    pp: Size = 1
    cp: Size = 1
    tp: Size = 1
    dense: Dense = "ddp"
    shard_size: Size | None = None
    micro_batches: Size | None = None
    chunks: Size = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.pp == 1:
            raise ConfigurationError(f"chunks={self.chunks} interleaves the stages of a pipeline: use pp of 2 or more")
        if self.shard_size is not None and self.dense != "hsdp":
            raise ConfigurationError(f"shard_size={self.shard_size} is for dense=hsdp, not {self.dense}: leave it out")

    @property
    def unit(self) -> int:
        """Ranks of one data slice: worlds are multiples of it."""
        return self.pp * self.cp * self.tp

    def shape(self, num_ranks: int) -> MeshShape:
        """The axes over so many ranks.

        Raises:
            ConfigurationError: they do not divide them.
        """
        return MeshShape(pp=self.pp, cp=self.cp, tp=self.tp).over(num_ranks)

    def micro_batches_of(self, slice_samples: float) -> int:
        """Micro-batches of a step of a data slice of so many samples."""
        if self.micro_batches is not None:
            return self.micro_batches
        if self.pp == 1:
            return 1
        most = max(1, min(_MOST_MICRO_BATCHES_PER_STAGE * self.pp, int(slice_samples)))
        return most if self.chunks == 1 else max(1, most // self.pp * self.pp)

    def weight_shards(self, num_ranks: int, ranks_per_node: int) -> int:
        """Ranks among which the dense weights of a stage and tensor part are cut."""
        group = num_ranks // (self.pp * self.tp)
        if self.dense == "fsdp":
            return group
        return _hybrid(group, self.tp, ranks_per_node, self.shard_size) if self.dense == "hsdp" else 1

    def state_shards(self, num_ranks: int, ranks_per_node: int) -> int:
        """The same of their optimizer states."""
        if self.dense == "zero1":
            return num_ranks // (self.pp * self.tp)
        return self.weight_shards(num_ranks, ranks_per_node)

    def check(self, workload: Workload, num_ranks: int) -> None:
        """Refuse what cannot be trained on a world of so many ranks.

        Raises:
            ConfigurationError: the axes do not divide ranks, layers, heads, positions or samples.
        """
        shape = self.shape(num_ranks)
        cut = self.tp * self.cp
        heads, positions = workload.num_heads, workload.context_length
        for what, count in (("heads", heads or cut), ("positions", positions)):
            if count % cut:
                raise ConfigurationError(
                    f"mesh.tp={self.tp} and cp={self.cp} cut {count} {what} into {cut} parts: use divisors of them"
                )
        if self.pp * self.chunks > workload.num_blocks:
            raise ConfigurationError(
                f"mesh.pp={self.pp} and chunks={self.chunks} need {self.pp * self.chunks} parts of "
                f"{workload.num_blocks} layers: lower one of them"
            )
        if self.pp > 1 and workload.tied:
            raise ConfigurationError(
                f"mesh.pp={self.pp} separates the head from the embedding that it is tied to: set "
                "model.tie_embeddings=false"
            )
        slice_samples = workload.samples_per_step(num_ranks) / shape.dp
        if slice_samples < 1:
            raise ConfigurationError(
                f"{shape.dp} data slices are more than the {workload.samples_per_step(num_ranks)} samples of a step: "
                "raise the batch, or pp, cp or tp"
            )
        micro_batches = self.micro_batches_of(slice_samples)
        is_even = slice_samples % 1 != 0 or slice_samples % micro_batches == 0  # uneven slices have uneven ones anyway
        if self.micro_batches is not None and (micro_batches > slice_samples or not is_even):
            raise ConfigurationError(
                f"mesh.micro_batches={micro_batches} do not divide the {slice_samples:g} samples of a data slice: "
                "use a divisor of them"
            )
        if self.chunks > 1 and micro_batches % self.pp:
            raise ConfigurationError(
                f"mesh.chunks={self.chunks} interleave micro-batches in rounds of pp={self.pp}, which does not divide "
                f"{micro_batches}: change micro_batches"
            )


@lru_cache(maxsize=4096)
def _hybrid(group: int, tp: int, ranks_per_node: int, wanted: int | None) -> int:
    """Ranks that share a copy among the `group` ranks of a stage that hold the same tensor part."""
    return hybrid_shard_size([index * tp // ranks_per_node for index in range(group)], wanted)


@dataclass(frozen=True, kw_only=True)
class BusiestStage:
    """The part of a model on the ranks of the busiest stage of its pipeline.

    Attributes:
        blocks: transformer layers.
        moe_layers: MoE layers, at most.
        dense_blocks: layers with a dense feed-forward part or shared experts, at most.
        share: of the model's transformer layers.
        dense_params: parameters outside the experts before tensor parallelism cuts them; the first stage holds the
            embedding, the last one the head.
    """

    blocks: int
    moe_layers: int
    dense_blocks: int
    share: float
    dense_params: float


@lru_cache(maxsize=4096)
def busiest_stage(workload: Workload, pp: int, chunks: int) -> BusiestStage:
    """Return the busiest stage of a pipeline whose stages get whole layers, in `chunks` runs of as many."""
    blocks = -(-workload.num_blocks // (pp * chunks)) * chunks
    blocks = min(blocks, workload.num_blocks)
    share = blocks / workload.num_blocks
    dense = workload.block_params * share + workload.embedding_params if pp > 1 else float(workload.dense_params)
    return BusiestStage(
        blocks=blocks,
        moe_layers=min(workload.num_layers, blocks),
        dense_blocks=min(workload.dense_blocks, blocks),
        share=share,
        dense_params=dense,
    )


Part = tuple[int, int, int, int]
"""Part of the dense state: its stage, its tensor part, its shard, and the number of shards."""


@lru_cache(maxsize=64)
def parts_of_ranks(mesh: MeshSpec, num_ranks: int, ranks_per_node: int) -> tuple[Part, ...]:
    """Return the part of the dense state, optimizer states included, that each rank of a world holds."""
    shape, shards = mesh.shape(num_ranks), mesh.state_shards(num_ranks, ranks_per_node)
    found = []
    for rank in range(num_ranks):
        copy, tensor = divmod(rank % (num_ranks // mesh.pp), mesh.tp)
        found.append((shape.index(rank, "pp"), tensor, copy % shards, shards))
    return tuple(found)


def bubble_share(pp: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the share of a pipeline's time in which a rank waits: (pp - 1) / (micro_batches * chunks + pp - 1)
    (Narayanan et al. 2021, 2.2), the same on every stage under 1F1B and the interleaved schedule."""
    return (pp - 1) / (micro_batches * chunks + pp - 1)


def bubble_s(passes_s: float, pp: int, micro_batches: int, chunks: int = 1) -> float:
    """Seconds in which a rank waits beside so many in which it works."""
    return passes_s * (pp - 1) / (micro_batches * chunks)


def ring_s(passes: int, ranks: int, numbers: float, number_bytes: float, bytes_per_s: float) -> float:
    """Seconds of a gather or scatter (1 pass) or a sum (2) of so many numbers over ranks."""
    return passes * (ranks - 1) / ranks * numbers * number_bytes / bytes_per_s


def link_bytes_per_s(machine: Hardware, span: int, num_ranks: int) -> float:
    """Bandwidth of a group among `span` consecutive ranks of a world: that of a node where it lies in one."""
    size = machine.ranks_per_node
    inside = span <= size and (num_ranks <= size or size % span == 0)
    return machine.node_bytes_per_s if inside else machine.link_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Work of a rank of the busiest stage in a step, as far as the axes are concerned, and its hardware.

    Attributes:
        workload, machine, mesh, stage: see their classes.
        num_ranks: of the world.
        tokens: of the rank, all micro-batches together; the ranks of cp and tp have different ones.
        micro_batches: of the step.
        dense_s: forward and backward passes of dense layers, all micro-batches.
    """

    workload: Workload
    machine: Hardware
    mesh: MeshSpec
    stage: BusiestStage
    num_ranks: int
    tokens: float
    micro_batches: int
    dense_s: float

    def bytes_per_s(self, span: int) -> float:
        """Return the bytes per second of a group among `span` consecutive ranks."""
        return link_bytes_per_s(self.machine, span, self.num_ranks)

    @property
    def weight_shards(self) -> int:
        """Ranks among which dense weights are cut."""
        return self.mesh.weight_shards(self.num_ranks, self.machine.ranks_per_node)


class Axes(NamedTuple):
    """Seconds that the axes of a mesh add to a step: those of the passes, and the sums of gradients behind them."""

    tensor_s: float
    context_s: float
    hops_s: float
    gathers_s: float
    sums_s: float

    @property
    def passes_s(self) -> float:
        """All but the sums."""
        return self.tensor_s + self.context_s + self.hops_s + self.gathers_s


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
    collectives = 2 * (work.stage.blocks + work.stage.dense_blocks) * passes(work.mesh)
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
    return passes(work.mesh) * work.stage.blocks * seconds


def axes_of(work: StageWork) -> Axes:
    """Return what the axes add to a step that nothing hides.

    Every micro-batch gathers the weights of each layer before its forward and before its backward pass under fsdp and
    hsdp, and scatters sums of gradients behind that (Zhao et al. 2023, 3.2). Activations and their gradients hop from
    stage to stage. Dense gradients are summed once: all of them (ddp, zero1, which then sends the new weights out) or
    a shard between copies (hsdp). All of it hides under dense passes, in this order; the first gather has nothing to
    hide under, nor has one micro-batch on its way through the empty pipeline and back.
    """
    mesh, stage = work.mesh, work.stage
    trained = footprint_of(work.workload).dense.gradient  # bytes of a gradient, and of a weight that is sent out
    gather_s = _over_shards_s(work, work.workload.activation_bytes)
    scatter_s = _over_shards_s(work, trained)
    ahead_s = gather_s * stage.blocks / (stage.blocks + 1)  # all but the first of the layers and what is beside them
    hop_s = _hop_s(work)
    sent_s = mesh.chunks * hop_s
    group = work.num_ranks // (mesh.pp * mesh.tp)
    params = stage.dense_params / mesh.tp / work.weight_shards
    bytes_per_s = work.bytes_per_s(work.num_ranks // mesh.pp)
    sum_s = ring_s(2, group // work.weight_shards, params, trained, bytes_per_s)
    out_s = ring_s(1, group, params, trained, bytes_per_s) if mesh.dense == "zero1" else 0.0
    backward = passes(mesh)
    hiding_s = work.machine.overlap * work.dense_s / (backward + 1) / work.micro_batches  # of a forward pass
    forward_s = _exposed([ahead_s, sent_s], hiding_s)
    backward_s = _exposed([gather_s + scatter_s, sent_s, sum_s], hiding_s * backward)
    return Axes(
        tensor_s=tensor_s(work),
        context_s=context_s(work),
        hops_s=2 * (mesh.pp - 1) * hop_s + work.micro_batches * (forward_s[1] + backward_s[1]),
        gathers_s=work.micro_batches * (gather_s - ahead_s + forward_s[0] + backward_s[0]),
        sums_s=backward_s[2] + out_s,
    )


def _exposed(transfers_s: Sequence[float], free_s: float) -> list[float]:
    """Return the seconds of each transfer that outlast the time that those before it leave free."""
    late_s = []
    for seconds in transfers_s:
        late_s.append(max(0.0, seconds - free_s))
        free_s = max(0.0, free_s - seconds)
    return late_s


def _over_shards_s(work: StageWork, number_bytes: float) -> float:
    """A gather or scatter of a number of so many bytes for each dense parameter of the stage, layer by layer."""
    shards = work.weight_shards
    if shards == 1:
        return 0.0
    bytes_per_s = work.bytes_per_s(shards * work.mesh.tp)
    once_s = ring_s(1, shards, work.stage.dense_params / work.mesh.tp, number_bytes, bytes_per_s)
    return once_s + (work.stage.blocks + 1) * work.machine.latency_s


def _hop_s(work: StageWork) -> float:
    """One micro-batch from a stage to the next."""
    if work.mesh.pp == 1:
        return 0.0
    hop_bytes = work.tokens / work.micro_batches * work.workload.d_model * work.workload.activation_bytes
    return work.machine.latency_s + hop_bytes / work.bytes_per_s(work.num_ranks)


def passes(mesh: MeshSpec) -> int:
    """Passes over a layer (forward, backward, and forward again where activations are made again); as many times a
    forward pass is what a backward pass takes.
    """
    return 3 if mesh.recompute else 2
