"""Metrics of training steps: throughput, gradient norm, and for each MoE layer the balance over experts and ranks.

Names are `area/layerNN/name_unit`. Everything is read on logging steps only; on the others nothing is copied from the
device. Beside them: a CSV of the ranks that hold each expert, and Lightning's table of layers for a model whose experts
are spread over ranks.
"""

from __future__ import annotations

import copy
import math
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from annotated_types import Interval
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.callbacks.loggers import log_histograms
from moe_lightning.callbacks.routing_health import RoutingHealth, imbalance
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.compat.private_lightning import SummaryShown, SummaryTable
from moe_lightning.config import validated
from moe_lightning.files import append_rows
from moe_lightning.models.gpt import held_parameters, model_size, whole_parameters
from moe_lightning.models.gpt_module import SupervisedModule
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import ExchangeClock, all_reduce_
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.rank_outliers import RankComparison
from moe_lightning.strategies.stages import StageMap, stages_of

T = TypeVar("T")


class PlacementTable:
    """A CSV of `step,layer,ranks`, then for each expert the ranks that hold it, with spaces between them; a rank that
    holds several replicas stands as often. A layer gets a line where its placement is another than the last written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: dict[int, list[str]] = {}

    def write(self, step: int, lines: Mapping[int, list[str]]) -> None:
        """Add the placements after a step, as `placement_line` returns them, where they have changed."""
        changed = {number: line for number, line in lines.items() if self._written.get(number) != line}
        self._written |= changed
        if changed:
            experts = max(len(line) - 1 for line in changed.values())
            rows = [[step, number, *line] for number, line in changed.items()]
            append_rows(self._path, ["step", "layer", "ranks", *(f"expert_{e}" for e in range(experts))], rows)


def placement_line(layer: MoELayer) -> list[str]:
    """Return the number of ranks of a layer, and the holders of each of its experts, as `PlacementTable` has them."""
    replicas_EN = layer.dispatcher.placement.replicas
    holders = [" ".join(str(n) for n, count in enumerate(row) for _ in range(count)) for row in replicas_EN]
    return [str(replicas_EN.shape[1]), *holders]


Reduction = Literal["same", "sum", "mean", "max"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of this rank.

    Attributes:
        over_ranks: how the ranks' numbers become one; "same" where every rank has the same already.
        weight: in a mean; where it is 0 on every rank there is no number.
    """

    name: str
    value: float
    over_ranks: Reduction = "same"
    weight: float = 1.0


