"""Metrics of a step against the counts they come from, the expert-load file, and silence on steps that do not log."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from moe_lightning import ConfigurationError, ExpertParallelStrategy, GPTModule, MoELayer, OptimizerConfig
from moe_lightning.arrays import IntArray
from moe_lightning.callbacks import telemetry
from moe_lightning.callbacks.routing_health import imbalance
from moe_lightning.callbacks.telemetry import Metric, Telemetry, averages_over_layers, layer_metrics, reduced
from moe_lightning.models.gpt import model_size
from moe_lightning.moe.layer import LayerStatistics
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, RandomTokens, make_trainer, quiet_trainer

LENGTH = RandomTokens().length
IDS = torch.zeros(3, 5, dtype=torch.int64)


class Logged(pl.Callback):
    """The numbers that Telemetry logged at each step that logs."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer._logger_connector.should_update_logs:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.steps[trainer.global_step] = metrics


def _fit(callbacks: list[pl.Callback], *, steps: int = 6, **options: Any) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    checkpoint = options.pop("ckpt_path", None)
    common = {"max_steps": steps, "gradient_clip_val": 1.0, "log_every_n_steps": 3}
    trainer = quiet_trainer(strategy=ExpertParallelStrategy(), callbacks=callbacks, **common | options)
    module = GPTModule(TINY, OptimizerConfig(lr=2e-3, warmup_steps=0, decay="constant"))
    held_out = DataLoader(RandomTokens(24), batch_size=12) if options.get("num_sanity_val_steps") else None
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=12), held_out, ckpt_path=checkpoint)
    return trainer


def _layer(
    tokens_NE: list[list[int]], computed_NE: list[list[int]] | None = None, loads: IntArray | None = None
) -> MoELayer:
    tokens = torch.tensor(tokens_NE)
    layer = MoELayer(8, 8, num_experts=tokens.shape[1])
    computed = tokens if computed_NE is None else torch.tensor(computed_NE)
    layer.statistics = LayerStatistics(tokens_NE=tokens, computed_NE=computed, rank_loads=loads)
    return layer


def test_the_time_of_a_fault_and_of_the_steps_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    pace = telemetry._Pace()

    def step() -> None:
        now[0] += 1.0
        pace.add_batch(100, 0.0)
        pace.end_step()

    pace.begin()
    for _ in range(9):
        step()
    now[0] += 2.0  # a fault in the tenth step, and what it takes
    pace.begin()
    step()
    assert (pace.tokens, pace.end()) == (1000, 12.0)


def test_a_fit_after_one_that_failed_counts_its_own_tokens_and_time() -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("of the user")

    own = Telemetry()
    with pytest.raises(RuntimeError, match="of the user"):
        _fit([own, Fails()])
    time.sleep(0.3)
    began = time.perf_counter()
    _fit([own], steps=3)
    assert own.tokens_trained == 3 * 12 * LENGTH
    assert own.train_s < time.perf_counter() - began


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    assert imbalance(torch.tensor([4, 2, 0])) == 2.0
    assert imbalance(torch.tensor([3, 3])) == 1.0
    assert imbalance(torch.zeros(4)) == 1.0


def test_numbers_of_a_layer() -> None:
    metrics = {m.name: m.value for m in layer_metrics(0, _layer([[6, 2], [4, 0]], [[3, 2], [3, 0]]))}
    assert metrics["moe/layer00/expert_imbalance_ratio"] == pytest.approx(10 / 6)
    assert metrics["moe/layer00/dropped_fraction"] == pytest.approx(4 / 12)
    idle = {m.name: m.value for m in layer_metrics(0, _layer([[0, 0], [0, 0]]))}
    assert idle["moe/layer00/dropped_fraction"] == 0.0


def test_numbers_of_ranks_come_from_the_dispatcher() -> None:
    layer = _layer([[6, 2], [4, 0]], loads=np.array([9, 3]))
    layer.dispatcher._backend.rows_to_ranks, layer.dispatcher._backend._row_bytes = [7, 5], 32
    metrics = {m.name: m for m in layer_metrics(0, layer)}
    assert [name for name in metrics if name.replace("layer00", "layerNN") not in str(Telemetry.__doc__)] == []
    assert metrics["moe/layer00/rank_imbalance_ratio"].value == 1.5
    assert (metrics["comm/layer00/exchanged_rows"].value, metrics["comm/layer00/exchanged_rows"].over_ranks) == (
        5,
        "sum",
    )
    assert metrics["comm/layer00/exchanged_bytes"].value == 160


