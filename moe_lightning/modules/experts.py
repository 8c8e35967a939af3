"""The experts of one layer as stacked parameters: row s of each belongs to the expert in slot s, or is vacant.

A new placement overwrites rows in place, so neither parameters nor the optimizer are rebuilt. Every expert is
initialised from a generator of its own, keyed by (layer seed, expert, tensor): the weights do not depend on where an
expert lives.

Shapes: M rows sorted by slot, S slots, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from moe_lightning import kernels as ops
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.kernels.bodies import ExpertSort, is_gated
from moe_lightning.values import PositiveInt, validated

Activation = Literal["gelu", "swiglu", "gelu_tanh", "swiglu_clamped"]

VACANT = -1
"""In the place of an expert: a slot that holds none. Its rows are zero, get no tokens and stay zero."""


class ExpertSource(Protocol):
    """Where the first weights of experts come from, one expert at a time."""

    def __call__(self, expert: int) -> Mapping[str, Tensor]:
        """The rows of one expert by the names of the stacked parameters."""


_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextlib.contextmanager
def deferred_experts() -> Iterator[None]:
    """Experts built inside allocate nothing until `Experts.place` tells them their slots."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def experts_are_deferred() -> bool:
    """Whether experts built here would wait for their slots."""
    return _deferred.get()


