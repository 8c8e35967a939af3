"""Models of transformers as one GGUF file, which llama.cpp loads: options, tokenizer and tensors by its names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text, replacing
from moe_lightning.hub import CHAT_TEMPLATE, GENERATION, TOKENIZER
from moe_lightning.models.huggingface.export import Export, cast


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """A family as llama.cpp knows it.

    Attributes:
        arch: its number there.
        fixed: options that its code there does not read.
        may_group_queries: keys and values may have fewer heads than queries.
        has_neighbors: rotary embeddings turn columns 2i and 2i + 1 of a head together, not i and i + half.
    """

    arch: Any
    fixed: Mapping[str, object]
    may_group_queries: bool = True
    has_neighbors: bool = False


_ARCHITECTURES = {
    "mixtral": _Architecture(arch=gguf.MODEL_ARCH.LLAMA, fixed={"sliding_window": None}, has_neighbors=True),
    "olmoe": _Architecture(
        arch=gguf.MODEL_ARCH.OLMOE,
        fixed={"norm_topk_prob": False, "clip_qkv": None, "tie_word_embeddings": False},
        may_group_queries=False,
    ),
    "qwen3_moe": _Architecture(arch=gguf.MODEL_ARCH.QWEN3MOE, fixed={"norm_topk_prob": True, "sliding_window": None}),
}
"""By the `model_type` of config.json."""

_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def check_gguf(export: Export) -> None:
    """Refuse a model that llama.cpp computes otherwise, before its weights are read.

    Raises:
        ConfigurationError: it is of another family, or has an option or a tensor that llama.cpp's code does not have.
    """
    config = export.config
    known = _ARCHITECTURES.get(config.model_type)
    if known is None:
        raise _refused(f"model_type={config.model_type!r}", ", ".join(_ARCHITECTURES))
    fixed = {"hidden_act": "silu", "rope_type": "default", **known.fixed}
    if not known.may_group_queries:
        fixed["num_key_value_heads"] = config.num_attention_heads
    rope_type = config.rope_parameters.get("rope_type", "default")
    for name, value in fixed.items():
        if (found := rope_type if name == "rope_type" else getattr(config, name, None)) != value:
            raise _refused(f"{name}={found!r} of {config.model_type}", repr(value))
    if export.dtype not in _TYPES:
        raise _refused(f"dtype={str(export.dtype).removeprefix('torch.')}", "float32, float16 and bfloat16")
    if len(export.blocks) < config.num_hidden_layers:
        raise _refused(f"a {config.model_type} with dense layers", "one with experts in every layer")
    for name in export.dense:
        _name(export, name)


def write_gguf(
    path: Path, export: Export, dense: Mapping[str, Tensor], experts: Iterable[Mapping[str, Tensor]], tokenizer: Path
) -> int:
    """Write a model that `check_gguf` has accepted; returns the bytes of the file.

    Args:
        path: of the file, which gets its name when it is whole.
        export: of the model.
        dense: the tensors by the names in our model.
        experts: for each block the full stacks [E, ...] by parameter; only one block's are held at a time.
        tokenizer: folder of tokenizer.json, and of tokenizer_config.json where there are special tokens.

    Raises:
        ConfigurationError: llama.cpp has no such tokenizer.
    """
    with replacing(path) as staged:
        writer = gguf.GGUFWriter(staged, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[export.config.model_type].arch])
        writer.add_name(path.stem)
        _add_options(writer, export)
        _add_tokenizer(writer, tokenizer, export.config)
        types = dict[str, torch.dtype]()
        for name, shape in _shapes(export, dense):
            is_small = len(shape) == 1 or ".ffn_gate_inp." in name  # llama.cpp keeps norms and routers in float32
            types[name] = torch.float32 if is_small else export.dtype
            size = math.prod(shape) * types[name].itemsize
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=_TYPES[types[name]][0])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(export, dense, experts):
            stored = cast(name, tensor.detach().cpu(), types[name]).contiguous()
            writer.write_tensor_data(stored.view(torch.uint8).numpy())  # numpy has no bfloat16
        writer.close()
    return path.stat().st_size


def _refused(what: str, known: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} cannot be written as GGUF, only {known}: moe-ckpt export-hf writes a folder that llama.cpp's own "
        "convert_hf_to_gguf.py may know"
    )


def _name(export: Export, name: str) -> str:
    """llama.cpp's name of a tensor of our model other than an expert's."""
    disk, config = export.disk_name(name), export.config
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.model_type].arch, config.num_hidden_layers)
    found = names.get_name(disk, try_suffixes=(".weight",))
    if found is None:
        raise _refused(f"the tensor {disk}", "those that llama.cpp has a name for")
    return str(found)


def _shapes(export: Export, dense: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the file in order, with their shapes."""
    for name in export.dense:
        yield _name(export, name), tuple(dense[name].shape)
    config = export.config
    family = export.family
    sizes_EFD = (getattr(config, family.num_experts), getattr(config, family.d_expert), config.hidden_size)
    sizes_EDF = (sizes_EFD[0], sizes_EFD[2], sizes_EFD[1])
    for index in range(len(export.blocks)):
        for part, shape in (("gate", sizes_EFD), ("up", sizes_EFD), ("down", sizes_EDF)):
            yield f"blk.{index}.ffn_{part}_exps.weight", shape


