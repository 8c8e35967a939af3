"""Families of transformers' models with experts: router, experts, and names of tensors on disk.

A family is one entry of `FAMILIES`; everything else reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.interface import CLAMPED_ALPHA, CLAMPED_LIMIT
from moe_lightning.models.huggingface.weights import ExpertLayout, SeparateExperts, StackedExperts

OUR_ROUTER = "moe.router"
"""Where the router lies inside our block."""

SELECTION_BIAS = "expert_bias_E"
"""Our router's name of the bias that only the choice of experts sees."""

SHARED_EXPERTS = ("shared_experts", "shared_expert")
"""Names of the dense layer that every token of a block passes."""

SHARED_GATE = "shared_expert_gate"
"""Name of the linear layer whose sigmoid that layer's output is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        title: name in the documentation.
        router: options of RouterConfig, from the configuration.
        layout: of the experts on disk.
        num_experts, d_expert: keys of the configuration.
        options: arguments of MoELayer that are the same for the whole family.
        requires: the only values of the configuration that are supported, beside hidden_act="silu".
        block: last part of the name of the module with the router and the experts.
        gate: name of the router inside the block.
        selection_bias: name inside the block of the bias that only the choice of experts sees; None: there is none.
        bias_shape: shape of that bias on disk.
        on_disk: pairs (part of a tensor's name in the model, its replacement on disk), applied in order.
        returns_scores: the block returns (output, scores) instead of the output.
    """

    title: str
    router: Callable[[Any], dict[str, Any]]
    layout: ExpertLayout
    num_experts: str = "num_experts"
    d_expert: str = "moe_intermediate_size"
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    block: str = "mlp"
    gate: str = "gate"
    selection_bias: str | None = None
    bias_shape: tuple[int, ...] = (-1,)
    on_disk: tuple[tuple[str, str], ...] = ()
    returns_scores: bool = False

    def layer(self, config: Any) -> dict[str, Any]:
        """Return the arguments of the MoELayer of a configuration.

        Raises:
            ConfigurationError: an option that our layers compute otherwise.
        """
        for name, value in {"hidden_act": "silu", **self.requires}.items():
            found = getattr(config, name, value)
            if found != value:
                raise ConfigurationError(
                    f"{name}={found!r} of this {config.model_type} checkpoint is not known: {value!r} is"
                )
        top_k = config.num_experts_per_tok
        return {
            "d_model": config.hidden_size,
            "d_expert": getattr(config, self.d_expert),
            "num_experts": getattr(config, self.num_experts),
            "router": {"top_k": top_k, **self.router(config)},
            "activation": "swiglu",
            "selection_bias": self.selection_bias is not None,
            **self.options,
        }

    def model_name(self, name: str) -> str:
        """Return the name in transformers' model of a tensor of ours other than the experts."""
        block, found, rest = name.partition(f".{self.block}.{OUR_ROUTER}.")
        if not found:
            return name
        return f"{block}.{self.block}.{self.selection_bias if rest == SELECTION_BIAS else f'{self.gate}.{rest}'}"

    def disk_name(self, name: str) -> str:
        """Return the name on disk of a tensor by its name in transformers' model."""
        for in_model, on_disk in self.on_disk:
            name = name.replace(in_model, on_disk)
        return name


def _softmax(config: Any) -> dict[str, Any]:
    # A softmax over all experts, divided by the sum of the chosen, is the softmax over the chosen.
    return {"softmax_after_top_k": True} if config.norm_topk_prob else {"normalize_top_k": False}


def _softmax_of_chosen(config: Any) -> dict[str, Any]:
    # Theirs jitters what the experts see as well; ours only what the router sees, as in the Switch Transformer.
    return {"softmax_after_top_k": True, "jitter": getattr(config, "router_jitter_noise", 0.0)}


def _normalised(config: Any) -> dict[str, Any]:
    if config.num_experts_per_tok == 1:
        raise ConfigurationError(
            f"num_experts_per_tok=1 of this {config.model_type} checkpoint gives all tokens the weight 1, which trains "
            "no router: use at least 2 experts per token"
        )
    return {"normalize_top_k": True}


def _sigmoid_in_groups(config: Any) -> dict[str, Any]:
    return {
        "score": "sigmoid",
        **(_normalised(config) if config.norm_topk_prob else {"normalize_top_k": False}),
        "scale": config.routed_scaling_factor,
        "num_groups": config.n_group or 1,
        "top_groups": config.topk_group or 1,
    }


