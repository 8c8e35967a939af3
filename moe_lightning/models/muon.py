"""Muon (Jordan 2024; scaled as in Moonlight, arXiv 2502.16982) for matrices, AdamW for the rest, in one optimizer.

torch.optim.Muon takes two-dimensional parameters only and no others beside them. Experts are stacks of matrices, and
each is brought to orthogonality by itself: a batched product may round an expert otherwise beside other experts, which
would part its replicas. For the same reason the iteration runs in float32: in bfloat16 a last bit of the gradients,
which differs with the number of ranks, becomes a hundredth of an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from typing_extensions import override

from moe_lightning.models.optimizers import GroupOptimizer, vectors_of
from moe_lightning.moe.experts import Experts

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: steepest at zero."""


class Muon(GroupOptimizer):
    """Momentum whose update is the nearest orthogonal matrix, so that every direction is learned alike.

    Args:
        params: parameters or groups; the options below are also those of a group.
        lr: learning rate; an orthogonal update is scaled to the size of AdamW's, so that one rate serves both.
        weight_decay: decoupled.
        momentum: of the matrices, with Nesterov's look ahead.
        ns_steps: Newton-Schulz iterations.
        betas, eps: of AdamW.
        matrices: which matrices a parameter holds: "one", a "stack" of them along its first dimension, or "none",
            which AdamW updates.
        ns_dtype: of the iteration.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        matrices: str = "one",
        ns_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps, "betas": betas,
            "eps": eps, "matrices": matrices, "ns_dtype": ns_dtype,
        }  # fmt: skip
        super().__init__(params, defaults)

    @override
    def _update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if group["matrices"] == "none":
            self._update_elements(parameters, group)
            return
        for parameter in parameters:
            self._update_matrices(parameter, group)

    def _update_matrices(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:  # every state counts its steps, for a rank that has none of its kind to tell others of
            state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(gradient)}
        state["step"] += 1
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(buffer, group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        stacked = group["matrices"] == "stack"
        for weight, update in zip(parameter, ahead, strict=True) if stacked else [(parameter, ahead)]:
            matrix = update.flatten(1)
            scale = 0.2 * math.sqrt(max(matrix.shape))
            orthogonal = orthogonalised(matrix, steps=group["ns_steps"], dtype=group["ns_dtype"])
            weight.add_(orthogonal.view_as(weight), alpha=-group["lr"] * scale)

    def _update_elements(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalised(matrix: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """About U V' of the singular value decomposition U S V' of [m, n]; zeros of zeros."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype).T if is_tall else matrix.to(dtype)
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices of hidden layers and of experts for the orthogonal updates; embeddings, heads, norms and biases for
    AdamW, which decays the matrices among them only.

    A head is the last linear layer that is called: the one with the name `head`, `lm_head` or `classifier`.
    """
    vectors = vectors_of(model)
    stacks: set[nn.Parameter] = set()
    elementwise: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            stacks |= set(module.parameters(recurse=False)) - vectors
        elif isinstance(module, nn.Embedding) or name.rpartition(".")[2] in ("head", "lm_head", "classifier"):
            elementwise |= set(module.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = {
        "stack": [p for p in trained if p in stacks],
        "one": [p for p in trained if p not in stacks | vectors | elementwise],
    }
    rest = [p for p in trained if p in elementwise - vectors]
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": weight_decay, "matrices": kind} for kind, parameters in chosen.items()
    ]
    groups += [
        {"params": rest, "weight_decay": weight_decay, "matrices": "none"},
        {"params": [p for p in trained if p in vectors], "weight_decay": 0.0, "matrices": "none"},
    ]
    return [group for group in groups if group["params"]]
