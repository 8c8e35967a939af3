"""An MoE layer on a fake device against the CPU, forward and backward, in interpreted ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.dispatch.dispatcher import Dispatcher, PlanPlace
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World
from tests.distributed.harness import connect
from tests.gpu.fake_device import Counts, FakeDevice, on_hosts, set_up
from tests.gpu.interpreter import widen_bf16
from tests.gpu.triton_modules import launching_modules

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 16, 24, 33


def run(rank: int, world_size: int, aux_loss_coef: float, plan: PlanPlace, dtype_name: str) -> dict[str, Any]:
    """Counts of the second forward and backward; the first warms up. Values must be those of the CPU."""
    device = set_up()  # before any backward: autograd counts the devices once
    world = World.single() if world_size == 1 else connect()
    placement = uniform_placement(EXPERTS, world_size)
    torch.manual_seed(0)
    layer = MoELayer(WIDTH, HIDDEN, EXPERTS, {"top_k": 2, "aux_loss_coef": aux_loss_coef}, activation="swiglu")
    dispatcher = Dispatcher(placement, world, [tuple(range(world_size))], plan_on=plan)
    dtype = getattr(torch, dtype_name)
    if dtype == torch.bfloat16:
        widen_bf16(pytest.MonkeyPatch())  # the process has no other use of the interpreter
    layer.to(dtype).place(dispatcher, torch.device("cpu"))
    torch.manual_seed(1 + rank)
    x, grad = (torch.randn(TOKENS, WIDTH).to(dtype) for _ in range(2))
    y = layer(x.requires_grad_())
    expected = [y.detach(), *gradients(layer, y, x, grad)]
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (5e-2, 5e-3)
    fake = FakeDevice()
    on_hosts()
    for room in launching_modules():
        room.launch = fake.launch  # type: ignore[assignment]
    with fake, ops.backend("triton"):
        there = layer.to(device)
        leaf = x.detach().to(device).requires_grad_()
        upstream = grad.to(device)
        found: dict[str, Any] = {}
        for _ in range(2):
            fake.take()
            y = there(leaf)
            found["forward"] = told(fake.take())
            actual = gradients(there, y, leaf, upstream)
            found["backward"] = told(fake.take())
        for here, wanted in zip([y.detach(), *actual], expected, strict=True):
            torch.testing.assert_close(here.host, wanted, rtol=rtol, atol=atol)
    return found


def gradients(layer: MoELayer, y: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Of the layer's output; of its auxiliary loss, too, in bf16, where that is few launches."""
    loss = layer.auxiliary_loss if x.dtype == torch.bfloat16 else None
    ends, upstream = ([y], [grad]) if loss is None else ([y, loss], [grad, torch.ones_like(loss)])
    return torch.autograd.grad(ends, [x, *layer.parameters()], upstream)


def told(counts: Counts) -> dict[str, Any]:
    return {
        "launches": counts.launches.total(),
        "kernels": dict(counts.launches),
        "waits": counts.waits,
        "uploads": counts.uploads,
        "collectives": counts.collectives,
    }
