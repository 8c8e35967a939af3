"""moe-bench compatibility: every feature of a training under every layout of the model over ranks.

A cell trains three steps, saves, and resumes for three more; losses, gradients, norms, parameters and moments are
compared with one process, within the limits of `moe-bench silent`.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from moe_lightning.arguments import OutputFile, option
from moe_lightning.errors import ConfigurationError

_INTRODUCTION = """\
# Compatibility

Rows are what a training may use, columns how the model is laid over ranks (`strategy.dense`, `strategy.replicas`,
`strategy.mesh`). In each cell a tiny GPT with experts trains for three steps on two or four ranks, saves a checkpoint,
and resumes for three more.

* **same**: losses, gradients, norms, parameters and moments are those of one process, within the
  [limits](silent-errors.md) of float32. In the rows of bfloat16 every token uses all four experts, so that rounding
  chooses none, and limits are 0.02 for a loss and 0.1 of the largest element for a gradient.
* **refused**: training does not start; the reason is listed below the table.
* **differs**: it trains, and its numbers differ from those of one process, for the reason below the table.

```bash
moe-bench compatibility                                   # all cells, in a checkout
moe-bench compatibility --row "z-loss" "AdamW"            # some rows
moe-bench compatibility --page docs/compatibility.md      # this page
```
"""

_REFUSED, _DIFFERS = "refused: ", "differs: "


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    row: list[str] = option("names of rows; all without it", [])
    page: OutputFile | None = option("where to write them as a page of the documentation (.md), of all rows", None)


def run(options: Options) -> int:
    """Print one table; 0 if every cell is the same, refused or explained.

    Raises:
        ConfigurationError: an unknown row, or a page of some rows only.
    """
    from benchmarks.silent.matrix import FEATURES, LAYOUTS, cell, cell_id
    from benchmarks.silent.runner import run_healthy

    for name in options.row:
        if name not in FEATURES:
            near = difflib.get_close_matches(name, FEATURES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(FEATURES)}"
            raise ConfigurationError(f"--row {name!r} is not a row: {hint}")
    if options.row and options.page is not None:
        raise ConfigurationError("--page is for the results of all rows: drop --row")
    start, table, problems = time.perf_counter(), dict[str, dict[str, str]](), list[str]()
    print(f"{'':<38}" + "".join(f"{layout:<11}" for layout in LAYOUTS))
    for feature in options.row or FEATURES:
        print(f"{feature:<38}", end="", flush=True)
        row = table[feature] = {}
        for layout in LAYOUTS:
            result = run_healthy(cell(cell_id(feature, layout)))
            told = f"{_REFUSED}{result.told}" if result.told else ""
            row[layout] = told if result.holds else _DIFFERS + FEATURES[feature].differs.get(layout, "unexplained")
            if not result.holds and layout not in FEATURES[feature].differs:
                problems.append(f"{feature}, {layout}: {result.problem}")
            print(f"{_verdict(row[layout]):<11}", end="", flush=True)
        print(flush=True)
    print()
    for line in _reasons(table):
        print(line)
    print(*problems, sep="\n")
    if options.page is not None:
        options.page.write_text(written(table))
    count = sum(map(len, table.values()))
    print(f"{count - len(problems)} of {count} cells are the same, or explained; {time.perf_counter() - start:.0f} s")
    return int(bool(problems))


def _verdict(told: str) -> str:
    return told.partition(":")[0] or "same"


def _reasons(table: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each sentence of a row, with its columns."""
    lines = []
    for feature, row in table.items():
        columns: dict[str, list[str]] = {}
        for layout, told in row.items():
            if told:
                columns.setdefault(told, []).append(layout)
        for told, layouts in columns.items():
            where = "everywhere" if len(layouts) == len(row) else ", ".join(layouts)
            lines.append(f"* {feature} ({where}) {told}")
    return lines


def written(table: Mapping[str, Mapping[str, str]]) -> str:
    """The page.

    Args:
        table: by row and column "" where a cell is the same, else "refused: " or "differs: " with the reason.
    """
    layouts = list(next(iter(table.values())))
    lines = [f"| | {' | '.join(layouts)} |", "|" + "-|" * (len(layouts) + 1)]
    lines += [
        f"| {feature} | {' | '.join(_verdict(told) for told in row.values())} |" for feature, row in table.items()
    ]
    parts = [_INTRODUCTION, "\n".join(lines) + "\n", "## Reasons\n", "\n".join(_reasons(table)) + "\n"]
    parts.append(
        "Next: [limits](limits.md), [silent errors](silent-errors.md), [the laws](expert-parallelism.md#laws).\n"
    )
    return "\n".join(parts)
