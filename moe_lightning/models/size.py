"""Size of a model and its arithmetic, independent of the experts that this process holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from moe_lightning.models.gpt import GPTConfig
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import MoELayer


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a model.

    Attributes:
        whole: of the model, each expert once.
        here: that this process holds; replicas count, experts of other ranks do not.
        active: that one token passes.
        multiplied: those of the active ones that are multiplied with a token: matrices but not lookups in embeddings.
    """

    whole: int
    here: int
    active: int
    multiplied: int

    def training_flops(self, num_tokens: int, context_length: float, attention_width: int) -> int:
        """Floating-point operations of one forward and backward pass (PaLM, arXiv 2204.02311, appendix B): six for
        each parameter and token, and twelve for each token, position and unit of attention. Nothing is added for
        recomputation or for the routers' softmax, nothing taken off for causal masks.

        Args:
            num_tokens: in all sequences together.
            context_length: tokens that attend to each other; of documents that share a sequence the mean over tokens.
            attention_width: heads times head size, summed over the layers.
        """
        return num_tokens * 6 * self.multiplied + 12 * attention_width * round(num_tokens * context_length)


def model_size(model: nn.Module) -> ModelSize:
    """The size of a model with MoE layers under any placement, or of one without any."""
    whole = active = whole_parameters(model)
    multiplied = _multiplied_by_every_token(model)
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        top_k = layer.router.config.top_k
        active -= (layer.num_experts - top_k) * expert_size(layer.experts)
        multiplied += top_k * expert_size(layer.experts, matrices_only=True)
    here = sum(p.numel() for p in model.parameters())
    return ModelSize(whole=whole, here=here, active=active, multiplied=multiplied)


def whole_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Parameters of the whole model, each expert once; with `trained` only those that need gradients."""
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    of_experts = {id(p) for experts in stacks for p in experts.parameters()}
    dense = [p for p in model.parameters() if id(p) not in of_experts and (p.requires_grad or not trained)]
    spread = sum(experts.num_experts * expert_size(experts, trained=trained) for experts in stacks)
    return spread + sum(p.numel() for p in dense)


def expert_size(experts: Experts, *, matrices_only: bool = False, trained: bool = False) -> int:
    """Parameters of one expert, with or without its biases, or only those that need gradients; quantised ones count as
    the numbers that they stand for.
    """
    stacks = experts.stacked_parameters()
    rows = [p.shape[1:] for name, p in stacks.items() if p.requires_grad or (name in experts.shapes and not trained)]
    rows += [experts.shapes[name] for name in experts.shapes if name not in stacks and not trained]
    return sum(math.prod(shape) for shape in rows if len(shape) > 1 or not matrices_only)


def _multiplied_by_every_token(model: nn.Module) -> int:
    """Elements of the dense matrices that every token meets; a matrix that is also an embedding counts."""
    matrices = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if not isinstance(module, Experts | nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    return sum(matrices.values())


def least_gpt_parameters(config: GPTConfig) -> int:
    """Elements of a GPT's matrices, each expert once, without building it: all its parameters but biases and norms."""
    c, width = config, config.d_model
    matrices = 3 if c.activation == "swiglu" else 2
    embeddings = c.vocab_size * (1 if c.tie_embeddings else 2) + c.context_length * (c.position == "learned")
    attention = 2 * width + 2 * c.kv_heads * c.head_size
    moe = c.num_experts + matrices * c.expert_size * (c.num_experts + c.num_shared_experts)
    dense = (c.num_layers - c.num_moe_layers) * matrices * c.hidden_size
    return width * (embeddings + c.num_layers * attention + c.num_moe_layers * moe + dense)


def least_slot_parameters(config: GPTConfig, slots: int) -> int:
    """Elements of the matrices in a rank's slots for experts, in all MoE layers."""
    matrices = 3 if config.activation == "swiglu" else 2
    return config.num_moe_layers * slots * matrices * config.d_model * config.expert_size
