"""The end of a run in a few lines: how good the model is beside counting models of the same text, how fast it was,
where its files lie.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from moe_lightning.callbacks.telemetry import Telemetry, perplexity
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.checkpoint.storage.registry import absolute, place_of
from moe_lightning.config import NonNegativeInt, validated
from moe_lightning.data.images import ImageData
from moe_lightning.data.ngram import ngram_cross_entropy
from moe_lightning.data.text import TextData
from moe_lightning.errors import ConfigurationError


@validated
class Summary(Callback):
    """Prints the summary after `trainer.validate`, after a training leaves its numbers in a JSON file too; rank 0 only.

    Args:
        path: of the JSON file; None: none.
        ngram_orders: counting models to compare with; each sees so many tokens before the one it predicts.
    """

    def __init__(self, path: str | None = None, ngram_orders: Sequence[NonNegativeInt] = (1, 2)) -> None:
        self._path = Path(path) if path else None
        self._orders = tuple(ngram_orders)
        self._started = time.perf_counter()
        self._imbalance: dict[str, float] = {}
        self._validated_step = -1
        self._has_trained = False

    def is_current(self, trainer: pl.Trainer) -> bool:
        """Whether this rank's last validation measured the model as it is."""
        return self._validated_step == trainer.global_step

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_trained = True
        names = ("moe/expert_imbalance_ratio", "moe/rank_imbalance_ratio")
        self._imbalance = {
            name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics
        }

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._validated_step = trainer.global_step
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.report(trainer)

    def report(self, trainer: pl.Trainer) -> None:
        """Print the summary with the numbers of the last validation."""
        if not trainer.is_global_zero:
            return
        numbers = self.numbers(trainer)
        if self._path is not None and self._has_trained:
            self._path.write_text(json.dumps(numbers, indent=2) + "\n")
        print("\n" + render(numbers, _files(trainer)), flush=True)

    def numbers(self, trainer: pl.Trainer) -> dict[str, float]:
        """What the summary says, by name."""
        numbers: dict[str, float] = {"steps": trainer.global_step} if self._has_trained else {}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        data = getattr(trainer, "datamodule", None)
        for name in ("loss", "accuracy", "top_5_accuracy"):
            if f"val/{name}" in metrics:
                numbers[f"val_{name}"] = metrics[f"val/{name}"]
        if "val/loss" in metrics and "val/accuracy" not in metrics:  # the classes are tokens
            numbers["val_perplexity"] = perplexity(metrics["val/loss"])
        if isinstance(data, TextData):
            numbers |= ngram_losses(data, self._orders)
        telemetry = next((c for c in trainer.callbacks if isinstance(c, Telemetry)), None)  # type: ignore[attr-defined]
        if telemetry is not None and telemetry.train_s:
            things = "images" if isinstance(data, ImageData) else "tokens"
            numbers[f"{things}_per_s"] = telemetry.tokens_trained * trainer.world_size / telemetry.train_s
        numbers |= {name.replace("moe/", ""): value for name, value in self._imbalance.items()}
        numbers["wall_s"] = time.perf_counter() - self._started
        return numbers


def ngram_losses(data: TextData, orders: Sequence[int]) -> dict[str, float]:
    """Cross-entropy of counting models on the windows that the model was validated on; orders that the vocabulary
    forbids are left out.
    """
    windows = data.val_dataloader().dataset
    held_out = np.concatenate([windows[index][1].numpy() for index in range(len(windows))])  # type: ignore[arg-type]
    losses = {}
    for order in orders:
        try:
            losses[f"order_{order}_loss"] = ngram_cross_entropy(
                data.corpus.train.open(), held_out, order, data.vocab_size
            )
        except ConfigurationError:
            continue
        except MemoryError:
            rank_zero_warn(f"the order-{order} model is left out: its counts need more memory than there is")
    return losses


def _files(trainer: pl.Trainer) -> dict[str, Place]:
    """Where the checkpoint, the logs and W&B's files lie."""
    files: dict[str, Place] = {}
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if checkpoint:
        files["checkpoint"] = place_of(checkpoint)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            files["metrics"] = Path(logger.log_dir) / "metrics.csv"
        if isinstance(logger, WandbLogger) and logger.experiment is not None:
            files["W&B"] = Path(logger.experiment.dir).parent
    return {name: _relative(path) for name, path in files.items()}


def _relative(path: Place) -> Place:
    path, here = absolute(path), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def render(numbers: Mapping[str, float], files: Mapping[str, Place]) -> str:
    """The summary as aligned lines."""
    rows: list[tuple[str, str]] = []
    if "val_loss" in numbers:
        token = f" a token, perplexity {numbers['val_perplexity']:.2f}" if "val_perplexity" in numbers else ""
        rows.append(("validation loss", f"{numbers['val_loss']:.4f} nats{token}"))
    if "val_accuracy" in numbers:
        five = f", {numbers['val_top_5_accuracy']:.1%} in the first five" if "val_top_5_accuracy" in numbers else ""
        rows.append(("accuracy", f"{numbers['val_accuracy']:.1%}{five}"))
    counting = [order for order in range(3) if f"order_{order}_loss" in numbers]
    rows += [(f"order-{order} model", f"{numbers[f'order_{order}_loss']:.4f}") for order in counting]
    for things in ("tokens", "images"):
        if f"{things}_per_s" in numbers:
            rows.append(("speed", f"{numbers[f'{things}_per_s']:,.0f} {things}/s over {numbers['steps']:,.0f} steps"))
    if "expert_imbalance_ratio" in numbers:
        after = numbers.get("rank_imbalance_ratio")
        ranks = f", ranks {after:.2f} after balancing" if after is not None else ""
        rows.append(("imbalance", f"experts {numbers['expert_imbalance_ratio']:.2f} (busiest over mean){ranks}"))
    rows.append(("time", f"{numbers['wall_s']:.0f} s in all"))
    rows += [(name, str(path)) for name, path in files.items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
