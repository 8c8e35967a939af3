"""Modules and data of a user's, small and without experts: stock Lightning trains them, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

WIDTH = 4


def samples(size: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(size, WIDTH, generator=generator), torch.randn(size, 2, generator=generator))


def loader(size: int = 8, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(size), batch_size=batch_size, **options)


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __init__(self, size: int = 6) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        data = samples(self.size)
        return (data[i] for i in range(self.size))


class Net(pl.LightningModule):
    """One layer; every hook that Lightning calls of it goes to `hooks`."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hooks: list[Any] = []
        self.lr = lr
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("index", float(batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=self.lr)


class Taped(Net):
    """With the order of the module's own hooks."""


def _hook(name: str) -> Callable[..., Any]:
    def hook(self: Net, *args: Any, **kwargs: Any) -> Any:
        step = None if self._trainer is None else self._trainer.global_step
        self.hooks.append((name, step, [a for a in args if isinstance(a, int | str)]))
        return getattr(super(Taped, self), name)(*args, **kwargs)

    return hook


_OF_MODULES = (
    "prepare_data", "setup", "teardown", "configure_model", "configure_callbacks", "backward", "forward",
    "load_state_dict", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping",
    "transfer_batch_to_device",
)  # fmt: skip
for _name in dir(pl.LightningModule):
    if (_name.startswith("on_") and callable(getattr(pl.LightningModule, _name))) or _name in _OF_MODULES:
        setattr(Taped, _name, _hook(_name))


# ---------------------------------------------------------------------- optimizers and schedulers


class TwoGroups(Taped):
    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.layer.weight], "lr": 0.3, "weight_decay": 0}, {"params": [self.layer.bias]}]
        return AdamW(groups, lr=0.1, foreach=False)


class Frozen(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)


class Thawing(Taped):
    def on_train_epoch_start(self) -> None:
        self.layer.weight.requires_grad_(self.current_epoch == 0)


class Lbfgs(Taped):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=4)


class OwnOptimizer(Taped):
    def configure_optimizers(self) -> Any:
        class Plain(Optimizer):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                with torch.no_grad():
                    for parameter in self.param_groups[0]["params"]:
                        self.state[parameter]["n"] = self.state[parameter].get("n", 0) + 1
                        parameter.add_(parameter.grad, alpha=-0.1)
                return loss

        return Plain(self.parameters(), {"lr": 0.1})


class NoOptimizer(Taped):
    def configure_optimizers(self) -> Any:
        return None


class Scheduled(Taped):
    """A scheduler, as its class attributes say."""

    interval, frequency, monitor, strict = "step", 1, None, True
    make: Callable[[Any], Any] = staticmethod(lambda optimizer: StepLR(optimizer, 2))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        how = {"interval": self.interval, "frequency": self.frequency, "strict": self.strict}
        how |= {"monitor": self.monitor} if self.monitor else {}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": type(self).make(optimizer)} | how}


def scheduled(**attributes: Any) -> type[Scheduled]:
    if "make" in attributes:
        attributes["make"] = staticmethod(attributes["make"])
    return type("Scheduled", (Scheduled,), attributes)


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, patience=0, threshold=10)


def warmed(optimizer: Any) -> Any:
    parts = [ConstantLR(optimizer, 0.5, 2), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, [2])


class OneCycle(Taped):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}]


class TwoSchedulers(Taped):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1), {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class OwnStep(Taped):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(optimizer_closure)


class OwnClipping(Taped):
    def configure_gradient_clipping(self, optimizer: Any, *values: Any, **options: Any) -> None:
        self.hooks.append(("clipping", str(options)))


# ---------------------------------------------------------------------- manual optimization


class Manual(Taped):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss)


class ManualClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class ManualTwo(Manual):
    def configure_optimizers(self) -> Any:
        first, second = SGD([self.layer.weight], lr=0.1), Adam([self.layer.bias], lr=0.1)
        return [first, second], [StepLR(first, 1)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(first, 0.5, "value")
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model(sync_grad=bool(batch_idx % 2)):
            second.zero_grad()
            self.manual_backward(self.loss(batch))
            second.step()
        self.lr_schedulers().step()


class ManualRaw(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "more": 1}


# ---------------------------------------------------------------------- steps


def training(change: Callable[[Net, Any, int], Any]) -> type[Taped]:
    """A module whose training step is `change(module, batch, batch_idx)`."""
    return type("Changed", (Taped,), {"training_step": lambda self, batch, batch_idx: change(self, batch, batch_idx)})


def raising(error: BaseException) -> type[Taped]:
    def step(module: Net, batch: Any, index: int) -> Tensor:
        if index == 2:
            raise error
        return module.loss(batch)

    return training(step)


def _stop(module: Net, batch: Any, index: int) -> Tensor:
    module.trainer.should_stop = module.trainer.global_step == 2
    return Net.training_step(module, batch, index)


Stopping = training(_stop)


class Skipping(Taped):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class FromIterator(Taped):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, index, _ = next(dataloader_iter)
        self.log("index", float(index), batch_size=2)
        return self.loss(batch)


class BatchOnly(Net):
    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)


