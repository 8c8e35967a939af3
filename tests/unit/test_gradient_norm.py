"""The norm of the whole model's gradients, in every precision of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_lightning.parallel.context import World
from moe_lightning.strategies.gradients import global_gradient_norm, scale_gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_scaling_in_every_precision(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2, 2, dtype=dtype))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = global_gradient_norm(parameters, {}, World.single())
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(28**0.5)
    scale_gradients(parameters, norm, 1.0)
    assert parameters[0].grad is not None
    assert parameters[0].grad.float().tolist() == pytest.approx([2 / 28**0.5] * 3, rel=1e-2)