def test_averages_over_layers() -> None:
    layers = _layer([[3, 1]]), _layer([[2, 2]])
    metrics = {m.name: m.value for number, layer in enumerate(layers) for m in layer_metrics(number, layer)}
    assert metrics["moe/layer01/expert_imbalance_ratio"] == 1.0
    averages = averages_over_layers(metrics | {"balance/layer00/expert_imbalance_ratio": 9.0})
    assert averages["moe/expert_imbalance_ratio"] == pytest.approx(1.25)  # over its area only


def test_a_layer_that_never_ran_has_no_numbers() -> None:
    assert list(layer_metrics(0, MoELayer(8, 8, num_experts=2))) == []


def test_warns_of_a_layer_whose_routing_has_collapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "expert_loads", lambda layers: {0: [0.0, 1.0, 0.0, 0.0]})
    logged = Logged()
    with pytest.warns(UserWarning, match=r"3 of 4 experts of MoE layer 0 \(0, 2, 3\) .* collapsed") as warned:
        _fit([Telemetry(), logged], steps=24, log_every_n_steps=1)
    assert len([one for one in warned if "experts of MoE layer" in str(one.message)]) == 1
    assert logged.steps[24]["moe/dead_experts_count"] == 3


def test_a_model_without_experts_has_no_file_of_loads(tmp_path: Path) -> None:
    path = tmp_path / "expert_load.csv"
    options = {"callbacks": [Telemetry(str(path))], "max_steps": 1, "log_every_n_steps": 1}
    trainer = quiet_trainer(strategy=ExpertParallelStrategy(), **options)
    trainer.fit(GPTModule(TINY | {"num_experts": 0}), DataLoader(RandomTokens(12), batch_size=12))
    assert trainer.callback_metrics["train/tokens_per_s"] > 0
    assert not path.exists()


def test_the_learning_rate_is_the_one_that_the_step_used() -> None:
    logged = Logged()
    trainer = quiet_trainer(callbacks=[Telemetry(), logged], max_steps=3, log_every_n_steps=1)
    module = GPTModule(TINY, OptimizerConfig(lr=2e-3, warmup_steps=2, decay="constant"))
    used: list[float] = []
    module.on_before_optimizer_step = lambda optimizer: used.append(optimizer.param_groups[0]["lr"])  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(RandomTokens(36), batch_size=12))
    assert len(set(used)) > 1
    assert [logged.steps[step]["train/lr"] for step in (1, 2, 3)] == pytest.approx(used)


def test_logs_every_n_steps(tmp_path: Path) -> None:
    logged = Logged()
    path = tmp_path / "expert_load.csv"
    callback = Telemetry(str(path))
    _fit([callback, logged])
    assert sorted(logged.steps) == [3, 6]
    for metrics in logged.steps.values():
        assert metrics["train/tokens_per_s"] > 0
        assert metrics["train/step_ms"] > 0
        assert metrics["train/gradient_norm"] > 0
        assert metrics["train/lr"] == pytest.approx(2e-3)
        assert metrics["moe/layer01/auxiliary_loss"] > 0
        assert metrics["moe/layer01/dropped_fraction"] == 0
    assert callback.tokens_trained == 6 * 12 * 16
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    assert head == ["step", "layer", *(f"expert_{expert}" for expert in range(TINY["num_experts"]))]
    assert [row[:2] for row in rows] == [["3", "0"], ["3", "1"], ["6", "0"], ["6", "1"]]
    assert all(len(row) == 2 + TINY["num_experts"] for row in rows)


class Recorded(Logger):
    """What a run writes down, by step."""

    name, version = "recorded", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[int, dict[str, float]] = {}
        self.parameters: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.metrics.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params: dict[str, Any], *_: Any) -> None:
        self.parameters |= params


