"""GPT: GPT-2 and LLaMA style from one configuration, dense or with MoE layers; size and arithmetic of a model.

Shapes: B sequences, L positions, D model width, H heads, C head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from moe_lightning.compat import private_torch
from moe_lightning.config import Coefficient, NonNegativeInt, PositiveInt, Probability, build_config, option, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.interface import GATED
from moe_lightning.moe.experts import Activation, Experts, FeedForward
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import SampleStream, StreamDropout, attach_stream
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.sequence import ContextParallel
from moe_lightning.parallel.tensor import Columns, Embedding, Gathered, Head, Parted, Plan, Rows, Style
from moe_lightning.state.tensors import local, whole_shape


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
        activation: "gelu" or its approximation "gelu_tanh" (GPT-2), "swiglu" (LLaMA) or "swiglu_clamped" (GPT-OSS).
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
    init_std: Coefficient = option(0.02, is_resumable=True)

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
        """Number of transformer layers that are MoE layers."""
        first = min(self.num_dense_layers, self.num_layers)
        return self.num_layers // self.moe_every - first // self.moe_every if self.num_experts else 0

    def is_moe_layer(self, index: int) -> bool:
        """True if transformer layer `index` (0-based) is an MoE layer."""
        return self.num_experts > 0 and index >= self.num_dense_layers and (index + 1) % self.moe_every == 0


class GPT(nn.Module):
    """Token ids [B, L] -> logits [B, L, V].

    Raises:
        ConfigurationError: a sequence longer than the context.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.context = ContextParallel()
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.token_embedding.weight, std=config.init_std)
        self.position_embedding = None
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.d_model)
            nn.init.normal_(self.position_embedding.weight, std=config.init_std)
        self.dropout = StreamDropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = _norm(config, config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=config.init_std)
        attach_stream(self, SampleStream())

    def forward(self, ids_BL: Tensor, is_token_BL: Tensor | None = None, begins_BL: Tensor | None = None) -> Tensor:
        """Logits.

        Args:
            ids_BL: tokens.
            is_token_BL: bool, False where a sequence is padded at its end: no expert gets that. None: it is not.
            begins_BL: int64, the position at which the document of each token begins: positions restart there, and no
                token sees another document. None: a sequence is one document.
        """
        length = self.context.whole(ids_BL.shape[1])
        if length > self.config.context_length:
            raise ConfigurationError(
                f"a sequence of {length} tokens exceeds context_length={self.config.context_length}: "
                "cut it or raise the length"
            )
        x_BLD = self.token_embedding(ids_BL)
        if self.position_embedding is not None:
            x_BLD = x_BLD + self.position_embedding.weight[self.context.positions(ids_BL.shape[1], begins_BL)]
        x_BLD = self.dropout(x_BLD)
        for block in self.blocks:
            x_BLD = block(x_BLD, is_token_BL, begins_BL)
        return self.head(self.norm(x_BLD))  # type: ignore[no-any-return]

    def tensor_parallel_plan(self) -> Plan:
        """Return the plan by which several ranks compute the model's layers together."""
        config = self.config
        heads = (config.num_heads, config.kv_heads, config.kv_heads)
        qkv = Columns(tuple(n * config.head_size for n in heads), unit=config.head_size, of="heads")
        halves = (config.hidden_size,) * 2 if config.activation in GATED else None
        plan: dict[str, Style] = {
            "token_embedding": Embedding(),
            "dropout": Parted(),
            "blocks.*": Parted(1),
            "blocks.*.attention": Gathered(),
            "blocks.*.attention.qkv": qkv,
            "blocks.*.attention.out": Rows(),
            "head": Head(),
        }
        for index, block in enumerate(self.blocks):
            if isinstance(block.feed_forward, FeedForward):
                name = f"blocks.{index}.feed_forward"
                plan |= {name: Gathered(), f"{name}.up": Columns(halves), f"{name}.down": Rows()}
        return plan


class Block(nn.Module):
    """Pre-norm transformer layer; its feed-forward part is dense or an MoE layer, as the config says for this index."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        residual_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = _norm(config, config.d_model)
        self.attention = Attention(config, residual_std)
        self.feed_forward_norm = _norm(config, config.d_model)
        self.feed_forward: nn.Module
        if config.is_moe_layer(index):
            self.feed_forward = MoELayer(
                config.d_model,
                config.expert_size,
                config.num_experts,
                config.router,
                activation=config.activation,
                bias=config.bias,
                num_shared_experts=config.num_shared_experts,
                init_std=config.init_std,
                down_init_std=residual_std,
            )
        else:
            self.feed_forward = FeedForward(
                config.d_model,
                config.hidden_size,
                config.activation,
                config.bias,
                init_std=config.init_std,
                down_init_std=residual_std,
            )
        self.dropout = StreamDropout(config.dropout)

    def forward(self, x_BLD: Tensor, is_token_BL: Tensor | None = None, begins_BL: Tensor | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), begins_BL)
        mask = (is_token_BL,) if isinstance(self.feed_forward, MoELayer) else ()
        return x_BLD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BLD), *mask))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads, optional rotary positions and query-key norms."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        kv_size = self.kv_heads * self.head_size
        self.qkv = nn.Linear(config.d_model, config.d_model + 2 * kv_size, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        nn.init.normal_(self.qkv.weight, std=config.init_std)
        nn.init.normal_(self.out.weight, std=residual_std)
        if config.bias:
            nn.init.zeros_(self.qkv.bias)
            nn.init.zeros_(self.out.bias)
        self.query_norm = RMSNorm(self.head_size) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.head_size) if config.qk_norm else nn.Identity()
        self.rotary = Rotary(config) if config.position == "rope" else None
        self.context = ContextParallel()
        self.dropout = StreamDropout(config.dropout)

    def forward(self, x_BLD: Tensor, begins_BL: Tensor | None = None) -> Tensor:
        heads_BLHC = self.qkv(x_BLD).unflatten(-1, (-1, self.head_size))
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        here = [heads_BLHC.shape[2] * number // sum(heads) for number in heads]  # all, or those of this rank
        q, k, v = (t.transpose(1, 2) for t in heads_BLHC.split(here, dim=2))
        q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            positions = self.context.positions(q.shape[2], begins_BL)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        mixed_BHLC = self.context.attention(q, k, v, documents_BL=begins_BL)
        return self.dropout(self.out(mixed_BHLC.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Rotary(private_torch.Float32Module):
    """Rotates pairs (c, c + C/2) of each head by an angle proportional to the position (RoPE, in LLaMA's layout)."""

    in_float32 = ("cos_LC", "sin_LC")
    cos_LC: Tensor
    sin_LC: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        half = config.head_size // 2
        frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles_LC = torch.outer(torch.arange(config.context_length, dtype=torch.float64), frequencies).repeat(1, 2)
        self.register_buffer("cos_LC", angles_LC.cos().float(), persistent=False)
        self.register_buffer("sin_LC", angles_LC.sin().float(), persistent=False)

    def forward(self, x_BHLC: Tensor, positions: slice | Tensor | None = None) -> Tensor:
        """Turned by positions: a slice, or int64 [B, L]; None: from 0 on."""
        at = slice(x_BHLC.shape[-2]) if positions is None else positions
        cos, sin = self.cos_LC[at], self.sin_LC[at]
        if cos.ndim > 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x_BHLC.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x_BHLC * cos + turned * sin).to(x_BHLC.dtype)


