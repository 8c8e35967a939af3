"""Dense parameters cut by rows over ranks (dense=fsdp, hsdp): users' modules train alike, and nothing is left behind
when a world changes.
"""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_lightning import MoELayer, auxiliary_loss
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies import fsdp
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.same_training import reference as plain_reference
from tests.distributed.test_meshes import CASES, hooks_of, reference, run
from tests.distributed.training import BRIEF, train
from tests.parameters import slow


def gathering_ahead(rank: int, world_size: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "_gathers_ahead", lambda device: True)
        return train(rank, world_size, strategy={"dense": "fsdp"}, **BRIEF | CASES["uneven"])


def test_units_that_are_gathered_ahead_train_alike() -> None:
    """As on GPUs."""
    assert_same_training(reference("uneven"), run_pooled(2, gathering_ahead))


# ---------------------------------------------------------------------- users' modules


class Mixed(pl.LightningModule):
    """A user's module that calls itself, with a scalar parameter, a counting buffer, blocks in a list of lists, and a
    block that shares a weight with another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(32, 32), nn.Tanh()]) for _ in range(2)])
        self.ties = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)])
        self.ties[1].weight = self.ties[0].weight
        self.moe = MoELayer(32, 48, num_experts=6, router={"top_k": 2})
        self.out = nn.Linear(32, 64)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for linear, act in self.blocks:  # type: ignore[misc]
            h = h + act(linear(h))
        for tie in self.ties:
            h = h + tie(h)
        logits: Tensor = self.out(h + self.moe(h)) * self.scale
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        loss = nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss + auxiliary_loss(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, foreach=True)


class ScalarLater(Mixed):
    """The scalar is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.scale.requires_grad_(self.trainer.global_step >= 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Mixed, slow(ScalarLater)])
def test_a_users_module_trains_alike(kind: type[Mixed]) -> None:
    options: dict[str, Any] = {"own_module": kind, "trainer": {"gradient_clip_val": 0.5}}
    alone, ranks = run(1, **options)[0], run(2, strategy={"dense": "fsdp"}, **options)
    for result in ranks:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=TOLERANCE)
    for name, values in alone["state"].items():
        np.testing.assert_allclose(ranks[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


# ---------------------------------------------------------------------- from world to world


class WorldChanges(pl.Callback):
    """Undoes and cuts anew many times after the second step, as recoveries do.

    Attributes:
        turns: how many times, more than ten.
        kept: what stays of those after the tenth.
        changed: keys whose values did not.
    """

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.kept: dict[str, int] = {}
        self.changed: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        if trainer.global_step != 2:
            return
        state, parts, world, counts = strategy.state, strategy.state.parts, strategy.world, []
        before = {unit: {s: t.clone() for s, t in tensors.items()} for unit, tensors in parts.held().items()}
        for turn in range(self.turns):
            fetched = state.transfer.fetch(world, range(world.size), ())
            strategy.leave_world()
            parts.install(fetched, world)
            state.forget_update()
            strategy.steps.sequences.enter_world(strategy.world)
            strategy.configure_ddp()
            del fetched
            if turn in (9, self.turns - 1):
                counts.append(_held(pl_module))
        after = parts.held()
        assert {unit: tensors.keys() for unit, tensors in after.items()} == {u: t.keys() for u, t in before.items()}
        self.kept = {kind: late - counts[0][kind] for kind, late in counts[1].items()}
        self.changed = [
            f"{unit[0]}/{scope}"
            for unit, tensors in after.items()
            for scope, tensor in tensors.items()
            if not torch.equal(tensor, before[unit][scope])
        ]


def change_worlds(
    rank: int, world_size: int, chosen: dict[str, Any], turns: int
) -> tuple[dict[str, int], list[str], list[float]]:
    changes = WorldChanges(turns)
    losses = train(rank, world_size, strategy=chosen, callbacks=[changes], **BRIEF | {"steps": 4})["losses"]
    return changes.kept, changes.changed, losses


def _held(module: nn.Module) -> dict[str, int]:
    """What a process has that could stay: bytes of tensors, and numbers of the rest."""
    gc.collect()
    objects = gc.get_objects()
    storages = {t.data_ptr(): t.nbytes for t in objects if type(t) in (Tensor, nn.Parameter)}
    return {
        "hooks": hooks_of(module),
        "replaced": sum(name in part.__dict__ for part in module.modules() for name in ("forward", "training_step")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bytes": sum(storages.values()),
        "objects": len(objects) // 200,
    }


@pytest.mark.parametrize(
    ("strategy", "turns"),
    [
        ({"dense": "hsdp", "shard_size": 2}, 16),
        slow({"dense": "hsdp", "shard_size": 2}, 50),
        slow({"mesh": {"tp": 2}}, 50),
        slow({"mesh": {"cp": 2}}, 50),
        slow({"mesh": {"cp": 2}, "dense": "fsdp"}, 50),
        slow({"mesh": {"tp": 2}, "dense": "fsdp"}, 50),
        slow({"mesh": {"cp": 2, "tp": 2}}, 50),
    ],
    ids=str,
)
def test_many_worlds_leave_nothing_behind(strategy: dict[str, Any], turns: int) -> None:
    for kept, changed, losses in run_ranks(4, partial(change_worlds, chosen=strategy, turns=turns)):
        assert all(count <= 0 for count in kept.values()), kept
        assert not changed
        np.testing.assert_allclose(losses, plain_reference("plain")["losses"][:4], rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- refusals


class WithAdafactor(Mixed):
    """An optimizer with a statistic over whole parameters."""

    def __init__(self) -> None:
        super().__init__()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        experts = [p for n, p in self.named_parameters() if "experts" in n]
        dense = [p for n, p in self.named_parameters() if "experts" not in n]
        return torch.optim.Adafactor([{"params": dense}, {"params": experts}])


def refusal(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train(rank, world_size, own_module=WithAdafactor, strategy={"dense": "fsdp"}, steps=1)
    return str(caught.value)


def test_an_optimizer_over_whole_parameters_is_refused() -> None:
    assert all("Adafactor" in found for found in run_pooled(2, refusal))
