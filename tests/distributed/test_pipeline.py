"""Models in pipeline stages (mesh.pp): the loss, gradient norms and logged values of as many accumulated micro-batches
on one rank.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from moe_lightning import (
    ContextParallel,
    GPTModule,
    MoELayer,
    OptimizerConfig,
    RoutingReplay,
    auxiliary_loss,
    global_mean,
)
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.dense_blocks import CompileDense, RecomputeDense
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.data.loader import StepLoader
from moe_lightning.data.sampler import StepSampler
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.moe.replayed_routing import TokenRange, read_samples, write_tokens
from moe_lightning.parallel import exchange
from moe_lightning.strategies.pipeline import log_joined, recording_logs
from moe_lightning.strategies.stages import StageCut
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import TOLERANCE, assert_same_training
from tests.distributed.test_meshes import FOUR, PP
from tests.distributed.training import TINY, RandomTokens, make_trainer, quiet_trainer, replicas_of
from tests.distributed.training import train as train_tiny
from tests.parameters import slow

STEPS = 3  # of which an epoch has two
MICROS = 4


class PerStep(pl.Callback):
    """Loss of every step, as the mean over its micro-batches, and what else is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.norms: list[float] = []
        self.counts: list[np.ndarray[Any, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        here = trainer.train_dataloader.current
        if here.micro == 0:
            self.losses.append(0.0)
        self.losses[-1] += float(trainer.callback_metrics["train/loss"]) * here.micro_total / here.step_total
        if here.micro == here.num_micros - 1:
            norm = trainer.strategy.last_gradient_norm  # type: ignore[attr-defined]
            self.norms.append(0.0 if norm is None else float(norm))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validations.append(float(trainer.callback_metrics["val/loss"]))


def train(
    rank: int,
    world_size: int,
    *,
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    own_module: Any = None,
    batch_size: int = 12,
    accumulate: int = 1,
    samples: int = 24,
    steps: int = STEPS,
    every: int | float = 2,
    callbacks: tuple[pl.Callback, ...] = (),
    trainer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on one global batch a step, whatever the number of its micro-batches."""
    watch = PerStep()
    options = {"max_steps": steps, "gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate} | (trainer or {})
    options["val_check_interval"] = every * accumulate if isinstance(every, int) else every
    fit = make_trainer(rank, world_size, strategy, callbacks=[watch, *callbacks], **options)
    module = own_module() if own_module else GPTModule(
        TINY | {"num_layers": 4, "tie_embeddings": False} | (model or {}),
        OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"),
    )  # fmt: skip
    data = RandomTokens(samples)
    sampler = StepSampler(
        num_samples=samples, global_batch_size=batch_size, num_micros=accumulate, drop_last=False, seed=7
    )
    fit.fit(module, StepLoader(data, sampler), DataLoader(RandomTokens(16), batch_size=10))
    state = fit.strategy.lightning_module_state_dict()
    return {
        "losses": watch.losses,
        "validations": watch.validations,
        "gradient_norms": watch.norms,
        "state": {name: tensor.float().numpy() for name, tensor in state.items()},
        "replicas": replicas_of(module),
        "logged": {name: float(value) for name, value in fit.callback_metrics.items()},
        "step": fit.global_step,
    }


LLAMA = {**KNOWN["llama"]["model"], "tie_embeddings": False}
NOISY = KNOWN["noisy"]["model"]
GROUPED = {**LLAMA, "num_heads": 4, "num_kv_heads": 2, "qk_norm": True}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": {**NOISY, "num_heads": 4}},
    "llama": {"model": {**GROUPED, **NOISY}},
    # Micro-batches of 7, 7, 6 and 6 samples, and few in the last step of an epoch.
    "uneven": {"model": GROUPED, "samples": 44, "batch_size": 26, "every": 1.0},
    "short": {
        "model": {**GROUPED, **NOISY, "qk_norm": False},
        "samples": 44,
        "batch_size": 26,
        "every": 1.0,
        "steps": 2,
    },
    # The last step of an epoch has one sample.
    "few": {"samples": 20, "batch_size": 19, "every": 1.0, "model": {"moe_every": 2}},
    "by value": {"trainer": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}},
    "three": {"model": {"num_layers": 3}},
    "accumulated": {"model": NOISY, "samples": 48, "batch_size": 24},
}


@cache
def reference(key: str) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, partial(train, accumulate=MICROS, **CASES[key]))[0]
    return result


def in_stages(ranks: int, key: str = "", **options: Any) -> list[Any]:
    """Two stages, unless the strategy says otherwise."""
    strategy = options.pop("strategy", {})
    accumulate = 2 if key == "accumulated" else 1
    mesh = {"pp": 2, **strategy.get("mesh", {})}
    strategy = {"micro_batches": MICROS // accumulate, **strategy, "mesh": mesh}
    case = CASES[key] if key else {}
    training = partial(train, strategy=strategy, accumulate=accumulate, **case, **options)
    return run_pooled(ranks, training)


CP: dict[str, Any] = {"mesh": {"cp": 2}}
TP: dict[str, Any] = {"mesh": {"tp": 2}}
CP_TP: dict[str, Any] = {"mesh": {"cp": 2, "tp": 2}}
PP4: dict[str, Any] = {"mesh": {"pp": 4}}
ZERO1: dict[str, Any] = {"dense": "zero1"}
FSDP: dict[str, Any] = {"dense": "fsdp"}
HSDP: dict[str, Any] = {"dense": "hsdp", "shard_size": 2}
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved"}


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        slow("uneven", 4, {}), ("three", 2, {}), slow("short", 4, TP), ("short", 4, {**FSDP, **INTERLEAVED}),
        slow("accumulated", 4, {}),
        slow("gpt2", 2, {}), slow("gpt2", 4, PP4), slow("llama", 4, {"replicas": 2}), slow("gpt2", 4, {}),
        slow("few", 4, {}), slow("by value", 2, {}), slow("uneven", 8, {}), slow("gpt2", 8, PP4),
        *[slow(key, ranks, INTERLEAVED) for key, ranks in (("gpt2", 2), ("gpt2", 4), ("uneven", 4))],
        slow("short", 4, CP), slow("short", 4, ZERO1),
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
)  # fmt: skip
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    expected, found = reference(key), in_stages(ranks, key, strategy=strategy)
    if key == "accumulated":  # which validates after as many batches, not steps
        expected, found = expected | {"validations": []}, [result | {"validations": []} for result in found]
    assert_same_training(expected, found)
    np.testing.assert_allclose(found[0]["gradient_norms"], expected["gradient_norms"], rtol=TOLERANCE)
    for result in found:
        assert result["logged"] == found[0]["logged"]
        assert result["logged"].keys() == expected["logged"].keys()


def exchanges(rank: int, world_size: int, schedule: str) -> int:
    """Exchanges of a step on this rank."""
    count, own = 0, exchange._all_to_all

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return own(*arguments, **named)

    exchange._all_to_all = counted  # type: ignore[assignment]
    train(rank, world_size, strategy={"mesh": {"pp": 2}, "schedule": schedule}, steps=1)
    return count


@pytest.mark.slow
def test_schedules_exchange_as_often() -> None:
    plain, interleaved = (run_ranks(4, partial(exchanges, schedule=name)) for name in ("1f1b", "interleaved"))
    assert plain == interleaved
    layers_of_a_rank, there_and_back_both_ways = 2, 4
    assert set(plain) == {layers_of_a_rank * MICROS * there_and_back_both_ways}


# ---------------------------------------------------------------------- what callbacks and loggers see


ENOUGH = 20
"""Steps, for a loss that falls no more."""


def watched(rank: int, world_size: int, folder: str, **options: Any) -> dict[str, Any]:
    stop = EarlyStopping("val/loss", patience=1, min_delta=0.2)
    best = ModelCheckpoint(folder, monitor="val/loss", filename="{step}", save_top_k=1)
    options |= {"trainer": {"enable_checkpointing": True}, "samples": 96, "steps": ENOUGH}
    found = train(rank, world_size, callbacks=(stop, best), **options)
    return found | {"best": float(stop.best_score), "path": best.best_model_path, "stopped": stop.stopped_epoch}


@pytest.mark.slow
def test_callbacks_decide_alike_on_every_rank(tmp_path: Any) -> None:
    (alone,) = run_ranks(1, partial(watched, folder=str(tmp_path / "one"), accumulate=MICROS))
    strategy = {"mesh": {"pp": 2}, "micro_batches": MICROS}
    ranks = run_ranks(4, partial(watched, folder=str(tmp_path / "stages"), strategy=strategy))
    for found in ranks:
        assert found["step"] == alone["step"] < ENOUGH
        assert found["best"] == pytest.approx(alone["best"], abs=TOLERANCE)
        assert found["path"].rpartition("/")[2] == alone["path"].rpartition("/")[2]
        assert found["logged"].keys() == alone["logged"].keys()
        assert found["logged"] == ranks[0]["logged"]


def described(rank: int, world_size: int, folder: Path, **options: Any) -> tuple[dict[str, float], int]:
    telemetry = Telemetry(str(folder / "load.csv"), placement_path=str(folder / "placement.csv"))
    options |= {"trainer": {"log_every_n_steps": 2}, "model": {"num_layers": 3}, "every": 1.0}
    return train(rank, world_size, callbacks=(telemetry,), **options)["logged"], telemetry.tokens_seen


@pytest.mark.slow
def test_telemetry_describes_the_layers_of_all_stages(tmp_path: Path) -> None:
    """Stages of two layers and of one, each on two ranks, so that ranks have different numbers of metrics."""
    (tmp_path / "one").mkdir()
    ((_, tokens),) = run_pooled(1, partial(described, folder=tmp_path / "one", accumulate=MICROS))
    strategy = {"mesh": {"pp": 2}, "micro_batches": MICROS}
    ranks = run_pooled(4, partial(described, folder=tmp_path, strategy=strategy))
    (logged, _), layers = ranks[0], [f"layer{number:02d}" for number in range(3)]
    assert ranks == [(logged, tokens)] * 4
    of_layers = {name: [logged[f"moe/{layer}/{name}"] for layer in layers] for name in ("expert_imbalance_ratio",
        "rank_imbalance_ratio", "dropped_fraction", "load_entropy_ratio")}  # fmt: skip
    assert logged["moe/expert_imbalance_ratio"] == pytest.approx(np.mean(of_layers["expert_imbalance_ratio"]))
    assert logged["moe/expert_imbalance_max_ratio"] == pytest.approx(max(of_layers["expert_imbalance_ratio"]))
    assert all(logged[f"comm/{layer}/exchanged_rows"] > 0 for layer in layers)
    for path in ("load.csv", "placement.csv"):
        _, *rows = (tmp_path / path).read_text().splitlines()
        assert {row.split(",")[1] for row in rows} == {"0", "1", "2"}


DENSE_BLOCKS: dict[str, Any] = {"model": {"moe_every": 2, "dropout": 0.1}, "steps": 2}


def observed(rank: int, world_size: int, folder: Path, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """A training whose dense parts are computed again, or compiled, and whose routing is recorded."""
    taken = CompileDense(backend="aot_eager") if compiled else RecomputeDense()
    watching: list[Any] = [taken]
    if options.get("strategy", {}).get("schedule") != "interleaved":  # in which one rank has no MoE layer
        watching.append(RoutingReplay(str(folder / "tokens")))
    found = train(rank, world_size, callbacks=tuple(watching), **DENSE_BLOCKS, **options)
    return found | {"parts": getattr(taken, "compiled", None)}


@pytest.mark.parametrize(
    ("ranks", "compiled", "strategy"),
    [
        (2, False, {}),
        slow(4, False, {**FSDP, **INTERLEAVED}),
        slow(4, True, {}),
    ],
)
def test_callbacks_take_the_blocks_of_a_stage(
    ranks: int, compiled: bool, strategy: dict[str, Any], tmp_path: Path
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    (alone,) = run_pooled(1, partial(observed, folder=one, accumulate=MICROS))
    strategy = {"mesh": {"pp": 2}, "micro_batches": MICROS, **strategy}
    found = run_pooled(ranks, partial(observed, folder=several, compiled=compiled, strategy=strategy))
    assert_same_training(alone, found)
    for step in range(DENSE_BLOCKS["steps"]) if (several / "tokens").exists() else ():
        at = TokenRange(step=step, first_sample=0)
        ours, theirs = (read_samples(folder / "tokens", at, 12) for folder in (several, one))
        assert torch.equal(ours, theirs)
    assert not compiled or all(len(result["parts"]) == 3 for result in found)


@pytest.mark.slow
def test_stages_replay_what_other_ranks_routed(tmp_path: Path) -> None:
    run_pooled(1, partial(observed, folder=tmp_path, accumulate=MICROS))
    for step in range(DENSE_BLOCKS["steps"]):  # otherwise than anybody would route
        at = TokenRange(step=step, first_sample=0)
        write_tokens(tmp_path / "other", at, (read_samples(tmp_path / "tokens", at, 12) + 1) % 6)
    forced = partial(train, callbacks=(RoutingReplay(str(tmp_path / "other"), "replay"),), **DENSE_BLOCKS)
    (alone,) = run_pooled(1, partial(forced, accumulate=MICROS))
    assert_same_training(alone, run_pooled(4, partial(forced, strategy={"mesh": {"pp": 2}, "micro_batches": MICROS})))


def test_stages_train_in_another_precision(tmp_path: Path) -> None:
    """A replay, which restores the whole module in between, leaves no part in the former one."""
    run_pooled(1, partial(observed, folder=tmp_path, accumulate=MICROS))
    exact = partial(
        train, callbacks=(RoutingReplay(str(tmp_path / "tokens"), "replay"),), trainer={"precision": "64-true"},
        **DENSE_BLOCKS,
    )  # fmt: skip
    (alone,) = run_pooled(1, partial(exact, accumulate=MICROS))
    assert_same_training(alone, run_pooled(2, partial(exact, strategy={"mesh": {"pp": 2}, "micro_batches": MICROS})))


# ---------------------------------------------------------------------- users' modules


class Own(pl.LightningModule):
    """A user's module: an embedding, a bare parameter, blocks of unlike kinds, a head, metrics and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.shift = nn.Parameter(torch.zeros(32))
        self.body = nn.ModuleList([nn.Linear(32, 32), MoELayer(32, 48, num_experts=6, router={"top_k": 2}), nn.Tanh()])
        self.drop = StreamDropout(0.1)
        self.out = nn.Linear(32, 64)
        self.right = MeanMetric()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x) + self.shift)
        for block in self.body:
            h = block(h)
        logits: Tensor = self.out(h)
        return logits

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), logits.argmax(-1) == batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.seen += 1
        loss, right = self._loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        self.log_dict({"right": right.float().mean()}, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss + auxiliary_loss(self)}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, right = self._loss(batch)
        self.log("val/loss", loss, sync_dist=True)
        self.right.update(right.float())
        self.log("val/right", self.right)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"next": self(batch[0]).argmax(-1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@pytest.mark.slow
def test_a_users_module_trains_alike() -> None:
    (alone,) = run_pooled(1, partial(train, own_module=Own, accumulate=MICROS))
    ranks = in_stages(4, own_module=Own)
    assert_same_training(alone, ranks)
    for found in ranks:
        assert found["logged"].keys() == alone["logged"].keys()
        for name in ("right", "val/loss", "val/right"):
            assert found["logged"][name] == pytest.approx(alone["logged"][name], abs=TOLERANCE)


class Residual(nn.Module):
    """Adds to its input in place."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x += self.part(x.clone())
        return x


class InPlace(Own):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([Residual(block) for block in self.body])


def test_blocks_change_hidden_states_in_place() -> None:
    (alone,) = run_pooled(1, partial(train, own_module=InPlace, accumulate=MICROS))
    assert_same_training(alone, in_stages(2, own_module=InPlace))


def test_parameters_of_other_stages_keep_their_attributes() -> None:
    module = Own()
    module.out.weight.no_decay = True  # type: ignore[attr-defined]
    cut = StageCut(module, range(1), 2)
    cut.apply(torch.device("cpu"))
    with cut.whole():  # as in configure_optimizers
        assert module.out.weight.is_meta
        assert module.out.weight.no_decay  # type: ignore[attr-defined]


def evaluate(
    rank: int, world_size: int, strategy: dict[str, Any], accumulate: int = 1, kind: type[Own] = Own
) -> tuple[float, dict[str, float], Any]:
    """Loss of a module that was never trained; its scores and predictions after it was."""
    trainer = make_trainer(rank, world_size, strategy, max_steps=2, accumulate_grad_batches=accumulate)
    module, loader = kind(), DataLoader(RandomTokens(30), batch_size=9)
    first = trainer.validate(module, loader, verbose=False)[0]["val/loss"]
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=12 // accumulate))
    (scores,) = trainer.validate(module, loader, verbose=False)
    predictions = trainer.predict(module, loader)
    assert predictions is not None
    return first, dict(scores), torch.cat([batch["next"] for batch in predictions]).numpy()  # type: ignore[call-overload]


def test_evaluation_and_prediction_run_through_the_stages() -> None:
    ((first, scores, predicted),) = run_pooled(1, partial(evaluate, strategy={}, accumulate=3))
    ranks = run_pooled(2, partial(evaluate, strategy={"mesh": {"pp": 2}, "micro_batches": 3}))
    for found_first, found_scores, found in ranks:
        assert found_first == pytest.approx(first, abs=TOLERANCE)
        assert found_scores == pytest.approx(scores, abs=TOLERANCE)
        assert found.shape == predicted.shape
        np.testing.assert_array_equal(found, ranks[0][2])


def test_a_logged_metric_outside_of_the_module_is_refused() -> None:
    module = Own()
    module.meters = [MeanMetric()]
    logs: list[dict[str, Any]] = []
    with recording_logs(module, logs, 1, lambda: None):
        module.log("right", module.right)
        with pytest.raises(ConfigurationError, match=r"log\('acc'\) got a Metric that is no part of the module"):
            module.log("acc", module.meters[0])
    assert [call["metric"] for call in logs] == ["right"]


@pytest.mark.parametrize(("counts", "total"), [([1, 1, 0, 0], 2.0), ([0, 0], 0.0)])
def test_logged_sums_and_extremes_are_over_samples(counts: list[int], total: float) -> None:
    """Not over dummy micro-batches."""
    module, logs = Own(), list[dict[str, Any]]()
    for value, count in enumerate(counts, start=1):
        with recording_logs(module, logs, count, lambda: None):
            module.log("samples", torch.tensor(1), reduce_fx=torch.sum)
            module.log("least", float(value), reduce_fx="min")
            module.log("most", float(value), reduce_fx="max")
    joined: dict[str, float] = {}
    object.__setattr__(module, "log", lambda name, value, **_: joined.update({name: value}))
    log_joined(module, logs, sum(counts))
    assert joined == {"samples": total, "least": 1.0, "most": 2.0}


class Weighing(Own):
    """Validates on some of its targets, more in some micro-batches than in others."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, rare = self(batch[0]).flatten(0, 1), batch[1].flatten() < 5
        losses = nn.functional.cross_entropy(logits, batch[1].flatten(), reduction="none")
        return global_mean(self, losses[rare].mean() if rare.any() else losses.sum() * 0, rare.sum())


class Results(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs))


