"""What the terminal shows: headline, plain lines, bar; and the summary at the end."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from moe_lightning import ConfigurationError, ExpertParallelStrategy, GPTModule, OptimizerConfig
from moe_lightning.callbacks.console import Console
from moe_lightning.callbacks.latest_checkpoint import LatestCheckpoint
from moe_lightning.callbacks.lost_tokens import planned_steps
from moe_lightning.callbacks.summary import Summary, ngram_cross_entropy, ngram_losses, render
from moe_lightning.callbacks.telemetry import Telemetry, perplexity
from moe_lightning.cli.training import Run, measure
from moe_lightning.data.text import TextData
from tests.distributed.training import TINY, RandomTokens, quiet_trainer


def _trainer(callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    common = {"log_every_n_steps": 2, "max_steps": 4, "enable_progress_bar": True}
    return quiet_trainer(strategy=ExpertParallelStrategy(), callbacks=callbacks, **common | options)


def _fit(callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    trainer = _trainer(callbacks, **options)
    module = GPTModule(TINY, OptimizerConfig(warmup_steps=0))
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=12), DataLoader(RandomTokens(12), batch_size=12))
    return trainer


class UnsizedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = RandomTokens(24)
        return iter([tuple(part[None] for part in samples[i]) for i in range(24)])


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_epochs": -1, "max_time": {"seconds": 60}}])
def test_a_training_of_unknown_length(capsys: pytest.CaptureFixture[str], limits: dict[str, Any]) -> None:
    stop = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step >= 4)
    )
    limits = {"max_steps": -1, "min_epochs": 0, **limits}
    with pytest.raises(
        ConfigurationError, match=r"optimizer.decay=cosine ends with the training, whose number of steps"
    ):
        _trainer([], **limits).fit(GPTModule(TINY), DataLoader(UnsizedStream(), batch_size=None))
    capsys.readouterr()
    trainer = _trainer([Console("plain"), stop], **limits)
    module = GPTModule(TINY, OptimizerConfig(warmup_steps=2, decay="constant"))
    trainer.fit(module, DataLoader(UnsizedStream(), batch_size=None))
    assert "\nstep 2  loss " in capsys.readouterr().out
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.optimizer_config.lr
    with pytest.raises(
        ConfigurationError, match="lost tokens needs the length of the training: give the Trainer max_s"
    ):
        planned_steps(trainer)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _fit([Telemetry(), Console("plain")], val_check_interval=4, check_val_every_n_epoch=None)
    lines = capsys.readouterr().out.splitlines()
    assert "6 experts in 2 of 2 layers, top-2" in lines[0]
    assert lines[1] == "ranks  1 rank on cpu, 32-true precision"
    assert lines[2].startswith("step 2/4  loss ")
    assert re.search(r"tokens/s  imbalance \d\.\d\d  0:0\d:\d\d left$", lines[2])
    assert lines[3].startswith("step 4/4  loss ")
    assert "left" not in lines[3]
    assert lines[4].startswith("step 4/4  validation loss ")


class _StartsAgain(pl.Callback):
    """Begins training a second time after a step, as a recovery does."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_train_start(trainer, pl_module)


def test_the_headline_is_not_repeated_after_a_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    _fit([Console("plain"), _StartsAgain()])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines].count("model") == 1
    assert [line[:5] for line in lines].count("ranks") == 1


