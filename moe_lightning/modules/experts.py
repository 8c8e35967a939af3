"""The experts of one layer as stacked parameters: row s of each belongs to the expert in slot s.

A new placement overwrites rows in place, so neither parameters nor the optimizer are rebuilt. Every expert is
initialised from a generator of
its own, keyed by (layer seed, expert, tensor): the weights do not depend on where an expert lives.

Shapes: M rows sorted by slot, S slots, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError

Activation = Literal["gelu", "swiglu"]

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextlib.contextmanager
def deferred_experts() -> Iterator[None]:
    """Experts built inside allocate nothing until `Experts.place` tells them their slots."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


class Experts(nn.Module):
    """S experts of two (GELU) or three (SwiGLU) matrices each.

    Args:
        num_experts: experts of the layer over all ranks; without a placement this process holds all of them.
        d_model: width D of the tokens.
        d_expert: hidden width F of an expert.
        activation: "gelu" (up, down) or "swiglu" (gate, up, down).
        bias: add biases, as GPT-2 does.
        init_std: standard deviation of the weights; `down_init_std` of the output matrix, which writes into the
            residual stream.

    Raises:
        ConfigurationError: a size below one or an unknown activation.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_expert: int,
        *,
        activation: Activation = "gelu",
        bias: bool = False,
        init_std: float = 0.02,
        down_init_std: float | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_experts", num_experts), ("d_model", d_model), ("d_expert", d_expert)):
            if value < 1:
                raise ConfigurationError(f"{name}={value} must be at least 1")
        if activation not in ("gelu", "swiglu"):
            raise ConfigurationError(f"activation={activation!r} is not known: use 'gelu' or 'swiglu'")
        self.num_experts = num_experts
        self.activation: Activation = activation
        self.slot_experts: tuple[int, ...] = tuple(range(num_experts))
        self._init_std = init_std
        self._down_init_std = init_std if down_init_std is None else down_init_std
        # Drawn from the global generator, which the ranks seed alike; the strategy hands rank 0's value to all.
        self.init_seed = int(torch.randint(0, 1 << 62, (1,), device="cpu"))
        d_up = 2 * d_expert if activation == "swiglu" else d_expert
        device = "meta" if _deferred.get() else None
        self.w_up = nn.Parameter(torch.empty(num_experts, d_model, d_up, device=device))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_expert, d_model, device=device))
        self.b_up = nn.Parameter(torch.empty(num_experts, d_up, device=device)) if bias else None
        self.b_down = nn.Parameter(torch.empty(num_experts, d_model, device=device)) if bias else None
        if not self.is_deferred:
            self.reset_parameters()

    @property
    def num_slots(self) -> int:
        return len(self.slot_experts)

    @property
    def is_deferred(self) -> bool:
        return self.w_up.is_meta

    def stacked_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters [S, ...] by name, in a fixed order."""
        return dict(self.named_parameters(recurse=False))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every slot from its expert's own generator."""
        for index, (name, parameter) in enumerate(self.stacked_parameters().items()):
            for slot, expert in enumerate(self.slot_experts):
                if name.startswith("b_"):
                    parameter[slot].zero_()
                    continue
                generator = torch.Generator().manual_seed(
                    (self.init_seed + 1_000_003 * expert + 7919 * index) % (1 << 63)
                )
                std = self._down_init_std if name == "w_down" else self._init_std
                values = torch.randn(parameter.shape[1:], generator=generator) * std
                parameter[slot].copy_(values)

    @torch.no_grad()
    def place(self, slot_experts: Sequence[int], device: torch.device) -> None:
        """Keep only these experts, one a slot: deferred ones are initialised, held ones are moved into their slots.

        Raises:
            ConfigurationError: an expert is asked for that this process does not hold.
        """
        wanted = tuple(slot_experts)
        if wanted == self.slot_experts and not self.is_deferred:
            return
        deferred = self.is_deferred
        missing = sorted(set(wanted) - set(self.slot_experts))
        if missing and not deferred:
            raise ConfigurationError(
                f"this process holds experts {list(self.slot_experts)} of an earlier placement "
                f"and cannot fill slots for {missing}: build the module anew and load a checkpoint"
            )
        rows = [self.slot_experts.index(expert) for expert in wanted] if not deferred else []
        for name, old in self.stacked_parameters().items():
            shape = (len(wanted), *old.shape[1:])
            data = torch.empty(shape, dtype=old.dtype, device=device) if deferred else old.data[rows].to(device)
            setattr(self, name, nn.Parameter(data, requires_grad=old.requires_grad))
        self.slot_experts = wanted
        if deferred:
            self.reset_parameters()

    def forward(self, x_MD: Tensor, tokens_per_slot_S: Tensor) -> Tensor:
        """Apply to each row the expert of its slot.

        Args:
            x_MD: rows sorted by slot.
            tokens_per_slot_S: int64 [S], how many rows each slot has.

        Returns:
            [M, D] in the dtype that autocast asks for, else that of x.
        """
        dtype = (
            torch.get_autocast_dtype(x_MD.device.type) if torch.is_autocast_enabled(x_MD.device.type) else x_MD.dtype
        )
        hidden_MF = ops.grouped_mm(x_MD.to(dtype), self.w_up.to(dtype), tokens_per_slot_S)
        if self.b_up is not None:
            hidden_MF = _AddSlotBias.apply(hidden_MF, self.b_up.to(dtype), tokens_per_slot_S)  # type: ignore[no-untyped-call]
        hidden_MF = ops.expert_activation(hidden_MF, self.activation)
        out_MD = ops.grouped_mm(hidden_MF, self.w_down.to(dtype), tokens_per_slot_S)
        if self.b_down is not None:
            out_MD = _AddSlotBias.apply(out_MD, self.b_down.to(dtype), tokens_per_slot_S)  # type: ignore[no-untyped-call]
        return out_MD

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, slots={list(self.slot_experts)}, activation={self.activation}"


class _AddSlotBias(torch.autograd.Function):
    """x[m] + bias[slot of m]; the gradient of a bias is a segment sum, which needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, bias_SD: Tensor, counts_S: Tensor) -> Tensor:
        ctx.save_for_backward(counts_S)
        return x_MD + bias_SD.repeat_interleave(counts_S, dim=0, output_size=x_MD.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (counts_S,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        # unsafe: the check of the lengths itself fails where a rank has no slot.
        sums = torch.segment_reduce(grad.float(), "sum", lengths=counts_S, axis=0, unsafe=True)
        return grad, sums.to(grad.dtype), None