def validated(rank: int, world_size: int, strategy: dict[str, Any]) -> list[float]:
    results = Results()
    trainer = make_trainer(rank, world_size, strategy, callbacks=[results])
    trainer.validate(Weighing(), DataLoader(RandomTokens(30), batch_size=9), verbose=False)
    return results.found


def test_the_result_of_a_validation_is_weighted_as_its_micro_batches_are() -> None:
    ((*alone,),) = run_pooled(1, partial(validated, strategy={}))
    for found in run_pooled(2, partial(validated, strategy={"mesh": {"pp": 2}, "micro_batches": 3})):
        assert found == pytest.approx(alone, abs=TOLERANCE)


class Drawing(nn.Dropout):
    """Block that records what it draws."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(float(torch.rand(())))
        return super().forward(x)


class Noisy(Own):
    """Counts tokens and draws noise before the blocks, and records it with a token of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([*self.body, *(Drawing() for _ in range(5))])
        self.noise: list[tuple[float, ...]] = []
        self.tokens = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        noise = float(torch.randn(())), float(np.random.rand()), random.random()  # noqa: NPY002
        self.noise.append((*noise, float(batch[0][0, 0])))
        self.tokens.update(float(batch[0].numel()))
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def traces(rank: int, world_size: int, schedule: str) -> tuple[list[tuple[float, ...]], list[float], float]:
    """Noise before the blocks and in those of this rank, and the counted tokens."""
    module = Noisy()
    strategy = {"mesh": {"pp": 2}, "micro_batches": MICROS, "schedule": schedule}
    found = train(rank, world_size, own_module=lambda: module, samples=24, steps=2, strategy=strategy)
    inside = [value for block in module.body if isinstance(block, Drawing) for value in block.drawn]
    return module.noise, inside, found["logged"]["tokens"]


