"""The strategy under everything a Trainer does besides plain fitting: evaluation, manual optimization, callbacks."""

from __future__ import annotations

import gc
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy, GPTModule, OptimizerConfig, auxiliary_loss
from moe_lightning.callbacks.load_balancer import LoadBalancer
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.training import (
    TINY,
    OwnModule,
    RandomTokens,
    Recorder,
    make_trainer,
    quiet,
    quiet_trainer,
    replicas_of,
)
from tests.parameters import slow

# Rank 0 holds everything, the others a part: the worlds where ranks tend to disagree on what to do.
LOPSIDED = [[1, 1], [1, 0], [2, 1], [1, 0], [1, 0], [1, 1]]
# Rank 0 holds nothing.
HOLLOW = [[0, 1, 1]] * 3 + [[0, 1, 0]] * 3


def tiny_gpt(**options: Any) -> GPTModule:
    return GPTModule(TINY | options, OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"))


def train_loader(batch_size: int = 12, size: int = 96) -> DataLoader[Any]:
    return DataLoader(RandomTokens(size), batch_size=batch_size, shuffle=True)


def assert_close(states: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float = 5e-5) -> None:
    assert set(states) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(states[name], values, rtol=0, atol=atol, err_msg=name)


def full_state(trainer: pl.Trainer) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in trainer.strategy.lightning_module_state_dict().items()}


# ---------------------------------------------------------------------- evaluation


class Witness(GPTModule):
    """Remembers which samples each evaluation showed to this rank, by their inputs."""

    def __init__(self) -> None:
        super().__init__(TINY, {"decay": "constant"})
        self.seen: list[tuple[int, bytes]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen += [(dataloader_idx, row.numpy().tobytes()) for row in batch[0]]
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += [(0, row.numpy().tobytes()) for row in batch[0]]
        super().test_step(batch, batch_idx)


def evaluate(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    trainer, module = make_trainer(rank, world_size, strategy), Witness()
    loaders = [DataLoader(RandomTokens(size), batch_size=10) for size in (14, 10)]
    validation = [
        {name: float(value) for name, value in result.items()}
        for result in trainer.validate(module, loaders, verbose=False)
    ]
    validated, module.seen = module.seen, []
    test = trainer.test(module, DataLoader(RandomTokens(12), batch_size=8, shuffle=True), verbose=False)
    predictions = trainer.predict(module, DataLoader(RandomTokens(8), batch_size=7))
    assert predictions is not None
    return {
        "validation": validation,
        "validated": validated,
        "test": {name: float(value) for name, value in test[0].items()},
        "tested": module.seen,
        "predictions": [p.numpy() for p in predictions],
    }


@pytest.mark.parametrize(
    ("world_size", "strategy"), [slow(2, {}), (4, {"replicas": 2}), slow(2, {"placement": LOPSIDED})]
)
def test_evaluation_sees_every_sample_once(world_size: int, strategy: dict[str, Any]) -> None:
    alone: dict[str, Any] = run_pooled(1, evaluate, {})[0]
    ranks: list[dict[str, Any]] = run_pooled(world_size, evaluate, strategy)
    for kind in ("validated", "tested"):
        assert sorted(sample for result in ranks for sample in result[kind]) == sorted(alone[kind])
    for result in ranks:
        for found, expected in zip(
            [*result["validation"], result["test"]], [*alone["validation"], alone["test"]], strict=True
        ):
            assert found == pytest.approx(expected, abs=1e-5)
    for batch, expected in enumerate(alone["predictions"]):
        parts = [result["predictions"][batch] for result in ranks]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


# ---------------------------------------------------------------------- several calls in one process


def fit_validate_fit(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, strategy, callbacks=[recorder], max_steps=3, gradient_clip_val=1.0)
    module, held_out = tiny_gpt(), DataLoader(RandomTokens(15), batch_size=10)
    trainer.fit(module, train_loader())
    first = trainer.validate(module, held_out, verbose=False)[0]["val/loss"]
    again = trainer.validate(module, held_out, verbose=False)[0]["val/loss"]
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, train_loader())
    return {
        "losses": recorder.losses,
        "validations": [float(first), float(again)],
        "state": full_state(trainer),
        "replicas": replicas_of(module),
    }


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [slow(2, {"placement": LOPSIDED}), slow(2, {"replicas": 2, "dense": "zero1"}), (3, {"placement": HOLLOW})],
)
def test_fit_then_validate_then_fit(world_size: int, strategy: dict[str, Any]) -> None:
    alone = run_pooled(1, fit_validate_fit, {})[0]
    for result in run_pooled(world_size, fit_validate_fit, strategy):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["validations"], alone["validations"], rtol=0, atol=1e-5)
        assert len(result["losses"]) == 5
        if result["state"]:
            assert_close(result["state"], alone["state"])


# ---------------------------------------------------------------------- manual optimization


