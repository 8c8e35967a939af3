"""Loading of Hugging Face models: build with our MoE layers, fill from safetensors.

A rank reads the dense weights and the experts of its own slots; the whole model is never in one place.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from moe_lightning.compat import private_torch
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import read_text
from moe_lightning.models.huggingface.architecture import (
    IS_TOKEN,
    Architecture,
    SparseBlock,
    keep_padding_from_experts,
)
from moe_lightning.models.huggingface.attention import keep_context
from moe_lightning.models.huggingface.families import SELECTION_BIAS
from moe_lightning.models.huggingface.weights import WeightsFolder
from moe_lightning.moe.adapters import AdapterConfig, adapt_dense, adapt_experts
from moe_lightning.moe.experts import Experts, deferred_experts, experts_are_deferred
from moe_lightning.moe.randomness import SampleStream, attach_stream, remembering

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of tokens in config.json and generation_config.json."""

_DERIVED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")
"""Tensors of older checkpoints that models compute themselves today."""

_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Entries of rope_parameters that another scaling leaves as they are."""

QUANTISATIONS = ("mxfp4", "fp8")
"""What can be dequantised, by the quant_method of config.json."""

_LOADED = "_is_hf_initialized"
"""Marks a tensor that transformers must not initialise."""


def transformers() -> Any:
    """The optional package.

    Raises:
        ConfigurationError: it is missing.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(
            "Hugging Face models need the package transformers: pip install 'moe-lightning[hf]'"
        ) from error


def check_folder(path: Path) -> None:
    """Check that a path is the folder of a checkpoint with weights that can be read, before anything else is done.

    Raises:
        ConfigurationError: the path is something else; says what it is and what to do.
    """
    cure = (
        "give the folder of a Hugging Face checkpoint on this machine, with config.json and safetensors files, or "
        "ORG/NAME of a model on the Hub"
    )
    if str(path).partition(":/")[0] in ("http", "https", "s3", "gs", "hf"):  # a Path has one slash of it
        raise ConfigurationError(f"pretrained={path} is an address: {cure}")
    if not path.exists():
        raise ConfigurationError(f"pretrained={path} does not exist: {cure}")
    if not path.is_dir():
        if path.suffix == ".ckpt":
            raise ConfigurationError(f"pretrained={path} is a checkpoint of Lightning: give resume={path}")
        raise ConfigurationError(f"pretrained={path} is a file: {cure}")
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        raise ConfigurationError(f"pretrained={path} is an empty folder: {cure}")
    if "config.json" not in names:
        raise ConfigurationError(f"pretrained={path} has no config.json among its {len(names)} entries: {cure}")


def read_config(
    path: Path,
    known: tuple[str, ...],
    overrides: Mapping[str, Any] | None = None,
    *,
    elsewhere: Mapping[str, str] | None = None,
) -> Any:
    """The transformers configuration of a checkpoint folder; no code of the checkpoint is ever run.

    Args:
        path: the folder.
        known: the model types that are accepted.
        overrides: values to set in it, such as dropout probabilities.
        elsewhere: what to do about model types that are known, but not here.

    Raises:
        ConfigurationError: no config.json, one that transformers refuses, an unknown model or quantisation, or a
            key that the configuration lacks or does not follow.
    """
    check_folder(path)
    file = path / "config.json"
    try:
        values = json.loads(read_text(file))
        model_type = values.get("model_type")
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise ConfigurationError(f"{file} is not a model's configuration: {error}") from error
    if elsewhere is not None and model_type in elsewhere:
        raise ConfigurationError(f"pretrained={path} is {elsewhere[model_type]}")
    text = values.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in known:
        raise ConfigurationError(
            f"pretrained={path} is a {model_type} with images, of which only the text model can be trained: save that "
            f"with transformers, AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained('FOLDER', "
            "save_original_format=False), and give pretrained=FOLDER"
        )
    if model_type not in known:
        raise ConfigurationError(f"model_type={model_type!r} of {path} is not known: use one of {', '.join(known)}")
    values.pop("auto_map", None)  # names code of the checkpoint
    quantisation = values.pop("quantization_config", None)  # weights are dequantised as they are read
    if quantisation and quantisation.get("quant_method") not in QUANTISATIONS:
        raise ConfigurationError(
            f"{path} is quantised ({quantisation.get('quant_method')}), and only {' and '.join(QUANTISATIONS)} can be "
            "read: load it with transformers in bfloat16 and save it with save_pretrained"
        )
    config = config_from(values)
    return _overridden(path, config, values, overrides) if overrides else config


