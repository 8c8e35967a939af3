"""Losses and gradients that are not finite: reported with rank, step and samples; they end the run or cost a step."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning.callbacks import checkpoint
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.lost_tokens import LostTokens, TokenCounts
from moe_lightning.callbacks.spike_guard import SpikeGuard
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings
from moe_lightning.checkpoint.selection import parse_scopes
from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import NonFiniteLossError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World
from moe_lightning.strategies.stages import StageMap
from moe_lightning.strategies.watch import FiniteWatch
from moe_lightning.strategies.worlds import Worlds
from tests.distributed.harness import connect, run_pooled, run_ranks
from tests.distributed.training import Numbered, OwnModule, RandomTokens, Recorder, make_trainer, stepped
from tests.parameters import slow

BAD = 29
"""A sample of which the loss is no number."""


class _NotFinite(torch.autograd.Function):
    """Identity whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.value, None


class BadGradient(OwnModule):
    """Has a finite loss and, with one sample, a gradient that is not; and buffers that every forward pass changes."""

    def __init__(self, value: float, optimizer: str = "AdamW", *, manual: bool = False) -> None:
        super().__init__()
        self.value, self.optimizer, self.automatic_optimization = value, optimizer, not manual
        self.norm = nn.BatchNorm1d(32)
        self.moe = MoELayer(32, 48, 6, router={"top_k": 2, "bias_update_rate": 0.01})
        self.kept: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        h = self.norm(self.embed(x).flatten(0, 1)).view(*x.shape, 32)
        if BAD in numbers.tolist():
            h = _NotFinite.apply(h, self.value)  # type: ignore[no-untyped-call]
        loss = nn.functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())
        self.log("train/loss", loss, sync_dist=True)
        return stepped(self, loss)

    def on_train_batch_start(self, *_: Any) -> None:
        self.kept.append({name: tensor.clone() for name, tensor in self.state_dict().items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"lr": 3e-3} | ({"momentum": 0.9} if self.optimizer == "SGD" else {})
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), **options)
        return optimizer