class ManualModule(OwnModule):
    """Two optimizers, two backward passes into the same gradients, clipping by hand, then a second optimizer's turn."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.algorithm = algorithm

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, attr-defined]
        first.zero_grad()
        self.manual_backward(self.loss(batch, 1.0))
        self.manual_backward(self.loss(batch, 0.5))
        self.clip_gradients(first, gradient_clip_val=0.02, gradient_clip_algorithm=self.algorithm)
        first.step()
        second.zero_grad()
        self.manual_backward(self.loss(batch, 2.0))
        second.step()

    def loss(self, batch: tuple[Tensor, Tensor], factor: float) -> Tensor:
        x, y = batch
        h = self.embed(x)
        loss = functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1) * factor, y.flatten())
        self.log("train/loss", loss, sync_dist=True, batch_size=len(x))
        return loss + auxiliary_loss(self)

    def configure_optimizers(self) -> Any:
        experts = list(self.moe.parameters())
        dense = [*self.embed.parameters(), *self.out.parameters()]
        return [torch.optim.SGD(dense + experts, lr=0.3), torch.optim.AdamW(experts + dense, lr=1e-3)]


def fit_manually(rank: int, world_size: int, strategy: dict[str, Any], algorithm: str) -> dict[str, Any]:
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, strategy, callbacks=[recorder], max_steps=6)
    module = ManualModule(algorithm)
    trainer.fit(module, train_loader(batch_size=13))
    return {"losses": recorder.losses, "state": full_state(trainer)}


@cache
def manual_reference(algorithm: str) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, fit_manually, {}, algorithm)[0]
    return result


@pytest.mark.parametrize(
    ("world_size", "strategy", "algorithm"),
    [
        slow(2, {}, "norm"),
        slow(3, {"replicas": 3}, "norm"),
        slow(2, {"replicas": 2}, "value"),
        (2, {"replicas": 2, "dense": "zero1"}, "norm"),
        slow(2, {"replicas": 2, "gradient_as_bucket_view": True}, "norm"),
    ],
)
def test_manual_optimization(world_size: int, strategy: dict[str, Any], algorithm: str) -> None:
    alone, ranks = manual_reference(algorithm), run_pooled(world_size, fit_manually, strategy, algorithm)
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=0, atol=1e-5)
    assert_close(ranks[0]["state"], alone["state"])


# ---------------------------------------------------------------------- what users change in a module


class PartlyFrozen(OwnModule):
    """Frozen experts stay as they are, whatever the weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.moe.experts.w_up.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.5)


