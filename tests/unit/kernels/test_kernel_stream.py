"""Keyed dropout: bodies draw the same mask bit by bit, and the gradient follows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.kernels import torch_kernels
from tests.parameters import slow
from tests.unit.kernels.conftest import TRITON
from tests.unit.kernels.kernel_cases import DEVICE

DRAWS = (
    ops.Draw(key=torch_kernels.mixed(3), first=0, here=1, part=0),
    ops.Draw(key=torch_kernels.mixed(-7), first=9, here=4, part=0),
    ops.Draw(key=5, first=1_000_003, here=6, part=2),
)


def in_torch(x_MD: Tensor, p: float, draw: ops.Draw) -> Tensor:
    with ops.backend("torch"):
        return ops.keyed_dropout(x_MD, p, draw)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16)])
def test_dropout_is_that_of_the_torch_body(draw: ops.Draw, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_MD = torch.randn(36, 21).to(DEVICE, dtype).requires_grad_()
    upstream = torch.randn(36, 21).to(DEVICE, dtype)
    for p in (0.1, 0.7):
        found, wanted = (drop(x_MD, p, draw) for drop in (ops.keyed_dropout, in_torch))
        assert torch.equal(found, wanted)
        assert 0 < int((found == 0).sum()) < found.numel()
        mine, theirs = (torch.autograd.grad(y_MD, x_MD, upstream)[0] for y_MD in (found, wanted))
        assert torch.equal(mine, theirs)


@pytest.mark.skipif(TRITON, reason="compares nothing with itself")
def test_the_mask_is_that_of_the_rows_of_the_whole_batch() -> None:
    """Two ranks and two parts of each sample draw what one rank draws; numbers that must never change."""
    key = torch_kernels.mixed(11)
    whole = torch_kernels.uniform(ops.Draw(key=key, first=0, here=4, part=0), 8, 3, torch.device("cpu"))
    for sample in range(2):
        for part in range(2):
            draw = ops.Draw(key=key, first=sample, here=2, part=part)
            own = torch_kernels.uniform(draw, 2, 3, torch.device("cpu"))
            assert torch.equal(own, whole.view(2, 2, 2, 3)[sample, part])
    tensor = torch_kernels._mix(torch.tensor([11, -5, 1 << 62]))
    assert tensor.tolist() == [torch_kernels.mixed(value) for value in (11, -5, 1 << 62)]