def perplexity(loss: float) -> float:
    """Return exp(loss), inf where no float holds it: the loss of a diverged model is above 709."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class _ExchangeTime:
    """Time of a step in the token exchanges of the present world."""

    def __init__(self) -> None:
        self._clock: ExchangeClock | None = None
        self._began_s, self._began_step, self._paused_s = 0.0, 0, 0.0

    def watch(self, trainer: pl.Trainer) -> None:
        """Count in a new world from the end of its first step, which all its ranks reach together."""
        world = getattr(trainer.strategy, "world", None)
        clock = world.exchanges if world is not None and world.is_connected else None
        if clock is not self._clock:
            self._clock, self._began_step = clock, trainer.global_step
            if clock is not None:
                clock.watch()
                self._began_s = clock.seconds

    def pause(self, device: torch.device) -> None:
        """A validation begins, whose exchanges are of no step."""
        self._paused_s = self._seconds_of_all(device)

    def resume(self, device: torch.device) -> None:
        """Training goes on."""
        self._began_s += self._seconds_of_all(device) - self._paused_s

    def _seconds_of_all(self, device: torch.device) -> float:
        """Seconds in this world up to now; a device counts an exchange once it has ended."""
        if self._clock is None:
            return 0.0
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return self._clock.seconds

    def metrics(self, trainer: pl.Trainer) -> list[Metric]:
        """Return the average over the steps since the last call, -inf where this rank has counted none of its world."""
        if self._clock is None:
            return []
        steps, seconds = trainer.global_step - self._began_step, self._clock.seconds
        step_s = (seconds - self._began_s) / steps if steps else -math.inf
        self._began_s, self._began_step = seconds, trainer.global_step
        return [Metric(name="comm/exchange_ms", value=1e3 * step_s, over_ranks="max")]


class _Pace:
    """Work and time of this rank since the last logging step."""

    def __init__(self) -> None:
        self.tokens: int | Tensor = 0
        self.steps, self.flops = 0, 0.0
        self._of_step: tuple[int | Tensor, float] = 0, 0.0
        self._elapsed_s = 0.0
        self._resumed_at: float | None = None  # None: not training

    def add_batch(self, tokens: int | Tensor, flops: float) -> None:
        """Add the work of a micro-batch."""
        before = self._of_step
        self._of_step = before[0] + tokens, before[1] + flops

    def end_step(self) -> None:
        """Count a step."""
        tokens, flops = self._of_step
        self.tokens, self.flops, self.steps = self.tokens + tokens, self.flops + flops, self.steps + 1
        self._of_step = 0, 0.0

    def undo(self) -> None:
        """Forget the work since the last logging step, which is done again; its steps and time remain."""
        self.tokens, self.flops = 0, 0.0
        self._of_step = 0, 0.0

    def begin(self) -> None:
        """Training begins, or repeats a step that a fault has ended; the time that the fault took counts."""
        self._of_step = 0, 0.0
        self.pause()
        self.resume()

    def resume(self) -> None:
        """Training goes on."""
        self._resumed_at = time.perf_counter()

    def pause(self) -> None:
        """Training ends, or a validation begins; that may come before training, to try it or to finish an epoch."""
        if self._resumed_at is not None:
            self._elapsed_s += time.perf_counter() - self._resumed_at
        self._resumed_at = None

    def end(self) -> float:
        """Return the seconds of training, and begin anew."""
        now = time.perf_counter()
        assert self._resumed_at is not None, "steps are made in training only"
        elapsed_s = self._elapsed_s + now - self._resumed_at
        self.tokens, self.steps, self.flops = 0, 0, 0.0
        self._elapsed_s, self._resumed_at = 0.0, now
        return elapsed_s


@validated
class Telemetry(Callback):
    """Logs the metrics of a step every `log_every_n_steps` of the Trainer.

    * train/tokens_per_s (sum over ranks; samples where batches do not begin with token ids [B, L]; padding is not
      counted where the batch has an entry attention_mask or is_token, or is (inputs, targets, is_token)),
      train/step_ms (maximum), train/gradient_norm, train/lr (that the step's update used)
    * train/tokens_seen of all ranks since the run began, resumes included: the axis of scaling studies. It lacks
      the tokens that a rank which is lost or leaves has had since the last logging step
    * val/perplexity of language models of this project, after each validation
    * train/mfu_ratio (mean): the model's floating-point operations over those that the devices could have done (PaLM,
      arXiv 2204.02311, appendix B), where the module has `flops_per_batch` and the device's peak is known; not with
      `mesh.pp`. Frozen weights, as beside adapters, count as trained ones
    * device/peak_memory_bytes (maximum) that tensors took since the process began, on GPUs
    * moe/layerNN/expert_imbalance_ratio: busiest expert over the mean; moe/layerNN/rank_imbalance_ratio: busiest rank
      over the mean, so after replicas and quotas did their work; moe/expert_imbalance_ratio and
      moe/rank_imbalance_ratio: their means over the layers
    * dead experts, entropy, drift and quantiles of imbalance: see `RoutingHealth`
    * moe/layerNN/dropped_fraction of assignments, moe/layerNN/auxiliary_loss (mean over samples)
    * comm/exchange_ms (maximum) of a step in token exchanges, waits for slower ranks included, validations excluded
    * ranks/slowest and ranks/slowest_ratio: the rank with the longest own time in a step, and that time over the median
      of the others', of the last minute
    * comm/layerNN/exchanged_rows and comm/layerNN/exchanged_bytes that left their rank in the layer's last dispatch,
      without combine and backward pass (sum over ranks)

    Numbers of MoE layers are those of the step's last batch, in a pipeline of all its micro-batches and stages; a layer
    that this batch did not call has none. W&B also gets
    moe/layerNN/expert_load, a histogram over the experts, which it draws as a heat map over time. Every logger's
    configuration gets the model's numbers of parameters, each expert once (`parameters/whole`), and of those that a
    token passes (`parameters/active`). Layers whose routing collapses, and ranks whose losses or gradients differ from
    those of the others, are reported in a warning; the strategy warns of a loss that is not finite.

    Args:
        expert_load_path: CSV of step, layer and the share of each expert, a row for every layer on logging steps; None:
            none.
        peak_flops_per_s: of one device in the precision of the run; None: what Lightning lists for an A100, H100 (not
            NVL), L4, T4 or V100. There is no MFU with other GPUs, whose rates it lacks or takes from another, and CPUs.
        placement_path: CSV of step, layer, ranks and the holders of each expert, a row on logging steps where a layer's
            placement has changed; None: none.

    Attributes:
        tokens_trained: tokens that all ranks trained on in this process, up to the last logging step.
        tokens_seen: tokens that all ranks trained on up to the last logging step, before a resume too.
        train_s: seconds of training up to the last logging step, recoveries included, validation excluded.
    """

    def __init__(
        self,
        expert_load_path: str | None = None,
        peak_flops_per_s: Annotated[float, Interval(gt=0, le=1e21)] | None = None,
        placement_path: str | None = None,
    ) -> None:
        self._path = Path(expert_load_path) if expert_load_path else None
        self._placements = PlacementTable(Path(placement_path)) if placement_path else None
        self._peak_flops_per_s = peak_flops_per_s
        self.tokens_trained = self.tokens_seen = 0
        self.train_s = 0.0
        self._health = RoutingHealth()
        self._comparison = RankComparison()
        self._pace = _Pace()
        self._counted: tuple[tuple[int, int], _Pace] | None = None  # last step and batch, and the pace after it
        self._exchanges = _ExchangeTime()
        self._lr = 0.0  # of the last update

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._health, self._comparison, self._pace = RoutingHealth(), RankComparison(), _Pace()
        self._counted = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._peak_flops_per_s is None:
            self._peak_flops_per_s = known_peak(trainer.strategy.root_device, str(trainer.precision))
        self._pace.begin()
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else 0.0
        with stages_of(trainer).whole_module():
            size = model_size(pl_module)
        for logger in trainer.loggers:
            logger.log_hyperparams({"parameters/whole": size.whole, "parameters/active": size.active})

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pace.pause()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pace.pause()
        self._exchanges.pause(trainer.strategy.root_device)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._pace.resume()
            self._exchanges.resume(trainer.strategy.root_device)
        loss = trainer.callback_metrics.get("val/loss")
        is_language = isinstance(pl_module, SupervisedModule) and pl_module.attention_width is not None
        if loss is None or not is_language or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        for logger in trainer.loggers:
            logger.log_metrics({"val/perplexity": perplexity(float(loss))}, private_lightning.logged_step(trainer))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if optimizer is trainer.optimizers[0]:  # schedules set the next rate before the batch ends
            self._lr = float(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ended = trainer.global_step, batch_idx
        if self._counted is not None and self._counted[0] == ended:  # a fault has ended this hook, which runs again
            self._pace = copy.copy(self._counted[1])
        else:
            if not getattr(trainer.strategy, "is_dummy_batch", False):
                part, parts = _part_of_layers(trainer)
                tokens = _num_tokens(batch) if part == 0 else 0  # those who compute the other parts have them, too
                self._pace.add_batch(tokens, (getattr(pl_module, "flops_per_batch", None) or 0) / parts)
            if private_lightning.is_accumulating(trainer):
                return
            self._pace.end_step()
            self._counted = ended, copy.copy(self._pace)
        self._exchanges.watch(trainer)
        if not private_lightning.logs_now(trainer):
            return
        if isinstance(trainer.strategy, ExpertParallelStrategy):
            self._comparison.compare(trainer.strategy.update.own, trainer.strategy.world)
        stages = stages_of(trainer)
        layers = dict(zip(stages.numbers, stages.own(stages.layers), strict=True))
        own, lines = expert_loads(layers), dict[int, list[str]]()
        if self._placements is not None and (trainer.is_global_zero or stages.num_stages > 1):
            lines = {number: placement_line(layer) for number, layer in layers.items()}
        everyones = of_all_stages({number: (own.get(number), lines.get(number)) for number in layers}, stages)
        loads = {number: shares_E for number, (shares_E, _) in everyones.items() if shares_E is not None}
        placements = {number: line for number, (_, line) in everyones.items() if line is not None}
        health = self._health.observe({layer: np.array(shares_E) for layer, shares_E in loads.items()})
        has_mfu = self._peak_flops_per_s is not None or trainer.strategy.root_device.type == "cuda"
        has_mfu &= stages.num_stages == 1  # a module knows the operations of its last micro-batch alone
        has_mfu &= getattr(pl_module, "flops_per_batch", None) is not None
        pace, elapsed_s = self._counted[1], self._pace.end()
        metrics = [
            *_pace_metrics(pace, elapsed_s, self._peak_flops_per_s, has_mfu=has_mfu),
            *self._exchanges.metrics(trainer),
            *_device_metrics(trainer),
            Metric(name="train/lr", value=self._lr),
            *_gradient_norm(trainer),
            *(metric for number, layer in layers.items() for metric in layer_metrics(number, layer)),
            *(Metric(name=name, value=value) for name, value in health.items()),
        ]
        numbers = reduced(metrics, trainer)
        numbers |= averages_over_layers(numbers)
        for name in ("train/mfu_ratio", "comm/exchange_ms"):  # no peak of some GPU is known, no step was counted yet
            if not math.isfinite(numbers.get(name, 0.0)):
                del numbers[name]
        of_ranks = round(numbers["train/tokens_seen"])
        self.train_s += elapsed_s
        self.tokens_trained, self.tokens_seen = self.tokens_trained + of_ranks, self.tokens_seen + of_ranks
        pl_module.log_dict(numbers | {"train/tokens_seen": float(self.tokens_seen)} | _slowest_rank(trainer))
        if trainer.is_global_zero:
            for sentence in self._health.warnings(trainer.global_step):
                warnings.warn(sentence, stacklevel=2)
            if self._path is not None and loads:
                _write_expert_load(self._path, trainer.global_step, loads)
            if self._placements is not None:
                self._placements.write(trainer.global_step, placements)
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    log_histograms(logger, loads, private_lightning.logged_step(trainer))

    @override
    def state_dict(self) -> dict[str, int]:
        """Tokens seen: exact at a logging step, else up to the last one."""
        return {"tokens_seen": self.tokens_seen}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.tokens_seen = state_dict["tokens_seen"]
        self._pace.undo()
        self._counted = None


def _pace_metrics(pace: _Pace, elapsed_s: float, peak_flops_per_s: float | None, *, has_mfu: bool) -> Iterator[Metric]:
    """Throughput of the steps that a pace has counted.

    Args:
        has_mfu: MFU is one of the metrics, as on all ranks: this one may have had no work in these steps.
    """
    tokens = int(pace.tokens)
    yield Metric(name="train/tokens_per_s", value=tokens / elapsed_s, over_ranks="sum")
    yield Metric(name="train/tokens_seen", value=tokens, over_ranks="sum")  # of these steps
    yield Metric(name="train/step_ms", value=1e3 * elapsed_s / pace.steps, over_ranks="max")
    if has_mfu:
        peak = math.nan if peak_flops_per_s is None else peak_flops_per_s
        yield Metric(name="train/mfu_ratio", value=pace.flops / elapsed_s / peak, over_ranks="mean")


def known_peak(device: torch.device, precision: str) -> float | None:
    """Operations a second of a GPU in a precision as Lightning lists them; None of a GPU that it does not list, or with
    a wrong rate."""
    if device.type != "cuda" or not _LISTED.search(torch.cuda.get_device_name(device)):
        return None
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPUs that are not listed: MFU is left out
        return get_available_flops(device, dtype)


def of_all_stages(own: Mapping[int, T], stages: StageMap) -> dict[int, T]:
    """Values by the number of an MoE layer, those of the layers of other pipeline stages included; collective.

    Args:
        own: values that JSON holds, of the layers here.
    """
    if stages.num_stages == 1:
        return dict(own)
    pairs: Iterable[tuple[int, T]] = chain(*all_gather_json(list(own.items()), stages.pipe))
    return dict(sorted(pairs))


def expert_loads(layers: Mapping[int, MoELayer]) -> dict[int, list[float]]:
    """Share of the assignments that each of E experts got in the last batch, by layer that it called."""
    counts = {number: layer.statistics.tokens_NE for number, layer in layers.items() if layer.statistics is not None}
    sums = {number: tokens_NE.sum(dim=0).double().cpu() for number, tokens_NE in counts.items()}
    return {number: (counts_E / counts_E.sum().clamp_min(1)).tolist() for number, counts_E in sums.items()}


def _write_expert_load(path: Path, step: int, loads: Mapping[int, list[float]]) -> None:
    experts = max(map(len, loads.values()))
    rows = [[step, layer, *(f"{share:.5f}" for share in shares_E)] for layer, shares_E in loads.items()]
    append_rows(path, ["step", "layer", *(f"expert_{e}" for e in range(experts))], rows)


def _part_of_layers(trainer: pl.Trainer) -> tuple[int, int]:
    """Index and number of the parts of dense layers that ranks compute for the same samples."""
    world = getattr(trainer.strategy, "world", None)
    shape = getattr(world, "shape", None)
    return (0, 1) if world is None or shape is None else (shape.index(world.rank, "tp"), shape.tp)


def _num_tokens(batch: Any) -> int | Tensor:
    """Elements of the batch's first tensor where it holds token ids, integers [B, L], without the padding that a mask
    of its shape names: the entry attention_mask or is_token, or a third tensor of bool, as in the batches of GPTModule.
    Else its samples.
    """
    tensors = [leaf for leaf in private_torch.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors or not tensors[0].ndim:
        return 0
    if tensors[0].ndim != 2 or tensors[0].is_floating_point():
        return len(tensors[0])
    if isinstance(batch, Mapping):
        masks = [batch[name] for name in ("attention_mask", "is_token") if isinstance(batch.get(name), Tensor)]
    else:
        masks = [tensor for tensor in tensors[2:3] if tensor.dtype is torch.bool]
    return next((mask.sum() for mask in masks if mask.shape == tensors[0].shape), tensors[0].numel())


def _device_metrics(trainer: pl.Trainer) -> Iterator[Metric]:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
        yield Metric(name="device/peak_memory_bytes", value=float(peak_bytes), over_ranks="max")


def _slowest_rank(trainer: pl.Trainer) -> dict[str, float]:
    """The slowest rank of the last minute, on rank 0, which logs."""
    slowest = getattr(trainer.strategy, "slowest_rank", None)
    return {} if slowest is None else {"ranks/slowest": float(slowest.rank), "ranks/slowest_ratio": slowest.ratio}


def _gradient_norm(trainer: pl.Trainer) -> Iterator[Metric]:
    norm = getattr(trainer.strategy, "last_gradient_norm", None)
    if norm is not None:
        yield Metric(name="train/gradient_norm", value=float(norm))


def averages_over_layers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the averages over the layers whose metrics are among these."""
    averages = {}
    for name in ("expert_imbalance_ratio", "rank_imbalance_ratio"):
        values = [value for key, value in numbers.items() if re.fullmatch(rf"moe/layer\d+/{name}", key)]
        if values:
            averages[f"moe/{name}"] = sum(values) / len(values)
    return averages


