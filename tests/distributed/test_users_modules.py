"""Modules, loaders and callbacks as users write them: the same as in stock Lightning on one device, on any ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torchmetrics import MeanMetric

from moe_lightning import ConfigurationError, auxiliary_loss
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import StreamDropout
from tests.distributed.harness import RankFailure, run_pooled, run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, quiet, quiet_trainer
from tests.parameters import slow
from tests.programs import TESTS, run_program

Options = dict[str, Any]


class Seen(pl.Callback):
    """Every metric after every batch and every validation."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []

    def _look(self, trainer: pl.Trainer) -> None:
        self.values += [(name, float(value)) for name, value in sorted(trainer.callback_metrics.items())]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: Any) -> None:
        self._look(trainer)


class Base(OwnModule):
    """Logs on steps and on epochs, with a metric of its own, and validates on any number of loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def nats(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.embed(x)
        return functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.nats(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss + auxiliary_loss(self)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.nats(batch)
        self.log("val", loss, sync_dist=True)
        self.mean.update(loss, len(batch[0]))
        self.log("mean", self.mean)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.out(self.embed(batch[0])).argmax(dim=-1)


class TwoPlayers(Base):
    """Manual optimization with two optimizers that take turns, as a GAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic: nn.Module = nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        player, critic = self.optimizers()  # type: ignore[misc, attr-defined]
        hidden = self.embed(batch[0])
        self.toggle_optimizer(player)
        loss = self.nats(batch) + 0.1 * functional.softplus(-self.critic(hidden + self.moe(hidden))).mean()
        self.log("train", loss, sync_dist=True)
        self.manual_backward(loss + auxiliary_loss(self))
        player.step()
        player.zero_grad()
        self.untoggle_optimizer(player)
        self.toggle_optimizer(critic)
        h = self.embed(batch[0])
        opposite = functional.softplus(self.critic((h + self.moe(h)).detach())).mean()
        self.log("critic", opposite, sync_dist=True)
        self.manual_backward(opposite)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)

    def configure_optimizers(self) -> Any:
        player = [*self.embed.parameters(), *self.moe.parameters(), *self.out.parameters()]
        return [torch.optim.AdamW(player, lr=3e-3), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


class OtherPlayersGradients(TwoPlayers):
    """The first player's loss leaves gradients in the critic, which clears them before its own turn."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))  # under zero1 of several ranks

    def training_step(self, batch: Any, batch_idx: int) -> None:
        player, critic = self.optimizers()  # type: ignore[misc, attr-defined]
        hidden = self.embed(batch[0])
        loss = self.nats(batch) + functional.softplus(-self.critic(hidden + self.moe(hidden))).mean()
        self.log("train", loss, sync_dist=True)
        player.zero_grad()
        self.manual_backward(loss + auxiliary_loss(self))
        player.step()
        critic.zero_grad()
        self.manual_backward(functional.softplus(self.critic(self.embed(batch[0]).detach())).mean())
        self.clip_gradients(critic, gradient_clip_val=0.1)
        critic.step()


class AccumulatingPlayers(TwoPlayers):
    """Both players sum the gradients of two batches before they step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_last = bool(batch_idx % 2)
        for optimizer, is_critic in zip(self.optimizers(), (False, True), strict=True):  # type: ignore[arg-type]
            with optimizer.toggle_model(sync_grad=is_last):
                hidden = self.embed(batch[0])
                hidden = hidden + self.moe(hidden)
                against = functional.softplus(self.critic(hidden.detach() if is_critic else -hidden)).mean()
                loss = against if is_critic else self.nats(batch) + against
                self.log("critic" if is_critic else "train", loss, sync_dist=True)
                self.manual_backward(loss)
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()


class LinearProbe(Base):
    """Trains its last layer, and leaves the gradients of the others, which are not frozen, to add up; clips by all."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.parameters() if p.grad is not None], 0.5)
        self.log("norm", float(norm))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.out.parameters(), lr=0.5)


class UpdatesEverySecond(Base):
    """Computes the gradients of every second batch for itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(optimizer_closure)
        else:
            optimizer_closure()


class ClearsEverySecond(UpdatesEverySecond):
    """Lets the gradients of two batches add up before an update."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClippedByGroup(Base):
    """Clips each group by its own norm."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], group["most"])

    def configure_optimizers(self) -> Any:
        parts = ((self.embed, 0.01), (self.moe, 0.02), (self.out, 0.03))
        groups = [{"params": [*part.parameters()], "most": most} for part, most in parts]
        return torch.optim.SGD(groups, lr=0.5)


class StepsInHook(Base):
    """Calls backward and steps once the batch has ended."""

    loss: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.loss = self.nats(batch)
        self.log("train", self.loss, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class LayersInTurn(Base):
    """Every second batch goes through another MoE layer, and what rests is neither decayed nor moved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = MoELayer(32, 48, num_experts=4)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        layer, h = (self.moe, self.other)[batch_idx % 2], self.embed(batch[0])
        loss = functional.cross_entropy(self.out(h + layer(h)).flatten(0, 1), batch[1].flatten())
        self.log("train", loss, sync_dist=True)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.5)


class GroupsByAttribute(Base):
    """Trains parameters with an attribute by a rate of their own."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.out.weight, *self.moe.experts.parameters()):
            parameter.is_slow = True  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        slow = [p for p in self.parameters() if hasattr(p, "is_slow")]
        fast = [p for p in self.parameters() if not hasattr(p, "is_slow")]
        return torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": fast}], lr=0.5)


class SparseTable(Base):
    """Gradients of the embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Named(Base):
    """Batches are dictionaries."""

    def nats(self, batch: Any) -> Tensor:
        return super().nats((batch["x"], batch["y"]))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.nats(batch), sync_dist=True, batch_size=len(batch["x"]))


class Ragged(Base):
    """Batches are lists of sequences of unlike lengths; the loss is a mean over samples."""

    def nats(self, batch: Any) -> Tensor:
        return torch.stack([super(Ragged, self).nats((x[None], y[None])) for x, y in zip(*batch, strict=True)]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.nats(batch)
        self.log("train", loss, sync_dist=True, batch_size=len(batch[0]))
        return loss


class Unfreezing(pl.Callback):
    """Trains the embedding from the second epoch on."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.embed.requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.embed.requires_grad_(trainer.current_epoch > 0)


class Average(pl.Callback):
    """An exponential moving average of the module, copied after its first step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self.copy = copy.deepcopy(module).eval()
        with torch.no_grad():
            for mine, theirs in zip(self.copy.parameters(), module.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
            module.log("average", self.copy.nats(batch), sync_dist=True)


def as_dict(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(part) for name, part in zip("xy", zip(*samples, strict=True), strict=True)}


def as_lists(samples: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    lengths = [4 + int(x[0]) % 9 for x, _ in samples]
    return [
        [x[:n] for (x, _), n in zip(samples, lengths, strict=True)],
        [y[:n] for (_, y), n in zip(samples, lengths, strict=True)],
    ]


def tokens(size: int, batch: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(RandomTokens(size), batch_size=batch, **options)


@dataclass(frozen=True, kw_only=True)
class Case:
    module: type[Base] = Base
    train: Callable[[], Any]
    val: tuple[Callable[[], Any], ...] = ()
    options: Options = field(default_factory=dict)
    callbacks: tuple[type[pl.Callback], ...] = ()
    strategy: Options = field(default_factory=dict)


CASES = {
    "in order": Case(train=tokens(18, 6)),
    "seven samples": Case(train=tokens(7, 4)),
    "fewer than a batch": Case(train=tokens(5, 8)),
    "one is left": Case(train=tokens(10, 3), options={"max_epochs": 3}),
    "drop last": Case(train=tokens(11, 4, drop_last=True)),
    "one to validate": Case(train=tokens(24, 6), val=(tokens(1, 4),)),
    "odd validations": Case(train=tokens(24, 6), val=(tokens(9, 4), tokens(5, 1), tokens(7, 3, drop_last=True))),
    "accumulated": Case(train=tokens(24, 4), options={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "unfrozen while accumulating": Case(
        train=tokens(24, 6), options={"accumulate_grad_batches": 2}, callbacks=(Unfreezing,)
    ),
    "limited": Case(
        train=tokens(30, 4), val=(tokens(5, 2),), options={"limit_train_batches": 3, "limit_val_batches": 1}
    ),
    "overfitted": Case(train=tokens(30, 4, shuffle=True), options={"overfit_batches": 2}),
    "two players": Case(module=TwoPlayers, train=tokens(13, 6), strategy={"find_unused_parameters": True}),
    "dictionaries": Case(
        module=Named, train=tokens(13, 6, collate_fn=as_dict), val=(tokens(3, 2, collate_fn=as_dict),)
    ),
    "ragged": Case(module=Ragged, train=tokens(13, 6, collate_fn=as_lists)),
    "averaged": Case(train=tokens(24, 6), callbacks=(Average,)),
    "other players' gradients": Case(
        module=OtherPlayersGradients, train=tokens(13, 6), strategy={"find_unused_parameters": True}
    ),
    "layers in turn": Case(module=LayersInTurn, train=tokens(18, 6), strategy={"find_unused_parameters": True}),
    "clipped by group": Case(module=ClippedByGroup, train=tokens(18, 6)),
    "steps in a hook": Case(module=StepsInHook, train=tokens(13, 6)),
    "sparse gradients": Case(module=SparseTable, train=tokens(13, 6)),
    "accumulating players": Case(
        module=AccumulatingPlayers, train=tokens(24, 6), strategy={"find_unused_parameters": True}
    ),
    "linear probe": Case(module=LinearProbe, train=tokens(24, 6)),
    "accumulated probe": Case(module=LinearProbe, train=tokens(24, 3), options={"accumulate_grad_batches": 2}),
    "groups by attribute": Case(module=GroupsByAttribute, train=tokens(18, 6)),
    "updates every second": Case(module=UpdatesEverySecond, train=tokens(24, 6)),
    "clears every second": Case(module=ClearsEverySecond, train=tokens(24, 6)),
}


def fit(rank: int, world_size: int, name: str, strategy: Options | None) -> dict[str, Any]:
    """Under the strategy, or under stock Lightning where it is None."""
    case, seen = CASES[name], Seen()
    options = {"max_epochs": 2, "callbacks": [*(kind() for kind in case.callbacks), seen]} | case.options
    trainer = trainer_of(rank, world_size, strategy, **options)
    module = case.module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, case.train(), [loader() for loader in case.val] or None)
        predicted = trainer.predict(module, tokens(7, 3)())
    assert predicted is not None
    state = trainer.strategy.lightning_module_state_dict()
    return {
        "metrics": seen.values,
        "steps": trainer.global_step,
        "state": {key: tensor.numpy() for key, tensor in state.items()},
        "predicted": [part.numpy() for part in predicted],
    }


def stock_trainer(**options: Any) -> pl.Trainer:
    quiet()
    pl.seed_everything(7, verbose=False)
    return quiet_trainer(**options)


def trainer_of(rank: int, world_size: int, strategy: Options | None, **options: Any) -> pl.Trainer:
    """A Trainer under the strategy, or under stock Lightning where it is None."""
    return stock_trainer(**options) if strategy is None else make_trainer(rank, world_size, strategy, **options)


@cache
def stock(name: str) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, fit, name, None)[0]
    return result


def assert_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["steps"] == expected["steps"]
    assert found["metrics"]
    assert [name for name, _ in found["metrics"]] == [name for name, _ in expected["metrics"]]
    values, wanted = ([value for _, value in result["metrics"]] for result in (found, expected))
    np.testing.assert_allclose(values, wanted, rtol=0, atol=tolerance)
    for name, tensor in found["state"].items():
        np.testing.assert_allclose(tensor, expected["state"][name], rtol=0, atol=5 * tolerance, err_msg=name)


ALONE = ("ragged", "accumulated", "two players")
"""What one rank does by default, of what several ranks all do: samples, steps, optimizers."""


@pytest.mark.parametrize("name", [name if name in ALONE else slow(name) for name in CASES])
def test_one_rank_does_what_stock_lightning_does(name: str) -> None:
    found = run_pooled(1, fit, name, {})[0]
    assert_alike(found, stock(name), 1e-6)
    for mine, theirs in zip(found["predicted"], stock(name)["predicted"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


FEW_OF_SEVERAL_RANKS = (
    *("in order", "fewer than a batch", "accumulated", "unfrozen while accumulating", "limited", "two players"),
    *("ragged", "accumulating players", "layers in turn", "steps in a hook"),
)
"""Cases of the default run."""


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(
            (name, 2 + number % 2) if name in FEW_OF_SEVERAL_RANKS else slow(name, 2 + number % 2)
            for number, name in enumerate(CASES)
        ),
        slow("one to validate", 4),
    ],
)
def test_several_ranks_do_it_too(name: str, world_size: int) -> None:
    ranks = run_pooled(world_size, fit, name, CASES[name].strategy)
    for result in ranks:
        assert_alike(result, stock(name), 1e-5)
    for batch, whole in enumerate(stock(name)["predicted"]):
        np.testing.assert_array_equal(np.concatenate([result["predicted"][batch] for result in ranks]), whole)


@pytest.mark.parametrize("name", ["two players", "other players' gradients", slow("accumulating players")])
def test_optimizers_clear_and_freeze_what_other_ranks_update(name: str) -> None:
    strategy = {"dense": "zero1", "find_unused_parameters": True}
    for result in run_pooled(2, fit, name, strategy):
        assert_alike(result, stock(name), 1e-5)


def test_hooks_see_the_whole_groups_of_an_optimizer() -> None:
    for result in run_pooled(2, fit, "clipped by group", {"dense": "zero1"}):
        assert_alike(result, stock("clipped by group"), 1e-5)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("accumulated probe", {"replicas": 2}),
        slow("accumulated probe", {"dense": "fsdp"}),
        slow("linear probe", {"dense": "zero1"}),
        ("updates every second", {"dense": "zero1"}),
        slow("clears every second", {"dense": "zero1"}),
        slow("clears every second", {"replicas": 2}),
    ],
)
def test_gradients_from_before_a_step_are_summed_once(name: str, strategy: Options) -> None:
    for result in run_pooled(2, fit, name, strategy):
        assert_alike(result, stock(name), 1e-5)


@pytest.mark.parametrize("strategy", [{"dense": "fsdp"}, slow({})])
def test_parameters_keep_their_attributes(strategy: Options) -> None:
    for result in run_pooled(2, fit, "groups by attribute", strategy):
        assert_alike(result, stock("groups by attribute"), 1e-5)


class PastLightning(TwoPlayers):
    """Steps an optimizer of torch in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)[0]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(self.nats(batch))
        optimizer.step()


def test_an_update_past_lightning_is_refused_on_several_ranks() -> None:
    (alone,) = run_pooled(1, steps_past_lightning)
    assert alone == 0  # as Lightning counts them
    with pytest.raises(RankFailure, match=r"AdamW is stepped past Lightning.*: step what self\.optimizers\(\) returns"):
        run_pooled(2, steps_past_lightning)


def steps_past_lightning(rank: int, world_size: int) -> int:
    trainer = make_trainer(rank, world_size, {"find_unused_parameters": True}, max_epochs=1)
    trainer.fit(PastLightning(), tokens(12, 6)())
    return trainer.global_step


# ---------------------------------------------------------------------- loaders that are no list of indices


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = RandomTokens(len(self))
        return iter([data[index] for index in range(len(data))])


class Halves(DataLoader[Any]):
    """Iterates in its own way."""

    def __iter__(self) -> Any:
        return iter([batch for number, batch in enumerate(super().__iter__()) if number % 2])


class Batches:
    """No DataLoader at all."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter(tokens(7, 4)())


LOADERS: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "halves": lambda: Halves(RandomTokens(12), batch_size=3),
    "batches": lambda: Batches(),
}
WEIGHTS = [float(1 + index % 5) for index in range(20)]


class Noisy(Base):
    """Draws a dropout mask of each sample in every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = StreamDropout(0.5)
        self.masks: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.strategy.steps.batch is None or not self.trainer.strategy.steps.is_dummy_batch:  # type: ignore[attr-defined]
            self.masks.append(self.dropout(torch.ones(len(batch[0]), 64)))
        return super().training_step(batch, batch_idx)


def fit_loader(rank: int, world_size: int, kind: str, strategy: Options | None) -> Any:
    seen = Seen()
    options: Options = {"max_steps": 6, "callbacks": [seen]}
    trainer = trainer_of(rank, world_size, strategy, **options)
    if kind == "weighted":
        loader = DataLoader(RandomTokens(20), batch_size=6, sampler=WeightedRandomSampler(WEIGHTS, 20))
    else:
        loader = LOADERS[kind]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Base(), loader)
    except ConfigurationError as error:
        return str(error)
    return seen.values