class RMSNorm(nn.RMSNorm):
    """RMS norm in the dtype of its input: under autocast the float32 weight would cost the fused path."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _norm(config: GPTConfig, size: int) -> nn.Module:
    return nn.LayerNorm(size, bias=config.bias) if config.norm == "layernorm" else RMSNorm(size)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a model.

    Attributes:
        whole: of the model, each expert once.
        here: that this process holds; replicas count, experts and shards of other ranks do not.
        active: that one token passes.
        multiplied: those of the active ones that are multiplied with a token: matrices but not lookups in embeddings.
    """

    whole: int
    here: int
    active: int
    multiplied: int

    def training_flops(self, num_tokens: int, context_length: float, attention_width: int) -> int:
        """Floating-point operations of one forward and backward pass (PaLM, arXiv 2204.02311, appendix B): six for
        each parameter and token, and twelve for each token, position and unit of attention. Nothing is added for
        recomputation or for the routers' softmax, nothing taken off for causal masks or frozen weights.

        Args:
            num_tokens: in all sequences together.
            context_length: tokens that attend to each other; of documents that share a sequence the mean over tokens.
            attention_width: heads times head size, summed over the layers.
        """
        return num_tokens * 6 * self.multiplied + 12 * attention_width * round(num_tokens * context_length)


def model_size(model: nn.Module) -> ModelSize:
    """The size of a model with MoE layers under any placement, or of one without any."""
    whole = active = whole_parameters(model)
    multiplied = _multiplied_by_every_token(model)
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        top_k = layer.router.config.top_k
        active -= (layer.num_experts - top_k) * expert_size(layer.experts)
        multiplied += top_k * expert_size(layer.experts, matrices_only=True)
    return ModelSize(whole=whole, here=held_parameters(model), active=active, multiplied=multiplied)


def held_parameters(model: nn.Module) -> int:
    """Parameters that this process holds: its slots of experts, its shards, and none of other pipeline stages."""
    return sum(local(p).numel() for p in model.parameters() if not p.is_meta)


def whole_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Parameters of the whole model, each expert once; with `trained` only those that need gradients."""
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    of_experts = {id(p) for experts in stacks for p in experts.parameters()}
    dense = [p for p in model.parameters() if id(p) not in of_experts and (p.requires_grad or not trained)]
    spread = sum(experts.num_experts * expert_size(experts, trained=trained) for experts in stacks)
    return spread + sum(whole_shape(p).numel() for p in dense)


def expert_size(experts: Experts, *, matrices_only: bool = False, trained: bool = False) -> int:
    """Parameters of one expert, with or without its biases, or only those that need gradients; quantised ones count as
    the numbers that they stand for.
    """
    stacks = experts.stacked_parameters()
    rows = [p.shape[1:] for name, p in stacks.items() if p.requires_grad or (name in experts.shapes and not trained)]
    rows += [experts.shapes[name] for name in experts.shapes if name not in stacks and not trained]
    return sum(math.prod(shape) for shape in rows if len(shape) > 1 or not matrices_only)


def _multiplied_by_every_token(model: nn.Module) -> int:
    """Elements of the dense matrices that every token meets; a matrix that is also an embedding counts."""
    matrices = {
        id(parameter): whole_shape(parameter).numel()
        for module in model.modules()
        if not isinstance(module, Experts | nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    return sum(matrices.values())


def least_gpt_parameters(config: GPTConfig) -> int:
    """Elements of a GPT's matrices, each expert once, without building it: all its parameters but biases and norms."""
    c, width = config, config.d_model
    matrices = 3 if c.activation in GATED else 2
    embeddings = c.vocab_size * (1 if c.tie_embeddings else 2) + c.context_length * (c.position == "learned")
    attention = 2 * width + 2 * c.kv_heads * c.head_size
    moe = c.num_experts + matrices * c.expert_size * (c.num_experts + c.num_shared_experts)
    dense = (c.num_layers - c.num_moe_layers) * matrices * c.hidden_size
    return width * (embeddings + c.num_layers * attention + c.num_moe_layers * moe + dense)