@pytest.mark.parametrize("schedule", [slow("1f1b"), "interleaved"])
def test_stages_share_noise_and_counts_before_their_blocks_and_draw_other_noise_in_them(schedule: str) -> None:
    (first, in_first, tokens), (second, in_second, others) = run_pooled(2, partial(traces, schedule=schedule))
    assert set(first) == set(second)
    assert len({drawn for drawn, *_ in first}) == 2 * MICROS
    inside = [*in_first, *in_second]
    assert len(set(inside)) == len(inside) == 5 * 2 * MICROS
    assert tokens == others == 24 * 16


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


@pytest.mark.slow
def test_a_users_module_sees_parts_and_answers_wholes() -> None:
    ((first, scores, predicted),) = run_pooled(1, partial(evaluate, strategy={}, accumulate=3, kind=Attending))
    ranks = run_pooled(4, partial(evaluate, strategy={"mesh": {"pp": 2, "cp": 2}, "micro_batches": 3}, kind=Attending))
    for rank, (found_first, found_scores, found) in enumerate(ranks):
        assert found_first == pytest.approx(first, abs=TOLERANCE)
        assert found_scores == pytest.approx(scores, abs=TOLERANCE)
        np.testing.assert_array_equal(found, predicted[: 0 if rank % 2 else None])


