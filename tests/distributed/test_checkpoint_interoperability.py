"""Full checkpoints between worlds, stock Lightning and damaged files."""

from __future__ import annotations

import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from moe_lightning import CheckpointError, GPTModule, StepLoader, StepSampler
from moe_lightning.errors import MissingCheckpointError, UnreadableCheckpointError
from tests.distributed.harness import run_pooled
from tests.distributed.test_strategy import assert_close, full_state, tiny_gpt
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer, quiet, quiet_trainer
from tests.parameters import slow


def step_loader() -> StepLoader:
    return StepLoader(RandomTokens(48), StepSampler(num_samples=48, global_batch_size=12, seed=3))


class Factored(torch.optim.Optimizer):
    """Keeps means over rows and over columns of squared gradients in place of all of them, of each expert by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            square, state = parameter.grad.square(), self.state[parameter]
            if parameter.ndim < 2:
                state["whole"] = state.get("whole", 0.0) + square
                scale = state["whole"]
            else:
                state["rows"] = state.get("rows", 0.0) + square.mean(-1)
                state["columns"] = state.get("columns", 0.0) + square.mean(-2)
                scale = (state["rows"].unsqueeze(-1) * state["columns"].unsqueeze(-2)).sqrt()
            parameter.sub_(self.defaults["lr"] * parameter.grad / (scale.sqrt() + 1e-6))
        return loss


class WithFactors(OwnModule):
    """Its optimizer's state has other shapes than its parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Factored(self.parameters(), {"lr": 1e-2})


MODULES: dict[str, Any] = {"gpt": tiny_gpt, "own": OwnModule, "factored": WithFactors}


