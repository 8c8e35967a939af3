"""Grouped products, beside a loop over experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.silent.case import Case, Check, Fault, Limits
from benchmarks.silent.faults import replace
from moe_lightning import kernels as ops
from moe_lightning.kernels import operations, torch_grouped

KIND = "grouped products"
BEYOND = "nothing is trained"
_EMPTY = [5, 0, 7, 0]

Pair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


def _products(
    tokens: Sequence[int],
    rows: int,
    *,
    expands: bool = False,
    transposes: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Pair:
    """The product and its gradients by all implementations of this machine, and by a loop in float64."""
    generator = torch.Generator().manual_seed(0)
    x_MD = torch.randn(rows, 16, generator=generator)
    weight_SDF = torch.randn(len(tokens), 16, 8, generator=generator)
    weighs_MF = torch.randn(rows, 8, generator=generator)
    if expands:
        weighs_MF = torch.ones(1, 1).expand(rows, 8)
    if transposes:
        weighs_MF = weighs_MF.T.contiguous().T
    found: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    loop_x, loop_w = (t.to(dtype).double().requires_grad_() for t in (x_MD, weight_SDF))
    y_MF, start = torch.zeros(rows, 8, dtype=torch.float64), 0
    for slot, count in enumerate(tokens):
        y_MF = torch.cat([y_MF[:start], loop_x[start : start + count] @ loop_w[slot], y_MF[start + count :]])
        start += count
    y_MF.backward(weighs_MF.double())  # type: ignore[no-untyped-call]
    by_loop = {"product": y_MF.detach(), "gradient of rows": loop_x.grad, "gradient of weights": loop_w.grad}
    for name in ("torch", "grouped", "reference"):
        for _ in range(3):
            torch.full((4096,), torch.nan)  # memory that is freed is not zero
        with ops.backend(name):
            x, w = (t.to(dtype).requires_grad_() for t in (x_MD.clone(), weight_SDF.clone()))
            y = ops.grouped_mm(x, w, torch.tensor(tokens))
            y.backward(weighs_MF.to(dtype))  # type: ignore[no-untyped-call]
        ours = {"product": y.detach(), "gradient of rows": x.grad, "gradient of weights": w.grad}
        found |= {f"{key} by {name}": value.float() for key, value in ours.items() if value is not None}
        expected |= {f"{key} by {name}": value.float() for key, value in by_loop.items() if value is not None}
    return found, expected


def _dirty_tail() -> None:
    def around(own: Any, x_MD: Tensor, weight: Tensor, tokens_S: Tensor, *rest: Any) -> Tensor:
        y: Tensor = own(x_MD, weight, tokens_S, *rest)
        y[int(tokens_S.sum()) :] = torch.nan
        return y

    replace(torch_grouped, "grouped_mm", around)


def _dirty_weights(value: float) -> Fault:
    def process() -> None:
        def around(own: Any, x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor, *rest: Any) -> Tensor:
            gradient: Tensor = own(x_MD, grad_MF, tokens_S, *rest)
            gradient[tokens_S == 0] = value
            return gradient

        replace(torch_grouped, "grouped_wgrad", around)

    return Fault(process=process)


def _nothing_written() -> None:
    def around(own: Any, x_MD: Tensor, weight: Tensor, tokens_S: Tensor, *rest: Any) -> Tensor:
        y: Tensor = own(x_MD, weight, tokens_S, *rest)
        return y if int(tokens_S.sum()) else torch.full_like(y, torch.nan)

    replace(torch_grouped, "grouped_mm", around)


def _in_order_of_memory() -> None:
    """Read a transposed gradient in the order of its memory."""

    def around(own: Any, ctx: Any, grad_MF: Tensor) -> Any:
        return own(ctx, grad_MF.T.contiguous().view(grad_MF.shape))

    replace(operations._GroupedMM, "backward", around)


def _flat_gradient() -> None:
    """Read an expanded gradient as if its numbers lay side by side."""

    def around(own: Any, x_MD: Tensor, grad_MF: Tensor, *rest: Any) -> Tensor:
        return own(x_MD, grad_MF * (torch.arange(grad_MF.shape[1]) == 0), *rest)  # type: ignore[no-any-return]

    replace(torch_grouped, "grouped_wgrad", around)


CASES = (
    Case(
        id="rows-behind-the-last-expert",
        report="huggingface/transformers#45621",
        symptom="rows behind those of the last expert are memory that was never written, and end as NaN in gradients",
        subject=Check(function=lambda rank: _products([3, 4, 2, 1], 15)),
        fault=Fault(process=_dirty_tail),
    ),
    Case(
        id="padded-rows-in-bfloat16",
        report="AMD-AGI/Primus-Turbo#397",
        symptom="rows added for alignment are never written by the kernel; gradients are NaN from step 1, now and then",
        subject=Check(function=lambda rank: _products([3, 0, 2, 3], 16, dtype=torch.bfloat16)),
        fault=Fault(process=_dirty_tail),
        limits=Limits(gradient=0.02),
    ),
    Case(
        id="weights-of-empty-experts",
        report="meta-pytorch/MSLK#158",
        symptom="the gradient of an expert without rows is whatever the memory held before",
        subject=Check(function=lambda rank: _products(_EMPTY, 12)),
        fault=_dirty_weights(torch.nan),
    ),
    Case(
        id="gradient-of-empty-experts",
        report="pytorch/pytorch#172439",
        symptom="groups of size zero get gradients that are large, and not zero, on one kind of GPU",
        subject=Check(function=lambda rank: _products([0, 6, 0, 0], 8)),
        fault=_dirty_weights(0.7),
    ),
    Case(
        id="no-rows-at-all",
        report="tgale96/grouped_gemm#36",
        symptom="an output for groups without rows is allocated and never written",
        subject=Check(function=lambda rank: _products([0, 0, 0, 0], 6)),
        fault=Fault(process=_nothing_written),
    ),
    Case(
        id="expanded-gradients",
        report="pytorch/torchtitan#1265",
        symptom="the gradient of a sum is one number with strides of zero, which the backward pass does not read right",
        subject=Check(function=lambda rank: _products([3, 4, 2, 1], 10, expands=True)),
        fault=Fault(process=_flat_gradient),
    ),
    Case(
        id="transposed-gradients",
        report="Dao-AILab/flash-attention#355",
        symptom="a gradient whose memory is transposed is read as if it was not",
        subject=Check(function=lambda rank: _products([3, 4, 2, 1], 10, transposes=True)),
        fault=Fault(process=_in_order_of_memory),
    ),
)
