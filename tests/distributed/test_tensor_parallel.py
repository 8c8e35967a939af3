"""Layers computed in parts by several ranks (mesh.tp): the same loss, the same checkpoints, a share of the bytes."""

from __future__ import annotations

import copy
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, MoELayer, OptimizerConfig, auxiliary_loss
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.mesh import MeshShape
from moe_lightning.parallel.tensor import Columns, Gathered, Parted, PartedForward, Plan, Rows, TensorRanks
from moe_lightning.state.tensors import cut_of
from moe_lightning.strategies import expert_parallel
from moe_lightning.strategies.dense_parameters import check_parts
from tests.distributed.harness import run_ranks
from tests.distributed.mesh_checkpoints import assert_read_to_the_bit, write
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.test_cut_parameters import Weigher
from tests.distributed.training import BRIEF, BRIEF_ACCUMULATION, TINY, RandomTokens, make_trainer, train
from tests.parameters import slow

TP2 = {"mesh": {"tp": 2}}
TIED: dict[str, Any] = {
    "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False, "num_heads": 4, "num_kv_heads": 2,
    "qk_norm": True, "num_layers": 3, "moe_every": 2, "num_shared_experts": 1, "tie_embeddings": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {"validate": True, "trainer": {"val_check_interval": 4}},
    "uneven": {"batch_size": 13},
    "accumulate": BRIEF_ACCUMULATION,
    "noisy": KNOWN["noisy"],
    "few samples": {"batch_size": 4, "dataset_size": 25, "model": {"dropout": 0.1}},
    "untied": {
        "model": {"moe_every": 2, "tie_embeddings": False},
        "trainer": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
    },
    "tied": {"model": TIED, "validate": True, "trainer": {"val_check_interval": 4}},
    "tied noisy": {"model": TIED | KNOWN["noisy"]["model"], "batch_size": 13},
}  # fmt: skip


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(world_size, partial(train, **BRIEF | options))
    return results


@cache
def reference(key: str) -> dict[str, Any]:
    return run(1, **CASES[key])[0]


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        slow("plain", 2, TP2),
        slow("plain", 4, {**TP2, "replicas": 2}),
        slow("uneven", 4, {**TP2, "ep_size": 2}),
        slow("accumulate", 4, TP2),
        slow("noisy", 2, TP2),
        slow("untied", 4, TP2),
        slow("tied", 2, TP2),
        ("tied noisy", 4, TP2),
        ("few samples", 4, TP2),
        slow("noisy", 4, TP2),
        slow("accumulate", 2, TP2),
        slow("tied", 4, TP2),
        slow("tied noisy", 8, TP2),
    ],
)
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    assert_same_training(reference(key), run(ranks, strategy=strategy, **CASES[key]))


def test_four_ranks_share_four_heads() -> None:
    options: dict[str, Any] = {"model": {"num_heads": 4, "moe_every": 2}}
    assert_same_training(run(1, **options)[0], run(4, strategy={"mesh": {"tp": 4}}, **options))


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


