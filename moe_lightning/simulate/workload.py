"""Workload of a simulated run: sizes of the model and of a step, and routing of its tokens.

Sizes are those on which time, traffic and checkpoints depend; routing is the share of every expert in every layer, as a
function of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Interval

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.sharding import TensorSpec
from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_routing_trace

RoutingKind = Literal["uniform", "zipf", "trace"]
Exponent = Annotated[float, Interval(ge=0, le=100)]
_SCALE = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingScenario:
    """Popularity of experts over time; constant between the samples of a trace, and after its last one.

    Attributes:
        shares_SLE: int64 [samples, layers, experts], assignments in units that do not matter. Layers may be fewer than
            the model's: each then stands for several.
        steps: int64 [samples], ascending from 0.
    """

    shares_SLE: IntArray
    steps: IntArray

    @property
    def num_layers(self) -> int:
        return int(self.shares_SLE.shape[1])

    def with_layers(self, least: int) -> RoutingScenario:
        """The same with at least so many layers, each repeated where there are fewer."""
        times = -(-least // self.num_layers)
        return self if times == 1 else replace(self, shares_SLE=np.repeat(self.shares_SLE, times, axis=1))

    def sample(self, step: int) -> int:
        """The sample that holds at a step."""
        return max(0, int(np.searchsorted(self.steps, step, side="right")) - 1)

    def next_change(self, step: int) -> int | None:
        """The first step after this one at which another sample holds."""
        following = self.sample(step) + 1
        return int(self.steps[following]) if following < len(self.steps) else None

    def loads(self, sample: int) -> IntArray:
        """int64 [L, E] of a sample."""
        loads: IntArray = self.shares_SLE[sample]
        return loads

    def tokens(self, sample: int, layer: int, assignments_per_rank: int, num_ranks: int) -> IntArray:
        """int64 [E, N]: assignments of each rank; every rank routes alike, in whole tokens."""
        share = self.shares_SLE[sample, layer].astype(np.float64)
        bounds = np.round(np.concatenate(([0.0], np.cumsum(share))) / share.sum() * assignments_per_rank)
        return np.repeat(np.diff(bounds).astype(np.int64)[:, None], num_ranks, axis=1)


def make_routing(
    kind: RoutingKind, *, num_experts: int, num_layers: int, exponent: float = 1.0, path: str | None = None
) -> RoutingScenario:
    """Uniform or Zipf popularity, the same in every layer and step, or that of a recorded trace.

    Raises:
        ConfigurationError: a trace that is missing or too small.
    """
    if (kind == "trace") != (path is not None):
        raise ConfigurationError(
            f"routing.kind={kind} with routing.path={shown(path)}: give a path with kind=trace, and only with it"
        )
    if path is not None:
        return trace_routing(Path(path), num_experts=num_experts, num_layers=num_layers)
    weights = (1.0 + np.arange(num_experts)) ** (-exponent if kind == "zipf" else 0.0)
    shares = np.maximum(1, np.round(_SCALE * weights / weights.sum())).astype(np.int64)
    return RoutingScenario(shares_SLE=shares[None, None], steps=np.zeros(1, dtype=np.int64))


def trace_routing(path: Path, *, num_experts: int, num_layers: int) -> RoutingScenario:
    """The first layers of a recorded run, each with its most used experts at the time (Lazarus 6.1).

    Raises:
        ConfigurationError: no such trace, or one with fewer experts than the model.
    """
    counts_SLNE, steps = read_routing_trace(path)
    counts = counts_SLNE.sum(axis=2)
    if counts.shape[2] < num_experts:
        raise ConfigurationError(
            f"{path} has {counts.shape[2]} experts, the model {num_experts}: use routing.kind=zipf, or fewer experts"
        )
    return RoutingScenario(shares_SLE=hottest(counts[:, :num_layers], num_experts), steps=steps - steps[0])


def hottest(counts_SLE: IntArray, num_experts: int) -> IntArray:
    """int64 [S, L, num_experts]: of each layer the experts with most tokens in that sample, in their own order, at
    least one token each."""
    chosen = np.sort(np.argsort(-counts_SLE, axis=2, kind="stable")[:, :, :num_experts], axis=2)
    return np.maximum(1, np.take_along_axis(counts_SLE, chosen, axis=2))


class StateBytes(NamedTuple):
    """Bytes of a parameter, the mean over a group of them; frozen parameters have a weight only.

    Attributes:
        weight, gradient, optimizer: in the precisions that they are kept in.
        cast: copy in the precision of the products, from the forward to the end of the backward pass.
    """

    weight: float
    gradient: float
    optimizer: float
    cast: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes from which the memory of a rank follows, see `simulate.memory`.

    Attributes:
        dense, expert: of a parameter outside and inside of the experts.
        block: kept for the backward pass by the dense parts of a transformer layer, for each token.
        row: the same by an MoE layer, for each assignment of a token.
        ends: the same outside of the transformer layers, for each token.
        loss_forward, loss_backward: logits, and at the beginning of the backward pass their gradients, for each token.
        working: of the layer that is computed, beside what is kept, for each token.
        dense_update, expert_update: temporary in an update of the largest dense tensor, and of each expert of a layer.
        buckets: sums of gradients over ranks have buckets beside the gradients of dense parameters.
        keeps_freed: freed results of experts' kernels, and gradients of experts, stay with the process (CPU).
        uneven: share of the rows of experts that is kept in addition, because their number changes from step to step.
    """

    dense: StateBytes
    expert: StateBytes
    block: float
    row: float
    ends: float = 0.0
    loss_forward: float = 0.0
    loss_backward: float = 0.0
    working: float = 0.0
    dense_update: float = 0.0
    expert_update: float = 0.0
    buckets: bool = False
    keeps_freed: bool = False
    uneven: float = 0.0


