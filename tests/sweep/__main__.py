"""The sweep from a command line."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from tests.sweep import elastic, moe_bench, moe_ckpt, moe_data, moe_sim, moe_train
from tests.sweep.cases import PROBLEMS, Case, Kind, Verdict, answer, judged

Suite = Callable[[Path], Iterator[Case]]

SUITES: dict[str, Suite] = {
    "moe-train": moe_train.building,
    "moe-train, 2 steps": moe_train.training,
    "moe-sim": moe_sim.simulating,
    "moe-bench": moe_bench.measuring,
    "moe-ckpt": moe_ckpt.looking,
    "moe-data": moe_data.tokenizing,
    "elastic.run": elastic.launching,
    "rendezvous_host": elastic.hosting,
}


def swept(suite: Suite, *, every: int = 1) -> Iterator[tuple[Case, Verdict]]:
    """Run a suite's cases in the current folder, which it fills with files.

    Args:
        every: take one case of so many, always the same ones.
    """
    folder = Path("files").absolute()
    folder.mkdir(exist_ok=True)
    for case in suite(folder):
        if zlib.crc32(repr(case.label).encode()) % every == 0:
            yield case, judged(case, answer(case))


def main() -> int:
    """Print what was asked for and the table; 0 where nothing is wrong."""
    kinds = get_args(Kind)
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(SUITES)} (default: all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take one case of N")
    parser.add_argument("--show", nargs="+", choices=kinds, default=list(PROBLEMS), help="kinds of answers to print")
    options = parser.parse_args()
    totals: dict[str, Counter[Kind]] = {}
    for suite in options.suites or SUITES:
        totals[suite] = Counter()
        with tempfile.TemporaryDirectory(prefix="moe-sweep-") as folder:
            os.chdir(folder)
            for case, verdict in swept(SUITES[suite], every=options.every):
                totals[suite][verdict.kind] += 1
                if verdict.kind in options.show:
                    line = f"{verdict.kind}: {case.label}: {verdict.text}".replace(f"{folder}/", "")
                    print(line.encode(errors="backslashreplace").decode(), flush=True)
            os.chdir("/")
    print(f"{'command':<20}{'cases':>8}" + "".join(f"{kind:>11}" for kind in kinds))
    for suite, counts in totals.items():
        print(f"{suite:<20}{counts.total():>8}" + "".join(f"{counts[kind]:>11}" for kind in kinds))
    return int(any(counts[kind] for counts in totals.values() for kind in PROBLEMS))


if __name__ == "__main__":
    sys.exit(main())
