"""What a user does with a Trainer: each case runs under stock Lightning and under our strategy on one device."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from tests.same_as_stock import modules as m
from tests.same_as_stock.modules import loader, samples, scheduled, training
from tests.same_as_stock.recording import OURS_ALONE, MemoryLogger, Run, plain

Act = Callable[[Run], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a user does.

    Attributes:
        act: does it.
        differs: why it is not the same under our strategy, as docs/lightning.md says; None: it is the same.
        digits: relative difference of numbers that `differs` explains; None: any.
        ignored: parts of the description that are not compared, with `differs` as the reason.
        slow: it takes seconds.
    """

    act: Act
    differs: str | None = None
    digits: float | None = None
    ignored: tuple[str, ...] = ()
    slow: bool = False


CASES: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        assert name not in CASES, name
        CASES[name] = Case(act=act, **options)
        return act

    return add


def fit(
    name: str,
    module: type[pl.LightningModule] = m.Taped,
    train: Callable[[], Any] | None = loader,
    val: Callable[[], Any] | None = lambda: loader(4),
    options: Callable[[], dict[str, Any]] = dict,
    **how: Any,
) -> None:
    """A case of `Trainer.fit`."""

    def act(run: Run) -> None:
        given = {"train_dataloaders": train} if train else {}
        given |= {"val_dataloaders": val} if val else {}
        run.trainer(**options()).fit(run.module(module), **{key: make() for key, make in given.items()})

    case(name, **how)(act)


# ---------------------------------------------------------------------- options of the Trainer

OTHER_VALUES: tuple[dict[str, Any], ...] = (
    {"max_steps": 5, "max_epochs": 3}, {"max_epochs": 0}, {"accumulate_grad_batches": 4}, {"fast_dev_run": 3},
    {"overfit_batches": 0.5}, {"limit_train_batches": 0}, {"limit_train_batches": 100}, {"limit_val_batches": 0.5},
    {"limit_val_batches": 0.01}, {"num_sanity_val_steps": -1}, {"val_check_interval": 0.5}, {"val_check_interval": 100},
    {"min_steps": 12, "max_epochs": 2}, {"max_time": "00:00:10:00"}, {"log_every_n_steps": 50},
    {"precision": "bf16-true"},
)  # fmt: skip
"""Of options that the default run tries with one value."""

for _options in (
    {}, {"max_steps": 3, "max_epochs": -1}, {"max_steps": 5, "max_epochs": 3}, {"max_steps": 0}, {"max_epochs": 0},
    {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4}, {"fast_dev_run": True}, {"fast_dev_run": 3},
    {"overfit_batches": 2}, {"overfit_batches": 0.5}, {"limit_train_batches": 3}, {"limit_train_batches": 0.5},
    {"limit_train_batches": 0}, {"limit_train_batches": 100}, {"limit_val_batches": 1}, {"limit_val_batches": 0},
    {"limit_val_batches": 0.5}, {"limit_val_batches": 0.01}, {"num_sanity_val_steps": 0}, {"num_sanity_val_steps": -1},
    {"val_check_interval": 2}, {"val_check_interval": 0.5}, {"val_check_interval": 100},
    {"val_check_interval": 3, "check_val_every_n_epoch": None}, {"check_val_every_n_epoch": 2, "max_epochs": 4},
    {"reload_dataloaders_every_n_epochs": 1}, {"gradient_clip_val": 0},
    {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, {"detect_anomaly": True}, {"deterministic": True},
    {"benchmark": True}, {"inference_mode": False}, {"min_epochs": 3, "max_epochs": 4},
    {"min_steps": 12, "max_epochs": 2}, {"max_time": "00:00:10:00"}, {"max_time": {"seconds": 0}},
    {"log_every_n_steps": 3}, {"log_every_n_steps": 50}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"},
    {"precision": "64-true"}, {"use_distributed_sampler": False}, {"sync_batchnorm": True}, {"logger": False},
    {"enable_checkpointing": True}, {"enable_model_summary": True}, {"accelerator": "auto", "devices": "auto"},
):  # fmt: skip
    _name = " ".join(f"{key}={value}" for key, value in _options.items()) or "defaults"
    fit(_name, options=lambda options=_options: dict(options), slow=_options in OTHER_VALUES)  # type: ignore[misc]
fit("barebones", options=lambda: {"barebones": True, "logger": False, "log_every_n_steps": None})
fit(
    "gradient_clip_val=0.1", options=lambda: {"gradient_clip_val": 0.1}, digits=1e-6,
    differs="the norm is that of the whole model, summed as on several ranks: its last digit is another",
)  # fmt: skip
fit(
    "a step of fewer micro-batches", options=lambda: {"accumulate_grad_batches": 3}, ignored=("modules", "trainers"),
    differs="the last step of an epoch is the mean over its samples", digits=1.0,
)  # fmt: skip


def _scaled() -> MixedPrecision:
    """Scales that overflow, and others that do not."""
    rules = {"init_scale": 2.0**40, "backoff_factor": 2.0**-30, "growth_factor": 2.0**30, "growth_interval": 3}
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **rules))


