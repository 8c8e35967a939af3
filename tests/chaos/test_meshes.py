"""Meshes in an elastic run: what a lost rank had comes from other ranks or from snapshots, in the same process and with
the losses of a calm run; ranks that are left over wait until they are a multiple again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging

from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.checkpoint.loader import find_newest
from tests.chaos.elastic_runs import SETTINGS, ElasticRun, Hold, Kill, assert_same_losses, elastic_run, reference
from tests.chaos.elastic_worker import UntilCommitted, checkpoints_of
from tests.chaos.test_min_ranks import wait_for_recovery
from tests.distributed.same_training import SKEWED
from tests.distributed.test_offload import Pretended
from tests.forks import PATIENCE_S
from tests.parameters import slow

STEPS = 10
PLACES = ("forward", "exchange", "backward", "prepare", "update", "committed", "batch_end")
STORED = Hold(step=3, stored=1)
"""Before a fault that takes the only copy of something: agents that come late may not have written it by then."""
SNAPSHOTS: dict[str, Any] = {"saving": {"every_n_steps": 1}}
NOISY = {"dropout": 0.1, "router": {"noisy_top_k": True, "jitter": 0.1}}
LAYERS = {"num_layers": 4, "tie_embeddings": False}
PP2: dict[str, Any] = {"mesh": {"pp": 2}, "micro_batches": 2}
INTERLEAVED: dict[str, Any] = {**PP2, "schedule": "interleaved"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A run that loses ranks, and what becomes of it.

    Attributes:
        ranks: of the first world.
        steps: of the training.
        strategy: options of the strategy.
        kills: a test may change the place of the last.
        holds: where the survivors wait.
        training: what the calm run has, too, as options of `elastic_run`.
        options: what only this one has.
        calm: options of the calm run alone; by default it has one rank.
        returns: killed workers are started again, when the others have made this step; None: they stay away.
        sizes: step -> ranks that made it.
        among: all sizes of worlds.
        loses_steps: steps may be made twice.
        compares: ranks hold parts of the state alike.
        units: names of parts that ranks had, among others.
    """

    ranks: int = 4
    steps: int = STEPS
    strategy: Mapping[str, Any] = field(default_factory=dict)
    kills: Sequence[Kill] = (Kill(worker=1, step=5, place="backward"),)
    holds: Sequence[Hold] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    calm: Mapping[str, Any] = field(default_factory=dict)
    returns: int | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    among: Sequence[int] = ()
    loses_steps: bool = False
    compares: bool = True
    units: Sequence[str] = ()


def assert_survives(folder: Path, fault: Fault, place: str = "", *, balances: bool = False) -> ElasticRun:
    kills = list(fault.kills)
    if place:
        kills[-1] = replace(kills[-1], place=place)
    options = {"strategy": fault.strategy, "kills": kills, "holds": fault.holds, **fault.training, **fault.options}
    if balances:
        options["callbacks"] = balancer
    with elastic_run(folder, workers=fault.ranks, steps=fault.steps, **options) as run:
        run.supervise(restart=() if fault.returns is None else range(fault.ranks), after=fault.returns or 0)
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(fault.steps, **{**fault.training, **fault.calm}))
        sizes = run.world_sizes()
        assert {step: sizes[step] for step in fault.sizes} == fault.sizes
        assert set(sizes.values()) <= set(fault.among or sizes.values())
        assert fault.loses_steps or not any(report["steps_lost"] for report in run.reports())
        assert not fault.compares or run.assert_replicas_equal() > 0
        assert set(fault.units) <= run.units()
        return run


def averaged(folder: Path) -> list[Any]:
    return [EMAWeightAveraging(decay=0.5)]


AVERAGED: dict[str, Any] = {
    "validate": True, "callbacks": averaged, "trainer_options": {"val_check_interval": 2, "num_sanity_val_steps": 0},
}  # fmt: skip