def test_perplexity_tokens_and_the_size_of_the_model(tmp_path: Path) -> None:
    recorded = Recorded()
    options = {"logger": recorded, "num_sanity_val_steps": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    trainer = _fit([Telemetry()], **options)
    assert [recorded.metrics[step]["train/tokens_seen"] for step in (2, 5)] == [36 * LENGTH, 72 * LENGTH]
    assert [step for step, row in recorded.metrics.items() if "val/perplexity" in row] == [2, 5]
    for row in (recorded.metrics[2], recorded.metrics[5]):
        assert row["val/perplexity"] == pytest.approx(math.exp(row["val/loss"]), rel=1e-5)
    sizes = model_size(trainer.lightning_module)
    assert recorded.parameters["parameters/whole"] == sizes.whole > recorded.parameters["parameters/active"]


def test_perplexity_is_in_the_row_of_its_loss() -> None:
    """Every second validation lies between the two batches of a step."""
    recorded = Recorded()
    options = {"logger": recorded, "num_sanity_val_steps": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    _fit([Telemetry()], accumulate_grad_batches=2, **options)
    rows = [row for row in recorded.metrics.values() if "val/loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert row["val/perplexity"] == pytest.approx(math.exp(row["val/loss"]), rel=1e-5)


def test_tokens_are_counted_on_over_a_resume(tmp_path: Path) -> None:
    """As if the run had never stopped."""
    trainer = _fit([Telemetry()], steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, recorded = Telemetry(), Recorded()
    _fit([resumed], steps=6, logger=recorded, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.tokens_seen == 72 * LENGTH
    assert recorded.metrics[5]["train/tokens_seen"] == 72 * LENGTH


def test_steps_that_a_rollback_undoes_do_not_count() -> None:
    """A survivor loads the state of a checkpoint after step 5; steps 4 and 5 are not in it."""
    counted = Telemetry()

    def roll_back(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            counted.load_state_dict({"tokens_seen": 36 * LENGTH})

    _fit([counted, LambdaCallback(on_train_batch_end=roll_back)], steps=6)
    assert counted.tokens_seen == (36 + 12) * LENGTH, "step 6 alone was made since then"
    assert counted.tokens_trained == (36 + 12) * LENGTH


@pytest.mark.parametrize("fault_in", ["expert_loads", "reduced"])
def test_a_hook_that_is_run_again_counts_its_step_once(fault_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeats(Telemetry):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            with monkeypatch.context() as patched:
                if trainer.global_step == 3:
                    patched.setattr(telemetry, fault_in, fault)
                    with pytest.raises(ZeroDivisionError):
                        super().on_train_batch_end(trainer, *arguments)
                    self._pace.begin()
            super().on_train_batch_end(trainer, *arguments)

    def fault(*_: Any) -> None:
        raise ZeroDivisionError

    counted, logged = Repeats(), Logged()
    _fit([counted, logged], steps=6)
    assert (counted.tokens_seen, counted.tokens_trained) == (72 * LENGTH, 72 * LENGTH)
    assert counted.train_s == pytest.approx(sum(3e-3 * logged.steps[step]["train/step_ms"] for step in (3, 6)))


def _tokens_on_ranks(rank: int, world_size: int) -> int:
    counted = Telemetry()
    trainer = make_trainer(rank, world_size, callbacks=[counted], max_steps=6, log_every_n_steps=3)
    trainer.fit(GPTModule(TINY), DataLoader(RandomTokens(96), batch_size=12))
    return counted.tokens_seen


def test_tokens_of_all_ranks_count() -> None:
    assert run_ranks(2, _tokens_on_ranks) == [72 * LENGTH] * 2


def test_steps_that_do_not_log_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    of_layer = telemetry.layer_metrics
    monkeypatch.setattr(telemetry, "layer_metrics", lambda *layer: calls.append(layer[0]) or of_layer(*layer))
    _fit([Telemetry()], steps=5)
    assert calls == [0, 1]


def test_micro_batches_count_as_one_step() -> None:
    logged = Logged()
    callback = Telemetry()
    _fit([callback, logged], steps=3, accumulate_grad_batches=2)
    assert callback.tokens_trained == 3 * 2 * 12 * 16


def _reduce_on_ranks(rank: int, world_size: int) -> dict[str, float]:
    class Fake:
        world_size, lightning_module = 2, torch.nn.Module()

        class strategy:  # noqa: N801
            root_device = torch.device("cpu")

            @staticmethod
            def reduce(tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
                from lightning.fabric.utilities.distributed import _sync_ddp

                return _sync_ddp(tensor, reduce_op=reduce_op)

    metrics = [
        Metric(name="a", value=1.0 + rank, over_ranks="sum"),
        Metric(name="b", value=1.0 + rank, over_ranks="mean"),
        Metric(name="weighted", value=1.0 + rank, over_ranks="mean", weight=1 + 2 * rank),
        Metric(name="of no sample", value=math.inf, over_ranks="mean", weight=0),
        Metric(name="c", value=1.0 + rank, over_ranks="max"),
        Metric(name="d", value=7.0),
    ]
    return reduced(metrics, Fake())  # type: ignore[arg-type]


def test_reductions_over_ranks() -> None:
    assert run_ranks(2, _reduce_on_ranks) == [{"a": 3.0, "b": 1.5, "weighted": 1.75, "c": 2.0, "d": 7.0}] * 2


def test_mfu_is_the_models_work_over_what_the_devices_could_do() -> None:
    logged = Logged()
    _fit([Telemetry(peak_flops_per_s=1e9), logged])
    first, second = (logged.steps[step] for step in sorted(logged.steps))
    elapsed_s = first["train/step_ms"] * 3 / 1e3
    dense = 2 * (3 * 32 * 32 + 32 * 32) + 64 * 32  # attention of two layers, the tied head
    moe = 2 * (6 * 32 + 2 * (32 * 48 + 48 * 32))  # the router, two of six experts
    flops_per_token = 6 * (dense + moe) + 12 * 2 * 32 * 16
    assert first["train/mfu_ratio"] == pytest.approx(3 * 12 * 16 * flops_per_token / elapsed_s / 1e9)
    assert second["train/mfu_ratio"] > 0


def test_no_mfu_where_the_peak_or_the_work_is_not_known() -> None:
    logged = Logged()
    _fit([Telemetry(), logged])
    assert not any("train/mfu_ratio" in metrics for metrics in logged.steps.values())
    assert telemetry.known_peak(torch.device("cpu"), "32-true") is None
    with pytest.raises(ConfigurationError, match="peak_flops_per_s=0 of Telemetry must be a number above 0"):
        Telemetry(peak_flops_per_s=0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA A40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_no_gpu_gets_the_peak_of_another(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert telemetry.known_peak(torch.device("cuda"), "bf16-mixed") == peak


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((IDS, torch.zeros(3, 5)), 15),
        ((IDS, IDS, torch.eye(3, 5, dtype=torch.bool)), 3),
        ({"input_ids": IDS, "attention_mask": torch.eye(3, 5, dtype=torch.int64), "labels": IDS}, 3),
        ({"x": IDS, "is_token": torch.eye(3, 5, dtype=torch.bool)}, 3),
        ({"x": IDS, "loss_mask": torch.eye(3, 5, dtype=torch.bool)}, 15),
        ((IDS, torch.eye(3, 5, dtype=torch.bool)), 15),
        ((torch.zeros(3, 2, 4, 4, dtype=torch.uint8), torch.zeros(3)), 3),
        ({"x": torch.zeros(3, 5)}, 3),
        (torch.tensor(1.0), 0),
        ("text", 0),
    ],
)
def test_what_is_counted_of_a_batch(batch: Any, count: int) -> None:
    assert telemetry._num_tokens(batch) == count


def test_a_validation_before_training_is_no_training_time() -> None:
    logged = Logged()
    began = time.perf_counter()
    _fit([Telemetry(), logged], num_sanity_val_steps=2)
    assert logged.steps[3]["train/step_ms"] * 3 < 1e3 * (time.perf_counter() - began)


def test_the_exchanges_of_a_validation_are_none_of_a_step() -> None:
    clock = SimpleNamespace(seconds=0.0, watch=lambda: None)
    world = SimpleNamespace(is_connected=True, exchanges=clock)
    strategy = SimpleNamespace(world=world, root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        strategy=strategy, global_step=1, state=SimpleNamespace(fn="fit"), sanity_checking=False, callback_metrics={}
    )
    counted = Telemetry()
    counted._exchanges.watch(trainer)
    clock.seconds += 2.0
    counted.on_validation_start(trainer, torch.nn.Module())  # type: ignore[arg-type]
    clock.seconds += 5.0
    counted.on_validation_end(trainer, torch.nn.Module())  # type: ignore[arg-type]
    clock.seconds += 2.0
    trainer.global_step += 2
    assert [metric.value for metric in counted._exchanges.metrics(trainer)] == [2000.0]
