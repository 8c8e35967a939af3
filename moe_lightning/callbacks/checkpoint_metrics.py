"""What is told of partial checkpoints as they are made."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.callbacks.wandb_logger import QuietWandbLogger
from moe_lightning.checkpoint.agent_control import warnings_of
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.checkpoint.snapshotter import Window
from moe_lightning.checkpoint.storage.registry import place_of


def log_checkpoint(trainer: pl.Trainer, session: CheckpointSession, plt: float) -> None:
    """Log the last snapshot, the last checkpoint that the agent has committed and the proportion of lost tokens; warn
    of what the agent complains of.
    """
    metrics: dict[str, float] = {
        "plt": plt,
        "k_snapshot": session.k_snapshot,
        "k_persist": session.k_persist,
        "predicted_bytes": session.predicted_bytes,
    }
    report, status = session.last_report, session.status()
    if report is not None:
        metrics |= {"snapshot_ms": 1e3 * report.copy_s, "snapshot_bytes": report.copied_bytes}
        copied = report.copied_by_window
        metrics |= {f"copied_{window.value}_bytes": size for window, size in copied.items()}
        if copied and report.copied_bytes:
            metrics["copied_in_bubbles"] = copied[Window.BUBBLE] / report.copied_bytes
    if status.committed_step is not None:
        metrics |= {"persist_ms": 1e3 * status.persist_s, "persist_bytes": status.persist_bytes}
    for warning in warnings_of(status):
        rank_zero_warn(warning)
    for logger in trainer.loggers:
        logger.log_metrics({f"checkpoint/{name}": value for name, value in metrics.items()}, trainer.global_step)
    log_committed(trainer, status.committed_path)


def log_committed(trainer: pl.Trainer, path: str | None) -> None:
    """Tell W&B's loggers of the newest whole checkpoint, where there is one."""
    for logger in trainer.loggers:
        if isinstance(logger, QuietWandbLogger) and path:
            logger.log_checkpoint(place_of(path))
