"""`moe-bench report RUN`: one self-contained HTML page of a run.

Loss and speed, loads of experts, imbalance, placements, recoveries, checkpoints and the configuration, from the files
of the run directory. A section without data names the option to turn on. Text is escaped; SVG pictures follow light
and dark mode.
"""

from __future__ import annotations

import csv
import html
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from moe_lightning.arguments import OutputFile, option
from moe_lightning.callbacks.routing_health import WINDOW, RoutingHealth
from moe_lightning.cli.run_directory import checkpoints as checkpoints_in
from moe_lightning.cli.run_metrics import Metrics, finite, metrics_files, read_all_metrics
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import read_text, replace_text
from moe_lightning.moe.forced_routing import read_loads
from moe_lightning.plots import bar_chart, heat_map, line_chart, phase_lines, svg

if TYPE_CHECKING:
    pass

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_STYLE = Path(__file__).with_name("report.css")


def escaped(text: object) -> str:
    """Text for elements and attributes: markup and control characters in it are harmless."""
    return html.escape(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text)))


def paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"


def missing(text: str) -> str:
    """Return the HTML of a section without data, which names the option to turn on."""
    return f'<p class="missing">{escaped(text)}</p>'


def figure(picture: str, title: str, caption: str) -> str:
    """An SVG picture, named for those who cannot see it, with what is said of it."""
    named = f'<svg role="img" aria-label="{escaped(title)}" {picture.strip().removeprefix("<svg ")}'
    return f'<figure class="picture">{named}<figcaption>{escaped(caption)}</figcaption></figure>'


def cards(numbers: Sequence[tuple[str, str]]) -> str:
    """Numbers at a glance: what, and how much with its unit."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in numbers)
    return f'<dl class="cards">{items}</dl>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> str:
    """Rows under a head; on a phone its cells break."""
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return f'<figure><div class="wide"><table>{body}</table></div><figcaption>{escaped(caption)}</figcaption></figure>'


def listing(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>"


def page(title: str, subtitle: str, head: Sequence[str], sections: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """The whole document; it is well-formed XML too, and nothing in it may run or be fetched.

    Args:
        sections: HTML of each, by its anchor, letters only, and its heading.
    """
    links = "".join(f'<a href="#{anchor}">{escaped(heading)}</a>' for anchor, heading in sections)
    body = "\n".join(
        f'<section id="{anchor}"><h2>{escaped(heading)}</h2>\n' + "\n".join(parts) + "\n</section>"
        for (anchor, heading), parts in sections.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"/>
<link rel="icon" href="data:,"/>
<title>{escaped(title)}</title>
<style>
{_STYLE.read_text()}</style>
</head>
<body>
<header><h1>{escaped(title)}</h1><p class="soft">{escaped(subtitle)}</p></header>
<nav aria-label="Sections">{links}</nav>
<main>
{"".join(head)}
{body}
</main>
</body>
</html>
"""


_IMBALANCES = {
    "busiest expert": ("moe", "expert_imbalance_ratio"),
    "ranks, plain EP": ("balance", "imbalance_before_ratio"),
    "ranks, as trained": ("moe", "rank_imbalance_ratio"),
}
_TIMES = {"training waits": "stall_ms", "copy to memory": "snapshot_ms", "write to storage": "persist_ms"}
_SIZES = {"copied to memory by a rank": "snapshot_bytes", "written to storage by its node": "persist_bytes"}
_MAX_RECOVERIES = 30
_LOSS = re.compile(r"(.*[/_])?loss(_step|_epoch)?")
_MAX_POINTS = 600
_MAX_ROWS = 50
_MAX_LAYERS = 16
"""Layers with a picture of their own."""
_MAX_SAMPLES = 120
_MIB = 2**20
_TELEMETRY = "callbacks=default and logger=default record it (or give a Trainer the callback Telemetry and a CSVLogger)"


