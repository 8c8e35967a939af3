"""Hugging Face model with our MoE layers as a LightningModule: load, train, validate, predict, tensor parallelism."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from moe_lightning.config import PositiveInt, build_config, option, options_of, validated
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import read_text
from moe_lightning.hub import (
    TOKENIZER,
    TOKENIZER_SETTINGS,
    TOKENIZERS,
    local_folder,
    local_tokenizer,
    model_folder,
    origin,
    other_word,
    tokenizer_identity,
    weights_folder,
)
from moe_lightning.models.gpt_module import OptimizerConfig, SupervisedModule
from moe_lightning.models.huggingface.architecture import IS_TOKEN, Architecture, SparseArchitecture, SparseBlock
from moe_lightning.models.huggingface.attention import check_packing, document_options, share_sequences
from moe_lightning.models.huggingface.families import FAMILIES, UNSUPPORTED
from moe_lightning.models.huggingface.loading import config_from, load_model, read_config, recompute_activations
from moe_lightning.models.huggingface.weights import WeightsFolder
from moe_lightning.models.upcycling import DENSE_FAMILIES, UpcycledArchitecture, UpcyclingConfig
from moe_lightning.moe.adapters import AdapterConfig
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.sequence import ContextParallel
from moe_lightning.parallel.tensor import (
    Columns,
    Embedding,
    Gathered,
    Head,
    NormOfParts,
    Parted,
    PartedAttribute,
    Plan,
    Rows,
    Style,
)

_KNOWN = ("deepseek_v3", "gpt_oss", "llama", "mistral", "mixtral", "olmoe", "qwen3", "qwen3_moe")


def plan_of(model: Any) -> Plan:
    """The plan of a model of transformers.

    Raises:
        ConfigurationError: one whose layers nobody here knows.
    """
    config = model.config
    if config.model_type not in _KNOWN:
        raise ConfigurationError(
            f"mesh.tp does not know the layers of a {config.model_type}, only those of {', '.join(_KNOWN)}: use "
            "dense=fsdp to share memory"
        )
    base = f"{model.base_model_prefix}."
    plan: dict[str, Style] = {f"{base}embed_tokens": Embedding(), "lm_head": Head(), f"{base}layers.0": Parted()}
    for index, layer in enumerate(getattr(model, model.base_model_prefix).layers):
        name = f"{base}layers.{index}."
        plan |= {f"{name}self_attn{part}": style for part, style in _attention(layer.self_attn).items()}
        plan |= {f"{name}mlp{part}": style for part, style in _feed_forward(layer.mlp).items()}
    return plan


def _attention(attention: Any) -> dict[str, Style]:
    sinks = ("sinks",) if hasattr(attention, "sinks") else ()
    plan: dict[str, Style] = {"": Gathered("hidden_states", sinks), ".o_proj": Rows()}
    if hasattr(attention, "kv_b_proj"):  # latent attention: what is not of a head is on every rank
        query = "q_proj" if attention.q_lora_rank is None else "q_b_proj"
        value = attention.qk_nope_head_dim + attention.v_head_dim
        return plan | {
            f".{query}": Columns(unit=attention.qk_head_dim, of="heads"),
            ".kv_b_proj": Columns(unit=value, of="heads"),
        }
    heads = Columns(unit=attention.head_dim, of="heads")
    plan |= {f".{name}_proj": heads for name in "qkv"}
    if attention.config.model_type == "olmoe":  # others norm each head by itself
        plan |= {
            f".{name}_norm": NormOfParts(attention.q_norm.variance_epsilon, attention.head_dim, "heads")
            for name in "qk"
        }
    return plan


def _feed_forward(block: nn.Module) -> dict[str, Style]:
    if isinstance(block, SparseBlock):
        return {"": PartedAttribute("is_token")}
    return {"": Gathered(), ".gate_proj": Columns(), ".up_proj": Columns(), ".down_proj": Rows()}


_UPCYCLED = {"gpt2": "recipes=upcycle_gpt2", "swinv2": "model=swinv2_upcycled data=images"}
_DENSE = {
    name: f"a dense {name} without experts: {_UPCYCLED.get(name, 'recipes=upcycle_llama')} makes experts of its "
    "feed-forward layers (model.upcycling)"
    for name in DENSE_FAMILIES
}


@validated
@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """Checkpoint to train, and options of its training.

    Attributes:
        pretrained: folder of the checkpoint (config.json and safetensors files), or its name on the Hugging Face Hub,
            ORG/NAME or ORG/NAME@REVISION, which is downloaded into the cache of the Hub where it is missing there.
        context_length: most tokens in a sequence; the data are cut to it.
        router: options of `RouterConfig` for the routers of a pretrained MoE: those that do not change the trained
            function. None: as in the checkpoint, whose router_aux_loss_coef is brought to the scale of our loss; one
            without it, such as DeepSeek's, or with more than 0.1, such as GPT-OSS, is trained without a loss for
            balance, unless `overrides` set it.
        overrides: values to set in the checkpoint's configuration, such as dropout probabilities. nn.Dropout gives up
            the same loss on any number of ranks, so set them to 0 where that matters.
        gradient_checkpointing: recompute layers in the backward pass instead of keeping their activations.
        upcycling: turn the feed-forward layers of a dense checkpoint into experts; None: it has experts.
        adapter: train adapters beside the frozen weights, see `AdapterConfig`; None: train the weights.

    Raises:
        ConfigurationError: a length below one, router options beside upcycling, which has its own, or adapters beside
            it or beside updates of selection biases.
    """

    pretrained: str
    context_length: PositiveInt = 1024
    router: Mapping[str, Any] = options_of(RouterConfig)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = option(False, changes_function=False)
    upcycling: UpcyclingConfig | None = None
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            object.__setattr__(self, "adapter", build_config(AdapterConfig, self.adapter, key="model.adapter"))
            if self.router.get("bias_update_rate"):
                raise ConfigurationError(
                    f"router.bias_update_rate={self.router['bias_update_rate']} would change selection biases, which "
                    "adapters cannot hold: balance with router.aux_loss_coef, or drop adapter"
                )
        if self.upcycling is not None:
            if self.adapter is not None:
                raise ConfigurationError(
                    f"adapter={self.adapter.kind} cannot work with upcycling, whose new routers and experts must be "
                    "trained: drop one of both"
                )
            object.__setattr__(self, "upcycling", build_config(UpcyclingConfig, self.upcycling))
            if any(value is not None for value in self.router.values()):
                raise ConfigurationError("router belongs to pretrained experts: set upcycling.router instead")

    def weights(self) -> WeightsFolder:
        """Return the tensors of the checkpoint, which are downloaded if they are missing.

        Raises:
            ConfigurationError: no such folder or model, or one without safetensors.
            CheckpointError: a damaged folder.
        """
        return WeightsFolder(weights_folder(self.pretrained))

    def architecture(self, values: Mapping[str, Any] | None = None) -> Architecture:
        """Architecture for the checkpoint's configuration.

        Args:
            values: the configuration itself, where the checkpoint's folder is not to be read.

        Raises:
            ConfigurationError: a checkpoint that is not known, or options that it does not fit.
        """
        if values is not None:
            config = config_from(values)
        else:
            known, elsewhere = tuple(FAMILIES), _DENSE | UNSUPPORTED
            if self.upcycling is not None:
                known, elsewhere = tuple(DENSE_FAMILIES), {}
            config = read_config(model_folder(self.pretrained), known, self.overrides, elsewhere=elsewhere)
        longest = getattr(config, "max_position_embeddings", self.context_length)
        if self.context_length > longest:
            raise ConfigurationError(
                f"model.context_length={self.context_length} exceeds the {longest} positions of {self.pretrained}: "
                f"use model.context_length={longest} or less"
            )
        if self.upcycling is not None:
            return UpcycledArchitecture(config, self.upcycling)
        return SparseArchitecture(config, self.router, is_balance_chosen="router_aux_loss_coef" in self.overrides)


class HuggingFaceModule(SupervisedModule):
    """Trains a Hugging Face model on batches (inputs, targets): token ids [B, L] and next tokens [B, L], where -100 is
    not predicted, with is_token [B, L] behind them where sequences are padded, and behind that begins [B, L], where the
    document of each token begins, where several are packed; or images [B, C, H, W] and classes [B].

    Logs `train/loss`, `val/loss` and `test/loss`: the mean cross-entropy in nats over the targets of the global batch,
    auxiliary losses not included; `train/loss` with gradient accumulation over the last micro-batch of the step.

    Args:
        config: the checkpoint, as a HuggingFaceConfig or its keyword arguments.
        optimizer: the optimizer, as an OptimizerConfig or its keyword arguments.

    Attributes:
        architecture: the model's configuration and its MoE layers by block.

    Raises:
        ConfigurationError: a checkpoint that is not known, or options that it does not fit.
    """

    def __init__(
        self,
        config: HuggingFaceConfig | Mapping[str, Any],
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = build_config(HuggingFaceConfig, config)
        self.optimizer_config = build_config(OptimizerConfig, optimizer)
        self.architecture = self.config.architecture()
        self.attention_width = attention_width(self.architecture.config)
        # Plain values only: a checkpoint must load without unpickling classes.
        self.save_hyperparameters(
            {
                "config": asdict(self.config),
                "optimizer": asdict(self.optimizer_config),
                "huggingface": _plain(self.architecture.config),
                "origin": origin(self.config.pretrained),
            }
        )

    @override
    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        if (unused := self.architecture.unused_balance) is not None:
            rank_zero_warn(
                f"router_aux_loss_coef={unused:g} of {self.config.pretrained} exceeds 0.1 and would outweigh the "
                "loss, so the model is trained without a loss for balance: set model.router.aux_loss_coef, such as "
                "0.001, or 0 to leave this warning out"
            )
        self.model = load_model(self.architecture, self.config.weights(), self.config.adapter)
        self.hparams["huggingface"] = _plain(self.architecture.config)  # which the weights may have untied
        self.model.train()
        if self.config.gradient_checkpointing:
            recompute_activations(self.model)

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that do not fit the model.

        Raises:
            ConfigurationError: more tokens or longer samples than the model has, tokens of another tokenizer than the
                checkpoint's, or packed documents that the model would mix.
        """
        data = getattr(self.trainer, "datamodule", None)
        if getattr(data, "packing", False):
            check_packing(self.architecture.config, getattr(data, "context_length", self.config.context_length))
        longest = getattr(self.architecture.config, "max_position_embeddings", None)
        length = getattr(data, "context_length", None)
        if longest is not None and length is not None and length > longest:
            raise ConfigurationError(
                f"data.context_length={length} exceeds the {longest} positions of {self.config.pretrained}: use "
                f"data.context_length={longest} or less, or set model.overrides.max_position_embeddings={length}"
            )
        needed = getattr(data, "vocab_size", 0)
        known = getattr(self.architecture.config, "vocab_size", needed)
        own = local_folder(self.config.pretrained) / TOKENIZER
        given = getattr(data, "tokenizer", None)
        if needed > known:
            raise ConfigurationError(
                f"the data have {needed} tokens, the model has {known}: use the tokenizer.json of the checkpoint, "
                "without tokens that were added to it"
            )
        if not own.is_file():
            others = (own.with_name(name) for name in (*TOKENIZERS, TOKENIZER_SETTINGS))
            if given == "bytes" and (other := next((path for path in others if path.is_file()), None)) is not None:
                rank_zero_warn(
                    f"the data are bytes, and {other} belongs to the tokenizer that the model was trained with: to use "
                    "that one, write its tokenizer.json with save_pretrained of a fast tokenizer of transformers, and "
                    "give it as data.tokenizer"
                )
            return
        if isinstance(given, str) and (given == "bytes" or given.startswith("bpe:")):
            raise ConfigurationError(
                f"data.tokenizer={given} gives other tokens than the model was trained on: use data.tokenizer={own}, "
                "or remove that file to train on new ones"
            )
        made_with = getattr(data, "tokens_tokenizer", None)
        if made_with is not None and made_with != tokenizer_identity(read_text(own)):
            raise ConfigurationError(
                f"the tokens were made with another tokenizer than the model was trained with: run moe-data tokenize "
                f"with --tokenizer {own}"
            )
        file = local_tokenizer(given) if isinstance(given, str) else own
        is_read = file.suffix == ".json" and file.is_file() and file != own
        if is_read and (word := other_word(read_text(file), read_text(own))) is not None:
            raise ConfigurationError(
                f"data.tokenizer={given} does not give {word!r} the token that the tokenizer of the model gives it: "
                f"use data.tokenizer={own}, or remove that file to train on new tokens"
            )

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointError: its adapters were trained with another factor.
        """
        saved = ((checkpoint.get("hyper_parameters") or {}).get("config") or {}).get("adapter")
        own = self.config.adapter
        if saved is None or own is None or AdapterConfig(**saved).scale == own.scale:
            return
        raise CheckpointError(
            f"the adapters were trained with alpha={saved['alpha']:g} at rank={saved['rank']}, and alpha={own.alpha:g} "
            f"at rank={own.rank} multiplies them by another number: use the alpha and rank that they were trained with"
        )

    def tensor_parallel_plan(self) -> Plan:
        """Return the plan by which several ranks compute the model's layers together.

        Raises:
            ConfigurationError: a model whose layers nobody here knows.
        """
        return {f"model.{name}": style for name, style in plan_of(self.model).items()}

    @override
    def forward(self, inputs: Tensor, is_token: Tensor | None = None, begins: Tensor | None = None) -> Tensor:
        """Logits: [B, L, V] of tokens, [B, classes] of images."""
        options: dict[str, Any] = {}
        if self.model.main_input_name == "input_ids":
            # Padding at the end needs no mask in causal attention, which would leave its fast kernels.
            options = {"use_cache": False, IS_TOKEN: is_token}
            context = getattr(self.model, "context", None) or ContextParallel()
            first, length = context.first(inputs.shape[1]), inputs.shape[1]
            positions = torch.arange(first, first + length, device=inputs.device)[None]
            if context.is_sharded:
                share_sequences(self.model)
                options["position_ids"] = positions
            if begins is not None:
                options |= document_options(self.model, positions, begins)
        logits: Tensor = self.model(**{self.model.main_input_name: inputs}, **options).logits
        return logits


def _plain(config: Any) -> dict[str, Any]:
    """A transformers configuration with all its values, as plain ones."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def attention_width(config: Any) -> int | None:
    """Heads times head size over all layers of a language model; the mean of both sizes where values have another than
    queries (DeepSeek). None: of a model of images.
    """
    if not hasattr(config, "vocab_size"):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "v_head_dim"):
        size = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    return int(config.num_hidden_layers * config.num_attention_heads * size)
