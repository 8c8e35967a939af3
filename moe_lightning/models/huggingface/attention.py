"""Attention of Hugging Face models over sharded sequences and over packed documents.

Uses the attention interface of transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.sequence import ContextParallel

_DOCUMENTS = "documents"
"""Keyword of the model's forward pass that reaches `_attention`."""

_NAME = "moe_lightning_context"


_SHARED = frozenset({"full_attention", "sliding_attention"})
_PACKED = _SHARED | {"chunked_attention"}
"""Kinds of layers, by transformers' `layer_types`, that can be computed over parts and over packed documents."""


def keep_context(model: Any) -> None:
    """Let the model's attention know of parts of sequences, where it asks the interface, has no sinks and counts no
    places itself, and no other layer mixes positions.
    """
    if not (getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False)):
        return
    if _layers_beside(_SHARED, model.config) or _counts_places(model.config):
        return
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.context = ContextParallel()
    model.context = ContextParallel()


def share_sequences(model: Any) -> None:
    """Compute attention over parts from now on, and over whole sequences as before where there are none."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    if model.config._attn_implementation == _NAME:
        return
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = _NAME


def _layers_beside(known: frozenset[str], config: Any) -> list[str]:
    return sorted(set(getattr(config, "layer_types", None) or ()) - known)


def _counts_places(config: Any) -> bool:
    """True if attention depends on the places of tokens in the batch, whatever positions they are given."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def check_packing(config: Any, length: int) -> None:
    """Refuse packed documents for a model that would mix them.

    Args:
        config: of the model.
        length: of the longest sample.

    Raises:
        ConfigurationError: it has layers that carry a state from each token to the next, or attention that depends on
            where a document lies in the sample.
    """
    if _counts_places(config) and length >= config.floor_scale:
        raise ConfigurationError(
            f"data.packing=true with {length} positions: {config.model_type} scales attention from position "
            f"{config.floor_scale} on by the place in the sample, not in the document: use a context_length below "
            "that, or data.packing=false"
        )
    others = _layers_beside(_PACKED, config)
    if others:
        raise ConfigurationError(
            f"data.packing=true cannot keep documents apart in the {', '.join(others)} layers of {config.model_type}: "
            "use data.packing=false"
        )


def document_options(model: Any, positions_L: Tensor, begins_BL: Tensor) -> dict[str, Any]:
    """Arguments of a model's forward pass that keep documents apart and restart their positions.

    transformers finds documents where positions restart, but GPT-OSS takes its masks without looking there, and
    attention over parts makes its own.

    Args:
        model: the model.
        positions_L: int64 [1, L], of this rank's tokens in their sequences.
        begins_BL: int64, the position at which the document of each token begins.

    Raises:
        ConfigurationError: see `check_packing`.
    """
    check_packing(model.config, positions_L.shape[-1])
    position_ids = positions_L - begins_BL
    found: dict[str, Any] = {"position_ids": position_ids}
    if getattr(model, "context", None) is not None and model.context.is_sharded:
        return found | {_DOCUMENTS: begins_BL}
    if model.config.model_type == "gpt_oss":
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        embeddings = position_ids.new_empty((*position_ids.shape, 0), dtype=model.dtype)  # for its shape
        arguments = model.config, embeddings, None, None  # by place: the last one has two names
        found["attention_mask"] = {
            "full_attention": create_causal_mask(*arguments, position_ids=position_ids),
            "sliding_attention": create_sliding_window_causal_mask(*arguments, position_ids=position_ids),
        }
    return found


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, L, H, C], as transformers wants it; masks are those of causal attention, by global positions."""
    if not module.context.is_sharded:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return whole
    if dropout:
        raise ConfigurationError(
            f"a dropout of {dropout} on the weights of {type(module).__name__} would fall otherwise on every number of "
            "ranks: set it to 0 in model.overrides, or mesh.cp=1"
        )
    mixed: Tensor = module.context.attention(
        query,
        key,
        value,
        is_causal=getattr(module, "is_causal", True),
        documents_BL=documents,
        window=sliding_window,
        scale=scaling,
    )
    return mixed.transpose(1, 2).contiguous(), None
