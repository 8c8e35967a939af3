"""Pipelines beside other axes: the loss, gradient norms and logged values of as many accumulated micro-batches on one
rank, and one checkpoint for all meshes.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import ContextParallel, RoutingReplay
from moe_lightning.callbacks.dense_blocks import CompileDense, RecomputeDense
from moe_lightning.callbacks.routing import RoutingRecorder
from moe_lightning.moe.forced_routing import read_routing_trace
from moe_lightning.moe.replayed_routing import TokenRange, read_samples, write_tokens
from tests.distributed.harness import run_ranks
from tests.distributed.mesh_checkpoints import assert_read_to_the_bit, write
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.test_pipeline import CASES as KNOWN
from tests.distributed.test_pipeline import LLAMA, MICROS, Own, load, save, train
from tests.distributed.training import RandomTokens, make_trainer
from tests.parameters import slow

NOISY = KNOWN["noisy"]["model"]
GROUPED = {**LLAMA, "num_heads": 4, "num_kv_heads": 2, "qk_norm": True}
CASES: dict[str, dict[str, Any]] = {
    # micro-batches of 7, 7, 6 and 6 samples
    "short": {"model": GROUPED | NOISY | {"qk_norm": False}, "samples": 96, "batch_size": 26, "steps": 5},
    "gpt2": {"model": {**NOISY, "num_heads": 4}},
    "llama": {"model": GROUPED | NOISY},
    "uneven": {"model": GROUPED, "samples": 96, "batch_size": 26},
    # The last step of an epoch has one sample.
    "few": {"samples": 58, "model": {"moe_every": 2}, "batch_size": 19, "every": 1.0},
    "accumulated": {"model": NOISY, "samples": 96, "batch_size": 24},
}


@cache
def reference(key: str) -> dict[str, Any]:
    case = CASES[key]
    result: dict[str, Any] = run_ranks(1, partial(train, accumulate=MICROS, **case))[0]
    return result


def in_stages(key: str, ranks: int, **strategy: Any) -> list[Any]:
    """A case in two stages."""
    mesh = {"pp": 2, **strategy.pop("mesh", {})}
    accumulate = 2 if key == "accumulated" else 1
    strategy = {"mesh": mesh, "micro_batches": MICROS // accumulate, **strategy}
    return run_ranks(ranks, partial(train, strategy=strategy, accumulate=accumulate, **CASES[key]))


CP: dict[str, Any] = {"mesh": {"cp": 2}}
TP: dict[str, Any] = {"mesh": {"tp": 2}}
CP_TP: dict[str, Any] = {"mesh": {"cp": 2, "tp": 2}}
ZERO1: dict[str, Any] = {"dense": "zero1"}
FSDP: dict[str, Any] = {"dense": "fsdp"}
HSDP: dict[str, Any] = {"dense": "hsdp", "shard_size": 2}
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved"}


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        slow("short", 4, CP),
        ("short", 4, TP),
        slow("short", 4, ZERO1),
        ("short", 4, {**FSDP, **INTERLEAVED}),
        *[
            slow(key, ranks, {**axis, **schedule})
            for axis in (CP, TP, ZERO1, FSDP, {**CP, **ZERO1}, {**CP, **FSDP})
            for schedule in ({}, INTERLEAVED)
            for key, ranks in (("gpt2", 4), ("llama", 4), ("uneven", 4), ("few", 8), ("accumulated", 4))
        ],
        *[slow(key, 8, HSDP) for key in ("uneven", "few")],
        *[
            slow(key, 8, {**axes, **schedule})
            for axes in (CP_TP, {**TP, **ZERO1}, {**TP, **FSDP}, {**TP, **HSDP}, {**CP_TP, **FSDP})
            for schedule in ({}, INTERLEAVED)
            for key in ("short", "gpt2")
        ],
    ],
)
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    expected, found = reference(key), in_stages(key, ranks, **strategy)
    if key == "accumulated":  # which validates after as many batches, not steps
        expected, found = expected | {"validations": []}, [result | {"validations": []} for result in found]
    assert_same_training(expected, found)
    np.testing.assert_allclose(found[0]["gradient_norms"], expected["gradient_norms"], rtol=TOLERANCE)
    for result in found:
        assert result["logged"] == found[0]["logged"]
        assert result["logged"].keys() == expected["logged"].keys()


# ---------------------------------------------------------------------- users' modules


class Attention(nn.Module):
    """A block of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.context = nn.Linear(32, 96), ContextParallel()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, dim=1)
        return x + self.context.attention(q, k, v).transpose(1, 2).flatten(2)