def training(metrics: Metrics, logged: Metrics) -> list[str]:
    """Losses, speed, gradient norm and learning rate; of what was logged, where losses were not finite."""
    losses = {name: values for name, values in metrics.items() if _is_loss(name)}
    faults = list(metrics.get("recovery/lost_rank", {}))
    parts = []
    for title, unit, caption, lines in (
        (
            "loss",
            "loss (nats)",
            "Mean over the tokens of the global batch; of training with accumulation, of its last micro-batch.",
            losses,
        ),
        ("speed", "tokens/s", "Of all ranks, validation excluded.", _named(metrics, "train/tokens_per_s")),
        ("time of a step", "ms", "Of the slowest rank.", _named(metrics, "train/step_ms", "comm/exchange_ms")),
        (
            "slowest rank",
            "ratio",
            "Its own time in a step over the median of the others'.",
            _named(metrics, "ranks/slowest_ratio"),
        ),
        ("gradient norm", "norm", "Over the whole model, before clipping.", _named(metrics, "train/gradient_norm")),
        ("learning rate", "learning rate", "Of the first group of parameters.", _named(metrics, "train/lr")),
    ):
        if lines:
            parts.append(_chart(lines, title, unit, caption, faults))
    lost = {name: [s for s, v in logged[name].items() if not math.isfinite(v)] for name in logged if _is_loss(name)}
    for name, steps in lost.items():
        if steps:
            parts.append(missing(f"{name} was NaN or infinite {len(steps):,} times, first at step {steps[0]:,}."))
    if not losses and not any(lost.values()):
        parts.append(missing(f"No losses were logged: {_TELEMETRY}, and the module logs its loss with self.log."))
    return parts


def loads(directory: Path) -> list[str]:
    """A heat map for each MoE layer."""
    file = directory / "expert_load.csv"
    if not file.is_file():
        text = "No loads of experts were recorded: callbacks.telemetry.expert_load_path='${run_dir}/expert_load.csv'."
        return [missing(text)]
    steps, shares_LSE = read_loads(file)
    parts = [
        paragraph(
            f"Share of a layer's assignments that each of its experts got; {100 / shares_LSE.shape[2]:.3g} % is even."
        )
    ]
    num_layers, samples, _ = shares_LSE.shape
    if num_layers > _MAX_LAYERS:
        parts.append(paragraph(f"{_MAX_LAYERS} of {num_layers} MoE layers are shown, evenly spread over the model."))
    groups = np.array_split(np.arange(samples), min(samples, _MAX_SAMPLES))
    for layer in _shown(num_layers):
        shares_SE = shares_LSE[layer]
        means_SE = np.stack([shares_SE[group].mean(axis=0) for group in groups])
        title = f"experts of MoE layer {layer}"
        busiest = int(shares_SE.mean(axis=0).argmax())
        caption = f"Busiest on average: expert {busiest}, {100 * shares_SE[:, busiest].mean():.3g} %."
        names = [f"{step:,}" for step in (steps[0], *(steps[group[-1]] for group in groups[1:]))]
        unit = "% of the layer's assignments"
        picture = heat_map(100 * means_SE.T, title, "expert", "step", unit, names=names)
        parts.append(figure(svg(picture), f"heat map of the loads of the {title}", caption))
    parts += _health(shares_LSE)
    return parts


def _health(shares_LSE: NDArray[np.float64]) -> Iterator[str]:
    """A table of the layers' routing at the end of the run."""
    health, numbers = RoutingHealth(), dict[str, float]()
    for step in range(shares_LSE.shape[1]):
        numbers = health.observe(dict(enumerate(shares_LSE[:, step])))
    names = ("dead_experts_count", "load_entropy_ratio", "load_drift_fraction")
    rows = [
        [layer, *(f"{numbers[f'moe/layer{layer:02d}/{name}']:.3g}" for name in names)]
        for layer in range(len(shares_LSE))
    ]
    caption = (
        f"At the last logging step. Dead experts got less than 1 % of an even load over the last {WINDOW} logging "
        "steps. An entropy of 1 is an even load, 0 is one expert. Drift is the share of assignments that went to other "
        "experts than over those steps."
    )
    yield table(["MoE layer", "dead experts", "entropy", "drift"], rows, caption)