def pretend(folder: Path) -> list[Any]:
    return [Pretended()]


def kill(worker: int, step: int, place: str = "backward") -> Kill:
    return Kill(worker=worker, step=step, place=place)


TP2, CP2, CPTP = {"mesh": {"tp": 2}}, {"mesh": {"cp": 2}}, {"mesh": {"cp": 2, "tp": 2}}
IN_PAIRS = {"dense": "hsdp", "shard_size": 2}
CP: dict[str, Any] = {"kills": [kill(1, 3)], "training": {"validate": True}}
WAITS: dict[str, Any] = {**CP, "holds": [Hold(step=6, ranks=4)], "returns": 6, "sizes": {3: 4, 5: 2, STEPS: 4}}
TWICE: dict[str, Any] = {
    "kills": [kill(0, 3), kill(2, 7, "forward")], "holds": [Hold(step=5, ranks=4), Hold(step=9, ranks=4)], "returns": 5,
}  # fmt: skip
DEALT: dict[str, Any] = {
    "kills": [kill(1, 4)], "holds": [STORED, Hold(step=6, ranks=4)], "options": SNAPSHOTS, "returns": 0,
    "sizes": {STEPS: 4}, "loses_steps": True, "compares": False,
}  # fmt: skip
ALONE: dict[str, Any] = {
    "ranks": 2, "kills": [kill(1, 4)], "holds": [STORED, Hold(step=7, ranks=2)], "options": SNAPSHOTS, "returns": 7,
    "sizes": {3: 2, 6: 1}, "among": (1, 2), "loses_steps": True, "compares": False,
}  # fmt: skip
ONLY_COPY: dict[str, Any] = {**ALONE, "holds": [STORED], "returns": 0, "sizes": {}, "among": (2,)}
ALL_AXES: dict[str, Any] = {
    "ranks": 8, "kills": [kill(6, 3)], "holds": [Hold(step=6, ranks=8)], "returns": 0,
    "training": {"model": NOISY, "validate": True}, "sizes": {2: 8, STEPS: 8}, "among": (4, 8),
}  # fmt: skip
LOST: dict[str, Any] = {
    "strategy": {"dense": "fsdp"}, "holds": [STORED], "loses_steps": True, "compares": False,
}  # fmt: skip
ZERO1: dict[str, Any] = {"ranks": 3, "strategy": {"dense": "zero1"}, "sizes": {STEPS: 2}, "compares": False}
REPLAY = {"recovery": {"optimizer_replay": True, "verify_replay_every": 3}}
COPIES: dict[str, Any] = {**SNAPSHOTS, "stores_late": True, "recovery": {"protection": "arc"}}