def test_a_rank_that_a_recovery_makes_the_first_shows_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda trainer: trainer.global_step >= 1))
    _fit([Console("plain"), _StartsAgain()], val_check_interval=4, check_val_every_n_epoch=None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/4", "step 4/4", "step 4/4"]
    assert re.search(r"  0:00:\d\d left$", lines[0])
    assert "validation loss" in lines[2]


def test_auto_is_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _fit([Console()])
    assert "step 4/4  loss" in capsys.readouterr().out


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    _fit([Telemetry(), Console()])
    shown = screen.getvalue()
    assert "4/4" in shown
    assert "loss" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_recovery_continues_the_same_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[object] = []

    class Watched(_StartsAgain):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
            bars.append(console._bar)
            super().on_train_batch_end(trainer, pl_module, *rest)

    monkeypatch.setattr("sys.stdout", io.StringIO())
    console = Console("bar")
    _fit([console, Watched()])
    assert len(bars) == 4
    assert bars[0] is not None
    assert len({id(bar) for bar in bars}) == 1  # none is left behind on the screen, and the elapsed time goes on


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 160])
def test_the_count_of_steps_is_shown_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    _fit([Telemetry(), Console("bar")])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    shown = [line for line in lines if "4/4" in line]
    assert shown
    assert "loss " in shown[-1]
    assert len(shown[-1].rstrip()) <= columns
    assert ("imbalance" in shown[-1]) == (columns > 60)


def test_a_validation_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    console, shown = Console("bar"), []

    def note(*_: Any) -> None:
        if console._bar is not None:
            shown.append(console._bar.tasks[0].fields["status"].partition(" ")[0])

    watch = pl.callbacks.LambdaCallback(on_validation_batch_start=note, on_train_batch_start=note)
    trainer = _fit([console, watch], val_check_interval=2, check_val_every_n_epoch=None, max_steps=3)
    assert shown == ["", "", "validates", "loss"]
    capsys.readouterr()
    trainer.validate(trainer.lightning_module, DataLoader(RandomTokens(24), batch_size=12), verbose=False)
    assert capsys.readouterr().out.splitlines()[0] == "validates on 2 batches"


def test_none_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _fit([Console("none")])
    assert capsys.readouterr().out == ""


def test_unknown_style() -> None:
    with pytest.raises(ConfigurationError, match="'loud'"):
        Console("loud")  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    (tmp_path / "words.txt").write_text("".join(f"line {i} of some text\n" for i in range(2000)))
    data = TextData(source=str(tmp_path / "words.txt"), cache_dir=tmp_path / "cache", context_length=16, val_samples=20)
    data.setup()
    return data


def test_counting_models_see_the_validated_windows(text: TextData) -> None:
    windows = text.val_dataloader().dataset
    held_out = np.concatenate([windows[i][1].numpy() for i in range(20)])
    losses = ngram_losses(text, [0, 1])
    assert losses["order_1_loss"] == ngram_cross_entropy(text.corpora[0].train.open(), held_out, 1, 256)
    assert losses["order_1_loss"] < losses["order_0_loss"]


def test_counting_models_see_the_tokens_of_packs(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"text {i} of some\n\n" for i in range(400)))
    options: dict[str, Any] = {"source": str(tmp_path / "texts.txt"), "cache_dir": tmp_path / "cache"}
    data = TextData(**options, context_length=24, packing=True, val_fraction=0.2, val_samples=None)
    data.setup()
    packs = data.val_dataloader().dataset
    targets = np.concatenate([packs[i][1].numpy() for i in range(len(packs))])
    assert targets.min() < 0
    losses = ngram_losses(data, [1])
    assert losses == {"order_1_loss": ngram_cross_entropy(data.corpora[0].train.open(), targets[targets >= 0], 1, 256)}


@pytest.mark.parametrize(
    ("limit", "micro_batches", "windows"), [(1, 1, 8), (2, 1, 16), (1.0, 1, 20), (0, 1, 20), (3, 2, 12)]
)
def test_counting_models_see_what_the_limit_leaves(
    text: TextData, limit: float, micro_batches: int, windows: int, tmp_path: Path
) -> None:
    text.global_batch_size = 8
    accumulating = {"accumulate_grad_batches": micro_batches}
    trainer = _trainer([Console("none")], limit_val_batches=limit, max_steps=2, **accumulating)
    trainer.fit(GPTModule(TINY | {"vocab_size": 256}), datamodule=text)
    numbers = Summary(str(tmp_path / "summary.json"), [1]).numbers(trainer)
    samples = text.val_dataloader().dataset
    held_out = np.concatenate([samples[i][1].numpy() for i in range(windows)])
    assert numbers["order_1_loss"] == ngram_cross_entropy(text.corpora[0].train.open(), held_out, 1, 256)


