"""Tables as text, for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """Rows as text under their headers, each column as wide as it needs to be; words to the left, numbers to the
    right.
    """
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    are_words = [any(cell[:1].isalpha() for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if words else f"{cell:>{width}}"
            for cell, width, words in zip(row, widths, are_words, strict=True)
        )
        for row in cells
    ]
    return "\n".join([title] * bool(title) + [line.rstrip() for line in lines])
