"""Dense parameters cut by rows over ranks (dense=fsdp, hsdp): the same loss, the same checkpoints, a share of the
bytes, and nothing left behind when it is undone.
"""

from __future__ import annotations

import gc
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, MoELayer, OptimizerConfig, auxiliary_loss
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.errors import ConfigurationError
from moe_lightning.state.tensors import is_cut, local
from moe_lightning.strategies import expert_parallel, fsdp
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from tests.distributed.harness import run_ranks
from tests.distributed.mesh_checkpoints import assert_read_to_the_bit, write
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.training import BRIEF, BRIEF_ACCUMULATION, TINY, RandomTokens, make_trainer, train
from tests.parameters import slow

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"batch_size": 13},
    "accumulate": BRIEF_ACCUMULATION,
    "noisy": KNOWN["noisy"],
    "tied": {**KNOWN["llama"], "model": {**KNOWN["llama"]["model"], "tie_embeddings": True}},
    "by value": {"trainer": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}},
}


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(world_size, partial(train, **BRIEF | options))
    return results


@cache
def reference(key: str) -> dict[str, Any]:
    return run(1, **CASES[key])[0]


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        slow("plain", 2, {"dense": "fsdp"}),
        slow("plain", 4, {"dense": "hsdp", "replicas": 2}),
        ("uneven", 3, {"dense": "fsdp"}),
        ("accumulate", 4, {"dense": "hsdp"}),
        slow("noisy", 2, {"dense": "fsdp", "replicas": 2}),
        ("tied", 4, {"dense": "hsdp", "shard_size": 2}),
        slow("tied", 3, {"dense": "fsdp"}),
        slow("by value", 2, {"dense": "fsdp"}),
        slow("uneven", 8, {"dense": "hsdp"}),
        slow("accumulate", 3, {"dense": "fsdp"}),
        slow("noisy", 4, {"dense": "hsdp"}),
    ],
)
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    assert_same_training(reference(key), run(ranks, strategy=strategy, **CASES[key]))


def test_units_that_are_gathered_ahead_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setattr(fsdp, "_gathers_ahead", lambda device: True)
    assert_same_training(reference("plain"), run(2, strategy={"dense": "fsdp"}))


# ---------------------------------------------------------------------- users' modules


class Mixed(pl.LightningModule):
    """A user's module that calls itself, with a scalar parameter, a counting buffer, blocks in a list of lists, and a
    block that shares a weight with another.
    """

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
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
        loss = loss + auxiliary_loss(self)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, foreach=True)


