"""`moe-bench NAME`: calibration, GPU check and the report of a run; in a source checkout also the benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from moe_lightning import user_errors
from moe_lightning.arguments import Parser, add_options, read_options, value
from moe_lightning.elastic.worker import Interrupted

_Threads = Annotated[int, Interval(ge=1, le=1024)]

COMMANDS = {
    "calibrate": "this machine as moe-sim sees it, and its predictions compared with real training runs",
    "gpu-check": "whether everything that needs a GPU works on this machine: a table of pass and fail",
    "report": "a run as one HTML page: loss, loads, placements, recoveries, checkpoints, configuration",
}
"""Summary of each command of the installed package by its name; `benchmarks.BENCHMARKS` has those of a checkout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command or benchmark; 0 on success, 2 for a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="moe-bench", description="Measure moe-lightning on this machine.")
    subparsers = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    available = COMMANDS | benchmarks()
    for name, summary in available.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        subparser.add_argument(
            "--threads", type=value(_Threads), default=1, help="torch and OpenMP threads (default: 1)"
        )
        if name in arguments[:1]:
            add_options(subparser, module_of(name).Options)
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    if "torch" in sys.modules:  # it has looked already
        sys.modules["torch"].set_num_threads(given.threads)
    module = module_of(given.name)
    try:
        return int(module.run(read_options(module.Options, given)))
    except Interrupted as stop:
        print(f"moe-bench: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except Exception as error:
        return user_errors.report("moe-bench", error)


def benchmarks() -> dict[str, str]:
    """Return the summary of each benchmark by its name; empty where the package is not run from a source checkout."""
    spec = importlib.util.find_spec("benchmarks")
    checkout = Path(__file__).resolve().parents[2]
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != checkout:
        return {}
    return dict(importlib.import_module("benchmarks").BENCHMARKS)


def module_of(name: str):  # type: ignore[no-untyped-def]
    """Import the module of a command or benchmark, only when it is asked for, since most of them need torch."""
    package = "moe_lightning.cli" if name in COMMANDS else "benchmarks"
    return importlib.import_module(f"{package}.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
