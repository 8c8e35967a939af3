"""Experts of one layer as stacked parameters, and dense feed-forward layers.

Row s of each stack belongs to the expert in slot s, or is vacant. A new placement overwrites rows in place, so neither
parameters nor the optimizer are rebuilt. Every expert is initialized from a generator of its own, keyed by (layer seed,
expert, tensor): the weights do not depend on the placement.

Shapes: M rows sorted by slot, S slots, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from moe_lightning import kernels as ops
from moe_lightning.compat import private_torch
from moe_lightning.config import PositiveInt, validated
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.kernels.interface import GATED, ExpertSort
from moe_lightning.moe import nf4
from moe_lightning.parallel.context import World, broadcast_
from moe_lightning.state.tensors import BASE_DIGEST, digest_of, replacement

Activation = Literal["gelu", "swiglu", "gelu_tanh", "swiglu_clamped"]

_MATRICES = ("w_up", "w_down")

VACANT = -1
"""In the place of an expert: a slot that holds none. Its rows are zero, get no tokens and stay zero."""


ExpertSource = Callable[[int], Mapping[str, Tensor]]
"""Returns the first rows of one expert by the names of the stacked parameters."""


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
    """Return True if experts built here wait for their slots."""
    return _deferred.get()


@validated
class Experts(private_torch.Float32Module):
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
        shapes: of the weights of an expert by name, whatever they are kept in, adapters left out.
        adapter: what adapters are multiplied by, see `freeze`; None: there are none.

    Raises:
        ConfigurationError: a size below one or an unknown activation.
    """

    in_float32 = tuple(f"{name}_scales" for name in _MATRICES)

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
        self.adapter: float | None = None
        self._init_std = init_std
        self._down_init_std = init_std if down_init_std is None else down_init_std
        # Drawn from the global generator, which the ranks seed alike; the strategy hands rank 0's value to all.
        self.init_seed = int(torch.randint(0, 1 << 62, (1,), device="cpu"))
        d_up = 2 * d_expert if activation in GATED else d_expert
        device = "meta" if _deferred.get() else None
        self.w_up = nn.Parameter(torch.empty(num_experts, d_model, d_up, device=device))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_expert, d_model, device=device))
        self.b_up = nn.Parameter(torch.empty(num_experts, d_up, device=device)) if bias else None
        self.b_down = nn.Parameter(torch.empty(num_experts, d_model, device=device)) if bias else None
        self.shapes = {name: parameter.shape[1:] for name, parameter in self.stacked_parameters().items()}
        self.reset_parameters()

    @override
    def before_loading(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Allocate all deferred experts; `place` keeps those of the slots."""
        stacks = self.stacked_parameters()
        if self.is_deferred and all(prefix + name in state_dict for name in stacks):
            for name, old in stacks.items():
                setattr(self, name, replacement(old, torch.zeros_like(old, device="cpu")))

    @property
    def num_slots(self) -> int:
        return len(self.slot_experts)

    @property
    def is_deferred(self) -> bool:
        return next(self.parameters()).is_meta

    @property
    def width(self) -> int:
        """D."""
        return self.shapes["w_down"][1]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the trained parameters."""
        return self.get_parameter("w_up" if self.adapter is None else "lora_w_up_a").dtype

    def stacked_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters [S, ...] by name, in a fixed order."""
        return dict(self.named_parameters(recurse=False))

    @property
    def base_names(self) -> frozenset[str]:
        """Names of the frozen stacks; empty without any."""
        if BASE_DIGEST not in private_torch.parameters_of(self):
            return frozenset()
        return frozenset(name for name in self.stacked_parameters() if not name.startswith(("lora_", BASE_DIGEST)))

    @property
    def in_4_bits(self) -> bool:
        """True if the frozen matrices are quantized."""
        return "w_up" not in private_torch.parameters_of(self)

    @torch.no_grad()
    def freeze(self, *, rank: int, scale: float, in_4_bits: bool) -> None:
        """Freeze the weights, and train low-rank products beside them, see `moe.adapters`.

        Args:
            rank: of the products; 0: there are none.
            scale: that they are multiplied by.
            in_4_bits: keep the frozen matrices in four bits.

        Raises:
            ConfigurationError: matrices that cannot be cut into blocks of four-bit numbers.
        """
        self.adapter, base, first = scale if rank else None, self.stacked_parameters(), self.w_down
        for parameter in base.values():
            parameter.requires_grad_(False)
        for name in _MATRICES if in_4_bits else ():
            num_codes, num_scales = nf4.quantised_sizes(self.shapes[name])
            delattr(self, name)
            self.register_parameter(f"{name}_codes", _frozen(first, num_codes, torch.uint8))
            self.register_parameter(f"{name}_scales", _frozen(first, num_scales, torch.float32))
        for name in _MATRICES if rank else ():
            inputs, outputs = self.shapes[name]
            a_SDR, b_SRF = first.new_empty(len(first), inputs, rank), first.new_zeros(len(first), rank, outputs)
            self.register_parameter(f"lora_{name}_a", nn.Parameter(a_SDR))
            self.register_parameter(f"lora_{name}_b", nn.Parameter(b_SRF))
        self.register_parameter(BASE_DIGEST, _frozen(first, 1, torch.int64))
        if not first.is_meta:
            for slot in self._taken_slots():
                self._put_base(slot, {name: parameter.data[slot] for name, parameter in base.items()})
                self._reset_adapters(slot)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill every slot from the source, or from its expert's own generator where there is none; `place` does so for
        deferred experts.

        Raises:
            CheckpointError: the source gives weights of other shapes.
        """
        if self.is_deferred:
            return
        for parameter in self.parameters():
            parameter.zero_()  # what vacant slots keep
        for slot in self._taken_slots():
            self._put_base(slot, self._first_rows(self.slot_experts[slot]))
            self._reset_adapters(slot)

    @torch.no_grad()
    def read_base(self, slots: Iterable[int]) -> None:
        """Fill the frozen rows of slots from the source: their experts came to live here without them.

        Raises:
            CheckpointError: there is no source.
        """
        for slot in slots:
            if self.source is None:
                raise CheckpointError(
                    f"no rank holds the frozen weights of expert {self.slot_experts[slot]} any more, and they were not "
                    "read from a folder: start the same command again, or keep more replicas (min_replicas)"
                )
            self._put_base(slot, self._first_rows(self.slot_experts[slot]))

    def _taken_slots(self) -> list[int]:
        return [slot for slot, expert in enumerate(self.slot_experts) if expert != VACANT]

    def _first_rows(self, expert: int) -> Mapping[str, Tensor]:
        """Return the first weights of an expert, by the names of the base stacks."""
        if self.source is None:
            return {name: self._drawn(expert, index, name) for index, name in enumerate(self.shapes)}
        rows = self.source(expert)
        for name, shape in self.shapes.items():
            if rows[name].shape != shape:
                raise CheckpointError(
                    f"the first weights of expert {expert} give {name} the shape {list(rows[name].shape)}, the "
                    f"layer has {list(shape)}: they belong to another configuration"
                )
        return rows

    def _drawn(self, expert: int, index: int, name: str) -> Tensor:
        if name.startswith("b_"):
            return torch.zeros(self.shapes[name], device="cpu")
        std = self._down_init_std if name == "w_down" else self._init_std
        return torch.randn(self.shapes[name], generator=self._generator(expert, index), device="cpu") * std

    def _generator(self, expert: int, index: int) -> torch.Generator:
        """Return a generator of the CPU, whose draws are the same for every device, and need it as theirs: a model may
        be built where another device is the default.
        """
        return torch.Generator().manual_seed((self.init_seed + 1_000_003 * expert + 7919 * index) % (1 << 63))

    def _put_base(self, slot: int, rows: Mapping[str, Tensor]) -> None:
        stacks = self.stacked_parameters()
        for name in self.shapes:
            if name in stacks:
                stacks[name].data[slot] = rows[name]
            else:
                stacks[f"{name}_codes"].data[slot], stacks[f"{name}_scales"].data[slot] = nf4.quantise(rows[name])
        if self.base_names:
            stacks[BASE_DIGEST].data[slot] = digest_of(stacks[name].data[slot] for name in sorted(self.base_names))

    def _reset_adapters(self, slot: int) -> None:
        """Return the weights of nn.Linear for A, and zeros for B."""
        for index, name in enumerate(_MATRICES if self.adapter is not None else (), start=len(_MATRICES) + 2):
            a_DR = self.get_parameter(f"lora_{name}_a").data[slot]
            uniform = torch.rand(a_DR.shape, generator=self._generator(self.slot_experts[slot], index), device="cpu")
            a_DR.copy_((2.0 * uniform - 1.0) / a_DR.shape[0] ** 0.5)
            self.get_parameter(f"lora_{name}_b").data[slot] = 0

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
            ConfigurationError: an expert is asked for that this process does not hold, a stack has a hook, or deferred
                ones were written to.
        """
        wanted = tuple(slot_experts)
        if wanted == self.slot_experts and not self.is_deferred:
            return
        deferred = self.is_deferred
        missing = sorted(set(wanted) - set(self.slot_experts) - {VACANT})
        if missing and not deferred and not whole:
            raise ConfigurationError(
                f"this process holds experts {list(self.slot_experts)} of an earlier placement "
                f"and cannot fill slots for {missing}: build the module again and load a checkpoint"
            )
        for name, old in self.stacked_parameters().items():
            if deferred and private_torch.version_of(old):
                raise ConfigurationError(
                    f"experts.{name} was set in configure_model, where experts have no memory yet, so that its values "
                    "are lost: set it in __init__, give load_state_dict all stacks of the experts, or skip parameters "
                    "that are on the meta device (is_meta), which init_std draws later"
                )
            if private_torch.has_hooks(old):
                raise ConfigurationError(
                    f"experts.{name} has a hook of its gradient, which is lost where experts are placed on ranks: "
                    "register it in on_fit_start, or change the gradient in on_before_optimizer_step"
                )
            shape = (len(wanted), *old.shape[1:])
            data = torch.zeros(shape, dtype=old.dtype, device=device)
            for slot, expert in enumerate(wanted) if not deferred else ():
                if expert in missing and whole:
                    data[slot] = whole[name][expert]
                elif expert != VACANT:
                    data[slot] = old.data[self.slot_experts.index(expert)]
            setattr(self, name, replacement(old, data))
        self.slot_experts = wanted
        if deferred:
            self.reset_parameters()

    def move(self, slot_experts: Sequence[int], arrived: Container[int]) -> None:
        """Have these experts in the slots, whose rows other code has moved; those that neither were here nor have
        arrived get their frozen rows from the source.

        Raises:
            CheckpointError: there is no source.
        """
        former, self.slot_experts = self.slot_experts, tuple(slot_experts)
        if self.base_names:
            pairs = enumerate(zip(former, self.slot_experts, strict=True))
            self.read_base(slot for slot, (old, e) in pairs if e not in (VACANT, old) and e not in arrived)

    @torch.no_grad()
    def add_slots(self, count: int) -> None:
        """Append vacant slots; parameters stay the same objects, without gradients."""
        for parameter in self.stacked_parameters().values():
            parameter.data = torch.cat([parameter.data, parameter.data.new_zeros(count, *parameter.shape[1:])])
            parameter.grad = None
        self.slot_experts += (VACANT,) * count

    def drop_slots(self) -> None:
        """Have no slot from now on; other code drops the rows."""
        self.slot_experts = ()

    def broadcast_seed(self, world: World) -> None:
        """Draw the first weights from rank 0's seed on every rank; collective."""
        seed = torch.tensor([self.init_seed], device=world.device)
        broadcast_(seed, 0, world)
        self.init_seed = int(seed)

    def filled(self, stacks: Mapping[str, Tensor]) -> Experts:
        """The same experts with these stacks [E, ...] as parameters, in a process that holds all of them."""
        other = copy.copy(self)
        other.slot_experts = tuple(range(self.num_experts))
        parameters = {
            name: old if old is None else replacement(old, stacks[name])
            for name, old in private_torch.parameters_of(self).items()
        }
        private_torch.replace_parameters(other, parameters)
        return other

    def forward(
        self,
        x: Tensor,
        tokens_per_slot_S: Tensor,
        weights: Mapping[str, Tensor] | None = None,
        *,
        sort: ExpertSort | None = None,
        weights_TK: Tensor | None = None,
    ) -> Tensor:
        """Apply to each row the expert of its slot.

        Args:
            x: rows [M, D] sorted by slot; with `sort` the tokens [T, D], all of whose experts are here.
            tokens_per_slot_S: int64 [S], how many rows each slot has.
            weights: stacks to use in the place of the parameters, by the same names: those of visiting experts.
            sort: assignments of the tokens by slot, where `takes_tokens` says so.
            weights_TK: of each assignment, with `sort`.

        Returns:
            [M, D], or of each token the weighted sum over its experts, [T, D]; in the dtype that autocast asks for, or
            that of x.
        """
        stacks, x = self.stacked_parameters() if weights is None else weights, x.to(computed_in(x))
        if self.takes_tokens(x):
            up_SDH, down_SFD = (stacks[name].to(x.dtype) for name in ("w_up", "w_down"))
            return ops.expert_mlp(
                x, up_SDH, down_SFD, tokens_per_slot_S, self.activation, sort=sort, weights_TK=weights_TK
            )
        hidden_MF = self._linear(x, "up", stacks, tokens_per_slot_S)
        hidden_MF = ops.expert_activation(hidden_MF, self.activation)
        return self._linear(hidden_MF, "down", stacks, tokens_per_slot_S)

    def _linear(self, x_MD: Tensor, way: str, stacks: Mapping[str, Tensor], counts_S: Tensor) -> Tensor:
        """[M, F]: x @ weight + bias of each row's slot, in the dtype of x."""
        name, bias_SF = f"w_{way}", stacks.get(f"b_{way}")
        if name in stacks:
            out_MF = ops.grouped_mm(x_MD, stacks[name].to(x_MD.dtype), counts_S)
        else:
            codes, scales = stacks[f"{name}_codes"], stacks[f"{name}_scales"]
            out_MF = nf4.grouped_mm(x_MD, codes, scales, self.shapes[name][1], counts_S)
        if bias_SF is not None:
            out_MF = _AddSlotBias.apply(out_MF, bias_SF.to(x_MD.dtype), counts_S)  # type: ignore[no-untyped-call]
        if self.adapter is not None:
            a_SDR, b_SRF = (stacks[f"lora_{name}_{part}"].to(x_MD.dtype) for part in "ab")
            low_MR = ops.grouped_mm(x_MD, a_SDR, counts_S)
            out_MF = torch.add(out_MF, ops.grouped_mm(low_MR, b_SRF, counts_S), alpha=self.adapter)
        return out_MF

    def takes_tokens(self, x_TD: Tensor) -> bool:
        """Return True if such rows are computed fused, without biases and adapters, which gathers those of tokens for
        nothing.
        """
        return self.b_up is None and self.adapter is None and ops.fuses_experts(x_TD)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, slots={list(self.slot_experts)}, activation={self.activation}"


def computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype that experts compute these rows in: what autocast asks for, else theirs."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _frozen(like_SX: Tensor, size: int, dtype: torch.dtype) -> nn.Parameter:
    """Zeros [S, size]."""
    return nn.Parameter(like_SX.new_zeros(len(like_SX), size, dtype=dtype), requires_grad=False)


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
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        sums = torch.segment_reduce(wide, "sum", lengths=counts_S, axis=0, unsafe=True)
        return grad, sums.to(grad.dtype), None


class FeedForward(nn.Module):
    """[..., D] -> [..., D] through a hidden layer: up, activation, down; gate and up are one matrix.

    Args:
        d_model: width D.
        d_hidden: hidden width.
        activation: "gelu" or "gelu_tanh" (up, down), "swiglu" or "swiglu_clamped" (gate, up, down).
        bias: add biases.
        init_std: standard deviation of the weights; `down_init_std` of the output matrix (default: the same).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: Activation,
        bias: bool,
        *,
        init_std: float = 0.02,
        down_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(d_model, 2 * d_hidden if activation in GATED else d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)
        for linear, std in ((self.up, init_std), (self.down, init_std if down_init_std is None else down_init_std)):
            nn.init.normal_(linear.weight, std=std)
            if bias:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.activation == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)
            active = F.silu(gate) * up
        elif self.activation == "swiglu_clamped":
            flat = ops.expert_activation(hidden.flatten(0, -2), self.activation)
            active = flat.view(*hidden.shape[:-1], flat.shape[-1])
        else:
            active = F.gelu(hidden, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.down(active)  # type: ignore[no-any-return]
