"""Models in pipeline stages (mesh.pp): the loss, gradient norms and logged values of as many accumulated micro-batches
on one rank.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from moe_lightning import ExpertParallelStrategy, GPTModule, MoELayer, OptimizerConfig, auxiliary_loss
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.data.loader import StepLoader
from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.parallel import exchange
from tests.distributed.harness import run_ranks
from tests.distributed.mesh_checkpoints import assert_read_to_the_bit, write
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.training import TINY, RandomTokens, make_trainer, replicas_of
from tests.distributed.training import train as train_tiny
from tests.parameters import slow

STEPS = 6  # of which an epoch has five
MICROS = 4


class PerStep(pl.Callback):
    """Loss of every step, as the mean over its micro-batches, and what else is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.norms: list[float] = []
        self.counts: list[np.ndarray[Any, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        here = trainer.train_dataloader.current
        if here.micro == 0:
            self.losses.append(0.0)
        self.losses[-1] += float(trainer.callback_metrics["train/loss"]) * here.micro_total / here.step_total
        if here.micro == here.num_micros - 1:
            norm = trainer.strategy.last_gradient_norm  # type: ignore[attr-defined]
            self.norms.append(0.0 if norm is None else float(norm))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validations.append(float(trainer.callback_metrics["val/loss"]))


def train(
    rank: int,
    world_size: int,
    *,
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    own_module: Any = None,
    batch_size: int = 12,
    accumulate: int = 1,
    samples: int = 60,
    steps: int = STEPS,
    every: int | float = 3,
    callbacks: tuple[pl.Callback, ...] = (),
    trainer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on one global batch a step, whatever the number of its micro-batches."""
    watch = PerStep()
    options = {"max_steps": steps, "gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate} | (trainer or {})
    options["val_check_interval"] = every * accumulate if isinstance(every, int) else every
    fit = make_trainer(rank, world_size, strategy, callbacks=[watch, *callbacks], **options)
    module = own_module() if own_module else GPTModule(
        TINY | {"num_layers": 4, "tie_embeddings": False} | (model or {}),
        OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"),
    )  # fmt: skip
    data = RandomTokens(samples)
    sampler = StepSampler(
        num_samples=samples, global_batch_size=batch_size, num_micros=accumulate, drop_last=False, seed=7
    )
    fit.fit(module, StepLoader(data, sampler), DataLoader(RandomTokens(30), batch_size=10))
    state = fit.strategy.lightning_module_state_dict()
    return {
        "losses": watch.losses,
        "validations": watch.validations,
        "gradient_norms": watch.norms,
        "state": {name: tensor.float().numpy() for name, tensor in state.items()},
        "replicas": replicas_of(module),
        "logged": {name: float(value) for name, value in fit.callback_metrics.items()},
        "step": fit.global_step,
    }


LLAMA = {**KNOWN["llama"]["model"], "tie_embeddings": False}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"model": {**LLAMA, "dropout": 0.1}},
    "noisy": {"model": KNOWN["noisy"]["model"]},
    "uneven": {
        "samples": 96,
        "batch_size": 26,
    },  # micro-batches of 7, 7, 6 and 6 samples, and few in the last step of an epoch
    # The last step of an epoch has one sample.
    "few": {"samples": 58, "batch_size": 19, "every": 1.0, "model": {"moe_every": 2}},
    "by value": {"trainer": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}},
    "three": {"model": {"num_layers": 3}},
}


@cache
def reference(key: str, micros: int) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(1, partial(train, **{"accumulate": micros} | CASES[key]))[0]
    return result


def in_stages(ranks: int, pp: int, *, schedule: str = "1f1b", micros: int = MICROS, **case: Any) -> list[Any]:
    strategy = {"mesh": {"pp": pp}, "schedule": schedule, "micro_batches": micros, **case.pop("strategy", {})}
    return run_ranks(ranks, partial(train, strategy=strategy, **case))


@pytest.mark.parametrize(
    ("key", "ranks", "pp", "options"),
    [
        slow("gpt2", 2, 2, {}),
        slow("gpt2", 4, 4, {}),
        slow("llama", 4, 2, {"strategy": {"replicas": 2}}),
        slow("noisy", 4, 2, {}),
        ("uneven", 4, 2, {}),
        slow("few", 4, 2, {}),
        ("three", 2, 2, {}),
        slow("by value", 2, 2, {}),
        slow("gpt2", 2, 2, {"schedule": "interleaved"}),
        slow("noisy", 4, 2, {"schedule": "interleaved"}),
        slow("uneven", 4, 2, {"schedule": "interleaved"}),
        slow("uneven", 8, 2, {}),
        slow("noisy", 8, 4, {}),
    ],
)
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, pp: int, options: dict[str, Any]) -> None:
    assert_same_training(reference(key, MICROS), in_stages(ranks, pp, **CASES[key], **options))


def test_accumulated_batches_are_computed_in_micro_batches_too() -> None:
    expected = run_ranks(1, partial(train, samples=96, batch_size=24, accumulate=6))[0]
    found = in_stages(4, 2, micros=2, samples=96, batch_size=24, accumulate=3)  # an epoch has four
    assert_same_training(expected | {"validations": []}, [result | {"validations": []} for result in found])


def exchanges(rank: int, world_size: int, schedule: str) -> int:
    """Exchanges of a step on this rank."""
    count, own = 0, exchange._all_to_all

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return own(*arguments, **named)

    exchange._all_to_all = counted  # type: ignore[assignment]
    train(rank, world_size, strategy={"mesh": {"pp": 2}, "schedule": schedule}, steps=1)
    return count


def test_schedules_exchange_as_often() -> None:
    plain, interleaved = (run_ranks(4, partial(exchanges, schedule=name)) for name in ("1f1b", "interleaved"))
    assert plain == interleaved
    layers_of_a_rank, there_and_back_both_ways = 2, 4
    assert set(plain) == {layers_of_a_rank * MICROS * there_and_back_both_ways}


# ---------------------------------------------------------------------- what callbacks and loggers see


ENOUGH = 20
"""Steps, for a loss that falls no more."""


def watched(rank: int, world_size: int, folder: str, **options: Any) -> dict[str, Any]:
    stop = EarlyStopping("val/loss", patience=1, min_delta=0.2)
    best = ModelCheckpoint(folder, monitor="val/loss", filename="{step}", save_top_k=1)
    options |= {"trainer": {"enable_checkpointing": True}, "samples": 96, "steps": ENOUGH}
    found = train(rank, world_size, callbacks=(stop, best), **options)
    return found | {"best": float(stop.best_score), "path": best.best_model_path, "stopped": stop.stopped_epoch}


def test_callbacks_decide_alike_on_every_rank(tmp_path: Any) -> None:
    (alone,) = run_ranks(1, partial(watched, folder=str(tmp_path / "one"), accumulate=MICROS))
    strategy = {"mesh": {"pp": 2}, "micro_batches": MICROS}
    ranks = run_ranks(4, partial(watched, folder=str(tmp_path / "stages"), strategy=strategy))
    for found in ranks:
        assert found["step"] == alone["step"] < ENOUGH
        assert found["best"] == pytest.approx(alone["best"], abs=TOLERANCE)
        assert found["path"].rpartition("/")[2] == alone["path"].rpartition("/")[2]
        assert found["logged"].keys() == alone["logged"].keys()
        assert found["logged"] == ranks[0]["logged"]


# ---------------------------------------------------------------------- users' modules


class Own(pl.LightningModule):
    """A user's module: an embedding, a bare parameter, blocks of unlike kinds, a head, metrics and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.shift = nn.Parameter(torch.zeros(32))
        self.body = nn.ModuleList([nn.Linear(32, 32), MoELayer(32, 48, num_experts=6, router={"top_k": 2}), nn.Tanh()])
        self.drop = StreamDropout(0.1)
        self.out = nn.Linear(32, 64)
        self.right = MeanMetric()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x) + self.shift)
        for block in self.body:
            h = block(h)
        logits: Tensor = self.out(h)
        return logits

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), logits.argmax(-1) == batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.seen += 1
        loss, right = self._loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        self.log_dict({"right": right.float().mean()}, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss + auxiliary_loss(self)}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, right = self._loss(batch)
        self.log("val/loss", loss, sync_dist=True)
        self.right.update(right.float())
        self.log("val/right", self.right)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"next": self(batch[0]).argmax(-1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_a_users_module_trains_alike() -> None:
    (alone,) = run_ranks(1, partial(train, own_module=Own, accumulate=MICROS))
    ranks = in_stages(4, 2, own_module=Own)
    assert_same_training(alone, ranks)
    for found in ranks:
        assert found["logged"].keys() == alone["logged"].keys()
        for name in ("right", "val/loss", "val/right"):
            assert found["logged"][name] == pytest.approx(alone["logged"][name], abs=TOLERANCE)


def evaluate(rank: int, world_size: int, strategy: dict[str, Any], accumulate: int = 1) -> tuple[float, float, Any]:
    """Losses of a module that was never trained, and after it was; its predictions then."""
    trainer = make_trainer(rank, world_size, strategy, max_steps=3, accumulate_grad_batches=accumulate)
    module, loader = Own(), DataLoader(RandomTokens(30), batch_size=9)
    first = trainer.validate(module, loader, verbose=False)[0]["val/loss"]
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=12 // accumulate))
    second = trainer.validate(module, loader, verbose=False)[0]["val/loss"]
    predictions = trainer.predict(module, loader)
    assert predictions is not None
    return first, second, torch.cat([batch["next"] for batch in predictions]).numpy()  # type: ignore[call-overload]


def test_evaluation_and_prediction_run_through_the_stages() -> None:
    ((first, second, predicted),) = run_ranks(1, partial(evaluate, strategy={}, accumulate=3))
    ranks = run_ranks(2, partial(evaluate, strategy={"mesh": {"pp": 2}, "micro_batches": 3}))
    for found_first, found_second, found in ranks:
        assert found_first == pytest.approx(first, abs=TOLERANCE)
        assert found_second == pytest.approx(second, abs=TOLERANCE)
        assert found.shape == predicted.shape
        np.testing.assert_array_equal(found, ranks[0][2])


# ---------------------------------------------------------------------- checkpoints

FOUR = {"num_layers": 4, "tie_embeddings": False}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"replicas": 2}),
    "fsdp": (2, {"dense": "fsdp"}),
    "stages": (2, {"mesh": {"pp": 2}, "micro_batches": 2}),
    "four": (4, {"mesh": {"pp": 2}, "schedule": "interleaved", "replicas": 2}),
}