_LOSS_BYTES = 4  # of a logit in the loss
_MAY_BE_NONE = {"dense_params", "dense_blocks", "embedding_params", "tied"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal MoE layers and the batch that it is trained on.

    Attributes:
        dense_params: parameters outside the experts, router included.
        expert_params: of one expert.
        num_layers: MoE layers.
        num_experts: of each.
        top_k: experts of a token.
        d_model: width.
        dense_flops_per_token: forward pass of one token outside the experts, attention included.
        context_length: tokens of a sample.
        rank_batch: samples of one step on each rank; the batch then shrinks with the world, as in the papers.
        global_batch: samples of one step over all ranks, whatever their number, as this library trains. Exactly one
            of the two.
        activation_bytes: of one number of an activation.
        state_bytes: of weight, fp32 copy and moments of one parameter, for memory and migration.
        depth: transformer layers, dense ones included; None: num_layers.
        dense_blocks: of them, those with a dense feed-forward part or shared experts.
        num_heads, kv_heads: of attention; None: any number, and as many as num_heads.
        embedding_params: of the token embedding, part of dense_params; the head has as many.
        tied: whether the head is the embedding.
        footprint: of a model as moe-train trains it; None: mixed precision with fp32 copies, in closed form.

    Raises:
        ConfigurationError: a size below 1, or not exactly one kind of batch.
    """

    dense_params: int
    expert_params: int
    num_layers: int
    num_experts: int
    top_k: int
    d_model: int
    dense_flops_per_token: float
    context_length: int
    rank_batch: int | None = None
    global_batch: int | None = None
    activation_bytes: int = 2
    state_bytes: int = 14
    depth: int | None = None
    dense_blocks: int = 0
    num_heads: int | None = None
    kv_heads: int | None = None
    embedding_params: int = 0
    tied: bool = False
    footprint: Footprint | None = None

    def __post_init__(self) -> None:
        if (self.rank_batch is None) == (self.global_batch is None):
            raise ConfigurationError(
                f"rank_batch={self.rank_batch} and global_batch={self.global_batch}: give exactly one of them"
            )
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value < (name not in _MAY_BE_NONE):
                raise ConfigurationError(f"{name}={value} of the model or its batch must be at least 1")
        if self.top_k > self.num_experts:
            raise ConfigurationError(f"top_k={self.top_k} exceeds the {self.num_experts} experts: lower it")

    @property
    def parameters(self) -> int:
        return self.dense_params + self.num_layers * self.num_experts * self.expert_params

    @property
    def num_blocks(self) -> int:
        """Transformer layers."""
        return self.depth or self.num_layers

    @property
    def block_params(self) -> int:
        """Dense parameters of the transformer layers: all but the embedding and the head."""
        return self.dense_params - self.embedding_params * (1 if self.tied else 2)

    @property
    def expert_flops_per_row(self) -> float:
        """Forward pass of one routed assignment: a multiplication and an addition for each parameter."""
        return 2.0 * self.expert_params

    @property
    def expert_state_bytes(self) -> int:
        """Bytes of one expert, which a migration moves."""
        return self.expert_params * self.state_bytes

    def samples_per_step(self, num_ranks: int) -> int:
        return self.global_batch if self.global_batch is not None else (self.rank_batch or 0) * num_ranks

    def tokens_per_rank(self, num_ranks: int) -> float:
        return self.samples_per_step(num_ranks) * self.context_length / num_ranks

    def tensors(self) -> list[TensorSpec]:
        """One dense tensor of rows and the experts of each layer, for the sizes of checkpoints."""
        experts = [
            TensorSpec(name=f"layer{layer}", shape=(self.expert_params,), experts=self.num_experts)
            for layer in range(self.num_layers)
        ]
        return [TensorSpec(name="dense", shape=(self.dense_params,)), *experts]


def footprint_of(workload: Workload) -> Footprint:
    """Return the footprint of a workload, in closed form where none was counted.

    A dense layer keeps for each token what goes into or comes out of its matrices on their long side, P / d numbers of
    P parameters, and four rows of the width for norms and sums: 32 bytes a token and unit of width for a GPT, where
    Korthikanti et al. (2022, eq. 2) count 34 with the masks of dropout. An MoE layer adds for each assignment a row
    on its way in and out, and what its expert keeps.
    """
    if workload.footprint is not None:
        return workload.footprint
    width, number = workload.d_model, workload.activation_bytes
    state = StateBytes(weight=number, gradient=number, optimizer=workload.state_bytes - number)
    return Footprint(
        dense=state,
        expert=state,
        block=number * (workload.block_params / workload.num_blocks / width + 4 * width),
        row=number * (2 * width + workload.expert_params / width),
        loss_forward=workload.embedding_params / width * (number + _LOSS_BYTES),
    )


def gpt_workload(
    config: object, *, rank_batch: int | None = None, global_batch: int | None = None, activation_bytes: int = 2
) -> Workload:
    """The workload of a GPT (`models.gpt.GPTConfig`), counted on its own modules without allocating them.

    Raises:
        ConfigurationError: a dense model.
    """
    import torch  # the simulation itself needs no torch

    from moe_lightning.models.gpt import GPT, GPTConfig

    assert isinstance(config, GPTConfig)
    if not config.num_experts:
        raise ConfigurationError("model.num_experts=0 is a dense model: give the simulator one with experts")
    with torch.device("meta"):
        model = GPT(config)
    batch = {"rank_batch": rank_batch, "global_batch": global_batch}
    return model_workload(model, TransformerSizes.of_gpt(config), activation_bytes=activation_bytes, **batch)


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """Sizes of a transformer that its modules do not tell, see `Workload`.

    Attributes:
        attention_width: heads times head size, summed over the layers.
    """

    d_model: int
    depth: int
    context_length: int
    attention_width: int
    num_heads: int
    kv_heads: int
    embedding_params: int
    tied: bool

    @classmethod
    def of_gpt(cls, config: Any) -> TransformerSizes:
        """Return the sizes of a `models.gpt.GPTConfig`."""
        return cls(
            d_model=config.d_model,
            depth=config.num_layers,
            context_length=config.context_length,
            attention_width=config.num_layers * config.d_model,
            num_heads=config.num_heads,
            kv_heads=config.kv_heads,
            embedding_params=config.vocab_size * config.d_model,
            tied=config.tie_embeddings,
        )


def model_workload(model: Any, sizes: TransformerSizes, **options: Any) -> Workload:
    """The workload of a transformer with MoE layers of one kind, counted on its modules, on the meta device or not.

    Attention is counted as causal: half of the score matrix.

    Args:
        model: of torch.
        options: of the `Workload`: its batch and precision.
    """
    from torch.nn import Embedding

    from moe_lightning.models.gpt import expert_size, whole_parameters
    from moe_lightning.moe.layer import moe_layers

    layers = moe_layers(model)
    dense = whole_parameters(model) - sum(layer.num_experts * expert_size(layer.experts) for layer in layers)
    owned = [(module, p) for module in model.modules() for p in module.parameters(recurse=False)]
    looked_up = {p for module, p in owned if isinstance(module, Embedding)}
    looked_up -= {p for module, p in owned if not isinstance(module, Embedding)}
    multiplied = dense - sum(p.numel() for p in looked_up)
    return Workload(
        dense_params=dense,
        expert_params=expert_size(layers[0].experts),
        num_layers=len(layers),
        num_experts=layers[0].num_experts,
        top_k=layers[0].router.config.top_k,
        d_model=sizes.d_model,
        dense_flops_per_token=2.0 * multiplied + 2.0 * sizes.attention_width * sizes.context_length,
        context_length=sizes.context_length,
        depth=sizes.depth,
        dense_blocks=sizes.depth - sum(layer.shared_expert is None for layer in layers),
        num_heads=sizes.num_heads,
        kv_heads=sizes.kv_heads,
        embedding_params=sizes.embedding_params,
        tied=sizes.tied,
        **options,
    )
