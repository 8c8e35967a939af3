"""The recoveries of a run as a table: recoveries.csv beside a CSV logger's metrics, a table of W&B, text of
TensorBoard.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from moe_lightning.strategies.recovery import RecoveryReport

COLUMNS = (
    "step",
    "began_at",
    "reason",
    "lost_ranks",
    "ranks_before",
    "ranks_after",
    "restored",
    "steps_lost",
    "stale_experts",
    "total_s",
)


def table_row(report: RecoveryReport) -> list[Any]:
    """The values of `COLUMNS`; the time in UTC, lost ranks with spaces between them."""
    return [
        report.step,
        datetime.fromtimestamp(report.began_at, UTC).isoformat(timespec="milliseconds"),
        report.reason,
        " ".join(map(str, report.lost_ranks)),
        report.ranks_before,
        report.ranks_after,
        report.restored,
        report.steps_lost,
        report.stale_experts,
        round(report.seconds["total"], 3),
    ]


def log_table(loggers: Iterable[Logger], reports: Sequence[RecoveryReport]) -> None:
    """Add the last of this process's recoveries to the table of each logger; on the logging rank only."""
    rows = [table_row(report) for report in reports]
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _append(Path(logger.log_dir) / "recoveries.csv", rows[-1])
        elif isinstance(logger, WandbLogger):
            import wandb

            table: Any = wandb.Table(columns=list(COLUMNS), data=rows)
            logger.log_metrics({"recovery/table": table}, reports[-1].step)
        elif isinstance(logger, TensorBoardLogger):
            text = "  \n".join(f"**{name}** {value}" for name, value in zip(COLUMNS, rows[-1], strict=True))
            logger.experiment.add_text("recovery/table", text, reports[-1].step)


def _append(path: Path, row: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([COLUMNS, row] if is_new else [row])