def save(rank: int, world_size: int, strategy: dict[str, Any], folder: str) -> None:
    saver = PartialExpertsCheckpoint(f"{folder}/steps", every_n_steps=3)
    train_tiny(rank, world_size, model=FOUR, strategy=strategy, steps=3, callbacks=[saver],
               trainer={"enable_checkpointing": True}, save_to=f"{folder}/one.ckpt")  # fmt: skip


def load(rank: int, world_size: int, strategy: dict[str, Any], source: str, target: str) -> None:
    """Resume at the last step, so that nothing is trained, and save."""
    train_tiny(rank, world_size, model=FOUR, strategy=strategy, steps=3, ckpt_path=source, save_to=target)


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        slow("stages", ["one", "four", "fsdp"]),
        slow("ddp", ["stages"]),
        slow("four", ["one", "ddp", "stages"]),
        slow("one", ["stages", "four"]),
        slow("fsdp", ["stages", "four"]),
    ],
)
def test_any_mesh_reads_what_any_wrote_to_the_bit(writer: str, readers: list[str], tmp_path: Path) -> None:
    written = write(MESHES, writer, save, tmp_path)
    assert sum(name.endswith("/exp_avg") for name in written) == len(torch.load(tmp_path / "one.ckpt")["state_dict"])
    assert_read_to_the_bit(MESHES, readers, load, tmp_path, written)


