"""The Mixture-of-Experts architectures that can be read and written: what their config.json says of routers and
experts, and what their tensors are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.interface import CLAMPED_ALPHA, CLAMPED_LIMIT
from moe_lightning.models.huggingface.layouts import ExpertLayout, InterleavedStacks, SeparateExperts

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
        """What a tensor of our model, other than the experts, is called on disk."""
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


def _olmoe(config: Any) -> dict[str, Any]:
    _require(config, hidden_act="silu")
    return _layer(config, config.num_experts, config.intermediate_size, **_normalised(config))


def _qwen3(config: Any) -> dict[str, Any]:
    _require(config, hidden_act="silu")
    return _layer(config, config.num_experts, config.moe_intermediate_size, **_normalised(config))


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
    "olmoe": Family(describe=_olmoe, layout=SeparateExperts()),
    "qwen3_moe": Family(describe=_qwen3, layout=SeparateExperts()),
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


def _normalised(config: Any) -> dict[str, Any]:
    """A softmax over all experts, divided by the sum of the chosen, is the softmax over the chosen."""
    return {"softmax_after_top_k": True} if config.norm_topk_prob else {"normalize_top_k": False}


def _require(config: Any, **values: object) -> None:
    for name, value in values.items():
        found = getattr(config, name, value)
        if found != value:
            raise ConfigurationError(
                f"{name}={found!r} of this {config.model_type} checkpoint is not known: {value!r} is"
            )
