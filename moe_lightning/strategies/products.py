"""Matrix products of a step, and of all their elements the one that rounding explains least.

For a vector r of random signs C r = A (B r) holds for a product C = A B, up to rounding: three products of a matrix and
a vector screen one of two matrices, so all of a step are screened, in forward and backward passes. A wrong element of C
shows in its row unless it is smaller than the rounding of that row (R. Freivalds, 1977). The least explained element is
kept with its row of A and column of B, from which any rank computes it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_lightning.compat import private_torch

_SINGLE = 2.0**-24
"""Relative rounding of float32, in which products of narrower numbers are summed, too."""

_FASTER = {"tf32": 2.0**-11, "bf16": 2.0**-8}
"""Relative rounding of float32 operands where torch may use others for speed."""

_ALLOWED = 4.0
"""Expected roundings from which on a difference is an error."""

_SMALL, _TINY = 1e-6, 1e-20
"""Rows whose squares may underflow: as a part of the largest one, and as they are."""

_BLOCK = 1 << 22
"""Numbers of a matrix in half precision that are copied to float32 at once."""


@dataclass(frozen=True, kw_only=True)
class Element:
    """An element of a product.

    Attributes:
        place: product in words.
        value: as computed in the step.
        again: the same, computed from `terms` by the same rank.
        terms: float64 [2, K]: the row and the column of which it is the scalar product.
        unit: relative rounding of operands and result.
        most: largest number of the result's dtype.
    """

    place: str = "nothing"
    value: float = 0.0
    again: float = 0.0
    terms: Tensor
    unit: float = _SINGLE
    most: float = math.inf

    @property
    def header(self) -> dict[str, Any]:
        """Plain values: all but the terms."""
        return {name: value for name, value in vars(self).items() if name != "terms"}

    @property
    def computed(self) -> float:
        """The scalar product, in float64 on the host."""
        return float((self.terms[0] * self.terms[1]).sum())

    @property
    def rounding(self) -> float:
        """Expected rounding of the value; not finite where an operand is not."""
        products = self.terms[0] * self.terms[1]
        return (self.unit + _SINGLE * math.sqrt(len(products))) * float(products.norm() + products.sum().abs())

    def differ(self, one: float, other: float) -> bool:
        """Return True if rounding does not explain that two results are not the same."""
        if not math.isfinite(self.rounding) or min(abs(one), abs(other)) > self.most / 2:  # one that overflows
            return False
        return not abs(one - other) <= _ALLOWED * self.rounding


class _Product(NamedTuple):
    """c = alpha * a @ b + beta * added: [m, k], [k, n], [m, n], and [m, n] or [1, n]; or several, with one dimension
    more.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    added: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def unit(self) -> float:
        """Relative rounding of operands and result."""
        backend = torch.backends.cuda if self.a.device.type == "cuda" else torch.backends.mkldnn
        is_faster = self.a.dtype is torch.float32
        faster = _FASTER.get(backend.matmul.fp32_precision, 0.0) if is_faster else 0.0
        return max(torch.finfo(self.c.dtype).eps / 2, faster)


class Products(private_torch.OperationMode):
    """Screens the matrix products that are computed inside of it.

    Args:
        seed: of random signs.

    Attributes:
        worst: the element that rounding explains least.
        seconds: that screening took.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = torch.Generator().manual_seed(seed)
        self._worst_ratio = -1.0
        self.worst = Element(terms=torch.zeros(2, 0, dtype=torch.float64))
        self.seconds = 0.0

    def during(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute, and screen what was computed."""
        result = func(*args, **kwargs)
        if (products_of := _PRODUCTS.get(func)) is not None and result.is_floating_point() and result.numel():
            if result.is_cuda and torch.cuda.is_current_stream_capturing():  # the host cannot wait for numbers
                return result
            began = time.perf_counter()
            with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                for product in products_of(args, kwargs, result):
                    self._screen(product)
            self.seconds += time.perf_counter() - began
        return result

    def _screen(self, product: _Product) -> None:
        a, b, c, added, alpha, beta = product
        if not a.numel():
            return
        wide = torch.promote_types(c.dtype, torch.float32)
        signs = torch.randint(0, 2, c.shape[-1:], generator=self._draws).to(c.device, wide).mul_(2).sub_(1)
        projected_b, norms_b = _projected(b, signs)
        projected_a, norms_a = _projected(a, projected_b)
        projected_c, norms_c = _projected(c, signs)
        expected = alpha * projected_a
        if added is not None:
            expected = expected + beta * _projected(added, signs)[0]
        bound = norms_a * norms_b.norm(dim=-1, keepdim=True)
        rounding = product.unit * norms_c + _SINGLE * (bound + _SMALL * bound.max())
        unexplained = (projected_c - expected).abs() / rounding.clamp_min(_TINY)
        unexplained = unexplained.nan_to_num(nan=math.inf).where(norms_c.isfinite(), math.inf)  # squares overflow
        unexplained = unexplained.where(bound.isfinite() & expected.isfinite(), 0.0).flatten()
        ratio, row = (float(found) for found in unexplained.max(dim=0))
        if ratio > self._worst_ratio:
            self._worst_ratio = ratio
            self.worst = _worst_of(product, *divmod(int(row), c.shape[-2]), wide)