def imbalance(metrics: Metrics) -> list[str]:
    """Busiest over mean, before and after balancing."""
    parts = []
    lines = {title: _over_layers(metrics, area, name) for title, (area, name) in _IMBALANCES.items()}
    lines = {title: line for title, line in lines.items() if line}
    if lines:
        caption = "Average of the MoE layers; 1 is even: the run waits for its busiest rank."
        parts.append(_chart(lines, "imbalance", "busiest / mean", caption))
    dropped = {n: v for n, v in metrics.items() if n.endswith("/dropped_fraction") and any(v.values())}
    if dropped:
        parts.append(_chart(dropped, "dropped assignments", "fraction", "Above the capacity limit of the layer."))
    if not parts:
        parts.append(missing(f"Nothing says how even the work was: {_TELEMETRY}."))
    elif not any(name.endswith("/imbalance_before_ratio") for name in metrics):
        parts.append(missing("callbacks=load_balancer places replicas by load, and compares with plain EP."))
    return parts


def placements(directory: Path, metrics: Metrics) -> list[str]:
    """Experts per rank at the end, and migrations."""
    file = directory / "placement.csv"
    if file.is_file():
        parts = [paragraph("The last placements that a logging step saw."), *_placed(read_placements(file))]
    else:
        text = "No placements were recorded: callbacks.telemetry.placement_path='${run_dir}/placement.csv'."
        parts = [missing(text)]
    moved = _named(metrics, "balance/migrated_states")
    shadows = {name: values for name, values in metrics.items() if name.endswith("/shadows_count")}
    for lines, title, unit, caption in (
        (moved, "experts that moved", "states", "Since the logging step before."),
        (shadows, "shadows", "count", "Copies of weights for one step, planned by the performance model."),
    ):
        if lines:
            parts.append(_chart(lines, title, unit, caption))
    return parts


def _placed(last: Mapping[int, tuple[int, NDArray[np.int64]]]) -> Iterator[str]:
    """Pictures of the last placements: ranks and experts of each layer that is shown."""
    for place in _shown(len(last)):
        layer, (step, replicas_EN) = list(last.items())[place]
        title = f"replicas of the experts of MoE layer {layer}, from step {step} on"
        most = int(replicas_EN.sum(axis=1).max())
        caption = f"{replicas_EN.shape[0]} experts on {replicas_EN.shape[1]} ranks, at most {most} replicas of one."
        picture = heat_map(replicas_EN.T.astype(float), title, "rank", "expert", "replicas")
        yield figure(svg(picture), title, caption)


def _shown(num_layers: int) -> list[int]:
    """Return the layers with a picture of their own, evenly spread over the model."""
    shown: list[int] = np.linspace(0, num_layers - 1, min(num_layers, _MAX_LAYERS)).round().astype(int).tolist()
    return shown


