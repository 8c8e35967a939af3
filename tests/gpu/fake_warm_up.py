"""Ranks warm up before they meet, then compute a step, on fake devices with interpreted kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_lightning import kernels as ops
from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.moe.warm_up import warm_up
from moe_lightning.parallel.context import World
from tests.distributed.harness import connect
from tests.gpu.fake_device import FakeDevice, OnDevice, on_hosts, set_up
from tests.gpu.interpreter import widen_bf16
from tests.gpu.triton_modules import launching_modules

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 16, 32, 48


class Variants(FakeDevice):
    """Notes what Triton would compile: a kernel for the dtypes, alignments, constants and special sizes it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: set[str] = set()

    def launch(self, kernel: Any, grid: tuple[int, ...], data: Any, *arguments: Any, **meta: Any) -> None:
        if all(grid):
            plain = kernel.kwargs["do_not_specialize"] or ()
            seen = [variant(value, name in plain) for name, value in zip(kernel.arg_names, arguments, strict=False)]
            self.launched.add(f"{kernel.__name__} {seen} {sorted(meta.items())}")
        super().launch(kernel, grid, data, *arguments, **meta)


def variant(value: Any, is_plain: bool) -> str:
    if isinstance(value, torch.Tensor):
        host = value.host if isinstance(value, OnDevice) else value
        return f"{host.dtype}{'' if host.data_ptr() % 16 else ' aligned'}"
    if hasattr(value, "block_shape"):
        return f"{value.base.dtype} {value.block_shape}"
    if isinstance(value, int) and not is_plain:
        return "1" if value == 1 else f"int {value % 16 == 0}"
    return type(value).__name__


def run(rank: int, ranks: int, dtype_name: str) -> list[str]:
    """Variants of kernels that the step launched and the warm-up had not."""
    device, dtype = set_up(), getattr(torch, dtype_name)
    if dtype == torch.bfloat16:
        widen_bf16(pytest.MonkeyPatch())  # the process has no other use of the interpreter
    torch.manual_seed(0)
    module = nn.ModuleList([MoELayer(WIDTH, HIDDEN, EXPERTS, {"top_k": 2}, activation="swiglu"), StreamDropout(0.1)])
    layer: Any = module[0]
    placement, groups = uniform_placement(EXPERTS, ranks, min(2, ranks)), [tuple(range(ranks))]
    before = World.single() if ranks == 1 else World.offline(rank, ranks, torch.device("cpu"))
    layer.to(dtype).place(Dispatcher(placement, before, groups), torch.device("cpu"))
    fake = Variants()
    for room in launching_modules():
        room.launch = fake.launch  # type: ignore[assignment]
    with fake, ops.backend("triton"):
        module.to(device)
        state, numbers = torch.get_rng_state(), {name: p.host.clone() for name, p in layer.named_parameters()}
        warm_up(module, [layer], device)
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(p.host, numbers[name]) and p.grad is None for name, p in layer.named_parameters())
        warmed, fake.launched = fake.launched, set()
        if ranks > 1:
            layer.dispatcher = Dispatcher(placement, connect(), groups)
        on_hosts()
        x_TD = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
        y_TD = module[1](layer(x_TD.requires_grad_()))
        ends = [y_TD, layer.auxiliary_loss]
        torch.autograd.grad(ends, [x_TD, *layer.parameters()], [torch.ones_like(end) for end in ends])
        if ranks > 1:
            gradients = torch.zeros(2, 500, dtype=dtype, device=device)
            ops.sum_in_rank_order(gradients, out=gradients[0].clone())
    assert fake.launched
    return sorted(fake.launched - warmed)