# ---------------------------------------------------------------------- callbacks, loggers, profilers

_AVERAGED: dict[str, Any] = {
    "differs": "no copy of the module is made for averages, which would call configure_model once more",
    "ignored": ("modules", "warnings"),
}

for _name, _make in {
    "the best two checkpoints": lambda: ModelCheckpoint("c", monitor="val_loss", save_top_k=2, save_last=True),
    "checkpoints of steps": lambda: ModelCheckpoint("c", every_n_train_steps=2, save_top_k=-1),
    "checkpoints of epochs' ends": lambda: ModelCheckpoint("c", save_on_train_epoch_end=True, save_top_k=-1),
    "checkpoints of weights": lambda: ModelCheckpoint("c", save_weights_only=True, save_last="link"),
    "checkpoints by time": lambda: ModelCheckpoint("c", train_time_interval=timedelta(seconds=0), save_top_k=-1),
    "a checkpoint of an unknown metric": lambda: ModelCheckpoint("c", monitor="nothing"),
    "early stopping": lambda: EarlyStopping("val_loss", patience=1, mode="max"),
    "early stopping by an unknown metric": lambda: EarlyStopping("nothing"),
    "early stopping at a threshold": lambda: EarlyStopping(
        "train_loss", check_on_train_epoch_end=True, stopping_threshold=100.0
    ),
    "a learning-rate monitor": lambda: LearningRateMonitor(log_momentum=True, log_weight_decay=True),
    "a timer of steps": lambda: Timer({"seconds": 0}, interval="step"),
    "a timer of epochs": lambda: Timer({"seconds": 0}, interval="epoch"),
    "a constant accumulation schedule": lambda: GradientAccumulationScheduler({0: 1}),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.5),
    "a progress bar": RichProgressBar,
    "stochastic weight averaging": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1),
    "averaged weights": WeightAveraging,
    "moving averages": lambda: EMAWeightAveraging(decay=0.5),
    "a checkpoint at an exception": lambda: OnExceptionCheckpoint("."),
}.items():
    fit(
        _name,
        options=lambda make=_make: {  # type: ignore[misc]
            "callbacks": [make()],
            "max_epochs": 4,
            "enable_checkpointing": isinstance(c := make(), ModelCheckpoint | OnExceptionCheckpoint),
            "enable_progress_bar": isinstance(c, RichProgressBar),
        },
        slow=_name in ("a progress bar", "pruning"),
        **(_AVERAGED if _name in ("averaged weights", "moving averages") else {}),
    )
fit(
    "weight averaging with batch norm", m.Normed,
    options=lambda: {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], "max_epochs": 4},
)  # fmt: skip


