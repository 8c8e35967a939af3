"""Small trainings that the distributed tests run on every rank."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from moe_lightning import ExpertParallelStrategy, GPTModule, MoELayer, OptimizerConfig, auxiliary_loss
from moe_lightning.strategies.stages import stages_of


class Warned(logging.Handler):
    """Lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """Learnable sequences: token i + 1 follows token i by a fixed rule, with some noise, from the index alone."""

    def __init__(self, size: int = 96, length: int = 16, vocab: int = 64) -> None:
        self.size, self.length, self.vocab = size, length, vocab

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(self.vocab, (1,), generator=generator)
        noise = torch.randint(0, 3, (self.length + 1,), generator=generator)
        ids = (start + 3 * torch.arange(self.length + 1) + noise) % self.vocab
        return ids[:-1], ids[1:]


class Numbered(RandomTokens):
    """Samples that know their number."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


class TokenStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples of RandomTokens in another order each pass, without a length and without a state."""

    def __init__(self, size: int = 30) -> None:
        self.samples, self.epoch = RandomTokens(size), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        found: list[int] = np.random.default_rng(epoch).permutation(len(self.samples)).tolist()
        return found

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.order(self.epoch):
            yield self.samples[index]


class StatefulStream(TokenStream):
    """The same with a state."""

    begin = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order(self.epoch)
        for at in range(self.begin, len(order)):
            self.begin = at + 1
            yield self.samples[order[at]]
        self.begin = 0

    def state_dict(self) -> dict[str, Any]:
        return {"begin": self.begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["begin"]


class Recorder(pl.Callback):
    """Keeps the global loss of every step and every validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.gradient_norms: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        norm = trainer.strategy.last_gradient_norm  # type: ignore[attr-defined]
        if norm is not None and trainer.global_step > len(self.gradient_norms):
            self.gradient_norms.append(float(norm))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if "val/loss" in trainer.callback_metrics and not trainer.sanity_checking:
            self.validations.append(float(trainer.callback_metrics["val/loss"]))


class DrawNoise(pl.Callback):
    """Makes the training depend on torch's global generator."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 0.1 * torch.rand(()))


class OwnModule(pl.LightningModule):
    """A user's module: one MoE layer between two linear ones, built in __init__, so with all experts at first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.moe = MoELayer(32, 48, num_experts=6, router={"top_k": 2})
        self.out = nn.Linear(32, 64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        loss = nn.functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss + auxiliary_loss(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def stepped(module: pl.LightningModule, loss: Tensor, clip: float | None = None) -> Tensor:
    """The loss of a training step, after its update where the module optimizes manually."""
    if not module.automatic_optimization:
        optimizer: Any = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(loss)
        if clip is not None:
            module.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
        optimizer.step()
    return loss


def quiet() -> None:
    """Keep Lightning's notes about small trainings out of the test log."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch.*")


TINY = {
    "vocab_size": 64,
    "context_length": 16,
    "num_layers": 2,
    "num_heads": 2,
    "d_model": 32,
    "d_hidden": 48,
    "num_experts": 6,
    "moe_every": 1,
}


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on one CPU that shows, logs and saves nothing unless `options` say so."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0} | silent | options)


def make_trainer(rank: int, world_size: int, strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """A quiet, seeded Trainer for one rank of a world that already exists."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        NODE_RANK="0",
    )
    quiet()
    pl.seed_everything(7, verbose=False)
    return quiet_trainer(
        strategy=ExpertParallelStrategy(**(strategy or {})),
        plugins=[LightningEnvironment(), *options.pop("plugins", ())],
        **{"devices": world_size, "log_every_n_steps": 1} | options,
    )


def set_up(rank: int, world_size: int, strategy: dict[str, Any], module: pl.LightningModule) -> pl.Trainer:
    """A Trainer whose strategy is set up for a module, as a fit begins."""
    trainer = make_trainer(rank, world_size, strategy, fast_dev_run=1)
    trainer.strategy.connect(module)
    trainer.strategy.setup_environment()
    trainer.strategy.setup(trainer)
    return trainer


def train(
    rank: int,
    world_size: int,
    *,
    model: dict[str, Any] | None = None,
    own_module: type[pl.LightningModule] | bool = False,
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    batch_size: int = 12,
    dataset_size: int = 96,
    steps: int = 20,
    ckpt_path: str | None = None,
    save_to: str | None = None,
    validate: bool = False,
    optimizer: dict[str, Any] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    stream: type[TokenStream] | None = None,
) -> dict[str, Any]:
    """Train a tiny model and return losses, replica checks and the full state (rank 0)."""
    recorder = Recorder()
    options = {"max_steps": steps, "gradient_clip_val": 1.0} | (trainer or {})
    fit = make_trainer(rank, world_size, strategy, callbacks=[recorder, *callbacks], **options)
    chosen = fit.strategy
    own_module = OwnModule if own_module is True else own_module
    module: pl.LightningModule = (
        own_module()
        if own_module
        else GPTModule(
            TINY | (model or {}),
            OptimizerConfig(**{"lr": 3e-3, "warmup_steps": 2, "decay": "constant"} | (optimizer or {})),
        )
    )
    loader: DataLoader[Any] = DataLoader(RandomTokens(dataset_size), batch_size=batch_size, shuffle=True)
    if stream is not None:
        loader = DataLoader(stream(), batch_size=batch_size)
    held_out = DataLoader(RandomTokens(30), batch_size=10) if validate else None
    fit.fit(module, loader, held_out, ckpt_path=ckpt_path)
    if save_to is not None:
        fit.save_checkpoint(save_to)
    state = chosen.lightning_module_state_dict()
    return {
        "losses": recorder.losses,
        "validations": recorder.validations,
        "gradient_norms": recorder.gradient_norms,
        "state": {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in state.items()},
        "replicas": replicas_of(module),
    }


BRIEF: dict[str, Any] = {"steps": 4, "dataset_size": 36}
"""Options of `train`: an epoch of three batches of twelve, and one step of the next."""
BRIEF_ACCUMULATION: dict[str, Any] = {
    "steps": 3, "dataset_size": 26, "batch_size": 7, "trainer": {"accumulate_grad_batches": 3},
}  # fmt: skip
"""An epoch whose last step has one batch instead of three, and a step of the next."""


def replicas_of(module: pl.LightningModule) -> dict[str, dict[int, bytes]]:
    """The raw bytes of every expert this rank holds, by layer and parameter; after a training."""
    return {
        f"{index}/{name}": {
            e: p[slot].detach().view(torch.uint8).numpy().tobytes() for slot, e in enumerate(layer.experts.slot_experts)
        }
        for index, layer in enumerate(stages_of(module.trainer).layers)
        for name, p in layer.experts.stacked_parameters().items()
    }