FAULTS: dict[str, Fault] = {
    # Sequences in parts: the third rank waits for a fourth.
    "cp": Fault(strategy={**CP2, "replicas": 2}, **WAITS),
    "cp hsdp": Fault(strategy={**CP2, "replicas": 2, "dense": "hsdp"}, **WAITS),
    "cp, no return": Fault(strategy={**CP2, "replicas": 2}, **CP, sizes={STEPS: 2}),
    "cp of four": Fault(
        strategy={"mesh": {"cp": 4}}, **{**CP, "kills": [kill(2, 4)]}, options=SNAPSHOTS, returns=0, among=(4,)
    ),
    # Layers in parts: four ranks in two slices go on as two in one.
    "tp": Fault(
        strategy=TP2, sizes={5: 4, STEPS: 2}, among=(4, 2),
        units=("dense rows 0 of 1 in part 0 of 2", "dense rows 0 of 1 in part 1 of 2"),
    ),
    "tp, twice": Fault(strategy=TP2, **TWICE, sizes={3: 4, 5: 2}),
    "tp, only copy": Fault(strategy=TP2, **ONLY_COPY),
    "tp, noise": Fault(strategy=TP2, kills=[kill(3, 4)], training={"model": NOISY}),
    # Both: three ranks have all of it, and wait.
    "cp tp": Fault(
        strategy=CPTP, kills=[kill(1, 4)], training={"model": NOISY}, returns=0, among=(4,)
    ),
    # One copy in rows of two, for each of two parts of the layers, or the optimizer states of those; three ranks go on
    # as two with a whole row each, or hold whole layers and wait for a fourth.
    "tp fsdp": Fault(
        strategy={**TP2, "dense": "fsdp"}, **DEALT,
        units=("dense rows 1 of 2 in part 0 of 2", "dense rows 1 of 2 in part 1 of 2"),
    ),
    "tp zero1": Fault(strategy={**TP2, "dense": "zero1"}, **DEALT),
    # Eight ranks in two copies of four go on as six in one or three.
    "tp hsdp": Fault(
        ranks=8, strategy={**TP2, "dense": "hsdp"}, kills=[kill(5, 4)], training={"model": NOISY},
        sizes={3: 8, STEPS: 6}, units=("dense rows 1 of 2 in part 1 of 2",),
    ),
    "all but pp": Fault(strategy={**CPTP, "dense": "ddp"}, **ALL_AXES),
    "all but pp, hsdp": Fault(strategy={**CPTP, "dense": "hsdp"}, **ALL_AXES),
    # Dense parameters in two copies of two parts, then one of three, or in one copy.
    "hsdp": Fault(strategy=IN_PAIRS, sizes={STEPS: 3}, units=("dense rows 1 of 2", "dense rows 2 of 3")),
    "hsdp, twice": Fault(strategy=IN_PAIRS, **TWICE, sizes={3: 4, 5: 3}),
    "hsdp whole, twice": Fault(strategy={"dense": "hsdp"}, **TWICE, sizes={3: 4, 5: 3}),
    "fsdp": Fault(**LOST, options={**SNAPSHOTS, "recovery": {"failures": 1, "min_replicas": 3}}, sizes={STEPS: 3}),
    "fsdp, two": Fault(
        **LOST, kills=[kill(1, 5), kill(2, 5, "movement")], sizes={STEPS: 2},
        options={**SNAPSHOTS, "recovery": {"failures": 2, "min_replicas": 3}},
    ),
    "fsdp, alone": Fault(strategy={"dense": "fsdp"}, **ALONE, units=("dense", "dense rows 1 of 2")),
    # Optimizer states of one owner: from a peer that repeats its updates, from copies of its snapshots, from its own.
    "zero1, replay": Fault(**{**ZERO1, "sizes": {8: 2}}, steps=8, options=REPLAY),
    "zero1, copies": Fault(**ZERO1, options=COPIES, loses_steps=True),
    "zero1, alone": Fault(strategy={"dense": "zero1"}, **ALONE),
    **{
        f"zero1 {optimizer.get('name', 'fused')}": Fault(
            ranks=3, strategy=strategy, options=COPIES, training={"optimizer": optimizer}, loses_steps=True,
            calm={"ranks": 3, "strategy": strategy}, sizes={STEPS: 2}, compares=False,
        )
        for optimizer in ({"name": "adafactor", "lr": 0.05}, {"name": "muon"}, {"fused": True})
        for strategy in [{"dense": "zero1", "replicas": 2}]
    },
    # Optimizer states on the host.
    **{
        f"offload {dense} {'-'.join(recovery)}": Fault(
            ranks=4 if dense == "hsdp" else 3, strategy={"dense": dense, "offload_optimizer": True}, compares=False,
            kills=[kill(1, 4)], options={**SNAPSHOTS, "recovery": recovery, "callbacks": pretend}, loses_steps=True,
        )
        for dense, recovery in (
            ("ddp", {}), ("hsdp", {}), ("zero1", REPLAY["recovery"]), ("zero1", {"protection": "arc"}),
        )
    },
    # Averages of weights.
    **{
        f"averages {dense} {returns}": Fault(
            ranks=3, steps=7, strategy={"dense": dense} if dense else {},
            kills=[kill(1, 2, "committed"), kill(2, 4)][: 2 if two else 1],
            holds=[Hold(step=6, ranks=3)] if returns is not None else [], returns=returns, compares=dense != "zero1",
            options={**SNAPSHOTS, "recovery": {"protection": "arc"}} if dense else {}, loses_steps=bool(dense),
            training=AVERAGED,
        )
        for dense, two, returns in (("", True, None), ("", False, 0), ("zero1", True, None), ("fsdp", False, 0))
    },
}  # fmt: skip


