"""Lightning's own callbacks, loggers and tools beside the strategy; what docs/lightning.md promises.

Checkpoints by a monitored metric, early stopping, learning-rate monitors, validate, test and predict are in
tests/distributed/test_strategy.py; what is refused is in tests/distributed/test_wrong_configurations.py.
"""

from __future__ import annotations

import contextlib
import csv
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
    throughput_monitor,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from moe_lightning import CompileDense, ConfigurationError, ExpertModelSummary, GPTModule, OptimizerConfig
from moe_lightning.callbacks.dense_blocks import dense_parts
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.models.gpt import model_size
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, OwnModule, RandomTokens, Recorder, make_trainer

PEAK = 10**9


def tiny_gpt(**options: Any) -> GPTModule:
    return GPTModule(TINY | options, OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"))


def loader(batch_size: int = 12) -> DataLoader[Any]:
    return DataLoader(RandomTokens(96), batch_size=batch_size, shuffle=True)


def rows_of(folder: Path) -> list[dict[str, float]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


# ---------------------------------------------------------------------- throughput


def fit_with_throughput(rank: int, world_size: int, folder: str) -> None:
    throughput_monitor.get_available_flops = lambda *_: PEAK  # type: ignore[attr-defined]
    monitor = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch[0]), length_fn=lambda batch: batch[0].numel(), window_size=3
    )
    callbacks = [monitor, Telemetry(peak_flops_per_s=PEAK)]
    trainer = make_trainer(rank, world_size, {}, callbacks=callbacks, max_steps=5, logger=CSVLogger(folder))
    trainer.fit(tiny_gpt(), loader(), DataLoader(RandomTokens(12), batch_size=12))


def test_throughput_is_that_of_the_global_batch(tmp_path: Path) -> None:
    module = tiny_gpt()
    module.configure_model()
    flops_per_token = model_size(module).training_flops(1, 16, 2 * 32)
    run_ranks(2, fit_with_throughput, str(tmp_path))
    measured = [row for row in rows_of(tmp_path) if "train/device/mfu" in row]
    assert len(measured) == 3, "the window of three steps is full from the third on"
    for row in measured:
        assert row["train/samples"] == 6 * row["train/batches"], "each of two ranks sees half of 12"
        assert row["train/samples_per_sec"] == pytest.approx(2 * row["train/device/samples_per_sec"])
        assert row["train/items_per_sec"] == pytest.approx(16 * row["train/samples_per_sec"])
        assert row["train/flops_per_sec"] == pytest.approx(flops_per_token * row["train/items_per_sec"])
        assert row["train/device/mfu"] == pytest.approx(row["train/device/flops_per_sec"] / PEAK)
    for row in (row for row in rows_of(tmp_path) if "train/mfu_ratio" in row):
        assert row["train/mfu_ratio"] == pytest.approx(row["train/tokens_per_s"] * flops_per_token / 2 / PEAK, rel=0.5)