@pytest.mark.parametrize("kind", LOADERS)
def test_one_rank_takes_any_loader_as_it_is(kind: str) -> None:
    (found,), (expected,) = run_pooled(1, fit_loader, kind, {}), run_pooled(1, fit_loader, kind, None)
    assert [name for name, _ in found] == [name for name, _ in expected]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=0, atol=1e-6)


def fit_noisy(rank: int, world_size: int) -> list[Tensor]:
    module = Noisy()
    trainer = make_trainer(rank, world_size, max_steps=4, limit_val_batches=2, num_sanity_val_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, LOADERS["halves"](), tokens(4, 2)())
    return module.masks


def test_noise_of_a_loader_without_positions_changes_after_a_validation() -> None:
    (masks,) = run_pooled(1, fit_noisy)
    assert len(masks) == 4
    assert not any(torch.equal(first, second) for first, second in combinations(masks, 2))


class NoisyByHand(Noisy):
    """Accumulates the gradients of two batches by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def fit_noisy_by_hand(rank: int, world_size: int) -> list[Tensor]:
    module = NoisyByHand()
    make_trainer(rank, world_size, max_epochs=1).fit(module, tokens(16, 4)())
    return module.masks


def test_batches_that_are_accumulated_by_hand_differ_in_their_noise() -> None:
    (alone,), several = run_pooled(1, fit_noisy_by_hand), run_pooled(2, fit_noisy_by_hand)
    assert len(alone) == 4
    assert not any(torch.equal(first, second) for first, second in combinations(alone, 2))
    for number, mask in enumerate(alone):
        assert torch.equal(torch.cat([masks[number] for masks in several]), mask)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("halves", "Halves iterates in its own way"),
        ("batches", "type Batches cannot be cut over 2 ranks"),
    ],
)
def test_several_ranks_refuse_what_cannot_be_cut(kind: str, sentence: str) -> None:
    for message in run_pooled(2, fit_loader, kind, {}):
        assert sentence in message
        assert "\n" not in message


@pytest.mark.slow
def test_a_weighted_sampler_is_cut_over_ranks() -> None:
    (alone,) = run_pooled(1, fit_loader, "weighted", {})
    assert len(alone) >= 6
    for found in run_pooled(3, fit_loader, "weighted", {}):
        assert [name for name, _ in found] == [name for name, _ in alone]
        np.testing.assert_allclose([v for _, v in found], [v for _, v in alone], rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- modules that give a law up


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def nats(self, batch: Any) -> Tensor:
        return super().nats(batch) + 0.0 * self.norm(self.embed(batch[0])).mean()


class PartCompiled(Base):
    """The part with experts is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = torch.compile(self.moe, backend="eager")


class CompiledInPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class FromIterator(Base):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.nats(batch)


def fit_said(rank: int, world_size: int, kind: str) -> list[str]:
    trainer = make_trainer(rank, world_size, {}, max_steps=2)
    kinds: dict[str, Callable[[], Any]] = {
        "normed": Normed,
        "compiled": lambda: torch.compile(Base()),
        "part": PartCompiled,
        "in place": CompiledInPlace,
        "iterator": FromIterator,
    }
    module = kinds[kind]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, tokens(12, 6)())
        except ConfigurationError as error:
            return [str(error)]
    return [str(w.message) for w in caught if "BatchNorm" in str(w.message)]


def test_batch_statistics_of_a_rank_are_named_once() -> None:
    assert run_ranks(1, fit_said, "normed") == [[]]
    first, _ = run_ranks(2, fit_said, "normed")
    assert len(first) == 1
    assert "BatchNorm takes its statistics from each rank's part" in first[0]


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_compiled_module_is_refused(world_size: int) -> None:
    for messages in run_pooled(world_size, fit_said, "compiled"):
        assert "torch.compile of the whole module" in messages[0]
        assert "CompileDense()" in messages[0]


@pytest.mark.parametrize(("kind", "name"), [("part", "moe"), ("in place", "the whole module")])
def test_a_compiled_part_with_experts_is_refused(kind: str, name: str) -> None:
    ((message,),) = run_pooled(1, fit_said, kind)
    assert message.startswith(f"torch.compile of {name}, which has experts, cannot follow tokens")