class Outputs(Taped):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "sum": batch[0].sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append((sorted(outputs), float(outputs["sum"]), outputs["loss"].requires_grad))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"index": batch_idx}

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.hooks.append(str(outputs))


class Transferring(Taped):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part + 1 for part in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part * 2 for part in batch]


class Logging(Taped):
    """Logs in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for kind in ("sum", "max", "min", "mean"):
            self.log(kind, loss, on_epoch=True, on_step=kind == "max", reduce_fx=kind)
        self.log_dict({"a": 1.0, "b": loss}, on_epoch=True, prog_bar=True, batch_size=7)
        self.log("synced", loss, sync_dist=True, on_epoch=True)
        self.log("first", loss, rank_zero_only=True)
        self.logger.log_metrics({"own": 1.0}, step=batch_idx)
        return loss

    def on_train_start(self) -> None:
        self.log("train_start", 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zero_grad", 2.0)

    def on_after_backward(self) -> None:
        self.log("gradient", self.layer.weight.grad.norm())

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.log("validation_end", 3.0)


class Metrics(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.errors, self.collected = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.errors(self.layer(batch[0]), batch[1])
        self.log("errors", self.errors, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.collected.update(self.layer(batch[0]), batch[1])
        self.log("collected", self.collected)


# ---------------------------------------------------------------------- layers


class Dropped(Taped):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((nn.functional.dropout(batch[0], 0.5, self.training), batch[1]))


class Normed(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.norm(batch[0]), batch[1]))


class Tied(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, 2)
        self.second.weight = self.layer.weight


class Constrained(Taped):
    """Rows that have the norm 1 after every update."""

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        with torch.no_grad():
            self.layer.weight.div_(self.layer.weight.norm(dim=1, keepdim=True))


class WeightNormed(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(self.layer)


class Sparse(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] + self.table((batch[0][:, 0] > 0).long()), batch[1]))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Mixed(Taped):
    """Parameters of several types and of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))
        self.wide, self.empty = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(0, 3))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.factor + self.wide.sum().float() ** 2


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class ExtraState(Taped):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.counter.count += 1

    def on_fit_start(self) -> None:
        self.hooks.append(("counted", self.counter.count))


class LateLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = None

    def configure_model(self) -> None:
        if self.layer is None:
            torch.manual_seed(5)
            self.layer = nn.Linear(WIDTH, 2)


class OwnCallbacks(Taped):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss")]


class OwnState(Taped):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"a": 1, "t": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hooks.append(("mine", str(checkpoint.get("mine"))))


# ---------------------------------------------------------------------- several loaders


class Joined(Taped):
    """Batches of several loaders at once."""

    def _sum(self, batch: Any) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        return torch.stack([self.loss(part) for part in parts if part is not None]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._sum(batch)
        self.log("train_loss", loss, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self._sum(batch), batch_size=2)


class InTurn(Taped):
    """Batches of one loader after the other."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.hooks.append((batch_idx, dataloader_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0])


class OwnLoaders(InTurn):
    def train_dataloader(self) -> Any:
        self.hooks.append("train_dataloader")
        return loader(4 + 2 * self.current_epoch)

    def val_dataloader(self) -> Any:
        self.hooks.append("val_dataloader")
        return [loader(4), loader(2)]

    def test_dataloader(self) -> Any:
        return loader(5)

    def predict_dataloader(self) -> Any:
        return loader(5)


class OwnBatchSize(Net):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(16, self.batch_size)


class OwnData(pl.LightningDataModule):
    """Its hooks in order."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hooks: list[Any] = []

    def prepare_data(self) -> None:
        self.hooks.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.hooks.append(("setup", str(stage)))

    def teardown(self, stage: str) -> None:
        self.hooks.append(("teardown", str(stage)))

    def train_dataloader(self) -> Any:
        return loader(self.hparams.size)

    def val_dataloader(self) -> Any:
        return loader(4)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"k": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.hooks.append(("load", state_dict))

    def on_exception(self, exception: BaseException) -> None:
        self.hooks.append(("exception", str(exception)))
