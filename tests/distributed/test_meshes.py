"""Every mesh trains as one rank does: the same losses, norms and replicas, the same checkpoints, a share of the bytes,
and a module that is whole afterwards. Pipelines train in micro-batches: see test_pipeline.py.
"""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.parallel.tensor import PartedForward
from moe_lightning.state.tensors import cut_of, is_sharded, local
from moe_lightning.strategies import expert_parallel
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.training import BRIEF, BRIEF_ACCUMULATION, TINY, RandomTokens, make_trainer, train
from tests.parameters import slow

SHORT: dict[str, Any] = {"steps": 3, "dataset_size": 24}
"""Options of `train`: an epoch of two batches of twelve, and one step of the next."""
CP2, CP4, TP2, TP4 = {"mesh": {"cp": 2}}, {"mesh": {"cp": 4}}, {"mesh": {"tp": 2}}, {"mesh": {"tp": 4}}
CPTP: dict[str, Any] = {"mesh": {"cp": 2, "tp": 2}}
FSDP, HSDP, ZERO1 = {"dense": "fsdp"}, {"dense": "hsdp"}, {"dense": "zero1"}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False, "num_heads": 4, "num_kv_heads": 2,
    "qk_norm": True, "num_layers": 3, "moe_every": 2, "num_shared_experts": 1, "tie_embeddings": True,
}  # fmt: skip
NOISY = KNOWN["noisy"]["model"]
VALIDATED: dict[str, Any] = {"validate": True, "trainer": {"val_check_interval": 2}}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": {"num_heads": 4, "moe_every": 2}, **VALIDATED},
    "uneven": {"model": {"num_heads": 4, **NOISY}, "batch_size": 13},
    "accumulate": {"model": {"num_heads": 4, "dropout": 0.1}, **BRIEF_ACCUMULATION},
    "few samples": {"model": {"dropout": 0.1}, "batch_size": 4, "dataset_size": 9},
    "by value": {
        "model": {"moe_every": 2, "tie_embeddings": False},
        "trainer": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
    },
    "groups": {**KNOWN["llama"], "model": {**KNOWN["llama"]["model"], "tie_embeddings": True}},
    "llama": {"model": LLAMA | NOISY | {"num_heads": 8, "num_kv_heads": 4}, "batch_size": 7, **VALIDATED},
    "llama uneven": {"model": LLAMA, "batch_size": 13, **VALIDATED},
    "llama accumulate": {"model": LLAMA | NOISY, **BRIEF_ACCUMULATION},
}  # fmt: skip


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_pooled(world_size, partial(train, **BRIEF | options))
    return results


@cache
def reference(key: str) -> dict[str, Any]:
    return run(1, **CASES[key])[0]


@cache
def short_reference(key: str) -> dict[str, Any]:
    return run(1, **SHORT | CASES[key])[0]


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        # Parameters in rows.
        ("uneven", 3, FSDP), slow("accumulate", 4, HSDP), ("groups", 4, {**HSDP, "shard_size": 2}),
        slow("gpt2", 2, FSDP), slow("gpt2", 4, {**HSDP, "replicas": 2}), slow("uneven", 2, {**FSDP, "replicas": 2}),
        slow("groups", 3, FSDP), slow("by value", 2, FSDP), slow("uneven", 8, HSDP), slow("accumulate", 3, FSDP),
        slow("uneven", 4, HSDP),
        # Layers in parts.
        slow("llama", 4, TP2), ("few samples", 4, TP2), slow("gpt2", 4, TP4),
        slow("gpt2", 2, TP2), slow("gpt2", 4, {**TP2, "replicas": 2}), slow("uneven", 4, {**TP2, "ep_size": 2}),
        slow("accumulate", 4, TP2), slow("uneven", 2, TP2), slow("by value", 4, TP2), slow("llama uneven", 2, TP2),
        slow("accumulate", 2, TP2), slow("llama uneven", 4, TP2), slow("llama", 8, TP2),
        # Sequences in parts.
        slow("accumulate", 4, {**CP4, **FSDP}),
        ("llama uneven", 4, {**CP4, **HSDP, "replicas": 2}),  # two heads of keys for four ranks
        slow("gpt2", 2, CP2), slow("uneven", 4, {**CP2, "replicas": 2}), slow("llama", 4, {**CP2, **FSDP}),
        slow("llama uneven", 4, {**CP2, **ZERO1}), slow("llama accumulate", 2, {**CP2, **HSDP}),
        # With each other and with shared dense parameters.
        ("llama", 4, CPTP), slow("llama accumulate", 4, {**TP2, **FSDP}),
        slow("gpt2", 4, {**TP2, **ZERO1}), slow("llama", 4, {**TP2, **ZERO1}),
        slow("llama accumulate", 4, {**CPTP, **ZERO1}), slow("gpt2", 4, {**CPTP, "replicas": 2}),
        slow("uneven", 4, CPTP), slow("llama accumulate", 4, CPTP), slow("llama", 8, {**CPTP, "replicas": 2}),
        slow("gpt2", 4, {**TP2, **FSDP, "replicas": 2}), slow("gpt2", 4, {**CPTP, **FSDP}),
        slow("uneven", 4, {**TP2, **HSDP}), slow("llama", 8, {**TP2, **HSDP}),
        slow("llama accumulate", 8, {**CPTP, **FSDP}),
    ],
)  # fmt: skip
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    assert_same_training(short_reference(key), run(ranks, strategy=strategy, **SHORT | CASES[key]))