def test_a_step_that_fetches_its_batches_needs_one_rank() -> None:
    assert run_pooled(1, fit_said, "iterator") == [[]]
    for (message,) in run_pooled(2, fit_said, "iterator"):
        assert message.startswith("a step with dataloader_iter fetches its batches itself")


# ---------------------------------------------------------------------- checkpoints and prompts


def fit_part(rank: int, world_size: int, strategy: Options | None, steps: int, paths: tuple[str | None, str]) -> Any:
    seen = Seen()
    options: Options = {"max_steps": steps, "callbacks": [seen]}
    trainer = trainer_of(rank, world_size, strategy, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Base(), tokens(30, 6)(), ckpt_path=paths[0])
    trainer.save_checkpoint(paths[1])
    return seen.values, trainer.global_step


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_inside_an_epoch_goes_on_in_stock_lightning(world_size: int, tmp_path: Path) -> None:
    ours, theirs, back = (str(tmp_path / f"{name}.ckpt") for name in ("ours", "theirs", "back"))
    run_pooled(world_size, fit_part, {}, 3, (None, ours))
    ((values, steps),) = run_pooled(1, fit_part, None, 6, (ours, theirs))
    assert steps == 6
    assert len([name for name, _ in values if name == "train"]) == 3
    for _, steps in run_pooled(world_size, fit_part, {}, 7, (theirs, back)):
        assert steps == 7


