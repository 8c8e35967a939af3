"""Figures of the benchmarks as ratios within a run, compared with those that were recorded last.

python -m tests.figures             # measure and compare; the slow matrix does the same
python -m tests.figures --record    # measure, and keep the figures in figures.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import compare, recovery
from benchmarks.measuring import medians_of

RECORD = Path(__file__).with_name("figures.json")
TOLERANCE = 1.5
"""A figure is worse if it is so many times the recorded one: ratios of two runs on a busy machine differ by a third."""

_ROUNDS = 3

STOCK, BARE = "DDP, dcp.async_save", "ours"
SNAPSHOTS = ("ours, every expert, each step", "ours, K = E/4, each step")
"""Contenders of `moe-bench compare`: what our snapshots are compared with, and those."""


def measure(folder: Path) -> dict[str, float]:
    """Return ratios, of which less is better: times on one machine mean nothing on another."""
    saved, recovered = folder / "compare.json", folder / "recovery.json"
    with contextlib.redirect_stdout(sys.stderr):
        compare.run(compare.Options(parts=["saving"], rounds=_ROUNDS, directory=folder, json=saved))
        recovery.run(recovery.Options(parts=["kill"], rounds=_ROUNDS, json=recovered))
    return of_saving(json.loads(saved.read_text())) | of_recovery(json.loads(recovered.read_text()))


def of_saving(rows: list[dict[str, float]]) -> dict[str, float]:
    """Stall of our snapshots, and the steps in which one is taken."""
    names = {row["contender"] for row in rows}
    medians = {n: medians_of([r for r in rows if r["contender"] == n], but=("round", "contender")) for n in names}
    stock, bare = medians[STOCK]["stall_s"], medians[BARE]["mean_step_s"]
    found = {}
    for name in SNAPSHOTS:
        found[f"{name}: stall over that of dcp.async_save"] = medians[name]["stall_s"] / stock
        found[f"{name}: step over one without saving"] = medians[name]["mean_step_s"] / bare
    return {name: round(value, 3) for name, value in found.items()}


def of_recovery(results: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, float]:
    medians = medians_of(results["kill"]["in process"])
    return {"kill in process: recovery over the step after it": round(medians["total"] / medians["repeated step"], 3)}


def worse(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Return a sentence for each figure that got worse, or is not measured any more."""
    lost = [f"{name} is not measured any more, it was {recorded[name]}" for name in recorded if name not in measured]
    return lost + [
        f"{name} is {value}, it was {recorded[name]}: more than {TOLERANCE} times as much"
        for name, value in measured.items()
        if name in recorded and value > TOLERANCE * recorded[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.figures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"keep the figures in {RECORD.name}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-figures-") as folder:
        measured = measure(Path(folder))
    print(json.dumps(measured, indent=2))
    print(f"(load average {os.getloadavg()[0]:.1f})")
    if given.record:
        RECORD.write_text(json.dumps(measured, indent=2) + "\n")
        return 0
    problems = worse(measured, json.loads(RECORD.read_text()))
    print("\n".join(problems) or "no figure got worse")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
