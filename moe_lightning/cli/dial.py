"""The dial `depth=N`: sizes and hyperparameters of a compute-optimal small MoE from its number of layers.

`moe-train depth=N` composes conf/dial/depth.yaml over the recipe. Its values are rules, so a key that the command sets
has that value and the others follow from it. With L layers, width D and k experts of a token:

* D = 64 L, heads of 64 channels (nanochat, after the aspect ratio of Kaplan et al. 2020, fig. 5).
* A context of D positions, 128 to 2048: the scores of attention then take a twelfth of the arithmetic at every size.
* Experts instead of every feed-forward layer. 1 of 8 is active (OLMoE, Muennighoff et al. 2024). Experts get finer as
  models grow (Krajewski et al. 2024): k = 2 below 8 layers, 4 below 16, then 8. The k experts of a token are together
  as wide as a dense layer: 8/3 D with SwiGLU (Shazeer 2020), else 4 D.
* 20 tokens for each active parameter outside the embeddings (Hoffmann et al. 2022): N parameters, 20 N tokens.
* C = 6 N * 20 N operations give a batch of 0.292 C^0.3271 tokens, rounded to a power of two of samples, and a learning
  rate of 0.3118 C^-0.125 (DeepSeek LLM, Bi et al. 2024, eq. 1), decayed linearly to zero (Bergsma et al. 2025) after a
  warm-up of 5 % of these steps, at most 2000. Those laws were fitted for AdamW from 1e17 to 2e19 operations; smaller
  models extrapolate them. Muon's update has the size of AdamW's here; Adafactor's rate is relative, 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from annotated_types import Interval
from omegaconf import DictConfig, OmegaConf

from moe_lightning.cli.composition import walk
from moe_lightning.config import TARGET, NonNegativeInt, PositiveInt, require, shown
from moe_lightning.errors import ConfigurationError

Depth = Annotated[int, Interval(ge=1, le=64)]

_GPT = "moe_lightning.models.gpt.GPTConfig"
_CHANNELS = 64  # of a head, and of the width for each layer
_LEAST_CONTEXT, _MOST_CONTEXT = 128, 2048
_INACTIVE = 8
_EXPERT_MULTIPLE = 32
_TOKENS_PER_PARAMETER = 20
_MOST_WARMUP = 2000
_TOP_K = ((8, 2), (16, 4), (math.inf, 8))  # below so many layers
_ADAFACTOR_RATE = 0.01


def active_parameters(model: Mapping[str, Any]) -> int:
    """Parameters of a token's path through a GPT's layers: no embedding, no head, no biases and norms."""
    width, layers, experts = model["d_model"], model["num_layers"], model["num_experts"]
    kv_width = (model["num_kv_heads"] or model["num_heads"]) * (width // model["num_heads"])
    matrices = _matrices(model)
    moe_layers = layers // model["moe_every"] - min(model["num_dense_layers"], layers) // model["moe_every"]
    moe_layers *= experts > 0
    d_hidden = model["d_hidden"] or 4 * width
    active = (model["router"]["top_k"] + model["num_shared_experts"]) * matrices * (model["d_expert"] or d_hidden)
    dense = (layers - moe_layers) * matrices * d_hidden
    return int(width * (layers * (2 * width + 2 * kv_width) + moe_layers * (experts + active) + dense))


def _matrices(model: Mapping[str, Any]) -> int:
    return 3 if model["activation"].startswith("swiglu") else 2  # GATED of the kernels, which would import torch


def _d_model(config: Any) -> int:
    return _CHANNELS * int(config.model.num_layers)


def _num_heads(config: Any) -> int:
    """The number of heads whose size comes nearest to 64; even sizes only, for rotary positions."""
    width = config.model.d_model
    possible = [heads for heads in range(1, width + 1) if width % heads == 0 and width // heads % 2 == 0]
    return min(possible, key=lambda heads: abs(width // heads - _CHANNELS), default=1)


def _context_length(config: Any) -> int:
    return max(_LEAST_CONTEXT, min(_MOST_CONTEXT, int(config.model.d_model)))


def _top_k(config: Any) -> int:
    return next(top_k for below, top_k in _TOP_K if config.model.num_layers < below)


def _d_hidden(config: Any) -> int:
    return _rounded(8 * config.model.d_model / _matrices(config.model))


def _d_expert(config: Any) -> int:
    return _rounded(8 * config.model.d_model / _matrices(config.model) / config.model.router.top_k)


def _rounded(width: float) -> int:
    return max(1, round(width / _EXPERT_MULTIPLE)) * _EXPERT_MULTIPLE


def _operations(config: Any) -> float:
    active = active_parameters(config.model)
    return 6.0 * active * _TOKENS_PER_PARAMETER * active


def _global_batch_size(config: Any) -> int:
    samples = 0.292 * _operations(config) ** 0.3271 / config.model.context_length
    return 1 << max(0, round(math.log2(samples)))


def _lr(config: Any) -> float:
    if config.optimizer.name == "adafactor":
        return _ADAFACTOR_RATE
    return float(f"{0.3118 * _operations(config) ** -0.125:.2g}")


def _max_steps(config: Any) -> int:
    tokens = _TOKENS_PER_PARAMETER * active_parameters(config.model)
    return math.ceil(tokens / int(config.data.global_batch_size * config.model.context_length))


RULES: dict[str, tuple[Callable[..., Any], str]] = {
    "model.num_layers": (lambda config: config.depth, "depth"),
    "model.d_model": (_d_model, "64 for each layer"),
    "model.num_heads": (_num_heads, "heads of 64 channels"),
    "model.context_length": (_context_length, "the width, 128 to 2048"),
    "model.router.top_k": (_top_k, "2 below 8 layers, 4 below 16, then 8"),
    "model.num_experts": (lambda config: _INACTIVE * config.model.router.top_k, "1 of 8 is active"),
    "model.d_expert": (_d_expert, "the active ones together as wide as a dense layer"),
    "model.d_hidden": (_d_hidden, "8/3 of the width with swiglu, else 4 times; of dense layers"),
    "data.global_batch_size": (_global_batch_size, "0.292 C^0.3271 tokens, a power of two of samples"),
    "trainer.max_steps": (_max_steps, "20 tokens for each active parameter"),
    "optimizer.lr": (_lr, "0.3118 C^-0.125"),
    "optimizer.warmup_steps": (
        lambda config: min(_MOST_WARMUP, _max_steps(config) // 20),  # the same where a run is trained on
        "5 % of the steps by their rule, at most 2000",
    ),
}
"""Rule of each key: its function, and a phrase that says it. C are the operations of the training."""


def _apply(key: str, *, _root_: DictConfig) -> Any:
    """The resolver `${dial:KEY}`."""
    require(_root_.depth, Depth, "depth")
    target = OmegaConf.select(_root_, f"model.{TARGET}", throw_on_resolution_failure=False)
    if target != _GPT:
        raise ConfigurationError(
            f"depth={shown(_root_.depth)} sets the sizes of a GPT, not those of a {str(target).rpartition('.')[2]}: "
            "leave depth out, or choose another model, such as model=quickstart"
        )
    _check_inputs(_root_)
    return RULES[key][0](_root_)


_INPUTS: dict[str, Any] = {
    "model": dict.fromkeys(("num_layers", "d_model", "num_heads", "context_length", "moe_every"), PositiveInt)
    | dict.fromkeys(("num_experts", "num_dense_layers", "num_shared_experts"), NonNegativeInt)
    | dict.fromkeys(("num_kv_heads", "d_expert", "d_hidden"), PositiveInt | None),
    "model.router": {"top_k": PositiveInt},
    "data": {"global_batch_size": PositiveInt},
    "trainer": {"max_steps": int},
    "optimizer": {"name": str},
}
"""Annotations of the values that rules read, by group."""


def _check_inputs(config: DictConfig) -> None:
    """Name a wrong value that the command sets, before a rule computes with it."""
    for group, hints in _INPUTS.items():
        node = OmegaConf.select(config, group)
        if not isinstance(node, DictConfig):
            raise ConfigurationError(f"{group}={shown(node)} must be a mapping: set {group}.NAME=value")
        for name, hint in hints.items():
            if not OmegaConf.is_interpolation(node, name):
                require(node.get(name), hint, f"{group}.{name}")


OmegaConf.register_new_resolver("dial", _apply, replace=True)

_CHOICE = "dial=depth"


def with_dial(overrides: list[str]) -> list[str]:
    """Overrides of a command line; `depth=N` also chooses the rules."""
    has_depth = any(word.startswith("depth=") and word != "depth=null" for word in overrides)
    chosen = any(word.startswith("dial=") for word in overrides)
    return [_CHOICE, *overrides] if has_depth and not chosen else overrides


def keys_of_dial(composed: DictConfig) -> list[str]:
    """Keys that have their values from the dial, in the order of the rules.

    Args:
        composed: before interpolations are resolved.
    """
    raw = OmegaConf.to_container(composed, resolve=False)
    texts = (text for _, text in walk(raw) if isinstance(text, str))
    found = {text.removeprefix("${dial:").removesuffix("}") for text in texts if text.startswith("${dial:")}
    return [key for key in RULES if key in found]


def check_dial(composed: DictConfig) -> None:
    """Refuse a depth that sets nothing, as that of a recipe that does not choose the rules.

    Raises:
        ConfigurationError: how to choose them.
    """
    depth = composed.get("depth")
    if depth is not None and not keys_of_dial(composed):
        raise ConfigurationError(
            f"depth={shown(depth)} sets nothing in a recipe without its rules: begin the recipe's defaults with "
            "'/dial@_global_: depth' and _self_, or give depth on the command line"
        )


def dial_rows(composed: DictConfig) -> list[tuple[str, Any, str]]:
    """(key, value, rule) of every key that a rule could set; of the others the rule is "set by you"."""
    ours = keys_of_dial(composed)
    return [
        (key, OmegaConf.select(composed, key), rule if key in ours else "set by you")
        for key, (_, rule) in RULES.items()
    ]


def dial_line(composed: DictConfig) -> str:
    """One line on what the dial has set; "" without it."""
    if not keys_of_dial(composed):
        return ""
    model, batch, steps = composed.model, composed.data.global_batch_size, composed.trainer.max_steps
    tokens = batch * steps * model.context_length
    return (
        f"depth  {composed.depth}: {active_parameters(model):.3g} active parameters, {model.num_layers} layers of "
        f"{model.d_model}, {model.num_experts} experts of {model.d_expert}, {model.router.top_k} of a token; {steps} "
        f"steps of {batch} samples, {tokens:.3g} tokens, lr {composed.optimizer.lr:g} (--info dial: why)"
    )