def layer_metrics(number: int, layer: MoELayer) -> Iterator[Metric]:
    """Metrics of an MoE layer in the last batch."""
    statistics, dispatcher, area = layer.statistics, layer.dispatcher, f"layer{number:02d}"
    if statistics is None:
        return
    tokens, computed = float(statistics.tokens_NE.sum()), float(statistics.computed_NE.sum())
    yield Metric(name=f"moe/{area}/expert_imbalance_ratio", value=imbalance(statistics.tokens_NE.sum(dim=0).cpu()))
    yield Metric(name=f"moe/{area}/dropped_fraction", value=1.0 - computed / tokens if tokens else 0.0)
    if layer.auxiliary_loss is not None:
        stream, loss = layer.router.stream, float(layer.auxiliary_loss.detach())
        samples = stream.num_samples if stream.total_samples else 1
        yield Metric(name=f"moe/{area}/auxiliary_loss", value=loss, over_ranks="mean", weight=samples)
    if statistics.rank_loads is not None:
        yield Metric(name=f"moe/{area}/rank_imbalance_ratio", value=imbalance(statistics.rank_loads))
        yield Metric(name=f"comm/{area}/exchanged_rows", value=float(dispatcher.last_sent_rows), over_ranks="sum")
        yield Metric(name=f"comm/{area}/exchanged_bytes", value=float(dispatcher.last_sent_bytes), over_ranks="sum")