class _Clamping(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.layer.weight.clamp_(-0.6, 0.6)


fit(
    "moving averages of constrained weights", m.Constrained,
    options=lambda: {"callbacks": [_Clamping(), EMAWeightAveraging(decay=0.5)]}, **_AVERAGED,
)  # fmt: skip
fit("a scaled loss", options=lambda: {"plugins": [_scaled()], "max_epochs": 3})
fit("a scaled loss of sparse gradients", m.Sparse, options=lambda: {"plugins": [_scaled()], "max_epochs": 3}, slow=True)
fit("a scaled loss of two optimizers", m.ManualTwo, options=lambda: {"plugins": [_scaled()]}, slow=True)
fit("a simple profiler", options=lambda: {"profiler": SimpleProfiler(dirpath=".", filename="profile")})
fit("an advanced profiler", options=lambda: {"profiler": AdvancedProfiler(dirpath=".", filename="profile")}, slow=True)
fit("two loggers", options=lambda: {"logger": [MemoryLogger(), MemoryLogger()]})


@case("a CSV logger")
def _(run: Run) -> None:
    run.trainer(logger=CSVLogger(".", name="csv"), enable_checkpointing=True).fit(run.module(m.Net), loader())
    run.note(rows=next(run.folder.rglob("metrics.csv")).read_text())


@case("values that a callback logs")
def _(run: Run) -> None:
    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("mine", float(batch_idx), on_epoch=True, on_step=True)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            run.note(seen=trainer.callback_metrics)

    run.trainer(callbacks=[Logs()], log_every_n_steps=2).fit(run.module(m.Net), loader(), loader(4))


@case("what a callback finds")
def _(run: Run) -> None:
    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            names = (
                "is_last_batch", "estimated_stepping_batches", "log_dir", "global_rank", "world_size", "num_devices",
                "num_nodes", "is_global_zero", "received_sigterm", "interrupted", "training", "enable_validation",
            )  # fmt: skip
            run.note(found={name: str(getattr(trainer, name)).replace(str(run.folder), "") for name in names})
            loop = trainer.fit_loop
            run.note(loop=(loop.done, loop.skip, loop.epoch_loop.done, loop.epoch_loop.batch_idx, outputs))
            run.note(length=(len(trainer.train_dataloader), len(trainer.optimizers), str(module.device)))

    run.trainer(callbacks=[Looks()], accumulate_grad_batches=2).fit(run.module(m.Net), loader(), loader(4))


# ---------------------------------------------------------------------- modules

for _name, _kind in {
    "parameter groups": m.TwoGroups, "frozen and unused layers": m.Frozen, "a layer frozen later": m.Thawing,
    "an optimizer of the user's own": m.OwnOptimizer, "no optimizer": m.NoOptimizer,
    "a scheduler of steps": scheduled(), "a scheduler of epochs": scheduled(interval="epoch"),
    "a scheduler every second step": scheduled(frequency=2), "one cycle": m.OneCycle,
    "schedulers in sequence": scheduled(make=m.warmed), "two schedulers": m.TwoSchedulers,
    "a plateau": scheduled(make=m.plateau, interval="epoch", monitor="val_loss"),
    "a plateau of the training loss": scheduled(make=m.plateau, interval="epoch", monitor="train_loss"),
    "a plateau of steps": scheduled(make=m.plateau, monitor="train_loss_step"),
    "a plateau of nothing": scheduled(make=m.plateau, monitor="nothing"),
    "a plateau of nothing that may lack": scheduled(make=m.plateau, monitor="nothing", strict=False),
    "an optimizer step of one's own": m.OwnStep, "clipping of one's own": m.OwnClipping,
    "manual optimization": m.Manual, "a manual closure": m.ManualClosure, "two manual optimizers": m.ManualTwo,
    "a step that stops": m.Stopping, "a hook that ends the epoch": m.Skipping,
    "a step with an iterator": m.FromIterator,
    "a step without index": m.BatchOnly, "outputs of steps": m.Outputs, "changed batches": m.Transferring,
    "every way to log": m.Logging, "torchmetrics": m.Metrics, "batch norm": m.Normed, "tied weights": m.Tied,
    "weight norm": m.WeightNormed, "sparse gradients": m.Sparse, "parameters of other types": m.Mixed,
    "layers made in configure_model": m.LateLayer, "callbacks of the module": m.OwnCallbacks,
    "steps that return None": training(lambda self, batch, i: None),
    "some steps that return None": training(lambda self, batch, i: self.loss(batch) if i % 2 else None),
    "a loss that is NaN": training(lambda self, batch, i: self.loss(batch) * (float("nan") if i == 1 else 1)),
    "a loss of one element": training(lambda self, batch, i: self.loss(batch).reshape(1)),
    "a loss of two elements": training(lambda self, batch, i: torch.stack([self.loss(batch)] * 2)),
    "a loss without gradient": training(lambda self, batch, i: torch.tensor(1.0)),
    "a dictionary without loss": training(lambda self, batch, i: {"more": 1}),
    "a number as loss": training(lambda self, batch, i: 3),
    "a logged vector": training(lambda self, batch, i: self.log("x", torch.ones(3))),
    "a logged text": training(lambda self, batch, i: self.log("x", "text")),
    "an error in a step": m.raising(ValueError("mine")), "an exit in a step": m.raising(SystemExit("bye")),
}.items():  # fmt: skip
    fit(_name, _kind)
fit("L-BFGS", m.Lbfgs)
fit("manual optimization past Lightning", m.ManualRaw)
fit("a scheduler under accumulation", scheduled(frequency=2), options=lambda: {"accumulate_grad_batches": 2})
fit("a plateau of frequent validations", scheduled(make=m.plateau, interval="epoch", monitor="val_loss"),
    options=lambda: {"val_check_interval": 2})  # fmt: skip
fit("None under accumulation", training(lambda self, batch, i: self.loss(batch) if i % 2 else None),
    options=lambda: {"accumulate_grad_batches": 2})  # fmt: skip
fit("a NaN under detect_anomaly", training(lambda self, batch, i: self.loss(batch) * float("nan")),
    options=lambda: {"detect_anomaly": True})  # fmt: skip
fit("a stop before min_epochs", m.Stopping, options=lambda: {"min_epochs": 2, "max_epochs": 4})
fit("manual optimization for some steps", m.Manual, options=lambda: {"max_steps": 3})
fit("manual optimization and clipping", m.Manual, options=lambda: {"gradient_clip_val": 0.3})
fit("manual optimization and accumulation", m.Manual, options=lambda: {"accumulate_grad_batches": 2})
fit(
    "torch's dropout", m.Dropped, digits=10.0, ignored=("modules",),
    differs="loaders leave torch's global generator alone, of which a DataLoader takes a number for each pass",
)  # fmt: skip

# ---------------------------------------------------------------------- loaders


class OwnBatchSampler(BatchSampler):
    """A batch sampler of the user's own."""


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


class Listed(Sampler[int]):
    """Indices of the user's own, with or without a length."""

    def __iter__(self) -> Any:
        return iter([1, 2, 3, 7])


class Sized(Listed):
    def __len__(self) -> int:
        return 4


class Batches:
    """No DataLoader, but an iterable of batches."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([(torch.ones(2, m.WIDTH) * i, torch.zeros(2, 2)) for i in range(3)])


EMPTY = TensorDataset(torch.zeros(0, m.WIDTH), torch.zeros(0, 2))
NO_POSITION = "one rank says that it saves no position in such data"

for _name, _train in {
    "a partial batch": lambda: loader(7), "drop_last": lambda: loader(7, drop_last=True),
    "fewer samples than a batch": lambda: loader(3, 8), "no sample": lambda: DataLoader(EMPTY),
    "a sampler of a part": lambda: loader(sampler=SequentialSampler(range(5))),
    "a batch sampler of a part": lambda: DataLoader(
        samples(), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, False)
    ),
    "a batch sampler of one's own": lambda: DataLoader(
        samples(), batch_sampler=OwnBatchSampler(SequentialSampler(range(5)), 2, False)
    ),
    "a distributed sampler": lambda: loader(sampler=DistributedSampler(samples(), 1, 0, shuffle=False)),
    "a list as sampler": lambda: loader(sampler=[3, 1, 4, 1, 5]),
    "a sampler of one's own": lambda: loader(sampler=Sized()),
    "a subset": lambda: DataLoader(Subset(samples(), [1, 2, 3, 4, 7]), batch_size=2),
    "joined data sets": lambda: DataLoader(ConcatDataset([samples(4), samples(3)]), batch_size=2),
    "a list as data set": lambda: DataLoader([samples()[i] for i in range(5)], batch_size=2),
    "whole batches": lambda: DataLoader([(torch.ones(2, m.WIDTH), torch.zeros(2, 2))] * 3, batch_size=None),
    "an iterable": Batches, "a generator": lambda: (batch for batch in Batches()), "a number": lambda: 3,
    "a loader of one's own": lambda: OwnLoader(samples(), batch_size=2),
    "a collate function": lambda: loader(collate_fn=lambda found: [torch.stack(p) for p in zip(*found, strict=True)]),
}.items():  # fmt: skip
    fit(f"training with {_name}", train=_train, val=None if _name == "a generator" else lambda: loader(4))
fit("training with a worker", train=lambda: loader(num_workers=1), slow=True)
fit("shuffled data that is overfitted", train=lambda: loader(shuffle=True), options=lambda: {"overfit_batches": 2})
fit("drop_last under accumulation", train=lambda: loader(9, drop_last=True),
    options=lambda: {"accumulate_grad_batches": 2})  # fmt: skip
fit("an iterable under accumulation", train=Batches, options=lambda: {"accumulate_grad_batches": 2})
fit("a stream", train=lambda: DataLoader(m.Stream(), batch_size=2), ignored=("warnings",), differs=NO_POSITION)
fit("a stream under accumulation", train=lambda: DataLoader(m.Stream(), batch_size=2), ignored=("warnings",),
    differs=NO_POSITION, options=lambda: {"accumulate_grad_batches": 2})  # fmt: skip
fit("a sampler without length", train=lambda: loader(sampler=Listed()), ignored=("warnings",), differs=NO_POSITION)
fit("training on less than a batch", train=lambda: loader(3, 8, drop_last=True), ignored=("events", "logged", "error",
    "warnings", "log", "modules", "trainers"), differs="refused: there is nothing to train on")  # fmt: skip
for _name, _val in {
    "no validation data": None, "an empty list": list, "no sample": lambda: DataLoader(EMPTY),
    "less than a batch": lambda: loader(3, 8, drop_last=True), "shuffled data": lambda: loader(4, shuffle=True),
    "a sampler of a part": lambda: loader(sampler=SequentialSampler(range(3))),
}.items():  # fmt: skip
    fit(f"validation with {_name}", val=_val)
for _name, _train in {
    "a list": lambda: [loader(), loader(8)], "a dictionary": lambda: {"a": loader(), "b": loader()},
    "the shorter one": lambda: CombinedLoader([loader(), loader(4)], "min_size"),
    "the longer one": lambda: CombinedLoader({"a": loader(), "b": loader(4)}, "max_size"),
    "alike": lambda: CombinedLoader([loader(4), loader(4)], "max_size_cycle"),
}.items():  # fmt: skip
    fit(f"batches of two loaders, {_name}", m.Joined, _train, None)
    fit(f"steps of two loaders, {_name}", m.Joined, _train, None, lambda: {"accumulate_grad_batches": 2}, slow=True)
fit(
    "a loader that is cycled", m.Joined, lambda: [loader(), loader(6)], None, digits=10.0, ignored=("modules",),
    differs="the next epoch goes on where the shorter loader stands",
)  # fmt: skip
fit("one loader after the other", m.InTurn, lambda: CombinedLoader([loader(), loader(4)], "sequential"))
fit("two validation loaders", m.InTurn, val=lambda: [loader(4), loader(2)], options=lambda: {"limit_val_batches": 1})
fit("a dictionary of validation loaders", m.InTurn, val=lambda: {"a": loader(4), "b": loader(2)})
fit("joined validation loaders", m.Joined, lambda: [loader()],
    lambda: CombinedLoader([loader(4), loader(2)], "min_size"))  # fmt: skip
fit("loaders of the module", m.OwnLoaders, None, None,
    lambda: {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3})  # fmt: skip
fit("loaders reloaded every second epoch", m.OwnLoaders, None, None,
    lambda: {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4})  # fmt: skip


@case("loaders that are used again")
def _(run: Run) -> None:
    module, train, val = run.module(m.Taped), loader(), loader(4)
    for _ in range(2):
        run.trainer(max_epochs=1).fit(module, train, val)
    run.note(left=(len(list(train)), train.batch_size))


@case("a loader read in a hook")
def _(run: Run) -> None:
    class Reading(m.Taped):
        def on_train_epoch_end(self) -> None:
            self.hooks.append((len(list(self.trainer.train_dataloader)), len(list(self.trainer.val_dataloaders))))

    run.trainer().fit(run.module(Reading), loader(), loader(4))


# ---------------------------------------------------------------------- entry points


@case("validate, test and predict")
def _(run: Run) -> None:
    trainer, module = run.trainer(limit_test_batches=2), run.module(m.Taped)
    run.note(found=[trainer.validate(module, loader(7)), trainer.test(module, loader(7))])
    run.note(found=trainer.predict(module, loader(7)))
    run.note(found=trainer.predict(module, loader(7), return_predictions=False))


@case("two loaders to predict")
def _(run: Run) -> None:
    trainer = run.trainer(limit_predict_batches=2)
    run.note(found=trainer.predict(run.module(m.InTurn), [loader(7), loader(4)]))


@case("predictions with gradients")
def _(run: Run) -> None:
    found = run.trainer(inference_mode=False).predict(run.module(m.Taped), loader(4))
    run.note(found=(found, found[0].is_inference(), found[0].requires_grad))


for _interval in ("batch", "epoch", "batch_and_epoch"):
    for _place in ("whole", "part"):

        @case(f"a prediction writer of each {_interval}, {_place}")
        def _(run: Run, interval: Any = _interval, place: str = _place) -> None:
            class Writer(BasePredictionWriter):
                def write_on_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                    run.note(batch=args)

                def write_on_epoch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                    run.note(epoch=args)

            data = loader(7) if place == "whole" else loader(7, sampler=SequentialSampler(range(3)))
            run.trainer(callbacks=[Writer(interval)]).predict(run.module(m.InTurn), [data, loader(3)])


@case("no limits and no batches")
def _(run: Run) -> None:
    trainer, module = run.trainer(limit_test_batches=0, limit_predict_batches=0), run.module(m.Taped)
    run.note(found=(trainer.test(module, loader()), trainer.predict(module, loader()), trainer.validate(module, [])))


@case("everything with one Trainer")
def _(run: Run) -> None:
    trainer, module = run.trainer(enable_checkpointing=True), run.module(m.Taped)
    trainer.validate(module, loader(4))
    trainer.fit(module, loader(), loader(4))
    run.note(found=(trainer.validate(module, loader(4)), trainer.test(module, loader(5))))
    run.note(found=trainer.predict(module, loader(5)))
    run.note(best=trainer.test(ckpt_path="best", dataloaders=loader(5)), none=trainer.test(dataloaders=loader(5)))


@case("fit twice")
def _(run: Run) -> None:
    trainer, module = run.trainer(), run.module(m.Taped)
    trainer.fit(module, loader(), loader(4))
    trainer.fit(module, loader(), loader(4))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader(), loader(4))


@case("another module")
def _(run: Run) -> None:
    trainer = run.trainer()
    trainer.fit(run.module(m.Taped), loader(), loader(4))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(run.module(m.TwoGroups), loader(), loader(4))


@case("another Trainer")
def _(run: Run) -> None:
    module = run.module(m.Taped)
    run.trainer().fit(module, loader(), loader(4))
    run.trainer(max_epochs=3).fit(module, loader())


@case("a data module")
def _(run: Run) -> None:
    trainer, module, data = run.trainer(enable_checkpointing=True), run.module(m.Taped, lr=0.2), m.OwnData()
    for entry in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        entry(module, datamodule=data)  # type: ignore[operator]
    trainer.save_checkpoint("x.ckpt")
    run.note(hooks=data.hooks, size=m.OwnData.load_from_checkpoint("x.ckpt", weights_only=False).hparams.size)


@case("a data module and an error")
def _(run: Run) -> None:
    data = m.OwnData()
    try:
        run.trainer().fit(run.module(m.raising(ValueError("mine"))), data)
    finally:
        run.note(hooks=data.hooks)


@case("data modules of data sets")
def _(run: Run) -> None:
    data = pl.LightningDataModule.from_datasets(samples(), samples(6), samples(4), samples(4), batch_size=3)
    trainer, module = run.trainer(), run.module(m.Taped)
    run.note(found=(trainer.validate(module, data), trainer.test(module, data), trainer.predict(module, data)))


@case("nothing to train with")
def _(run: Run) -> None:
    run.trainer().fit(run.module(m.Taped))


@case("random numbers after a fit", differs="loaders leave torch's global generator alone", ignored=("notes",))
def _(run: Run) -> None:
    run.trainer().fit(run.module(m.Net), loader(), loader(4))
    run.note(drawn=(torch.rand(3), random.random(), float(np.random.rand())))  # noqa: NPY002


@case("random numbers of numpy and Python after a fit")
def _(run: Run) -> None:
    run.trainer().fit(run.module(m.Net), loader(), loader(4))
    run.note(drawn=(random.random(), float(np.random.rand())))  # noqa: NPY002


@case("a termination signal")
def _(run: Run) -> None:
    import signal

    class Killer(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    run.trainer(callbacks=[Killer()]).fit(run.module(m.Net), loader(), loader(4))


@case("a stop in a validation")
def _(run: Run) -> None:
    class Stops(pl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = not trainer.sanity_checking

    run.trainer(callbacks=[Stops()], val_check_interval=2).fit(run.module(m.Taped), loader(), loader(4))


# ---------------------------------------------------------------------- tuners

_FINDER = "refused as under stock DDPStrategy, which ours is a subclass of: Lightning asks for one device's strategy"


@case("a learning-rate search")
def _(run: Run) -> None:
    trainer, module = run.trainer(max_epochs=3), run.module(m.Taped)
    found = Tuner(trainer).lr_find(module, loader(40), num_training=20)
    run.note(found=(found.results, found.suggestion(), module.lr))
    trainer.fit(module, loader(), loader(4))


@case("a linear learning-rate search")
def _(run: Run) -> None:
    trainer, module = run.trainer(accumulate_grad_batches=2), run.module(m.Net)
    found = Tuner(trainer).lr_find(module, loader(40), num_training=10, mode="linear", early_stop_threshold=None)
    run.note(found=(found.results, found.suggestion(), module.lr))


@case("a learning-rate finder", slow=True)
def _(run: Run) -> None:
    module = run.module(m.Net)
    run.trainer(callbacks=[LearningRateFinder(num_training_steps=10)]).fit(module, loader(30))
    run.note(lr=module.lr)


@case("a batch-size search", differs=_FINDER, ignored=(
    "notes", "error", "modules", "trainers", "events", "logged", "log", "warnings", "files"), slow=True)  # fmt: skip
def _(run: Run) -> None:
    run.note(found=Tuner(run.trainer(max_epochs=1)).scale_batch_size(run.module(m.OwnBatchSize), max_trials=3))


# ---------------------------------------------------------------------- checkpoints

_EPOCH = "a run saved at the end of an epoch goes on in the next one: stock counts itself in the ended one until then"
_BEGUN = "an epoch that begins where a run resumes is counted: stock does not, and trains an epoch too many later"


def resume(name: str, kind: Any = m.Taped, to: int = 3, every: int | None = None, **options: Any) -> None:
    """A case of a fit that goes on from a checkpoint."""
    callbacks, ignored, why = options.pop("callbacks", list), options.pop("ignored", ()), options.pop("why", None)

    def act(run: Run) -> None:
        saver = ModelCheckpoint("c", save_last=True, every_n_train_steps=every)
        trainer = run.trainer(**options, enable_checkpointing=True, callbacks=[saver, *callbacks()])
        trainer.fit(run.module(kind), loader(), loader(4))
        path = str(run.folder / "c" / "last.ckpt")
        saved = torch.load(path, weights_only=False)
        run.note(keys=sorted(saved.keys() - OURS_ALONE), saved=plain(saved["state_dict"]))
        for state in saved["optimizer_states"]:
            state.pop("parameter_names", None)  # ours alone: a resume refuses parameters in another order
        run.note(optimizers=plain(saved["optimizer_states"]))
        trainer = run.trainer(**options | {"max_epochs": to}, enable_checkpointing=True, callbacks=callbacks())
        trainer.fit(run.module(kind), loader(), loader(4), ckpt_path=path)

    at_end = every is None and "val_check_interval" not in options
    slow = kind is not m.Taped
    ignored = (*ignored, "events") if at_end else ignored
    case(name, differs=why or (_EPOCH if at_end else None), ignored=ignored, slow=slow)(act)


resume("resume after an epoch")
resume("resume between validations", val_check_interval=2)
resume("resume under accumulation", accumulate_grad_batches=2)
resume("resume steps", every=2, ignored=("trainers",), why=_BEGUN)
resume("resume a scheduler", scheduled())
resume("resume a plateau", scheduled(make=m.plateau, interval="epoch", monitor="val_loss"))
resume("resume two schedulers", m.TwoSchedulers)
resume("resume manual optimization", m.Manual)
resume("resume two optimizers", m.ManualTwo)
resume("resume parameter groups", m.TwoGroups)
resume("resume an optimizer of one's own", m.OwnOptimizer)
resume("resume L-BFGS", m.Lbfgs)
resume("resume sparse gradients", m.Sparse)
resume("resume other types", m.Mixed)
resume("resume weight norm", m.WeightNormed)
resume("resume extra state", m.ExtraState)
resume("resume torchmetrics", m.Metrics)
resume("resume state of one's own", m.OwnState)
resume("resume frozen layers", m.Frozen)
resume("resume callbacks", callbacks=lambda: [EarlyStopping("val_loss", patience=2), Timer("00:10:00:00")])
resume(
    "resume moving averages", callbacks=lambda: [EMAWeightAveraging(decay=0.5)], ignored=_AVERAGED["ignored"],
    why=_AVERAGED["differs"],
)  # fmt: skip
resume("resume weight averaging", callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], to=4)


@case("a saved module")
def _(run: Run) -> None:
    trainer, module = run.trainer(), run.module(m.Taped, lr=0.3)
    trainer.fit(module, loader())
    trainer.save_checkpoint("whole.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    run.note(keys=[sorted(torch.load(name, weights_only=False).keys() - OURS_ALONE) for name in os.listdir(".")])
    loaded = m.Taped.load_from_checkpoint("whole.ckpt", weights_only=False)
    run.note(loaded=loaded.state_dict(), options=dict(loaded.hparams))


@case("checkpoints saved in hooks")
def _(run: Run) -> None:
    class Saving(m.Taped):
        def on_train_batch_end(self, *args: Any) -> None:
            self.trainer.save_checkpoint("batch.ckpt")

        def on_validation_end(self) -> None:
            self.trainer.save_checkpoint("validation.ckpt")

        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint("epoch.ckpt")

    run.trainer().fit(run.module(Saving), loader(), loader(4))
    run.note(steps=[torch.load(name, weights_only=False)["global_step"] for name in sorted(os.listdir("."))])


@case("weights for an evaluation")
def _(run: Run) -> None:
    run.trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(".", "w", save_weights_only=True)]).fit(
        run.module(m.Taped), loader(), loader(4)
    )
    trainer, module = run.trainer(), run.module(m.Taped)
    for entry in (trainer.validate, trainer.test, trainer.predict):
        run.note(found=entry(module, loader(4), ckpt_path="w.ckpt"))  # type: ignore[operator]


@case("a module with other layers", differs="refused before a value is loaded, in a sentence",
    ignored=("error", "modules"))  # fmt: skip
def _(run: Run) -> None:
    trainer = run.trainer()
    trainer.fit(run.module(m.Taped), loader())
    trainer.save_checkpoint("a.ckpt")
    run.trainer(max_epochs=3).fit(run.module(m.Tied), loader(), ckpt_path="a.ckpt")


@case("a checkpoint plug-in of one's own", differs=_EPOCH, ignored=("events",))
def _(run: Run) -> None:
    class Reversing(TorchCheckpointIO):
        """Its files are no files of Lightning's."""

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            run.note(saved=(os.path.basename(path), storage_options))
            super().save_checkpoint(checkpoint, path)
            with open(path, "rb") as file:
                content = file.read()
            with open(path, "wb") as file:
                file.write(content[::-1])

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
            run.note(loaded=os.path.basename(path))
            with open(path, "rb") as file, open(f"{path}.whole", "wb") as whole:
                whole.write(file.read()[::-1])
            return super().load_checkpoint(f"{path}.whole", map_location, weights_only)

    trainer = run.trainer(plugins=[Reversing()])
    trainer.fit(run.module(m.Taped), loader(), loader(4))
    trainer.save_checkpoint("x.ckpt", storage_options={"a": 1})
    run.trainer(plugins=[Reversing()], max_epochs=3).fit(run.module(m.Taped), loader(), loader(4), ckpt_path="x.ckpt")


fit(
    "checkpoints in the background",
    options=lambda: {
        "plugins": [AsyncCheckpointIO()],
        # None is removed: one that is not written yet would be written after that, with stock Lightning, too.
        "callbacks": [ModelCheckpoint(save_top_k=-1)],
    },
)


@case("a backbone that is thawed")
def _(run: Run) -> None:
    class Backbone(m.Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Linear(m.WIDTH, m.WIDTH)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss((self.backbone(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)

    run.trainer(callbacks=[BackboneFinetuning(1, verbose=False)], max_epochs=3).fit(run.module(Backbone), loader())