PROMPT = """
import sys
sys.ps1 = ">>> "
import lightning as L
from tests.distributed.test_users_modules import Base, tokens
for devices in (1, 2):
    trainer = L.Trainer(strategy="expert_parallel", accelerator="cpu", devices=devices, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Base(), tokens(12, 6)())
    print("trained", trainer.global_step)
"""


@pytest.mark.slow
def test_one_rank_trains_at_the_prompt_and_several_are_refused() -> None:
    done = run_program("-c", PROMPT, variables=TESTS)
    assert "trained 2" in done.stdout
    assert "interactive environment" in done.stderr


# ----------------------------------------------------------------------
# What users and Lightning ask of a training loader finds what a DataLoader has.


def look(rank: int, world_size: int) -> list[Any]:
    data, found = RandomTokens(24), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_connector, "suggested_max_num_workers", lambda _: 8)
        for options in ({"shuffle": True}, {"sampler": WeightedRandomSampler([1.0] * 24, 24)}):
            trainer = make_trainer(rank, world_size, max_steps=1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.fit(OwnModule(), DataLoader(data, batch_size=6, **options), DataLoader(data, batch_size=6))  # type: ignore[arg-type]
            loader = trainer.train_dataloader
            words = [str(w.message) for w in caught if "does not have many workers" in str(w.message)]
            is_given = loader.sampler is options.get("sampler") or isinstance(loader.sampler, RandomSampler)
            found.append([is_given, loader.dataset is data, loader.batch_size, loader.num_workers, len(words)])
            found[-1].append("train_dataloader" in words[0] if words else "")
    return found


def test_a_loader_that_was_cut_has_what_the_users_has() -> None:
    for world_size in (1, 2):
        for found in run_pooled(world_size, look)[0]:
            assert found == [True, True, 6 // world_size, 0, 1, True]
