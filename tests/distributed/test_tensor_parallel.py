"""Layers computed in parts by several ranks (mesh.tp): exchanges, plans of users, and what a user sees of it."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, MoELayer, OptimizerConfig, auxiliary_loss
from moe_lightning.callbacks.summary import Summary
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.tensor import (
    Columns,
    Embedding,
    Gathered,
    Parted,
    Plan,
    Rows,
    TensorRanks,
    _call,
    planned_cuts,
)
from moe_lightning.strategies.checks import require_own_sharding
from tests.distributed.harness import run_pooled
from tests.distributed.same_training import TOLERANCE, on_one_world
from tests.distributed.test_meshes import LLAMA, TP2, run, save
from tests.distributed.training import TINY, RandomTokens, make_trainer, stepped, train
from tests.parameters import slow

# ---------------------------------------------------------------------- exchanges


def exchanges(rank: int, world_size: int) -> None:
    """Every exchange and its gradient beside what one process computes of the sum of all ranks' losses."""
    ranks = TensorRanks(dist.group.WORLD, rank, world_size)
    generator = torch.Generator().manual_seed(3)
    all_x = torch.randn(world_size, 2, 4, 6, generator=generator, dtype=torch.float64)
    weigh = torch.randn(world_size, 2, 4 * world_size, 6, generator=generator, dtype=torch.float64)

    def both(ours: Any, theirs: Any) -> None:
        x, every = all_x[rank].clone().requires_grad_(), all_x.clone().requires_grad_()
        mine, expected = ours(x), theirs(every)
        torch.testing.assert_close(mine, expected[rank])
        sizes = [slice(0, n) for n in mine.shape]
        (mine * weigh[rank][sizes]).sum().backward()
        sum((out * weigh[r][sizes]).sum() for r, out in enumerate(expected)).backward()
        torch.testing.assert_close(x.grad, every.grad[rank])

    both(lambda x: ranks.gather(x, 1), lambda e: [torch.cat(list(e), dim=1)] * world_size)
    both(lambda x: ranks.sum_parts(x, -2), lambda e: list(e.sum(dim=0).chunk(world_size, dim=1)))
    both(ranks.sum, lambda e: [e.sum(dim=0)] * world_size)
    targets = torch.tensor([0, 5, 6 * world_size - 1, -100, 7, 2, 3, 1])

    def entropy(logits: Tensor) -> Tensor:
        found = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        return found.view(1, 8, 1)

    def ours(x: Tensor) -> Tensor:
        found = ranks.cross_entropy(x.reshape(8, 6), targets)
        return found.masked_fill(targets == -100, 0.0).view(1, 8, 1)

    both(ours, lambda e: [entropy(torch.cat(list(e.reshape(world_size, 8, 6)), dim=1))] * world_size)
    x = all_x[rank].clone().requires_grad_()
    with pytest.raises(ConfigurationError, match="has no second derivatives"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def test_exchanges_have_the_gradients_of_the_sum_of_losses() -> None:
    run_pooled(2, exchanges)  # which asserts on every rank


# ---------------------------------------------------------------------- users' modules


class Planned(pl.LightningModule):
    """A user's module with a plan of its own, whose loss is a plain mean of whole logits."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.embed = nn.Embedding(64, 32)
        self.cutter = nn.Identity()
        self.inside = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
        self.moe = MoELayer(32, 48, num_experts=6, router={"top_k": 2})
        self.whole = nn.Identity()
        self.out = nn.Linear(32, 64)

    def tensor_parallel_plan(self) -> Plan:
        return {
            "inside": Gathered(),
            "inside.0": Columns(),
            "inside.2": Rows(),
            "cutter": Parted("input"),
            "whole": Gathered(),
        }

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = self.cutter(self.embed(batch[0]))
        h = h + self.inside(input=h)
        loss = F.cross_entropy(self.out(self.whole(h + self.moe(h))).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return stepped(self, loss + auxiliary_loss(self), clip=0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Rarely(Planned):
    """The layers that are cut compute samples of one kind only, which some slices of a batch lack."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h, kind = self.cutter(self.embed(batch[0])), batch[0][:, 0] < 6
        if kind.any():
            h = h.index_put((kind,), self.inside(input=h[kind]), accumulate=True)
        loss = F.cross_entropy(self.out(self.whole(h + self.moe(h))).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss


def test_gradients_of_layers_that_some_slices_do_not_use_are_summed() -> None:
    options: dict[str, Any] = {"own_module": Rarely}
    (alone,) = run(1, **options)
    for result in run(4, strategy={**TP2, "find_unused_parameters": True}, **options):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("manual", [slow(False), True])
def test_a_users_plan_is_followed(manual: bool) -> None:
    options: dict[str, Any] = {
        "own_module": partial(Planned, manual=manual), "trainer": {"gradient_clip_val": None if manual else 0.5}
    }  # fmt: skip
    alone = run(1, **options)[0]
    ranks = run(4, strategy=TP2, **options)
    for result in ranks:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=TOLERANCE)
    for name, values in alone["state"].items():
        np.testing.assert_allclose(ranks[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


class Frozen(Planned):
    """Gives its optimizer what is trained only, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def test_frozen_parameters_are_gathered_without_moments() -> None:
    for result in run(4, own_module=Frozen, strategy={**TP2, "dense": "zero1"}, steps=2):
        assert len(result["losses"]) == 2


class Told(GPTModule):
    """Whole logits for a loss of one's own, a copy of the module, and a metric."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        assert logits.shape == (*batch[0].shape, 64)
        with torch.no_grad():
            torch.testing.assert_close(copy.deepcopy(self.model).eval()(batch[0]), self.model.eval()(batch[0]))
        self.model.train()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        self.log("train/hits", (self.predict_step(batch, 0) == batch[1]).float().mean(), sync_dist=True)
        return loss + auxiliary_loss(self)


class Metrics(pl.Callback):
    """What was logged in every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train/hits"]))


def told(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[list[float], list[float]]:
    metrics = Metrics()
    module = partial(Told, TINY | {"dropout": 0.1}, OptimizerConfig(lr=3e-3))
    result = train(rank, world_size, own_module=module, strategy=strategy, steps=6, callbacks=[metrics])  # type: ignore[arg-type]
    return result["losses"], metrics.seen


@pytest.mark.slow
def test_a_loss_of_ones_own_gets_whole_logits() -> None:
    (alone,) = run_pooled(1, partial(told, strategy={}))
    for losses, hits in run_pooled(4, partial(told, strategy=TP2)):
        np.testing.assert_allclose(losses, alone[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(hits, alone[1], rtol=0, atol=TOLERANCE)


def evaluate(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[float, list[tuple[int, ...]]]:
    """Without a fit nothing is cut."""
    trainer, module = make_trainer(rank, world_size, strategy), GPTModule(TINY, OptimizerConfig())
    loader = DataLoader(RandomTokens(30), batch_size=10)
    loss = float(trainer.validate(module, loader, verbose=False)[0]["val/loss"])
    return loss, [tuple(part.shape) for part in trainer.predict(module, loader)]


def test_evaluation_alone_is_that_of_one_rank() -> None:
    ((alone, _),) = run_pooled(1, partial(evaluate, strategy={}))
    for loss, predictions in run_pooled(4, partial(evaluate, strategy=TP2)):
        assert loss == pytest.approx(alone, abs=TOLERANCE)
        assert predictions == [(5, 16)] * 3


class Summed(Planned):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        self.log("numbers", torch.tensor(len(batch[0])), reduce_fx="sum", sync_dist=True)
        return super().training_step(batch, batch_idx)


class Sums(Callback):
    """The sums of a step, and of an epoch."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, ...]] = []
        self.epoch = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append(tuple(float(trainer.callback_metrics[name]) for name in ("samples_step", "numbers")))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epoch = float(trainer.callback_metrics["samples_epoch"])


def summed(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[list[tuple[float, ...]], float]:
    options: dict[str, Any] = {"dataset_size": 25, "trainer": {"max_epochs": 1, "max_steps": -1}}
    train(rank, world_size, own_module=Summed, strategy=strategy, callbacks=[sums := Sums()], **options)
    return sums.steps, sums.epoch


@pytest.mark.parametrize(("ranks", "strategy"), [(4, TP2), (2, {})])
def test_each_sample_is_summed_once(ranks: int, strategy: dict[str, Any]) -> None:
    """Also where ranks have none in the last batch."""
    expected = [(12.0, 12.0), (12.0, 12.0), (1.0, 1.0)], 25.0
    assert run_pooled(ranks, partial(summed, strategy=strategy)) == [expected] * ranks


class Speed(Callback):
    """The speed in the summary of a run."""

    tokens_per_s = 0.0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.tokens_per_s = Summary().numbers(trainer)["tokens_per_s"]


def watched(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, int]:
    telemetry, speed = Telemetry(), Speed()
    train(rank, world_size, steps=2, callbacks=[telemetry, speed], **options)
    return telemetry.tokens_seen, round(speed.tokens_per_s * telemetry.train_s)


@pytest.mark.parametrize(
    "options", [{"strategy": TP2}, {"strategy": {"mesh": {"pp": 2}}, "model": {"tie_embeddings": False}}]
)
def test_each_token_is_counted_once(options: dict[str, Any]) -> None:
    assert run_pooled(4, partial(watched, options=options)) == [(2 * 12 * 16, 2 * 12 * 16)] * 4


# ---------------------------------------------------------------------- checkpoints


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    run_pooled(4, partial(save, strategy=TP2, model=LLAMA, folder=str(tmp_path)))
    calm = run(1, model=LLAMA)[0]
    resumes = [{"model": LLAMA, "strategy": TP2, "ckpt_path": str(tmp_path / name)} for name in ("one.ckpt", "steps")]
    for ranks in on_one_world(2, train, resumes):
        for result in ranks:
            np.testing.assert_allclose(result["losses"], calm["losses"][2:], rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- refusals


def refusal(rank: int, world_size: int, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train(rank, world_size, strategy={"mesh": {"tp": world_size}}, steps=1, **options)
    return str(caught.value)


def test_who_deals_out_parameters_otherwise_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.tp=2 and dense=own do not go together: use dense=ddp, zero1"):
        require_own_sharding("own", "mesh.tp=2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": {"num_heads": 1}}, "does not divide the 1 heads of model.blocks.0.attention.qkv"),
        ({"model": {"num_kv_heads": 1}}, "does not divide the 1 heads"),
        ({"model": {"vocab_size": 65}}, "does not divide the 65 tokens of the vocabulary"),
        ({"model": {"moe_every": 2, "d_hidden": 49, "d_expert": 48}}, "does not divide the 49 hidden units"),
        ({"own_module": True}, "OwnModule does not say which: give it a method tensor_parallel_plan"),
    ],
)
def test_layers_that_cannot_be_dealt_out_are_refused(options: dict[str, Any], words: str) -> None:
    assert all(words in found for found in run_pooled(2, partial(refusal, options=options)))


class Scaled(nn.Embedding):
    """Embeds as Gemma does."""

    def forward(self, ids: Tensor) -> Tensor:
        return 6.0 * super().forward(ids)


class Halved(nn.Linear):
    """A projection with a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(("style", "layer"), [(Embedding(), Scaled(8, 4)), (Rows(), Halved(8, 4))])
def test_a_forward_that_a_style_does_not_call_is_refused(style: Any, layer: nn.Module) -> None:
    module = nn.Sequential(layer)
    module.tensor_parallel_plan = lambda: {"0": style}  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=f"0 is a {type(layer).__name__} with a forward of its own"):
        planned_cuts(module, 2)


def odd_sequences(rank: int, world_size: int) -> str:
    module = GPTModule(TINY, OptimizerConfig(lr=3e-3))
    trainer = make_trainer(rank, world_size, TP2, max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(module, DataLoader(RandomTokens(length=15), batch_size=12))
    return str(caught.value)


def test_sequences_that_cannot_be_dealt_out_are_refused() -> None:
    assert all(
        "15 positions of a sequence are not a multiple of mesh.tp=2" in found for found in run_pooled(2, odd_sequences)
    )


def test_a_changed_argument_is_compiled_without_a_warning() -> None:
    layer = nn.Linear(2, 2)

    def doubled(x: Tensor) -> Tensor:
        return _call(layer, layer.forward, 0, lambda x: 2 * x, (x,), {})  # type: ignore[no-any-return]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(doubled, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(1, 2)), layer(2 * torch.ones(1, 2)))
    assert not [one for one in caught if "Dynamo" in str(one.message)]
