"""Every option of every benchmark, and the files that they read and write."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from moe_lightning.arguments import add_options
from moe_lightning.cli import bench
from tests.sweep.cases import Case
from tests.sweep.files import common, damaged_csv, damaged_traces, unwritable, write_run, write_trace
from tests.sweep.values import TEXTS

_TINY = ["--rounds", "1", "--d-model", "8", "--context", "8", "--batch", "2", "--layers", "1"]
FAST: dict[str, list[str]] = {
    "layer": ["--rounds", "1", "--tokens", "8", "--d-model", "8", "--d-expert", "8", "--experts", "2", "--top-k", "1"],
    "step": [*_TINY, "--steps", "1"],
    "compare": [*_TINY, "--steps", "2", "--d-expert", "8", "--experts", "2", "--every", "1", "--parts", "saving"],
    "checkpoint": ["--rounds", "1", "--ranks", "1", "--gigabytes", "0.001"],
    "balance-trace": ["good.npz", "--slots", "8", "--strategies", "plain", "--first", "0", "--protection-slots"],
    "packing": [*_TINY, "--conversations", "60", "--context", "64"],
    "planner": ["--sizes", "8x8", "--layers", "1"],
    "balance": [*_TINY, "--steps", "1", "--d-expert", "8", "--experts", "2", "--slots", "2", "--strategies", "plain"],
    "report": ["run"],
    "calibrate": ["--ranks", "1", "--steps", "8", "--no-check"],
    "recovery": ["--parts", "trace", "--quick"],
    "paper": ["pec-sizes"],
    "kernels": [
        "--rounds", "1", "--tokens", "8", "--d-model", "8", "--d-expert", "8", "--experts", "2", "--top-k", "1",
        "--no-reference",
    ],
}  # fmt: skip
"""By benchmark, the options with which it takes seconds."""

SLOW = {"recovery", "calibrate", "compare", "balance", "checkpoint", "kernels", "planner"}
"""What starts processes or measures for longer than the rest: only what must be refused is tried."""

_FRACTIONS = {"--gigabytes", "--speeds", "--trace-start", "--trace-speed", "--trace-seconds"}
_MAY_BE_ZERO = {"--seed", "--first", "--trace-step", "--trace-start"}


def measuring(folder: Path) -> Iterator[Case]:
    """Values in every option, files of every wrong kind for those that take one."""
    write_trace(Path("good.npz"))
    write_run(Path("run"))
    traces, tables, places = list(damaged_traces(folder)), list(damaged_csv(folder)), list(unwritable(folder))
    for name, fast in FAST.items():
        for action in _options(name):
            option = action.option_strings[0] if action.option_strings else action.dest
            if action.nargs == 0:
                continue
            kind = getattr(action.type, "__name__", "")  # of moe_lightning.arguments
            if kind == "input_file":
                damaged = tables if option in ("--spot", "--trace") and name in ("paper", "recovery") else traces
                for path in damaged:
                    sensible = path.name == "half.csv" or (path.name, name) == ("late.csv", "paper")
                    if not (sensible and name in SLOW):
                        yield _case(name, fast, option, str(path), path.name[:50], sensible=sensible)
            elif kind in ("output_file", "output_folder"):
                for path in places:
                    sensible = kind == "output_folder" and (path == folder or path.parent.name == "no_such_folder")
                    if not (sensible and name in SLOW):
                        yield _case(name, fast, option, str(path), option, sensible=sensible)
            else:
                for label, text in TEXTS.items():
                    sensible = _is_sensible(option, label, action)
                    if not (sensible and name in SLOW):
                        subject = option if option.startswith("-") or label != "huge" else text[:50]
                        yield _case(name, fast, option, text, subject, sensible=sensible)
    for path in common(folder, "", b"x"):
        yield _case("report", ["run"], "run", str(path), path.name[:50])
    for arguments in (
        [],
        [""],
        ["no-such-benchmark"],
        ["layer", "--no-such-option"],
        ["layer", "stray"],
        ["--threads"],
    ):
        yield Case(
            label=f"moe-bench {' '.join(arguments)}", run=partial(bench.main, arguments), subjects=(*arguments, "NAME")
        )


def _options(name: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, bench.module_of(name).Options)
    parser.add_argument("--threads", type=int)
    return parser._actions


def _case(name: str, fast: list[str], option: str, text: str, subject: str, *, sensible: bool = False) -> Case:
    arguments = [name, *fast, f"{option}={text}"] if option.startswith("-") else [name, text, *fast[1:]]
    return Case(
        label=f"moe-bench {name} {option}={text[:60]!r}",
        run=partial(_quietly, arguments),
        subjects=(option, option.lstrip("-"), subject),
        sensible=sensible,
        timeout_s=30.0,
    )


def _quietly(arguments: list[str]) -> int:
    """Without what libraries draw before an error."""
    with contextlib.redirect_stdout(io.StringIO()):
        return bench.main(arguments)


def _is_sensible(option: str, label: str, action: argparse.Action) -> bool:
    return (
        (label == "0" and (option in _MAY_BE_ZERO or (option, action.default) == ("--layers", 4)))
        or (label == "1.5" and option in _FRACTIONS)
        or (label == "1e14" and option in ("--seed", "--first", "--trace-step"))
    )
