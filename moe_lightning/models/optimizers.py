"""Optimizers for stacks of experts: Muon and Adafactor.

Muon (Jordan 2024; scaled as in Moonlight, arXiv 2502.16982) for matrices, AdamW for the rest, in one optimizer.
torch.optim.Muon accepts two-dimensional parameters only and no others beside them. Experts are stacks of matrices, and
each is orthogonalized by itself: a batched product may round an expert otherwise beside other experts, so replicas
would differ. For the same reason the iteration runs in float32: in bfloat16 a last bit of the gradients, which differs
with the number of ranks, becomes a hundredth of an update.

Adafactor (Shazeer and Stern 2018) as in torch.optim.Adafactor, for stacks of experts too. torch treats a stack as one
tensor: it clips updates and scales steps by the mean square over all experts, and factors the biases of experts across
them. Here each expert is a tensor by itself, so its update depends on nothing beside it, and its factors are rows of
stacked states: [S, d, 1] and [S, 1, f] for matrices [S, d, f]. Numbers stay on the device.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from typing_extensions import override

from moe_lightning.moe.experts import Experts


class GroupOptimizer(Optimizer):
    """Updates the parameters of a group that have a gradient, in a way of its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            device = parameters[0].device.type if parameters else "cpu"
            with torch.autocast(device, enabled=False):  # which manual optimization runs its whole step in
                self._update_group(parameters, group)
        return loss

    @abstractmethod
    def _update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update these, by the options of their group."""


def _no_steps() -> Tensor:
    """Return the count of a new state: float32 under every default dtype, for bfloat16 counts to 256 only."""
    return torch.tensor(0.0, dtype=torch.float32)


def vectors_of(model: nn.Module) -> set[nn.Parameter]:
    """Trained biases, norms and tensors whose other sizes are one, and the biases of experts, however many are here."""
    stacks = _stacks_of(model)
    trained = (p for p in model.parameters() if p.requires_grad)
    return {p for p in trained if (p.ndim < 3 if p in stacks else p.squeeze().ndim < 2)}


def _stacks_of(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of experts, whose first dimension counts these."""
    return {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters(recurse=False)}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices, which decay, and vectors, which do not."""
    vectors = vectors_of(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p not in vectors], "weight_decay": weight_decay},
        {"params": [p for p in trained if p in vectors], "weight_decay": 0.0},
    ]


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: steepest at zero."""

_ITERATIONS = 5


class Muon(GroupOptimizer):
    """Momentum whose update is the nearest orthogonal matrix, so that every direction is learned alike.

    Args:
        params: parameters or groups; the options below are also those of a group.
        lr: learning rate; an orthogonal update is scaled to the size of AdamW's, so that one rate serves both.
        weight_decay: decoupled.
        momentum: of the matrices, with Nesterov's look ahead.
        betas, eps: of AdamW.
        matrices: which matrices a parameter holds: "one", a "stack" of them along its first dimension, or "none",
            which AdamW updates.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        matrices: str = "one",
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps,
            "matrices": matrices,
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
            state |= {"step": _no_steps(), "momentum_buffer": torch.zeros_like(gradient)}
        state["step"] += 1
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(buffer, group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        stacked = group["matrices"] == "stack"
        for weight, update in zip(parameter, ahead, strict=True) if stacked else [(parameter, ahead)]:
            matrix = update.flatten(1)
            scale = 0.2 * math.sqrt(max(matrix.shape))
            weight.add_(orthogonalised(matrix).view_as(weight), alpha=-group["lr"] * scale)

    def _update_elements(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state |= {"step": _no_steps(), "exp_avg": torch.zeros_like(parameter)}
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


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """About U V' of the singular value decomposition U S V' of [m, n]; zeros of zeros."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype).T if is_tall else matrix.to(dtype)
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices of hidden layers and of experts for the orthogonal updates; embeddings, heads, norms and biases for
    AdamW, which decays the matrices among them only.

    A head is the last linear layer that is called: the one with the name `head`, `lm_head` or `classifier`.
    """
    vectors = vectors_of(model)
    stacks = _stacks_of(model) - vectors
    elementwise = {
        parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] in ("head", "lm_head", "classifier")
        for parameter in module.parameters()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p in chosen], "weight_decay": decay, "matrices": kind}
        for kind, decay, chosen in (
            ("stack", weight_decay, stacks),
            ("one", weight_decay, set(trained) - stacks - vectors - elementwise),
            ("none", weight_decay, elementwise - vectors),
            ("none", 0.0, vectors),
        )
    ]
    return [group for group in groups if group["params"]]


class Adafactor(GroupOptimizer):
    """Steps relative to the size of each tensor; second moments of a matrix are the product of a row and a column.

    Args:
        params: parameters or groups; the options below are also those of a group.
        lr: most that a tensor changes in a step, relative to its root mean square.
        beta2_decay: exponent of the step by which second moments forget less and less.
        eps: least second moment's root, None: the precision of the dtype; least size of a tensor that is stepped by.
        d: root mean square from which an update is clipped.
        weight_decay: decoupled, times the learning rate.
        stacked: whether the first dimension counts experts.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        stacked: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay, "stacked": stacked
        }  # fmt: skip
        super().__init__(params, defaults)

    @override
    def _update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = _no_steps()
            state |= _first_moments(gradient, is_matrix=gradient.ndim - group["stacked"] > 1)
        state["step"] += 1
        step = float(state["step"])
        tensors = {name: value for name, value in state.items() if name != "step"}
        if not group["stacked"]:
            _update_tensor(parameter, gradient, tensors, group, step)
            return
        for slot in range(len(parameter)):  # a batched reduction may round an expert otherwise beside others
            own = {name: value[slot] for name, value in tensors.items()}
            _update_tensor(parameter[slot], gradient[slot], own, group, step)


def _first_moments(gradient: Tensor, *, is_matrix: bool) -> dict[str, Tensor]:
    if not is_matrix:
        return {"variance": torch.zeros_like(gradient)}
    *outer, rows, columns = gradient.shape
    return {"row_var": gradient.new_zeros(*outer, rows, 1), "col_var": gradient.new_zeros(*outer, 1, columns)}


def _update_tensor(
    weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], group: dict[str, Any], step: float
) -> None:
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(weight.dtype).eps if eps1 is None else eps1
    fresh = step ** group["beta2_decay"]
    size = _rms(weight).clamp_min(eps2) * min(group["lr"], step**-0.5)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    if "variance" in moments:
        estimate = moments["variance"].lerp_(gradient.square(), fresh)
    else:
        row, column = moments["row_var"], moments["col_var"]
        row.lerp_(gradient.norm(dim=-1, keepdim=True).square() / gradient.shape[-1], fresh)
        column.lerp_(gradient.norm(dim=-2, keepdim=True).square() / gradient.shape[-2], fresh)
        estimate = row * column / row.mean(dim=-2, keepdim=True).clamp_min(eps1)
    update = estimate.clamp_min(eps1 * eps1).rsqrt().mul_(gradient)
    weight.sub_(update * (size / (_rms(update) / group["d"]).clamp_min(1.0)))


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = tensor.norm()
    return norm / math.sqrt(max(1, tensor.numel()))


def by_expert(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of an optimizer, those of experts apart and `stacked`."""
    stacks = _stacks_of(model)
    parted = [
        group | {"params": [p for p in group["params"] if (p in stacks) == stacked], "stacked": stacked}
        for group in groups
        for stacked in (False, True)
    ]
    return [group for group in parted if group["params"]]
