"""Summary of a run at its end: quality beside n-gram models of the same text, speed, and paths of its files.

The n-gram models use interpolated absolute discounting: every seen count is reduced by a discount d, and the mass that
this frees is spread by the next shorter context's distribution (Chen & Goodman 1999, section 2.7).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from moe_lightning.callbacks.telemetry import Telemetry, perplexity
from moe_lightning.checkpoint.storage import absolute, place_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, validated
from moe_lightning.data.images import ImageData
from moe_lightning.data.text import TextData
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import replace_text
from moe_lightning.moe.losses import IGNORED_TARGET

_MAX_CELLS = 1 << 24  # int64 counts, 128 MiB: a vocabulary of 4096 at order 1, of 256 at order 2
_PIECE = 1 << 22  # tokens counted at once
_LEAST_DISCOUNT = 0.05  # so that no token has the probability 0

Codes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Counts of n-grams, coded as numbers in base V, and of what follows their contexts (all but the last token)."""

    counts: Counts  # [V**n]
    totals: Counts  # [V**(n-1)]
    distinct: Counts  # [V**(n-1)]
    discount: float

    @classmethod
    def of(cls, counts: Counts, vocab_size: int) -> _Table:
        rows = counts.reshape(-1, vocab_size)
        return cls(
            counts=counts, totals=rows.sum(1), distinct=np.count_nonzero(rows, axis=1), discount=_discount(counts)
        )

    def probabilities(self, codes: Codes, lower: Floats, vocab_size: int) -> Floats:
        """P(last token | context) of coded n-grams; `lower` is what the next shorter context says, [count]."""
        contexts = codes // vocab_size
        totals = self.totals[contexts]
        kept = np.maximum(self.counts[codes] - self.discount, 0.0)
        given_up = self.discount * self.distinct[contexts]
        return np.where(totals > 0, (kept + given_up * lower) / np.maximum(totals, 1), lower)


def _discount(counts: Counts) -> float:
    """n1 / (n1 + 2 n2), for n1 n-grams that are seen once and n2 that are seen twice (Ney et al. 1994)."""
    once, twice = (int(np.count_nonzero(counts == times)) for times in (1, 2))
    return max(_LEAST_DISCOUNT, once / max(1, once + 2 * twice))


def ngram_cross_entropy(
    train: npt.NDArray[np.integer], val: npt.NDArray[np.integer], order: int, vocab_size: int
) -> float:
    """Mean negative log likelihood of `val` under an n-gram model of `train`.

    Args:
        train, val: tokens below `vocab_size`, [count], more than `order`.
        order: tokens of context.
        vocab_size: counts are kept in a dense table of vocab_size ** (order + 1) cells.

    Returns:
        nats per token, over the tokens of `val` that have a whole context.

    Raises:
        ConfigurationError: a token outside the vocabulary.
    """
    tables, surprise = _tables(_count(train, order, vocab_size), order, vocab_size), 0.0
    for codes in _pieces(val, order, vocab_size):
        likelihood = np.full(len(codes), 1.0 / vocab_size)
        for table in tables:
            likelihood = table.probabilities(codes % len(table.counts), likelihood, vocab_size)
        surprise -= float(np.log(likelihood).sum())
    return surprise / (len(val) - order)


def _codes(tokens: npt.NDArray[np.integer], order: int, vocab_size: int) -> Codes:
    """Each (order + 1)-gram as a number in base V, [count - order]; its last k digits are the k-gram ending there."""
    count = len(tokens) - order
    codes = np.zeros(count, np.int64)
    for place in range(order + 1):
        codes *= vocab_size
        codes += tokens[place : place + count].astype(np.int64)
    if codes.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ConfigurationError(
            f"Tokens {tokens.min()} to {tokens.max()} do not fit vocab_size={vocab_size}; give the right size."
        )
    return codes


def _pieces(text: npt.NDArray[np.integer], order: int, vocab_size: int) -> Iterator[Codes]:
    """Yield the codes of a text in pieces."""
    for start in range(0, len(text) - order, _PIECE):
        yield _codes(text[start : start + _PIECE + order], order, vocab_size)