class Unfreeze(pl.Callback):
    """Trains the embeddings from step 3 on."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module: Any = pl_module
        configure_model, configure_optimizers = module.configure_model, module.configure_optimizers

        def frozen_model() -> None:
            configure_model()
            self._set(module, trained=False)

        def optimizers_of_all() -> Any:
            self._set(module, trained=True)
            found = configure_optimizers()
            self._set(module, trained=False)
            return found

        module.configure_model, module.configure_optimizers = frozen_model, optimizers_of_all

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            self._set(pl_module, trained=True)

    def _set(self, module: pl.LightningModule, *, trained: bool) -> None:
        for name, parameter in module.named_parameters():
            if "embed" in name:
                parameter.requires_grad_(trained)


def unfreeze(folder: Path) -> list[pl.Callback]:
    return [Unfreeze()]


def test_a_rank_that_joins_a_rollback_trains_what_the_others_train(tmp_path: Path) -> None:
    """It waits since step 2 until there are enough for a multiple, and joins when the only copy of moments is lost."""
    kills = [Kill(worker=-1, step=step, place="backward", rank=rank) for step, rank in ((2, 3), (5, 1))]
    strategy = {"dense": "zero1", "mesh": {"cp": 2}}
    fault = Fault(
        steps=7, strategy=strategy, kills=kills, training={"callbacks": unfreeze},
        holds=[Hold(step=step, stored=step - 1) for step in range(2, 6)],  # a writer that is slow passes over some
        options=SNAPSHOTS, sizes={7: 2}, loses_steps=True, compares=False,
    )  # fmt: skip
    run = assert_survives(tmp_path, fault)
    last = run.reports()[-1]
    assert (last["ranks_before"], last["ranks_after"]) == (2, 2)
    assert "arenas" in last["restored"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        slow("cp hsdp", "backward"), slow("tp fsdp", "update"),
        slow("fsdp, two", "movement"), ("zero1, replay", "backward"), slow("zero1, copies", "prepare"),
        ("averages  None", "validation"),
        *[slow("cp", place) for place in ("sequence exchange", "prepare")],
        *[slow("cp hsdp", place) for place in ("update", "sequence exchange")],
        *[slow("fsdp", place) for place in ("backward", "batch_end")],
        *[slow("zero1, replay", place) for place in ("forward", "batch_end")],
        *[slow("averages  None", place) for place in ("batch_end", "prepare")],
        *[slow("averages zero1 None", place) for place in ("validation", "prepare")],
        slow("averages fsdp 0", "validation"), slow("averages  0", "committed"),
        *[slow("tp", place) for place in PLACES[:-1]],
        *[slow("hsdp", place) for place in PLACES],
        *[slow("tp fsdp", place) for place in PLACES[:-1] if place != "update"],
        *[slow(name, place) for name in ("cp tp", "tp zero1", "tp hsdp") for place in PLACES[:-1]],
        *[slow(name, place) for name in FAULTS if name.startswith("offload") for place in ("backward", "prepare")],
        *[
            slow(name, "")
            for name in (
                "cp, no return", "cp of four", "tp, twice", "tp, only copy", "tp, noise", "all but pp",
                "all but pp, hsdp", "hsdp, twice", "hsdp whole, twice", "fsdp, alone", "zero1, alone",
                "zero1 adafactor", "zero1 muon", "zero1 fused",
            )
        ],
    ],
)  # fmt: skip
def test_losses_are_those_of_a_calm_run(tmp_path: Path, name: str, place: str) -> None:
    assert_survives(tmp_path, FAULTS[name], place)


# ---------------------------------------------------------------------- pipelines


def lose(rank: int, place: str, step: int = 4, **options: Any) -> Kill:
    """Kill who had a rank in the first world."""
    return Kill(worker=-1, rank=rank, step=step, place=place, **options)


def staged(*kills: Kill, strategy: Mapping[str, Any] = PP2, model: Mapping[str, Any] = LAYERS, **more: Any) -> Fault:
    """Two stages; the calm run has one rank for each."""
    training = {"model": model, **more.pop("training", {})}
    return Fault(strategy=strategy, kills=kills, training=training, calm={"ranks": 2, "strategy": PP2}, **more)


BACK = {"holds": [Hold(step=6, ranks=4)], "returns": 6, "sizes": {4: 4, 5: 2, STEPS: 4}}
STORES: dict[str, Any] = {"options": SNAPSHOTS, "loses_steps": True, "compares": False}
NO_STAGE: dict[str, Any] = {
    **STORES, "options": {**SNAPSHOTS, "recovery": {"failures": 2, "min_replicas": 1}}, "sizes": {STEPS: 2},
}  # fmt: skip
OF_AVERAGES: dict[str, Any] = {"model": {**LAYERS, "router": {"bias_update_rate": 0.01}}, "training": AVERAGED}
"""Averages of weights, and of buffers in blocks that change."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            staged(
                lose(2, "exchange", step=2), steps=6, holds=[Hold(step=4, ranks=4)], returns=4, sizes={2: 4, 3: 2, 6: 4}
            ),
            id="another rank takes the stage of a lost one",
        ),
        slow(staged(lose(1, "backward"), ranks=2, **STORES, returns=0, among=(2,)), id="the only stage"),
        slow(
            staged(lose(2, "validation"), **BACK, training={**AVERAGED, "callbacks": None}),
            id="blocks that come in a validation are trained after it",
        ),
        slow(staged(lose(2, "validation"), **BACK, **OF_AVERAGES), id="averages of a lost stage"),
        *[
            slow(
                staged(
                    lose(2, place), strategy=strategy, among=(4, 2), **OF_AVERAGES,
                    **{**BACK, "sizes": {4: 4, STEPS: 4}},
                ),
                id=f"averages of a lost stage-{place}-{strategy.get('schedule')}",
            )
            for strategy in (PP2, INTERLEAVED) for place in ("backward", "prepare", "update", "committed")
        ],
        slow(
            staged(lose(1, "backward"), ranks=2, **STORES, returns=0, among=(2,), **OF_AVERAGES),
            id="averages of the only stage",
        ),
        slow(staged(lose(1, "backward"), ranks=5, sizes={1: 4}), id="one rank more than stages waits"),
        *[
            slow(
                staged(
                    lose(rank, place, visit=3 if place == "exchange" else 1), strategy=strategy, among=(4, 2),
                    training={"validate": True}, sizes={4: 4, STEPS: 2},
                ),
                id=f"any rank may be lost anywhere-{place}-{rank}-{strategy.get('schedule')}",
            )
            for strategy in (PP2, INTERLEAVED) for rank in range(4) for place in PLACES
        ],
        *[
            slow(
                staged(lose(2, "backward"), lose(5, second), strategy=strategy, ranks=6, sizes={STEPS: 4}),
                id=f"another while the state is transferred-{second}-{strategy.get('schedule')}",
            )
            for strategy in (PP2, INTERLEAVED) for second in ("recovery", "movement")
        ],
        *[
            slow(
                staged(lose(0, "forward" if place == "movement" else place), lose(1, place), strategy=s, **NO_STAGE),
                id=f"all ranks of a stage-{place}-{s.get('schedule')}",
            )
            for s in (PP2, INTERLEAVED) for place in ("forward", "batch_end", "movement")
        ],
    ],
)  # fmt: skip
def test_stages_are_taken_over(tmp_path: Path, fault: Fault) -> None:
    assert_survives(tmp_path, fault)


BESIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (4, {}),
    "none6": (6, {}),
    "zero1": (4, {"dense": "zero1"}),
    "fsdp": (4, {"dense": "fsdp"}),
    "hsdp": (8, {"dense": "hsdp"}),
    "cp": (8, {"mesh": {"cp": 2}}),
    "tp": (8, {"mesh": {"tp": 2}}),
    "cp4": (4, {"mesh": {"cp": 2}}),
    "tp4": (4, {"mesh": {"tp": 2}}),
    "tp_zero1": (8, {"mesh": {"tp": 2}, "dense": "zero1"}),
    "tp_fsdp": (8, {"mesh": {"tp": 2}, "dense": "fsdp"}),
    "cp_tp": (8, {"mesh": {"cp": 2, "tp": 2}}),
}
"""Ranks in two stages, and what is beside them."""
COPIED = ("none6", "hsdp", "cp", "tp", "cp4")
"""Settings under which others have what one rank had."""


def beside(
    name: str, *kills: Kill, copied: bool | None = None, extra: Mapping[str, Any] | None = None, **more: Any
) -> Fault:
    """Ranks of stages beside other axes are lost and come again; what nobody else had comes from snapshots."""
    ranks, strategy = BESIDE[name]
    strategy = {**strategy, "mesh": {"pp": 2, **strategy.get("mesh", {})}, "micro_batches": 2, **(extra or {})}
    is_copied = name in COPIED if copied is None else copied
    return staged(
        *kills, strategy=strategy, ranks=ranks, returns=0, loses_steps=not is_copied, sizes={STEPS: ranks},
        holds=[*([] if is_copied else [STORED]), *(Hold(step=kill.step + 2, ranks=ranks) for kill in kills)],
        compares="zero1" not in name, **{"options": {} if is_copied else SNAPSHOTS, **more},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *[slow(name, place) for name in BESIDE for place in PLACES[:-1] if name not in ("none", "none6", "cp_tp")],
    ],
)
def test_stages_beside_other_axes(tmp_path: Path, name: str, place: str) -> None:
    assert_survives(tmp_path, beside(name, lose(1, place)))