def _recovery_table(directory: Path) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the cells of every recovery.

    Raises:
        ConfigurationError: a file is no such table.
    """
    rows: list[list[str]] = []
    head: list[str] = []
    for file in metrics_files(directory, "recoveries.csv"):
        try:
            with file.open(newline="", encoding="utf-8") as lines:
                head, *found = list(csv.reader(lines)) or [[]]
        except (ValueError, OSError, csv.Error) as error:
            raise ConfigurationError(f"{file} is not a table of recoveries: move it away") from error
        rows += found
    return head, rows


def recoveries(directory: Path, metrics: Metrics) -> list[str]:
    """Failures: causes, durations, costs."""
    parts = []
    head, rows = _recovery_table(directory)
    lanes = _recovery_lanes(metrics)
    if lanes:
        title = "changes of ranks: from the loss or join until training goes on"
        parts.append(figure(svg(phase_lines(lanes, title)), title, "Seconds of each phase; one lane for each."))
    if rows:
        shown = rows[-_MAX_ROWS:]
        caption = f"The last {len(shown)} of {len(rows)}; steps lost are those that ran again."
        parts.append(table([name.replace("_", " ") for name in head], shown, caption))
    return parts or [missing("No rank was lost. callbacks=fault_recovery lets the others train on when one is.")]


def checkpoints(directory: Path, metrics: Metrics) -> list[str]:
    """Checkpoints: costs, files, age of their experts."""
    parts = _checkpoint_costs(metrics)
    if not parts:
        parts.append(missing("No costs of checkpoints were logged: callbacks=partial_experts measures every one."))
    from moe_lightning.checkpoint.loader import Checkpoint  # imports torch

    folder = directory / "checkpoints"
    rows: list[list[object]] = []
    for found in checkpoints_in(folder)[:_MAX_ROWS]:
        try:
            if not found.path.is_dir():
                rows.append([found.path.name, found.step, _mib(found.path.stat().st_size), "all", "one file"])
                continue
            checkpoint = Checkpoint(found.path)
            age_LE = np.maximum(checkpoint.step - checkpoint.expert_versions(), 0)
        except (CheckpointError, OSError) as error:
            rows.append([found.path.name, found.step, "", "", f"damaged: {error}"])
            continue
        name, manifest = checkpoint.path.name, checkpoint.manifest
        oldest = f"the oldest was saved {age_LE.max(initial=0)} steps before"
        rows.append([name, checkpoint.step, _mib(manifest.payload_bytes), _mib(manifest.new_bytes), oldest])
    if rows:
        head = ["checkpoint", "step", "state (MiB)", "of it new (MiB)", "experts"]
        parts += [table(head, rows, f"The newest {len(rows)} in the run directory.")]
    else:
        parts.append(
            missing("No checkpoints lie in the run directory: callbacks=default or partial_experts writes them.")
        )
    return parts


def _checkpoint_costs(metrics: Metrics) -> list[str]:
    """Bars of times and sizes; lines of lost tokens and of K."""
    parts = []
    times, sizes = _bars(metrics, _TIMES, 1.0), _bars(metrics, _SIZES, 1e6)
    if times:
        caption = "Training waits only for the first; copies and writes run beside it."
        parts.append(figure(svg(bar_chart(times, "what a checkpoint costs", "ms")), "costs of checkpoints", caption))
    if sizes:
        caption = "Experts that were not written again are carried over from the checkpoint before."
        parts.append(figure(svg(bar_chart(sizes, "parts of a checkpoint", "MB")), "sizes of checkpoints", caption))
    if "checkpoint/plt" in metrics:
        percents = {"lost": {step: 100 * value for step, value in metrics["checkpoint/plt"].items()}}
        caption = "Tokens whose updates a restore lost, of all that experts were trained on (PLT)."
        parts.append(_chart(percents, "proportion of lost tokens", "percent", caption))
    saved = {"copied (K_snapshot)": "checkpoint/k_snapshot", "written (K_persist)": "checkpoint/k_persist"}
    kept = {title: metrics[name] for title, name in saved.items() if name in metrics}
    if kept:
        caption = "The others of a layer stay as they were saved last."
        parts.append(_chart(kept, "experts of a layer that a checkpoint saves", "experts", caption))
    return parts


def configuration(config: Mapping[str, Any], file: Path) -> list[str]:
    """The composed configuration."""
    if not config:
        text = f"There is no {file.name}: moe-train leaves it in the run directory."
        return [missing(text)]
    return [paragraph(f"From {file.name}."), listing(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))]


def read_placements(path: Path) -> dict[int, tuple[int, NDArray[np.int64]]]:
    """The last placement of each layer: since which step, and replicas [experts, ranks].

    Raises:
        ConfigurationError: a file that Telemetry did not write.
    """
    found: dict[int, tuple[int, NDArray[np.int64]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
            if head[:3] != ["step", "layer", "ranks"]:
                raise ValueError("no head")
            for step, layer, ranks, *holders in rows:
                replicas_EN = np.zeros((len(holders), int(ranks)), dtype=np.int64)
                for expert, held in enumerate(holders):
                    np.add.at(replicas_EN[expert], [int(rank) for rank in held.split()], 1)
                found[int(layer)] = int(step), replicas_EN
    except (ValueError, IndexError, OSError) as error:
        raise ConfigurationError(f"{path} has no lines of step, layer, ranks, holders: move it away") from error
    if not found or not all(replicas_EN.size for _, replicas_EN in found.values()):
        raise ConfigurationError(f"{path} has no lines of step, layer, ranks, holders: move it away")
    return found


def _is_loss(name: str) -> bool:
    return _LOSS.fullmatch(name) is not None and "layer" not in name


def _named(metrics: Metrics, *names: str) -> dict[str, Mapping[int, float]]:
    return {name: metrics[name] for name in names if metrics.get(name)}


def _chart(
    lines: Mapping[str, Mapping[int, float]], title: str, unit: str, caption: str, faults: Sequence[int] = ()
) -> str:
    """Lines over steps; dotted where ranks were lost."""
    points = {name: _thinned(list(values.items())) for name, values in lines.items()}
    picture = svg(line_chart(points, title, "step", unit, marks=faults))
    caption += " Dotted: ranks were lost and the others went on." if faults else ""
    return figure(picture, f"{title} over steps, {unit}", caption)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most _MAX_POINTS of them: each the mean of its neighbours, at the last one's place."""
    groups = np.array_split(np.array(points, dtype=np.float64), min(len(points), _MAX_POINTS))
    return [(float(group[-1, 0]), float((group[:, 1] / len(group)).sum())) for group in groups]  # a sum may overflow