def _deepseek_v2(config: Any) -> dict[str, Any]:
    groups = {"num_groups": config.n_group, "top_groups": config.topk_group, "group_top_k": 1}
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise ConfigurationError(
            f"topk_method={config.topk_method!r} of this deepseek_v2 checkpoint is not known: 'greedy' and "
            "'group_limited_greedy' are"
        )
    limited = groups if config.topk_method == "group_limited_greedy" else {}
    return {"normalize_top_k": False, "scale": config.routed_scaling_factor, **limited}


_MIXTRAL = Family(
    title="Mixtral",
    router=_softmax_of_chosen,
    layout=SeparateExperts(gate="w1", up="w3", down="w2"),
    num_experts="num_local_experts",
    d_expert="intermediate_size",
    on_disk=((".mlp.", ".block_sparse_moe."),),
)
_DEEPSEEK_V3 = Family(
    title="DeepSeek-V3",
    router=_sigmoid_in_groups,
    layout=SeparateExperts(),
    num_experts="n_routed_experts",
    selection_bias="gate.e_score_correction_bias",
)

FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "olmoe": Family(title="OLMoE", router=_softmax, layout=SeparateExperts(), d_expert="intermediate_size"),
    "qwen2_moe": Family(title="Qwen2-MoE", router=_softmax, layout=SeparateExperts(peft_stacks=False)),
    "qwen3_moe": Family(title="Qwen3-MoE", router=_softmax, layout=SeparateExperts()),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe": replace(_DEEPSEEK_V3, title="GLM-4-MoE"),
    "deepseek_v2": Family(
        title="DeepSeek-V2",
        router=_deepseek_v2,
        layout=SeparateExperts(),
        num_experts="n_routed_experts",
        requires={"norm_topk_prob": False},
    ),
    "ernie4_5_moe": Family(
        title="ERNIE 4.5 MoE",
        router=_normalised,
        layout=SeparateExperts(),
        num_experts="moe_num_experts",
        selection_bias="gate.moe_statics.e_score_correction_bias",
        bias_shape=(1, -1),
        on_disk=((".gate.moe_statics.", ".moe_statics."),),
    ),
    "granitemoe": Family(
        title="Granite MoE",
        router=_softmax_of_chosen,
        layout=StackedExperts(is_transposed=True),
        num_experts="num_local_experts",
        d_expert="intermediate_size",
        block="block_sparse_moe",
        gate="router",
        on_disk=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
        ),
    ),
    "llama4_text": Family(
        title="Llama 4",
        router=lambda config: {"score": "sigmoid", "normalize_top_k": False, "weigh_inputs": True},
        layout=StackedExperts(peft_swaps=True),
        num_experts="num_local_experts",
        d_expert="intermediate_size",
        requires={"num_experts_per_tok": 1},
        block="feed_forward",
        gate="router",
        returns_scores=True,
    ),
    "jamba": Family(
        title="Jamba",
        router=lambda config: {"normalize_top_k": False},
        layout=SeparateExperts(peft_stacks=False),
        d_expert="intermediate_size",
        block="feed_forward",
        gate="router",
    ),
    "minimax": replace(_MIXTRAL, title="MiniMax"),
    "qwen3_5_moe_text": Family(
        title="Qwen3.5-MoE", router=_softmax_of_chosen, layout=SeparateExperts(peft_stacks=False)
    ),
    "gpt_oss": Family(
        title="GPT-OSS",
        router=_softmax_of_chosen,
        layout=StackedExperts(is_interleaved=True, has_biases=True),
        num_experts="num_local_experts",
        d_expert="intermediate_size",
        options={"activation": "swiglu_clamped", "bias": True, "router_bias": True},
        requires={"swiglu_alpha": CLAMPED_ALPHA, "swiglu_limit": CLAMPED_LIMIT},
        gate="router",
        returns_scores=True,
    ),
}
"""By the `model_type` of config.json."""

UNSUPPORTED = {
    "phimoe": "a PhiMoE, whose router samples experts in training and has an approximate gradient of its own "
    f"(SparseMixer), which no router here computes: use one of {', '.join(FAMILIES)}",
}
"""Model types with experts that no entry can describe, each with the reason."""
