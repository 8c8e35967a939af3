"""Contiguous parts of range(total) whose sizes differ by at most one, the larger ones first."""

from __future__ import annotations


def boundary(total: int, parts: int, index: int) -> int:
    """Where part `index` of `cut(total, parts)` begins."""
    size, larger = divmod(total, parts)
    return index * size + min(index, larger)


def cut(total: int, parts: int) -> tuple[int, ...]:
    """The boundaries [parts + 1] of all parts."""
    return tuple(boundary(total, parts, index) for index in range(parts + 1))