def reduced(metrics: list[Metric], trainer: pl.Trainer) -> dict[str, float]:
    """One number for each metric of any rank, on every rank: a collective for sums and means, one for maxima, and one
    over pipeline stages. Collective.

    Args:
        metrics: the same on all ranks of a stage. Other stages may have others: those of their layers.
    """
    own = {kind: [metric for metric in metrics if metric.over_ranks == kind] for kind in ("same", "sum", "mean", "max")}
    values = {metric.name: metric.value for metric in own["same"]}
    means = [metric.value * metric.weight if metric.weight else 0.0 for metric in own["mean"]]
    weights = [metric.weight for metric in own["mean"]]
    sums = iter(_over_ranks([*(metric.value for metric in own["sum"]), *means, *weights], "sum", trainer))
    values |= {metric.name: next(sums) for metric in own["sum"]}
    means = [next(sums) for _ in means]
    values |= {
        metric.name: mean / weight for metric, mean, weight in zip(own["mean"], means, sums, strict=True) if weight
    }
    most = _over_ranks([metric.value for metric in own["max"]], "max", trainer)
    values |= {metric.name: value for metric, value in zip(own["max"], most, strict=True)}
    if (stages := stages_of(trainer)).num_stages > 1:
        gathered = all_gather_json(values, stages.pipe)
        values = dict(chain.from_iterable(found.items() for found in reversed(gathered)))
        names = [metric.name for metric in own["max"]]
        values |= {name: max(found[name] for found in gathered if name in found) for name in names}
    return values