def test_orders_that_cannot_be_counted_are_left_out(text: TextData) -> None:
    assert set(ngram_losses(text, [1, 9])) == {"order_1_loss"}


def test_an_order_that_the_memory_does_not_hold_is_left_out(text: TextData, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(train: Any, val: Any, order: int, vocab_size: int) -> float:
        if order:
            raise MemoryError
        return 1.0

    monkeypatch.setattr("moe_lightning.callbacks.summary.ngram_cross_entropy", counted)
    with pytest.warns(UserWarning, match="the order-1 model is left out: its counts need more memory than there is"):
        assert ngram_losses(text, [0, 1]) == {"order_0_loss": 1.0}


@pytest.mark.parametrize(("loss", "expected"), [(709.0, math.exp(709.0)), (1e6, math.inf), (math.inf, math.inf)])
def test_a_loss_beyond_the_largest_exponent_has_an_infinite_perplexity(
    tmp_path: Path, loss: float, expected: float
) -> None:
    trainer = _trainer([Telemetry()])
    trainer._logger_connector._callback_metrics = {"val/loss": torch.tensor(loss, dtype=torch.float64)}
    assert perplexity(loss) == expected
    assert Summary(str(tmp_path / "summary.json"), []).numbers(trainer)["val_perplexity"] == expected


def test_summary_after_validation(text: TextData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary(str(tmp_path / "summary.json"), [1])
    checkpoint = LatestCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3)
    trainer = _trainer([Telemetry(), Console("none"), summary, checkpoint], enable_checkpointing=True)
    module = GPTModule(TINY | {"vocab_size": 256})
    trainer.fit(module, datamodule=text)
    assert "validation loss" not in capsys.readouterr().out
    trainer.validate(module, datamodule=text, verbose=False)
    out = capsys.readouterr().out
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["steps"] == 4
    assert f"{numbers['val_loss']:.4f}" in out
    assert f"{numbers['order_1_loss']:.4f}" in out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000004.ckpt"]
    assert "step-0000004.ckpt" in out


def test_a_model_that_was_just_validated_is_summed_up_as_it_is(
    text: TextData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = Summary(str(tmp_path / "summary.json"), [])
    trainer = _trainer([Console("none"), summary], val_check_interval=2, check_val_every_n_epoch=None, max_steps=3)
    module, validations = GPTModule(TINY | {"vocab_size": 256}), []
    module.on_validation_start = lambda: validations.append(trainer.global_step)  # type: ignore[method-assign]
    trainer.fit(module, datamodule=text)
    run = Run(trainer=trainer, module=module, data=text)
    measure(run)
    assert validations == [2, 3], "the last step had not been validated"
    trainer = _trainer([Console("none"), summary], val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(module, datamodule=text)
    capsys.readouterr()
    measure(Run(trainer=trainer, module=module, data=text))
    assert validations == [2, 3, 2, 4]
    assert "validation loss" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4


def test_summary_lines_are_aligned() -> None:
    numbers = {
        "steps": 10,
        "val_loss": 1.0,
        "val_perplexity": 2.718,
        "order_1_loss": 2.5,
        "tokens_per_s": 1e4,
        "wall_s": 3.2,
    }
    lines = render(numbers, {"checkpoint": Path("a/b.ckpt")}).splitlines()
    assert lines[0] == "validation loss  1.0000 nats a token, perplexity 2.72"
    assert lines[-1] == "checkpoint       a/b.ckpt"
    assert all(line[15:17] == "  " and line[17] != " " for line in lines)
