"""How a simulated model lies over the ranks: the axes of the mesh, the sharding of dense parameters, the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, get_args

from moe_lightning.algorithms.dense_shards import hybrid_shard_size
from moe_lightning.algorithms.mesh_shape import MeshShape
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.workload import Workload
from moe_lightning.values import Range, validated

Dense = Literal["ddp", "zero1", "fsdp", "hsdp"]
DENSE: tuple[Dense, ...] = get_args(Dense)
Size = Annotated[int, Range(least=1, most=1e5)]

_MICRO_BATCHES_PER_STAGE = 4


@validated
@dataclass(frozen=True, kw_only=True)
class Mesh:
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

    @property
    def is_plain(self) -> bool:
        """Data and expert parallelism alone, dense parameters on every rank."""
        return self.micro_batches in (None, 1) and self == Mesh(micro_batches=self.micro_batches)

    def shape(self, num_ranks: int) -> MeshShape:
        """The axes over so many ranks.

        Raises:
            ConfigurationError: they do not divide them.
        """
        return MeshShape.over(num_ranks, pp=self.pp, cp=self.cp, tp=self.tp)

    def micro_batches_of(self, slice_samples: float) -> int:
        """Micro-batches of a step of a data slice of so many samples."""
        if self.micro_batches is not None:
            return self.micro_batches
        if self.pp == 1:
            return 1
        most = max(1, min(_MICRO_BATCHES_PER_STAGE * self.pp, int(slice_samples)))
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
        if heads is not None and heads % cut:
            raise ConfigurationError(
                f"mesh.tp={self.tp} and cp={self.cp} cut {heads} heads into {cut} parts: use divisors of the heads"
            )
        if positions % cut:
            raise ConfigurationError(
                f"mesh.tp={self.tp} and cp={self.cp} cut {positions} positions into {cut} parts: use divisors of them"
            )
        if self.pp * self.chunks > workload.num_blocks:
            raise ConfigurationError(
                f"mesh.pp={self.pp} and chunks={self.chunks} need {self.pp * self.chunks} parts of "
                f"{workload.num_blocks} layers: lower one of them"
            )
        if self.pp > 1 and workload.tied:
            raise ConfigurationError(
                f"mesh.pp={self.pp} parts the head from the embedding that it is tied to: set "
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
class Stage:
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
def busiest_stage(workload: Workload, pp: int, chunks: int) -> Stage:
    """Of a pipeline whose stages get whole layers, in `chunks` runs of as many."""
    blocks = -(-workload.num_blocks // (pp * chunks)) * chunks
    blocks = min(blocks, workload.num_blocks)
    share = blocks / workload.num_blocks
    dense = workload.block_params * share + workload.embedding_params if pp > 1 else float(workload.dense_params)
    return Stage(
        blocks=blocks,
        moe_layers=min(workload.num_layers, blocks),
        dense_blocks=min(workload.dense_blocks, blocks),
        share=share,
        dense_params=dense,
    )