# ---------------------------------------------------------------------- experts that have moved


def balancer(folder: Path) -> list[LoadBalancer]:
    fixed: dict[str, Any] = {"calibrate": False, "flops_per_s": 1e6, "bytes_per_s": 1e12, "speeds": "even"}
    return [LoadBalancer(**fixed, rebalance_every=2)]


def moved(run: ElasticRun, worker: int) -> bool:
    """Whether a worker had other experts than at first in the first world."""
    found = [json.loads(line) for line in (run.folder / f"states-{worker}.jsonl").read_text().splitlines()]
    first = [line for line in found if line["world"] == found[0]["world"]]
    held = [{unit for unit in line["digests"] if "experts" in unit} for line in first]
    return any(units != held[0] for units in held)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "kills", "balances"),
    [
        *[(name, "1f1b", 1, True) for name in ("none", "none6", "zero1", "fsdp", "tp4", "hsdp", "tp", "cp")],
        *[(name, "interleaved", 1, True) for name in ("none", "none6", "zero1", "hsdp")],
        *[(name, "interleaved", 1, False) for name in ("fsdp", "tp4", "cp4")],
        *[("zero1", "1f1b", 2, True), ("fsdp", "1f1b", 2, False), ("hsdp", "1f1b", 2, True)],
        ("cp_tp", "1f1b", 1, False),  # seven ranks, for which a micro-batch has no samples, wait for the eighth
        ("cp_tp", "1f1b", 2, True),
    ],
)
def test_survivors_know_where_experts_of_all_stages_are(
    tmp_path: Path, name: str, schedule: str, kills: int, balances: bool
) -> None:
    """Those that come back balance on."""
    faults = [lose(1, "exchange", step=3), lose(0, "backward", step=5)] if kills == 2 else [lose(2, "exchange")]
    is_copied = name in ("none6", "hsdp", "cp", "tp") and kills == 1
    options = {} if is_copied else {**SNAPSHOTS, "recovery": {"min_replicas": 1}}
    extra = {"slots": 6, "schedule": schedule}
    fault = beside(name, *faults, copied=is_copied, extra=extra, model={**LAYERS, **SKEWED}, options=options)
    run = assert_survives(
        tmp_path, replace(fault, compares=fault.compares and (balances or is_copied)), balances=balances
    )
    assert not balances or any(moved(run, worker) for worker in range(fault.ranks))