def _over_layers(metrics: Metrics, area: str, name: str) -> dict[int, float]:
    """Mean over the layers of a metric AREA/layerNN/NAME, at the steps that all of them have."""
    layers = [values for key, values in metrics.items() if key.startswith(f"{area}/layer") and key.endswith(f"/{name}")]
    steps = set.intersection(*(set(values) for values in layers)) if layers else set()
    return {step: statistics.fmean(values[step] for values in layers) for step in sorted(steps)}


def _bars(metrics: Metrics, names: Mapping[str, str], unit: float) -> dict[str, dict[str, float]]:
    bars = {}
    for title, name in names.items():
        values = [value / unit for value in metrics.get(f"checkpoint/{name}", {}).values()]
        if values:
            bars[title] = {"median": statistics.median(values), "largest": max(values)}
    return bars


def _recovery_lanes(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Seconds of the phases of the last recoveries, each named by its step and the ranks that went on."""
    from moe_lightning.strategies.recovery import PHASES  # imports torch

    lanes = {}
    for step, total_ms in list(metrics.get("recovery/total_ms", {}).items())[-_MAX_RECOVERIES:]:
        phases = {phase: metrics.get(f"recovery/{phase}_ms", {}).get(step, 0.0) / 1e3 for phase in PHASES}
        phases["other"] = max(0.0, total_ms / 1e3 - sum(phases.values()))
        ranks = metrics.get("recovery/ranks", {}).get(step)
        lanes[f"step {step}" + (f", {ranks:.0f} ranks" if ranks else "")] = phases
    return lanes


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f}"


_CARDS = {
    "steps": ("steps", "{:,.0f}"),
    "val_loss": ("held-out loss", "{:.4g} nats"),
    "val_perplexity": ("perplexity", "{:,.4g}"),
    "val_accuracy": ("accuracy", "{:.2%}"),
    "tokens_per_s": ("speed", "{:,.0f} tokens/s"),
    "images_per_s": ("speed", "{:,.0f} images/s"),
    "expert_imbalance_ratio": ("busiest expert over mean", "{:.2f}"),
    "rank_imbalance_ratio": ("busiest rank over mean", "{:.2f}"),
    "wall_s": ("time", "{:,.0f} s"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `moe-bench report`."""

    run: Path = option("a run directory, outputs/NAME")
    out: OutputFile | None = option("the page (default: RUN/report.html)", None)


def run(options: Options) -> int:
    """Write the page; 0 on success."""
    text = render(options.run)
    out = options.out or options.run / "report.html"
    try:
        if options.out is None:
            replace_text(out, text)  # a run of others may have put a link to a file of this user there
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{out} cannot be written ({error.strerror}): give another place with --out"
        ) from error
    print(out)
    return 0


