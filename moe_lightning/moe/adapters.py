"""Low-rank adapters (LoRA, arXiv 2106.09685) on experts, attention, dense layers and routers; all else is frozen.

A weight W of [inputs, outputs] becomes W + alpha / rank * A B, where A is [inputs, rank] and B, which starts at zero,
[rank, outputs]. Experts have stacks of A and B, a row a slot, which are multiplied as grouped products.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from moe_lightning.config import PositiveInt, build_config, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.router import Router
from moe_lightning.state.tensors import BASE_DIGEST, digest_of

Target = Literal["experts", "attention", "dense", "router"]

_ATTENTION = frozenset({"self_attn", "attn", "attention", "linear_attn"})
_NOT_ADAPTED = frozenset({"head", "lm_head", "classifier", "score", "dt_proj"})
"""Linear layers without adapters: heads, and layers whose weights Mamba reads without calling them."""


@validated
@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Weights that get adapters, and the format of the frozen ones.

    Attributes:
        kind: "lora", or "qlora": the matrices of experts are kept in four bits (NF4).
        rank: r of A and B.
        alpha: the product of A and B is multiplied by alpha / rank.
        targets: of "experts", "attention" (its linear layers), "dense" (other linear layers but the head) and "router".

    Raises:
        ConfigurationError: no target, or four bits without experts among the targets.
    """

    kind: Literal["lora", "qlora"] = "lora"
    rank: PositiveInt = 16
    alpha: Annotated[float, Interval(gt=0, le=1e6)] = 32.0
    targets: Sequence[Target] = ("experts",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(dict.fromkeys(self.targets)))
        if not self.targets:
            raise ConfigurationError("targets=[] leaves nothing to train: name experts, attention, dense or router")
        if self.kind == "qlora" and "experts" not in self.targets:
            raise ConfigurationError(
                f"targets={list(self.targets)} lacks experts, whose weights kind='qlora' quantises: add experts, or "
                "use kind='lora'"
            )

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / self.rank


class LowRank(nn.Module):
    """[..., D] -> [..., F]: what an adapter adds to a layer's output.

    Args:
        weight: [F, D], of the layer.
        config: rank and scale.
    """

    def __init__(self, weight: Tensor, config: AdapterConfig) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.scale = config.scale
        drawn = nn.init.kaiming_uniform_(torch.empty(config.rank, inputs), a=math.sqrt(5))
        self.lora_a = nn.Parameter(drawn.to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(outputs, config.rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype)) * self.scale


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; its own parameters keep their names and are frozen.

    Args:
        linear: in whose place it comes.
        config: of the adapter.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.adapter = LowRank(linear.weight, config)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.adapter(input)  # type: ignore[no-any-return]


def add_adapters(model: nn.Module, config: AdapterConfig | dict[str, Any]) -> None:
    """Put adapters into a model whose weights are those to start from, and freeze all other parameters.

    To be called once, before the optimizer is made, on every rank alike. Experts may still be deferred.

    Args:
        model: with MoE layers, where experts are among the targets.
        config: an AdapterConfig or its keyword arguments.

    Raises:
        ConfigurationError: the model has adapters already, or lacks one of the targets.
    """
    config = build_config(AdapterConfig, config)
    adapt_experts(model, config)
    adapt_dense(model, config)


def adapt_experts(model: nn.Module, config: AdapterConfig) -> None:
    """The part of `add_adapters` that is for experts: to be called before weights are read, so that they never exist
    in full precision.

    Raises:
        ConfigurationError: see `add_adapters`.
    """
    experts = list(_of_class(model, Experts))
    if has_adapters(model) or any(module.base_names for module in experts):
        raise ConfigurationError("the model has adapters already: merge them, or go on training them")
    if "experts" in config.targets:
        _require(experts, "experts")
    for module in experts:
        rank = config.rank if "experts" in config.targets else 0
        module.freeze(rank=rank, scale=config.scale, in_4_bits=config.kind == "qlora")


def adapt_dense(model: nn.Module, config: AdapterConfig) -> None:
    """The other part of `add_adapters`: to be called when the weights are there.

    Raises:
        ConfigurationError: see `add_adapters`.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2].startswith("lora_"))
    for target in ("attention", "dense"):
        if target in config.targets:
            linears = list(_linears(model, target))
            _require(linears, target)
            for name, linear in linears:
                model.set_submodule(name, AdaptedLinear(linear, config))
    if "router" in config.targets:
        routers = list(_of_class(model, Router))
        _require(routers, "router")
        for router in routers:
            router.adapter = LowRank(router.weight, config)
    frozen = [p for p in dense_base(model) if not p.is_meta]
    model.register_buffer(BASE_DIGEST, torch.tensor([digest_of(frozen)]))


def dense_base(model: nn.Module) -> list[nn.Parameter]:
    """The frozen parameters outside of experts."""
    of_experts = {p for experts in _of_class(model, Experts) for p in experts.parameters()}
    return [p for p in model.parameters() if not p.requires_grad and p not in of_experts]


def is_adapter(name: str) -> bool:
    """Return True if a parameter or buffer of this name belongs to adapters, not to the base model."""
    last = name.rpartition(".")[2]
    return last.startswith("lora_") or last == BASE_DIGEST


def has_adapters(model: nn.Module) -> bool:
    """Return True if a model has adapters."""
    return any(name.rpartition(".")[2] == BASE_DIGEST for name, _ in model.named_buffers())


def _linears(model: nn.Module, target: str) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        parts = name.split(".")
        is_attention = bool(_ATTENTION.intersection(parts))
        if isinstance(module, nn.Linear) and parts[-1] not in _NOT_ADAPTED and is_attention == (target == "attention"):
            yield name, module


def _of_class(model: nn.Module, kind: type[Any]) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, kind))


def _require(found: Collection[Any], target: str) -> None:
    if not found:
        raise ConfigurationError(
            f"targets names {target}, and the model has no layers of this kind that adapters know: drop {target}"
        )