@pytest.mark.slow
def test_a_balancer_goes_on_with_ranks_of_less_room(tmp_path: Path) -> None:
    """Nobody set slots: the one that was left made room for all experts, which the one that comes has not."""
    options: dict[str, Any] = {"model": SKEWED, "callbacks": balancer, **SNAPSHOTS, "recovery": {"min_replicas": 1}}
    options |= {"holds": [Hold(step=6, ranks=2)], "kills": [lose(1, "exchange")]}
    with elastic_run(tmp_path, workers=2, steps=12, **options) as run:
        run.supervise(restart=range(2))
        assert run.kills_done() == 1
        assert run.world_sizes()[12] == 2


@pytest.mark.slow
def test_hooks_that_a_fault_has_left_find_no_plans_of_other_layers(tmp_path: Path) -> None:
    """Three ranks of the first stage and one of the second are lost: a rank of the second goes to the first, which has
    another number of layers, with a hook that could not end.
    """
    options: dict[str, Any] = {"model": {**LAYERS, "num_layers": 3}, "callbacks": balancer}
    options |= {"strategy": {**PP2, "slots": 6}, "recovery": {"min_replicas": 4}}
    kills = [Kill(worker=0, rank=rank, step=4, place="batch_end") for rank in (0, 1, 2, 7)]
    with elastic_run(tmp_path, workers=8, steps=8, kills=kills, **options) as run:
        run.supervise()
        assert run.kills_done() == 4
        assert run.world_sizes()[8] == 4


# ---------------------------------------------------------------------- ranks that wait, leave and come again