def _count(text: npt.NDArray[np.integer], order: int, vocab_size: int) -> Counts:
    """Count each (order + 1)-gram of a text, [V**(order + 1)]."""
    counts = np.zeros(vocab_size ** (order + 1), np.int64)
    for codes in _pieces(text, order, vocab_size):
        counts += np.bincount(codes, minlength=len(counts))
    return counts


def _tables(counts: Counts, order: int, vocab_size: int) -> list[_Table]:
    """The tables of 1-grams up to (order + 1)-grams, marginalised over the oldest token."""
    tables = [_Table.of(counts, vocab_size)]
    for _ in range(order):
        counts = counts.reshape(vocab_size, -1).sum(0)
        tables.insert(0, _Table.of(counts, vocab_size))
    return tables


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
        """True if this rank's last validation measured the model as it is."""
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
            replace_text(self._path, json.dumps(numbers, indent=2) + "\n")
        print("\n" + render(numbers, _files(trainer)), flush=True)

    def numbers(self, trainer: pl.Trainer) -> dict[str, float]:
        """Numbers of the summary by name."""
        numbers: dict[str, float] = {"steps": trainer.global_step} if self._has_trained else {}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        data = getattr(trainer, "datamodule", None)
        for name in ("loss", "accuracy", "top_5_accuracy"):
            if f"val/{name}" in metrics:
                numbers[f"val_{name}"] = metrics[f"val/{name}"]
        if "val/loss" in metrics and "val/accuracy" not in metrics:  # the classes are tokens
            numbers["val_perplexity"] = perplexity(metrics["val/loss"])
        if isinstance(data, TextData) and len(data.corpora) == 1:
            batch_size = data.val_dataloader().step_sampler.cut.global_batch_size
            validated = sum(trainer.num_val_batches) * batch_size
            numbers |= ngram_losses(data, self._orders, validated or math.inf)
        telemetry = private_lightning.callback_of(trainer, Telemetry)
        if telemetry is not None and telemetry.train_s:
            things = "images" if isinstance(data, ImageData) else "tokens"
            numbers[f"{things}_per_s"] = telemetry.tokens_trained / telemetry.train_s
        numbers |= {name.replace("moe/", ""): value for name, value in self._imbalance.items()}
        numbers["wall_s"] = time.perf_counter() - self._started
        return numbers


def ngram_losses(data: TextData, orders: Sequence[int], most: float = math.inf) -> dict[str, float]:
    """Cross-entropy of counting models on the windows that the model was validated on; orders whose table would be too
    large, or whose contexts are longer than the text, are left out.

    Args:
        most: of the held-out windows, the first ones, as under `trainer.limit_val_batches`.
    """
    windows = data.val_dataloader().dataset
    count = int(min(most, len(windows)))  # type: ignore[arg-type]
    held_out = np.concatenate([windows[index][1].numpy() for index in range(count)])
    held_out = held_out[held_out != IGNORED_TARGET]  # what is left of a pack
    train, losses = data.corpora[0].train.open(), dict[str, float]()
    for order in orders:
        if data.vocab_size ** (order + 1) > _MAX_CELLS or order >= min(len(train), len(held_out)):
            continue
        try:
            losses[f"order_{order}_loss"] = ngram_cross_entropy(train, held_out, order, data.vocab_size)
        except MemoryError:
            rank_zero_warn(f"the order-{order} model is left out: its counts need more memory than there is")
    return losses


def _files(trainer: pl.Trainer) -> dict[str, Place]:
    """Paths of the checkpoint, the logs and W&B's files."""
    files: dict[str, Place] = {}
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if checkpoint:
        files["checkpoint"] = place_of(checkpoint)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            files["metrics"] = Path(logger.log_dir) / "metrics.csv"
        if isinstance(logger, WandbLogger) and logger.experiment is not None:
            files["W&B"] = Path(logger.experiment.dir).parent
    # WANDB_MODE=disabled names a folder that is never made.
    return {name: _relative(path) for name, path in files.items() if not isinstance(path, Path) or path.exists()}


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
    counted = [name for name in numbers if name.startswith("order_")]
    rows += [(f"order-{name.split('_')[1]} model", f"{numbers[name]:.4f}") for name in counted]
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