# ---------------------------------------------------------------------- bytes


class Weigher(pl.Callback):
    """Bytes of dense parameters, gradients and moments on this rank before an update."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        dense = [p for p in pl_module.parameters() if p not in strategy.experts.stack_of]
        moments = [t for p in dense for t in optimizer.state.get(p, {}).values() if t.ndim]
        gradients = [p.grad for p in dense if p.grad is not None]
        self.bytes = {
            name: sum({s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}.values())
            for name, tensors in (("parameters", dense), ("gradients", gradients), ("moments", moments))
        }


def weigh(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, int]:
    weigher = Weigher()
    model = {"d_model": 64, "num_layers": 4, "moe_every": 4, "num_experts": 2, "d_hidden": 256, "vocab_size": 256}
    train(rank, world_size, strategy=strategy, steps=3, model=model, callbacks=[weigher])
    return weigher.bytes


@pytest.mark.slow
def test_a_rank_holds_its_share_of_the_bytes() -> None:
    (whole,) = run_pooled(1, partial(weigh, strategy={}))
    for ranks, strategy, shares in ((4, FSDP, 4), (4, HSDP, 2), (2, TP2, 2), (4, {**TP2, **FSDP}, 4)):
        for found in run_pooled(ranks, partial(weigh, strategy=strategy)):
            for kind, nbytes in found.items():
                assert nbytes == pytest.approx(whole[kind] / shares, rel=0.05), (kind, strategy)


# ---------------------------------------------------------------------- checkpoints

FOUR = {"num_layers": 4, "num_heads": 4, "tie_embeddings": False}
PP: dict[str, Any] = {"mesh": {"pp": 2}, "micro_batches": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (3, {"replicas": 2}),
    "zero1": (2, ZERO1),
    "fsdp": (3, FSDP),
    "hsdp": (4, HSDP),
    "cp fsdp": (2, {**CP2, **FSDP}),
    "cp hsdp": (4, {**CP2, **HSDP, "replicas": 2}),
    "tp": (2, TP2),
    "tp dp": (4, TP2),
    "cp tp": (4, CPTP),
    "tp zero1": (4, {**TP2, **ZERO1}),
    "tp fsdp": (4, {**TP2, **FSDP}),
    "tp hsdp": (8, {**TP2, **HSDP}),
    "pp": (2, PP),
    "pp twice": (4, {"mesh": {"pp": 2}, "schedule": "interleaved", "replicas": 2}),
    "pp cp": (4, {"mesh": {"pp": 2, "cp": 2}, "schedule": "interleaved"}),
    "pp tp": (4, {"mesh": {"pp": 2, "tp": 2}, "micro_batches": 2}),
    "pp zero1": (4, {"mesh": {"pp": 2}, **ZERO1, "replicas": 2}),
    "pp fsdp": (4, {"mesh": {"pp": 2}, **FSDP, "replicas": 2}),
    "pp hsdp": (8, {**PP, **HSDP, "shard_size": 2, "schedule": "interleaved"}),
    "pp twice tp": (8, {"mesh": {"pp": 2, "tp": 2}, "schedule": "interleaved", "replicas": 2}),
}
"""Ranks and options of the strategy."""


class SaverInside(pl.Callback):
    """A file of Lightning's, written while parameters are cut."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def save(rank: int, world_size: int, *, strategy: dict[str, Any], model: dict[str, Any], folder: str) -> None:
    """In one file, and in a directory."""
    saver = PartialExpertsCheckpoint(os.path.join(folder, "steps"), every_n_steps=2)
    train(rank, world_size, strategy=strategy, model=model, callbacks=[saver], **BRIEF | {"steps": 2},
          trainer={"enable_checkpointing": True}, save_to=os.path.join(folder, "one.ckpt"))  # fmt: skip


def load(
    rank: int, world_size: int, *, strategy: dict[str, Any], model: dict[str, Any], targets: dict[str, str]
) -> None:
    """Resume from each source at the last step but one step later, and save before it."""
    options = BRIEF | {"steps": 3, "strategy": strategy, "model": model}
    for source, target in targets.items():
        train(rank, world_size, ckpt_path=source, callbacks=[SaverInside(target)], **options)


