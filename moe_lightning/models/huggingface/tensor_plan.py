"""How the layers of a Hugging Face model are computed in parts by several ranks (mesh.tp)."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.models.huggingface.blocks import SparseBlock
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