@pytest.mark.parametrize("manual", [slow(False), True])
def test_a_users_module_trains_alike(manual: bool) -> None:
    options: dict[str, Any] = {
        "own_module": partial(Mixed, manual=manual), "trainer": {"gradient_clip_val": None if manual else 0.5}
    }  # fmt: skip
    alone = run(1, **options)[0]
    for result in run(2, strategy={"dense": "fsdp"}, **options):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=TOLERANCE)
    ranks = run(2, strategy={"dense": "fsdp"}, **options)
    for name, values in alone["state"].items():
        np.testing.assert_allclose(ranks[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


def fit_twice(rank: int, world_size: int, *, room: int) -> tuple[list[bool], int, float, float]:
    """A module that two Trainers train one after the other, and what is left on it.

    Args:
        room: bytes that a rank may keep of the whole model.
    """
    expert_parallel.gather_limit = lambda _: room
    module = GPTModule(TINY, OptimizerConfig(lr=3e-3))
    loader = DataLoader(RandomTokens(), batch_size=12)
    kinds, losses = [], []
    hooks = _hooks(module)
    for _ in range(2):
        trainer = make_trainer(rank, world_size, {"dense": "fsdp"}, max_steps=3)
        trainer.fit(module, loader, loader)
        kinds.append(any(is_cut(p) for p in module.parameters()))
        losses.append(float(trainer.validate(module, loader, verbose=False)[0]["val/loss"]))
    return kinds, _hooks(module) - hooks, losses[0], losses[1]


def _hooks(module: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return sum(len(getattr(m, name)) for m in module.modules() for name in (*names, "_load_state_dict_post_hooks"))


def test_a_module_is_whole_after_training_and_trains_again() -> None:
    whole = run_ranks(2, partial(fit_twice, room=1 << 30))
    cut = run_ranks(2, partial(fit_twice, room=0))
    for kinds, hooks, first, second in whole:
        assert (kinds, hooks) == ([False, False], 0)
        assert second < first
    for kinds, _, *losses in cut:  # as after an elastic run, which gathers nothing
        assert kinds == [True, True]
        assert losses == pytest.approx(whole[0][2:], abs=TOLERANCE)


# ---------------------------------------------------------------------- bytes


class Weigher(pl.Callback):
    """Bytes of dense parameters, gradients and moments on this rank before an update."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        dense = [p for p in pl_module.parameters() if p not in strategy.experts.stack_of]
        moments = [t for p in dense for t in optimizer.state.get(p, {}).values() if t.ndim]
        gradients = [p.grad for p in dense if p.grad is not None]
        self.bytes = {
            name: sum({s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}.values())
            for name, tensors in (("parameters", dense), ("gradients", gradients), ("moments", moments))
        }


def weigh(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, int]:
    weigher = Weigher()
    train(rank, world_size, strategy=strategy, steps=3, model={"d_model": 64}, callbacks=[weigher])
    return weigher.bytes


def test_a_rank_holds_its_share_of_the_bytes() -> None:
    (whole,) = run_ranks(1, partial(weigh, strategy={}))
    for ranks, strategy, shards in ((4, {"dense": "fsdp"}, 4), (4, {"dense": "hsdp"}, 2)):
        for found in run_ranks(ranks, partial(weigh, strategy=strategy)):
            for kind, nbytes in found.items():
                assert nbytes == pytest.approx(whole[kind] / shards, rel=0.05), (kind, strategy)


# ---------------------------------------------------------------------- checkpoints

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"replicas": 2}),
    "zero1": (2, {"dense": "zero1"}),
    "fsdp": (3, {"dense": "fsdp"}),
    "hsdp": (4, {"dense": "hsdp"}),
}


def save(rank: int, world_size: int, strategy: dict[str, Any], folder: str) -> None:
    saver = PartialExpertsCheckpoint(os.path.join(folder, "steps"), every_n_steps=3)
    train(rank, world_size, strategy=strategy, steps=3, callbacks=[saver], trainer={"enable_checkpointing": True},
          save_to=os.path.join(folder, "one.ckpt"))  # fmt: skip


def load(rank: int, world_size: int, strategy: dict[str, Any], source: str, target: str) -> None:
    """Resume at the last step, so that nothing is trained, and save."""
    train(rank, world_size, strategy=strategy, steps=3, ckpt_path=source, save_to=target)


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("fsdp", ["one", "hsdp"]),
        slow("fsdp", ["zero1"]),
        slow("ddp", ["fsdp"]),
        slow("one", ["fsdp", "hsdp"]),
        slow("zero1", ["fsdp", "hsdp"]),
        slow("hsdp", ["one", "ddp", "zero1", "fsdp"]),
    ],
)
def test_any_mesh_reads_what_any_wrote_to_the_bit(writer: str, readers: list[str], tmp_path: Path) -> None:
    written = write(MESHES, writer, save, tmp_path)
    assert sum(name.endswith("/exp_avg") for name in written) > 10
    assert_read_to_the_bit(MESHES, readers, load, tmp_path, written)


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
            fetched = state.transfer.fetch(world, range(world.size))
            strategy.leave()
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
        "hooks": _hooks(module),
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
        np.testing.assert_allclose(losses, reference("plain")["losses"][:4], rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- refusals


class WithAdafactor(Mixed):
    """An optimizer with a statistic over whole parameters."""

    def __init__(self) -> None:
        super().__init__(manual=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        experts = [p for n, p in self.named_parameters() if "experts" in n]
        dense = [p for n, p in self.named_parameters() if "experts" not in n]
        return torch.optim.Adafactor([{"params": dense}, {"params": experts}])


def refusal(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train(rank, world_size, own_module=WithAdafactor, strategy={"dense": "fsdp"}, steps=1)
    return str(caught.value)


def test_an_optimizer_over_whole_parameters_is_refused() -> None:
    assert all("Adafactor" in found for found in run_ranks(2, refusal))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dense": "ddp", "shard_size": 2}, "shard_size=2 is for dense=hsdp"),
        ({"dense": "fspd"}, "did you mean 'fsdp'"),
        ({"dense": "hsdp", "shard_size": 0}, "shard_size"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ExpertParallelStrategy(**options)
