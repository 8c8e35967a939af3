"""Sequences cut over ranks (mesh.cp): users' modules see parts and answer wholes, and slices follow speeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader, Dataset

from moe_lightning import ContextParallel, MoELayer, auxiliary_loss
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.parallel.sequence import OtherAttention
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.test_meshes import CASES, CP2, LLAMA, reference, run
from tests.distributed.test_uneven_ranks import Slices
from tests.distributed.training import BRIEF, OwnModule, RandomTokens, Recorder, make_trainer, stepped, train
from tests.parameters import slow


@pytest.mark.slow
def test_bf16_stays_close() -> None:
    case: dict[str, Any] = {"model": LLAMA, "trainer": {"precision": "bf16-mixed"}}
    for result in run(4, strategy=CP2, **case):
        assert result["losses"] == pytest.approx(run(1, **case)[0]["losses"], abs=0.02)


def uneven(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    """A training whose second rank is slow, and the samples of each step."""
    slices = Slices()
    balancer = LoadBalancer(speeds=[3.0, 1.0, 3.0, 3.0], calibrate=False, flops_per_s=1e9, bytes_per_s=1e9)
    return train(rank, world_size, callbacks=[balancer, slices], **options) | {"samples": slices.samples}


@pytest.mark.slow
def test_a_slice_is_as_fast_as_the_slowest_of_its_ranks() -> None:
    results = run_ranks(4, partial(uneven, strategy={"mesh": {"cp": 2}, "slots": 3}, **BRIEF, **CASES["gpt2"]))
    assert_same_training(reference("gpt2"), results)
    assert [set(result["samples"]) for result in results] == [{3}, {3}, {9}, {9}]


# ---------------------------------------------------------------------- users' modules


class SelfAttention(nn.Module):
    """A user's attention, in which documents of a batch do not see each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.context = ContextParallel()

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        mixed: Tensor = self.context.attention(q, k, v, documents_BL=documents, window=6)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class OwnModel(pl.LightningModule):
    """A user's module that calls itself, with a mean over positions as its loss, a metric, and dropout."""

    def __init__(self, *, heads: int = 2, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.embed, self.position = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.attention, self.moe = SelfAttention(32, heads), MoELayer(32, 48, num_experts=6, router={"top_k": 2})
        self.dropout, self.out = StreamDropout(0.1), nn.Linear(32, 64)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=64)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        at = torch.arange(length) + self.attention.context.first(length)
        h = self.embed(ids) + self.position(at)
        h = h + self.dropout(self.attention(h, (at // 5).expand(len(ids), -1)))
        logits: Tensor = self.out(h + self.moe(h))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return stepped(self, loss + auxiliary_loss(self))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits.flatten(0, 1), batch[1].flatten())
        self.log("val/loss", nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), sync_dist=True)
        self.log("val/accuracy", self.accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"next": self(batch[0]).argmax(-1), "first": batch[0][:, 0]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def use(rank: int, world_size: int, *, cp: int, **options: Any) -> dict[str, Any]:
    """Train, validate and predict with a user's module; everything that a user sees of it."""
    recorder, telemetry = Recorder(), Telemetry()
    strategy = {"mesh": {"cp": cp}} if world_size > 1 else {}
    trainer = make_trainer(rank, world_size, strategy, max_steps=4, callbacks=[recorder, telemetry])
    module = OwnModel(**options)
    loader = DataLoader(RandomTokens(), batch_size=13, shuffle=True)
    held_out = DataLoader(RandomTokens(30), batch_size=7)
    trainer.fit(module, loader)
    (scores,) = trainer.validate(module, held_out, verbose=False)
    predictions = trainer.predict(module, held_out)
    module.eval()
    with torch.no_grad():
        whole = module(next(iter(held_out))[0]).argmax(-1)  # outside of steps sequences are whole
    return {
        "losses": recorder.losses, "scores": scores, "predictions": predictions, "whole": whole,
        "tokens": telemetry.tokens_seen,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "cp", "heads", "manual"), [(2, 2, 2, False), slow(4, 2, 1, True), slow(4, 4, 2, False)]
)
def test_a_users_module_sees_parts_and_answers_wholes(ranks: int, cp: int, heads: int, manual: bool) -> None:
    (alone,) = run_pooled(1, partial(use, cp=1, heads=heads, manual=manual))
    results = run_pooled(ranks, partial(use, cp=cp, heads=heads, manual=manual))
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
        assert result["scores"] == pytest.approx(alone["scores"], abs=TOLERANCE)
        assert result["tokens"] == alone["tokens"] == 16 * sum([13] * 4)
        assert torch.equal(result["whole"], alone["predictions"][0]["next"])
    for number, expected in enumerate(alone["predictions"]):
        for name, tensor in expected.items():
            found = [result["predictions"][number][name] for result in results]
            assert [len(part) for rank, part in enumerate(found) if rank % cp] == [0] * (ranks - ranks // cp)
            assert torch.equal(torch.cat(found[::cp]), tensor)


# ---------------------------------------------------------------------- refusals


class Eager(OwnModel):
    """Attention of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.MultiheadAttention(32, 2)


class Hidden(OwnModel):
    """Attention that nothing but its computation tells."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        scores = (h @ h.transpose(1, 2)).softmax(-1) if self.training else h
        return super().forward(ids) + self.out(scores @ h)


class Fused(OwnModel):
    """The same, by torch's function."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return super().forward(ids) + self.out(nn.functional.scaled_dot_product_attention(h, h, h))


class Shifting(OwnModel):
    """Makes targets in its step, of a batch with something else beside."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0][:, :-1]).sum()  # type: ignore[no-any-return]


class Alone(Dataset[Tensor]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(16, dtype=torch.int64)


class Unlike(RandomTokens):
    """Samples from the process's own generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(int(torch.randint(96, (1,))) + os.getpid())


class Framed(RandomTokens):
    """A tensor that is no sequence."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), torch.zeros(3)


def refusal(rank: int, world_size: int, kind: Callable[[], pl.LightningModule], data: Any) -> str:
    trainer = make_trainer(rank, world_size, {"mesh": {"cp": 2}}, max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(kind(), DataLoader(data, batch_size=12))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (OwnModule, RandomTokens(), "no part of OwnModule knows of it"),
        (Eager, RandomTokens(), "second (MultiheadAttention) of Eager would mix"),
        (Hidden, RandomTokens(), "softmax mixes the 8 positions of a part only"),
        slow(Fused, RandomTokens(), "scaled_dot_product_attention mixes the 8 positions of a part only"),
        (Shifting, RandomTokens(), "attention got 7 positions, but mesh.cp=2 has cut the batch into parts of 8"),
        (OwnModel, Alone(), "let the dataset give (inputs, targets)"),
        (OwnModel, RandomTokens(length=15), "sequences of 15 positions cannot be cut into mesh.cp=2 equal parts"),
        (OwnModel, Unlike(), "have loaded different batches"),
        (OwnModel, Framed(), "tensors of [12, 16], [12, 16], [12, 3]"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused_in_a_sentence(kind: Any, data: Any, words: str) -> None:
    for found in run_pooled(2, partial(refusal, kind=kind, data=data)):
        assert words in found


@pytest.mark.parametrize("attend", [slow(flex_attention), lambda q, k, v: torch.softmax(input=q @ k.mT, dim=-1) @ v])
def test_attention_without_the_context_is_found_however_it_is_called(attend: Any) -> None:
    x = torch.randn(1, 2, 16, 8)
    with pytest.raises(ConfigurationError, match="mixes the 16 positions"), OtherAttention(ContextParallel(), 16):
        attend(x, x, x)