def _tensors(
    export: Export, dense: Mapping[str, Tensor], experts: Iterable[Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    config = export.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name in export.dense:
        tensor, layer = dense[name], name.split(".")[-2]
        if _ARCHITECTURES[config.model_type].has_neighbors and layer in heads:
            tensor = tensor.view(heads[layer], 2, -1, tensor.shape[1]).transpose(1, 2).flatten(0, 2)
        yield _name(export, name), tensor
    for index, stacks_EX in enumerate(experts):
        gate_EFD, up_EFD = stacks_EX["w_up"].transpose(1, 2).chunk(2, dim=1)
        for part, stack in (("gate", gate_EFD), ("up", up_EFD), ("down", stacks_EX["w_down"].transpose(1, 2))):
            yield f"blk.{index}.ffn_{part}_exps.weight", stack


def _add_options(writer: Any, export: Export) -> None:
    config = export.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(_TYPES[export.dtype][1])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(getattr(config, export.family.d_expert))
    writer.add_expert_count(getattr(config, export.family.num_experts))
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


# ---------------------------------------------------------------- tokenizers

_SPLITS = {
    None: "gpt-2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        "qwen2"
    ),
}
"""llama.cpp's names of the expressions by which byte-level tokenizers split a text; None: that of ByteLevel."""


def _add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    try:
        content = json.loads(read_text(folder / TOKENIZER))
        model, added = content["model"], {token["id"]: token for token in content["added_tokens"]}
        texts = {index: text for text, index in model["vocab"].items()}
        is_byte_level = _split(content) in _SPLITS
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"tokenizer.json is not a file of the package tokenizers ({error!r}): get it again"
        ) from error
    texts |= {index: token["content"] for index, token in added.items()}
    if model["type"] != "BPE" or not (is_byte_level or _is_sentence_piece(model)):
        raise _refused("the tokenizer", "byte-level BPE that splits as GPT-2 or Qwen, and SentencePiece")
    if max(texts, default=0) >= config.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has the token {max(texts)}, the model has {config.vocab_size}: get the model's"
        )

    def kind(index: int) -> Any:
        if index not in texts:
            return gguf.TokenType.UNUSED
        if index in added:
            return gguf.TokenType.CONTROL if added[index]["special"] else gguf.TokenType.USER_DEFINED
        is_byte = not is_byte_level and texts[index].startswith("<0x") and len(texts[index]) == 6
        return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL

    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    writer.add_tokenizer_pre(_SPLITS[_split(content)] if is_byte_level else "default")
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in range(config.vocab_size)])
    writer.add_token_types([kind(index) for index in range(config.vocab_size)])
    if not is_byte_level:
        writer.add_token_scores([-float(index) for index in range(config.vocab_size)])
        writer.add_add_space_prefix(_begins_with_space(content))
    special = gguf.SpecialVocab(folder, load_merges=is_byte_level, n_vocab=config.vocab_size)
    if (folder / CHAT_TEMPLATE).is_file():  # gguf prefers that of the settings, transformers this one
        special.chat_template = read_text(folder / CHAT_TEMPLATE)
    unused = [index for index in range(config.vocab_size) if index not in texts]
    special.special_token_ids |= _further_ends(folder, special.special_token_ids, texts, unused)
    for end in ("bos", "eos"):  # for llama.cpp a text begins with the first where a SentencePiece file says nothing
        special.add_special_token.setdefault(end, False)
    special.add_to_gguf(writer)


def _further_ends(
    folder: Path, known: Mapping[str, int], texts: Mapping[int, str], unused: Sequence[int]
) -> dict[str, int]:
    """Ends of a text that only the defaults of generation name, as llama.cpp names them; without any, a token that no
    text has, since llama.cpp then ends at token 11 of byte-level BPE.
    """
    path = folder / GENERATION
    named: Any = json.loads(read_text(path)).get("eos_token_id") if path.is_file() else None
    listed: list[int] = named if isinstance(named, list) else [named]
    ends = [end for end in listed if end in texts and end != known.get("eos")]
    if "eos" in known:
        return {"eot": ends[-1]} if ends and "eot" not in known else {}
    if ends or unused:
        return {"eos": (ends or unused)[-1]}
    rank_zero_warn(
        "the tokenizer has no end token, so llama.cpp ends texts at a token of its own choice: run it with "
        "--ignore-eos, or train with data.end_of_document=ID"
    )
    return {}


def _is_sentence_piece(model: Mapping[str, Any]) -> bool:
    """True if unknown letters are bytes, and merges come in the order of the tokens that they make, as in llama.cpp."""
    merges = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    made = [model["vocab"]["".join(pair)] for pair in merges]
    return bool(model.get("byte_fallback")) and made == sorted(made)


def _begins_with_space(content: Mapping[str, Any]) -> bool:
    normalizer = content["normalizer"] or {}
    is_prepended = any(step["type"] == "Prepend" for step in normalizer.get("normalizers", [normalizer]) if step)
    return is_prepended or (content["pre_tokenizer"] or {}).get("prepend_scheme", "never") != "never"


def _split(content: Mapping[str, Any]) -> str | None:
    """The expression by which a byte-level tokenizer splits a text; None for that of ByteLevel; "" for another kind."""
    before = content["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    normalizer = (content["normalizer"] or {}).get("type", "NFC")
    if steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"] or normalizer != "NFC":
        return ""
    if len(steps) == 1:
        return None if steps[0].get("use_regex", True) else ""
    is_known = len(steps) == 2 and steps[0]["type"] == "Split" and not steps[-1].get("use_regex", True)
    return str(steps[0]["pattern"].get("Regex", "")) if is_known else ""