def alone(rank: int, world_size: int, path: str) -> list[str]:
    """What stock Lightning says of a checkpoint on one device."""
    module = GPTModule.load_from_checkpoint(path, weights_only=True)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(module, DataLoader(RandomTokens(30), batch_size=10), verbose=False)
    return list(module.state_dict())


def test_one_file_is_stock_lightnings(tmp_path: Path) -> None:
    ranks, strategy = MESHES["four"]
    run_ranks(ranks, partial(save, strategy=strategy, folder=str(tmp_path)))
    (names,) = run_ranks(1, partial(alone, path=str(tmp_path / "one.ckpt")))
    assert names == list(torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"])


# ---------------------------------------------------------------------- after training


def fit_twice(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[Any, float]:
    """What each rank computes by itself after training, and the loss after training on with another Trainer."""
    module, loader = Own(), DataLoader(RandomTokens(), batch_size=12)
    make_trainer(rank, world_size, strategy, max_steps=3).fit(module, loader)
    with torch.no_grad():
        logits = module.eval()(torch.arange(16)[None])
    again = make_trainer(rank, world_size, strategy, max_steps=6)
    again.fit(module.train(), loader)
    return logits.numpy(), float(again.callback_metrics["train/loss"])


def test_a_module_is_whole_after_training_and_trains_again() -> None:
    ranks = run_ranks(4, partial(fit_twice, strategy={"mesh": {"pp": 2}, "micro_batches": 2}))
    ((expected, loss),) = run_ranks(1, partial(fit_twice, strategy={}))
    for logits, found in ranks:
        np.testing.assert_array_equal(logits, ranks[0][0])
        np.testing.assert_allclose(logits, expected, atol=0.05)  # auxiliary losses are of micro-batches
        assert found == pytest.approx(loss, abs=0.01)


# ---------------------------------------------------------------------- refusals


class Tied(Own):
    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.embed.weight


class Outside(Own):
    """Uses a parameter of the first stage after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift.sum()


class Late(Own):
    """Declares what comes before the blocks behind them."""

    def __init__(self) -> None:
        super().__init__()
        embed = self.embed
        del self.embed
        self.embed = embed


class Twice(Own):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in [*self.body, *self.body]:
            h = block(h)
        logits: Tensor = self.out(h)
        return logits


class Manual(Own):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoBlocks(Own):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.body)  # type: ignore[assignment]


def lossless(rank: int, world_size: int) -> str:
    saver = PartialExpertsCheckpoint("steps", lossless=True, k_snapshot=1)
    with pytest.raises(ConfigurationError) as caught:
        train_tiny(rank, world_size, model=FOUR, strategy=MESHES["stages"][1], steps=1, callbacks=[saver],
                   trainer={"enable_checkpointing": True})  # fmt: skip
    return str(caught.value)


def test_windows_of_one_stage_are_refused() -> None:
    assert set(run_ranks(2, lossless)) == {"lossless=True cannot work with mesh.pp yet: drop it, or use mesh.pp=1"}


def refusal(rank: int, world_size: int, module: Any) -> str:
    strategy = {"mesh": {"pp": 2}, "micro_batches": 2, "timeout_s": 8}
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:
        train(rank, world_size, own_module=module, strategy=strategy, trainer={"gradient_clip_val": None})
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Tied, "untie them"),
        slow(Outside, "shift is used after the blocks"),
        slow(Late, "is used before the blocks"),
        slow(Twice, "each once in a step"),
        (Manual, "manual optimization"),
        (NoBlocks, "no ModuleList of blocks"),
    ],
)
def test_what_cannot_be_cut_is_refused(module: Any, words: str) -> None:
    found = run_ranks(2, partial(refusal, module=module))
    assert any(words in text for text in found), found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": {"pp": 2}, "schedule": "zero_bubble"}, "must be '1f1b' or 'interleaved'"),
        ({"mesh": {"pp": 4}, "micro_batches": 3}, "use at least 4"),
        ({"mesh": {"pp": 4}, "micro_batches": 6, "schedule": "interleaved"}, "use 4 or 8"),
        ({"micro_batches": 3}, "mesh.pp is 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ExpertParallelStrategy(**options)