def tensors(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint in one file."""
    checkpoint = torch.load(path, weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    moments = {f"{n}/{k}": v for n, state in optimizer["state"].items() for k, v in state.items()}
    assert (
        sum(name.endswith("/exp_avg") for name in moments) >= len(checkpoint["state_dict"]) - 1
    )  # weights may be tied
    return {**checkpoint["state_dict"], **moments}


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("fsdp", ["one", "hsdp"]), slow("pp fsdp", ["pp tp"]),
        slow("one", ["fsdp", "hsdp", "tp dp", "cp fsdp", "cp hsdp"]), slow("one", ["pp", "pp twice"]),
        slow("ddp", ["fsdp", "tp"]), slow("ddp", ["pp"]), slow("zero1", ["fsdp", "hsdp", "cp hsdp"]),
        slow("fsdp", ["zero1", "tp", "tp dp", "tp fsdp", "tp hsdp"]),
        slow("fsdp", ["pp", "pp twice", "pp cp", "pp tp", "pp zero1", "pp fsdp"]),
        slow("hsdp", ["one", "ddp", "zero1", "fsdp"]),
        slow("cp fsdp", ["one", "ddp", "cp hsdp"]), slow("cp hsdp", ["one", "zero1", "cp fsdp"]),
        slow("tp", ["one", "ddp", "tp dp"]), slow("tp dp", ["one", "fsdp", "tp"]),
        slow("cp tp", ["one", "fsdp", "tp fsdp", "tp zero1"]), slow("tp zero1", ["one", "tp fsdp", "cp tp"]),
        slow("tp fsdp", ["one", "tp zero1", "cp tp", "tp hsdp"]), slow("tp hsdp", ["one", "cp tp", "tp fsdp"]),
        slow("pp", ["one", "pp twice", "fsdp"]), slow("pp twice", ["one", "ddp", "pp"]),
        slow("pp cp", ["one", "fsdp", "pp"]), slow("pp tp", ["one", "pp", "pp twice tp"]),
        slow("pp twice tp", ["fsdp", "pp tp"]), slow("pp zero1", ["one", "pp"]),
        slow("pp fsdp", ["one", "pp hsdp"]), slow("pp hsdp", ["fsdp", "pp fsdp"]),
    ],
)  # fmt: skip
def test_any_mesh_reads_what_any_wrote_to_the_bit(writer: str, readers: list[str], tmp_path: Path) -> None:
    model = FOUR if any(name.startswith("pp") for name in (writer, *readers)) else LLAMA
    ranks, strategy = MESHES[writer]
    run_pooled(ranks, partial(save, strategy=strategy, model=model, folder=str(tmp_path)))
    written = tensors(tmp_path / "one.ckpt")
    for reader in readers:
        ranks, strategy = MESHES[reader]
        targets = {str(tmp_path / source): str(tmp_path / f"{reader} {source}") for source in ("one.ckpt", "steps")}
        run_pooled(ranks, partial(load, strategy=strategy, model=model, targets=targets))
        for source, target in targets.items():
            read = tensors(Path(target))
            assert read.keys() == written.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in written.items()), (reader, source)


# ---------------------------------------------------------------------- after training


def hooks_of(module: nn.Module) -> int:
    """Hooks and replaced methods of a module."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    hooks = sum(len(getattr(m, name)) for m in module.modules() for name in (*names, "_load_state_dict_post_hooks"))
    return hooks + sum(isinstance(m.__dict__.get("forward"), PartedForward) for m in module.modules())


def fit_twice(
    rank: int, world_size: int, *, strategy: dict[str, Any], room: int
) -> tuple[list[bool], int, list[float]]:
    """A module that two Trainers train one after the other, and what is left on it.

    Args:
        room: bytes that a rank may keep of the whole model.
    """
    expert_parallel.gather_limit = lambda _: room
    module, loader = GPTModule(TINY, OptimizerConfig(lr=3e-3)), DataLoader(RandomTokens(), batch_size=12)
    kinds, losses, hooks = [], [], hooks_of(module)
    for _ in range(2):
        trainer = make_trainer(rank, world_size, strategy, max_steps=3)
        trainer.fit(module, loader, loader)
        kinds.append(any(is_sharded(p) or bool(cut_of(p)) for p in module.parameters()))
        losses.append(float(trainer.validate(module, loader, verbose=False)[0]["val/loss"]))
    return kinds, hooks_of(module) - hooks, losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP, slow(TP2)])
def test_a_module_is_whole_after_training_and_trains_again(strategy: dict[str, Any]) -> None:
    whole = run_ranks(2, partial(fit_twice, strategy=strategy, room=1 << 30))
    cut = run_ranks(2, partial(fit_twice, strategy=strategy, room=0))
    for kinds, left, losses in whole:
        assert (kinds, left) == ([False, False], 0)
        assert losses[1] < losses[0]
    for kinds, left, losses in cut:  # as after an elastic run, which gathers nothing
        assert kinds == [True, True]
        assert left > 0
        assert losses == pytest.approx(whole[0][2], abs=TOLERANCE)
