"""One rank of moe-bench uneven: trains the same small model while another process takes a share of one rank's core."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.cli.short_training import ModelOptions, gpt, quiet_trainer, random_text
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.strategies import ExpertParallelStrategy

Contender = Literal["plain", "even", "quotas", "slices", "both"]
CONTENDERS: tuple[Contender, ...] = get_args(Contender)
"""Plain expert parallelism; LoadBalancer with even speeds; with measured ones that only tokens follow, or only samples,
or both."""

Scenario = Literal["calm", "half", "0.8", "episode"]
SPEEDS: dict[str, float] = {"calm": 1.0, "half": 0.5, "0.8": 0.8, "episode": 0.5}
"""Of the last rank, as its core is shared."""

_BURNER = Path(__file__).with_name("burner.py")


class Burner(pl.Callback):
    """Takes a share of this rank's core away between two steps."""

    def __init__(self, core: int, share: float, first: int, last: int) -> None:
        self._command = [sys.executable, "-I", str(_BURNER), str(core), str(share)]
        self._first, self._last = first, last
        self._process: subprocess.Popen[bytes] | None = None

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._first:
            self._process = subprocess.Popen(self._command)
        elif trainer.global_step == self._last:
            self._end()

    @override
    def on_train_end(self, *_: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


class SpeedWatch(pl.Callback):
    """Seconds of every step: all of it, and without this rank's exchanges and waits."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.own_s: list[float] = []
        self.samples: list[int] = []
        self._last = (0.0, 0.0)

    @override
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy(trainer).world.exchanges.watch()
        self._last = self._now(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = self._now(trainer)
        step_s, exchanged_s = (after - before for after, before in zip(now, self._last, strict=True))
        self.step_s.append(step_s)
        self.own_s.append(step_s - exchanged_s)
        self.samples.append(_strategy(trainer).steps.stream.num_samples)
        self._last = now

    def _now(self, trainer: pl.Trainer) -> tuple[float, float]:
        return time.perf_counter(), _strategy(trainer).world.exchanges.seconds


class Only(pl.Callback):
    """Lets only tokens or only samples follow what is measured."""

    def __init__(self, balancer: LoadBalancer, contender: str) -> None:
        self._balancer, self._contender = balancer, contender

    @override
    def on_train_start(self, *_: Any) -> None:
        follower = self._balancer.follower
        assert follower is not None
        kept = {"quotas": follower.samples, "slices": follower.experts}.get(self._contender)
        if kept is not None:
            kept.update = lambda readings: False  # type: ignore[method-assign]


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    assert isinstance(trainer.strategy, ExpertParallelStrategy)
    return trainer.strategy


def measure(contender: str, scenario: str, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train under one contender in one scenario; of every rank, its seconds and samples of every step."""
    pl.seed_everything(0, verbose=False)
    strategy, watch = ExpertParallelStrategy(slots=options["slots"]), SpeedWatch()
    callbacks: list[pl.Callback] = [watch]
    if contender != "plain":
        balancer = LoadBalancer(speeds="even" if contender == "even" else "measured", shadows="none")
        callbacks += [balancer, Only(balancer, contender)]
    steps, ranks = options["steps"], len(options["cores"])
    if scenario != "calm" and rank == ranks - 1:
        during = (steps // 4, 5 * steps // 8) if scenario == "episode" else (0, steps)
        # Between two that want all of a core the scheduler halves.
        share = 1.0 if SPEEDS[scenario] == 0.5 else 1 - SPEEDS[scenario]
        callbacks.insert(0, Burner(options["cores"][rank], share, *during))
    trainer = quiet_trainer(strategy, steps=steps, callbacks=callbacks)
    batch = options["batch"] * ranks
    loader = DataLoader(random_text(batch * steps, options["context"]), batch)
    sizes = ModelOptions(**{name: options[name] for name in ("context", "d_model", "d_expert", "layers", "experts")})
    trainer.fit(
        GPTModule(
            gpt(sizes, router=RouterConfig(top_k=2, aux_loss_coef=0.0)), OptimizerConfig(lr=1e-4, warmup_steps=0)
        ),
        loader,
    )
    mine = {"step_s": watch.step_s, "own_s": watch.own_s, "samples": watch.samples}
    found = all_gather_json(mine, strategy.world)
    strategy.world.close()
    return {name: [each[name] for each in found] for name in mine}


def train_all(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every contender in every scenario, in turns. Collective."""
    rank, results = int(os.environ["RANK"]), []
    for index in range(settings["rounds"]):
        for scenario in settings["scenarios"]:
            for contender in settings["contenders"]:  # innermost: goals are ratios between contenders
                found = measure(contender, scenario, rank, settings)
                results.append({"round": index, "scenario": scenario, "contender": contender} | found)
                settled = statistics.median(found["step_s"][0][len(found["step_s"][0]) // 2 :])
                print(f"round {index + 1}, {scenario}, {contender}: {1e3 * settled:.1f} ms a step", flush=True)
    return results
