"""Upcycling: feed-forward layers of a trained dense model become MoE layers (Komatsuzaki et al. 2023).

Every expert starts as a copy of the dense layer and the weights of the chosen experts sum to one, so at step 0 the
model computes the function of the dense one, up to rounding: in fp32 logits agree to 1e-5. Routers start at random and
experts diverge with their tokens. Unlike the paper, combine weights are normalized for text as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from moe_lightning.config import NonNegativeInt, PositiveInt, build_config, effects, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.interface import GATED
from moe_lightning.models.huggingface.architecture import (
    Architecture,
    DroppingLayerNorm,
    SparseBlock,
)
from moe_lightning.models.huggingface.families import FAMILIES, OUR_ROUTER, Family
from moe_lightning.models.huggingface.loading import config_from
from moe_lightning.models.huggingface.weights import DenseFeedForward
from moe_lightning.moe.experts import Activation
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.moe.router import RouterConfig


@validated
@dataclass(frozen=True, kw_only=True)
class SparseLayers:
    """Selection of a dense architecture's feed-forward layers that become MoE layers, and the shape of these.

    Attributes:
        num_experts: of each MoE layer.
        moe_every: layers moe_every - 1, 2 * moe_every - 1, ... become MoE layers: 1 is every layer.
        num_dense_layers: so many layers stay dense at the front, whatever `moe_every` says.
        router: how tokens choose.

    Raises:
        ConfigurationError: sizes out of range, or a router that cannot serve so many experts.
    """

    num_experts: PositiveInt = 8
    moe_every: PositiveInt = 1
    num_dense_layers: NonNegativeInt = 0
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "router", build_config(RouterConfig, self.router))
        self.router.check(self.num_experts)

    def is_moe_layer(self, index: int) -> bool:
        """True if feed-forward layer `index` (0-based, in the model's order) becomes an MoE layer."""
        return index >= self.num_dense_layers and (index + 1) % self.moe_every == 0


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "swiglu",
}
"""Ours by the names of transformers; silu is the one of gated layers."""


