"""Tables and headlines as text, for terminals."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


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


_INDENT = 7
"""Columns of the word that a line of a headline begins with."""


def in_columns(text: str) -> str:
    """The lines of a headline, broken at words where a terminal has fewer columns; as they are elsewhere.

    Args:
        text: lines that begin with a word in a column of its own.
    """
    if not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns, 2 * _INDENT)
    options: dict[str, Any] = {"subsequent_indent": " " * _INDENT, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **options) for line in text.splitlines())
