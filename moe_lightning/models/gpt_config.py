"""What a GPT looks like: one frozen description that covers the GPT-2 and the LLaMA family, dense or with experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from moe_lightning.config import Coefficient, NonNegativeInt, PositiveInt, Probability, build_config, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Activation
from moe_lightning.moe.options import option
from moe_lightning.moe.router import RouterConfig


@validated
@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and style of a GPT; the defaults are GPT-2's style.

    Attributes:
        vocab_size: distinct tokens.
        context_length: most tokens in a sequence.
        num_layers, num_heads, d_model: of the transformer.
        num_kv_heads: key and value heads (grouped-query attention); None: as many as `num_heads`.
        d_hidden: width of dense feed-forward layers; None: 4 * d_model.
        num_experts: experts of an MoE layer; 0 makes the model dense.
        d_expert: hidden width of an expert; None: d_hidden.
        moe_every: layers moe_every - 1, 2 * moe_every - 1, ... are MoE layers: 1 is every layer, 2 every other one.
        num_dense_layers: the first layers that stay dense whatever `moe_every` says (DeepSeek).
        num_shared_experts: experts that every token of an MoE layer passes.
        router: how tokens choose experts.
        norm: "layernorm" (GPT-2) or "rmsnorm" (LLaMA).
        position: "learned" embeddings (GPT-2) or "rope" (LLaMA).
        activation: "gelu" (GPT-2) or "swiglu" (LLaMA).
        bias: biases in linear layers, experts and layer norms.
        qk_norm: normalise queries and keys of each head (OLMoE, Qwen3).
        tie_embeddings: use the token embedding as the output matrix.
        dropout: after the embedding, attention and feed-forward layers; keyed by the sample, so it keeps law L1.
        rope_theta: base of the rotary frequencies.
        init_std: standard deviation of the weights; those that write into the residual stream get init_std / sqrt(2 *
            num_layers).

    Raises:
        ConfigurationError: a size below its least value, or sizes that do not divide each other as they must.
    """

    vocab_size: PositiveInt = 50257
    context_length: PositiveInt = 1024
    num_layers: PositiveInt = 12
    num_heads: PositiveInt = 12
    d_model: PositiveInt = 768
    num_kv_heads: PositiveInt | None = None
    d_hidden: PositiveInt | None = None
    num_experts: NonNegativeInt = 8
    d_expert: PositiveInt | None = None
    moe_every: PositiveInt = 2
    num_dense_layers: NonNegativeInt = 0
    num_shared_experts: NonNegativeInt = 0
    router: RouterConfig = field(default_factory=RouterConfig)
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    activation: Activation = "gelu"
    bias: bool = True
    qk_norm: bool = False
    tie_embeddings: bool = True
    dropout: Probability = option(0.0, changes_function=False, draws_noise="in training")
    rope_theta: Annotated[float, Interval(gt=0, le=1e9)] = 10000.0
    init_std: Coefficient = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "router", build_config(RouterConfig, self.router))
        if self.d_model % self.num_heads:
            raise ConfigurationError(
                f"d_model={self.d_model} is not a multiple of num_heads={self.num_heads}: give a divisor of it"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigurationError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}: give a divisor of it"
            )
        if self.position == "rope" and self.head_size % 2:
            raise ConfigurationError(
                f"position='rope' needs an even head size, not d_model/num_heads={self.head_size}: change num_heads"
            )
        if self.num_experts:
            self.router.check(self.num_experts)
            if not self.num_moe_layers:
                raise ConfigurationError(
                    f"moe_every={self.moe_every} and num_dense_layers={self.num_dense_layers} leave no MoE layer among "
                    f"{self.num_layers}: lower them, or set num_experts=0 for a dense model"
                )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads

    @property
    def hidden_size(self) -> int:
        return self.d_hidden or 4 * self.d_model

    @property
    def expert_size(self) -> int:
        return self.d_expert or self.hidden_size

    @property
    def num_moe_layers(self) -> int:
        """How many transformer layers are MoE layers."""
        first = min(self.num_dense_layers, self.num_layers)
        return self.num_layers // self.moe_every - first // self.moe_every if self.num_experts else 0

    def is_moe_layer(self, index: int) -> bool:
        """Whether transformer layer `index` (0-based) is an MoE layer."""
        return self.num_experts > 0 and index >= self.num_dense_layers and (index + 1) % self.moe_every == 0
