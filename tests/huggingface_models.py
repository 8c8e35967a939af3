"""Small random checkpoints of every architecture, made by transformers itself and offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", _LOCAL_EXPERTS),
    "mixtral_tied": ("MixtralConfig", {**_LOCAL_EXPERTS, "tie_word_embeddings": True}),
    "mixtral_one_choice": ("MixtralConfig", {**_LOCAL_EXPERTS, "num_experts_per_tok": 1}),
    "olmoe": ("OlmoeConfig", _EXPERTS),
    "olmoe_normalised": ("OlmoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "deepseek": (
        "DeepseekV3Config",
        {
            **_LATENT_ATTENTION,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_plain": (
        "DeepseekV3Config",
        {
            **_LATENT_ATTENTION,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**_LOCAL_EXPERTS, "head_dim": 16}),
    "qwen2": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "glm4": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LATENT_ATTENTION,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v2_greedy": (
        "DeepseekV2Config",
        {
            **_LATENT_ATTENTION,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
        },
    ),
    "ernie": ("Ernie4_5_MoeConfig", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}),
    "ernie_unshared": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 0, "use_bias": True},
    ),
    "granite": (
        "GraniteMoeConfig",
        {
            **_LOCAL_EXPERTS,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_local_experts": 6,
            "intermediate_size_mlp": 40,
            "head_dim": 16,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8,
        },
    ),
    "jamba": (
        "JambaConfig",
        {**_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_hidden_layers": 4},
    ),
    "minimax": ("MiniMaxConfig", {**_LOCAL_EXPERTS, "head_dim": 16, "block_size": 8, "mlp_beta_factor": 0.7}),
    "qwen3_5": (
        "Qwen3_5MoeTextConfig",
        {
            **_EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
}

VARIANTS = ("mixtral_tied", "mixtral_one_choice", "olmoe_normalised", "deepseek_plain", "ernie_unshared")
"""Other routers, ties and biases of architectures that are there, with the same masks and caches."""

RECURRENT = ("jamba", "minimax", "qwen3_5")
"""Those with layers that carry a state from token to token."""

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen3_dense": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "gpt2": ("GPT2Config", {"n_inner": 48, "activation_function": "gelu_new"}),
    "gpt2_erf": ("GPT2Config", {"activation_function": "gelu"}),
    "swinv2": (
        "Swinv2Config",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
    ),
}


def make_checkpoint(name: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of the architecture in `folder` and return it, ready to be compared with."""
    class_name, options = (SPARSE | DENSE)[name]
    if name == "swinv2":
        sizes: dict[str, Any] = {"num_labels": 5, "drop_path_rate": 0.0, "initializer_range": 0.2}
    else:
        sizes = dict(SIZES)
    config = getattr(transformers, class_name)(**{**sizes, **options, **changes})
    torch.manual_seed(3)
    auto = "AutoModelForImageClassification" if name == "swinv2" else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():  # what starts at a constant would hide an error
            if "bias" in key or "norm" in key:
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


def inputs_for(name: str) -> Tensor:
    """A small batch that the architecture takes."""
    generator = torch.Generator().manual_seed(5)
    if name == "swinv2":
        return torch.randn(3, 3, 16, 16, generator=generator)
    return torch.randint(VOCABULARY, (3, 12), generator=generator)


@torch.no_grad()
def logits_of(model: Any, inputs: Tensor) -> Tensor:
    """What transformers computes."""
    logits: Tensor = model.eval()(inputs).logits
    return logits


def reloaded(folder: Path) -> Any:
    """The checkpoint in plain transformers, which must find every tensor and no other."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model


def export(trainer: Any, folder: Path, *, adapter_alone: bool = False) -> None:
    """Save the trainer's model beside a folder, and export that checkpoint to it; collective."""
    from moe_lightning.cli.huggingface import export_checkpoint

    file = folder.with_name(f"{folder.name}.ckpt")
    trainer.save_checkpoint(file)
    if trainer.is_global_zero:
        export_checkpoint(file, folder, adapter_alone=adapter_alone)
    trainer.strategy.barrier()


def files_equal(one: Path, two: Path) -> None:
    """Both folders hold the same tensors, bit by bit and in the same dtypes."""
    left, right = _tensors(one), _tensors(two)
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5Moe",
        {
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_position_embeddings"), 16),
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": SIZES["hidden_size"],
        },
    ),
    "llama4": (
        "Llama4",
        {
            **dict.fromkeys(("hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        },
    ),
}

WITH_IMAGES = tuple(_VISION)
"""Architectures that are the text model of others."""


def make_checkpoint_with_images(name: str, folder: Path) -> None:
    """Save a random model that takes images and has the architecture as its text model."""
    prefix, vision = _VISION[name]
    config = getattr(transformers, f"{prefix}Config")(text_config={**SIZES, **SPARSE[name][1]}, vision_config=vision)
    torch.manual_seed(3)
    getattr(transformers, f"{prefix}ForConditionalGeneration")(config).save_pretrained(folder)