def _over_ranks(own: list[float], operation: Literal["sum", "max"], trainer: pl.Trainer) -> list[float]:
    """Reduce numbers of a rank over those that compute the same layers; collective if there are any."""
    strategy = trainer.strategy
    if not own or trainer.world_size == 1:
        return own
    local = torch.tensor(own, dtype=torch.float64, device=strategy.root_device)
    if operation == "sum" and isinstance(strategy, ExpertParallelStrategy):  # also ranks that have the same samples
        all_reduce_(local, strategy.world.stage)
    else:
        local = strategy.reduce(local, reduce_op=operation)
    reduced: list[float] = local.tolist()
    return reduced


_NOT_APPLICABLE = "n/a"

_LISTED = re.compile(r"^(?!.*\bMIG\b).*(\bA100\b|\bH100 (?!NVL)|\bL4$|\bT4$|\bV100S?-)")
"""Names of whole GPUs for which Lightning lists the rate of data sheets, dense and with tensor cores."""


class WholeModelSummary(SummaryTable):
    """Counts as if all experts were here; `Params per Device` is what this rank holds."""

    @property
    @override
    def param_nums(self) -> list[int]:
        modules = dict(self.module.named_modules())
        return [whole_parameters(modules[name]) for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return whole_parameters(self.module)

    @property
    @override
    def trainable_parameters(self) -> int:
        return whole_parameters(self.module, trained=True)

    @override
    def columns(self, stock: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        modules = dict(self.module.named_modules())
        here = [get_human_readable_count(held_parameters(modules[name])) for name in self.layer_names]
        here += [_NOT_APPLICABLE] * (len(stock[0][1]) - len(here))  # a row of Lightning's for what no layer owns
        place = [name for name, _ in stock].index("Params") + 1
        return [*stock[:place], ("Params per Device", here), *stock[place:]]


@validated
class ExpertModelSummary(SummaryShown):
    """Lightning's summary with the parameters of the whole model, each expert once, and beside them those that rank 0
    holds. The one that a Trainer adds by itself takes rank 0's slots for the model.

    Args:
        max_depth: of the layers that the table lists; 0 shows none, -1 all.
    """

    table = WholeModelSummary

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with stages_of(trainer).whole_module():
            super().on_fit_start(trainer, pl_module)
