"""What a layer's router costs on a GPU by `roofline`, in fp32 or in three terms of bf16. All is modelled.

Shapes: T tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from benchmarks.roofline_model import (
    FP32_SHARE,
    Cost,
    Device,
    Matmul,
    Tile,
    fp32_matmul_cost,
    matmul_cost,
    rows_cost,
)

HALF, SINGLE, INDEX = 2, 4, 8
"""Bytes of bf16, fp32 and int64."""

_TERMS = 3
_MOST_EXPERTS = 256
_PIECES = 128
"""See `kernels.triton.router`."""

_CHOICE_STEPS = 6
"""Instructions for each score and choice: a maximum, a comparison and a minimum of ids, and taking the winner out."""

_GRADIENT_STEPS = 3
"""Instructions for each score and choice on the way back: a comparison of ids, a selection and a sum."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a layer of SwiGLU experts."""

    tokens: int
    d_model: int
    d_expert: int
    experts: int
    top_k: int

    @property
    def rows(self) -> int:
        """M: assignments, none dropped."""
        return self.tokens * self.top_k

    @property
    def forward_flops(self) -> float:
        """Of the experts; the router counts as cost alone."""
        return 6.0 * self.rows * self.d_model * self.d_expert


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A named kernel of the layer; flops count towards the experts' rate."""

    name: str
    cost: Cost
    flops: float = 0.0


def router_forward(shape: LayerShape, device: Device, *, is_fused: bool) -> list[Kernel]:
    """From rows to logits, scores, ids and weights."""
    scores = shape.tokens * shape.experts
    if not is_fused or shape.experts > _MOST_EXPERTS:
        return [
            Kernel(name="router, fp32", cost=_in_fp32(shape, device)),
            Kernel(name="scores and top-k", cost=rows_cost(6 * scores * SINGLE, device, launches=6)),
        ]
    # Logits and scores are kept, in fp32: four times the bytes of one result in bf16.
    product = matmul_cost(
        Matmul(
            rows=shape.tokens, width=shape.experts, inner=shape.d_model, tile=_tile(shape, device), terms=_TERMS,
            output_factor=2 * SINGLE / HALF,
        ),
        device,
    )  # fmt: skip
    weights = shape.experts * shape.d_model * (SINGLE + _TERMS * HALF)
    return [
        Kernel(name="router's weights in terms", cost=rows_cost(weights, device)),
        Kernel(name="router and choice", cost=_with_choice(product, shape, device, _CHOICE_STEPS)),
    ]


def router_backward(shape: LayerShape, device: Device, *, is_fused: bool) -> list[Kernel]:
    """Gradients of rows, added to those of the experts, and of weights."""
    if not is_fused or shape.experts > _MOST_EXPERTS:
        added = rows_cost(3.0 * shape.tokens * shape.d_model * HALF, device)
        return [
            Kernel(name="router, fp32, backward", cost=_in_fp32(shape, device, products=2)),
            Kernel(name="sum of the rows' gradients", cost=added),
        ]
    tile, tokens, width, experts = _tile(shape, device), shape.tokens, shape.d_model, shape.experts
    columns = tile.m
    held = Tile(m=tile.m, n=columns, k=tile.n)
    if tile.n > 128:
        held = Tile(m=64, n=64 if device.shared > 208 << 10 else 16, k=tile.n)
    rows = Matmul(
        rows=tokens, width=width, inner=experts, tile=held, terms=_TERMS, is_persistent=True,
        tiles_of_program=ceil(width / held.n),
        extra_bytes=tokens * experts * (2.0 * SINGLE + _TERMS * HALF), input_factor=1.0, reads_ahead=True,
    )  # fmt: skip
    pieces = max(1, _PIECES // ceil(width / columns))
    weights = Matmul(
        rows=width, width=experts, inner=tokens, groups=pieces, tile=Tile(m=columns, n=tile.n, k=tile.k), terms=_TERMS,
        is_wgrad=True, output_factor=SINGLE / HALF,
    )  # fmt: skip
    grad_x = _with_choice(matmul_cost(rows, device), shape, device, _GRADIENT_STEPS)
    summed = (pieces + 1) * experts * width * SINGLE
    return [
        Kernel(name="gradient of router's input", cost=grad_x),
        Kernel(name="gradient of router's weights", cost=matmul_cost(weights, device)),
        Kernel(name="sum of its pieces", cost=rows_cost(summed, device)),
    ]


def _tile(shape: LayerShape, device: Device) -> Tile:
    """What `kernels.triton.router` takes: all experts are columns of one tile."""
    experts = max(16, 1 << (shape.experts - 1).bit_length())
    is_large = device.shared > 128 << 10
    return Tile(m=128 if is_large else 64, n=experts, k=64 if is_large and experts <= 128 else 32)


def _with_choice(product: Cost, shape: LayerShape, device: Device, steps: int) -> Cost:
    """With so many instructions for each score and choice beside a product."""
    seconds = steps * shape.tokens * shape.experts * shape.top_k / (FP32_SHARE * device.fp32_flops / 2)
    return Cost(seconds=product.seconds + seconds, bound=product.bound)


def _in_fp32(shape: LayerShape, device: Device, products: int = 1) -> Cost:
    """The rows are widened to fp32 first, and their gradient is narrowed."""
    flops = 2.0 * products * shape.tokens * shape.d_model * shape.experts
    widened = shape.tokens * shape.d_model * (HALF + SINGLE)
    product = fp32_matmul_cost(flops, products * shape.tokens * shape.d_model * SINGLE, device)
    return Cost(seconds=product.seconds + rows_cost(widened, device).seconds, bound=product.bound)
