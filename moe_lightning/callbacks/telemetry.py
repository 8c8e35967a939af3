"""What a training step did, as metrics: throughput, gradient norm, and for each MoE layer how evenly tokens fell on
experts and ranks.

Names are `area/layerNN/name_unit`. Everything is read on logging steps only; on the others nothing is copied from the
device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from moe_lightning.modules.moe_layer import MoELayer, moe_layers

Reduction = Literal["same", "sum", "mean", "max"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of this rank.

    Attributes:
        over_ranks: how the ranks' numbers become one; "same" where every rank has the same already.
    """

    name: str
    value: float
    over_ranks: Reduction = "same"


class Telemetry(Callback):
    """Logs the metrics of a step every `log_every_n_steps` of the Trainer.

    * train/tokens_per_s (sum over ranks), train/step_ms (maximum), train/gradient_norm, train/lr
    * moe/layerNN/expert_imbalance_ratio: busiest expert over the mean; moe/layerNN/rank_imbalance_ratio: busiest rank
      over the mean, so after replicas and quotas did their work; moe/expert_imbalance_ratio and
      moe/rank_imbalance_ratio: their means over the layers
    * moe/layerNN/dropped_fraction of assignments, moe/layerNN/auxiliary_loss (mean)
    * comm/layerNN/exchanged_rows and comm/layerNN/exchanged_bytes that left their rank in one dispatch (sum)

    Numbers of MoE layers are those of the step's last micro-batch.

    Args:
        expert_load_path: CSV that gets a line `step,layer,share of each expert` for every layer on logging steps;
            None: none.

    Attributes:
        tokens_trained: tokens that this rank trained on.
        train_s: seconds spent in training steps, validation excluded, up to the last logging step.
    """

    def __init__(self, expert_load_path: str | None = None) -> None:
        self._path = Path(expert_load_path) if expert_load_path else None
        self.tokens_trained = 0
        self.train_s = 0.0
        self._tokens = self._steps = 0
        self._elapsed_s = 0.0
        self._resumed_at = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._resumed_at = time.perf_counter()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._elapsed_s += time.perf_counter() - self._resumed_at

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._resumed_at = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += _num_tokens(batch)
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        if not trainer._logger_connector.should_update_logs:
            return
        metrics = [*self._pace(), *_optimizer_metrics(trainer), *layer_metrics(moe_layers(pl_module))]
        pl_module.log_dict(reduced(metrics, trainer))
        if self._path is not None and trainer.is_global_zero:
            self._write_expert_load(self._path, trainer.global_step, moe_layers(pl_module))

    def _pace(self) -> Iterator[Metric]:
        """Throughput since the last call."""
        now = time.perf_counter()
        elapsed_s = self._elapsed_s + now - self._resumed_at
        yield Metric(name="train/tokens_per_s", value=self._tokens / elapsed_s, over_ranks="sum")
        yield Metric(name="train/step_ms", value=1e3 * elapsed_s / self._steps, over_ranks="max")
        self.tokens_trained += self._tokens
        self.train_s += elapsed_s
        self._tokens = self._steps = 0
        self._elapsed_s, self._resumed_at = 0.0, now

    def _write_expert_load(self, path: Path, step: int, layers: list[MoELayer]) -> None:
        with path.open("a") as file:
            for index, layer in enumerate(layers):
                if layer.statistics is not None:
                    counts_E = layer.statistics.tokens_NE.sum(dim=0).double()
                    shares = (counts_E / counts_E.sum().clamp_min(1)).tolist()
                    file.write(",".join([str(step), str(index), *(f"{share:.5f}" for share in shares)]) + "\n")


def _num_tokens(batch: Any) -> int:
    """Elements of the batch's first tensor: token ids [B, L]."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return tensors[0].numel() if tensors else 0


def _optimizer_metrics(trainer: pl.Trainer) -> Iterator[Metric]:
    yield Metric(name="train/lr", value=float(trainer.optimizers[0].param_groups[0]["lr"]))
    norm = getattr(trainer.strategy, "last_gradient_norm", None)
    if norm is not None:
        yield Metric(name="train/gradient_norm", value=float(norm))


def layer_metrics(layers: list[MoELayer]) -> Iterator[Metric]:
    """The metrics of every layer's last micro-batch, and the means over layers."""
    found = [metric for index, layer in enumerate(layers) for metric in _one_layer(index, layer)]
    yield from found
    for name in ("expert_imbalance_ratio", "rank_imbalance_ratio"):
        values = [metric.value for metric in found if metric.name.endswith(name)]
        if values:
            yield Metric(name=f"moe/{name}", value=sum(values) / len(values))


def _one_layer(index: int, layer: MoELayer) -> Iterator[Metric]:
    statistics, dispatcher = layer.statistics, layer.dispatcher
    if statistics is None:
        return
    area = f"layer{index:02d}"
    tokens, computed = float(statistics.tokens_NE.sum()), float(statistics.computed_NE.sum())
    yield Metric(name=f"moe/{area}/expert_imbalance_ratio", value=imbalance(statistics.tokens_NE.sum(dim=0)))
    yield Metric(name=f"moe/{area}/dropped_fraction", value=1.0 - computed / max(tokens, 1.0))
    if layer.auxiliary_loss is not None:
        yield Metric(name=f"moe/{area}/auxiliary_loss", value=float(layer.auxiliary_loss.detach()), over_ranks="mean")
    if dispatcher.last_rank_loads is not None:
        yield Metric(
            name=f"moe/{area}/rank_imbalance_ratio", value=imbalance(torch.from_numpy(dispatcher.last_rank_loads))
        )
        yield Metric(name=f"comm/{area}/exchanged_rows", value=float(dispatcher.last_sent_rows), over_ranks="sum")
        yield Metric(name=f"comm/{area}/exchanged_bytes", value=float(dispatcher.last_sent_bytes), over_ranks="sum")


def imbalance(loads: Tensor) -> float:
    """Largest load over the mean load; 1 where there is no load at all."""
    mean = float(loads.double().mean())
    return float(loads.max()) / mean if mean else 1.0


def reduced(metrics: list[Metric], trainer: pl.Trainer) -> dict[str, float]:
    """One number for each metric, on every rank: one collective for each kind of reduction that occurs. Collective."""
    values = {metric.name: metric.value for metric in metrics}
    for kind in ("sum", "mean", "max"):
        names = [metric.name for metric in metrics if metric.over_ranks == kind]
        if names and trainer.world_size > 1:
            local = torch.tensor([values[name] for name in names], device=trainer.strategy.root_device)
            values |= zip(names, trainer.strategy.reduce(local, reduce_op=kind).tolist(), strict=True)
    return values