@validated
@dataclass(frozen=True, kw_only=True)
class UpcyclingConfig(SparseLayers):
    """Conversion of the feed-forward layers of a trained dense model.

    Attributes:
        num_experts: copies of the layer in each MoE layer.
        moe_every, num_dense_layers: see SparseLayers.
        router: how tokens choose; the weights of a token's experts must sum to one, or the function would change.

    Raises:
        ConfigurationError: sizes out of range, or a router whose weights do not sum to one or do not train it.
    """

    router: RouterConfig = field(default_factory=lambda: RouterConfig(softmax_after_top_k=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        router = self.router
        if router.top_k == 1:
            raise ConfigurationError(
                "router.top_k=1 cannot keep the function of the pretrained dense model and train the router: "
                "use at least 2"
            )
        if not (router.softmax_after_top_k or router.normalize_top_k) or router.scale != 1.0:
            raise ConfigurationError(
                f"normalize_top_k={str(router.normalize_top_k).lower()} and scale={router.scale} would change the "
                "function of the dense model: its experts' weights must sum to one"
            )
        if router.capacity_factor is not None:
            raise ConfigurationError(
                f"capacity_factor={router.capacity_factor} would drop tokens of the dense model: use null"
            )


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A feed-forward layer of a dense model.

    Attributes:
        block: name of the module that the MoE layer takes the place of.
        prefix: where its matrices lie on disk, with a dot at its end.
        d_model, d_hidden: its widths.
        replace: puts a module into its place.
    """

    block: str
    prefix: str
    d_model: int
    d_hidden: int
    replace: Callable[[MoELayer], None]


@dataclass(frozen=True, kw_only=True)
class DenseFamily:
    """A dense architecture.

    Attributes:
        reader: of its feed-forward layers.
        layers: finds these in a model.
        activation: key of the configuration that names the activation.
        auto_class: the transformers class that makes the model of the configuration.
        exported: the MoE configuration of the same function and its family; None: transformers has no such class.
        keyed: puts randomness that follows samples in the place of torch's, so that the loss depends on no number of
            ranks; None: the model's own stays.
    """

    reader: DenseFeedForward
    layers: Callable[[nn.Module], Iterator[DenseLayer]]
    activation: str = "hidden_act"
    auto_class: str = "AutoModelForCausalLM"
    exported: Callable[[Any, SparseLayers], tuple[Any, Family]] | None = None
    keyed: Callable[[nn.Module], None] | None = None


class UpcycledArchitecture(Architecture):
    """A dense model whose feed-forward layers become MoE layers.

    Args:
        config: a transformers configuration of one of the `DENSE_FAMILIES`.
        sparse: what becomes of its layers; an UpcyclingConfig where the weights come from a checkpoint.
        new_modules: names of modules, with a dot at their ends, that start at random although the checkpoint has
            weights for them, such as the head for other classes.

    Raises:
        ConfigurationError: an activation that no expert has.
    """

    def __init__(self, config: Any, sparse: SparseLayers, new_modules: tuple[str, ...] = ()) -> None:
        super().__init__(config)
        self._family = DENSE_FAMILIES[config.model_type]
        self._sparse = sparse
        self._new_modules = new_modules
        self._prefixes: dict[str, str] = {}
        self.auto_class = self._family.auto_class
        self.reader: DenseFeedForward = self._family.reader
        if getattr(config, "mlp_bias", False):
            raise ConfigurationError(f"mlp_bias=true of this {config.model_type} is not known: only false is")
        name = str(getattr(config, self._family.activation))
        if name not in _ACTIVATIONS or (_ACTIVATIONS[name] in GATED) != (len(self.reader.up) == 2):
            raise ConfigurationError(
                f"the activation {name!r} of this {config.model_type} is not one that experts have"
            )
        self._activation = _ACTIVATIONS[name]

    def install(self, model: nn.Module) -> None:
        sparse = self._sparse
        if self._family.keyed is not None:
            self._family.keyed(model)
        found = list(self._family.layers(model))
        chosen = [layer for index, layer in enumerate(found) if sparse.is_moe_layer(index)]
        if not chosen:
            raise ConfigurationError(
                f"moe_every={sparse.moe_every} and num_dense_layers={sparse.num_dense_layers} leave no MoE layer among "
                f"{len(found)}: lower them"
            )
        for layer in chosen:
            moe = MoELayer(
                layer.d_model,
                layer.d_hidden,
                sparse.num_experts,
                sparse.router,
                activation=self._activation,
                bias=self.reader.has_biases,
            )
            layer.replace(moe)
            self.layers[layer.block] = moe
            self._prefixes[layer.block] = layer.prefix

    def source_name(self, name: str) -> str | None:
        return None if f".{OUR_ROUTER}." in name or name.startswith(self._new_modules) else name

    def source_prefix(self, block: str) -> str:
        return self._prefixes[block]

    def exported(self) -> tuple[Any, Family]:
        if self._family.exported is None:
            raise ConfigurationError(
                f"transformers has no {self.config.model_type} with experts, so this model cannot be exported: "
                "keep its Lightning checkpoint"
            )
        return self._family.exported(self.config, self._sparse)


def _blocks(model: nn.Module, *parts: str) -> Iterator[tuple[str, Any]]:
    """Modules that have all these parts, by name."""
    for name, module in list(model.named_modules()):
        if all(hasattr(module, part) for part in parts):
            yield name, module


def _gpt2_layers(model: nn.Module) -> Iterator[DenseLayer]:
    for name, block in _blocks(model, "c_fc", "c_proj"):
        width, hidden = block.c_fc.weight.shape
        yield _whole_block(model, name, width, hidden, after=block.dropout)


def _llama_layers(model: nn.Module) -> Iterator[DenseLayer]:
    for name, block in _blocks(model, "gate_proj", "up_proj", "down_proj"):
        hidden, width = block.up_proj.weight.shape
        yield _whole_block(model, name, width, hidden)


def _whole_block(model: nn.Module, name: str, width: int, hidden: int, after: nn.Module | None = None) -> DenseLayer:
    def replace(moe: MoELayer) -> None:
        model.set_submodule(name, SparseBlock(moe, after=after))

    return DenseLayer(block=name, prefix=f"{name}.", d_model=width, d_hidden=hidden, replace=replace)


def _swin_layers(model: nn.Module) -> Iterator[DenseLayer]:
    for name, block in _blocks(model, "intermediate", "output", "attention", "layernorm_after"):
        hidden, width = block.intermediate.dense.weight.shape

        def replace(moe: MoELayer, block: Any = block) -> None:
            block.intermediate, block.output = SparseBlock(moe), block.output.dropout

        yield DenseLayer(
            block=f"{name}.intermediate", prefix=f"{name}.", d_model=width, d_hidden=hidden, replace=replace
        )


def _swin_keyed(model: nn.Module) -> None:
    """Dropout and stochastic depth that follow the sample; the norm that ends a branch drops it."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout and module.p > 0:
            model.set_submodule(name, StreamDropout(module.p))
    for _, block in _blocks(model, "drop_path", "layernorm_before", "layernorm_after"):
        probability = getattr(block.drop_path, "drop_prob", 0.0)
        block.drop_path = nn.Identity()
        block.layernorm_before = DroppingLayerNorm(block.layernorm_before, probability)
        block.layernorm_after = DroppingLayerNorm(block.layernorm_after, probability)


def _as_mixtral(config: Any, sparse: SparseLayers) -> tuple[Any, Family]:
    """Mixtral is LLaMA or Mistral with experts in every layer and a softmax over the chosen logits."""
    if sparse.moe_every != 1 or sparse.num_dense_layers or getattr(config, "attention_bias", False):
        raise ConfigurationError(
            f"a {config.model_type} is a Mixtral only with experts in every layer (moe_every=1, num_dense_layers=0) "
            "and no attention biases: keep the Lightning checkpoint of this one"
        )
    experts = {"num_local_experts": sparse.num_experts, "num_experts_per_tok": sparse.router.top_k}
    others = {"sliding_window": getattr(config, "sliding_window", None)}
    return _moe_config("mixtral", config, sparse, experts | others)


def _as_qwen3_moe(config: Any, sparse: SparseLayers) -> tuple[Any, Family]:
    """Qwen3-MoE is Qwen3 with experts in some layers."""
    if config.use_sliding_window:
        raise ConfigurationError(
            "use_sliding_window=true means other layers in Qwen3-MoE than in Qwen3: keep the Lightning checkpoint"
        )
    layers = range(config.num_hidden_layers)
    others = {
        "num_experts": sparse.num_experts,
        "num_experts_per_tok": sparse.router.top_k,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
        "head_dim": config.head_dim,  # which is no field of Qwen3MoeConfig, but is read
        "mlp_only_layers": [layer for layer in layers if not sparse.is_moe_layer(layer)],
        "attention_bias": config.attention_bias,
    }
    return _moe_config("qwen3_moe", config, sparse, others)


def _moe_config(model_type: str, config: Any, sparse: SparseLayers, others: Mapping[str, Any]) -> tuple[Any, Family]:
    """The configuration of the same model with experts, where its router is the one that this family has."""
    router, plain = sparse.router, RouterConfig()
    others_than_plain = [
        f"router.{name}={getattr(router, name)}"
        for name, effect in effects(type(router)).items()
        if (effect.changes_function or name == "bias_update_rate")  # the rate's bias is in the weights
        and name not in ("top_k", "normalize_top_k", "softmax_after_top_k")  # which this function writes
        and getattr(router, name) != getattr(plain, name, None)
    ]
    if others_than_plain:
        raise ConfigurationError(
            f"{model_type} has a plain softmax router and cannot hold {', '.join(others_than_plain)}: keep the "
            "Lightning checkpoint of this model"
        )
    known = config_from({"model_type": model_type}).to_dict().keys() - {"architectures", "transformers_version"}
    shared = {name: value for name, value in config.to_dict().items() if name in known}
    return config_from({**shared, "model_type": model_type, **others}), FAMILIES[model_type]


def _llama_like(exported: Callable[[Any, SparseLayers], tuple[Any, Family]]) -> DenseFamily:
    reader = DenseFeedForward(up=("gate_proj", "up_proj"), down="down_proj")
    return DenseFamily(reader=reader, layers=_llama_layers, exported=exported)


DENSE_FAMILIES: dict[str, DenseFamily] = {
    "gpt2": DenseFamily(
        reader=DenseFeedForward(up=("c_fc",), down="c_proj", has_biases=True, is_transposed=False),
        layers=_gpt2_layers,
        activation="activation_function",
    ),
    "llama": _llama_like(_as_mixtral),
    "mistral": _llama_like(_as_mixtral),
    "qwen3": _llama_like(_as_qwen3_moe),
    "swinv2": DenseFamily(
        reader=DenseFeedForward(up=("intermediate.dense",), down="output.dense", has_biases=True),
        layers=_swin_layers,
        auto_class="AutoModelForImageClassification",
        keyed=_swin_keyed,
    ),
}
"""By the `model_type` of config.json."""
