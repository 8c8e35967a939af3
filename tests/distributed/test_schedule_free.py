"""A schedule-free optimizer: trained at one place, evaluated, saved in files and exported at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig, PartialExpertsCheckpoint
from moe_lightning.checkpoint.files import read_file
from moe_lightning.errors import CheckpointError, ConfigurationError
from tests.distributed.harness import run_ranks
from tests.distributed.test_optimizer_runs import STEPS, Move
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer

HALF = STEPS // 2


def fit(
    rank: int,
    world_size: int,
    strategy: dict[str, Any],
    *,
    folder: str = "",
    load: str | None = None,
    validates: bool = True,
    directory: bool = False,
    accumulate: int = 1,
    model: dict[str, Any] | None = None,
    moves: bool = True,
) -> dict[str, Any]:
    """Train with a validation in the middle and at the end; in a folder, save at the middle and the end."""
    recorder, saving = Move() if moves else Recorder(), list[pl.Callback]()
    if folder and directory:
        saving = [PartialExpertsCheckpoint(folder, every_n_steps=1, k_persist=2)]
    elif folder:
        saving = [ModelCheckpoint(folder, every_n_train_steps=HALF, filename="{step}", save_top_k=-1)]
    trainer = make_trainer(
        rank,
        world_size,
        strategy,
        max_steps=STEPS,
        callbacks=[recorder, *saving],
        enable_checkpointing=bool(saving),
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
        val_check_interval=3,
        check_val_every_n_epoch=None,
    )
    module = GPTModule(
        TINY | (model or {}), OptimizerConfig(name="schedule_free", lr=1e-2, warmup_steps=2, decay="constant")
    )
    training = DataLoader(RandomTokens(96), batch_size=12, shuffle=True)
    held_out = DataLoader(RandomTokens(30), batch_size=10)
    trainer.fit(module, training, held_out if validates else None, ckpt_path=load)
    ended = float(trainer.validate(module, held_out, verbose=False)[0]["val/loss"])
    return {"losses": recorder.losses, "validations": recorder.validations, "ended": ended}


def evaluate(rank: int, world_size: int, path: str) -> float:
    trainer = make_trainer(rank, world_size, {})
    module = GPTModule(TINY)
    held_out = DataLoader(RandomTokens(30), batch_size=10)
    return float(trainer.validate(module, held_out, ckpt_path=path, verbose=False)[0]["val/loss"])


def run(ranks: int, strategy: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(ranks, _fit, strategy or {}, options)[0]
    return result


def _fit(rank: int, world_size: int, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world_size, strategy, **options)


def _by_lightning(rank: int, world_size: int, path: str) -> float:
    """Evaluate a file as stock Lightning does."""
    module = GPTModule.load_from_checkpoint(path)
    module.configure_model()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (metrics,) = trainer.validate(module, DataLoader(RandomTokens(30), batch_size=10), verbose=False)
    return float(metrics["val/loss"])


def test_losses_do_not_depend_on_ranks_places_validations_or_resumes(tmp_path: Path) -> None:
    strategy = {"copies": 2, "dense": "zero1"}
    bare, whole = run(1, validates=False), run(2, strategy, folder=str(tmp_path))
    assert whole["validations"][-1] < whole["validations"][0] - 0.3
    assert whole["losses"] == pytest.approx(bare["losses"], abs=1e-5)
    assert whole["ended"] == pytest.approx(bare["ended"], abs=1e-5)
    resumed = run(2, strategy, load=str(tmp_path / f"step={HALF}.ckpt"))
    assert (resumed["losses"], resumed["ended"]) == (whole["losses"][HALF:], whole["ended"])
    (by_lightning,) = run_ranks(1, _by_lightning, str(tmp_path / f"step={STEPS}.ckpt"))
    assert by_lightning == pytest.approx(whole["ended"], abs=1e-5), "a file holds the average"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, {"dense": "fsdp"}),
        (4, {"dense": "hsdp", "shard_size": 2}),
        (3, {"dense": "zero1"}),
        (2, {"mesh": {"tp": 2}}),
        (4, {"mesh": {"tp": 2}, "dense": "zero1"}),
    ],
)
def test_meshes_and_shards(ranks: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    alone, whole = run(1), run(ranks, strategy, folder=str(tmp_path))
    for name, values in alone.items():
        assert whole[name] == pytest.approx(values, abs=1e-5)
    assert run(ranks, strategy, validates=False)["losses"] == whole["losses"]
    middle = str(tmp_path / f"step={HALF}.ckpt")
    resumed = run(ranks, strategy, load=middle)["losses"]
    assert resumed == pytest.approx(
        whole["losses"][HALF:], abs=1e-5 if ranks > 2 else 0
    )  # in which order three are summed
    assert run(1, load=middle)["losses"] == pytest.approx(alone["losses"][HALF:], abs=1e-5)


@pytest.mark.slow
def test_stages_of_a_pipeline() -> None:
    model = {"tie_embeddings": False, "router": {"aux_loss_coef": 0.0}}  # which is one of each micro-batch
    alone, two = run(1, model=model), run(2, {"mesh": {"pp": 2}}, model=model, moves=False)
    for name, values in alone.items():
        assert two[name] == pytest.approx(values, abs=1e-5)


@pytest.mark.slow
def test_directories_are_saved_beside_validations_and_evaluated(tmp_path: Path) -> None:
    strategy = {"copies": 2, "dense": "zero1"}
    calm, saved = run(2, strategy), run(2, strategy, folder=str(tmp_path), directory=True)
    assert saved == calm
    for ranks in (1, 2):
        assert run_ranks(ranks, evaluate, str(tmp_path))[0] == pytest.approx(calm["ended"], abs=1e-6)


@pytest.mark.slow
def test_a_validation_between_micro_batches_leaves_gradients() -> None:
    beside, bare = (run(2, {"dense": "zero1"}, accumulate=2, validates=validates) for validates in (True, False))
    assert beside["losses"] == bare["losses"]


def test_other_strategies_are_refused() -> None:
    module = GPTModule(TINY, {"name": "schedule_free", "decay": "constant"})
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy does not put in place"):
        trainer.fit(module, DataLoader(RandomTokens(24), batch_size=12))


def saved_after(fit: pl.Trainer, path: Path) -> dict[str, Any]:
    fit.save_checkpoint(path)
    return read_file(path)


def test_files_saved_after_training_are_alike_and_resume_to_the_bit(tmp_path: Path) -> None:
    def trained(steps: int, path: Path | None = None) -> tuple[pl.Trainer, dict[str, Tensor]]:
        module = GPTModule(TINY, {"name": "schedule_free", "lr": 1e-2, "warmup_steps": 2, "decay": "constant"})
        trainer = make_trainer(0, 1, {}, max_steps=steps)
        trainer.fit(module, DataLoader(RandomTokens(24), batch_size=12), ckpt_path=path)
        return trainer, module.state_dict()

    trainer, ended = trained(2)
    for name in ("first", "second"):
        saved = saved_after(trainer, tmp_path / f"{name}.ckpt")["state_dict"]
        assert all(torch.equal(value, saved[key]) for key, value in ended.items()), name
    whole, resumed = trained(4)[1], trained(4, tmp_path / "second.ckpt")[1]
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())


@pytest.mark.parametrize(("saved", "own"), [("adamw", "schedule_free"), ("schedule_free", "adamw")])
def test_states_of_another_kind_of_optimizer_are_refused(saved: str, own: str, tmp_path: Path) -> None:
    def train(name: str, steps: int, path: Path | None, **saving: Any) -> pl.Trainer:
        module = GPTModule(TINY, {"name": name, "decay": "constant"})
        trainer = make_trainer(0, 1, {}, max_steps=steps, **saving)
        trainer.fit(module, DataLoader(RandomTokens(24), batch_size=12), ckpt_path=path)
        return trainer

    partial = PartialExpertsCheckpoint(str(tmp_path / "directory"), every_n_steps=1, k_persist=2)
    trainer = train(saved, 1, None, callbacks=[partial], enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    for path in (tmp_path / "file.ckpt", tmp_path / "directory"):
        with pytest.raises(CheckpointError, match=r"schedule-free.*: use the optimizer that it was written with"):
            train(own, 2, path)


class Fails(pl.Callback):
    def on_validation_batch_start(self, *_: Any) -> None:
        raise RuntimeError("in the middle")


def test_a_fit_that_failed_while_it_evaluated_leaves_nothing_to_the_next() -> None:
    module = GPTModule(TINY, {"name": "schedule_free", "lr": 1e-2, "warmup_steps": 2, "decay": "constant"})
    trainer = make_trainer(0, 1, {}, max_steps=4, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(module, DataLoader(RandomTokens(24), batch_size=12), DataLoader(RandomTokens(12), batch_size=12))
    begun = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.strategy.setup_optimizers(trainer)  # of another fit, whose first validation ends
    trainer.strategy.on_validation_end()
    assert all(torch.equal(value, begun[name]) for name, value in module.state_dict().items())
