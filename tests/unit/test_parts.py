"""Parts of nearly equal size: complete, even, and found by position."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.algorithms.parts import boundary, cut, part_at


@settings(deadline=None, max_examples=100)
@given(total=st.integers(0, 1000), parts=st.integers(1, 50))
def test_parts_are_even_and_complete(total: int, parts: int) -> None:
    bounds = cut(total, parts)
    sizes = [last - first for first, last in pairwise(bounds)]
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert bounds[0] == 0
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@settings(deadline=None, max_examples=100)
@given(parts=st.integers(1, 50), beyond=st.integers(0, 300), data=st.data())
def test_a_position_lies_in_its_part(parts: int, beyond: int, data: st.DataObject) -> None:
    total = parts + beyond
    position = data.draw(st.integers(0, total - 1))
    part = part_at(total, parts, position)
    assert boundary(total, parts, part) <= position < boundary(total, parts, part + 1)