class Module(OwnModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        loss = super().training_step((x, y), batch_idx)
        return loss * math.nan if BAD in numbers.tolist() else loss


def fit(rank: int, world_size: int, stop: str | None, options: dict[str, Any]) -> dict[str, Any]:
    recorder, text = Recorder(), io.StringIO()
    trainer = make_trainer(rank, world_size, {"stop_on_nan": stop, **options}, callbacks=[recorder], max_steps=4)
    module, told = Module(), ""
    with contextlib.redirect_stderr(text):
        try:
            trainer.fit(module, DataLoader(Numbered(), batch_size=12))
        except NonFiniteLossError as error:
            told = str(error)
    is_whole = all(bool(p.isfinite().all()) for p in module.parameters())
    return {"told": told, "steps": trainer.global_step, "whole": is_whole, "text": text.getvalue()}


class Spike(OwnModule):
    """From step 40 on the losses of rank 1 are ten times as high."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 10 if self.trainer.global_step >= 40 and self.trainer.global_rank == 1 else loss


def warned_of(rank: int, world_size: int, module: type[OwnModule], guard: bool) -> list[str]:
    text = io.StringIO()
    callbacks = [SpikeGuard(threshold=1e6)] if guard else []
    trainer = make_trainer(rank, world_size, {}, callbacks=callbacks, max_steps=60)
    with contextlib.redirect_stderr(text):
        trainer.fit(module(), DataLoader(RandomTokens(12 * 60), batch_size=12))
    return [line for line in text.getvalue().splitlines() if line.startswith("warning: the loss")]


@pytest.mark.slow
def test_a_spike_is_one_sentence_and_calm_losses_none() -> None:
    silent, lines = run_ranks(2, warned_of, Spike, False)
    assert silent == []
    (line,) = lines
    assert re.match(r"warning: the loss is \d+\.\d+ on rank 1 in the step after step 40 \(samples .* data set\)", line)
    assert "micro-batches before; training continues: callbacks=spike_guard would return" in line
    assert run_ranks(2, warned_of, OwnModule, False) == [[], []]
    assert run_ranks(2, warned_of, Spike, True) == [[], []], "SpikeGuard has words of its own"


def words_of(rank_of_bad: int) -> str:
    samples = range(24, 30) if rank_of_bad == 0 else range(30, 36)
    listed = ", ".join(map(str, samples))
    return f"the loss is nan on rank {rank_of_bad} in the step after step 2 (samples {listed} of the data set)"


def test_it_is_told_once() -> None:
    found = run_ranks(2, fit, None, {})
    assert [result["steps"] for result in found] == [4, 4]
    assert not found[0]["whole"]
    told = [line for result in found for line in result["text"].splitlines() if "the loss is" in line]
    assert told == [f"warning: {words_of(0)}; training continues: stop_on_nan=end or skip would stop it"]


@pytest.mark.parametrize("options", [{}, slow({"dense": "fsdp"}), slow({"dense": "zero1"})])
def test_the_run_ends_before_the_update(options: dict[str, Any]) -> None:
    found = run_pooled(2, fit, "end", options)
    assert [result["steps"] for result in found] == [2, 2]
    assert all(result["whole"] for result in found)
    assert all(result["told"].startswith(f"{words_of(0)}: the run ends before this update") for result in found)


@pytest.mark.parametrize("options", [{}, slow({"dense": "fsdp"}), slow({"dense": "zero1"})])
def test_the_update_is_left_out(options: dict[str, Any]) -> None:
    found = run_pooled(2, fit, "skip", options)
    assert [(result["told"], result["steps"], result["whole"]) for result in found] == [("", 4, True)] * 2


def test_the_samples_of_a_slice_are_those_of_its_batch() -> None:
    for shuffle in (False, True):
        sampler = StepSampler(
            num_samples=26, global_batch_size=8, num_micros=2, rank=1, world_size=2, seed=3, shuffle=shuffle, pieces=2
        )
        position = 0
        for _ in range(12):
            here = sampler.slice_at(position)
            indices = sampler.indices_at(position)
            assert sampler.indices_of(here) == list(getattr(indices, "of_samples", indices))
            position += here.micro_total


def fit_gradients(
    rank: int, world_size: int, value: float, module: dict[str, Any], options: dict[str, Any], trainer: dict[str, Any]
) -> dict[str, Any]:
    recorder, text = Recorder(), io.StringIO()
    running = make_trainer(rank, world_size, options, callbacks=[recorder], max_steps=4, **trainer)
    own, told = BadGradient(value, **module), ""
    with contextlib.redirect_stderr(text), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            running.fit(own, DataLoader(Numbered(), batch_size=12))
        except NonFiniteLossError as error:
            told = str(error)
    is_whole = all(bool(t.isfinite().all()) for t in own.state_dict().values() if t.is_floating_point())
    before, after = own.kept[2], own.kept[-1]
    changed = [name for name, tensor in before.items() if not tensor.equal(after[name])]
    found = {"told": told, "steps": running.global_step, "whole": is_whole, "text": text.getvalue()}
    return found | {"changed": changed}


SAMPLES = {1: "samples 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35", 2: "samples 24, 25, 26, 27, 28, 29"}
CASES: list[Any] = [
    (1, {}, {}, {}),
    (1, {"manual": True}, {}, {}),
    (1, {"optimizer": "SGD"}, {}, {"gradient_clip_val": 1.0}),
    (2, {}, {}, {}),
    (2, {}, {}, {"gradient_clip_val": 1.0}),
    (2, {}, {}, {"precision": "64-true"}),
    (2, {"optimizer": "SGD"}, {"dense": "zero1"}, {}),
    slow(2, {"optimizer": "Adam"}, {"dense": "zero1"}, {"gradient_clip_val": 1.0}),
    slow(2, {"manual": True}, {}, {}),
    slow(2, {}, {"dense": "fsdp"}, {}),
]


@pytest.mark.parametrize(("ranks", "module", "options", "trainer"), CASES)
@pytest.mark.parametrize("value", [math.nan, slow(math.inf)])
def test_an_update_with_such_gradients_is_left_out(
    ranks: int, module: dict[str, Any], options: dict[str, Any], trainer: dict[str, Any], value: float
) -> None:
    found = run_pooled(ranks, fit_gradients, value, module, {"stop_on_nan": "skip", **options}, trainer)
    assert [(result["told"], result["steps"], result["whole"]) for result in found] == [("", 4, True)] * ranks
    assert [result["changed"] for result in found] == [[]] * ranks


@pytest.mark.parametrize(
    ("ranks", "module", "options", "trainer"),
    [slow(*case) if number in (2, 3, 5) else case for number, case in enumerate(CASES)],
)  # found as where the update is left out; named by the gradients and by their norm
def test_such_gradients_end_the_run_before_the_update(
    ranks: int, module: dict[str, Any], options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    found = run_pooled(ranks, fit_gradients, math.nan, module, {"stop_on_nan": "end", **options}, trainer)
    assert [(result["steps"], result["whole"]) for result in found] == [(2, True)] * ranks
    for told in (result["told"] for result in found):
        assert told.startswith("the gradient of norm.bias is not finite (nor those of 2 other parameters) ")
        assert "in the step after step 2" in told
        if options.get("dense") != "fsdp":
            assert f"on rank 0 in the step after step 2 ({SAMPLES[ranks]} of the data set)" in told


class BadExpert(OwnModule):
    """On the last rank a hook spoils the gradients of its experts, after they have been summed."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        trainer = self.trainer
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            for name, parameter in self.named_parameters():
                if ".experts." in name and parameter.grad is not None:
                    parameter.grad.fill_(math.nan)


def fit_bad_expert(rank: int, world_size: int) -> str:
    trainer = make_trainer(rank, world_size, {"stop_on_nan": "end"}, max_steps=4, gradient_clip_val=1.0)
    with pytest.raises(NonFiniteLossError) as error:
        trainer.fit(BadExpert(), DataLoader(RandomTokens(), batch_size=12))
    return str(error.value)


def test_gradients_of_one_rank_are_named_on_all() -> None:
    told = run_pooled(2, fit_bad_expert)
    assert told[0] == told[1]
    assert ".experts." in told[0]
    assert "is not finite" in told[0]


@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 1.0}])
def test_without_stop_such_gradients_are_warned_of_once(trainer: dict[str, Any]) -> None:
    found = run_ranks(2, fit_gradients, math.nan, {}, {}, trainer)
    told = [line for result in found for line in result["text"].splitlines() if "warning:" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: the gradient of norm.bias is not finite (nor those of 2 other parameters) ")
    assert "summed over 2 ranks, in the step after step 2; training continues" in told[0]


class Counting(torch.optim.SGD):
    """Changes its groups and its weights in every step, with gradients or without."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1
            for parameter in group["params"]:
                parameter.data.mul_(0.999)
        return loss


class Counted(BadGradient):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Counting(self.parameters(), lr=0.1)


def test_a_step_that_is_left_out_is_none_of_the_optimizer() -> None:
    trainer = make_trainer(0, 1, {"stop_on_nan": "skip"}, max_steps=4)
    module = Counted(math.nan)
    trainer.fit(module, DataLoader(Numbered(), batch_size=12))
    assert (trainer.global_step, trainer.optimizers[0].param_groups[0]["made"]) == (4, 3)
    assert all(before.equal(module.kept[3][name]) for name, before in module.kept[2].items())


class TwoOptimizers(BadGradient):
    """The second optimizer trains the MoE layer, in every other batch."""

    def __init__(self) -> None:
        super().__init__(1.0, manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        others, experts = self.optimizers()  # type: ignore[misc, attr-defined]
        h = self.embed(x)
        loss = nn.functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())
        self.manual_backward(loss)
        (experts if batch_idx % 2 else others).step()
        self.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        own = set(self.moe.parameters())
        others = [p for p in self.parameters() if p not in own]
        return [torch.optim.SGD(others, lr=0.1), torch.optim.SGD(own, lr=0.1)]


def test_only_steps_of_a_layers_own_optimizer_move_its_bias() -> None:
    module = TwoOptimizers()
    make_trainer(0, 1, max_steps=6).fit(module, DataLoader(Numbered(), batch_size=12))
    biases = [kept["moe.router.expert_bias_E"] for kept in module.kept]
    moved = [not before.equal(after) for before, after in pairwise(biases)]
    assert moved == [False, True, False, True, False]


def test_a_layer_that_nobody_trains_keeps_its_bias() -> None:
    module = BadGradient(1.0)
    module.moe.requires_grad_(False)
    make_trainer(0, 1, max_steps=3).fit(module, DataLoader(Numbered(), batch_size=12))
    assert not module.moe.router.expert_bias_E.any()


def counted(rank: int, world_size: int) -> list[int]:
    """Rank 0 has seen a step in a stage with layer 0 and some of the next step, rank 1 nothing; then both compute
    layer 1.
    """
    layers, counts = [MoELayer(8, 8, 4) for _ in range(2)], TokenCounts()
    stages: Any = SimpleNamespace(layers=layers, numbers=[0])
    for _ in range(2 * (rank == 0)):
        layers[0](torch.randn(3, 8))
        counts.add(stages)
        if counts.total is None:
            counts.end_step(is_skipped=False)
    stages.numbers = [1]
    counts.enter_world(None, stages, connect())
    layers[1](torch.ones(5, 8))
    counts.add(stages)
    counts.end_step(is_skipped=False)
    return counts.total.sum(dim=1).tolist()


def test_layers_that_a_step_does_not_call_count_nothing() -> None:
    layers, counts = [MoELayer(8, 8, 4) for _ in range(2)], TokenCounts()
    layers[1](torch.randn(3, 8))
    counts.add(SimpleNamespace(layers=layers, numbers=[0, 1]))  # type: ignore[arg-type]
    counts.end_step(is_skipped=False)
    assert counts.total is not None
    assert counts.total.sum(dim=1).tolist() == [0, 6]


def test_ranks_of_a_new_world_have_counted_the_same_tokens() -> None:
    assert run_pooled(2, counted) == [[6, 10]] * 2


def test_what_a_ledger_has_recorded_is_not_counted_again() -> None:
    stages: Any = SimpleNamespace(layers=[MoELayer(8, 8, 4)], numbers=[0])
    counts = TokenCounts()
    counts.enter_world(np.full((1, 4), 3), stages, World.single())
    assert counts.total is None


def ledger(layers: int = 1) -> CheckpointLedger:
    return CheckpointLedger(
        num_layers=layers,
        num_experts=4,
        planned_assignments=1000,
        owners=np.zeros((layers, 4), dtype=np.int64),
        num_ranks=1,
        scopes=parse_scopes("full"),
    )


def count_on(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 has gone back to a checkpoint, and rank 1 has joined since."""
    saved = ledger()
    saved.record(np.array([[1, 2, 3, 4]]))
    saved.begin(5, saved.plan(4, 4, full=True))
    restored: Any = SimpleNamespace(
        keys=lambda _: ["ledger"],
        read_object=lambda _: saved.state_dict(),
        first_step=5,
        expert_versions=lambda: np.array([[5, 5, 0, 5]]),
    )
    lost = LostTokens(CheckpointSettings())
    lost.checkpoint_ledger = ledger()
    lost.restore(restored if rank == 0 else None, connect())
    return {name: torch.as_tensor(table).tolist() for name, table in lost.checkpoint_ledger.state_dict().items()}


def test_a_rank_that_joins_after_a_return_to_a_checkpoint_counts_as_the_others_do() -> None:
    first, joined = run_pooled(2, count_on)
    assert first == joined
    assert first["lost"] == [3]


def counting(*counts: int) -> LostTokens:
    """A rank that has recorded counts of four experts."""
    lost = LostTokens(CheckpointSettings())
    lost.checkpoint_ledger = ledger()
    lost.checkpoint_ledger.record(np.array([counts]))
    return lost


def lose_what_some_have_seen(rank: int, world_size: int, seen: list[list[int]]) -> Any:
    """Each rank has seen some tokens of the experts of each of two layers since both saved, then one comes back."""
    lost = LostTokens(CheckpointSettings())
    lost.checkpoint_ledger = ledger(layers=2)
    lost.checkpoint_ledger.begin(5, lost.checkpoint_ledger.plan(4, 4, full=True))
    lost.counts.total = torch.tensor(seen[rank])[:, None].expand(2, 4).clone()
    stages: Any = SimpleNamespace(layers=[MoELayer(8, 8, 4) for _ in range(2)])
    lost.lose({(1, 2): 5}, stages, connect())
    state = lost.state_dict()
    saved = state["checkpoint_ledger"]
    return saved["lost"].tolist(), saved["processed"].tolist(), state["lost_plt"]


@pytest.mark.parametrize("seen", [[[10, 0], [0, 10]], [[10, 10], [0, 0]]], ids=["two stages", "missed the end"])
def test_all_ranks_lose_the_tokens_that_one_of_them_has_seen(seen: list[list[int]]) -> None:
    expected = [0, 10], [[10, 10, 10, 10], [10, 10, 0, 10]], pytest.approx(10 / 1000 / 2)
    assert run_pooled(2, lose_what_some_have_seen, seen) == [expected] * 2


def begin(lost: LostTokens, world_size: int = 1) -> None:
    """The first save in a world."""
    owners = np.arange(4)[None] % world_size
    state: Any = SimpleNamespace(owners=lambda: owners, num_experts=4, num_layers=1, world_size=world_size)
    lost.begin(pl.Trainer(max_steps=5, logger=False, enable_checkpointing=False), state, 1)


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_spare_that_is_promoted_counts_as_the_others_do(has_saved: bool) -> None:
    spare, other = counting(9, 9, 9, 9), counting(1, 2, 3, 4) if has_saved else LostTokens(CheckpointSettings())
    spare.load_state_dict(other.state_dict())
    for each in (spare, other):
        begin(each)
    found = [each.checkpoint_ledger and each.checkpoint_ledger.processed.tolist() for each in (spare, other)]
    assert found == [[[1, 2, 3, 4]] if has_saved else None] * 2


def test_a_rank_that_joins_a_larger_world_saves_the_same_experts_as_the_others_do() -> None:
    stayed, joined = counting(1, 2, 3, 4), LostTokens(CheckpointSettings())
    joined.load_state_dict(stayed.state_dict())
    plans = []
    for each in (stayed, joined):
        begin(each, world_size=2)
        assert each.checkpoint_ledger is not None
        plans.append(each.checkpoint_ledger.plan(2, 2).snapshot.mask().tolist())
    assert plans[0] == plans[1] == [[True, False, True, False]]


def test_a_rank_that_has_joined_passes_on_what_it_received() -> None:
    joined = LostTokens(CheckpointSettings())
    joined.load_state_dict(counting(1, 2, 3, 4).state_dict())
    saved = joined.state_dict()["checkpoint_ledger"]
    assert saved is not None
    assert saved["processed"].tolist() == [[1, 2, 3, 4]]


def lose_before_the_first_save(rank: int, world_size: int) -> Any:
    """Rank 0 has been there, and rank 1 has joined and not saved yet, when experts come back older."""
    lost, world = counting(1, 2, 3, 4), connect()
    if rank == 1:
        state, lost = lost.state_dict(), LostTokens(CheckpointSettings())
        lost.load_state_dict(state)
    stages: Any = SimpleNamespace(layers=[MoELayer(8, 8, 4)])
    lost.lose({(0, 2): -1}, stages, world)
    lost.enter_world(stages, world, has_rolled_back=False)
    begin(lost, world_size)
    state = lost.state_dict()
    saved = state["checkpoint_ledger"]
    return saved["lost"].tolist(), saved["processed"].tolist(), state["lost_plt"], lost.counts.total


def test_a_rank_that_has_joined_loses_tokens_as_the_others_do() -> None:
    assert run_pooled(2, lose_before_the_first_save) == [([3], [[1, 2, 0, 4]], pytest.approx(3 / 1000), None)] * 2


def test_counts_that_a_rank_received_go_with_a_return_to_a_saved_step() -> None:
    stages: Any = SimpleNamespace(layers=[MoELayer(8, 8, 4)], numbers=[0])
    joined = LostTokens(CheckpointSettings())
    joined.load_state_dict(counting(1, 2, 3, 4).state_dict())
    joined.enter_world(stages, World.single(), has_rolled_back=True)
    assert joined.checkpoint_ledger is None


@pytest.mark.parametrize(
    ("is_elastic", "step", "is_restored", "world_changes", "is_kept"),
    [
        pytest.param(False, 5, True, False, False, id="from a checkpoint"),
        pytest.param(True, 5, True, False, False, id="from a checkpoint, elastic"),
        pytest.param(True, 0, False, False, False, id="from the beginning"),
        pytest.param(True, 5, False, False, True, id="training goes on"),
        pytest.param(True, 5, True, True, True, id="in another world"),
    ],
)
def test_a_later_fit_counts_on_only_where_its_state_is_that_of_the_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_elastic: bool,
    step: int,
    is_restored: bool,
    world_changes: bool,
    is_kept: bool,
) -> None:
    strategy, saver = mock.MagicMock(world=World.single()), PartialExpertsCheckpoint(str(tmp_path))
    strategy.worlds.is_elastic, strategy.elastic.has_rolled_back, strategy.state.restored = is_elastic, False, None
    strategy.state.stages.layers = [SimpleNamespace(num_experts=4)]
    monkeypatch.setattr(checkpoint, "own_strategy", lambda *_: strategy)
    trainer, module = pl.Trainer(logger=False, enable_checkpointing=False), pl.LightningModule()
    saver.on_train_start(trainer, module)
    saver.lost.load_state_dict(counting(1, 2, 3, 4).state_dict())
    strategy.state.restored = object() if is_restored else None
    if world_changes:
        saver.on_world_changed(trainer, module)
    monkeypatch.setattr(pl.Trainer, "global_step", step)
    saver.on_train_start(trainer, module)
    assert (saver.lost.checkpoint_ledger is not None) == is_kept


def test_a_skipped_update_is_not_the_last_of_a_batch_under_manual_optimization() -> None:
    """The buffers of the next one are remembered as well."""
    module, watch = nn.BatchNorm1d(1), FiniteWatch("skip")
    module.automatic_optimization = False
    watch.begin_batch(module)
    for _ in range(2):
        watch.check_loss(torch.tensor(math.nan), lambda: "somewhere")
        module.running_mean.fill_(5.0)  # type: ignore[union-attr]
        assert watch.is_skipped(module, World.single())  # type: ignore[arg-type]
        assert float(module.running_mean) == 0.0  # type: ignore[arg-type]


def test_tokens_of_a_step_that_is_left_out_are_not_in_the_ledger() -> None:
    layer, counts = MoELayer(8, 8, 4), TokenCounts()
    stages = StageMap(layer, Worlds())
    for is_skipped in (False, True, False):
        for _ in range(2):  # micro-batches
            layer(torch.randn(3, 8))
            counts.add(stages)
        counts.end_step(is_skipped=is_skipped)
    assert counts.total.sum() == 2 * 2 * 3 * 2  # steps, micro-batches, tokens, choices
