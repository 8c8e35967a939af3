"""Nothing of a training, or of a world, that has ended reaches the next one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.spike_guard import SpikeGuard
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.strategies import watch
from moe_lightning.strategies.precision import AgreedScaler
from moe_lightning.strategies.state_check import StateCheck
from moe_lightning.strategies.watch import FiniteWatch
from moe_lightning.strategies.worlds import Worlds
from tests.distributed.harness import connect, run_pooled, run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer


class Failing(OwnModule):
    """Counts its steps in a buffer; fails in one, or has a loss that is no number."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.fails_at, self.is_bad_at = 2, -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        if batch_idx == self.fails_at:
            raise ValueError("an error of the user's")
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx == self.is_bad_at else loss


class Replays(pl.Callback):
    """Keeps whether steps of a checkpoint were to be repeated."""

    found: list[object] = []  # noqa: RUF012

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = trainer.strategy.state  # type: ignore[attr-defined]
        self.found.append((state.window_replay, state.restored))


def fails_then_fits(rank: int, world_size: int) -> tuple[float, list[object]]:
    trainer = make_trainer(rank, world_size, {"stop_on_nan": "skip"}, callbacks=[Replays()], max_steps=6)
    module, data = Failing(), DataLoader(RandomTokens(), batch_size=12)
    with pytest.raises(ValueError, match="an error of the user's"):
        trainer.fit(module, data)
    trainer.strategy.state.window_replay = trainer.strategy.state.restored = object()  # type: ignore[attr-defined]
    module.steps.fill_(100)
    module.fails_at, module.is_bad_at = -1, 0
    trainer.fit(module, data)
    return float(module.steps), Replays.found


def test_a_failed_fit_leaves_nothing_for_the_next() -> None:
    """A step that is left out restores the buffers of its own fit, and nothing is repeated of another's checkpoint."""
    ((steps, replays),) = run_ranks(1, fails_then_fits)
    assert steps >= 100
    assert replays == [(None, None)] * 2


class Mixing(OwnModule):
    """Its optimizer mixes the rows of a stack."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


def fits_another_optimizer(rank: int, world_size: int) -> str:
    trainer, data = make_trainer(rank, world_size, max_steps=1), DataLoader(RandomTokens(), batch_size=12)
    trainer.fit(OwnModule(), data)
    with pytest.raises(ConfigurationError) as told:
        trainer.fit(Mixing(), data)
    return str(told.value)


def test_the_optimizers_of_every_fit_are_checked() -> None:
    assert all("Adafactor" in told for told in run_pooled(2, fits_another_optimizer))


def overflows(rank: int, world_size: int) -> bool:
    """Overflow of a fused optimizer, whose gradients only this scaler divides; the first rank has none."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    worlds: Any = SimpleNamespace(present=connect())
    scaler = AgreedScaler(GradScaler("cpu"), worlds, lambda _: [parameter])
    scaler.scale(torch.ones(()))
    if rank:
        parameter.grad = torch.full((2,), math.inf)
    return scaler.overflows(optimizer)


def test_ranks_without_gradients_learn_of_overflows() -> None:
    assert run_pooled(2, overflows) == [True, True]


def warns_in_each_fit(rank: int, world_size: int) -> list[str]:
    told: list[str] = []
    watch.write_to_terminal = told.append
    data = DataLoader(RandomTokens(), batch_size=12)
    for _ in range(2):
        trainer, module = make_trainer(rank, world_size, max_steps=2), Failing()
        module.fails_at, module.is_bad_at = -1, 0
        trainer.fit(module, data)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, data)
    return told


def test_every_fit_warns_of_its_losses() -> None:
    lines = [line for own in run_ranks(2, warns_in_each_fit) for line in own]
    assert len(lines) == 3
    assert all(line.startswith("warning: the loss is nan") for line in lines)


def test_updates_are_counted_anew_that_were_left_out() -> None:
    finite = FiniteWatch("skip")
    finite._skipped = 3
    finite.forget_step()
    assert finite._skipped == 0
    finite.ignore_spikes()
    finite.end()
    assert finite._watches_spikes


def test_writes_of_users_are_expected_again_in_another_world() -> None:
    """Ranks that join have seen none, and all have to judge alike."""
    worlds, state = Worlds(), SimpleNamespace(trainer=SimpleNamespace(global_step=0))
    worlds.set_present(World.single())
    check = StateCheck(worlds, state, every=0)  # type: ignore[arg-type]
    check._counts_writes = False
    check.before_step(1)
    assert check._counts_writes


def test_callbacks_forget_another_training() -> None:
    unused: Any = None
    telemetry = Telemetry()
    telemetry._health._shares[0] = [[1.0]]  # type: ignore[index]
    telemetry._comparison._reported.add((0, 1, "median loss"))
    telemetry.on_fit_start(unused, unused)
    assert not telemetry._health._shares
    assert not telemetry._comparison._reported
    balancer = LoadBalancer()
    balancer.load_state_dict({"num_layers": 1, "interval": 8, "layers": {"0": {"load": [1], "average": None}}})
    balancer.setup(unused, unused, "fit")
    assert balancer.state_dict() == {}


def test_no_state_is_copied_while_steps_are_repeated() -> None:
    guard = SpikeGuard()
    strategy: Any = SimpleNamespace(state=SimpleNamespace(window_replay=object()))
    guard._copy(strategy, 3, 30)
    assert not guard._copies
