"""A run that rolls back trains on as one that has never made the updates which are left out."""

from __future__ import annotations

import csv
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.spike_guard import SpikeGuard, StateCopy, _Spike
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.errors import ConfigurationError, LossSpikeError, StateDamagedError
from moe_lightning.strategies.watch import limit_of
from moe_lightning.strategies.worlds import ExpertParallelCallback
from tests.agents import ForkedAgent
from tests.chaos.elastic_worker import state_digests
from tests.distributed.harness import run_pooled
from tests.distributed.training import Numbered, OwnModule, RandomTokens, Warned, make_trainer
from tests.parameters import slow

BATCH, EVERY, SPIKE, STEPS = 4, 3, 16, 18
RESTORED = 12  # the older one of the copies of steps 12 and 15


class Spiky(OwnModule):
    """Its loss is another one for the samples of some steps."""

    def __init__(self, factors: dict[int, float]) -> None:
        super().__init__()
        self.factors, self.seen = factors, dict[int, list[int]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *tokens, indices = batch
        step = self.trainer.global_step
        self.seen[step] = indices.tolist()
        return super().training_step(tuple(tokens), batch_idx) * self.factors.get(step, 1.0)  # type: ignore[arg-type]


def fit(
    rank: int, world_size: int, factors: dict[int, float], strategy: dict[str, Any], options: dict[str, Any] | None
) -> dict[str, Any]:
    """Train with a SpikeGuard of these options; None: without one."""
    warned = Warned()
    logging.getLogger("moe_lightning").addHandler(warned)
    guard = [] if options is None else [SpikeGuard(every_n_steps=EVERY, path="spikes.csv", **options)]
    trainer = make_trainer(rank, world_size, strategy, callbacks=guard, max_steps=STEPS)
    module, error = Spiky(factors), ""
    try:
        trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    except LossSpikeError as failed:
        error = str(failed)
    chosen = trainer.strategy
    path = Path("spikes.csv")
    rows = list(csv.DictReader(path.read_text().splitlines())) if rank == 0 and path.exists() else []
    return {
        "digests": {} if error else state_digests(chosen),
        "lines": warned.lines,
        "rows": rows,
        "seen": module.seen,
        "error": error,
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize(
    ("strategy", "factor"),
    [
        ({"replicas": 2}, 50.0),
        slow({"dense": "zero1"}, math.nan),
        slow({"dense": "fsdp"}, math.inf),
        slow({"dense": "zero1", "offload_optimizer": True}, 50.0),
    ],
    ids=str,
)
def test_a_run_trains_on_as_if_it_had_never_seen_the_samples(strategy: dict[str, Any], factor: float) -> None:
    guarded = run_pooled(2, fit, {SPIKE - 1: factor}, strategy, {})
    left_out = dict.fromkeys(range(RESTORED, SPIKE), math.nan)
    reference = run_pooled(2, fit, left_out, strategy | {"stop_on_nan": "skip"}, None)
    assert [run["steps"] for run in guarded] == [STEPS] * 2
    assert [run["digests"] for run in guarded] == [run["digests"] for run in reference]
    (row,) = guarded[0]["rows"]
    assert (int(row["step"]), int(row["restored_step"])) == (SPIKE, RESTORED)
    both = [guarded[0]["seen"][step] + guarded[1]["seen"][step] for step in range(RESTORED, SPIKE)]
    assert row["samples"].split() == [str(index) for step in both for index in step]
    (line,) = (line for line in guarded[0]["lines"] if "is restored" in line)
    assert f"the loss of step {SPIKE} is " in line
    assert f"the state of step {RESTORED} is restored" in line
    assert f"without the {len(both) * BATCH} samples since: {both[0][0]}, " in line
    assert not any("is restored" in line for line in guarded[1]["lines"])


class Sampling(pl.Callback):
    """Calls the module with no gradients, in these hooks."""

    def __init__(self, *hooks: str) -> None:
        for name in hooks:
            setattr(self, name, self._sample)

    @torch.no_grad()
    def _sample(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        was_training = module.training
        module.eval()
        module(torch.arange(8).view(1, 8))
        module.train(was_training)


class Called(Spiky):
    def forward(self, ids: Tensor) -> Any:
        h = self.embed(ids)
        return self.out(h + self.moe(h))


def fit_sampling(rank: int, world_size: int, hooks: tuple[str, ...], factors: dict[int, float]) -> Any:
    callbacks = [Sampling(*hooks), SpikeGuard(every_n_steps=EVERY)]
    trainer = make_trainer(rank, world_size, {"dense": "fsdp"}, callbacks=callbacks, max_steps=SPIKE + 2)
    trainer.fit(Called(factors), DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    chosen = trainer.strategy
    return state_digests(chosen)


@pytest.mark.parametrize(
    ("hook", "factors"),
    [slow("on_train_batch_end", {SPIKE - 1: math.nan}), slow("on_before_optimizer_step", {})],
)
def test_calls_of_the_module_by_callbacks_change_nothing_under_fsdp(hook: str, factors: dict[int, float]) -> None:
    assert run_pooled(2, fit_sampling, (hook,), factors) == run_pooled(2, fit_sampling, (), factors)


def test_a_weight_that_has_another_shape_is_not_left_out_of_a_rollback() -> None:
    kept = StateCopy(step=3, position=None, tensors={"weight": torch.zeros(4, 2)}, states=[])
    with pytest.raises(ConfigurationError, match=r"^weight had the shape \(4, 2\) in step 3, .* has \(2, 2\) now"):
        kept.restore(torch.nn.Linear(2, 2))


class Unfreezing(Spiky):
    """Trains its embedding from a later step on than that of the copy, and has a slow copy of a weight and a count of
    losses, which it replaces.
    """

    seen_losses: Tensor

    def __init__(self, factors: dict[int, float]) -> None:
        super().__init__(factors)
        self.embed.requires_grad_(requires_grad=False)
        self.teacher = torch.nn.Parameter(self.out.weight.detach().clone(), requires_grad=False)
        self.register_buffer("seen_losses", torch.zeros(()))
        self.before: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.embed.requires_grad_(requires_grad=step > RESTORED)
        found = {"embed": self.embed.weight, "teacher": self.teacher, "seen_losses": self.seen_losses}
        self.before[step] = {name: tensor.detach().clone() for name, tensor in found.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen_losses = self.seen_losses + 1
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.teacher.data.lerp_(self.out.weight.data, 0.1)


def test_weights_that_were_frozen_and_buffers_that_are_replaced_are_restored() -> None:
    trainer = make_trainer(0, 1, {}, callbacks=[SpikeGuard(every_n_steps=EVERY)], max_steps=SPIKE + 2)
    module = Unfreezing({SPIKE - 1: math.nan})
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH))
    assert not torch.equal(module.before[SPIKE - 1]["embed"], module.before[RESTORED]["embed"])
    changed = {n for n, t in module.before[RESTORED].items() if not torch.equal(t, module.before[SPIKE][n])}
    assert changed == set()
    assert float(module.before[SPIKE + 1]["seen_losses"]) == RESTORED + 1


class DamagedCopy(pl.Callback):
    """Changes a copy of rank 1 before it is restored."""

    def __init__(self, guard: SpikeGuard) -> None:
        self.guard = guard

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (SPIKE - 1, 1):
            self.guard._copies[0].tensors["out.weight"][0, 0] += 1


def fit_with_damaged_copy(rank: int, world_size: int) -> str:
    guard = SpikeGuard(every_n_steps=EVERY)
    options = {"check_state_every": 1000}
    trainer = make_trainer(rank, world_size, options, callbacks=[guard, DamagedCopy(guard)], max_steps=STEPS)
    try:
        trainer.fit(Spiky({SPIKE - 1: math.nan}), DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    except StateDamagedError as error:
        return str(error)
    return ""


def test_a_damaged_copy_is_found_before_it_is_used() -> None:
    for told in run_pooled(2, fit_with_damaged_copy):
        assert told.startswith(f"after step {SPIKE} the replicas of out.weight differ between ranks [0] and ranks [1]")


@pytest.mark.slow
def test_a_calm_run_is_left_alone() -> None:
    guarded, plain = (run_pooled(2, fit, {}, {}, options) for options in ({}, None))
    assert [run["digests"] for run in guarded] == [run["digests"] for run in plain]
    assert guarded[0]["rows"] == []


class Remembered(Spiky):
    """Keeps the losses of each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses = getattr(self, "losses", {})
        self.losses.setdefault(self.trainer.global_step, []).append(float(loss.detach()))
        return loss


def test_the_loss_of_a_spike_is_the_mean_over_its_micro_batches(tmp_path: Path) -> None:
    guard = SpikeGuard(every_n_steps=EVERY, path=str(tmp_path / "spikes.csv"))
    trainer = make_trainer(0, 1, {}, callbacks=[guard], max_steps=SPIKE, accumulate_grad_batches=2)
    module = Remembered({SPIKE - 1: 50.0})
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    (row,) = csv.DictReader((tmp_path / "spikes.csv").read_text().splitlines())
    assert float(row["loss"]) == pytest.approx(sum(module.losses[SPIKE - 1]) / 2, rel=1e-5)


@pytest.mark.slow
def test_too_many_spikes_end_the_run() -> None:
    for run in run_pooled(2, fit, {SPIKE - 1: math.nan, SPIKE: math.nan}, {}, {"max_rollbacks": 1}):
        assert run["steps"] == SPIKE, "the next one has not updated anything"
        assert f"the loss of step {SPIKE + 1} is nan" in run["error"]
        assert "after 1 rollbacks" in run["error"]


def test_losses_are_remembered_in_checkpoints(tmp_path: Path) -> None:
    path, guards = str(tmp_path / "half.ckpt"), [SpikeGuard(), SpikeGuard()]
    for guard, steps in zip(guards, (12, 14), strict=True):
        trainer = make_trainer(0, 1, {}, callbacks=[guard], max_steps=steps)
        loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True)
        trainer.fit(Spiky({12: 50.0}), loader, ckpt_path=None if guard is guards[0] else path)
        trainer.save_checkpoint(path)
    assert [guard.rollbacks for guard in guards] == [0, 1], "the second one has seen no other loss of its own"


class Moving(ExpertParallelCallback):
    """Moves experts at the begin of the step that spikes."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step == SPIKE - 1:
            strategy.replace_experts([layer.dispatcher.placement for layer in strategy.experts.layers])


def test_where_experts_have_just_moved_the_update_alone_is_left_out(tmp_path: Path) -> None:
    guard = SpikeGuard(every_n_steps=EVERY, path=str(tmp_path / "spikes.csv"))
    trainer = make_trainer(0, 1, {}, callbacks=[guard, Moving()], max_steps=STEPS)
    module = Spiky({SPIKE - 1: math.nan})
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    (row,) = csv.DictReader((tmp_path / "spikes.csv").read_text().splitlines())
    assert (int(row["restored_step"]), len(row["samples"].split())) == (SPIKE - 1, BATCH)
    assert all(bool(p.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize("lossless", [False, slow(True)])
def test_a_checkpoint_after_a_rollback_holds_nothing_of_the_updates_before(
    lossless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.start_agent", ForkedAgent)
    options: dict[str, Any] = {"every_n_steps": 1, "k_snapshot": 1, "save_on_train_end": False, "timeout_s": 120.0}
    saver = PartialExpertsCheckpoint(str(tmp_path), lossless=lossless, **options)
    guard = SpikeGuard(every_n_steps=EVERY)
    trainer = make_trainer(0, 1, {}, callbacks=[saver, guard], max_steps=SPIKE, enable_checkpointing=True)
    trainer.fit(Spiky({SPIKE - 1: math.nan}), DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    saved = Checkpoint(Path(saver.last_model_path))
    assert saved.step == SPIKE
    assert set(saved.expert_versions().flat) == {SPIKE}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("rank", "step", "rows"), [(0, 7, 1), (1, 7, 0), (0, 6, 0)])
def test_a_rollback_is_reported_though_a_fault_has_dropped_the_hook(
    rank: int, step: int, rows: int, ends: bool, tmp_path: Path
) -> None:
    """Rank 0 reports it, unless the run has returned to a step before it."""
    guard, path = SpikeGuard(path=str(tmp_path / "spikes.csv")), tmp_path / "spikes.csv"
    guard._copies.append(None)  # type: ignore[arg-type]
    guard._spike = _Spike(step=7, loss=9.0, limit=1.0, restored=3, samples=[4, 5])
    trainer: Any = SimpleNamespace(global_step=step, is_global_zero=rank == 0, train_dataloader=None)
    unused: Any = None
    for _ in range(2):
        if ends:
            guard.on_train_end(trainer, unused)
        else:
            guard.on_train_batch_start(trainer, unused, unused, 0)
    found = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    assert [row["samples"] for row in found] == ["4 5"] * rows


@pytest.mark.slow
def test_a_first_step_that_is_no_number_is_left_out() -> None:
    first, second = run_pooled(2, fit, {0: math.nan}, {}, {})
    assert (first["steps"], second["steps"]) == (STEPS, STEPS)
    assert first["rows"][0]["restored_step"] == "0"
    assert first["rows"][0]["samples"].split() == [str(i) for i in first["seen"][0] + second["seen"][0]]


@pytest.mark.parametrize(
    ("losses", "limit"),
    [
        ([2.0] * 9, math.inf),
        ([2.0] * 10, 2.0 + 10 * 0.01 * 2.0),
        ([1.0, 3.0] * 10, 2.0 + 10 * 1.4826),
        ([1.0] * 10 + [1e9], 1.1),  # one that was missed does not move it
    ],
)
def test_the_limit_of_a_loss(losses: list[float], limit: float) -> None:
    assert limit_of(losses, 10.0) == pytest.approx(limit)


class Manual(OwnModule):
    automatic_optimization = False


def test_manual_optimization_is_refused() -> None:
    trainer = make_trainer(0, 1, callbacks=[SpikeGuard()], max_steps=1)
    with pytest.raises(ConfigurationError, match=r"^SpikeGuard returns to the end of a step, and manual"):
        trainer.fit(Manual(), DataLoader(RandomTokens(), batch_size=4))
    assert torch.is_grad_enabled()