def _overridden(path: Path, config: Any, values: dict[str, Any], overrides: Mapping[str, Any]) -> Any:
    """The configuration with other values of some keys."""
    given = dict(overrides)
    for name in given:
        if not hasattr(config, name):
            cure = "set it in rope_parameters" if name in _BESIDE_SCALING else "see its config.json"
            raise ConfigurationError(f"the configuration of {path} has no {name!r}: {cure}")
    if given.keys() & {"rope_parameters", "rope_scaling"}:
        values = {name: value for name, value in values.items() if name != "rope_scaling"}  # transformers prefers it
        rope = given.pop("rope_scaling", None) or given.get("rope_parameters") or {"rope_type": "default"}
        is_other_scaling = not rope.keys().isdisjoint(("rope_type", "type"))
        kept = {
            name: value
            for name, value in (getattr(config, "rope_parameters", None) or {}).items()
            if name in _BESIDE_SCALING or not is_other_scaling
        }
        given["rope_parameters"] = kept | dict(rope)
    made = config_from(values | given)
    for name, value in given.items():
        result = getattr(made, name)
        if isinstance(value, int | float) and (result is None or isinstance(result, int | float)) and result != value:
            raise ConfigurationError(
                f"overrides.{name}={value} has no effect: the configuration of {path} makes {name}={result} of it, "
                "perhaps by another key, such as use_sliding_window; set that one"
            )
    return made


def config_from(values: Mapping[str, Any]) -> Any:
    """A transformers configuration from the content of a config.json.

    Raises:
        ConfigurationError: transformers refuses it.
    """
    try:
        return transformers().CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(dict(values)))
    except Exception as error:  # each configuration class has its own
        reason = str(error).strip().splitlines()
        raise ConfigurationError(
            f"transformers refuses this configuration: {reason[-1] if reason else error!r}"
        ) from error


def known_tokens(named: Any, added: Collection[int]) -> Any:
    """Return those special tokens of a configuration that a tokenizer in the place of the original's has too.

    Args:
        named: a token, a list of tokens or None.
        added: tokens of that tokenizer beside its vocabulary; any other is a piece of common text.
    """
    if isinstance(named, list):
        return [token for token in named if token in added] or None
    return named if named in added else None


def build_skeleton(architecture: Architecture, adapter: AdapterConfig | None = None) -> Any:
    """The model on the meta device with deferred MoE layers installed: names and shapes, no memory.

    Args:
        adapter: of the experts, which are then never held in full precision where it quantises them.
    """
    config = copy.deepcopy(architecture.config)  # transformers notes the dtype in it; exports need the original's
    config.output_router_logits = False  # auxiliary losses are ours
    auto_class = getattr(transformers(), architecture.auto_class)
    with torch.device("meta"), deferred_experts():
        model = auto_class.from_config(config, dtype=torch.get_default_dtype())
        architecture.install(model)
        if adapter is not None:
            adapt_experts(model, adapter)
    keep_padding_from_experts(model)
    keep_context(model)
    attach_stream(model, SampleStream())
    return model


def load_model(architecture: Architecture, weights: WeightsFolder, adapter: AdapterConfig | None = None) -> Any:
    """The model with its weights: dense ones here, experts when they are placed, or at once where nobody will.

    Where the folder's head differs from the embedding that its config.json ties it to, both are loaded, as transformers
    does, and `architecture.config` becomes that of an untied model.

    Args:
        adapter: trained instead of the weights.

    Raises:
        CheckpointError: the folder lacks tensors of the model, or has them in other shapes.
    """
    model = build_skeleton(architecture, adapter)
    weights.optional_prefix = f"{model.base_model_prefix}."
    weights.on_disk = architecture.on_disk
    if getattr(architecture.config, "tie_word_embeddings", False) and _untie(model, architecture, weights):
        model = build_skeleton(architecture, adapter)
    _materialise(model)
    for layer in architecture.layers.values():
        layer.router.reset_parameters()
    used = _load_dense(model, architecture, weights)
    for block, layer in architecture.layers.items():
        prefix = architecture.source_prefix(block)
        names = architecture.reader.names(prefix, layer.num_experts)
        used |= {part for name in names for part in weights.parts(name)}
        layer.experts.source = partial(architecture.reader.read, weights, prefix)
        if not experts_are_deferred():
            layer.experts.place(range(layer.num_experts), torch.device("cpu"))
    _report_unused(model, weights, used)
    model.initialize_weights()  # what no file holds, such as rotary tables
    if adapter is not None:
        adapt_dense(model, adapter)
    return model