class Attending(Own):
    """One whose metrics and predictions are of parts of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(Attention())


def use(rank: int, world_size: int, strategy: dict[str, Any], accumulate: int = 1) -> dict[str, Any]:
    """Train, validate and predict."""
    trainer = make_trainer(rank, world_size, strategy, max_steps=3, accumulate_grad_batches=accumulate)
    module, held_out = Attending(), DataLoader(RandomTokens(30), batch_size=9)
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=12 // accumulate))
    (scores,) = trainer.validate(module, held_out, verbose=False)
    predictions = trainer.predict(module, held_out)
    assert predictions is not None
    return {"scores": scores, "next": torch.cat([batch["next"] for batch in predictions])}  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_users_module_sees_parts_and_answers_wholes() -> None:
    (alone,) = run_ranks(1, partial(use, strategy={}, accumulate=3))
    ranks = run_ranks(4, partial(use, strategy={**CP, "mesh": {"pp": 2, "cp": 2}, "micro_batches": 3}))
    for rank, found in enumerate(ranks):
        assert found["scores"] == pytest.approx(alone["scores"], abs=TOLERANCE)
        assert torch.equal(found["next"], alone["next"][: 0 if rank % 2 else None])


# ---------------------------------------------------------------------- callbacks

DENSE_BLOCKS: dict[str, Any] = {"model": {"moe_every": 2, "dropout": 0.1}, "steps": 3}


def observed(rank: int, world_size: int, folder: Path, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """A training whose dense parts are computed again, or compiled, and whose routing is recorded in two ways."""
    taken = CompileDense(backend="aot_eager") if compiled else RecomputeDense()
    recorder = RoutingRecorder(str(folder / "counts.npz"), every_n_steps=2)
    watching = [taken, recorder]
    if options.get("strategy", {}).get("schedule") != "interleaved":  # in which one rank has no MoE layer
        watching.append(RoutingReplay(str(folder / "tokens")))
    found = train(rank, world_size, callbacks=tuple(watching), **DENSE_BLOCKS, **options)
    return found | {"parts": getattr(taken, "compiled", None)}


@pytest.mark.parametrize(
    ("ranks", "compiled", "strategy"),
    [
        (2, False, {}),
        pytest.param(4, False, {**FSDP, **INTERLEAVED}, marks=pytest.mark.slow),
        pytest.param(4, True, {}, marks=pytest.mark.slow),
    ],
)
def test_callbacks_take_the_blocks_of_a_stage(
    ranks: int, compiled: bool, strategy: dict[str, Any], tmp_path: Path
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    (alone,) = run_ranks(1, partial(observed, folder=one, accumulate=MICROS))
    strategy = {"mesh": {"pp": 2}, "micro_batches": MICROS, **strategy}
    found = run_ranks(ranks, partial(observed, folder=several, compiled=compiled, strategy=strategy))
    assert_same_training(alone, found)
    expected, recorded = (read_routing_trace(folder / "counts.npz")[0] for folder in (one, several))
    assert recorded.shape == (2, 2, ranks // 2, 6)  # samples, layers, ranks, experts
    np.testing.assert_array_equal(recorded.sum(2), expected.sum(2))
    for step in range(3) if (several / "tokens").exists() else ():
        at = TokenRange(step=step, first_sample=0)
        ours, theirs = (read_samples(folder / "tokens", at, 12) for folder in (several, one))
        assert torch.equal(ours, theirs)
    assert not compiled or all(len(result["parts"]) == 3 for result in found)


@pytest.mark.slow
def test_stages_replay_what_other_ranks_routed(tmp_path: Path) -> None:
    run_ranks(1, partial(observed, folder=tmp_path, accumulate=MICROS))
    for step in range(3):  # otherwise than anybody would route
        at = TokenRange(step=step, first_sample=0)
        write_tokens(tmp_path / "other", at, (read_samples(tmp_path / "tokens", at, 12) + 1) % 6)
    forced = partial(train, callbacks=(RoutingReplay(str(tmp_path / "other"), "replay"),), **DENSE_BLOCKS)
    (alone,) = run_ranks(1, partial(forced, accumulate=MICROS))
    assert_same_training(alone, run_ranks(4, partial(forced, strategy={"mesh": {"pp": 2}, "micro_batches": MICROS})))


# ---------------------------------------------------------------------- checkpoints

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (2, {"dense": "fsdp"}),
    "stages": (2, {"mesh": {"pp": 2}, "micro_batches": 2}),
    "cp": (4, {"mesh": {"pp": 2, "cp": 2}, "schedule": "interleaved"}),
    "tp": (4, {"mesh": {"pp": 2, "tp": 2}, "micro_batches": 2}),
    "zero1": (4, {"mesh": {"pp": 2}, "dense": "zero1", "replicas": 2}),
    "stages fsdp": (4, {"mesh": {"pp": 2}, "dense": "fsdp", "replicas": 2}),
    "stages hsdp": (8, {"mesh": {"pp": 2}, "dense": "hsdp", "shard_size": 2, "micro_batches": 2, **INTERLEAVED}),
    "interleaved tp": (8, {"mesh": {"pp": 2, "tp": 2}, "schedule": "interleaved", "replicas": 2}),
}


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        pytest.param("cp", ["one", "fsdp", "stages"], marks=pytest.mark.slow),
        pytest.param("tp", ["one", "stages", "interleaved tp"], marks=pytest.mark.slow),
        pytest.param("interleaved tp", ["fsdp", "tp"], marks=pytest.mark.slow),
        pytest.param("zero1", ["one", "stages"], marks=pytest.mark.slow),
        ("stages fsdp", ["tp"]),
        pytest.param("stages fsdp", ["one", "stages hsdp"], marks=pytest.mark.slow),
        pytest.param("stages hsdp", ["fsdp", "stages fsdp"], marks=pytest.mark.slow),
        pytest.param("fsdp", ["cp", "tp", "zero1", "stages fsdp"], marks=pytest.mark.slow),
    ],
)
def test_any_mesh_reads_what_any_wrote_to_the_bit(writer: str, readers: list[str], tmp_path: Path) -> None:
    written = write(MESHES, writer, save, tmp_path)
    assert sum(name.endswith("/exp_avg") for name in written) == len(torch.load(tmp_path / "one.ckpt")["state_dict"])
    assert_read_to_the_bit(MESHES, readers, load, tmp_path, written)