def test_one_of_two_holds_the_state_until_another_comes(tmp_path: Path) -> None:
    kills, strategy = [kill(1, 4, "sequence exchange")], {**CP2, "replicas": 2}
    with elastic_run(tmp_path, workers=2, steps=8, kills=kills, strategy=strategy, validate=True) as run:
        wait_for_recovery(run, 0, ranks=1)
        assert max(run.losses()) == 4, "alone it does not train"
        run.start(1)
        run.supervise()
        assert_same_losses(run, reference(8, validate=True))
        assert set(run.world_sizes().values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "place", "training", "calm"),
    [
        ({**CP2, "replicas": 2}, "sequence exchange", {"validate": True}, {}),
        (TP2, "exchange", {}, {}),
        (PP2, "exchange", {"model": LAYERS}, {"ranks": 2, "strategy": PP2}),
    ],
)
def test_a_stopped_rank_is_one_that_waits(
    tmp_path: Path, strategy: dict[str, Any], place: str, training: dict[str, Any], calm: dict[str, Any]
) -> None:
    """Its peers go on within the silence timeout; continued, it makes a multiple with the third."""
    options = {"kills": [replace(kill(1, 4, place), signal=signal.SIGSTOP)], "holds": [Hold(step=7, ranks=4)]}
    with elastic_run(tmp_path, workers=4, steps=STEPS, strategy=strategy, **options, **training) as run:
        wait_for_recovery(run, 0, ranks=2)
        run.wait_for_step(7)
        run.signal(1, signal.SIGCONT)
        run.supervise()
        assert_same_losses(run, reference(STEPS, **training, **calm))
        assert [run.world_sizes()[step] for step in (4, 6, STEPS)] == [4, 2, 4]
        assert not any(report["steps_lost"] for report in run.reports())
        assert run.assert_replicas_equal() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "place", "victims", "training", "calm"),
    [
        ({**CP2, "replicas": 2}, "sequence exchange", (1, 1, 1), {"validate": True}, {}),
        *[
            (strategy, "exchange", (0, 1, 2), {"model": LAYERS}, {"ranks": 2, "strategy": PP2})
            for strategy in (PP2, INTERLEAVED)
        ],
    ],
)
def test_nothing_is_left_of_former_worlds(
    tmp_path: Path, strategy: Any, place: str, victims: Sequence[int], training: Any, calm: Any
) -> None:
    kills = [kill(worker, 2 + 2 * index, place) for index, worker in enumerate(victims)]
    holds = [Hold(step=step, ranks=4) for step in (2, 4, 6, 8)]
    with elastic_run(tmp_path, workers=4, steps=STEPS, kills=kills, holds=holds, strategy=strategy, **training) as run:
        run.supervise(restart=range(4))
        assert run.kills_done() == 3
        assert_same_losses(run, reference(STEPS, **training, **calm), has_replicas=True)
        full = [line["open"] for line in run.recoveries(3) if line["report"]["ranks_after"] == 4]
        assert len(full) >= 2
        grown = {kind: count for kind, count in full[-1].items() if count > full[0].get(kind, 0)}
        assert not grown, grown


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "dense"), [(3, "ddp"), (4, "ddp"), (4, "zero1"), (4, "fsdp")])
def test_a_rank_that_is_told_to_leave_hands_its_stage_over(tmp_path: Path, workers: int, dense: str) -> None:
    """Nothing was saved, and nothing is lost; of three ranks one waits already, and comes in for who leaves."""
    options: dict[str, Any] = {"kills": [lose(1, "forward", signal=signal.SIGTERM)], "recovery": {"min_replicas": 1}}
    options |= {"settings": replace(SETTINGS, notice_on_sigterm=True), "strategy": {**PP2, "dense": dense}}
    with elastic_run(tmp_path, workers=workers, steps=STEPS, model=LAYERS, **options) as run:
        for process in run.processes.values():
            process.join(PATIENCE_S)
        assert run.words().count("SIGTERM asks this process to leave") == 1
        assert sorted(process.exitcode or 0 for process in run.processes.values()) == [0] * (workers - 1) + [1]
        assert_same_losses(run, reference(STEPS, model=LAYERS, ranks=2, strategy=PP2))
        assert run.world_sizes()[STEPS] == 2


def last_step_committed(folder: Path) -> list[Any]:
    return [UntilCommitted(8)]


@pytest.mark.slow
def test_one_rank_that_is_left_validates_saves_and_ends(tmp_path: Path) -> None:
    """The end of a run needs no pipeline: the rank that is left restores the last step, as it is saved by then. Else
    that step needs two ranks again.
    """
    options: dict[str, Any] = {
        "strategy": PP2, "model": LAYERS, "validate": True, "callbacks": last_step_committed, **SNAPSHOTS,
    }  # fmt: skip
    with elastic_run(tmp_path, workers=2, steps=8, kills=[lose(1, "validation", step=8)], **options) as run:
        run.supervise()
        assert run.kills_done() == 1
        assert_same_losses(run, reference(8, model=LAYERS, ranks=2, strategy=PP2, validate=True))
        found = find_newest(checkpoints_of(tmp_path)).checkpoint
        assert found.step == 8
        found.verify()
