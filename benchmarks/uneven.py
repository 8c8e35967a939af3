"""moe-bench uneven: the step time with a slow rank, on two ranks pinned to one core each.

Another process of equal priority takes a share of one rank's core: all that it can get (half), a fifth (0.8), or half
of it for a while in the middle (episode). The ideal is the calm step of even slices, divided perfectly by the ranks'
speeds. All ratios are taken inside one run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import goal, own_cores
from benchmarks.uneven_worker import CONTENDERS, SPEEDS, Contender, Scenario
from moe_lightning.arguments import Count, OutputFile, option
from moe_lightning.cli.short_training import ModelOptions, machine, on_ranks
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import bar_chart, line_chart, require, svg
from moe_lightning.text_table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RANKS = 2
_LEAST_STEPS = 24


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of this benchmark."""

    scenarios: list[Scenario] = option("what to measure", list(SPEEDS))
    contenders: list[Contender] = option("who takes part", list(CONTENDERS))
    rounds: Count = option("measurements of each, in turns", 1)
    steps: Count = option("of each; the second half counts", 64)
    batch: Count = option("sequences of a rank", 12)
    slots: Count = option("resident experts of a rank", 6)
    json: OutputFile | None = option("where to leave all measurements", None)
    picture: OutputFile | None = option("where to draw the ranks' own time in a step (.svg)", None)
    episode_picture: OutputFile | None = option("where to draw the steps of the episode (.svg)", None)


def run(options: Options) -> int:
    """Measure, print one table and the goals beside what was reached; 0 on success.

    Raises:
        ConfigurationError: fewer cores than ranks, too few steps, or nothing to compare with.
    """
    cores = own_cores(_RANKS)
    if not cores:
        raise ConfigurationError(f"ranks of known speed need {_RANKS} cores of their own: allow this process as many")
    if options.steps < _LEAST_STEPS:
        raise ConfigurationError(f"--steps {options.steps} end before speeds are known: use at least {_LEAST_STEPS}")
    if "calm" not in options.scenarios or "even" not in options.contenders:
        raise ConfigurationError("the ideal comes from the calm run of even slices: keep the scenario calm and even")
    if 2 * options.slots < options.experts:
        raise ConfigurationError(
            f"--slots {options.slots} of {_RANKS} ranks cannot hold {options.experts} experts: use more"
        )
    if options.picture is not None or options.episode_picture is not None:
        require()
    with tempfile.TemporaryDirectory(prefix="moe-uneven-") as folder:
        rows = _measure(Path(folder), options, cores)
    if options.json is not None:
        options.json.write_text(json.dumps(rows))
    print(f"{machine()}; {_RANKS} ranks, pinned to cores {cores}; medians of {options.rounds} x {options.steps} steps")
    found = summaries(rows)
    print(format_table(found))
    print("\n".join(goals(found)))
    if options.picture is not None:
        options.picture.write_text(svg(picture(found)))
    if options.episode_picture is not None and "episode" in options.scenarios:
        options.episode_picture.write_text(svg(episode_picture(rows)))
    return 0


def _measure(folder: Path, options: Options, cores: list[int]) -> list[dict[str, Any]]:
    settings = asdict(options) | {"json": None, "picture": None, "episode_picture": None, "cores": cores}
    rows: list[dict[str, Any]] = on_ranks(
        "benchmarks.uneven_worker:train_all", settings, num_ranks=_RANKS, folder=folder, cores=cores
    )[0]
    return rows


def counted(scenario: str, steps: int) -> slice:
    """The steps that count: those in which speeds have been known for a while."""
    return slice(steps // 2, 5 * steps // 8) if scenario == "episode" else slice(steps // 2, steps)


def summaries(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """By (scenario, contender), over rounds: seconds of a step, of each rank without its exchanges, samples of the
    slow rank, and the step over the ideal of its round."""
    of_calm = [row for row in rows if (row["scenario"], row["contender"]) == ("calm", "even")]
    calm = {row["round"]: _median(row, "step_s", 0) for row in of_calm}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in rows:
        ideal_s = calm[row["round"]] * _RANKS / (_RANKS - 1 + SPEEDS[row["scenario"]])
        step_s = max(_median(row, "step_s", rank) for rank in range(_RANKS))
        numbers = {"step_s": step_s, "over_ideal": step_s / ideal_s, "over_calm": step_s / calm[row["round"]]}
        numbers |= {f"own_s_{rank}": _median(row, "own_s", rank) for rank in range(_RANKS)}
        numbers["samples"] = _median(row, "samples", _RANKS - 1)
        found.setdefault((row["scenario"], row["contender"]), []).append(numbers)
    return {
        key: {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}
        for key, rounds in found.items()
    }


def _median(row: Mapping[str, Any], name: str, rank: int) -> float:
    values = row[name][rank]
    return float(statistics.median(values[counted(row["scenario"], len(values))]))


def format_table(found: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """One line for each contender in each scenario."""
    rows = [
        (
            *key,
            f"{1e3 * row['step_s']:.1f}",
            f"{row['over_ideal']:.3f}",
            f"{row['over_calm']:.3f}",
            *(f"{1e3 * row[f'own_s_{rank}']:.1f}" for rank in range(_RANKS)),
            f"{row['samples']:.0f}",
        )
        for key, row in found.items()
    ]
    owners = ("own ms: rank 0", "rank 1")
    return table(("scenario", "contender", "step ms", "of ideal", "of calm", *owners, "samples of rank 1"), rows)


def goals(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """One line for each goal that the measurements can judge."""
    lines = []
    for key, name, most, what in (
        (("half", "both"), "over_ideal", 1.10, "step over the ideal, one rank at half speed"),
        (("calm", "both"), "over_calm", 1.01, "step over that of even speeds, calm"),
    ):
        if key in found:
            reached = found[key][name]
            beside = found.get((key[0], "even"), {}).get(name)
            note = f"; even: {beside:.3f}" if beside is not None else ""
            lines.append(goal(what, reached, most, "{:.3f}", note))
    return lines


def picture(found: Mapping[tuple[str, str], Mapping[str, float]]) -> Figure:
    """Time of each rank in a step without its exchanges and waits, with even speeds and with measured ones."""
    groups = {
        f"{scenario}, {contender}": {f"rank {rank}": 1e3 * row[f"own_s_{rank}"] for rank in range(_RANKS)}
        for (scenario, contender), row in found.items()
        if contender in ("even", "both") and scenario != "episode"
    }
    return bar_chart(groups, "own time of each rank in a step", "ms")


def episode_picture(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Steps of the first round's episode."""
    lines = {
        str(row["contender"]): [(float(step), 1e3 * seconds) for step, seconds in enumerate(row["step_s"][0])][2:]
        for row in rows
        if row["scenario"] == "episode" and row["round"] == 0
    }
    return line_chart(lines, "steps while a rank is slow for a while", "step", "ms")
