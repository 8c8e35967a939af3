"""A balancer in pipeline stages: experts move and visit among the ranks of a stage, slices follow speeds, and the
training is the same (L1 to L3).
"""

from __future__ import annotations

import time
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from moe_lightning import ExpertParallelStrategy
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.speeds import OwnRates, SpeedFollower, SpeedPolicy
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from tests.distributed.balanced_training import NUM_EXPERTS, random_placement
from tests.distributed.harness import RankFailure, run_pooled, run_ranks
from tests.distributed.same_training import SKEWED, assert_same_training
from tests.distributed.test_balancer_laws import EAGER, Watcher, failing_alone
from tests.distributed.test_pipeline import MICROS, train
from tests.distributed.training import set_up
from tests.distributed.training import train as train_tiny
from tests.parameters import slow

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "skewed": {"model": SKEWED},
    "noisy": {"model": {**SKEWED, "dropout": 0.1}},
    "uneven": {"model": SKEWED, "samples": 96, "batch_size": 26},  # micro-batches of 7, 7, 6 and 6 samples
    "accumulated": {"model": SKEWED, "samples": 96, "batch_size": 24},
}
LAYERS: dict[str, Any] = {**SKEWED, "num_layers": 4, "tie_embeddings": False}
INTERLEAVED = {"schedule": "interleaved"}


@cache
def reference(key: str, steps: int = STEPS) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, partial(train, accumulate=MICROS, steps=steps, **CASES[key]))[0]
    return result