# ---------------------------------------------------------------------- checkpoints


def alone(rank: int, world_size: int, path: str) -> list[str]:
    """What stock Lightning says of a checkpoint on one device."""
    module = GPTModule.load_from_checkpoint(path, weights_only=True)
    trainer = quiet_trainer()
    trainer.validate(module, DataLoader(RandomTokens(30), batch_size=10), verbose=False)
    return list(module.state_dict())


def test_one_file_is_stock_lightnings(tmp_path: Path) -> None:
    path, strategy = str(tmp_path / "one.ckpt"), {"mesh": {"pp": 2}, **INTERLEAVED}
    run_pooled(2, partial(train_tiny, strategy=strategy, model=FOUR, steps=1, save_to=path))
    (names,) = run_pooled(1, partial(alone, path=path))
    assert names == list(torch.load(path, weights_only=True)["state_dict"])


# ---------------------------------------------------------------------- after training


def sentence_of(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigurationError as error:
        return str(error)
    return ""


def fit_twice(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[float, list[str]]:
    """Loss of a module after training on with another Trainer, and what other uses of it are refused with."""
    module, loader = Own(), DataLoader(RandomTokens(), batch_size=12)
    make_trainer(rank, world_size, strategy, max_steps=2).fit(module, loader)
    refused = [sentence_of(lambda: module.eval()(torch.arange(16)[None])), sentence_of(lambda: copy.deepcopy(module))]
    refused += [sentence_of(module.state_dict), sentence_of(lambda: module.load_state_dict({}, strict=False))]
    again = make_trainer(rank, world_size, strategy, max_steps=4)
    again.fit(module.train(), loader)
    refused.append(sentence_of(lambda: make_trainer(rank, world_size, {}, max_steps=6).fit(module, loader)))
    return float(again.callback_metrics["train/loss"]), refused


def test_a_module_trains_again_in_the_same_stages() -> None:
    ranks = run_pooled(4, partial(fit_twice, strategy={"mesh": {"pp": 2}, "micro_batches": 2}))
    ((loss, _),) = run_pooled(1, partial(fit_twice, strategy={}))
    for found, (called, copied, saved, loaded, elsewhere) in ranks:
        assert found == pytest.approx(loss, abs=0.01)
        assert "or load a checkpoint into another module" in called
        assert "can be neither copied nor pickled: save a checkpoint" in copied
        assert saved == loaded
        assert "has the stages of this rank only" in saved
        assert "is on the meta device and has no values, as parameters of other stages after a training" in elsewhere


class Counting(nn.Linear):
    """A block with a buffer that each rank writes for itself."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += dist.get_rank()
        return super().forward(x)


def counted(rank: int, world_size: int) -> int:
    module = Own()
    module.body[0] = Counting()
    strategy = {"mesh": {"pp": 2}, "micro_batches": 2, "check_state_every": 1, "timeout_s": 10}
    trainer = make_trainer(rank, world_size, strategy, max_steps=2)
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=12))
    return trainer.global_step


def test_buffers_of_blocks_that_ranks_write_for_themselves_are_no_damage() -> None:
    assert run_pooled(4, counted) == [2] * 4


# ---------------------------------------------------------------------- refusals


class Tied(Own):
    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.embed.weight


class Outside(Own):
    """Uses a parameter of the first stage after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift.sum()


class Logged(Own):
    """Logs what is computed before the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        self.log("norm", self.embed(x).norm())
        return super().forward(x)


class Late(Own):
    """Declares what comes before the blocks behind them."""

    def __init__(self) -> None:
        super().__init__()
        embed = self.embed
        del self.embed
        self.embed = embed


class Twice(Own):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in [*self.body, *self.body]:
            h = block(h)
        logits: Tensor = self.out(h)
        return logits


class Manual(Own):
    automatic_optimization = False


class NoBlocks(Own):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.body)  # type: ignore[assignment]


def lossless(rank: int, world_size: int) -> str:
    saver = PartialExpertsCheckpoint("steps", lossless=True, k_snapshot=1)
    with pytest.raises(ConfigurationError) as caught:
        train_tiny(rank, world_size, model=FOUR, strategy=PP, steps=1, callbacks=[saver],
                   trainer={"enable_checkpointing": True})  # fmt: skip
    return str(caught.value)


def test_windows_of_one_stage_are_refused() -> None:
    assert set(run_pooled(2, lossless)) == {"lossless=True cannot work with mesh.pp yet: drop it, or use mesh.pp=1"}


def refusal(rank: int, world_size: int, module: Any) -> str:
    strategy = {"mesh": {"pp": 2}, "micro_batches": 2, "timeout_s": 8}
    with pytest.raises((ConfigurationError, PeerFailed, RuntimeError)) as caught:
        train(rank, world_size, own_module=module, strategy=strategy, trainer={"gradient_clip_val": None})
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Tied, "untie them"),
        slow(Outside, "shift is used after the blocks"),
        slow(Logged, "computed before the blocks from embed.weight is used"),
        slow(Late, "is used before the blocks"),
        slow(Twice, "each once in a step"),
        (Manual, "manual optimization"),
        (NoBlocks, "no ModuleList of blocks"),
    ],
)
def test_what_cannot_be_cut_is_refused(module: Any, words: str) -> None:
    found = run_ranks(2, partial(refusal, module=module))
    assert any(words in text for text in found), found


@pytest.mark.parametrize(
    ("stages", "num_stages", "words"),
    [
        ((0,), 3, "mesh.pp=3 cuts a model in 3 stages, more than the 2 blocks of body: use at most 2"),
        ((0, 2), 4, "mesh.pp=2 cuts a model in 4 stages, .* use at most 1, or schedule=1f1b and at most 2"),
    ],
)
def test_more_stages_than_blocks_are_refused(stages: tuple[int, ...], num_stages: int, words: str) -> None:
    module = Own()
    module.body = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    with pytest.raises(ConfigurationError, match=f"{words}$"):
        StageCut(module, stages, num_stages)


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize(
    ("scale", "is_refused"),
    [
        (lambda module, h: 1 + module.shift, True),
        (lambda module, h: torch.ones_like(h).mul_(h), True),
        (lambda module, h: torch.ones_like(h), False),
        (lambda module, h: torch.ones(h.shape[1:]).to(h), False),
    ],
)
def test_a_stage_refuses_what_is_computed_from_parameters_of_another(scale: Any, is_refused: bool) -> None:
    """Unless only hidden states, which are sent, depend on these."""
    module = Own()
    module.body = nn.ModuleList([Scaled(32, 32), Scaled(32, 32)])
    cut = StageCut(module, range(1, 2), 2)
    cut.apply(torch.device("cpu"))
    refused = pytest.raises(ConfigurationError, match=r"before the blocks from (shift|embed\.weight) is used")
    with refused if is_refused else nullcontext(), cut.flow.watching(), cut.flow.of(1, torch.zeros(64), lambda: None):
        h = module.embed(torch.arange(2)) + module.shift
        condition = scale(module, h)
        for block in module.body:
            h = block(h, condition)
        assert h.shape == (2, 32)