def fit(
    rank: int,
    world_size: int,
    strategy: dict[str, Any] | None,
    *,
    kind: str = "gpt",
    steps: int = 3,
    ckpt_path: str | None = None,
    save_to: str | None = None,
) -> dict[str, Any]:
    """With a strategy's options under it, without them under stock Lightning on one device."""
    recorder = Losses()
    options: dict[str, Any] = {"max_steps": steps, "callbacks": [recorder]}
    if strategy is not None:
        trainer = make_trainer(rank, world_size, strategy, **options)
    else:
        quiet()
        pl.seed_everything(7, verbose=False)
        trainer = quiet_trainer(**options)
    trainer.fit(MODULES[kind](), step_loader(), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {"losses": recorder.losses, "state": full_state(trainer)}


class Losses(Recorder):
    """Losses alone: stock Lightning's strategies know no global norm."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def run(world_size: int, strategy: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    results = run_pooled(world_size, _call, strategy, options)
    for result in results[1:]:
        np.testing.assert_allclose(result["losses"], results[0]["losses"], rtol=0, atol=1e-6)
    first: dict[str, Any] = results[0]
    return first


def _call(rank: int, world_size: int, strategy: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world_size, strategy, **options)


@cache
def reference(kind: str) -> dict[str, Any]:
    return run(1, None, kind=kind, steps=6)


@pytest.mark.parametrize(
    ("writers", "strategy"),
    [slow(1, {}), slow(4, {"dense": "zero1"}), slow(2, {"replicas": 2}), (2, {"placement": [[1, 0]] + [[0, 1]] * 5})],
)
def test_stock_lightning_resumes_what_ranks_wrote(writers: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "ranks.ckpt")
    run(writers, strategy, save_to=path)
    result = run(1, None, steps=6, ckpt_path=path)
    np.testing.assert_allclose(result["losses"], reference("gpt")["losses"][3:], rtol=0, atol=1e-5)
    assert_close(result["state"], reference("gpt")["state"])


def test_ranks_resume_what_stock_lightning_wrote(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    run(1, None, save_to=path)
    for world_size, strategy in ((4, {"dense": "zero1"}), (2, {"replicas": 2}), (1, {})):
        result = run(world_size, strategy, steps=6, ckpt_path=path)
        np.testing.assert_allclose(result["losses"], reference("gpt")["losses"][3:], rtol=0, atol=1e-5)
        assert_close(result["state"], reference("gpt")["state"])


def test_factored_optimizer_states_follow_their_experts(tmp_path: Path) -> None:
    path = str(tmp_path / "factored.ckpt")
    run(2, {}, kind="factored", save_to=path)
    alone = str(tmp_path / "alone.ckpt")
    run(1, {}, kind="factored", save_to=alone)
    two, one = (torch.load(p, weights_only=True)["optimizer_states"][0]["state"] for p in (path, alone))
    assert set(two) == set(one)
    for index, entry in one.items():
        for name, value in entry.items():
            assert two[index][name].shape == value.shape, f"{index}/{name}"
    resumed = run(2, {"replicas": 2}, kind="factored", steps=5, ckpt_path=path)
    assert len(resumed["losses"]) == 2


def load_plainly(rank: int, world_size: int, path: str, kind: str) -> dict[str, np.ndarray]:
    """In the way of a user who wants the trained module."""
    module: pl.LightningModule
    module = (GPTModule if kind == "gpt" else OwnModule).load_from_checkpoint(
        path, map_location="cpu", weights_only=True
    )
    module.eval()
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("kind", ["gpt", "own"])
def test_load_from_checkpoint(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "module.ckpt")
    written = run(2, {"replicas": 2}, kind=kind, save_to=path)
    (loaded,) = run_pooled(1, load_plainly, path, kind)
    assert_close(loaded, written["state"], atol=0)


def test_a_checkpoint_holds_plain_values_only(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    run(2, {}, save_to=str(path))
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 3
    experts = checkpoint["state_dict"]["model.blocks.0.feed_forward.experts.w_up"]
    assert experts.shape[0] == 6, "the stack of all experts"
    assert experts.untyped_storage().nbytes() == experts.nbytes, "no other tensor's memory is saved with it"


# ---------------------------------------------------------------------- files that cannot be used


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran while a checkpoint was read",))


def damaged(folder: Path, good: Path) -> dict[str, Path]:
    """Bad files by what must be said about them."""
    content = good.read_bytes()
    checkpoint = torch.load(good, weights_only=True)
    paths: dict[str, Path] = {"does not exist: give the path of a .ckpt file": folder / "missing.ckpt"}

    def add(message: str, name: str, value: Any) -> None:
        paths[message] = folder / name
        if isinstance(value, bytes):
            paths[message].write_bytes(value)
        else:
            torch.save(value, paths[message])

    add("cut.ckpt is damaged or no checkpoint", "cut.ckpt", content[: len(content) // 2])
    add("empty.ckpt is damaged or no checkpoint", "empty.ckpt", b"")
    add("text.ckpt", "text.ckpt", b"hello, this is not a checkpoint at all")
    add("code.ckpt holds more than tensors and plain values", "code.ckpt", {"state_dict": {}, "x": Payload()})
    add("list.ckpt has no 'state_dict'", "list.ckpt", [1, 2, 3])
    add("weights.ckpt holds the weights of a model", "weights.ckpt", checkpoint["state_dict"])
    add("foreign.ckpt has no 'pytorch-lightning_version'", "foreign.ckpt", {"state_dict": checkpoint["state_dict"]})
    state = dict(checkpoint["state_dict"])
    lost = state.pop("model.norm.weight")
    add("lacks 'model.norm.weight' (1 missing, 0 unknown tensors)", "less.ckpt", checkpoint | {"state_dict": state})
    more = checkpoint["state_dict"] | {"model.extra": lost}
    add("has 'model.extra', which the model lacks", "more.ckpt", checkpoint | {"state_dict": more})
    name = "model.blocks.1.feed_forward.experts.w_up"
    fewer = checkpoint["state_dict"] | {name: checkpoint["state_dict"][name][:3]}
    add(f"{name!r} has shape [3, 32, 48], the model's [6, 32, 48]", "fewer.ckpt", checkpoint | {"state_dict": fewer})
    optimizers = checkpoint["optimizer_states"]
    add("holds 2 optimizers, the module has 1", "two.ckpt", checkpoint | {"optimizer_states": optimizers * 2})
    groups = [{**optimizers[0], "param_groups": optimizers[0]["param_groups"][:1]}]
    add("optimizer has parameter groups of", "groups.ckpt", checkpoint | {"optimizer_states": groups})
    with zipfile.ZipFile(folder / "other.ckpt", "w") as archive:
        archive.writestr("notes.txt", "a zip file of another kind")
    paths["other.ckpt is damaged or no checkpoint"] = folder / "other.ckpt"
    return paths


def resume_from(rank: int, world_size: int, paths: list[str]) -> list[tuple[str, str]]:
    outcomes = []
    for path in paths:
        trainer = make_trainer(rank, world_size, {}, max_steps=4)
        try:
            trainer.fit(tiny_gpt(), step_loader(), ckpt_path=path)
            outcomes.append(("trained", ""))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes


def test_unusable_checkpoints_are_one_error_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.ckpt"
    run(1, {}, save_to=str(good))
    paths = damaged(tmp_path, good)
    for outcomes in run_pooled(2, resume_from, [str(path) for path in paths.values()]):
        for expected, (kind, message) in zip(paths, outcomes, strict=True):
            known = [error.__name__ for error in (CheckpointError, MissingCheckpointError, UnreadableCheckpointError)]
            assert kind in known, f"{expected}: {kind}: {message}"
            assert expected in message
            assert "\n" not in message
    assert "code ran" not in capfd.readouterr().out