def render(directory: Path) -> str:
    """The page of a run as HTML.

    Raises:
        ConfigurationError: no run directory, or a file in it that cannot be read.
    """
    config_file, files = directory / "config.yaml", metrics_files(directory)
    if not config_file.is_file() and not files:
        raise ConfigurationError(f"{directory} has no config.yaml and no metrics: give a run directory, outputs/NAME")
    config = _mapping(config_file, yaml.safe_load)
    summary = _mapping(directory / "summary.json", json.loads)
    logged = _counted(read_all_metrics(files), summary.get("steps"))
    if isinstance(summary.get("steps"), int) and summary["steps"] + 1 < _last_step(logged):  # + 1: see `_counted`
        summary = {}  # of a former start of a run that goes on
    metrics = finite(logged)
    sections = {
        ("training", "Loss and speed"): training(metrics, logged),
        ("loads", "Expert loads"): loads(directory),
        ("imbalance", "Imbalance"): imbalance(metrics),
        ("placements", "Placements and replicas"): placements(directory, metrics),
        ("recoveries", "Recoveries"): recoveries(directory, metrics),
        ("checkpoints", "Checkpoints"): checkpoints(directory, metrics),
        ("configuration", "Configuration"): configuration(config, config_file),
    }
    name = str(config.get("run_name") or directory.resolve().name)
    subtitle = f"a run of moe-lightning, {_size(config, metrics, summary)}"
    return page(name, subtitle, [cards(_numbers(directory, summary, metrics))], sections)


def _mapping(path: Path, read: Any) -> dict[str, Any]:
    """A file's mapping; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = read(read_text(path))
        if not isinstance(found, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: move it away, and the report leaves it out") from error
    return found


def _counted(metrics: Metrics, steps: object) -> Metrics:
    """The metrics with those of a validation after the last of so many steps at that step: Lightning logs them under
    the number of steps made, where a validation between steps has the number before."""
    if not isinstance(steps, int):
        return metrics
    return {
        name: {step - (name.startswith("val/") and step == steps + 1): value for step, value in values.items()}
        for name, values in metrics.items()
    }


def _size(config: Mapping[str, Any], metrics: Metrics, summary: Mapping[str, Any]) -> str:
    """Steps and ranks; of a run that has not ended the last logged step."""
    steps = summary["steps"] if isinstance(summary.get("steps"), int) else _last_step(metrics)
    areas = (config.get(name) for name in ("trainer", "elastic"))
    trainer, elastic = (area if isinstance(area, dict) else {} for area in areas)
    devices = trainer.get("devices")
    here = len(devices) if isinstance(devices, list) else devices
    if not isinstance(here, int):
        return f"{steps:,} steps"
    ranks = here * trainer.get("num_nodes", 1) * elastic.get("num_nodes", 1)
    return f"{steps:,} steps on {ranks} rank{'s' * (ranks != 1)}"


def _last_step(metrics: Metrics) -> int:
    return max((step for values in metrics.values() for step in values), default=0)


def _numbers(directory: Path, summary: Mapping[str, Any], metrics: Metrics) -> list[tuple[str, str]]:
    """Return the values of the run's summary; the last values of a run that has not ended. Recoveries are counted in
    their table: of several at one step, metrics have one.
    """
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    last = {name: list(values.values())[-1] for name, values in metrics.items()}
    for name, metric in (("val_loss", "val/loss"), ("tokens_per_s", "train/tokens_per_s")):
        if name not in numbers and metric in last:
            numbers[name] = last[metric]
    found = [(title, form.format(numbers[name])) for name, (title, form) in _CARDS.items() if name in numbers]
    head, rows = _recovery_table(directory)
    lost = [cells for row in rows if (cells := dict(zip(head, row, strict=False))).get("lost_ranks")]
    found.append(("recoveries from lost ranks", f"{len(lost):,}"))
    if "checkpoint/plt" in last:
        found.append(("lost tokens (PLT)", f"{100 * last['checkpoint/plt']:.4g} %"))
    return found
