"""Callbacks that record routing, where a recovery repeats a step or moves layers."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from moe_lightning import (
    ConfigurationError,
    ExpertParallelStrategy,
    GPTModule,
    OptimizerConfig,
    RecomputeDense,
    auxiliary_loss,
)
from moe_lightning.callbacks import routing
from moe_lightning.callbacks.dense_blocks import CompileDense, dense_parts
from moe_lightning.callbacks.routing import RoutingRecorder, RoutingReplay, _Seen
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.compat import private_lightning
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.replayed_routing import TokenRange
from moe_lightning.moe.router import ChoiceHooks
from moe_lightning.strategies.stages import StageCut
from tests.distributed.training import TINY, OwnModule, RandomTokens, quiet_trainer

AUTOMATIC: Any = SimpleNamespace(automatic_optimization=True)


def trainer_of(step: int, num_ranks: int) -> Any:
    layers = [SimpleNamespace(num_experts=4)]
    stages = SimpleNamespace(layers=layers, num_ranks=num_ranks, num_stages=1, own=list)
    strategy = SimpleNamespace(state=SimpleNamespace(stages=stages), worlds=SimpleNamespace(is_elastic=False))
    return SimpleNamespace(global_step=step, strategy=strategy, is_global_zero=True)


@pytest.mark.parametrize(("every", "iterations"), [(1, [1, 2, 3]), (2, [1, 3])])
def test_a_sample_is_of_all_micro_batches_of_a_step(
    monkeypatch: pytest.MonkeyPatch, every: int, iterations: list[int]
) -> None:
    monkeypatch.setattr(private_lightning, "is_accumulating", lambda _: batch % 4 < 3)
    layer = SimpleNamespace(statistics=SimpleNamespace(tokens_NE=torch.ones(2, 4, dtype=torch.int64)))
    monkeypatch.setattr(routing, "moe_layers", lambda _: [layer])
    recorder, trainer = RoutingRecorder("r.npz", every_n_steps=every), trainer_of(0, 2)
    recorder.on_train_start(trainer, AUTOMATIC)
    for batch in range(12):
        trainer.global_step = (batch + 1) // 4
        recorder.on_train_batch_end(trainer, AUTOMATIC)
    assert list(recorder._samples) == iterations
    assert all((sample == 4).all() for sample in recorder._samples.values())


class Skipping(OwnModule):
    """A module that leaves its second MoE layer out of every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.second = MoELayer(32, 48, num_experts=6, router={"top_k": 2})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        h = self.moe(self.embed(x))
        h = h if batch_idx % 2 else self.second(h)
        return torch.nn.functional.cross_entropy(self.out(h).flatten(0, 1), y.flatten()) + auxiliary_loss(self)


def test_a_layer_that_a_step_does_not_call_has_no_numbers_of_it(tmp_path: Path) -> None:
    recorder, loads = RoutingRecorder(str(tmp_path / "r.npz"), every_n_steps=1), tmp_path / "loads.csv"
    callbacks = [recorder, Telemetry(str(loads))]
    trainer = quiet_trainer(strategy=ExpertParallelStrategy(), callbacks=callbacks, max_steps=4, log_every_n_steps=1)
    trainer.fit(Skipping(), DataLoader(RandomTokens(16, length=8), batch_size=4))
    assert [sample.sum(axis=(1, 2)).tolist() for sample in recorder._samples.values()] == [[64, 64], [64, 0]] * 2
    rows = [line.split(",")[:2] for line in loads.read_text().splitlines()[1:]]
    assert rows == [["1", "0"], ["1", "1"], ["2", "0"], ["3", "0"], ["3", "1"], ["4", "0"]]


def test_what_a_recorder_does_not_record() -> None:
    manual: Any = SimpleNamespace(automatic_optimization=False)
    with pytest.raises(ConfigurationError, match="RoutingRecorder counts steps, and manual optimization"):
        RoutingRecorder("r.npz").on_train_start(trainer_of(0, 2), manual)
    in_stages, elastic = trainer_of(0, 2), trainer_of(0, 2)
    in_stages.strategy.state.stages.num_stages, elastic.strategy.worlds.is_elastic = 2, True
    for trainer in (in_stages, elastic):
        with pytest.raises(ConfigurationError, match=r"use it without mesh\.pp, and with elastic\.enabled=false"):
            RoutingRecorder("r.npz").on_train_start(trainer, AUTOMATIC)


def test_a_replay_follows_the_layers_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = RoutingReplay("nowhere")
    replay._routers = [SimpleNamespace(choice_hooks=ChoiceHooks()) for _ in range(2)]  # type: ignore[misc]
    trainer = trainer_of(0, 2)
    monkeypatch.setattr(routing, "own_strategy", lambda *_: SimpleNamespace(elastic=SimpleNamespace(step=None)))
    trainer.strategy.state.stages.own = lambda layers: [layers[0]]
    replay._begin(trainer.strategy.state.stages)
    replay._seen = {TokenRange(step=0, first_sample=0): _Seen(count=1)}
    trainer.strategy.state.stages.own = lambda layers: [layers[1]]
    replay.on_world_changed(trainer, None)  # type: ignore[arg-type]
    assert [len(router.choice_hooks.observers) for router in replay._routers] == [0, 1]
    assert (replay._layers, replay._seen) == ([1], {})


