"""Losses of users that are not means over samples: masked means and sums are those of the global batch."""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from moe_lightning import ConfigurationError, ContextParallel, auxiliary_loss, global_mean, global_sum
from moe_lightning.data.sampler import StepSlice
from moe_lightning.parallel.context import World
from moe_lightning.strategies.steps import StepWeights
from tests.distributed.harness import connect, run_pooled
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer, train
from tests.parameters import slow


class Masked(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose targets are ignored in unlike numbers, every fifth one's altogether."""

    def __init__(self, size: int = 45) -> None:
        self.tokens = RandomTokens(size)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.tokens[index]
        kept = 0 if index % 5 == 0 else 1 + index * 7 % 16
        return x, y.masked_fill(torch.arange(len(y)) >= kept, -100)


class MaskedMean(OwnModule):
    """The mean over the targets that are not ignored, with the load-balancing loss beside it."""

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        h = self.embed(x)
        logits = self.out(h + self.moe(h)).flatten(0, 1)
        return functional.cross_entropy(logits, y.flatten()), (y != -100).sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = global_mean(self, *self.losses(batch))
        self.log("train/loss", loss)
        return loss + auxiliary_loss(self)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, count = self.losses(batch)
        self.log("val/loss", global_mean(self, loss, count), sync_dist=True)
        self.log("val/by_target", loss.nan_to_num(), sync_dist=True, batch_size=int(count))


class MaskedManually(MaskedMean):
    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class InParts(MaskedMean):
    """Nothing mixes positions: it says that it knows of parts by keeping a context."""

    def __init__(self) -> None:
        super().__init__()
        self.context = ContextParallel()


class SumOfSamples(OwnModule):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        logits = self.out(h + self.moe(h)).flatten(0, 1)
        loss = global_sum(self, functional.cross_entropy(logits, y.flatten(), reduction="sum"))
        self.log("train/loss", loss, sync_dist=True)
        return loss + auxiliary_loss(self)


class SumInParts(SumOfSamples):
    def __init__(self) -> None:
        super().__init__()
        self.context = ContextParallel()


class PlainMaskedMean(InParts):
    """What breaks the law unless it is said."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self.losses(batch)
        self.log("train/loss", loss.nan_to_num(), sync_dist=True)
        return loss.nan_to_num() + auxiliary_loss(self)


MODULES = {
    "mean": MaskedMean,
    "manual": MaskedManually,
    "sum": SumOfSamples,
    "plain": PlainMaskedMean,
    "mean in parts": InParts,
    "sum in parts": SumInParts,
}


def fit(rank: int, world_size: int, kind: str, strategy: dict[str, Any], micros: int = 1) -> dict[str, Any]:
    recorder = Recorder()
    trainer = make_trainer(
        rank, world_size, strategy, callbacks=[recorder], max_steps=5, accumulate_grad_batches=micros
    )
    data = RandomTokens(45) if kind.startswith("sum") else Masked()
    held_out = None if kind.startswith(("sum", "plain")) else DataLoader(Masked(13), batch_size=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(MODULES[kind](), DataLoader(data, batch_size=12 // micros, shuffle=True), held_out)
    return {
        "losses": recorder.losses,
        "validations": recorder.validations,
        "state": {name: t.numpy() for name, t in trainer.strategy.lightning_module_state_dict().items()},
        "warnings": [str(w.message) for w in caught if "different numbers of targets" in str(w.message)],
    }


@cache
def reference(kind: str, micros: int = 1) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, fit, kind, {}, micros)[0]
    return result


@pytest.mark.parametrize(
    ("kind", "world_size", "strategy", "micros"),
    [
        slow("mean", 2, {}, 1),
        slow("mean", 3, {"replicas": 2}, 1),
        slow("mean", 4, {"dense": "zero1"}, 1),  # cut optimizer states
        slow("mean", 2, {"replicas": 2}, 3),  # replicas, micro-batches
        slow("mean", 4, {}, 2),
        ("manual", 3, {}, 1),
        slow("sum", 2, {}, 1),
        slow("sum", 3, {"replicas": 2}, 1),
        slow("sum", 4, {}, 3),
        slow("mean in parts", 4, {"mesh": {"cp": 2}}, 1),
        slow("mean in parts", 4, {"mesh": {"cp": 2}}, 3),
        slow("sum in parts", 4, {"mesh": {"cp": 2}}, 3),
        ("sum in parts", 4, {"mesh": {"cp": 2}}, 1),
    ],
)
def test_it_is_the_loss_of_the_global_batch(kind: str, world_size: int, strategy: dict[str, Any], micros: int) -> None:
    alone = reference(kind, micros)
    ranks = run_pooled(world_size, fit, kind, strategy, micros)
    scale = 200.0 if kind.startswith("sum") else 1.0  # a sum over 192 tokens
    for result in ranks:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=1e-5 * scale)
        np.testing.assert_allclose(result["validations"], alone["validations"], rtol=0, atol=1e-5)
        assert not result["warnings"]
    for name, values in alone["state"].items():
        np.testing.assert_allclose(ranks[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


def test_a_masked_mean_that_nobody_speaks_of_is_named_once() -> None:
    alone, ranks = reference("plain"), run_pooled(2, fit, "plain", {})
    assert len(ranks[0]["warnings"]) == 1
    assert "moe_lightning.global_mean" in ranks[0]["warnings"][0]
    assert not alone["warnings"]
    assert np.abs(np.subtract(ranks[0]["losses"], alone["losses"])).max() > 1e-3


def fit_evenly_ignored(rank: int, world_size: int) -> list[str]:
    """Every sample ignores as many targets, but their parts do not."""
    trainer = make_trainer(rank, world_size, {"mesh": {"cp": 2}}, max_steps=2)
    x, y = next(iter(DataLoader(RandomTokens(8), batch_size=8)))
    y[:, :6] = -100
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(PlainMaskedMean(), DataLoader(TensorDataset(x, y), batch_size=8))
    return [str(w.message) for w in caught if "different numbers of targets" in str(w.message)]


def test_parts_of_samples_ignore_unlike_numbers_of_targets() -> None:
    assert len(run_pooled(2, fit_evenly_ignored)[0]) == 1


def means(rank: int, world_size: int) -> list[float]:
    """global_mean of random losses and weights, some of them zero."""
    world, weights, generator = connect(), StepWeights(), torch.Generator().manual_seed(rank)
    here = StepSlice(step=0, micro=0, num_micros=1, offset=rank, count=1, micro_total=world_size, step_total=world_size)
    found = []
    for _ in range(600):
        loss = torch.rand((), generator=generator)
        weight = torch.randint(5000, (), generator=generator)
        found.append(float(weights.weigh(loss, weight, here, world)))
    return found


@pytest.mark.slow
def test_the_mean_is_the_same_to_the_last_bit_on_all_ranks() -> None:
    first, *others = run_pooled(3, means)
    assert all(found == first for found in others)


class NamedByBatch(OwnModule):
    """Logs the number of each batch of a validation under a name that alternates, on ranks in other orders."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        name = "ab"[(self.global_rank + batch_idx) % 2]
        self.log(f"val/{name}", float(batch_idx), sync_dist=True)


def validate_by_name(rank: int, world_size: int, batches: int) -> dict[str, float] | str:
    trainer = make_trainer(rank, world_size)
    try:
        trainer.validate(NamedByBatch(), DataLoader(RandomTokens(4 * batches), batch_size=4), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("batches", [1, 2])
def test_values_of_other_names_are_not_reduced_with_each_other(batches: int) -> None:
    refused = "some ranks have logged validation_step.val/a and others have not, and sync_dist=True reduces it over all"
    for found in run_pooled(2, validate_by_name, batches):
        if batches == 2:
            assert found == {"val/a": 0.5, "val/b": 0.5}
        else:
            assert str(found).startswith(refused)


class TwoTerms(OwnModule):
    """A masked mean beside a mean over samples, both of a dense layer."""

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.out(self.embed(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        return loss, (y != -100).sum(), 0.1 * logits.square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, count, other = self.losses(batch)
        return global_mean(self, loss, count) + other + 0.0 * self.moe(self.embed(batch[0])).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class WithoutTargets(Masked):
    """Of every twelve samples those from the fourth to the sixth have no target."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x, torch.full_like(y, -100) if 3 <= index % 12 < 6 else y


def two_terms(rank: int, world_size: int) -> list[Tensor]:
    trainer = make_trainer(rank, world_size, {}, max_steps=1, accumulate_grad_batches=4)
    module = TwoTerms()
    trainer.fit(module, DataLoader(WithoutTargets(12), batch_size=3))
    return [parameter.detach().clone() for parameter in (module.embed.weight, module.out.weight, module.out.bias)]


def test_a_mean_without_weight_leaves_the_others_of_its_micro_batch() -> None:
    weights = StepWeights()
    here = StepSlice(step=0, micro=0, num_micros=1, offset=0, count=2, micro_total=2, step_total=2)
    weights.begin(here)
    for weight in (3, 0):
        weights.weigh(torch.tensor(1.0), weight, here, World.single())
    assert float(weights.share(here)) == 1.0


def test_every_term_of_a_micro_batch_counts_by_its_targets() -> None:
    """By the rule's formula, in one backward pass of one process."""
    torch.manual_seed(7)
    before, *ranks = run_pooled(1, untrained)[0], *run_pooled(1, two_terms), *run_pooled(2, two_terms)
    module = TwoTerms()
    for parameter, value in zip((module.embed.weight, module.out.weight, module.out.bias), before, strict=True):
        parameter.data.copy_(value)
    micros = [module.losses(batch) for batch in DataLoader(WithoutTargets(12), batch_size=3)]
    assert [int(count) > 0 for _, count, _ in micros] == [True, False, True, True]
    total = sum(count for _, count, _ in micros)
    whole = sum(count * (loss.nan_to_num() + other) / total for loss, count, other in micros if count)
    whole.backward()
    parameters = (module.embed.weight, module.out.weight, module.out.bias)
    expected = [parameter.detach() - parameter.grad for parameter in parameters]  # type: ignore[operator]
    for found in ranks:
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-6)


def untrained(rank: int, world_size: int) -> list[Tensor]:
    make_trainer(rank, world_size, {})
    module = TwoTerms()
    return [parameter.detach().clone() for parameter in (module.embed.weight, module.out.weight, module.out.bias)]


# ---------------------------------------------------------------------- penalties on the weights of experts


class Penalized(OwnModule):
    """A penalty on experts as docs/limits.md says: each replica gets its whole gradient, once a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        experts = [p for p in self.moe.experts.parameters() if p.grad is not None]
        penalty = 0.5 * sum(p.square().sum() for p in experts)
        for parameter, gradient in zip(experts, torch.autograd.grad(penalty, experts), strict=True):  # type: ignore[arg-type]
            parameter.grad += gradient


@pytest.mark.parametrize("strategy", [slow({}), {"replicas": 2}])
def test_a_penalty_on_experts_is_that_of_one_rank(strategy: dict[str, Any]) -> None:
    options = partial(train, own_module=Penalized, steps=4, batch_size=5, dataset_size=11)
    (alone,) = run_pooled(1, options)
    for result in run_pooled(3, partial(options, strategy=strategy)):
        assert result["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)
