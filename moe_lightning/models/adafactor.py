"""Adafactor (Shazeer and Stern 2018) as torch.optim.Adafactor has it, for stacks of experts too.

torch takes a stack for one tensor: it clips updates and scales steps by the mean square over all experts, and factors
the biases of experts across them. Here each expert is a tensor by itself, so its update depends on nothing beside it,
and its factors are rows of stacked states: [S, d, 1] and [S, 1, f] for matrices [S, d, f]. Numbers stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from moe_lightning.models.optimizers import GroupOptimizer
from moe_lightning.moe.experts import Experts


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
            state["step"] = torch.tensor(0.0)
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
    stacks = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters(recurse=False)}
    parted = [
        group | {"params": [p for p in group["params"] if (p in stacks) == stacked], "stacked": stacked}
        for group in groups
        for stacked in (False, True)
    ]
    return [group for group in parted if group["params"]]
