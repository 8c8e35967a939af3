"""Architectures of Hugging Face models, and the conversion of their feed-forward blocks to our MoE layers.

A family describes the router and expert options in config.json and the names of tensors on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from moe_lightning.config import build_config, pretrained_options
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.interface import CLAMPED_ALPHA, CLAMPED_LIMIT
from moe_lightning.models.huggingface.weights import ExpertLayout, InterleavedStacks, SeparateExperts, WeightsFolder
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import NoiseSource, SampleStream
from moe_lightning.moe.router import RouterConfig

MODEL_BLOCK = "mlp"
"""What every one of these models calls the block, whatever its name on disk."""

OUR_ROUTER = "moe.router"
"""Where the router lies inside our block."""

SELECTION_BIAS = "e_score_correction_bias"
"""What DeepSeek calls the bias that only the choice of experts sees."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        describe: arguments of an MoELayer, from the configuration.
        layout: of the experts on disk.
        disk_block: name on disk of what the model calls `mlp`.
        router: name of the router inside a block.
        returns_scores: the block answers (output, scores) instead of the output.
    """

    describe: Callable[[Any], dict[str, Any]]
    layout: ExpertLayout
    disk_block: str = "mlp"
    router: str = "gate"
    returns_scores: bool = False

    def disk_prefix(self, block: str) -> str:
        """A block's name on disk, with a dot at its end."""
        return f"{block.removesuffix(MODEL_BLOCK)}{self.disk_block}."

    def disk_name(self, name: str) -> str:
        """Return the name on disk of a tensor of our model other than the experts."""
        block, found, rest = name.partition(f"{MODEL_BLOCK}.{OUR_ROUTER}.")
        if not found:
            return name
        rest = SELECTION_BIAS if rest == "expert_bias_E" else rest
        return f"{block}{self.disk_block}.{self.router}.{rest}"


def _mixtral(config: Any) -> dict[str, Any]:
    _require(config, hidden_act="silu")
    # Theirs jitters what the experts see as well; ours only what the router sees, as in the Switch Transformer.
    router = {"softmax_after_top_k": True, "jitter": config.router_jitter_noise}
    return _layer(config, config.num_local_experts, config.intermediate_size, **router)


def _olmoe_or_qwen3(config: Any) -> dict[str, Any]:
    _require(config, hidden_act="silu")
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    # A softmax over all experts, divided by the sum of the chosen, is the softmax over the chosen.
    router = {"softmax_after_top_k": True} if config.norm_topk_prob else {"normalize_top_k": False}
    return _layer(config, config.num_experts, width, **router)


def _deepseek(config: Any) -> dict[str, Any]:
    _require(config, hidden_act="silu")
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise ConfigurationError(
            "num_experts_per_tok=1 with norm_topk_prob=true gives every token the weight 1, which trains no router: "
            "use at least 2 experts per token, or norm_topk_prob=false"
        )
    router = {
        "score": "sigmoid",
        "normalize_top_k": bool(config.norm_topk_prob),
        "scale": config.routed_scaling_factor,
        "num_groups": config.n_group or 1,
        "top_groups": config.topk_group or 1,
    }
    layer = _layer(config, config.n_routed_experts, config.moe_intermediate_size, **router)
    return layer | {"selection_bias": True}


def _gpt_oss(config: Any) -> dict[str, Any]:
    _require(config, hidden_act="silu", swiglu_alpha=CLAMPED_ALPHA, swiglu_limit=CLAMPED_LIMIT)
    layer = _layer(config, config.num_local_experts, config.intermediate_size, softmax_after_top_k=True)
    return layer | {"activation": "swiglu_clamped", "bias": True, "router_bias": True}


FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        describe=_mixtral, layout=SeparateExperts(gate="w1", up="w3", down="w2"), disk_block="block_sparse_moe"
    ),
    "olmoe": Family(describe=_olmoe_or_qwen3, layout=SeparateExperts()),
    "qwen3_moe": Family(describe=_olmoe_or_qwen3, layout=SeparateExperts()),
    "deepseek_v3": Family(describe=_deepseek, layout=SeparateExperts()),
    "gpt_oss": Family(describe=_gpt_oss, layout=InterleavedStacks(), router="router", returns_scores=True),
}
"""By the `model_type` of config.json."""


def _layer(config: Any, num_experts: int, d_expert: int, **router: Any) -> dict[str, Any]:
    top_k = config.num_experts_per_tok
    # Theirs multiplies sums over choices and means over layers; ours takes shares, and every layer adds its own loss.
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) * top_k / config.num_hidden_layers
    return {
        "d_model": config.hidden_size,
        "d_expert": d_expert,
        "num_experts": num_experts,
        "router": {"top_k": top_k, "aux_loss_coef": coefficient, **router},
        "activation": "swiglu",
    }


def _require(config: Any, **values: object) -> None:
    for name, value in values.items():
        found = getattr(config, name, value)
        if found != value:
            raise ConfigurationError(
                f"{name}={found!r} of this {config.model_type} checkpoint is not known: {value!r} is"
            )


IS_TOKEN = "is_token"
"""Keyword of the model's forward pass, bool [B, L]: False where an input is padding that no expert gets."""


