"""Progress display of training: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import validated
from moe_lightning.data.images import ImageData
from moe_lightning.data.instructions import InstructionData
from moe_lightning.data.text import TextData
from moe_lightning.models.gpt import GPT, model_size
from moe_lightning.moe.layer import moe_layers
from moe_lightning.strategies.stages import stages_of
from moe_lightning.text_table import in_columns

_WIDE = 100
"""Columns of a terminal from which on a bar is drawn beside the numbers."""

_BESIDE_STATUS = 22
"""Columns that both times take, and what stands between the columns of a line."""


@validated
class Console(ProgressBar):
    """Shows a headline, then progress every `log_every_n_steps` of the Trainer; rank 0 only.

    Args:
        style: "bar" draws a progress bar, "plain" prints lines, "auto" takes the bar on a terminal only, "none" shows
            nothing.

    Raises:
        ConfigurationError: an unknown style.
    """

    def __init__(self, style: Literal["auto", "bar", "plain", "none"] = "auto") -> None:
        super().__init__()
        self._style = style
        self._enabled = style != "none"
        self._is_described = False
        self._bar: Progress | None = None
        self._began = (0, 0.0)  # the step at which this process began to train, and when

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = self._style != "none"

    @property
    def _is_shown(self) -> bool:
        return self._enabled and self.trainer.is_global_zero

    # ------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        is_enabled = self._enabled
        super().setup(trainer, pl_module, stage)
        self._enabled = is_enabled  # which is off by now on other ranks, but a recovery may make one of them rank 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_described, self._is_described = self._is_described, True
        if not is_described:
            self._began = (trainer.global_step, time.monotonic())
        if not self._is_shown:
            return
        if self._bar is not None:  # after a recovery: its clock goes on
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
            return
        if not is_described:  # a recovery has a line of its own
            print(in_columns(describe(trainer, pl_module)), flush=True)
        if self._style == "bar" or (self._style == "auto" and sys.stdout.isatty()):
            self._bar = _progress_bar(RichConsole())
            self._bar.add_task(
                "", total=private_lightning.steps_of_training(trainer), completed=trainer.global_step, status=""
            )
            self._bar.start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._is_shown or private_lightning.is_accumulating(trainer):
            return
        logs = private_lightning.logs_now(trainer)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
            if logs:
                self._show(trainer, _status(trainer))
        elif logs:
            print("  ".join([_position(trainer), *_status(trainer), *self._time_left(trainer)]), flush=True)

    def _time_left(self, trainer: pl.Trainer) -> list[str]:
        """Return the time until the last step at the mean speed so far, validation included; [] if it is unknown."""
        (first, began), total = self._began, private_lightning.steps_of_training(trainer)
        done = trainer.global_step - first
        if not total or done <= 0 or trainer.global_step >= total:
            return []
        seconds = (time.monotonic() - began) / done * (total - trainer.global_step)
        return [f"{timedelta(seconds=round(seconds))} left"]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            batches = sum(trainer.num_val_batches)
            self.tell(f"validates on {batches:,} {'batch' if batches == 1 else 'batches'}")
        elif not trainer.sanity_checking:
            self._show(trainer, ["validates", *_status(trainer)])

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = trainer.callback_metrics.get("val/loss")
        if not self._is_shown or trainer.sanity_checking or loss is None or trainer.state.fn != "fit":
            return
        line = f"{_position(trainer)}  validation loss {float(loss):.4f}"
        if "val/accuracy" in trainer.callback_metrics:
            line += f", accuracy {float(trainer.callback_metrics['val/accuracy']):.1%}"
        self.tell(line)
        self._show(trainer, _status(trainer))

    def _show(self, trainer: pl.Trainer, parts: Sequence[str]) -> None:
        """Replace what stands beside the bar."""
        if self._bar is not None:
            total = len(str(private_lightning.steps_of_training(trainer) or trainer.global_step))
            room = self._bar.console.width - (2 * total + _BESIDE_STATUS)
            self._bar.update(self._bar.task_ids[0], status=_fitting(parts, room))

    def tell(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if not self._is_shown:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._is_described = False  # of the next fit
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._is_described = False
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _progress_bar(console: RichConsole) -> Progress:
    """A bar where there is room for one; the count of steps and the times are never squeezed."""
    drawn = [BarColumn(bar_width=None)] if console.width >= _WIDE else []
    return Progress(
        *drawn,
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TextColumn("<"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[status]}"),
        console=console,
        refresh_per_second=4,
        expand=bool(drawn),
    )


def _fitting(parts: Sequence[str], room: int) -> str:
    """As many of the parts as fit into the room, the first ones first."""
    shown = ""
    for part in parts:
        longer = f"{shown}  {part}" if shown else part
        if len(longer) > room:
            break
        shown = longer
    return shown


def describe(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """The headline: parameters, experts, ranks, data."""
    with stages_of(trainer).whole_module():
        layers, size = moe_layers(module), model_size(module)
    lines = [f"model  {_short(size.whole)} parameters"]
    if layers:
        blocks = next((f" of {len(m.blocks)}" for m in module.modules() if isinstance(m, GPT)), "")
        lines[0] += (
            f", {_short(size.active)} active for a token: "
            f"{layers[0].num_experts} experts in {len(layers)}{blocks} layers, top-{layers[0].router.config.top_k}"
        )
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, TextData | InstructionData | ImageData):
        lines += [f"data   {line}" for line in data.summary().splitlines()]
    device = trainer.strategy.root_device.type
    ranks = "1 rank" if trainer.world_size == 1 else f"{trainer.world_size} ranks"
    lines.append(f"ranks  {ranks} on {device}, {trainer.precision} precision")
    return "\n".join(lines)


def _short(count: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:.0f}"


def _position(trainer: pl.Trainer) -> str:
    total = private_lightning.steps_of_training(trainer)
    return f"step {trainer.global_step:>{len(str(total))}}/{total}" if total else f"step {trainer.global_step}"


def _status(trainer: pl.Trainer) -> list[str]:
    """The numbers of the last logging step in columns of fixed width."""
    metrics = trainer.callback_metrics
    parts = []
    if "train/loss" in metrics:
        parts.append(f"loss {float(metrics['train/loss']):.4f}")
    if "train/tokens_per_s" in metrics:
        things = "images" if isinstance(getattr(trainer, "datamodule", None), ImageData) else "tokens"
        parts.append(f"{_short(float(metrics['train/tokens_per_s'])):>6} {things}/s")
    if "moe/expert_imbalance_ratio" in metrics:
        imbalance = f"imbalance {float(metrics['moe/expert_imbalance_ratio']):.2f}"
        if "moe/rank_imbalance_ratio" in metrics:
            imbalance += f", ranks {float(metrics['moe/rank_imbalance_ratio']):.2f}"
        parts.append(imbalance)
    return parts