def new_model(architecture: Architecture, adapter: AdapterConfig | None = None) -> Any:
    """The model with random weights: dense ones as transformers draws them, experts and routers as our layers do; for
    `adapter` see `load_model`.
    """
    model = build_skeleton(architecture, adapter)
    _materialise(model)
    for layer in architecture.layers.values():
        layer.router.reset_parameters()
        if not experts_are_deferred():
            layer.experts.place(range(layer.num_experts), torch.device("cpu"))
    model.initialize_weights()
    if adapter is not None:
        adapt_dense(model, adapter)
    return model


def recompute_activations(model: Any) -> None:
    """Keep only the inputs of layers for the backward pass, which computes the rest again."""
    # transformers 5 has renamed the method
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    readers = [m for m in model.modules() if isinstance(m, SparseBlock) or hasattr(m, "stream")]
    enable({"use_reentrant": False, "context_fn": partial(remembering, readers, IS_TOKEN, "choice_hooks")})


def _materialise(model: nn.Module) -> None:
    """Memory for everything but the experts; shared parameters stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            continue
        for name, parameter in private_torch.parameters_of(module).items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            private_torch.parameters_of(module)[name] = made[parameter]
        for name, buffer in private_torch.buffers_of(module).items():
            if buffer is not None and buffer.is_meta:
                private_torch.buffers_of(module)[name] = torch.empty_like(buffer, device="cpu")


def dense_tensors(model: nn.Module, architecture: Architecture) -> Iterator[tuple[Tensor, list[str]]]:
    """Every parameter and persistent buffer outside the experts, with all its names."""
    experts = tuple(f"{block}.moe.experts." for block in architecture.layers)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not name.startswith(experts):
            names.setdefault(tensor, []).append(name)
    yield from names.items()


def _untie(model: nn.Module, architecture: Architecture, weights: WeightsFolder) -> bool:
    """Untie a configuration whose tied tensors differ on disk; True if they do."""
    for _, names in dense_tensors(model, architecture):
        sources = [name for name in map(architecture.source_name, names) if name is not None and weights.parts(name)]
        if len(sources) < 2:
            continue
        first = weights.read(sources[0])
        for other in sources[1:]:
            value = weights.read(other).to(first.dtype)
            if value.shape == first.shape and not torch.equal(first, value):
                rank_zero_warn(
                    f"{other!r} of {weights.path} differs from {sources[0]!r}, to which its config.json ties it: the "
                    "model is trained and exported with both; set +model.overrides.tie_word_embeddings=false to leave "
                    "this warning out"
                )
                architecture.config.tie_word_embeddings = False
                return True
    return False


@torch.no_grad()
def _load_dense(model: nn.Module, architecture: Architecture, weights: WeightsFolder) -> set[str]:
    """Fill everything but the experts; the names of the tensors on disk that were used."""
    used: set[str] = set()
    for tensor, names in dense_tensors(model, architecture):
        wanted = [name for name in map(architecture.source_name, names) if name is not None]
        if not wanted:
            continue
        found = [name for name in wanted if weights.parts(name)]
        used |= {part for name in found for part in weights.parts(name)}
        values = weights.read((found or wanted)[0])
        if names[0].endswith(SELECTION_BIAS):
            values = values.flatten()
        if values.shape != tensor.shape:
            raise CheckpointError(
                f"{found[0]!r} of {weights.path} has shape {list(values.shape)}, the model's {list(tensor.shape)}: "
                "its config.json belongs to other weights"
            )
        tensor.copy_(values)
        setattr(tensor, _LOADED, True)
    return used


def _report_unused(model: Any, weights: WeightsFolder, used: set[str]) -> None:
    ignored = re.compile("|".join((*_DERIVED, *(model._keys_to_ignore_on_load_unexpected or ()))))
    unused = sorted(name for name in set(weights.files) - used if not ignored.search(name))
    if unused:
        rank_zero_warn(
            f"{weights.path} holds {len(unused)} tensors that the model has no use for, such as {unused[0]!r}"
        )