class SparseBlock(nn.Module):
    """[..., D] -> [..., D]: an MoE layer, and the block's own shared experts beside it.

    Args:
        moe: the layer.
        shared_experts: the dense layer that every token passes; None: there is none.
        after: applied to the result, such as the dropout of the dense block; None: nothing.
        returns_scores: answer (output, None), where the model expects scores of the router and drops them.

    Attributes:
        is_token: bool [B, L] of the model's running batch, or of that whose layer is recomputed in its backward pass;
            None: there is no padding.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        shared_experts: nn.Module | None = None,
        after: nn.Module | None = None,
        returns_scores: bool = False,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.shared_experts = shared_experts
        self.after = after
        self.is_token: Tensor | None = None
        self._returns_scores = returns_scores

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        # Of a sequence that goes on from a cache, the last tokens are computed.
        is_token = None if self.is_token is None else self.is_token[:, -hidden_states.shape[1] :]
        out: Tensor = self.moe(hidden_states, is_token)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        if self.after is not None:
            out = self.after(out)
        return (out, None) if self._returns_scores else out


def keep_padding_from_experts(model: nn.Module) -> None:
    """Let the model's blocks know of each batch what is padding: by `is_token`, or by the attention_mask [B, L] of
    callers who know nothing of ours.
    """
    model.register_forward_pre_hook(_note_padding, with_kwargs=True)


def _note_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    is_token = kwargs.pop(IS_TOKEN, None)
    if is_token is None and isinstance(mask, Tensor) and mask.ndim == 2:
        is_token = mask.bool()
    for module in model.modules():
        if isinstance(module, SparseBlock):
            module.is_token = is_token
    return args, kwargs


class DroppingLayerNorm(nn.LayerNorm):
    """[B, ..., D] -> [B, ..., D]: the LayerNorm at the end of a residual branch, with stochastic depth: while training,
    the branch is zero for some samples (Huang et al. 2016). Which ones follows the sample, not the rank.

    Args:
        norm: the layer in whose place it comes, of the same parameters.
        p: probability of dropping the branch, in [0, 1).

    Raises:
        ConfigurationError: p is outside its range.
    """

    def __init__(self, norm: nn.LayerNorm, p: float) -> None:
        super().__init__(norm.normalized_shape, norm.eps)
        if not 0.0 <= p < 1.0:
            raise ConfigurationError(f"drop_path_rate={p} must be at least 0 and below 1")
        self.p = p
        self.tag = 0
        self.stream = SampleStream()

    def forward(self, input: Tensor) -> Tensor:
        branch = super().forward(input)
        if not self.training or self.p == 0.0:
            return branch
        uniform_B1 = self.stream.uniform(NoiseSource.DROP_PATH.key(self.tag), branch.shape[0], 1, branch.device)
        kept_B = (uniform_B1[:, 0] >= self.p).to(branch.dtype) / (1.0 - self.p)
        return branch * kept_B.view(-1, *[1] * (branch.ndim - 1))


class ExpertReader(Protocol):
    """Reader of the experts' first weights; `prefix` is the block's name on disk with a dot at its end."""

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        """The rows of one expert by the names of our parameters."""

    def names(self, prefix: str, num_experts: int) -> set[str]:
        """The tensors that are read for all experts."""


class Architecture(ABC):
    """One model's configuration with the MoE layers that it gets.

    Args:
        config: a transformers configuration.

    Attributes:
        config: as given.
        auto_class: the transformers class that makes the model of the configuration.
        disk_block: name on disk of what the model calls `mlp`.
        layers: the MoE layers by the names of their blocks, in the model's order; empty before `install`.
        reader: of the experts' first weights.
    """

    auto_class = "AutoModelForCausalLM"
    disk_block = MODEL_BLOCK
    reader: ExpertReader

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers: dict[str, MoELayer] = {}

    @abstractmethod
    def install(self, model: nn.Module) -> None:
        """Put MoE layers in the places of the model's blocks; they are built as the caller's context says."""

    @abstractmethod
    def disk_name(self, name: str) -> str | None:
        """Return the name on disk of a parameter or buffer other than an expert's; None for one that is new."""

    @abstractmethod
    def disk_prefix(self, block: str) -> str:
        """Prefix of the tensors from which a block's experts are read."""

    @abstractmethod
    def exported(self) -> tuple[Any, Family]:
        """The configuration and the family that a checkpoint of the trained model has.

        Raises:
            ConfigurationError: transformers has no class for such a model.
        """


class SparseArchitecture(Architecture):
    """A model that has experts already.

    Args:
        config: a transformers configuration of one of the `FAMILIES`.
        router: training options of the routers; None values leave them as they are.

    Raises:
        ConfigurationError: an option that would change what the pretrained router computes, or that its checkpoints
            have no room for.
    """

    def __init__(self, config: Any, router: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.family = FAMILIES[config.model_type]
        self.reader = self.family.layout
        self.disk_block = self.family.disk_block
        self._arguments = self.family.describe(config)
        options = {name: value for name, value in (router or {}).items() if value is not None}
        free = pretrained_options(RouterConfig)
        for name in options:
            if name not in free:
                raise ConfigurationError(
                    f"router.{name} is fixed by the pretrained model: only {', '.join(free)} can be set"
                )
        if options.get("bias_update_rate") and not self._arguments.get("selection_bias"):
            raise ConfigurationError(
                f"router.bias_update_rate={options['bias_update_rate']} needs a selection bias, which "
                f"{config.model_type} has no room for: use aux_loss_coef"
            )
        self._arguments["router"] = build_config(RouterConfig, self._arguments["router"] | options)

    def install(self, model: nn.Module) -> None:
        for name, block in list(model.named_modules()):
            if not name.endswith(f".{MODEL_BLOCK}") or not hasattr(block, "experts"):
                continue
            moe = MoELayer(**self._arguments)
            shared = getattr(block, "shared_experts", None)
            returns = self.family.returns_scores
            model.set_submodule(name, SparseBlock(moe, shared_experts=shared, returns_scores=returns))
            self.layers[name] = moe

    def disk_name(self, name: str) -> str | None:
        return self.family.disk_name(name)

    def disk_prefix(self, block: str) -> str:
        return self.family.disk_prefix(block)

    def exported(self) -> tuple[Any, Family]:
        return self.config, self.family