def in_stages(
    function: Any, key: str, ranks: int, steps: int = STEPS, *, pooled: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """What a training function returns of a case in two stages, without what each stage logs for itself."""
    micros = 2 if key == "accumulated" else MICROS
    strategy = {"slots": 4, "micro_batches": micros, **options.pop("strategy", {})}
    strategy["mesh"] = {"pp": 2, **strategy.get("mesh", {})}
    case = {"steps": steps, "accumulate": MICROS // micros, **CASES[key]}
    training = partial(function, strategy=strategy, **case, **options)
    found: list[dict[str, Any]] = run_ranks(ranks, training, pooled=pooled)
    return found


def same(key: str, found: list[dict[str, Any]], steps: int = STEPS) -> None:
    expected = reference(key, steps)
    if key in ("accumulated", "uneven"):  # which validate after as many batches, not steps, of which an epoch has 15
        expected, found = expected | {"validations": []}, [result | {"validations": []} for result in found]
    assert_same_training(expected, found, key)


# ---------------------------------------------------------------------- the balancer's plans


def balanced(rank: int, world_size: int, *, balancer: dict[str, Any], **options: Any) -> dict[str, Any]:
    watcher = Watcher()
    with failing_alone(balancer):
        result = train(rank, world_size, callbacks=(LoadBalancer(**EAGER | balancer), watcher), **options)
    return result | {"moved": watcher.moved, "shadows": watcher.shadows, "metrics": watcher.metrics}


OFTEN = {"rebalance_every": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "ranks", "strategy", "balancer"),
    [
        ("skewed", 4, {}, OFTEN),
        slow("skewed", 4, INTERLEAVED, OFTEN),
        slow("skewed", 4, {}, {**OFTEN, "shadows": "top2"}),
        slow("uneven", 4, {}, OFTEN),
        slow("uneven", 4, INTERLEAVED, OFTEN),
        slow("accumulated", 4, {}, OFTEN),
        slow("accumulated", 4, INTERLEAVED, OFTEN),
        slow("noisy", 4, {"mesh": {"cp": 2}}, OFTEN),
        slow("noisy", 4, {"mesh": {"tp": 2}}, OFTEN),
        slow("noisy", 4, {"dense": "zero1"}, OFTEN),
        slow("noisy", 4, {"dense": "fsdp", **INTERLEAVED}, OFTEN),
        slow(
            "uneven",
            8,
            {"slots": 3},
            {**OFTEN, "placement_rule": "mro+", "min_replicas": 2},
        ),
        slow("skewed", 4, {}, {**OFTEN, "calibrate": True}),
    ],
)
def test_the_training_is_the_same(key: str, ranks: int, strategy: dict[str, Any], balancer: dict[str, Any]) -> None:
    found = in_stages(balanced, key, ranks, strategy=strategy, balancer=balancer)
    same(key, found)
    assert all(result["moved"] == found[0]["moved"] for result in found)
    if not balancer.get("calibrate"):  # which may find that nothing pays on this machine
        assert found[0]["moved"] > 0
        assert all(result["shadows"] > 0 for result in found)
    names = [name for result in found for name in result["metrics"] if name.endswith("imbalance_after_ratio")]
    assert set(names) == {f"balance/layer{layer:02d}/imbalance_after_ratio" for layer in range(4)}


def measured(rank: int, world_size: int, **options: Any) -> dict[str, float]:
    balancer = LoadBalancer(**EAGER | {"rebalance_every": 0, "shadows": "none"})
    logged: dict[str, float] = train(rank, world_size, callbacks=(balancer, Telemetry()), **options)["logged"]
    return logged


def test_numbers_of_layers_are_of_all_micro_batches() -> None:
    """No expert moves and none has replicas, so that the ranks compute what they would in plain expert parallelism."""
    for logged in in_stages(measured, "skewed", 4, steps=1, pooled=True, strategy={"slots": 3}):
        for layer in (f"layer{number:02d}" for number in range(4)):
            plain = logged[f"balance/{layer}/imbalance_before_ratio"]
            assert plain > 1
            assert logged[f"balance/{layer}/rb_ratio"] == pytest.approx(1)
            assert logged[f"balance/{layer}/imbalance_after_ratio"] == pytest.approx(plain)
            assert logged[f"moe/{layer}/rank_imbalance_ratio"] == pytest.approx(plain)
            assert 0 < logged[f"moe/{layer}/auxiliary_loss"] < 1


# ---------------------------------------------------------------------- a user's placements


class Mover(pl.Callback):
    """Moves the experts of all stages to random places before some steps."""

    def __init__(self, slots: int = 4) -> None:
        self._rng, self._slots, self.moved, self._last = np.random.default_rng(3), slots, 0, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step in (1, 2) and trainer.global_step != self._last:
            self._last, stages = trainer.global_step, strategy.state.stages
            wanted = [random_placement(self._rng, stages.num_ranks, self._slots) for _ in stages.layers]
            self.moved += strategy.replace_experts(wanted).moved_states
            known = [stack.placement.among(ranks) for stack, ranks in self._known(strategy)]
            assert known == wanted, "every rank knows where the experts of all layers are"

    @staticmethod
    def _known(strategy: ExpertParallelStrategy) -> Any:
        stages = strategy.state.stages
        return zip(stages.stacks(strategy.experts), stages.layers_of(stages.ranks), strict=True)


def moving(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    mover = Mover()
    return train(rank, world_size, callbacks=(mover,), **options) | {"moved": mover.moved}


@pytest.mark.parametrize("strategy", [{}, slow(INTERLEAVED)])
def test_a_user_moves_experts_of_all_stages(strategy: dict[str, Any]) -> None:
    found = in_stages(moving, "skewed", 4, steps=3, strategy=strategy, pooled=True)
    same("skewed", found, steps=3)
    assert [result["moved"] for result in found] == [found[0]["moved"]] * 4
    assert found[0]["moved"] > 12


def refusals(rank: int, world_size: int) -> list[str]:
    from tests.distributed.test_pipeline import Own

    trainer = set_up(rank, world_size, {"slots": 4, "mesh": {"pp": 2}}, Own())
    strategy: Any = trainer.strategy
    good = random_placement(np.random.default_rng(0), 2, 4)
    crowded = Placement(replicas=np.ones((NUM_EXPERTS, 2), dtype=np.int64))
    other = random_placement(np.random.default_rng(rank), 2, 4)
    messages = []
    for placements in ([crowded], [good, good], [other], [random_placement(np.random.default_rng(0), 4, 4)]):
        with pytest.raises(ConfigurationError) as caught:
            strategy.replace_experts(placements)
        messages.append(str(caught.value))
    with pytest.raises(ConfigurationError) as caught:
        LoadBalancer(**EAGER).on_train_start(trainer, strategy.lightning_module)
    return [*messages, str(caught.value)]


def test_what_one_stage_refuses_all_refuse() -> None:
    """The module has one MoE layer, in the first stage."""
    told = run_pooled(4, refusals)
    assert told == [told[0]] * 4
    crowded, two, unlike, foreign, bare = told[0]
    assert "puts 6 experts on rank 0, which keeps 4 slots" in crowded
    assert "2 placements do not fit the 1 MoE layers of the model" in two
    assert "the new placement of ranks [1, 2, 3] differs from that of rank 0" in unlike
    assert "has shape (6, 4), but this run needs (6, 2)" in foreign
    assert "the ranks of stages [1] have no MoE layer" in bare


# ---------------------------------------------------------------------- speeds


@pytest.mark.parametrize("policy", [{"stragglers": "evict"}, {"speeds": [1.0, 1.0]}])
def test_the_ranks_of_a_pipeline_have_no_speeds(policy: dict[str, Any]) -> None:
    is_elastic = "stragglers" in policy
    state, worlds = SimpleNamespace(stages=SimpleNamespace(num_stages=2)), SimpleNamespace(is_elastic=is_elastic)
    world = World.offline(0, 2, torch.device("cpu"))
    strategy: Any = SimpleNamespace(world=world, worlds=worlds, state=state)
    with pytest.raises(ConfigurationError, match="count as equally fast: use stragglers=adapt and speeds=even"):
        SpeedFollower(SpeedPolicy(**policy), strategy, OwnRates())


# ---------------------------------------------------------------------- an error of one rank


class FailsAlone(pl.Callback):
    """Lets the last rank fail in its third step, save, and leave the seconds that this took."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            raise ValueError("an error of the user's")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, error: BaseException) -> None:
        if isinstance(error, ValueError):
            began = time.monotonic()
            trainer.save_checkpoint(self._folder / "never.ckpt")
            (self._folder / "seconds").write_text(str(time.monotonic() - began))


@pytest.mark.slow
def test_a_rank_that_fails_alone_asks_no_other_stage(tmp_path: Path) -> None:
    """Its peer in the other stage waits in the step, and would wait until the time-out."""
    strategy = {"slots": 4, "mesh": {"pp": 2}, "micro_batches": 2, "timeout_s": 60}
    callbacks = [LoadBalancer(**EAGER), FailsAlone(tmp_path)]
    with pytest.raises(RankFailure, match="an error of the user's"):
        run_ranks(4, partial(train_tiny, model=LAYERS, strategy=strategy, callbacks=callbacks, steps=4))
    assert float((tmp_path / "seconds").read_text()) < 30
    assert not (tmp_path / "never.ckpt").exists()


# ---------------------------------------------------------------------- going on from a checkpoint


def saving(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    balancer = LoadBalancer(**EAGER | {"rebalance_every": 2})
    return train_tiny(rank, world_size, callbacks=[balancer], **options)


@pytest.mark.slow
def test_a_balancers_state_is_of_all_stages(tmp_path: Path) -> None:
    path, model = tmp_path / "balanced.ckpt", LAYERS
    strategy = {"slots": 4, "mesh": {"pp": 2}, "micro_batches": 2}
    run_pooled(4, partial(saving, model=model, strategy=strategy, steps=5, save_to=str(path)))
    states = torch.load(path, weights_only=True)["callbacks"]
    (state,) = (state for name, state in states.items() if name.startswith("LoadBalancer"))
    assert sorted(state["layers"]) == ["0", "1", "2", "3"]
    assert all(sum(own["load"]) > 0 for own in state["layers"].values())
    assert {np.shape(own["average"]) for own in state["layers"].values()} == {(NUM_EXPERTS, 2)}
    alone = run_pooled(1, partial(saving, model=model, strategy={}, steps=8, ckpt_path=str(path)))[0]["losses"]
    for ranks, mesh in ((4, strategy), (4, strategy | INTERLEAVED), (2, {"slots": 4})):
        for result in run_pooled(ranks, partial(saving, model=model, strategy=mesh, steps=8, ckpt_path=str(path))):
            np.testing.assert_allclose(result["losses"], alone, rtol=0, atol=0.05)  # auxiliary losses of micro-batches
