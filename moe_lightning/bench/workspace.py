"""moe-bench workspace PROJECT: a saved view, or a report, of W&B with a panel for everything that runs log.

Needs a login (`wandb login`) and the extra `workspaces`. `--dry-run` only lists the panels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from moe_lightning.arguments import option
from moe_lightning.callbacks.wandb_logger import has_wandb_login
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.recovery_report import PHASES
from moe_lightning.values import Range

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import LinePlot, Report
    from wandb_workspaces.workspaces.interface import Workspace

STEP = "trainer/global_step"


@dataclass(frozen=True, kw_only=True)
class PanelSpec:
    """Metrics over steps in one panel.

    Attributes:
        metrics: by name.
        pattern: regular expression of further ones, such as those of every layer; "" for none.
        style: lines, or areas on top of each other.
    """

    title: str
    unit: str
    metrics: tuple[str, ...] = ()
    pattern: str = ""
    style: Literal["line", "stacked-area"] = "line"


def _panel(title: str, unit: str, *metrics: str, pattern: str = "", stacked: bool = False) -> PanelSpec:
    style: Literal["line", "stacked-area"] = "stacked-area" if stacked else "line"
    return PanelSpec(title=title, unit=unit, metrics=metrics, pattern=pattern, style=style)


SECTIONS: dict[str, tuple[PanelSpec, ...]] = {
    "Training": (
        _panel("loss", "nats", "train/loss", "val/loss"),
        _panel("gradient norm", "norm", "train/gradient_norm"),
        _panel("learning rate", "rate", "train/lr"),
        _panel("throughput", "tokens/s", "train/tokens_per_s"),
        _panel("time of a step", "ms", "train/step_ms"),
        _panel("model FLOPs utilization", "ratio", "train/mfu_ratio"),
        _panel("memory of the device", "bytes", "device/peak_memory_bytes"),
    ),
    "Experts": (
        _panel("busiest over mean: experts, ranks", "ratio", "moe/expert_imbalance_ratio", "moe/rank_imbalance_ratio"),
        _panel("ranks under plain expert parallelism", "ratio", pattern=r"balance/layer\d+/imbalance_before_ratio"),
        _panel("ranks as trained", "ratio", pattern=r"moe/layer\d+/rank_imbalance_ratio"),
        _panel("dropped assignments", "fraction", pattern=r"moe/layer\d+/dropped_fraction"),
        _panel("auxiliary losses", "loss", pattern=r"moe/layer\d+/auxiliary_loss"),
        _panel("exchanged in one dispatch", "bytes", pattern=r"comm/layer\d+/exchanged_bytes"),
    ),
    "Balancing": (
        _panel("moved experts", "states", "balance/migrated_states"),
        _panel("moving and planning", "ms", "balance/migration_ms", "balance/plan_ms"),
        _panel("shadows", "count", pattern=r"balance/layer\d+/shadows_count"),
        _panel("transfers that nothing hides", "ms", "balance/exposed_trans_ms", "balance/exposed_agg_ms"),
        _panel("predicted over measured", "ratio", pattern=r"balance/model_error/.*_ratio"),
    ),
    "Checkpoints": (
        _panel("time", "ms", "checkpoint/stall_ms", "checkpoint/snapshot_ms", "checkpoint/persist_ms"),
        _panel("size", "bytes", "checkpoint/snapshot_bytes", "checkpoint/persist_bytes"),
        _panel("proportion of lost tokens", "ratio", "checkpoint/plt"),
        _panel("experts saved of a layer", "experts", "checkpoint/k_snapshot", "checkpoint/k_persist"),
    ),
    "Recovery": (
        _panel("phases", "ms", *(f"recovery/{phase}_ms" for phase in PHASES), stacked=True),
        _panel("steps that fell back", "steps", "recovery/steps_lost"),
        _panel("ranks that went on", "ranks", "recovery/ranks"),
        _panel("stale experts", "experts", "recovery/stale_experts"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of this benchmark."""

    project: str = option("of W&B, as in logger.wandb.project: moe-lightning")
    entity: str | None = option("team or user (default: WANDB_ENTITY, or your own)", None)
    layers: Annotated[int, Range(least=0, most=1000)] = option("MoE layers that get a heat map of loads", 4)
    report: bool = option("a report instead of a saved view", False)
    dry_run: bool = option("list the panels and stop", False)


def run(options: Options) -> int:
    """Save the view or the report and print its address; 0 on success."""
    sections = layout(options.layers)
    if options.dry_run:
        for name, panels in sections.items():
            print(name)
            for panel in panels:
                print(f"  {panel.title} [{panel.unit}]: {', '.join(filter(None, (*panel.metrics, panel.pattern)))}")
        return 0
    if not has_wandb_login():
        raise ConfigurationError("there is no login of W&B: run wandb login, or list the panels with --dry-run")
    entity = options.entity or os.environ.get("WANDB_ENTITY") or _own_entity()
    build = report if options.report else workspace
    saved: Any = build(sections, entity, options.project)
    saved.save()
    print(saved.url)
    return 0


def layout(num_layers: int) -> dict[str, tuple[PanelSpec, ...]]:
    """The sections, with the heat maps of so many layers among the experts' panels."""
    maps = tuple(
        _panel(f"load of the experts of MoE layer {layer}", "expert", f"moe/layer{layer:02d}/expert_load")
        for layer in range(num_layers)
    )
    return {**SECTIONS, "Experts": maps + SECTIONS["Experts"]}


def workspace(sections: dict[str, tuple[PanelSpec, ...]], entity: str, project: str) -> Workspace:
    """A saved view of the project.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    _check_installed()
    from wandb_workspaces.workspaces import interface as ws

    return ws.Workspace(
        entity=entity,
        project=project,
        name="moe-lightning",
        sections=[
            ws.Section(name=name, panels=list(_plots(panels)), is_open=True) for name, panels in sections.items()
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, smoothing_type="none"),
    )


def report(sections: dict[str, tuple[PanelSpec, ...]], entity: str, project: str) -> Report:
    """A report of the project's runs, a heading and a grid of panels for each section.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    _check_installed()
    from wandb_workspaces.reports.v2 import interface as wr

    blocks: list[Any] = []
    for name, panels in sections.items():
        runs = wr.Runset(entity=entity, project=project)
        blocks += [wr.H2(text=name), wr.PanelGrid(runsets=[runs], panels=list(_plots(panels)))]
    return wr.Report(entity=entity, project=project, title="moe-lightning", blocks=blocks)


def _plots(panels: tuple[PanelSpec, ...]) -> Iterator[LinePlot]:
    from wandb_workspaces.reports.v2 import interface as wr

    for panel in panels:
        yield wr.LinePlot(
            title=panel.title,
            x=STEP,
            y=list(panel.metrics),
            metric_regex=panel.pattern or None,
            title_x="step",
            title_y=panel.unit,
            plot_type=panel.style,
        )


def _check_installed() -> None:
    import importlib.util

    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigurationError('views need wandb-workspaces: pip install "moe-lightning[workspaces]"')


def _own_entity() -> str:
    """The entity that W&B takes for this login."""
    import wandb

    entity = wandb.Api().default_entity
    if not entity:
        raise ConfigurationError("W&B knows no default entity for this login: give --entity")
    return str(entity)
