"""Memory of a rank, at its most in a training step: parameters, gradients, optimizer states, activations.

Without a `Footprint` of the model, in closed form for mixed precision: weights and gradients in the numbers of
activations (2 bytes), fp32 copies and two moments beside them (12 bytes). Every number is that of the busiest stage.

A step has two peaks. At the end of the last forward pass the activations are complete, and gradients of the step before
are there, or of the micro-batches before. In the update there are gradients and temporaries of the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lightning.simulate.mesh import BusiestStage, MeshSpec, busiest_stage
from moe_lightning.simulate.workload import Workload, footprint_of

_GATHERED_UNITS = 2  # one in use, one on its way


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: of dense parameters and of the experts in this rank's slots.
        activations: kept for backward passes, at their most, with the logits and what the running layer takes.
        gathered: layers that fsdp and hsdp gather, and copies of parameters in the precision of products.
        update: temporaries of the optimizer.
        snapshots: buffers of checkpoints, where they share the rank's memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0
    update: float = 0.0
    snapshots: float = 0.0

    @property
    def state(self) -> float:
        """Bytes between steps."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        passing = max(self.activations + self.gathered, self.update)
        return self.state + self.gradients + passing + self.snapshots


def rank_memory(
    workload: Workload,
    mesh: MeshSpec,
    num_ranks: int,
    *,
    slots: int,
    ranks_per_node: int,
) -> RankMemory:
    """Return the memory of a rank of the busiest stage, with so many experts of each of its MoE layers.

    Dense: P parameters of the stage are P / tp of a rank; fsdp and hsdp divide all of it by their shards, zero1 the
    optimizer states (Rajbhandari et al. 2020, fig. 1). Experts: slots of each layer, whole.
    """
    stage, footprint = busiest_stage(workload, mesh.pp, mesh.chunks), footprint_of(workload)
    dense = stage.dense_params / mesh.tp
    experts = float(stage.moe_layers * slots * workload.expert_params)
    weights = dense / mesh.weight_shards(num_ranks, ranks_per_node)
    states = dense / mesh.state_shards(num_ranks, ranks_per_node)
    of_dense, of_expert = footprint.dense, footprint.expert
    samples = workload.samples_per_step(num_ranks) * mesh.unit / num_ranks
    micro_batches = mesh.micro_batches_of(samples)
    tokens = samples * workload.context_length / (mesh.cp * mesh.tp * micro_batches)
    is_gathered = mesh.dense in ("fsdp", "hsdp")
    has_buckets = footprint.buckets and not is_gathered and num_ranks > mesh.pp * mesh.tp
    dense_gradients = of_dense.gradient * weights
    expert_gradients = of_expert.gradient * experts
    # Gradients of the last step are released between the passes; those in buckets, and what the process keeps, stay.
    released = 0.0 if micro_batches > 1 else dense_gradients + (0.0 if footprint.keeps_freed else expert_gradients)
    return RankMemory(
        parameters=of_dense.weight * weights + of_expert.weight * experts,
        gradients=dense_gradients * (1 + has_buckets) + expert_gradients,
        optimizer=of_dense.optimizer * states + of_expert.optimizer * experts,
        activations=activation_bytes(
            workload, mesh, stage, tokens=tokens, micro_batches=micro_batches, released=released
        ),
        gathered=of_dense.cast * dense + of_expert.cast * experts + is_gathered * _gathered(workload, mesh),
        update=max(slots * footprint.expert_update, footprint.dense_update / mesh.tp),
    )


def _gathered(workload: Workload, mesh: MeshSpec) -> float:
    """Return the bytes of the layers that are gathered at one time, and of the embedding or head."""
    blocks = _GATHERED_UNITS * workload.block_params / workload.num_blocks
    ends = workload.dense_params - workload.block_params if mesh.pp == 1 else workload.embedding_params
    return footprint_of(workload).dense.weight * (blocks + ends) / mesh.tp


def activation_bytes(
    workload: Workload,
    mesh: MeshSpec,
    stage: BusiestStage,
    *,
    tokens: float,
    micro_batches: int,
    released: float = 0.0,
) -> float:
    """Return the peak of a rank's activations: on the first stage, which has most micro-batches on their way, or on
    the last one, which has the logits.

    Sequence parallelism and all-to-all context parallelism divide all of it, so `tokens` are those of a rank.
    Recomputation keeps a row of each layer, and one layer whole.

    Args:
        tokens: of a micro-batch on this rank.
        micro_batches: of a step.
        released: bytes of gradients that are released before the backward pass.
    """
    footprint = footprint_of(workload)
    rows = workload.top_k * footprint.row
    kept, redone, working = stage.blocks * footprint.block + stage.moe_layers * rows, 0.0, footprint.working
    if mesh.recompute:
        kept = float(stage.blocks * workload.d_model * workload.activation_bytes)
        redone = working = footprint.block + rows
    if footprint.keeps_freed:  # what the last layer's backward pass took is there in the next step, too
        kept += rows
        kept += footprint.uneven * (stage.moe_layers + 1) * rows
    under_way = min(float(micro_batches), in_flight(mesh.pp, mesh.chunks))
    first = tokens * (under_way * kept + working)
    forward = tokens * (footprint.loss_forward + redone)
    backward = tokens * max(footprint.loss_backward, working) - released
    return max(first, tokens * (kept + footprint.ends) + max(forward, backward))


def in_flight(pp: int, chunks: int) -> float:
    """Micro-batches, in layers of a whole stage, whose activations the first stage keeps: pp under 1F1B, and
    (pp - 1) / chunks more under the interleaved schedule (Narayanan et al. 2021, 2.2; Korthikanti et al. 2022, 4.2.3)
    """
    return pp + (pp - 1) / chunks if chunks > 1 else float(pp)