class Configured(OwnModule):
    """Built in configure_model: its experts are allocated by slots."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "moe"):
            with torch.random.fork_rng():
                torch.manual_seed(11)
                built = OwnModule()
            self.embed, self.moe, self.out = built.embed, built.moe, built.out


MODULES = {"frozen": PartlyFrozen, "configured": Configured, "own": OwnModule}


def fit_module(
    rank: int, world_size: int, strategy: dict[str, Any], kind: str, options: dict[str, Any]
) -> dict[str, Any]:
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, strategy, callbacks=[recorder], **{"max_steps": 4} | options)
    trainer.fit(MODULES[kind](), train_loader())
    return {"losses": recorder.losses, "state": full_state(trainer)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        slow("frozen", {}),
        slow("configured", {}),
        ("own", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        slow("own", {"precision": "64-true"}),
    ],
)
def test_modules_of_users(kind: str, options: dict[str, Any]) -> None:
    alone = run_pooled(1, fit_module, {}, kind, options)[0]
    result = run_pooled(2, fit_module, {"replicas": 2}, kind, options)[0]
    np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=1e-5)
    assert_close(result["state"], alone["state"])
    uniform = run_pooled(2, fit_module, {}, kind, options)[0]
    assert_close(uniform["state"], alone["state"])


# ---------------------------------------------------------------------- several training loaders


class TwoSources(OwnModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], batch_idx) + 0.5 * super().training_step(batch["b"], batch_idx)


def fit_two_loaders(
    rank: int, world_size: int, sizes: tuple[int, int], drop_last: bool = True
) -> dict[str, np.ndarray] | str:
    trainer = make_trainer(rank, world_size, {}, max_steps=3)
    data = {"a": (RandomTokens(96), sizes[0]), "b": (RandomTokens(60), sizes[1])}
    loaders = {name: DataLoader(d, batch_size=b, shuffle=True, drop_last=drop_last) for name, (d, b) in data.items()}
    try:
        trainer.fit(TwoSources(), loaders)
    except ValueError as error:
        return str(error)
    return full_state(trainer)


@pytest.mark.parametrize("sizes", [slow((7, 7)), (8, 4)])
def test_joined_loaders_are_weighed_right(sizes: tuple[int, int]) -> None:
    alone = run_pooled(1, fit_two_loaders, sizes)[0]
    assert_close(run_pooled(2, fit_two_loaders, sizes)[0], alone)


def test_joined_loaders_that_no_weight_fits_are_refused() -> None:
    for message in run_pooled(2, fit_two_loaders, (8, 5)):
        assert re.search(r"joined loaders of .*\(5, \d+\), \(8, \d+\)\] cannot be cut into 2 parts alike", message)
        assert "use one batch size" in message
    for message in run_pooled(2, fit_two_loaders, (7, 7), False):
        assert re.search(r"joined loaders of .* \[\(7, 60\), \(7, 96\)\] cannot be cut into 2 parts alike", message)
        assert "drop_last=True" in message
    assert not isinstance(run_pooled(1, fit_two_loaders, (7, 7), False)[0], str)


def validate_two_loaders(rank: int, world_size: int, sizes: tuple[int, int]) -> float | str:
    class Joined(TwoSources):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.log("val/joined", self.training_step(batch, batch_idx), sync_dist=True, batch_size=len(batch["a"][0]))

    trainer = make_trainer(rank, world_size, {}, max_steps=1)
    loaders = {name: DataLoader(RandomTokens(3 * b), batch_size=b) for name, b in zip("ab", sizes, strict=True)}
    try:
        scores = trainer.validate(Joined(), CombinedLoader(loaders, "min_size"), verbose=False)
    except ValueError as error:
        return str(error)
    return scores[0]["val/joined"]


def test_validation_of_joined_loaders_is_the_same_or_refused() -> None:
    assert run_pooled(4, validate_two_loaders, (8, 4))[0] == pytest.approx(validate_two_loaders(0, 1, (8, 4)), abs=1e-5)
    for message in run_pooled(4, validate_two_loaders, (8, 6)):
        assert re.search(r"joined loaders of .* \[\(6, 18\), \(8, 24\)\] cannot be cut into 4 parts alike", message)


# ---------------------------------------------------------------------- Lightning's own callbacks


def fit_with_callbacks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    best = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2, filename="{step}", save_last=True)
    stop = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    trainer = make_trainer(
        rank,
        world_size,
        {"replicas": 2} if world_size > 1 else {},
        callbacks=[best, stop, LearningRateMonitor("step")],
        max_epochs=6,
        enable_checkpointing=True,
        logger=CSVLogger(folder),
    )
    trainer.fit(tiny_gpt(), train_loader(), DataLoader(RandomTokens(30), batch_size=10))
    tested = trainer.test(ckpt_path="best", dataloaders=DataLoader(RandomTokens(10), batch_size=5), verbose=False)
    return {
        "epochs": trainer.current_epoch,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),  # type: ignore[arg-type]
        "tested": float(tested[0]["test/loss"]),
    }


@pytest.mark.slow
def test_checkpoints_early_stopping_and_monitors(tmp_path: Path) -> None:
    (alone,) = run_pooled(1, fit_with_callbacks, str(tmp_path / "one"))
    ranks = run_pooled(2, fit_with_callbacks, str(tmp_path / "two"))
    for result in ranks:
        assert result["epochs"] == alone["epochs"] == 2
        assert result["best"] == alone["best"]
        assert result["score"] == pytest.approx(alone["score"], abs=1e-5)
        assert result["tested"] == pytest.approx(alone["tested"], abs=1e-5)
    assert sorted(p.name for p in (tmp_path / "two").glob("*.ckpt")) == sorted(
        p.name for p in (tmp_path / "one").glob("*.ckpt")
    )
    (metrics,) = (tmp_path / "two").rglob("metrics.csv")
    assert "lr-AdamW" in metrics.read_text()


# ---------------------------------------------------------------------- nodes


def nodes_of_ranks(rank: int, world_size: int) -> tuple[int, ...]:
    """As a task of `srun --nodes=2 --ntasks-per-node=2 --distribution=cyclic`."""
    local, node = divmod(rank, 2)
    variables = {"NTASKS": world_size, "NTASKS_PER_NODE": 2, "PROCID": rank, "LOCALID": local, "NODEID": node}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in variables.items()})
    quiet()
    plugins = [SLURMEnvironment(auto_requeue=False)]
    trainer = quiet_trainer(strategy=ExpertParallelStrategy(), devices=2, num_nodes=2, plugins=plugins)
    trainer.strategy.setup_environment()
    return trainer.strategy.world.nodes  # type: ignore[no-any-return, attr-defined]


def test_nodes_are_those_to_which_a_scheduler_assigned_the_ranks() -> None:
    assert run_ranks(4, nodes_of_ranks) == [(0, 1, 0, 1)] * 4


# ---------------------------------------------------------------------- after it


def train_again_and_again(rank: int, world_size: int, strategy: dict[str, Any], callback: type[pl.Callback]) -> None:
    """In worlds of this process, each of which is to end with its training."""
    counts = []
    for number in range(3):
        if number:
            store = dist.FileStore(f"store-{number}", world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        trainer = make_trainer(rank, world_size, strategy, callbacks=[callback()], max_steps=2)
        trainer.fit(OwnModule(), train_loader())
        dist.barrier()
        dist.destroy_process_group()
        del trainer
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts[1] == counts[2], "threads of process groups that somebody holds"


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("strategy", "callback"),
    [
        ({"dense": "fsdp"}, LoadBalancer),
        slow({}, pl.Callback),
        slow({"dense": "zero1"}, LoadBalancer),
    ],
)
def test_a_training_leaves_no_process_groups(strategy: dict[str, Any], callback: type[pl.Callback]) -> None:
    run_ranks(2, train_again_and_again, strategy, callback)