def test_exchanges_have_the_gradients_of_the_sum_of_losses() -> None:
    run_ranks(2, exchanges)  # which asserts on every rank


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
            "cutter": Parted(),
            "whole": Gathered(),
        }

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = self.cutter(self.embed(batch[0]))
        h = h + self.inside(h)
        loss = F.cross_entropy(self.out(self.whole(h + self.moe(h))).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        loss = loss + auxiliary_loss(self)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


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


def test_a_loss_of_ones_own_gets_whole_logits() -> None:
    (alone,) = run_ranks(1, partial(told, strategy={}))
    for losses, hits in run_ranks(4, partial(told, strategy=TP2)):
        np.testing.assert_allclose(losses, alone[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(hits, alone[1], rtol=0, atol=TOLERANCE)


def fit_twice(rank: int, world_size: int, *, room: int) -> tuple[list[bool], int, float, float]:
    """A module that two Trainers train one after the other, and what is left on it.

    Args:
        room: bytes that a rank may keep of the whole model.
    """
    expert_parallel.gather_limit = lambda _: room
    module = GPTModule(TINY, OptimizerConfig(lr=3e-3))
    loader = DataLoader(RandomTokens(), batch_size=12)
    kinds, losses = [], []
    for _ in range(2):
        trainer = make_trainer(rank, world_size, TP2, max_steps=3)
        trainer.fit(module, loader, loader)
        kinds.append(any(cut_of(p) for p in module.parameters()))
        losses.append(float(trainer.validate(module, loader, verbose=False)[0]["val/loss"]))
    changed = sum(isinstance(m.__dict__.get("forward"), PartedForward) for m in module.modules())
    return kinds, changed, losses[0], losses[1]


def test_a_module_is_whole_after_training_and_trains_again() -> None:
    whole = run_ranks(2, partial(fit_twice, room=1 << 30))
    cut = run_ranks(2, partial(fit_twice, room=0))
    for kinds, changed, first, second in whole:
        assert (kinds, changed) == ([False, False], 0)
        assert second < first
    for kinds, changed, *losses in cut:
        assert kinds == [True, True]
        assert changed > 0
        assert losses == pytest.approx(whole[0][2:], abs=TOLERANCE)


def evaluate(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[float, list[tuple[int, ...]]]:
    """Without a fit nothing is cut."""
    trainer, module = make_trainer(rank, world_size, strategy), GPTModule(TINY, OptimizerConfig())
    loader = DataLoader(RandomTokens(30), batch_size=10)
    loss = float(trainer.validate(module, loader, verbose=False)[0]["val/loss"])
    return loss, [tuple(part.shape) for part in trainer.predict(module, loader)]


def test_evaluation_alone_is_that_of_one_rank() -> None:
    ((alone, _),) = run_ranks(1, partial(evaluate, strategy={}))
    for loss, predictions in run_ranks(4, partial(evaluate, strategy=TP2)):
        assert loss == pytest.approx(alone, abs=TOLERANCE)
        assert predictions == [(5, 16)] * 3


def watched(rank: int, world_size: int, strategy: dict[str, Any]) -> int:
    telemetry = Telemetry()
    train(rank, world_size, strategy=strategy, steps=3, callbacks=[telemetry])
    return telemetry.tokens_seen


def test_each_token_is_counted_once() -> None:
    assert run_ranks(4, partial(watched, strategy=TP2)) == [3 * 12 * 16] * 4


# ---------------------------------------------------------------------- bytes


def weigh(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, int]:
    weigher = Weigher()
    model = {"d_model": 64, "num_layers": 4, "moe_every": 4, "num_experts": 2, "d_hidden": 256, "vocab_size": 256}
    train(rank, world_size, strategy=strategy, steps=3, model=model, callbacks=[weigher])
    return weigher.bytes


def test_a_rank_holds_its_share_of_the_bytes() -> None:
    (whole,) = run_ranks(1, partial(weigh, strategy={}))
    for found in run_ranks(2, partial(weigh, strategy=TP2)):
        for kind, nbytes in found.items():
            assert nbytes == pytest.approx(whole[kind] / 2, rel=0.05), kind


# ---------------------------------------------------------------------- checkpoints

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (3, {"replicas": 2}),
    "fsdp": (2, {"dense": "fsdp"}),
    "tp2": (2, TP2),
    "dp2 tp2": (4, TP2),
}


def save(rank: int, world_size: int, strategy: dict[str, Any], folder: str) -> None:
    saver = PartialExpertsCheckpoint(os.path.join(folder, "steps"), every_n_steps=3)
    train(rank, world_size, strategy=strategy, model=TIED, callbacks=[saver], **BRIEF | {"steps": 3},
          trainer={"enable_checkpointing": True}, save_to=os.path.join(folder, "one.ckpt"))  # fmt: skip


class SaverInside(pl.Callback):
    """A file of Lightning's, written while layers are cut."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def load(rank: int, world_size: int, strategy: dict[str, Any], source: str, target: str) -> None:
    """Resume at the last step but one step later, and save before it."""
    saver, options = SaverInside(target), BRIEF | {"steps": 4}
    train(rank, world_size, strategy=strategy, model=TIED, ckpt_path=source, callbacks=[saver], **options)


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        slow("dp2 tp2", ["one", "fsdp", "tp2"]),
        slow("ddp", ["tp2"]),
        slow("tp2", ["one", "ddp", "dp2 tp2"]),
        slow("fsdp", ["tp2", "dp2 tp2"]),
        slow("one", ["dp2 tp2"]),
    ],
)
def test_any_mesh_reads_what_any_wrote_to_the_bit(writer: str, readers: list[str], tmp_path: Path) -> None:
    written = write(MESHES, writer, save, tmp_path)
    assert sum(name.endswith("/exp_avg") for name in written) > 10
    assert_read_to_the_bit(MESHES, readers, load, tmp_path, written)


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    run_ranks(4, partial(save, strategy=TP2, folder=str(tmp_path)))
    calm = run(1, model=TIED)[0]
    for source in ("one.ckpt", "steps"):
        for result in run(2, model=TIED, strategy=TP2, ckpt_path=str(tmp_path / source)):
            np.testing.assert_allclose(result["losses"], calm["losses"][3:], rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- refusals


def refusal(rank: int, world_size: int, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train(rank, world_size, strategy={"mesh": {"tp": world_size}}, steps=1, **options)
    return str(caught.value)


def test_who_deals_out_parameters_otherwise_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.tp=2 and dense=own do not go together: use dense=ddp, zero1"):
        check_parts(MeshShape(tp=2), "own")


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
    assert all(words in found for found in run_ranks(2, partial(refusal, options=options)))


def odd_sequences(rank: int, world_size: int) -> str:
    module = GPTModule(TINY, OptimizerConfig(lr=3e-3))
    trainer = make_trainer(rank, world_size, TP2, max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(module, DataLoader(RandomTokens(length=15), batch_size=12))
    return str(caught.value)


def test_sequences_that_cannot_be_dealt_out_are_refused() -> None:
    assert all(
        "15 positions of a sequence are not a multiple of mesh.tp=2" in found for found in run_ranks(2, odd_sequences)
    )
