"""Bytes of one rank of a mesh, in closed form: parameters, gradients, optimizer states, activations.

Mixed precision: weights and gradients in the numbers of activations (2 bytes), fp32 copies and two moments beside them
(12 bytes). Every number of a rank is that of the busiest stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lightning.simulate.mesh import Mesh, Stage, busiest_stage
from moe_lightning.simulate.workload import Workload

_LOSS_BYTES = 4  # of a logit in the loss
_GATHERED_UNITS = 2  # one in use, one on its way


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: of dense parameters and of the experts in this rank's slots.
        activations: kept for backward passes, at their most.
        gathered: whole layers that fsdp and hsdp put together to compute with them.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0

    @property
    def state(self) -> float:
        """What is there between steps."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> float:
        return self.state + self.gradients + self.activations + self.gathered


def rank_memory(workload: Workload, mesh: Mesh, num_ranks: int, *, slots: int, ranks_per_node: int) -> RankMemory:
    """Of a rank of the busiest stage, with so many experts of each of its MoE layers.

    Dense: P parameters of the stage are P / tp of a rank; fsdp and hsdp divide all of it by their shards, zero1 the
    optimizer states (Rajbhandari et al. 2020, fig. 1). Experts: slots of each layer, whole.
    """
    stage = busiest_stage(workload, mesh.pp, mesh.chunks)
    dense = stage.dense_params / mesh.tp
    experts = float(stage.moe_layers * slots * workload.expert_params)
    weights = dense / mesh.weight_shards(num_ranks, ranks_per_node)
    states = dense / mesh.state_shards(num_ranks, ranks_per_node)
    number = workload.activation_bytes
    samples = workload.samples_per_step(num_ranks) * mesh.unit / num_ranks
    micro_batches = mesh.micro_batches_of(samples)
    tokens = samples * workload.context_length / (mesh.cp * mesh.tp * micro_batches)
    layer = workload.block_params / workload.num_blocks / mesh.tp
    is_gathered = mesh.dense in ("fsdp", "hsdp")
    return RankMemory(
        parameters=number * (weights + experts),
        gradients=number * (weights + experts),
        optimizer=(workload.state_bytes - number) * (states + experts),
        activations=activation_bytes(workload, mesh, stage, tokens=tokens, micro_batches=micro_batches),
        gathered=_GATHERED_UNITS * number * layer if is_gathered else 0.0,
    )


def activation_bytes(workload: Workload, mesh: Mesh, stage: Stage, *, tokens: float, micro_batches: int) -> float:
    """Of a rank when most of it is there: on the first stage, which has most micro-batches on their way, or on the
    last one, which has the logits.

    A dense layer keeps for each token what goes into or comes out of its matrices on their long side, P / d numbers of
    P parameters, and four rows of the width for norms and sums: 32 bytes a token and unit of width for a GPT, where
    Korthikanti et al. (2022, eq. 2) count 34 with the masks of dropout. An MoE layer adds for each assignment a row
    on its way in and out, and what its expert keeps. Sequence parallelism and all-to-all context parallelism divide all
    of it, so `tokens` are those of a rank. Recomputation keeps a row of each layer, and one layer whole.

    Args:
        tokens: of a micro-batch on this rank.
        micro_batches: of a step.
    """
    width = workload.d_model
    dense = workload.block_params / workload.num_blocks / width + 4 * width
    expert = workload.top_k * (2 * width + workload.expert_params / width)
    layers = stage.blocks * dense + stage.moe_layers * expert
    kept, working = (float(stage.blocks * width), dense + expert) if mesh.recompute else (layers, 0.0)
    under_way = min(float(micro_batches), in_flight(mesh.pp, mesh.chunks))
    logits = workload.embedding_params / width
    number = workload.activation_bytes
    first = (under_way * kept + working) * number
    last = (kept + working) * number + logits * (number + _LOSS_BYTES)
    return tokens * max(first, last)


def in_flight(pp: int, chunks: int) -> float:
    """Micro-batches, in layers of a whole stage, whose activations the first stage keeps: pp under 1F1B, and
    (pp - 1) / chunks more under the interleaved schedule (Narayanan et al. 2021, 2.2; Korthikanti et al. 2022, 4.2.3)
    """
    return pp + (pp - 1) / chunks if chunks > 1 else float(pp)
