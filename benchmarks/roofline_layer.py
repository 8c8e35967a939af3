"""The kernels of one MoE layer on one GPU, forward and backward, and what each costs by `roofline`. All is modelled.

Shapes: T tokens, K choices, E experts, M = T*K rows, D model width, F expert width, H = 2F (SwiGLU).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from benchmarks.roofline_model import (
    Device,
    Matmul,
    matmul_cost,
    rows_cost,
    tile_for,
)
from benchmarks.roofline_router import (
    HALF,
    INDEX,
    SINGLE,
    Kernel,
    LayerShape,
    router_backward,
    router_forward,
)

_ACTIVATION_STEPS, _GRADIENT_STEPS = 12, 34
"""Instructions for each sum in the machine code of the fused epilogues for sm_90, beside those of a plain one."""

_SORT_TILE = 8192
"""Elements of a block of the counting sort, see `kernels.triton.routing`."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """How the kernels of a layer are made.

    Attributes:
        gathers_in_load: the up projection reads tokens by index; else a permute writes them in order first.
        fuses_activation: into the up projection's epilogue, and its gradient into that of the down projection's.
        is_persistent: matmuls walk over tiles with the copy engine ahead of them, and behind them where they only store
            their sums.
        fuses_router: products on the tensor cores in three terms, with scores and choice behind them; else in fp32, and
            each of the rest a kernel.
        casts_weights: parameters are fp32 and are rounded to bf16 in every forward.
        launches: small kernels of routing and bookkeeping, (forward, backward), beside those that are named.
    """

    gathers_in_load: bool = False
    fuses_activation: bool = False
    is_persistent: bool = False
    fuses_router: bool = False
    casts_weights: bool = False
    launches: tuple[int, int] = (30, 30)


DESIGNS = {
    "separate": Design(),
    "rows": Design(fuses_activation=True, is_persistent=True, fuses_router=True, launches=(13, 8)),
    "fused": Design(
        gathers_in_load=True, fuses_activation=True, is_persistent=True, fuses_router=True, launches=(7, 5)
    ),
}
"""Kernels of their own for every operation; those of several ranks, whose rows arrive by an exchange (which is left
out); and those of one rank.
"""


def forward_kernels(shape: LayerShape, design: Design, device: Device) -> list[Kernel]:
    """In the order of their launches."""
    tokens, rows, width, hidden = shape.tokens, shape.rows, shape.d_model, shape.d_expert
    scores = tokens * shape.experts * SINGLE
    kernels = [
        *router_forward(shape, device, is_fused=design.fuses_router),
        _sort(shape, device),
        Kernel(name="other small kernels", cost=rows_cost(scores, device, design.launches[0])),
    ]
    if design.casts_weights:
        weights = 3.0 * shape.experts * width * hidden
        kernels.append(Kernel(name="cast of weights", cost=rows_cost(weights * (SINGLE + HALF), device, launches=2)))
    if not design.gathers_in_load:
        kernels.append(Kernel(name="permute", cost=rows_cost((tokens + rows) * width * HALF, device)))
    kept, steps = (1.5, _ACTIVATION_STEPS) if design.fuses_activation else (1.0, 0)  # h, and its activation
    kernels.append(
        _matmul(
            "up projection", shape, design, device, (rows, 2 * hidden, width),
            gathers=True, steps=steps, output_factor=kept,
        )
    )  # fmt: skip
    if not design.fuses_activation:
        kernels.append(Kernel(name="activation", cost=rows_cost(3 * rows * hidden * HALF, device)))
    kernels.append(_matmul("down projection", shape, design, device, (rows, width, hidden)))
    combined = (rows + tokens) * width * HALF + rows * (INDEX + SINGLE)
    return [*kernels, Kernel(name="combine", cost=rows_cost(combined, device))]


def backward_kernels(shape: LayerShape, design: Design, device: Device) -> list[Kernel]:
    """In the order of their launches."""
    tokens, rows, width, hidden = shape.tokens, shape.rows, shape.d_model, shape.d_expert
    kernels = []
    if not design.gathers_in_load:  # else rows are gathered in the loads, and weighed in the epilogue
        spread = 3 * rows * width * HALF + rows * (INDEX + SINGLE)
        kernels.append(Kernel(name="spread of the gradient", cost=rows_cost(spread, device)))
    # The epilogue reads h, and stores its gradient and the activation for the weights' gradient.
    read, steps, kept = (2.0, _GRADIENT_STEPS, 3.0) if design.fuses_activation else (0.0, 0, 1.0)
    kernels.append(
        _matmul(
            "gradient of down's input", shape, design, device, (rows, hidden, width),
            gathers=True, input_factor=read, steps=steps, output_factor=kept,
        )
    )  # fmt: skip
    if not design.fuses_activation:
        kernels.append(Kernel(name="gradient of activation", cost=rows_cost(5 * rows * hidden * HALF, device)))
    kernels += [
        _matmul("gradient of down's weights", shape, design, device, (hidden, width, rows), is_wgrad=True),
        _matmul("gradient of up's input", shape, design, device, (rows, width, 2 * hidden)),
        _matmul("gradient of up's weights", shape, design, device, (width, 2 * hidden, rows), is_wgrad=True,
                gathers=True),
        Kernel(name="sum over choices", cost=rows_cost((rows + tokens) * width * HALF, device)),
    ]  # fmt: skip
    if design.casts_weights:
        weights = 3.0 * shape.experts * width * hidden
        kernels.append(Kernel(name="cast of gradients", cost=rows_cost(weights * (SINGLE + HALF), device, launches=2)))
    scores = tokens * shape.experts * SINGLE
    return [
        *kernels,
        *router_backward(shape, device, is_fused=design.fuses_router),
        Kernel(
            name="other small kernels",
            cost=rows_cost((2 if design.fuses_router else 5) * scores, device, design.launches[1]),
        ),
    ]


def total_seconds(kernels: list[Kernel]) -> float:
    """One after the other, as they lie in one stream."""
    return sum(kernel.cost.seconds for kernel in kernels)


def share_of_peak(kernels: list[Kernel], device: Device) -> float:
    """The experts' flops over what the device's data sheet allows in the time of all kernels."""
    return sum(kernel.flops for kernel in kernels) / total_seconds(kernels) / device.flops


def _matmul(
    name: str,
    shape: LayerShape,
    design: Design,
    device: Device,
    sizes: tuple[int, int, int],
    *,
    is_wgrad: bool = False,
    gathers: bool = False,
    input_factor: float = 0.0,
    steps: float = 0.0,
    output_factor: float = 1.0,
) -> Kernel:
    rows, width, inner = sizes
    matmul = Matmul(
        rows=rows,
        width=width,
        inner=inner,
        groups=shape.experts,
        tile=tile_for(device, rows if is_wgrad else rows / shape.experts),
        is_wgrad=is_wgrad,
        is_persistent=design.is_persistent,
        gathers=gathers and design.gathers_in_load,
        stores_ahead=design.is_persistent and output_factor == 1.0,
        input_factor=input_factor,
        steps=steps,
        output_factor=output_factor,
    )
    return Kernel(name=name, cost=matmul_cost(matmul, device), flops=matmul.flops)


def _sort(shape: LayerShape, device: Device) -> Kernel:
    blocks = ceil(shape.rows / max(16, _SORT_TILE // shape.experts))
    moved = 6.0 * shape.rows * INDEX + 6.0 * blocks * shape.experts * INDEX
    return Kernel(name="sort", cost=rows_cost(moved, device, launches=3))