# ---------------------------------------------------------------------- loggers, bars, summaries


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(str(tmp_path), name="board")
    callbacks = [Telemetry(), LearningRateMonitor("step")]
    trainer = make_trainer(0, 1, {}, callbacks=callbacks, max_steps=3, logger=logger)
    trainer.fit(tiny_gpt(), loader())
    logger.finalize("success")
    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    assert {"train/loss", "train/tokens_per_s", "moe/layer01/expert_imbalance_ratio", "lr-AdamW/pg1"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lightnings_progress_bars(bar: type[pl.Callback], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(0, 1, {}, callbacks=[bar()], max_steps=2, enable_progress_bar=True)
    trainer.fit(tiny_gpt(), loader())
    assert "train/loss" in capsys.readouterr().out
    assert float(trainer.progress_bar_metrics["train/loss"]) > 0


def fit_with_summary(rank: int, world_size: int) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        trainer = make_trainer(
            rank, world_size, {}, callbacks=[ExpertModelSummary()], max_steps=1, enable_model_summary=True
        )
        trainer.fit(tiny_gpt(), loader())
    return shown.getvalue()


def test_the_summary_counts_each_expert_once() -> None:
    module = tiny_gpt()
    module.configure_model()
    shown = run_ranks(2, fit_with_summary)
    total = next(line for line in shown[0].splitlines() if line.startswith("Total params"))
    assert float(total.split()[2]) == pytest.approx(model_size(module).whole / 1e3, abs=0.06)
    assert "Params per Device" in shown[0]
    assert shown[1] == "", "rank 0 speaks"


def test_profilers(tmp_path: Path) -> None:
    from lightning.pytorch.profilers import SimpleProfiler

    profiler = SimpleProfiler(dirpath=str(tmp_path), filename="profile")
    trainer = make_trainer(0, 1, {}, max_steps=2, profiler=profiler)
    trainer.fit(tiny_gpt(), loader())
    assert "optimizer_step" in "".join(path.read_text() for path in tmp_path.glob("*profile*"))


# ---------------------------------------------------------------------- torch.compile


def fit_compiled(rank: int, world_size: int, backend: str | None, model: dict[str, Any], cp: int = 1) -> dict[str, Any]:
    compiling = [CompileDense(backend)] if backend else []
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, {"mesh": {"cp": cp}}, callbacks=[recorder, *compiling], max_steps=4)
    module = tiny_gpt(**model)
    trainer.fit(module, loader(), DataLoader(RandomTokens(30), batch_size=9))
    trainer.validate(module, DataLoader(RandomTokens(30), batch_size=7), verbose=False)
    return {
        "losses": recorder.losses,
        "validations": recorder.validations,
        "names": sorted(module.state_dict()),
        "compiled": compiling[0].compiled if compiling else [],
    }


MIXED = {"moe_every": 2, "num_shared_experts": 1, "dropout": 0.1}


def test_dense_parts_of_a_model() -> None:
    module = tiny_gpt(**MIXED)
    module.configure_model()
    parts = dict(dense_parts(module))
    assert list(parts) == [
        "model.blocks.0",
        "model.blocks.1.attention",
        "model.blocks.1.feed_forward.shared_expert",
    ]
    assert list(dense_parts(OwnModule())) == [], "single layers gain nothing"


def check_compiled(result: dict[str, Any], eager: dict[str, Any]) -> None:
    np.testing.assert_allclose(result["losses"], eager["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(result["validations"], eager["validations"], rtol=0, atol=1e-5)
    assert result["names"] == eager["names"], "checkpoints stay"
    assert len(result["compiled"]) == 3, "once, although validate follows fit"


def test_compiled_parts_compute_the_same() -> None:
    check_compiled(fit_compiled(0, 1, "eager", MIXED), fit_compiled(0, 1, None, MIXED))


@pytest.mark.slow
def test_compiled_parts_exchange_sequences() -> None:
    eager = fit_compiled(0, 1, None, MIXED)
    for result in run_ranks(2, fit_compiled, "eager", MIXED, 2):
        check_compiled(result, eager)


@pytest.mark.slow
def test_compiled_parts_on_two_ranks() -> None:
    eager = fit_compiled(0, 1, None, MIXED)
    for result in run_ranks(2, fit_compiled, "aot_eager", MIXED):
        check_compiled(result, eager)


@pytest.mark.slow
def test_compiled_parts_under_inductor() -> None:
    check_compiled(fit_compiled(0, 1, "inductor", MIXED), fit_compiled(0, 1, None, MIXED))


def test_what_cannot_be_compiled_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"backend='magic' is not known to torch\.compile"):
        CompileDense("magic")
    monkeypatch.setenv("CXX", "no-such-compiler")
    trainer = make_trainer(0, 1, {}, callbacks=[CompileDense()], max_steps=1)
    with pytest.raises(ConfigurationError, match="needs a C\\+\\+ compiler on the CPU and no-such-compiler is not"):
        trainer.fit(tiny_gpt(), loader())