def test_records_and_one_replay_share_routers() -> None:
    router = MoELayer(8, 8, 4, router={"top_k": 2}).router
    record, replay, second = (RoutingReplay("nowhere", mode) for mode in ("record", "replay", "replay"))
    stages: Any = SimpleNamespace(own=list)
    for callback in (record, replay, second):
        callback._routers = [router]  # type: ignore[list-item]
    record._begin(stages)
    replay._begin(stages)
    with pytest.raises(ConfigurationError, match="replayed already"):
        second._begin(stages)
    assert copy.deepcopy(router).choice_hooks == ChoiceHooks()
    for callback in (record, replay):
        callback.teardown(None, None, "fit")  # type: ignore[arg-type]
    assert router.choice_hooks == ChoiceHooks()


def test_a_record_of_two_passes_is_refused() -> None:
    layer, record = MoELayer(8, 8, 4), RoutingReplay("nowhere")
    record._routers = [layer.router]  # type: ignore[list-item]
    record._begin(SimpleNamespace(own=list))  # type: ignore[arg-type]
    x = torch.randn(6, 8, requires_grad=True)
    layer.router.stream.advance(step=0, first_sample=0, num_samples=2)
    checkpoint(layer, x, use_reentrant=False).sum().backward()  # one pass, computed again
    with pytest.raises(ConfigurationError, match="routed twice in one micro-batch"), torch.no_grad():
        layer(-x)


def test_a_record_keeps_a_committed_step_whose_hook_a_fault_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, trainer = RoutingReplay("nowhere"), trainer_of(5, 2)
    trainer.strategy.elastic, trainer.strategy.state.stages.num_stages = SimpleNamespace(step=None), 1
    monkeypatch.setattr(routing, "own_strategy", lambda *_: trainer.strategy)
    replay._routers = [SimpleNamespace(choice_hooks=ChoiceHooks()) for _ in range(2)]  # type: ignore[misc]
    last, next_one = TokenRange(step=4, first_sample=0), TokenRange(step=5, first_sample=0)
    replay._seen = {last: _Seen(count=1), next_one: _Seen(count=1)}
    trainer.strategy.elastic.step = SimpleNamespace(version=5)
    replay.on_world_changed(trainer, None)  # type: ignore[arg-type]
    assert list(replay._seen) == [last]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("mode", ["record", "replay"])
def test_a_record_drops_the_steps_that_are_done_again(
    mode: str, by_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [TokenRange(step=step, first_sample=4).name for step in (4, 5, 6)]
    for name in names:
        (tmp_path / name).touch()
    replay, trainer = RoutingReplay(str(tmp_path), mode), trainer_of(2 if by_hand else 5, 2)  # type: ignore[arg-type]
    trainer.train_dataloader = None
    monkeypatch.setattr(routing, "joined_slice", lambda _: SimpleNamespace(step=5))
    module: Any = SimpleNamespace(automatic_optimization=not by_hand)
    replay._routers = [SimpleNamespace(choice_hooks=ChoiceHooks())]  # type: ignore[misc]
    replay._begin(SimpleNamespace(own=list))  # type: ignore[arg-type]
    replay.on_train_batch_start(trainer, module, None, 0)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == (names[:1] if mode == "record" else names)
    (tmp_path / names[2]).touch()
    replay.on_train_batch_start(trainer, module, None, 1)
    assert (tmp_path / names[2]).exists(), "only before the first step"


def test_blocks_that_come_to_a_rank_are_compiled() -> None:
    module, compiled = GPTModule(TINY, OptimizerConfig()), CompileDense(backend="aot_eager")
    module.configure_model()
    compiled.on_world_changed(None, module)  # type: ignore[arg-type]
    assert compiled.compiled


def test_parts_that_are_computed_again_may_leave_with_their_stage() -> None:
    module = GPTModule({**TINY, "tie_embeddings": False}, OptimizerConfig())
    module.configure_model()
    cut, recomputed = StageCut(module, (0,), 2), RecomputeDense()
    cut.apply(torch.device("cpu"))
    recomputed._recompute(module)
    former = list(recomputed._parts.values())
    cut.hold((1,), training=True)
    recomputed.teardown(None, module, "fit")  # type: ignore[arg-type]
    recomputed._recompute(module)
    assert former
    assert recomputed._parts
    assert not set(former) & set(recomputed._parts.values())
    assert not any("forward" in vars(part) for part in former)
    recomputed.teardown(None, module, "fit")  # type: ignore[arg-type]
    assert not any("forward" in vars(part) for _, part in dense_parts(module))


def test_pace_counts_no_micro_batch_of_a_step_that_is_repeated() -> None:
    telemetry = Telemetry()
    pace = telemetry._pace
    pace.begin()
    pace.add_batch(7, 0.0)
    pace.begin()  # after a recovery
    pace.add_batch(5, 0.0)
    pace.end_step()
    assert (pace.tokens, pace.steps) == (5, 1)
    telemetry.on_train_end(None, None)  # type: ignore[arg-type]
    assert pace._resumed_at is None
