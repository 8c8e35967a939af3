"""Lightning's WeightAveraging and EMAWeightAveraging: averages that follow experts and shards, as in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, MoELayer, OptimizerConfig
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.load_balancer import LoadBalancer
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, OwnModule, RandomTokens, make_trainer, quiet, quiet_trainer
from tests.parameters import slow

STEPS = 4
STAGED: dict[str, Any] = TINY | {
    "num_layers": 4, "tie_embeddings": False, "router": {"top_k": 2, "aux_loss_coef": 0.0, "bias_update_rate": 0.01},
}  # fmt: skip
"""A model that mesh.pp can cut, with buffers in its blocks."""
PP: dict[str, Any] = {"mesh": {"pp": 2}}


class Counting(OwnModule):
    """With a buffer that changes, and a validation."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.moe = MoELayer(32, 48, num_experts=6, router={"top_k": 2, "bias_update_rate": rate})
        self.register_buffer("batches", torch.zeros(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        h = self.embed(x)
        loss = torch.nn.functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())
        self.log("val/loss", loss, sync_dist=True)


class Validations(pl.Callback):
    """Losses of validations."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val/loss"]))


def averaging(kind: str) -> WeightAveraging:
    if kind == "equal":
        return WeightAveraging()
    if kind == "weights only":
        return WeightAveraging(use_buffers=False)
    return EMAWeightAveraging(decay=0.5, update_every_n_steps=2 if kind == "every second step" else 1)


def run(trainer: pl.Trainer, module: pl.LightningModule, path: str | None = None) -> None:
    loader: DataLoader[Any] = DataLoader(RandomTokens(72), batch_size=12)
    trainer.fit(module, loader, DataLoader(RandomTokens(30), batch_size=10), ckpt_path=path)


def model(gpt: dict[str, Any] | None, rate: float) -> pl.LightningModule:
    return GPTModule(gpt, OptimizerConfig(lr=3e-3)) if gpt else Counting(rate)


def train(
    rank: int,
    world_size: int,
    kind: str = "ema",
    strategy: dict[str, Any] | None = None,
    steps: int = STEPS,
    path: str | None = None,
    callbacks: Any = (),
    gpt: dict[str, Any] | None = None,
    rate: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Train, validating every second step, and return the losses, the module after it and what is saved before."""
    losses = Validations()
    saver = ModelCheckpoint("files", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = make_trainer(
        rank, world_size, strategy, callbacks=[losses, averaging(kind), saver, *(make() for make in callbacks)],
        **{"max_steps": steps, "val_check_interval": 2, "enable_checkpointing": True, **options},
    )  # fmt: skip
    module = model(gpt, rate)
    run(trainer, module, path)
    whole = trainer.strategy.lightning_module_state_dict()
    saved = None
    if rank == 0:
        saved = {file.stem: torch.load(file, weights_only=False) for file in Path("files").glob("*.ckpt")}
    return {"losses": losses.losses, "whole": whole, "saved": saved}


def stock(kind: str) -> dict[str, Any]:
    """The same in stock Lightning."""
    quiet()
    pl.seed_everything(7, verbose=False)
    losses = Validations()
    saver = ModelCheckpoint("files", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    callbacks = [losses, averaging(kind), saver]
    trainer = quiet_trainer(max_steps=STEPS, val_check_interval=2, callbacks=callbacks, enable_checkpointing=True)
    module = Counting()
    run(trainer, module)
    saved = {file.stem: torch.load(file, weights_only=False) for file in Path("files").glob("*.ckpt")}
    return {"losses": losses.losses, "whole": module.state_dict(), "saved": saved}


def of_stock(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    return stock(kind)


@pytest.mark.parametrize("kind", ["ema", "equal", "weights only", "every second step"])
def test_one_rank_is_as_stock(kind: str) -> None:
    """Weights, averages, validations and files, to the bit."""
    (ours,), (theirs,) = run_pooled(1, train, kind), run_pooled(1, of_stock, kind)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert_equal(ours["whole"], theirs["whole"])
    assert ours["saved"].keys() == theirs["saved"].keys()
    for name, file in theirs["saved"].items():
        own = ours["saved"][name]
        assert file.keys() <= own.keys()
        assert own["averaging_state"] == file["averaging_state"]
        for part in ("state_dict", "current_model_state"):
            assert_equal(own[part], file[part])
        states = [saved["optimizer_states"][0]["state"][0].keys() for saved in (own, file)]
        assert states[0] == states[1]  # without the averages


def assert_equal(these: dict[str, Tensor], those: dict[str, Tensor]) -> None:
    assert these.keys() == those.keys()
    different = [name for name, tensor in those.items() if not torch.equal(these[name], tensor)]
    assert not different


def assert_close(these: dict[str, Tensor], those: dict[str, Tensor]) -> None:
    assert these.keys() == those.keys()
    for name, tensor in those.items():
        torch.testing.assert_close(these[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def balancer() -> LoadBalancer:
    return LoadBalancer(rebalance_every=1, calibrate=False)


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        (2, {"replicas": 2, "check_state_every": 1}, {"rate": 0.01}),
        (2, {"dense": "fsdp"}, {}),
        slow(2, {"dense": "zero1"}, {"accumulate_grad_batches": 2, "val_check_interval": 3, "steps": 3}),
        (2, {"slots": 4}, {"callbacks": [balancer], "rate": 0.01}),
        slow(4, {"dense": "hsdp", "shard_size": 2}, {}),
        slow(2, {"offload_optimizer": True}, {}),
        slow(2, {"mesh": {"tp": 2}}, {"gpt": TINY}),
        slow(2, {"mesh": {"cp": 2}}, {"gpt": TINY}),
        slow(4, {"mesh": {"tp": 2}, "dense": "zero1"}, {"gpt": TINY}),
        slow(2, PP, {"gpt": STAGED}),
        slow(2, PP | {"schedule": "interleaved"}, {"gpt": STAGED, "callbacks": [balancer]}),
        slow(4, PP | {"dense": "fsdp"}, {"gpt": STAGED}),
        slow(4, PP | {"dense": "zero1", "replicas": 2}, {"gpt": STAGED}),
    ],
)
def test_averages_are_those_of_one_process(ranks: int, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    (alone,) = run_pooled(1, partial(train, **options | {"callbacks": ()}), "ema")
    found = run_pooled(ranks, partial(train, **options), "ema", strategy)
    assert len(alone["losses"]) >= 2
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert_close(found[0]["whole"], alone["whole"])
    for name, file in alone["saved"].items():
        own = found[0]["saved"][name]
        assert own["averaging_state"] == file["averaging_state"]
        for part in ("state_dict", "current_model_state"):
            assert_close(own[part], file[part])


def resumed(
    rank: int, world_size: int, strategy: dict[str, Any], folder: str, begin: bool, gpt: dict[str, Any] | None
) -> dict[str, Any]:
    """The first half of a training, saved in both ways; or the second half from one of them."""
    saver = partial(PartialExpertsCheckpoint, f"{folder}/steps", every_n_steps=3, save_on_train_end=False)
    if begin:
        found = train(rank, world_size, "equal", strategy, steps=4, callbacks=[saver], rate=0.01, gpt=gpt)
        if rank == 0:
            Path("files").rename(Path(folder) / "files")
        return found
    return train(rank, world_size, "equal", strategy, path=folder, steps=6, rate=0.01, gpt=gpt)


def measured(rank: int, world_size: int, strategy: dict[str, Any], path: str, gpt: dict[str, Any] | None) -> float:
    """The loss of the model in a checkpoint, for a Trainer without averages."""
    losses = Validations()
    trainer = make_trainer(rank, world_size, strategy, callbacks=[losses])
    trainer.validate(model(gpt, 0.01), DataLoader(RandomTokens(30), batch_size=10), ckpt_path=path, verbose=False)
    return losses.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("source", [slow("files/step=4.ckpt"), "steps"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {"dense": "fsdp", "replicas": 2}), (1, {})), slow((1, {}), (2, {"dense": "zero1"})),
        slow((2, PP), (1, {})), slow((1, {}), (2, PP)), slow((2, PP), (2, PP | {"schedule": "interleaved"})),
    ],
)  # fmt: skip
def test_a_resume_on_other_ranks_goes_on_with_both_weights(
    tmp_path: Path, source: str, before: tuple[int, Any], after: tuple[int, Any]
) -> None:
    gpt = STAGED if any("mesh" in strategy for _, strategy in (before, after)) else None
    (quiet,) = run_pooled(1, partial(train, steps=6, rate=0.01, gpt=gpt), "equal")
    run_pooled(before[0], resumed, before[1], str(tmp_path), True, gpt)
    loss = run_pooled(after[0], measured, after[1], str(tmp_path / source), gpt)[0]
    assert loss == pytest.approx(quiet["losses"][1], abs=1e-5)
    found = run_pooled(after[0], resumed, after[1], str(tmp_path / source), False, gpt)
    assert found[0]["losses"] == pytest.approx(quiet["losses"][2:], abs=1e-5)
    assert_close(found[0]["whole"], quiet["whole"])
    assert_close(found[0]["saved"]["step=6"]["current_model_state"], quiet["saved"]["step=6"]["current_model_state"])


class ScaledEmbedding(nn.Embedding):
    """Trains one number beside its vectors."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Scaled(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.embed = ScaledEmbedding(64, 32)


def number_in_checkpoints(
    rank: int, world_size: int, strategy: dict[str, Any], folder: Path
) -> tuple[list[tuple[float, float]], float]:
    """(scale, loss) that a validation has of a directory and of a file, and the scale that is trained on."""
    savers = [
        PartialExpertsCheckpoint(f"{folder}/steps", every_n_steps=STEPS),
        ModelCheckpoint(folder, every_n_train_steps=STEPS, filename="file"),
    ]
    options: dict[str, Any] = {"max_steps": STEPS, "enable_checkpointing": True}
    run(make_trainer(rank, world_size, strategy, callbacks=[averaging("ema"), *savers], **options), Scaled())
    found = []
    for path in (f"{folder}/steps", f"{folder}/file.ckpt"):
        losses, module = Validations(), Scaled()
        trainer = make_trainer(rank, world_size, strategy, callbacks=[losses])
        trainer.validate(module, DataLoader(RandomTokens(30), batch_size=10), ckpt_path=path, verbose=False)
        found.append((float(module.embed.scale), losses.losses[0]))  # type: ignore[arg-type]
    saved = torch.load(folder / "file.ckpt", weights_only=False)
    return found, float(saved["current_model_state"]["embed.scale"])


@pytest.mark.parametrize(("ranks", "strategy"), [(1, {}), slow(2, {"dense": "fsdp"}), slow(2, {"dense": "zero1"})])
def test_a_validation_of_a_directory_has_the_average_of_one_number(
    tmp_path: Path, ranks: int, strategy: dict[str, Any]
) -> None:
    for (of_directory, of_file), trained in run_pooled(ranks, number_in_checkpoints, strategy, tmp_path):
        assert of_directory == pytest.approx(of_file, rel=1e-6)
        assert abs(of_file[0] - trained) > 1e-4
