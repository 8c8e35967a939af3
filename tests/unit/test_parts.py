"""Parts of nearly equal size: complete and even."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.arrays import boundary, cut


@settings(deadline=None, max_examples=100)
@given(total=st.integers(0, 1000), parts=st.integers(1, 50))
def test_parts_are_even_and_complete(total: int, parts: int) -> None:
    bounds = cut(total, parts)
    sizes = [last - first for first, last in pairwise(bounds)]
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert bounds[0] == 0
    assert bounds == tuple(boundary(total, parts, index) for index in range(parts + 1))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