@validated
class Experts(nn.Module):
    """S experts of two (GELU) or three (SwiGLU) matrices each.

    Args:
        num_experts: experts of the layer over all ranks; without a placement this process holds all of them.
        d_model: width D of the tokens.
        d_expert: hidden width F of an expert.
        activation: "gelu" or "gelu_tanh" (up, down), "swiglu" or "swiglu_clamped" (gate, up, down).
        bias: add biases, as GPT-2 does.
        init_std: standard deviation of the weights; `down_init_std` of the output matrix, which writes into the
            residual stream.

    Attributes:
        source: gives the first weights of the experts that come to live here; None: they are drawn at random.

    Raises:
        ConfigurationError: a size below one or an unknown activation.
    """

    def __init__(
        self,
        num_experts: PositiveInt,
        d_model: PositiveInt,
        d_expert: PositiveInt,
        *,
        activation: Activation = "gelu",
        bias: bool = False,
        init_std: float = 0.02,
        down_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.activation: Activation = activation
        self.slot_experts: tuple[int, ...] = tuple(range(num_experts))
        self.source: ExpertSource | None = None
        self._init_std = init_std
        self._down_init_std = init_std if down_init_std is None else down_init_std
        # Drawn from the global generator, which the ranks seed alike; the strategy hands rank 0's value to all.
        self.init_seed = int(torch.randint(0, 1 << 62, (1,), device="cpu"))
        d_up = 2 * d_expert if is_gated(activation) else d_expert
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
        """Fill every slot from the source, or from its expert's own generator where there is none.

        Raises:
            CheckpointError: the source gives weights of other shapes.
        """
        if self.source is not None:
            self._read(self.source)
            return
        for index, (name, parameter) in enumerate(self.stacked_parameters().items()):
            for slot, expert in enumerate(self.slot_experts):
                if name.startswith("b_") or expert == VACANT:
                    parameter[slot].zero_()
                    continue
                generator = torch.Generator().manual_seed(
                    (self.init_seed + 1_000_003 * expert + 7919 * index) % (1 << 63)
                )
                std = self._down_init_std if name == "w_down" else self._init_std
                values = torch.randn(parameter.shape[1:], generator=generator) * std
                parameter[slot].copy_(values)

    def _read(self, source: ExpertSource) -> None:
        for slot, expert in enumerate(self.slot_experts):
            rows = source(expert) if expert != VACANT else {}
            for name, parameter in self.stacked_parameters().items():
                if not rows:
                    parameter.data[slot] = 0
                    continue
                if rows[name].shape != parameter.shape[1:]:
                    raise CheckpointError(
                        f"the first weights of expert {expert} give {name} the shape {list(rows[name].shape)}, the "
                        f"layer has {list(parameter.shape[1:])}: they belong to another configuration"
                    )
                parameter.data[slot] = rows[name]

    @torch.no_grad()
    def place(
        self, slot_experts: Sequence[int], device: torch.device, whole: Mapping[str, Tensor] | None = None
    ) -> None:
        """Keep only these experts, one a slot or VACANT: deferred ones are initialised, held ones moved into place.

        Args:
            slot_experts: the expert of each slot.
            device: of the parameters from now on.
            whole: stacks [E, ...] of all experts, for those that this process does not hold; empty: not known.

        Raises:
            ConfigurationError: an expert is asked for that this process does not hold.
        """
        wanted = tuple(slot_experts)
        if wanted == self.slot_experts and not self.is_deferred:
            return
        deferred = self.is_deferred
        missing = sorted(set(wanted) - set(self.slot_experts) - {VACANT})
        if missing and not deferred and not whole:
            raise ConfigurationError(
                f"this process holds experts {list(self.slot_experts)} of an earlier placement "
                f"and cannot fill slots for {missing}: build the module anew and load a checkpoint"
            )
        for name, old in self.stacked_parameters().items():
            shape = (len(wanted), *old.shape[1:])
            data = torch.zeros(shape, dtype=old.dtype, device=device)
            for slot, expert in enumerate(wanted) if not deferred else ():
                if expert in missing and whole:
                    data[slot] = whole[name][expert]
                elif expert != VACANT:
                    data[slot] = old.data[self.slot_experts.index(expert)]
            setattr(self, name, nn.Parameter(data, requires_grad=old.requires_grad))
        self.slot_experts = wanted
        if deferred:
            self.reset_parameters()

    def forward(self, x_MD: Tensor, tokens_per_slot_S: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Apply to each row the expert of its slot.

        Args:
            x_MD: rows sorted by slot.
            tokens_per_slot_S: int64 [S], how many rows each slot has.
            weights: stacks to use in the place of the parameters, by the same names: those of visiting experts.

        Returns:
            [M, D] in the dtype that autocast asks for, else that of x.
        """
        dtype = (
            torch.get_autocast_dtype(x_MD.device.type) if torch.is_autocast_enabled(x_MD.device.type) else x_MD.dtype
        )
        stacks = self.stacked_parameters() if weights is None else weights
        if "b_up" not in stacks and ops.fuses_experts(x_MD):
            up_SDH, down_SFD = (stacks[name].to(dtype) for name in ("w_up", "w_down"))
            return ops.expert_mlp(x_MD.to(dtype), up_SDH, down_SFD, tokens_per_slot_S, self.activation)
        hidden_MF = _linear(x_MD.to(dtype), stacks["w_up"], stacks.get("b_up"), tokens_per_slot_S)
        hidden_MF = ops.expert_activation(hidden_MF, self.activation)
        return _linear(hidden_MF, stacks["w_down"], stacks.get("b_down"), tokens_per_slot_S)

    def takes_tokens(self, x_TD: Tensor) -> bool:
        """Whether `of_tokens` saves anything for such rows: without biases, where gathering costs no launch."""
        return self.b_up is None and ops.fuses_experts(x_TD)

    def of_tokens(
        self,
        x_TD: Tensor,
        sort: ExpertSort,
        weights_TK: Tensor,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """[T, D]: of each token the weighted sum over its experts, all of which are here; see `forward`.

        Args:
            x_TD: tokens.
            sort: their assignments by slot.
            weights_TK: of each assignment.
        """
        device = x_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TD.dtype
        stacks = self.stacked_parameters() if weights is None else weights
        up_SDH, down_SFD = (stacks[name].to(dtype) for name in ("w_up", "w_down"))
        return ops.expert_mlp(
            x_TD.to(dtype),
            up_SDH,
            down_SFD,
            sort.tokens_per_expert_E,
            self.activation,
            sort=sort,
            weights_TK=weights_TK,
        )

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, slots={list(self.slot_experts)}, activation={self.activation}"


def _linear(x_MD: Tensor, weight_SDF: Tensor, bias_SF: Tensor | None, counts_S: Tensor) -> Tensor:
    """[M, F]: x @ weight + bias of each row's slot, in the dtype of x."""
    out_MF = ops.grouped_mm(x_MD, weight_SDF.to(x_MD.dtype), counts_S)
    if bias_SF is not None:
        out_MF = _AddSlotBias.apply(out_MF, bias_SF.to(x_MD.dtype), counts_S)  # type: ignore[no-untyped-call]
    return out_MF


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
