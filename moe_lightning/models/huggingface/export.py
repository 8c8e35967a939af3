"""Export of trained models and adapters for transformers and peft.

A trained model is written as a checkpoint that plain transformers loads. Adapters are added to the weights of a plain
checkpoint, or written alone into a folder that peft loads.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text, save_safetensors
from moe_lightning.hub import (
    CHAT_TEMPLATE,
    COMPANIONS,
    CONFIG,
    GENERATION,
    NAMED_TEMPLATES,
    OF_IMAGES,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    hub_name,
)
from moe_lightning.models.huggingface.architecture import Architecture
from moe_lightning.models.huggingface.families import OUR_ROUTER, SELECTION_BIAS, Family
from moe_lightning.models.huggingface.loading import SPECIAL_TOKENS, dense_tensors, known_tokens, transformers
from moe_lightning.models.huggingface.weights import dtype_named, write_weights
from moe_lightning.moe.adapters import AdapterConfig, is_adapter
from moe_lightning.moe.nf4 import dequantise

_DRAFTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of configurations that count layers for multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Content of a model's checkpoint for plain transformers.

    Attributes:
        config: its configuration.
        family: the names of its tensors.
        dense: the names in our model of what it holds beside experts, one for each tensor.
        blocks: the MoE blocks of our model in order; `layer` of other methods is the place in this list.
        in_float32: those of the dense names that transformers keeps in float32, such as selection biases.
        dtype: of all other tensors.
        drafting: numbers of layers for multi-token prediction in the original, by their keys; none is in our model.
    """

    config: Any
    family: Family
    dense: tuple[str, ...]
    blocks: tuple[str, ...]
    in_float32: frozenset[str]
    dtype: torch.dtype
    drafting: Mapping[str, int]

    def write(self, path: Path, dense: Mapping[str, Tensor], experts: Iterable[Mapping[str, Tensor]]) -> int:
        """Write the checkpoint into a folder; returns the bytes of tensors.

        Args:
            path: of the folder, without weights.
            dense: the tensors by the names in our model.
            experts: for each block the full stacks [E, ...] by parameter; only one block's are held at a time.
        """
        self.write_config(path)
        return write_weights(path, self._files(dense, experts))

    def write_config(self, path: Path) -> None:
        """Write config.json into a folder, with the names of transformers 4 beside those of transformers 5.

        Readers of the older names, such as inference engines, replace what they do not find by a default, such as 10000
        for the base of rotary embeddings.
        """
        self.config.save_pretrained(path)
        values = json.loads(read_text(path / CONFIG))
        count = self.family.num_experts
        older = {"torch_dtype": values.get("dtype"), count: getattr(self.config, count)}
        if rope := dict(values.get("rope_parameters") or {}):
            older |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
            older["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
        (path / CONFIG).write_text(json.dumps(values | older, indent=2, sort_keys=True) + "\n")

    def _files(
        self, dense: Mapping[str, Tensor], experts: Iterable[Mapping[str, Tensor]]
    ) -> Iterator[dict[str, Tensor]]:
        yield {self.disk_name(name): self._cast(name, dense[name]) for name in self.dense}
        for block, stacks in zip(self.blocks, experts, strict=True):
            stored = {name: self._cast(f"{block}.experts.{name}", stack) for name, stack in stacks.items()}
            written = self.family.layout.write(f"{block}.", stored)
            yield {self.family.disk_name(name): tensor for name, tensor in written.items()}

    def disk_name(self, name: str) -> str:
        """Return the name on disk of a tensor of our model other than the experts."""
        return self.family.disk_name(self.family.model_name(name))

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(SELECTION_BIAS):
            tensor = tensor.view(self.family.bias_shape)
        keeps = not tensor.is_floating_point() or name in self.in_float32
        return tensor if keeps else cast(name, tensor, self.dtype)


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype of an export.

    Raises:
        ConfigurationError: it has values beyond the largest of that dtype.
    """
    stored = tensor.to(dtype)
    if stored.isinf().any() and not torch.equal(stored.isinf(), tensor.isinf()):
        wider = "float32" if dtype == torch.bfloat16 else "bfloat16 or float32"
        raise ConfigurationError(
            f"{name!r} has values beyond {torch.finfo(dtype).max:g}, the largest of "
            f"{str(dtype).removeprefix('torch.')}: export with --dtype {wider}"
        )
    return stored


def plan_export(architecture: Architecture, model: nn.Module, dtype: str | None = None) -> Export:
    """Plan the export of a model with installed MoE layers.

    Args:
        model: with memory or on the meta device.
        dtype: of the tensors; None: that of the checkpoint it came from.

    Raises:
        ConfigurationError: transformers has no class for such a model, or an unknown dtype.
    """
    config, family = architecture.exported()
    config = copy.deepcopy(config)
    chosen = dtype_named(dtype or str(getattr(config, "dtype", None) or "float32"))
    config.dtype = chosen
    drafting = {name: count for name in _DRAFTING if (count := getattr(config, name, None))}
    for name in drafting:
        setattr(config, name, 0)
    config.architectures = [_class_name(config, architecture.auto_class)]
    names = tuple(names[0] for _, names in dense_tensors(model, architecture) if not is_adapter(names[0]))
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    in_float32 = {
        name for name in names if any(re.search(rf"(^|\.){part}(\.|$)", family.model_name(name)) for part in kept)
    }
    return Export(
        config=config,
        family=family,
        dense=names,
        blocks=tuple(architecture.layers),
        in_float32=frozenset(in_float32),
        dtype=chosen,
        drafting=drafting,
    )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that gets its name when it is whole and on disk.

    Raises:
        ConfigurationError: something has that name already.
    """
    if path.exists():
        raise existing(path)
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    staged.mkdir(parents=True)
    try:
        yield staged
        for written in filter(Path.is_file, staged.rglob("*")):  # a tokenizer may have a folder of templates
            with written.open("rb") as file:
                os.fsync(file.fileno())
        os.rename(staged, path)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def existing(path: Path) -> ConfigurationError:
    """Return the error of an export that would overwrite something."""
    return ConfigurationError(f"{path} exists already: name another folder")


def copy_companions(
    source: Path,
    target: Path,
    export: Export,
    *,
    named: Path | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    end_of_text: int | None = None,
) -> None:
    """Take tokenizer, templates and generation defaults over into an exported folder; links out of `source` are not
    followed, except into the store of files that a Hugging Face cache keeps beside its snapshots.

    Args:
        source: folder of the original.
        target: the exported folder.
        named: tokenizer.json of the run in the place of the original's, in a folder that may have what belongs to it;
            None: the original's.
        export: of the model; special tokens that a tokenizer in the place of the original's does not have are taken
            out of its configuration.
        tokenizer: content of the tokenizer.json that the run has trained in the place of the original's; None: none.
        chat_template: by which the run wrote its conversations in the place of the original's; None: none.
        end_of_text: token at which generation has to end, beside those of the original's tokenizer; None: none.
    """
    if chat_template is not None:
        (target / CHAT_TEMPLATE).write_text(chat_template)
    if tokenizer is not None:
        (target / TOKENIZER).write_text(tokenizer)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # else transformers takes the class of the model
        (target / TOKENIZER_SETTINGS).write_text(json.dumps(settings) + "\n")
    others = (GENERATION, *OF_IMAGES)
    if tokenizer is None and named is not None:
        shutil.copyfile(named, target / TOKENIZER)
        _copy(named.parent, target, [name for name in COMPANIONS if name not in others])
    is_whole = named is not None and (named.parent / TOKENIZER_SETTINGS).is_file()
    _copy(source, target, OF_IMAGES if tokenizer is not None else others if is_whole else COMPANIONS)
    if tokenizer is not None or named is not None:
        _drop_special_tokens(target, export)
    if end_of_text is not None:
        _end_generation(target / GENERATION, export.config, end_of_text)


def _drop_special_tokens(target: Path, export: Export) -> None:
    """Take special tokens of the original's tokenizer out of the configurations of a folder with another one."""
    added = {token["id"] for token in json.loads(read_text(target / TOKENIZER)).get("added_tokens", [])}
    for name in SPECIAL_TOKENS:
        setattr(export.config, name, known_tokens(getattr(export.config, name, None), added))
    if (target / CONFIG).is_file():
        export.write_config(target)
    if (path := target / GENERATION).is_file():
        values = json.loads(read_text(path))
        kept = {name: known_tokens(values[name], added) for name in SPECIAL_TOKENS if name in values}
        path.write_text(json.dumps(values | kept, indent=2) + "\n")


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy those files, given by patterns, that a folder has to one that lacks them; see `copy_companions`."""
    inside = source.resolve()
    allowed = [inside, inside / NAMED_TEMPLATES]
    if inside.parent.name == "snapshots":
        allowed.append(inside.parent.parent / "blobs")
    # Whatever else the folder of a checkpoint holds, such as credentials, is not handed on.
    for found in (path for name in names for path in source.glob(name)):
        file, copied = found.resolve(), target / found.relative_to(source)
        if file.is_file() and file.parent in allowed and not copied.exists():
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copied)


def _end_generation(path: Path, config: Any, token: int) -> None:
    """Add a token to those at which generation ends, in a folder's defaults or those of the model's configuration."""
    made = transformers().GenerationConfig.from_model_config(config).to_json_string()
    values = json.loads(read_text(path) if path.is_file() else made)
    ends = values.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token not in ends:
        path.write_text(json.dumps(values | {"eos_token_id": [*ends, token]}, indent=2) + "\n")


def _class_name(config: Any, auto_class: str) -> str:
    mapping = getattr(transformers(), auto_class)._model_mapping
    return str(mapping[type(config)].__name__)


_DENSE = ".adapter.lora_"
_PREFIX = "base_model.model."


def merged_dense(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """The model's tensors outside of experts with their adapters added, in float32 where there are any.

    Args:
        tensors: by name; adapters of layers among them.
    """
    merged = {name: tensor for name, tensor in tensors.items() if _DENSE not in name}
    for name, a_RD in tensors.items():
        if name.endswith(f"{_DENSE}a"):
            layer = name.removesuffix(f"{_DENSE}a")
            b_FR = tensors[f"{layer}{_DENSE}b"]
            merged[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() + config.scale * b_FR.float() @ a_RD.float()
    return merged


def merged_experts(
    stacks_EX: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: AdapterConfig
) -> dict[str, Tensor]:
    """The stacks of one block with their adapters added, in float32 where there are any.

    Args:
        stacks_EX: by the names of our parameters.
        shapes: of an expert's weights by name.
    """
    merged = {}
    for name, shape in shapes.items():
        if name in stacks_EX:
            merged[name] = stacks_EX[name]
        else:
            pairs = zip(stacks_EX[f"{name}_codes"], stacks_EX[f"{name}_scales"], strict=True)
            merged[name] = torch.stack([dequantise(*pair, torch.float32).view(shape) for pair in pairs])
        if f"lora_{name}_a" in stacks_EX:
            a_EDR, b_ERF = (stacks_EX[f"lora_{name}_{part}"].float() for part in "ab")
            merged[name] = torch.baddbmm(merged[name].float(), a_EDR, b_ERF, alpha=config.scale)
    return merged


def write_adapter(
    path: Path,
    export: Export,
    config: AdapterConfig,
    base: str,
    dense: Mapping[str, Tensor],
    experts: Iterable[Mapping[str, Tensor]],
) -> int:
    """Write what `peft.PeftModel.from_pretrained` loads onto the plain checkpoint; returns its bytes.

    Args:
        path: of an existing folder.
        export: of the model.
        base: the plain checkpoint by folder or name, for peft's own notes.
        dense: tensors by the names in our model, the adapters of layers among them.
        experts: for each block the full stacks [E, ...], of which only the adapters are taken.
    """
    tensors, modules, parameters = _dense_adapters(export, dense)
    for block, stacks in zip(export.blocks, experts, strict=True):
        if "experts" in config.targets:
            found = export.family.layout.adapters(f"{block}.", stacks)
            tensors |= {f"{_PREFIX}{export.family.disk_name(name)}": tensor for name, tensor in found.items()}
    named, in_halves = hub_name(base), frozenset[str]()
    if "experts" in config.targets:
        experts_of = export.family.layout.targets
        modules, parameters = modules | experts_of.modules, parameters | experts_of.parameters
        in_halves = experts_of.in_halves
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": named.repository if named else str(Path(base).expanduser().absolute()),
        "revision": named.revision if named else None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters),
        "rank_pattern": {rf".*\.{name}": 2 * config.rank for name in sorted(in_halves)},
        "alpha_pattern": {rf".*\.{name}": 2 * config.alpha for name in sorted(in_halves)},
        "inference_mode": True,
    }
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    (path / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
    save_safetensors(plain, path / "adapter_model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in plain.values())


def _dense_adapters(export: Export, dense: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """Tensors by peft's names, adapted linear layers, adapted parameters."""
    tensors, modules, parameters = dict[str, Tensor](), set[str](), set[str]()
    for name, tensor in dense.items():
        layer, found, part = name.partition(_DENSE)
        if not found:
            continue
        key = f"{layer}.lora_{part.upper()}.weight"
        if layer.endswith(OUR_ROUTER):
            key = export.disk_name(key)
            parameters.add(f"{export.family.block}.{export.family.gate}.weight")
        elif layer.rpartition(".")[2] in export.family.layout.targets.modules:  # peft takes them for experts
            parameters.add(f"{layer}.weight")
        else:
            modules.add(layer)
        tensors[f"{_PREFIX}{key}"] = tensor
    return tensors, modules, parameters


def require_adapters(config: AdapterConfig | None) -> None:
    """
    Raises:
        ConfigurationError: there are no adapters.
    """
    if config is None:
        raise ConfigurationError("the model has no adapters (model.adapter) to be written alone: write it whole")
