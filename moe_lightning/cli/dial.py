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

from moe_lightning.cli.composition import check_arguments, walk
from moe_lightning.config import TARGET, PositiveInt, require, shown
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


RULES: dict[str, Callable[[Any], Any]] = {
    "model.num_layers": lambda config: config.depth,
    "model.d_model": _d_model,
    "model.num_heads": _num_heads,
    "model.context_length": _context_length,
    "model.router.top_k": _top_k,
    "model.num_experts": lambda config: _INACTIVE * config.model.router.top_k,
    "model.d_expert": _d_expert,
    "model.d_hidden": _d_hidden,
    "data.global_batch_size": _global_batch_size,
    "trainer.max_steps": _max_steps,
    "optimizer.lr": _lr,
    "optimizer.warmup_steps": lambda config: min(_MOST_WARMUP, _max_steps(config) // 20),  # also where it is trained on
}
"""Rule of each key."""

OmegaConf.register_new_resolver("dial", lambda key, *, _root_: RULES[key](_root_), replace=True)

_CHOICE = "dial=depth"


def with_dial(overrides: list[str]) -> list[str]:
    """Overrides of a command line; `depth=N` also chooses the rules."""
    has_depth = any(word.startswith("depth=") and word != "depth=null" for word in overrides)
    chosen = any(word.startswith("dial=") for word in overrides)
    return [_CHOICE, *overrides] if has_depth and not chosen else overrides


def has_rules(composed: DictConfig) -> bool:
    """True if a key has its value from the dial.

    Args:
        composed: before interpolations are resolved.
    """
    raw = OmegaConf.to_container(composed, resolve=False)
    return any(_is_rule(value) for _, value in walk(raw))


def _is_rule(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${dial:")


def check_dial(composed: DictConfig) -> None:
    """Refuse a depth that sets nothing, as that of a recipe that does not choose the rules, and values from which no
    rule can compute others.

    Args:
        composed: before interpolations are resolved.

    Raises:
        ConfigurationError: how to choose the rules, or the value.
    """
    depth = composed.get("depth")
    if not has_rules(composed):
        if depth is not None:
            raise ConfigurationError(
                f"depth={shown(depth)} sets nothing in a recipe without its rules: begin the recipe's defaults with "
                "'/dial@_global_: depth' and _self_, or give depth on the command line"
            )
        return
    require(depth, Depth, "depth")
    model: Any = OmegaConf.to_container(composed.model, resolve=False)
    data: Any = OmegaConf.to_container(composed.data, resolve=False)
    if model.get(TARGET) != _GPT:
        kind = str(model.get(TARGET)).rpartition(".")[2]
        raise ConfigurationError(
            f"depth={shown(depth)} sets the sizes of a GPT, not those of a {kind}: "
            "leave depth out, or choose another model, such as model=quickstart"
        )
    check_arguments(_without_interpolations(model), "model")
    if not _is_rule(batch := data.get("global_batch_size")):
        require(batch, PositiveInt, "data.global_batch_size")


def _without_interpolations(node: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in node.items() if not (isinstance(value, str) and "${" in value)}
    return {n: _without_interpolations(value) if isinstance(value, Mapping) else value for n, value in given.items()}


def dial_line(composed: DictConfig) -> str:
    """One line on what the dial has set; "" without it."""
    if not has_rules(composed):
        return ""
    model = composed.model
    return (
        f"depth  {composed.depth}: {active_parameters(model):.3g} active parameters, {model.num_layers} layers of "
        f"{model.d_model}, {model.num_experts} experts of {model.d_expert}, {model.router.top_k} of a token; "
        f"{composed.trainer.max_steps} steps of {composed.data.global_batch_size} samples, lr {composed.optimizer.lr}"
    )