def _worst_of(product: _Product, number: int, row: int, wide: torch.dtype) -> Element:
    """Return the element that rounding explains least, of a row of one of several products."""
    a, b, c, added, alpha, beta = product
    if c.ndim == 3:
        a, b, c = a[number], b[number], c[number]
    again = alpha * _projected(b.t(), a[row].to(wide))[0]
    if added is not None:
        own = beta * added[row % len(added)]
        again = again + own
    column = int((c[row] - again).abs().nan_to_num(nan=math.inf).argmax())
    left, right = alpha * a[row].cpu().double(), b[:, column].cpu().double()
    if added is not None:
        left, right = torch.cat([left, own[column].cpu().double()[None]]), torch.cat([right, right.new_ones(1)])
    element = Element(
        place=f"a product of {list(a.shape)} and {list(b.shape)}",
        value=float(c[row, column]),
        terms=torch.stack([left, right]),
        unit=product.unit,
        most=torch.finfo(c.dtype).max,
    )
    return replace(element, again=element.computed)


def _projected(matrix: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrix @ vector and the norm of each row, in the vector's precision."""
    if matrix.dtype is vector.dtype:
        projected = matrix @ vector if vector.ndim == 1 else torch.bmm(matrix, vector.unsqueeze(2)).squeeze(2)
        return projected, torch.linalg.vector_norm(matrix, dim=-1)
    blocks = matrix.split(max(1, _BLOCK // matrix[0].numel()))  # type: ignore[no-untyped-call]
    vectors = [vector] * len(blocks) if vector.ndim == 1 else vector.split(len(blocks[0]))  # type: ignore[no-untyped-call]
    found = [_projected(block.to(vector.dtype), own) for block, own in zip(blocks, vectors, strict=True)]
    projected, norms = (torch.cat(parts) for parts in zip(*found, strict=True))
    return projected, norms


def _of_two(args: Sequence[Any], kwargs: Mapping[str, Any], c: Tensor) -> Iterator[_Product]:
    a, b = args[:2]
    yield _Product(a, b, c)


def _of_sum(args: Sequence[Any], kwargs: Mapping[str, Any], c: Tensor) -> Iterator[_Product]:
    added, a, b = args
    alpha, beta = float(kwargs.get("alpha", 1)), float(kwargs.get("beta", 1))
    rows = added if added.ndim == 2 else added.reshape(1, -1)
    yield _Product(a, b, c, rows.expand(-1, c.shape[1]) if beta else None, alpha, beta)


def _of_groups(args: Sequence[Any], kwargs: Mapping[str, Any], c: Tensor) -> Iterator[_Product]:
    """Yield for each expert that of its rows, or the gradient of its weight."""
    a, b, ends = (*args, kwargs.get("offs"))[:3]
    for group, rows in enumerate(starmap(slice, pairwise([0, *ends.tolist()]))):
        if rows.start < rows.stop:
            yield _Product(a[rows], b[group], c[rows]) if b.ndim == 3 else _Product(a[:, rows], b[rows], c[group])


_PRODUCTS: Mapping[Any, Callable[[Sequence[Any], Mapping[str, Any], Tensor], Iterator[_Product]]] = {
    torch.ops.aten.mm.default: _of_two,
    torch.ops.aten.mm.out: _of_two,
    torch.ops.aten.addmm.default: _of_sum,
    torch.ops.aten.bmm.default: _of_two,
    torch.ops.aten.bmm.out: _of_two,
    private_torch.GROUPED_MM: _of_groups,
}
"""From an operation to the products in it, given arguments and result."""
